/*---
summary = "op(A) and op(B) packed for the tensor cores: rows along k, padded with zeros, in one part or as hi and lo"
entry   = "split_pack"
role    = "pack"
# PARTS  2: float32 becomes hi and lo; 1: it is rounded to TF32, and 16 bits are copied as they are
params  = [{PARTS = 2}, {PARTS = 1}]
block   = ["256", "1", "1"]
grid    = ["ceil(m / 64) + ceil(n / 64)", "max(1, ceil(k / 512))", "1"]
require = ["PARTS <= 2"]
dtypes  = ["float16", "tfloat32"]
source  = "this project: docs/tensor-cores.md"
---*/
#include "split.cuh"

// PARTS = 1: float32 is rounded to TF32, and operands of 16 bits are copied as they are. PARTS = 2:
// an operand of float32 becomes 2^exponent (hi + lo): of each row first hi, and then lo. The fp16
// form then decides, too, how the product is made: its last block to finish writes the verdict.
// Where one operand is packed alone (m or n is 0), it writes what that one allows, and
// split_decide.cu decides. The TF32 form runs only where the verdict asks for it.
//
//   pack         a block's ROWS rows by SLICE of k: find_scales, then for each STEP of k
//                load_tile, write_tile, and at the end add_tally
//   summarize    what the rows of an operand allow, by the last block
//   decide       the verdict (split.cuh)
constexpr bool HALF = SIZE == 2;
constexpr int SLICE = 512;  // of k, a block

template <bool TWO_BYTES>
struct Bits {
    typedef unsigned Type;
};
template <>
struct Bits<true> {
    typedef unsigned short Type;
};
typedef Bits<HALF && PARTS == 1>::Type In;
typedef Bits<HALF>::Type Out;

struct alignas(16) Chunk {
    Out x[16 / sizeof(Out)];
};

struct Operand {
    Out* parts;               // [rows][PARTS][pitch]
    int* exponent;            // of each row
    const Extremes* partial;  // [partials][stride]
    int partials, stride;
    Extremes* extremes;         // of each row, whole
    unsigned long long* tally;  // of each row: large elements, and 2^32 times those cut short
};

// 2^exponent * (hi + lo) = the row's element, but for what the two cannot hold.
__device__ inline void split(float x, Out& hi, Out& lo) {
    if (HALF) {
        hi = to_half(x);
        lo = to_half(x - from_half(hi));
    } else {
        hi = to_tf32(x);
        lo = to_tf32(x - as_float(hi));
    }
}

struct Shared {
    In tile[ROWS][STEP + 1];
    Extremes merged[4][ROWS];
    Summary summaries[256];
    bool last, hopeless;
};

// What a thread packs: EACH neighbours along k of MINE rows, `half` and half + 32.
constexpr int EACH = 8, ACROSS = STEP / EACH, MINE = 2;

// The powers of two that bring a thread's rows into range, and magnitudes from which their elements
// count as large, and are not cut short.
struct Scales {
    float scale[MINE];
    unsigned large[MINE], whole[MINE];
};

// Finds the rows' largest magnitudes in the parts of k, and from them the scales; the blocks at the
// first slice write exponents too, and in the fp16 form the whole rows' extremes.
__device__ inline void find_scales(Scales& scales, int rows, int row0, int half,
                                   const Operand& operand, State* state, Shared& shared) {
    auto& merged = shared.merged;
    const int t = threadIdx.x;
    Extremes all = {0, ~0u};
    const int row = row0 + t % ROWS;
    for (int x = t / ROWS; x < operand.partials && row < rows; x += 4)
        all = merge(all, operand.partial[(long long)x * operand.stride + row]);
    merged[t / ROWS][t % ROWS] = all;
    if (HALF && t == 0) shared.hopeless = *(volatile unsigned*)&state->hopeless;
    __syncthreads();
    if (t < ROWS && row < rows && blockIdx.y == 0) {
        for (int x = 1; x < 4; ++x) all = merge(all, merged[x][t]);
        if (HALF) operand.extremes[row] = all;
        operand.exponent[row] =
            all.largest ? exponent_of(all.largest) - (HALF ? TOP_FP16 : TOP_TF32) : 0;
    }
#pragma unroll
    for (int i = 0; i < MINE; ++i) {
        unsigned largest = 0;
        for (int x = 0; x < 4; ++x) largest = max(largest, merged[x][half + 32 * i].largest);
        const int top = exponent_of(largest), shift = (HALF ? TOP_FP16 : TOP_TF32) - top;
        scales.scale[i] = power_of_two(max(-126, min(127, shift)));
        scales.large[i] = (unsigned)max(1, top - 6 + 127) << 23;
        scales.whole[i] = (unsigned)max(0, top - 17 + 127) << 23;
    }
}

