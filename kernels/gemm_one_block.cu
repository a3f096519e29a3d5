/*---
summary = "one block for all of C, one thread an element: the first kernel of a course"
entry   = "gemm_one_block"
rung    = 10
block   = ["n", "m", "1"]
tile    = ["32", "32"]
limits  = ["m * n <= 1024"]
source  = "S4, the lecture: its card allowed 512 threads a block, today's allow 1024"
---*/
#include "common.cuh"

extern "C" __global__ void __launch_bounds__(1024)
    gemm_one_block(int m, int n, int k, T alpha, const T* __restrict__ A, long long lda,
                   const T* __restrict__ B, long long ldb, T beta, T* C, long long ldc) {
    const int row = threadIdx.y, col = threadIdx.x;
    if (row >= m || col >= n) return;
    T sum = 0;
    for (int p = 0; p < k; ++p) sum += a_at(A, lda, row, p) * b_at(B, ldb, p, col);
    store(C + row * ldc + col, sum, alpha, beta);
}
