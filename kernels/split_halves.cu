/*---
summary = "op(A) and op(B) as hi and lo in fp16, packed, and what they allow"
entry   = "split_halves"
role    = "halves"
# CLUSTER  blocks that share the k of 16 rows of A, or columns of B, and each other's memory
params  = [{CLUSTER = 1}, {CLUSTER = 2}, {CLUSTER = 4}, {CLUSTER = 8}]
block   = ["256", "1", "1"]
grid    = ["CLUSTER * (ceil(m / 16) + ceil(n / 16))", "1", "1"]
cluster = "CLUSTER"
early   = true
require = ["CLUSTER <= 8"]
dtypes  = ["float16"]
arch    = ">=80"
source  = "this project: docs/tensor-cores.md"
---*/

// A cluster has ROWS rows of op(A), or columns of op(B) (a "row" below), over all of k, and reads
// them twice, the second time from caches: to find their largest magnitudes, and to split and count
// them.
//
//   find_extremes   the largest and the smallest magnitude of each row
//   split_four      2^exponent (hi + lo), and how many elements are large, or cut short
//   tally           what the cluster's rows allow joins what the others' do, in the state: by it
//                   the product behind decides, or, where one operand is split alone (m or n is 0),
//                   split_decide.cu
//
// Blocks of a cluster have a part of k each. What they find of a row they write into each other's
// shared memory, since a block that has to read it there waits for the answer.
#include "clusters.cuh"
#include "early_launch.cuh"
#include "split_rows.cuh"

typedef unsigned short Half;

// Elements of a row that are large, and that are cut short.
struct Counts {
    unsigned large, cut;
};

// What the blocks of a cluster, by their rank, find of its rows in their parts of k. Counts are for
// the first block alone.
struct Shared {
    Tile<unsigned> tile;
    Extremes extremes[SHARES][ROWS];
    Counts counts[SHARES][ROWS];
    bool hopeless;
};

// An operand's parts, [rows][2][pitch], and the exponents of its rows in the fp16 split and, so
// many further on, in the TF32 split.
struct Operand {
    Half* parts;
    int* exponent;
    int to_tf32;
};

// Merges the extremes of the thread's rows from its warp and the blocks of the cluster, which have
// all arrived once. `smallest` is 1 less before, so that zero is the largest there is.
__device__ inline void find_extremes(Extremes (&mine)[MINE], int rank, Shared& shared) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < MINE; ++i) {
        for (int lanes = 1; lanes < 32; lanes *= 2)
            mine[i] = merge(mine[i], {__shfl_xor_sync(~0u, mine[i].largest, lanes),
                                      __shfl_xor_sync(~0u, mine[i].smallest, lanes)});
    }
    cluster_wait();  // all blocks have begun
    if (lane < SHARES) {
#pragma unroll
        for (int i = 0; i < MINE; ++i)
            *shared_of(&shared.extremes[rank][warp + WARPS * i], lane) = mine[i];
    }
    cluster_arrive();
    cluster_wait();
#pragma unroll
    for (int i = 0; i < MINE; ++i) {
#pragma unroll
        for (int from = 0; from < SHARES; ++from)
            mine[i] = merge(mine[i], shared.extremes[from][warp + WARPS * i]);
        if (mine[i].smallest != ~0u) ++mine[i].smallest;
    }
}

// What a thread has seen of a row: its largest magnitude, and twice its smallest that is not zero,
// less 1: then zero is the largest there is.
struct Seen {
    float largest = 0;
    unsigned twice_smallest = ~0u;

    __device__ __forceinline__ void take(unsigned bits) {
        largest = larger(largest, as_float(bits));
        twice_smallest = min(twice_smallest, bits + bits - 1);
    }
    // As `Extremes`, with 1 less than the smallest.
    __device__ __forceinline__ Extremes extremes() const {
        return {as_bits(largest), twice_smallest == ~0u ? ~0u : twice_smallest >> 1};
    }
    // The larger of x and |y|, or NaN.
    __device__ static __forceinline__ float larger(float x, float y) {
#ifdef HYBRID_GEMM_EMULATOR
        return as_float(max(as_bits(x), as_bits(y) & 0x7fffffff));
#else
        asm("{ .reg .f32 a; abs.f32 a, %1; max.NaN.f32 %0, %0, a; }" : "+f"(x) : "f"(y));
        return x;
#endif
    }
};