// Reads the tile of ROWS rows by STEP of k at (row0, k0) to shared memory, with k along its rows.
// `again`: the tile holds numbers that threads may still read.
template <bool ALONG>
__device__ inline void load_tile(In (&tile)[ROWS][STEP + 1], const Source<In, ALONG>& source,
                                 int row0, int k0, bool vectors, bool again) {
    const int t = threadIdx.x, p = t % 16 * 4, line = t / 16;
    Four<In> four[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        four[i] = ALONG ? source.four(row0 + line + 16 * i, k0 + p, vectors)
                        : source.four(k0 + line + 16 * i, row0 + p, vectors);
    }
    if (again) __syncthreads();
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int x = 0; x < 4; ++x) {
            if (ALONG)
                tile[line + 16 * i][p + x] = four[i].x[x];
            else
                tile[p + x][line + 16 * i] = four[i].x[x];
        }
    }
    __syncthreads();
}

// Splits or rounds a thread's elements of a tile, and writes them to where they are packed. Adds to
// seen[i] the large elements of a row, and 2^16 times those cut short: 512 at most of each.
__device__ inline void write_tile(const In (&tile)[ROWS][STEP + 1], unsigned (&seen)[MINE],
                                  const Scales& scales, Out* parts, int rows, int row0, int pitch,
                                  int k0, int half, int at) {
#pragma unroll
    for (int i = 0; i < MINE; ++i) {
        const int row = half + 32 * i;
        constexpr int CHUNKS = EACH * sizeof(Out) / 16, LENGTH = 16 / sizeof(Out);
        Chunk hi[CHUNKS], lo[CHUNKS];
#pragma unroll
        for (int x = 0; x < EACH; ++x) {
            const In bits = tile[row][at + x];
            Out& high = hi[x / LENGTH].x[x % LENGTH];
            if (PARTS == 1) {
                high = HALF ? (Out)bits : (Out)to_tf32(as_float(bits));
                continue;
            }
            split(as_float(bits) * scales.scale[i], high, lo[x / LENGTH].x[x % LENGTH]);
            const unsigned magnitude = bits & 0x7fffffff;
            if (HALF && magnitude >= scales.large[i]) ++seen[i];
            if (HALF && magnitude - 1 < scales.whole[i] - 1) seen[i] += 1 << 16;
        }
        if (row0 + row >= rows) continue;
        Out* const to = parts + (long long)(row0 + row) * PARTS * pitch + k0 + at;
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) {
            *(Chunk*)(to + c * LENGTH) = hi[c];
            if (PARTS == 2) *(Chunk*)(to + pitch + c * LENGTH) = lo[c];
        }
    }
}

// Adds what a block has seen of its rows to their tallies, and says so where a row is hopeless.
__device__ inline void add_tally(unsigned (&seen)[MINE], int rows, int k, int row0, int half,
                                 int at, const Operand& operand, State* state) {
#pragma unroll
    for (int i = 0; i < MINE; ++i) {
        for (int lanes = 1; lanes < ACROSS; lanes *= 2)
            seen[i] += __shfl_xor_sync(~0u, seen[i], lanes);
        const int row = half + 32 * i;
        if (at || row0 + row >= rows) continue;
        const unsigned long long cut = seen[i] >> 16;
        const unsigned long long before =
            atomicAdd(&operand.tally[row0 + row], (seen[i] & 0xffff) | cut << 32);
        if (8 * ((before >> 32) + cut) > k) state->hopeless = 1;
    }
}

