/*---
summary = "largest magnitude of each row of op(A) and column of op(B), in parts of k"
entry   = "residues_largest"
role    = "residues_largest"
# SPAN   k that a block reads before it goes on to its next span
# PARTS  parts of k, at most: blocks for each 64 rows of A or columns of B
params  = [{SPAN = 512, PARTS = 32}]
block   = ["256", "1", "1"]
grid    = ["ceil(m / 64) + ceil(n / 64)", "max(1, min(PARTS, ceil(k / SPAN)))", "1"]
require = ["SPAN % 128 == 0"]
dtypes  = ["float64"]
source  = "this project: docs/fp64x.md"
---*/
#include "residues.cuh"
#include "source.cuh"

constexpr int ROWS = 64;  // of op(A), or columns of op(B): those of a block

// Partial x of row r goes to partial[x * (m + n) + r], as bits, columns of B after rows of A; what
// residues_spread.cu adds to is set to zero on the way.
template <bool ALONG>
__device__ inline void largest_of(Source<u64, ALONG> source, int row0, u64* partial, int stride,
                                  Row* rows, u64 (&found)[16][ROWS]) {
    const bool vectors = source.vectors();
    const int t = threadIdx.x;
    const int p = t % 16, line = t / 16;  // of 16 vectors by 16 lines
    constexpr int MINE = 4;               // rows a thread looks at
    u64 mine[MINE] = {};
    const auto take = [&](int i, u64 bits) { mine[i] = max(mine[i], bits << 1 >> 1); };
    for (int k0 = blockIdx.y * SPAN; k0 < source.k; k0 += gridDim.y * SPAN) {
        if (ALONG) {  // rows line + 16 i; neighbours along k
#pragma unroll 2
            for (int at = 0; at < SPAN; at += 64) {
#pragma unroll
                for (int i = 0; i < MINE; ++i) {
                    const Four<u64> four =
                        source.four(row0 + line + 16 * i, k0 + at + 4 * p, vectors);
#pragma unroll
                    for (int x = 0; x < 4; ++x) take(i, four.x[x]);
                }
            }
        } else {  // rows 4 p + i, in lines 16 apart
#pragma unroll 8
            for (int at = 0; at < SPAN; at += 16) {
                const Four<u64> four = source.four(k0 + at + line, row0 + 4 * p, vectors);
#pragma unroll
                for (int i = 0; i < MINE; ++i) take(i, four.x[i]);
            }
        }
    }
#pragma unroll
    for (int i = 0; i < MINE; ++i)
        found[ALONG ? p : line][ALONG ? line + 16 * i : 4 * p + i] = mine[i];
    __syncthreads();
    const int row = row0 + t;
    if (t < ROWS && row < source.rows) {
        u64 largest = 0;
        for (int i = 0; i < 16; ++i) largest = max(largest, found[i][t]);
        partial[(long long)blockIdx.y * stride + row] = largest;
        if (blockIdx.y == 0) rows[row] = {};
    }
}

extern "C" __global__ void __launch_bounds__(256)
    residues_largest(int m, int n, int k, const double* A, long long lda, const double* B,
                     long long ldb, unsigned long long* partial, void* memory) {
    __shared__ u64 found[16][ROWS];
    for_group<u64, ROWS>(
        blockIdx.x, m, n, k, A, lda, B, ldb, [&](const auto& source, int row0, bool of_b) {
            const int first = of_b ? m : 0;  // columns of B after rows of A
            largest_of(source, row0, partial + first, m + n, (Row*)memory + first, found);
        });
}
