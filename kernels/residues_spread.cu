/*---
summary = "how magnitudes spread in each row of op(A) and column of op(B): sums of squares, counts by exponent"
entry   = "residues_spread"
role    = "residues_spread"
# SLICE  k that a block reads: a thread counts up to 255 elements of a row
params  = [{SLICE = 2048}]
block   = ["256", "1", "1"]
grid    = ["ceil(m / 64) + ceil(n / 64)", "max(1, ceil(k / SLICE))", "1"]
require = ["SLICE % 64 == 0", "SLICE <= 4080"]
dtypes  = ["float64"]
source  = "this project: docs/fp64x.md"
---*/
#include "residues.cuh"
#include "source.cuh"

constexpr int ROWS = 64;  // of op(A), or columns of op(B): those of a block

struct Shared {
    int top[ROWS];  // exponents of the largest magnitudes, biased
    u64 sums[ROWS][2];
    unsigned count[ROWS][LEVELS];
};
constexpr int MINE = 4;  // rows a thread looks at

// What a thread sees of its rows; `seen` are counts of 8 bits.
struct Seen {
    int top[MINE];
    double scale[MINE], squares[MINE], magnitudes[MINE];
    u64 seen[MINE][LEVELS / 8];

    __device__ __forceinline__ void take(int i, u64 bits) {
        bits = bits << 1 >> 1;
        const double x = real_of(bits) * scale[i];
        squares[i] += x * x;
        magnitudes[i] += x;
        const unsigned level = top[i] - int(bits >> 52);
#pragma unroll
        for (int w = 0; w < LEVELS / 8; ++w) {
            seen[i][w] += (u64)(level / 8 == w) << 8 * (level % 8);
        }
    }
};

// The largest magnitudes of the block's rows, from the parts of k; the first blocks write them.
__device__ inline void find_tops(int rows, int row0, const u64* partial, int partials, int stride,
                                 u64* largest, Shared& shared) {
    const int t = threadIdx.x, row = row0 + t;
    if (t < ROWS) {
        u64 all = 0;
        for (int x = 0; x < partials && row < rows; ++x)
            all = max(all, partial[(long long)x * stride + row]);
        shared.top[t] = int(all >> 52);
        if (row < rows && blockIdx.y == 0) largest[row] = all;
        for (int i = 0; i < 2; ++i) shared.sums[t][i] = 0;
        for (int i = 0; i < LEVELS; ++i) shared.count[t][i] = 0;
    }
    __syncthreads();
}

template <bool ALONG>
__device__ __forceinline__ void look(Seen& mine, const Source<u64, ALONG>& source, int row0) {
    const bool vectors = source.vectors();
    const int p = threadIdx.x % 16, line = threadIdx.x / 16;
    const int k0 = blockIdx.y * SLICE, stop = min(SLICE, source.k - k0);
    if (ALONG) {  // rows line + 16 i; neighbours along k
#pragma unroll 2
        for (int at = 0; at < stop; at += 64) {
#pragma unroll
            for (int i = 0; i < MINE; ++i) {
                const Four<u64> four = source.four(row0 + line + 16 * i, k0 + at + 4 * p, vectors);
#pragma unroll
                for (int x = 0; x < 4; ++x) mine.take(i, four.x[x]);
            }
        }
    } else {  // rows 4 p + i, in lines 16 apart
#pragma unroll 4
        for (int at = 0; at < stop; at += 16) {
            const Four<u64> four = source.four(k0 + at + line, row0 + 4 * p, vectors);
#pragma unroll
            for (int i = 0; i < MINE; ++i) mine.take(i, four.x[i]);
        }
    }
}

template <bool ALONG>
__device__ __forceinline__ void spread_of(Source<u64, ALONG> source, int row0, const u64* partial,
                                          int partials, int stride, u64* largest, Row* rows,
                                          Shared& shared) {
    find_tops(source.rows, row0, partial, partials, stride, largest, shared);
    const int t = threadIdx.x;
    const auto row_of = [&](int i) { return ALONG ? t / 16 + 16 * i : t % 16 * 4 + i; };
    Seen mine = {};
#pragma unroll
    for (int i = 0; i < MINE; ++i) {
        mine.top[i] = shared.top[row_of(i)];
        mine.scale[i] = two_to(min(1022, max(-1022, 1023 - mine.top[i])));
    }
    look(mine, source, row0);
#pragma unroll
    for (int i = 0; i < MINE; ++i) {
        const int row = row_of(i);
        // Integers: the sums are the same in whatever order they are made. Squares are rounded up.
        atomicAdd(&shared.sums[row][0], (u64)(mine.squares[i] * UNIT) + 1);
        atomicAdd(&shared.sums[row][1], (u64)(mine.magnitudes[i] * UNIT));
#pragma unroll
        for (int level = 0; level < LEVELS; ++level) {
            const unsigned count = mine.seen[i][level / 8] >> 8 * (level % 8) & 255;
            if (count) atomicAdd(&shared.count[row][level], count);
        }
    }
    __syncthreads();
    for (int x = t; x < ROWS * (LEVELS + 2); x += 256) {
        const int row = x / (LEVELS + 2), what = x % (LEVELS + 2) - 2;
        if (row0 + row >= source.rows) break;
        Row* const to = rows + row0 + row;
        if (what < 0)
            atomicAdd(what == -2 ? &to->squares : &to->magnitudes, shared.sums[row][what + 2]);
        else if (shared.count[row][what])
            atomicAdd(&to->count[what], shared.count[row][what]);
    }
}

// `partial` as residues_largest.cu left it.
extern "C" __global__ void __launch_bounds__(256)
    residues_spread(int m, int n, int k, const double* A, long long lda, const double* B,
                    long long ldb, const unsigned long long* partial, int partials,
                    unsigned long long* largest, void* memory) {
    __shared__ Shared shared;
    const int blocks_a = (m + ROWS - 1) / ROWS;
    Row* const rows = (Row*)memory;
    if ((int)blockIdx.x < blocks_a) {
        const Source<u64, !TRANS_A> source = {(const u64*)A, lda, m, k};
        spread_of(source, blockIdx.x * ROWS, partial, partials, m + n, largest, rows, shared);
    } else {
        const Source<u64, TRANS_B> source = {(const u64*)B, ldb, n, k};
        spread_of(source, (blockIdx.x - blocks_a) * ROWS, partial + m, partials, m + n, largest + m,
                  rows + m, shared);
    }
}
