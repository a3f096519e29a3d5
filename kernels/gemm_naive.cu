/*---
summary = "one thread an element; a block is BM x BN elements of C"
entry   = "gemm_naive"
rung    = 30
# BM  rows of C in a block, one thread each
# BN  columns of C in a block, one thread each
params  = [{BM = 16, BN = 16}, {BM = 8, BN = 32}, {BM = 32, BN = 32}, {BM = 8, BN = 8}]
block   = ["BN", "BM", "1"]
grid    = ["ceil(n / BN)", "ceil(m / BM)", "1"]
tile    = ["BM", "BN"]
source  = "S0 and S1, the first kernels; S1 runs blocks of 32 x 32"
---*/
#include "common.cuh"

// Where BN is 32 or more, a warp's step of k reads one element of A (a broadcast) and neighbours of
// a row of B. With a smaller BN a warp has several rows, and reads an element of A for each.
extern "C" __global__ void __launch_bounds__(BM * BN)
    gemm_naive(int m, int n, int k, T alpha, const T* __restrict__ A, long long lda,
               const T* __restrict__ B, long long ldb, T beta, T* C, long long ldc) {
    const unsigned row = blockIdx.y * BM + threadIdx.y, col = blockIdx.x * BN + threadIdx.x;
    if (row >= m || col >= n) return;
    T sum = 0;
    for (int p = 0; p < k; ++p) sum += a_at(A, lda, row, p) * b_at(B, ldb, p, col);
    store(C + row * ldc + col, sum, alpha, beta);
}
