/*---
summary   = "`tall` for numbers of 16 bits, with products and sums in float32"
entry     = "gemm_tall_narrow"
rung      = 97
# THIN, LINES, THREADS: see tall.cuh
# OUT: see numbers.cuh
params    = [
    {THIN = 4, LINES = 4, THREADS = 256, OUT = 2},
    {THIN = 1, LINES = 4, THREADS = 256, OUT = 2},
    {THIN = 2, LINES = 2, THREADS = 256, OUT = 2},
    {THIN = 2, LINES = 4, THREADS = 256, OUT = 2},
    {THIN = 4, LINES = 2, THREADS = 256, OUT = 2},
    {THIN = 8, LINES = 1, THREADS = 256, OUT = 2},
    {THIN = 8, LINES = 2, THREADS = 256, OUT = 2},
    {THIN = 16, LINES = 1, THREADS = 256, OUT = 2},
    {THIN = 16, LINES = 2, THREADS = 256, OUT = 2},
    {THIN = 32, LINES = 1, THREADS = 256, OUT = 2},
    {THIN = 32, LINES = 2, THREADS = 256, OUT = 2},
    {THIN = 4, LINES = 4, THREADS = 256, OUT = 4},
    {THIN = 1, LINES = 4, THREADS = 256, OUT = 4},
    {THIN = 2, LINES = 2, THREADS = 256, OUT = 4},
    {THIN = 2, LINES = 4, THREADS = 256, OUT = 4},
    {THIN = 4, LINES = 2, THREADS = 256, OUT = 4},
    {THIN = 8, LINES = 1, THREADS = 256, OUT = 4},
    {THIN = 8, LINES = 2, THREADS = 256, OUT = 4},
    {THIN = 16, LINES = 1, THREADS = 256, OUT = 4},
    {THIN = 16, LINES = 2, THREADS = 256, OUT = 4},
    {THIN = 32, LINES = 1, THREADS = 256, OUT = 4},
    {THIN = 32, LINES = 2, THREADS = 256, OUT = 4},
]
block     = ["THREADS", "1", "1"]
grid      = ["ceil(max(m, n) / (THREADS * LINES))", "1", "1"]
tile      = ["THREADS * LINES", "THIN"]
# the thin operand for all of k; then C of the block
shared    = "max((k + 8) * THIN * 4, THREADS * LINES * THIN * OUT)"
limits    = ["min(m, n) <= THIN", "k <= 128"]
require   = ["LINES * THIN * 4 <= 512", "THREADS % 32 == 0", "OUT % 2 == 0", "OUT <= 4"]
dtypes    = ["float16", "bfloat16"]
early     = true
runs_on   = ["cuda", "emulator"]
source    = "this project: docs/performance.md"
---*/
#include "narrow.cuh"

#include "tall.cuh"

extern "C" __global__ void __launch_bounds__(THREADS)
    gemm_tall_narrow(int m, int n, int k, float alpha, const void* A, long long lda, const void* B,
                     long long ldb, float beta, void* C, long long ldc) {
    multiply_lines(m, n, k, (const T*)A, lda, (const T*)B, ldb, (Out*)C, ldc,
                   [&](const Out* c, float sum) { return result(c, sum, alpha, beta); });
}
