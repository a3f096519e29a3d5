/*---
summary   = "a k of a few: a sum of outer products, written as it is made"
entry     = "gemm_outer"
rung      = 97
# DEPTH, COLS, ROWS, THREADS: see outer.cuh
params    = [
    {DEPTH = 4, COLS = 4, ROWS = 64, THREADS = 256},
    {DEPTH = 1, COLS = 4, ROWS = 64, THREADS = 256},
    {DEPTH = 2, COLS = 4, ROWS = 64, THREADS = 256},
    {DEPTH = 4, COLS = 2, ROWS = 64, THREADS = 256},
    {DEPTH = 4, COLS = 4, ROWS = 16, THREADS = 256},
    {DEPTH = 8, COLS = 4, ROWS = 64, THREADS = 256},
    {DEPTH = 8, COLS = 2, ROWS = 64, THREADS = 256},
    {DEPTH = 8, COLS = 4, ROWS = 16, THREADS = 256},
    {DEPTH = 16, COLS = 2, ROWS = 64, THREADS = 256},
    {DEPTH = 16, COLS = 4, ROWS = 64, THREADS = 256},
]
block     = ["THREADS", "1", "1"]
grid      = ["ceil(m / ROWS) * ceil(n / (32 * COLS))", "1", "1"]
tile      = ["ROWS", "32 * COLS"]
limits    = ["k <= DEPTH"]
require   = ["DEPTH * COLS * SIZE <= 256", "ROWS * DEPTH * SIZE <= 32768", "THREADS % 32 == 0"]
early     = true
runs_on   = ["cuda", "emulator"]
source    = "this project: docs/performance.md"
---*/
#include "vectors.cuh"

typedef T Sum;
typedef T Out;
__device__ __forceinline__ T wide(T x) { return x; }
#include "outer.cuh"

extern "C" __global__ void __launch_bounds__(THREADS)
    gemm_outer(int m, int n, int k, T alpha, const T* A, long long lda, const T* B, long long ldb,
               T beta, T* C, long long ldc) {
    outer_products(m, n, k, A, lda, B, ldb, C, ldc, beta != T(0),
                   [&](const T* c, T sum) { return result(c, sum, alpha, beta); });
}
