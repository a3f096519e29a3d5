/*---
summary = "one thread an element; B is transposed first, so A and B are both read along rows"
entry   = "gemm_transposed_b"
rung    = 40
# BM  rows of C in a block, one thread each
# BN  columns of C in a block, one thread each
params  = [{BM = 16, BN = 16}, {BM = 8, BN = 32}, {BM = 32, BN = 32}, {BM = 8, BN = 8}]
block   = ["BN", "BM", "1"]
grid    = ["ceil(n / BN)", "ceil(m / BM)", "1"]
tile    = ["BM", "BN"]
layouts = ["nt", "tt"]
source  = "S3, the lab report, improvements: transpose B so that reads are contiguous"
---*/
#include "common.cuh"

// B^T is row-major: column j of op(B) is row j in memory. For other layouts the host
// transposes B before it calls this kernel.
extern "C" __global__ void __launch_bounds__(BM * BN)
    gemm_transposed_b(int m, int n, int k, T alpha, const T* __restrict__ A, long long lda,
                      const T* __restrict__ B, long long ldb, T beta, T* C, long long ldc) {
    const unsigned row = blockIdx.y * BM + threadIdx.y, col = blockIdx.x * BN + threadIdx.x;
    if (row >= m || col >= n) return;
    const T* b = B + col * ldb;
    T sum = 0;
    int p = 0;
    if (aligned(B, ldb) && (TRANS_A || aligned(A, lda))) {
        for (; k - p >= 4; p += 4) {
            Vec4 u;
            if (TRANS_A) {
                for (int i = 0; i < 4; ++i) u.x[i] = a_at(A, lda, row, p + i);
            } else {
                u = *(const Vec4*)(A + row * lda + p);
            }
            const Vec4 v = *(const Vec4*)(b + p);
            for (int i = 0; i < 4; ++i) sum += u.x[i] * v.x[i];
        }
    }
    for (; p < k; ++p) sum += a_at(A, lda, row, p) * b[p];
    store(C + row * ldc + col, sum, alpha, beta);
}