// Two numbers as fp16, the first in the lower half.
__device__ __forceinline__ unsigned halves(float first, float second) {
#ifdef HYBRID_GEMM_EMULATOR
    return to_half(first) | (unsigned)to_half(second) << 16;
#else
    unsigned pair;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
    return pair;
#endif
}

// From which magnitude on elements of a row are within 2^-7 of its largest; and twice that from
// which on they are not cut short, less 1.
struct Bounds {
    float large;
    unsigned twice_whole;
};

// Splits elements k to k + 3 of a row, and writes hi and, `apart` further on, lo, where there are
// any. Counts those that are large, and those that are cut short.
__device__ __forceinline__ void split_four(const Four<unsigned>& four, float scale, Bounds bounds,
                                           Half* to, long long apart, bool real,
                                           unsigned (&count)[2]) {
    struct alignas(8) Pairs {
        unsigned x[2];
    } hi, lo;
#pragma unroll
    for (int x = 0; x < 2; ++x) {
        const float first = as_float(four.x[2 * x]) * scale;
        const float second = as_float(four.x[2 * x + 1]) * scale;
        hi.x[x] = halves(first, second);
        lo.x[x] = halves(first - from_half((Half)hi.x[x]), second - from_half(hi.x[x] >> 16));
    }
#pragma unroll
    for (int x = 0; x < 4; ++x) {
        const unsigned bits = four.x[x];
        count[0] += as_float(bits & 0x7fffffff) >= bounds.large;
        count[1] += bits + bits - 1 < bounds.twice_whole;
    }
    if (!real) return;
    *(Pairs*)to = hi;
    *(Pairs*)(to + apart) = lo;
}

// Adds up what the cluster's blocks counted of its rows, and has the state keep the worst of it;
// called by the first warp of the cluster's first block.
__device__ inline void tally(int rows, int k, bool of_b, State* state, const Shared& shared) {
    const int lane = threadIdx.x;
    unsigned worst[5] = {};
    Extremes of_row = {0, ~0u};
    if (lane < rows) {
#pragma unroll
        for (int from = 0; from < SHARES; ++from)
            of_row = merge(of_row, shared.extremes[from][lane]);
    }
    if (of_row.largest) {
        unsigned large = 0, cut = 0;
#pragma unroll
        for (int from = 0; from < SHARES; ++from) {
            large += shared.counts[from][lane].large;
            cut += shared.counts[from][lane].cut;
        }
        const int top = exponent_of(of_row.largest);
        worst[HIGHEST] = BIAS + top;
        worst[LOWEST] = BIAS - top;
        worst[RANGE] = top - exponent_of(of_row.smallest + 1);
        worst[SMALL] = k - large;
        worst[CUT] = cut;
        if (8ll * cut > k) state->hopeless = 1;
    }
#pragma unroll
    for (int i = 0; i < 5; ++i) {
        for (int lanes = 1; lanes < ROWS; lanes *= 2)
            worst[i] = max(worst[i], __shfl_xor_sync(~0u, worst[i], lanes));
        if (lane == 0 && worst[i]) atomicMax(&state->worst[of_b][i], worst[i]);
    }
}