template <bool ALONG>
__device__ inline void pack(Source<In, ALONG> source, int row0, const Operand& operand,
                            State* state, Shared& shared) {
    const bool vectors = source.vectors();
    const int pitch = (source.k + STEP - 1) / STEP * STEP;
    const int t = threadIdx.x, at = t % ACROSS * EACH, half = t / ACROSS;
    Scales scales;
    if (PARTS == 2) {
        find_scales(scales, source.rows, row0, half, operand, state, shared);
        if (HALF && shared.hopeless) return;
    }
    unsigned seen[MINE] = {};
    const int stop = min(pitch, (int)(blockIdx.y + 1) * SLICE);
    for (int k0 = blockIdx.y * SLICE; k0 < stop; k0 += STEP) {
        load_tile(shared.tile, source, row0, k0, vectors, k0 > (int)blockIdx.y * SLICE);
        write_tile(shared.tile, seen, scales, operand.parts, source.rows, row0, pitch, k0, half,
                   at);
    }
    if (HALF && PARTS == 2) add_tally(seen, source.rows, source.k, row0, half, at, operand, state);
}

// Merges what all rows of an operand allow; called by the whole block.
__device__ inline Summary summarize(const Operand& operand, int rows, int k, Summary* found) {
    const int t = threadIdx.x;
    Summary all = no_rows(k);
    for (int row = t; row < rows; row += 256) {
        const volatile unsigned* const extremes =
            (const volatile unsigned*)(operand.extremes + row);
        const unsigned largest = extremes[0], smallest = extremes[1];
        if (!largest) continue;
        const unsigned long long tally = *(const volatile unsigned long long*)(operand.tally + row);
        const int top = exponent_of(largest);
        all = merge(all, {top, top, top - exponent_of(smallest), int(tally & 0xffffffff),
                          int(tally >> 32)});
    }
    found[t] = all;
    __syncthreads();
    for (int x = 128; x; x /= 2) {
        if (t < x) found[t] = merge(found[t], found[t + x]);
        __syncthreads();
    }
    const Summary whole = found[0];
    __syncthreads();
    return whole;
}

extern "C" __global__ void __launch_bounds__(256)
    split_pack(int m, int n, int k, const void* A, long long lda, const void* B, long long ldb,
               void* parts_a, void* parts_b, int* exponent, const unsigned long long* partial_a,
               const unsigned long long* partial_b, int partials, int stride,
               unsigned long long* extremes, unsigned long long* tally, int* memory) {
    __shared__ Shared shared;
    State* const state = (State*)memory;
    if (!HALF && PARTS == 2 && state->verdict != TF32_SPLIT) return;
    const int blocks_a = (m + ROWS - 1) / ROWS;
    Extremes* const whole = (Extremes*)extremes;
    const Operand a = {
        (Out*)parts_a, exponent, (const Extremes*)partial_a, partials, stride, whole, tally,
    };
    const Operand b = {
        (Out*)parts_b, exponent + m, (const Extremes*)partial_b, partials, stride,
        whole + m,     tally + m,
    };
    if ((int)blockIdx.x < blocks_a) {
        const Source<In, !TRANS_A> source = {(const In*)A, lda, m, k};
        pack(source, blockIdx.x * ROWS, a, state, shared);
    } else {
        const Source<In, TRANS_B> source = {(const In*)B, ldb, n, k};
        pack(source, (blockIdx.x - blocks_a) * ROWS, b, state, shared);
    }
    if (!(HALF && PARTS == 2)) return;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) shared.last = atomicAdd(&state->done, 1u) == gridDim.x * gridDim.y - 1;
    __syncthreads();
    if (!shared.last) return;
    __threadfence();
    const Summary of_a = summarize(a, m, k, shared.summaries);
    const Summary of_b = summarize(b, n, k, shared.summaries);
    if (threadIdx.x != 0) return;
    if (m && n) {
        state->verdict = decide(of_a, of_b, k);
        ++state->taken[state->verdict];
    } else {
        state->allowed = merge(of_a, of_b);
    }
}
