/*---
summary = "conflict-free block tiles; the next is fetched while this one is multiplied"
entry   = "gemm_double_buffered"
rung    = 90
# BM, BN, BK, TM, TN: see tile.cuh
params  = [
    {BM = 128, BN = 128, BK = 8, TM = 8, TN = 8}, {BM = 64, BN = 64, BK = 16, TM = 4, TN = 4},
    {BM = 128, BN = 64, BK = 8, TM = 8, TN = 8},
]
block   = ["(BM / TM) * (BN / TN)", "1", "1"]
grid    = ["ceil(n / BN)", "ceil(m / BM)", "1"]
tile    = ["BM", "BN"]
require = [
    "TM % 4 == 0", "TN % 4 == 0", "BK % 4 == 0", "BM % (4 * TM) == 0", "BN % (8 * TN) == 0",
    "4 * (BN / TN) % TM == 0", "4 * (BM / TM) % TN == 0",
    "4 * (BM / TM) * (BN / TN) % BK == 0",
    "BM * BK % (4 * (BM / TM) * (BN / TN)) == 0", "BN * BK % (4 * (BM / TM) * (BN / TN)) == 0",
    "2 * SIZE * BK * (BM + BN + 32 / SIZE) <= 49152",
]
source  = "S1, the article: v3"
---*/
#include "double_buffered.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    gemm_double_buffered(int m, int n, int k, T alpha, const T* __restrict__ A, long long lda,
                         const T* __restrict__ B, long long ldb, T beta, T* C, long long ldc) {
    double_buffered(m, n, k, alpha, A, lda, B, ldb, beta, C, ldc);
}