template <bool ALONG>
__device__ inline void split_rows(const Source<unsigned, ALONG>& source, int row0,
                                  const Operand& operand, bool of_b, State* state, Shared& shared) {
    const int rank = blockIdx.x % CLUSTER, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int steps = (source.k + STEP - 1) / STEP, each = (steps + SHARES - 1) / SHARES;
    const int first = min(steps, rank * each) * STEP, end = min(steps, (rank + 1) * each) * STEP;
    const int pitch = pitch_of(source.k), rows = min(ROWS, source.rows - row0);
    if (threadIdx.x == 0) shared.hopeless = *(volatile unsigned*)&state->hopeless;
    Seen seen[MINE];
    Fours<unsigned> tile;  // the last one stays in registers
    for (int k0 = first; k0 < end; k0 += STEP) {
        tile = fours_at(source, row0, k0, shared.tile);
        tile.each(k0, [&](int i, int, const Four<unsigned>& four) {
#pragma unroll
            for (int x = 0; x < 4; ++x) seen[i].take(four.x[x]);
        });
    }
    Extremes mine[MINE];
#pragma unroll
    for (int i = 0; i < MINE; ++i) mine[i] = seen[i].extremes();
    find_extremes(mine, rank, shared);

    float scale[MINE];
    Bounds bounds[MINE];
    unsigned counts[MINE][2] = {};
#pragma unroll
    for (int i = 0; i < MINE; ++i) {
        const unsigned largest = mine[i].largest;
        const int top = exponent_of(largest), row = row0 + warp + WARPS * i;
        scale[i] = power_of_two(max(-126, min(127, TOP_FP16 - top)));
        bounds[i] = {as_float((unsigned)max(1, top - 6 + 127) << 23),
                     ((unsigned)max(0, top - 17 + 127) << 24) - 1};
        if (rank == 0 && lane == 0 && row < source.rows) {
            operand.exponent[row] = largest ? top - TOP_FP16 : 0;
            operand.exponent[operand.to_tf32 + row] = largest ? top - TOP_TF32 : 0;
        }
    }
    if (!shared.hopeless) {
        for (int k0 = end - STEP; k0 >= first; k0 -= STEP) {  // from it on
            if (k0 != end - STEP) tile = fours_at(source, row0, k0, shared.tile);
            tile.each(k0, [&](int i, int k, const Four<unsigned>& four) {
                const int row = warp + WARPS * i;
                Half* const to = operand.parts + (long long)(row0 + row) * 2 * pitch + k;
                split_four(four, scale[i], bounds[i], to, pitch, row < rows && k < pitch,
                           counts[i]);
            });
        }
    }
#pragma unroll
    for (int i = 0; i < MINE; ++i) {
#pragma unroll
        for (int x = 0; x < 2; ++x) {
            for (int lanes = 1; lanes < 32; lanes *= 2)
                counts[i][x] += __shfl_xor_sync(~0u, counts[i][x], lanes);
        }
        const Counts mine = {counts[i][0], counts[i][1]};
        if (lane == 0) *shared_of(&shared.counts[rank][warp + WARPS * i], 0) = mine;
    }
    cluster_arrive();  // the other blocks may end: nobody reaches for their memory
    if (rank) return;
    cluster_wait();
    if (warp == 0) tally(rows, source.k, of_b, state, shared);
}

extern "C" __global__ void __launch_bounds__(256, 4) CLUSTER_DIMS
    split_halves(int m, int n, int k, const void* A, long long lda, const void* B, long long ldb,
                 void* parts_a, void* parts_b, int* exponent, int to_tf32, int least_k_tf32,
                 int* memory) {
    __shared__ Shared shared;
    if (SHARES == 1 && blockIdx.x % CLUSTER) return;
    cluster_arrive();
    wait_for_launch_before();
    State* const state = (State*)memory;
    if (blockIdx.x == 0 && threadIdx.x == 0) {
        state->k = k, state->least_k_tf32 = least_k_tf32;
        state->verdict = UNDECIDED;
    }
    const int group = blockIdx.x / CLUSTER, groups_a = (m + ROWS - 1) / ROWS;
    if (group < groups_a) {
        const Source<unsigned, !TRANS_A> source = {(const unsigned*)A, lda, m, k};
        const Operand a = {(Half*)parts_a, exponent, to_tf32};
        split_rows(source, group * ROWS, a, false, state, shared);
    } else {
        const Source<unsigned, TRANS_B> source = {(const unsigned*)B, ldb, n, k};
        const Operand b = {(Half*)parts_b, exponent + m, to_tf32};
        split_rows(source, (group - groups_a) * ROWS, b, true, state, shared);
    }
}
