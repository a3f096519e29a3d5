/*---
summary   = "C of one long side, the other thin, and a short k: one pass over memory"
entry     = "gemm_tall"
rung      = 97
# THIN, LINES, THREADS: see tall.cuh
params    = [
    {THIN = 4, LINES = 4, THREADS = 256},
    {THIN = 1, LINES = 4, THREADS = 256},
    {THIN = 2, LINES = 2, THREADS = 256},
    {THIN = 2, LINES = 4, THREADS = 256},
    {THIN = 4, LINES = 2, THREADS = 256},
    {THIN = 8, LINES = 1, THREADS = 256},
    {THIN = 8, LINES = 2, THREADS = 256},
    {THIN = 16, LINES = 1, THREADS = 256},
    {THIN = 16, LINES = 2, THREADS = 256},
    {THIN = 32, LINES = 1, THREADS = 256},
    {THIN = 32, LINES = 2, THREADS = 256},
]
block     = ["THREADS", "1", "1"]
grid      = ["ceil(max(m, n) / (THREADS * LINES))", "1", "1"]
tile      = ["THREADS * LINES", "THIN"]
# the thin operand for all of k; then C of the block
shared    = "max((k + 8) * THIN * SIZE, THREADS * LINES * THIN * SIZE)"
limits    = ["min(m, n) <= THIN", "k <= 128"]
require   = ["LINES * THIN * SIZE <= 512", "THREADS % 32 == 0"]
early     = true
runs_on   = ["cuda", "emulator"]
source    = "this project: docs/performance.md"
---*/
#include "vectors.cuh"

typedef T Sum;
typedef T Out;
__device__ __forceinline__ T wide(T x) { return x; }
#include "tall.cuh"

extern "C" __global__ void __launch_bounds__(THREADS)
    gemm_tall(int m, int n, int k, T alpha, const T* A, long long lda, const T* B, long long ldb,
              T beta, T* C, long long ldc) {
    multiply_lines(m, n, k, A, lda, B, ldb, C, ldc,
                   [&](const T* c, T sum) { return result(c, sum, alpha, beta); });
}
