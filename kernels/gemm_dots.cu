/*---
summary   = "C of few elements: each a dot product over a long k, which many blocks share"
entry     = "gemm_dots"
rung      = 98
# BM, BN, THREADS, FLY, BLOCKS: see dots.cuh
params    = [
    {BM = 4, BN = 4, THREADS = 256, FLY = 16, BLOCKS = 528},
    {BM = 2, BN = 2, THREADS = 256, FLY = 16, BLOCKS = 528},
    {BM = 8, BN = 8, THREADS = 256, FLY = 16, BLOCKS = 264},
    {BM = 2, BN = 8, THREADS = 256, FLY = 20, BLOCKS = 528},
    {BM = 8, BN = 2, THREADS = 256, FLY = 20, BLOCKS = 528},
    {BM = 4, BN = 16, THREADS = 256, FLY = 20, BLOCKS = 264},
    {BM = 16, BN = 4, THREADS = 256, FLY = 20, BLOCKS = 264},
    {BM = 16, BN = 8, THREADS = 256, FLY = 24, BLOCKS = 264},
    {BM = 8, BN = 16, THREADS = 256, FLY = 24, BLOCKS = 264},
]
block     = ["THREADS", "1", "1"]
grid      = ["ceil(m / BM) * ceil(n / BN) * max(1, min(ceil((BLOCKS + 1) / max(1, ceil(m / BM) * ceil(n / BN))) - 1, ceil(k / (2 * THREADS))))", "1", "1"]
tile      = ["BM", "BN"]
scales    = ["BLOCKS"]
workspace = "BLOCKS * BM * BN * SIZE"
flags     = "4 * BLOCKS"
limits    = ["m <= 4 * BM", "n <= 4 * BN"]
# a warp's lanes halve the sums between them; more than 128 of 32 bits fit in no thread's registers
require   = ["128 % (BM * BN) == 0", "BM * BN * SIZE <= 512", "THREADS % 32 == 0"]
early     = true
runs_on   = ["cuda", "emulator"]
source    = "this project: docs/performance.md"
---*/
#include "vectors.cuh"

typedef T Sum;
__device__ __forceinline__ T wide(T x) { return x; }
#include "dots.cuh"

extern "C" __global__ void __launch_bounds__(THREADS)
    gemm_dots(int m, int n, int k, T alpha, const T* A, long long lda, const T* B, long long ldb,
              T beta, T* C, long long ldc, T* workspace, unsigned* flags) {
    dot_products(m, n, k, A, lda, B, ldb, workspace, flags,
                 [&](int i, int j, T sum) { store(C + i * ldc + j, sum, alpha, beta); });
}
