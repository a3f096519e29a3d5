/*---
summary   = "`dots` for numbers of 16 bits, with products and sums in float32"
entry     = "gemm_dots_narrow"
rung      = 98
# BM, BN, THREADS, FLY, BLOCKS: see dots.cuh
# OUT: see numbers.cuh
params    = [
    {BM = 4, BN = 4, THREADS = 256, FLY = 32, BLOCKS = 264, OUT = 2},
    {BM = 2, BN = 2, THREADS = 256, FLY = 32, BLOCKS = 528, OUT = 2},
    {BM = 8, BN = 8, THREADS = 256, FLY = 32, BLOCKS = 264, OUT = 2},
    {BM = 2, BN = 8, THREADS = 256, FLY = 40, BLOCKS = 264, OUT = 2},
    {BM = 8, BN = 2, THREADS = 256, FLY = 40, BLOCKS = 264, OUT = 2},
    {BM = 4, BN = 16, THREADS = 256, FLY = 20, BLOCKS = 264, OUT = 2},
    {BM = 16, BN = 4, THREADS = 256, FLY = 20, BLOCKS = 264, OUT = 2},
    {BM = 4, BN = 4, THREADS = 256, FLY = 32, BLOCKS = 264, OUT = 4},
    {BM = 2, BN = 2, THREADS = 256, FLY = 32, BLOCKS = 528, OUT = 4},
    {BM = 8, BN = 8, THREADS = 256, FLY = 32, BLOCKS = 264, OUT = 4},
    {BM = 2, BN = 8, THREADS = 256, FLY = 40, BLOCKS = 264, OUT = 4},
    {BM = 8, BN = 2, THREADS = 256, FLY = 40, BLOCKS = 264, OUT = 4},
    {BM = 4, BN = 16, THREADS = 256, FLY = 20, BLOCKS = 264, OUT = 4},
    {BM = 16, BN = 4, THREADS = 256, FLY = 20, BLOCKS = 264, OUT = 4},
]
block     = ["THREADS", "1", "1"]
grid      = ["ceil(m / BM) * ceil(n / BN) * max(1, min(ceil((BLOCKS + 1) / max(1, ceil(m / BM) * ceil(n / BN))) - 1, ceil(k / (2 * THREADS))))", "1", "1"]
tile      = ["BM", "BN"]
scales    = ["BLOCKS"]
workspace = "BLOCKS * BM * BN * 4"
flags     = "4 * BLOCKS"
limits    = ["m <= 4 * BM", "n <= 4 * BN"]
require   = ["128 % (BM * BN) == 0", "THREADS % 32 == 0", "OUT % 2 == 0", "OUT <= 4"]
dtypes    = ["float16", "bfloat16"]
early     = true
runs_on   = ["cuda", "emulator"]
source    = "this project: docs/performance.md"
---*/
#include "narrow.cuh"

#include "dots.cuh"

extern "C" __global__ void __launch_bounds__(THREADS)
    gemm_dots_narrow(int m, int n, int k, float alpha, const void* A, long long lda, const void* B,
                     long long ldb, float beta, void* C, long long ldc, float* workspace,
                     unsigned* flags) {
    dot_products(m, n, k, (const T*)A, lda, (const T*)B, ldb, workspace, flags,
                 [&](int i, int j, float sum) {
                     Out* const to = (Out*)C + i * ldc + j;
                     *to = result(to, sum, alpha, beta);
                 });
}
