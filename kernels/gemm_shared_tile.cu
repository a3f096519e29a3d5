/*---
summary = "TILE x TILE threads share tiles of A and B: a block reads each element once"
entry   = "gemm_shared_tile"
rung    = 60
# TILE  rows and columns of C in a block, and k of a step
params  = [{TILE = 16}, {TILE = 1}, {TILE = 2}, {TILE = 4}, {TILE = 8}, {TILE = 32}]
block   = ["TILE", "TILE", "1"]
grid    = ["ceil(n / TILE)", "ceil(m / TILE)", "1"]
tile    = ["TILE", "TILE"]
require = ["TILE <= 32"]
source  = "S0 (TILE from 1 to 32), S2 (the note), S4 (the lecture)"
---*/
#include "common.cuh"

extern "C" __global__ void __launch_bounds__(TILE * TILE)
    gemm_shared_tile(int m, int n, int k, T alpha, const T* __restrict__ A, long long lda,
                     const T* __restrict__ B, long long ldb, T beta, T* C, long long ldc) {
    // One column more than needed: a transposed operand is written down a column, and the
    // odd pitch puts a column's elements in distinct banks.
    __shared__ T As[TILE][TILE + 1], Bs[TILE][TILE + 1];
    const int tx = threadIdx.x, ty = threadIdx.y;
    const unsigned row0 = blockIdx.y * TILE, col0 = blockIdx.x * TILE;
    // Threads that are neighbours along x load neighbours in memory, whatever the layout.
    const int ai = TRANS_A ? tx : ty, ap = TRANS_A ? ty : tx;
    const int bp = TRANS_B ? tx : ty, bj = TRANS_B ? ty : tx;
    T sum = 0;
    for (int left = k; left > 0; left -= TILE) {
        const int p0 = k - left;
        // Zeros beyond the edges: they add nothing.
        As[ai][ap] = row0 + ai < m && ap < left ? a_at(A, lda, row0 + ai, p0 + ap) : T(0);
        Bs[bp][bj] = col0 + bj < n && bp < left ? b_at(B, ldb, p0 + bp, col0 + bj) : T(0);
        __syncthreads();
#pragma unroll
        for (int p = 0; p < TILE; ++p) sum += As[ty][p] * Bs[p][tx];
        __syncthreads();
    }
    if (row0 + ty < m && col0 + tx < n) {
        store(C + (row0 + ty) * ldc + col0 + tx, sum, alpha, beta);
    }
}
