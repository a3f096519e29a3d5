/*---
summary   = "`outer` for numbers of 16 bits, with products and sums in float32"
entry     = "gemm_outer_narrow"
rung      = 97
# DEPTH, COLS, ROWS, THREADS: see outer.cuh
# OUT: see numbers.cuh
params    = [
    {DEPTH = 4, COLS = 4, ROWS = 64, THREADS = 256, OUT = 2},
    {DEPTH = 1, COLS = 4, ROWS = 64, THREADS = 256, OUT = 2},
    {DEPTH = 2, COLS = 4, ROWS = 64, THREADS = 256, OUT = 2},
    {DEPTH = 4, COLS = 2, ROWS = 64, THREADS = 256, OUT = 2},
    {DEPTH = 4, COLS = 4, ROWS = 16, THREADS = 256, OUT = 2},
    {DEPTH = 8, COLS = 4, ROWS = 64, THREADS = 256, OUT = 2},
    {DEPTH = 8, COLS = 2, ROWS = 64, THREADS = 256, OUT = 2},
    {DEPTH = 8, COLS = 4, ROWS = 16, THREADS = 256, OUT = 2},
    {DEPTH = 16, COLS = 2, ROWS = 64, THREADS = 256, OUT = 2},
    {DEPTH = 16, COLS = 4, ROWS = 64, THREADS = 256, OUT = 2},
    {DEPTH = 4, COLS = 4, ROWS = 64, THREADS = 256, OUT = 4},
    {DEPTH = 1, COLS = 4, ROWS = 64, THREADS = 256, OUT = 4},
    {DEPTH = 2, COLS = 4, ROWS = 64, THREADS = 256, OUT = 4},
    {DEPTH = 4, COLS = 2, ROWS = 64, THREADS = 256, OUT = 4},
    {DEPTH = 4, COLS = 4, ROWS = 16, THREADS = 256, OUT = 4},
    {DEPTH = 8, COLS = 4, ROWS = 64, THREADS = 256, OUT = 4},
    {DEPTH = 8, COLS = 2, ROWS = 64, THREADS = 256, OUT = 4},
    {DEPTH = 8, COLS = 4, ROWS = 16, THREADS = 256, OUT = 4},
    {DEPTH = 16, COLS = 2, ROWS = 64, THREADS = 256, OUT = 4},
    {DEPTH = 16, COLS = 4, ROWS = 64, THREADS = 256, OUT = 4},
]
block     = ["THREADS", "1", "1"]
grid      = ["ceil(m / ROWS) * ceil(n / (32 * COLS))", "1", "1"]
tile      = ["ROWS", "32 * COLS"]
limits    = ["k <= DEPTH"]
require   = ["DEPTH * COLS * 4 <= 256", "ROWS * DEPTH * 4 <= 32768", "THREADS % 32 == 0", "OUT % 2 == 0", "OUT <= 4"]
dtypes    = ["float16", "bfloat16"]
early     = true
runs_on   = ["cuda", "emulator"]
source    = "this project: docs/performance.md"
---*/
#include "narrow.cuh"

#include "outer.cuh"

extern "C" __global__ void __launch_bounds__(THREADS)
    gemm_outer_narrow(int m, int n, int k, float alpha, const void* A, long long lda, const void* B,
                      long long ldb, float beta, void* C, long long ldc) {
    outer_products(m, n, k, (const T*)A, lda, (const T*)B, ldb, (Out*)C, ldc, beta != 0,
                   [&](const Out* c, float sum) { return result(c, sum, alpha, beta); });
}
