/*---
summary = "one thread an element; a block is BLOCK columns of one row of C"
entry   = "gemm_naive_row"
rung    = 20
# BLOCK  columns of C in a block, one thread each
params  = [{BLOCK = 128}, {BLOCK = 32}, {BLOCK = 64}, {BLOCK = 256}, {BLOCK = 512}]
block   = ["BLOCK", "1", "1"]
grid    = ["m", "ceil(n / BLOCK)", "1"]
tile    = ["1", "BLOCK"]
source  = "S3, the lab report, task 1: table 1 sweeps BLOCK from 32 to 512"
---*/
#include "common.cuh"

extern "C" __global__ void __launch_bounds__(BLOCK)
    gemm_naive_row(int m, int n, int k, T alpha, const T* __restrict__ A, long long lda,
                   const T* __restrict__ B, long long ldb, T beta, T* C, long long ldc) {
    const unsigned row = blockIdx.x, col = blockIdx.y * BLOCK + threadIdx.x;
    if (row >= m || col >= n) return;
    T sum = 0;
    for (int p = 0; p < k; ++p) sum += a_at(A, lda, row, p) * b_at(B, ldb, p, col);
    store(C + row * ldc + col, sum, alpha, beta);
}
