/*---
summary   = "C of one row or one column: a matrix, read once, times a vector"
entry     = "gemm_gemv"
rung      = 98
# WIDE, THREADS, FLY, BLOCKS, KIB: see gemv.cuh
params    = [
    {WIDE = 32, THREADS = 256, FLY = 16, BLOCKS = 264, KIB = 64},
    {WIDE = 8, THREADS = 256, FLY = 16, BLOCKS = 264, KIB = 64},
    {WIDE = 16, THREADS = 256, FLY = 16, BLOCKS = 264, KIB = 64},
    {WIDE = 64, THREADS = 256, FLY = 16, BLOCKS = 264, KIB = 64},
    {WIDE = 8, THREADS = 256, FLY = 8, BLOCKS = 264, KIB = 64},
    {WIDE = 32, THREADS = 256, FLY = 8, BLOCKS = 264, KIB = 64},
    {WIDE = 64, THREADS = 256, FLY = 8, BLOCKS = 264, KIB = 64},
    {WIDE = 128, THREADS = 256, FLY = 8, BLOCKS = 264, KIB = 64},
    {WIDE = 256, THREADS = 256, FLY = 8, BLOCKS = 264, KIB = 64},
    {WIDE = 16, THREADS = 512, FLY = 8, BLOCKS = 132, KIB = 192},
    {WIDE = 32, THREADS = 512, FLY = 8, BLOCKS = 132, KIB = 192},
    {WIDE = 64, THREADS = 512, FLY = 8, BLOCKS = 132, KIB = 192},
]
block     = ["THREADS", "1", "1"]
grid      = ["ceil(max(m, n) / WIDE) * max(1, min(ceil((BLOCKS + 1) / max(1, ceil(max(m, n) / WIDE))) - 1, ceil((k * WIDE * SIZE + 1) / (KIB * 1024)) - 1, ceil(k / 256)))", "1", "1"]
tile      = ["WIDE", "1"]
scales    = ["BLOCKS"]
workspace = "BLOCKS * WIDE * SIZE"
flags     = "4 * BLOCKS"
limits    = ["min(m, n) <= 1"]
require   = [
    "WIDE >= 8", "256 * 16 % (WIDE * SIZE) == 0", "WIDE * SIZE >= 16", "THREADS % WIDE == 0",
    "THREADS % 256 == 0", "FLY % 8 == 0",
    # a team of threads along k is whole warps, or divides one
    "8 * THREADS / WIDE % 32 * (32 % (8 * THREADS / WIDE)) == 0",
]
early     = true
runs_on   = ["cuda", "emulator"]
source    = "this project: docs/performance.md"
---*/
#include "vectors.cuh"

typedef T Sum;
__device__ __forceinline__ T wide(T x) { return x; }
#include "gemv.cuh"

// Blocks that a multiprocessor shall have registers for. A third of WIDE = 8 would spill.
constexpr int RESIDENT = MOST(1, LEAST(1 + 16 / FLY, WIDE > 8 ? 3 : 2) * 256 / THREADS);

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
    gemm_gemv(int m, int n, int k, T alpha, const T* A, long long lda, const T* B, long long ldb,
              T beta, T* C, long long ldc, T* workspace, unsigned* flags) {
    const long long step = n == 1 ? ldc : 1;
    multiply(m, n, k, A, lda, B, ldb, workspace, flags,
             [&](int i, T sum) { store(C + i * step, sum, alpha, beta); });
}
