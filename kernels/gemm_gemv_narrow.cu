/*---
summary   = "`gemv` for numbers of 16 bits, with products and sums in float32"
entry     = "gemm_gemv_narrow"
rung      = 98
# WIDE, THREADS, FLY, BLOCKS, KIB: see gemv.cuh
# OUT: see numbers.cuh
params    = [
    {WIDE = 64, THREADS = 256, FLY = 8, BLOCKS = 264, KIB = 64, OUT = 2},
    {WIDE = 8, THREADS = 256, FLY = 8, BLOCKS = 264, KIB = 64, OUT = 2},
    {WIDE = 16, THREADS = 256, FLY = 8, BLOCKS = 264, KIB = 64, OUT = 2},
    {WIDE = 32, THREADS = 256, FLY = 8, BLOCKS = 264, KIB = 64, OUT = 2},
    {WIDE = 128, THREADS = 256, FLY = 8, BLOCKS = 264, KIB = 64, OUT = 2},
    {WIDE = 256, THREADS = 256, FLY = 8, BLOCKS = 264, KIB = 64, OUT = 2},
    {WIDE = 8, THREADS = 256, FLY = 16, BLOCKS = 264, KIB = 64, OUT = 2},
    {WIDE = 32, THREADS = 512, FLY = 8, BLOCKS = 132, KIB = 192, OUT = 2},
    {WIDE = 128, THREADS = 512, FLY = 8, BLOCKS = 132, KIB = 192, OUT = 2},
    {WIDE = 256, THREADS = 512, FLY = 8, BLOCKS = 132, KIB = 192, OUT = 2},
    {WIDE = 64, THREADS = 256, FLY = 8, BLOCKS = 264, KIB = 64, OUT = 4},
    {WIDE = 8, THREADS = 256, FLY = 8, BLOCKS = 264, KIB = 64, OUT = 4},
    {WIDE = 16, THREADS = 256, FLY = 8, BLOCKS = 264, KIB = 64, OUT = 4},
    {WIDE = 32, THREADS = 256, FLY = 8, BLOCKS = 264, KIB = 64, OUT = 4},
    {WIDE = 128, THREADS = 256, FLY = 8, BLOCKS = 264, KIB = 64, OUT = 4},
    {WIDE = 256, THREADS = 256, FLY = 8, BLOCKS = 264, KIB = 64, OUT = 4},
    {WIDE = 8, THREADS = 256, FLY = 16, BLOCKS = 264, KIB = 64, OUT = 4},
    {WIDE = 32, THREADS = 512, FLY = 8, BLOCKS = 132, KIB = 192, OUT = 4},
    {WIDE = 128, THREADS = 512, FLY = 8, BLOCKS = 132, KIB = 192, OUT = 4},
    {WIDE = 256, THREADS = 512, FLY = 8, BLOCKS = 132, KIB = 192, OUT = 4},
]
block     = ["THREADS", "1", "1"]
grid      = ["ceil(max(m, n) / WIDE) * max(1, min(ceil((BLOCKS + 1) / max(1, ceil(max(m, n) / WIDE))) - 1, ceil((k * WIDE * SIZE + 1) / (KIB * 1024)) - 1, ceil(k / 256)))", "1", "1"]
tile      = ["WIDE", "1"]
scales    = ["BLOCKS"]
workspace = "BLOCKS * WIDE * 4"
flags     = "4 * BLOCKS"
limits    = ["min(m, n) <= 1"]
require   = [
    "WIDE >= 8", "256 * 16 % (WIDE * SIZE) == 0", "WIDE * SIZE >= 16", "THREADS % WIDE == 0",
    "THREADS % 256 == 0", "FLY % 8 == 0", "OUT % 2 == 0", "OUT <= 4",
    # a team of threads along k is whole warps, or divides one
    "8 * THREADS / WIDE % 32 * (32 % (8 * THREADS / WIDE)) == 0",
]
dtypes    = ["float16", "bfloat16"]
early     = true
runs_on   = ["cuda", "emulator"]
source    = "this project: docs/performance.md"
---*/
#include "narrow.cuh"

#include "gemv.cuh"

extern "C" __global__ void __launch_bounds__(THREADS)
    gemm_gemv_narrow(int m, int n, int k, float alpha, const void* A, long long lda, const void* B,
                     long long ldb, float beta, void* C, long long ldc, float* workspace,
                     unsigned* flags) {
    const long long step = n == 1 ? ldc : 1;
    multiply(m, n, k, (const T*)A, lda, (const T*)B, ldb, workspace, flags, [&](int i, float sum) {
        Out* const to = (Out*)C + i * step;
        *to = result(to, sum, alpha, beta);
    });
}
