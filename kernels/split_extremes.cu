/*---
summary = "largest and smallest nonzero magnitude of each row of op(A) and column of op(B), in parts of k"
entry   = "split_extremes"
role    = "extremes"
# SPAN   k that a block reads before it goes on to its next span
# PARTS  parts of k, at most: blocks for each 64 rows of A or columns of B
params  = [{SPAN = 512, PARTS = 64}]
block   = ["256", "1", "1"]
grid    = ["ceil(m / 64) + ceil(n / 64)", "max(1, min(PARTS, ceil(k / SPAN)))", "1"]
require = ["SPAN % 128 == 0"]
dtypes  = ["float32"]
source  = "this project: docs/tensor-cores.md"
---*/
#include "split.cuh"

// Partial x of row r goes to partial[x * (m + n) + r], columns of B after rows of A; the rows'
// tallies are set to zero on the way, and so is what blocks of split_pack.cu tell each other.
// One operand alone is looked at where m or n is 0.
template <bool ALONG>
__device__ inline void extremes_of(Source<unsigned, ALONG> source, int row0, Extremes* partial,
                                   int stride, unsigned long long* tally,
                                   Extremes (&found)[16][ROWS]) {
    const bool vectors = source.vectors();
    const int t = threadIdx.x;
    const int p = t % 16, line = t / 16;  // of 16 vectors by 16 lines
    const auto take = [](Extremes& all, unsigned bits) {
        const unsigned magnitude = bits & 0x7fffffff;  // less 1, zero is the largest there is
        all = merge(all, {magnitude, magnitude - 1});
    };
    constexpr int MINE = 4;  // rows a thread looks at
    Extremes mine[MINE];
#pragma unroll
    for (int i = 0; i < MINE; ++i) mine[i] = {0, ~0u};
    for (int k0 = blockIdx.y * SPAN; k0 < source.k; k0 += gridDim.y * SPAN) {
        if (ALONG) {  // rows line + 16 i; neighbours along k
#pragma unroll 2
            for (int at = 0; at < SPAN; at += 64) {
#pragma unroll
                for (int i = 0; i < MINE; ++i) {
                    const Four<unsigned> four =
                        source.four(row0 + line + 16 * i, k0 + at + 4 * p, vectors);
#pragma unroll
                    for (int x = 0; x < 4; ++x) take(mine[i], four.x[x]);
                }
            }
        } else {  // rows 4 p + i, in lines 16 apart
#pragma unroll 8
            for (int at = 0; at < SPAN; at += 16) {
                const Four<unsigned> four = source.four(k0 + at + line, row0 + 4 * p, vectors);
#pragma unroll
                for (int i = 0; i < MINE; ++i) take(mine[i], four.x[i]);
            }
        }
    }
#pragma unroll
    for (int i = 0; i < MINE; ++i)
        found[ALONG ? p : line][ALONG ? line + 16 * i : 4 * p + i] = mine[i];
    __syncthreads();
    const int row = row0 + t;
    if (t < ROWS && row < source.rows) {
        Extremes all = found[0][t];
        for (int i = 1; i < 16; ++i) all = merge(all, found[i][t]);
        if (all.smallest != ~0u) ++all.smallest;
        partial[(long long)blockIdx.y * stride + row] = all;
        if (blockIdx.y == 0) tally[row] = 0;
    }
}

extern "C" __global__ void __launch_bounds__(256)
    split_extremes(int m, int n, int k, const float* A, long long lda, const float* B,
                   long long ldb, unsigned long long* partial, unsigned long long* tally,
                   int* memory) {
    __shared__ Extremes found[16][ROWS];
    if (blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0) {
        State* const state = (State*)memory;
        state->done = state->hopeless = 0;
    }
    const int blocks_a = (m + ROWS - 1) / ROWS;
    Extremes* const to = (Extremes*)partial;
    if ((int)blockIdx.x < blocks_a) {
        const Source<unsigned, !TRANS_A> source = {(const unsigned*)A, lda, m, k};
        extremes_of(source, blockIdx.x * ROWS, to, m + n, tally, found);
    } else {
        const Source<unsigned, TRANS_B> source = {(const unsigned*)B, ldb, n, k};
        extremes_of(source, (blockIdx.x - blocks_a) * ROWS, to + m, m + n, tally + m, found);
    }
}
