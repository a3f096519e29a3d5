/*---
summary   = "16 x 8 a thread from a cp.async ring, sums in the other register bank than B, stream-K"
entry     = "gemm_tuned"
rung      = 100
# BM, BN, BK, TM, TN, LM, KG, STAGES: see copy_ring.cuh
# HOPS: see tuned_tile.cuh
# BLOCKS, SPLIT: see tuned.cuh
params    = [
    {BM = 128, BN = 256, BK = 8, TM = 16, TN = 8, LM = 4, KG = 1, HOPS = 1, STAGES = 5, BLOCKS = 132, SPLIT = 132},
    {BM = 128, BN = 256, BK = 8, TM = 16, TN = 8, LM = 4, KG = 1, HOPS = 1, STAGES = 5, BLOCKS = 132, SPLIT = 1},
    {BM = 128, BN = 256, BK = 8, TM = 16, TN = 8, LM = 4, KG = 1, HOPS = 2, STAGES = 3, BLOCKS = 132, SPLIT = 132},
    {BM = 256, BN = 128, BK = 8, TM = 16, TN = 8, LM = 4, KG = 1, HOPS = 2, STAGES = 4, BLOCKS = 132, SPLIT = 132},
    {BM = 128, BN = 128, BK = 8, TM = 16, TN = 8, LM = 4, KG = 1, HOPS = 1, STAGES = 5, BLOCKS = 264, SPLIT = 264},
    {BM = 64, BN = 128, BK = 16, TM = 16, TN = 8, LM = 4, KG = 4, HOPS = 1, STAGES = 5, BLOCKS = 132, SPLIT = 1},
    {BM = 64, BN = 128, BK = 16, TM = 16, TN = 8, LM = 4, KG = 4, HOPS = 1, STAGES = 5, BLOCKS = 132, SPLIT = 132},
    {BM = 64, BN = 128, BK = 16, TM = 16, TN = 8, LM = 4, KG = 4, HOPS = 2, STAGES = 4, BLOCKS = 132, SPLIT = 1},
    {BM = 128, BN = 64, BK = 16, TM = 16, TN = 8, LM = 4, KG = 4, HOPS = 1, STAGES = 5, BLOCKS = 132, SPLIT = 132},
    {BM = 64, BN = 64, BK = 32, TM = 8, TN = 8, LM = 4, KG = 4, HOPS = 2, STAGES = 3, BLOCKS = 132, SPLIT = 132},
    {BM = 16, BN = 256, BK = 16, TM = 8, TN = 8, LM = 2, KG = 4, HOPS = 1, STAGES = 6, BLOCKS = 132, SPLIT = 4},
    {BM = 256, BN = 16, BK = 16, TM = 8, TN = 8, LM = 16, KG = 4, HOPS = 2, STAGES = 4, BLOCKS = 132, SPLIT = 4},
    {BM = 8, BN = 256, BK = 32, TM = 8, TN = 8, LM = 1, KG = 8, HOPS = 2, STAGES = 3, BLOCKS = 132, SPLIT = 4},
]
block     = ["KG * BM * BN / (TM * TN)", "1", "1"]
grid      = ["max(1, min(BLOCKS, SPLIT * ceil(m / BM) * ceil(n / BN), ceil(m / BM) * ceil(n / BN) * ceil(k / BK)))", "1", "1"]
tile      = ["BM", "BN"]
scales    = ["BLOCKS", "SPLIT"]
# the ring; then the sums that half of the groups hand to the others
shared    = "max(STAGES * BK * (BM + BN + 64 / SIZE) * SIZE, (KG > 1) * KG * BM * BN * SIZE / 2)"
# partial sums of two tiles for each block; counters for four levels of adding them up
workspace = "2 * BLOCKS * BM * BN * SIZE"
flags     = "32 * BLOCKS"
require   = [
    # a group of warps of LM x 32 / LM lanes, at least two of them along n, makes the tile
    "BM % (TM * LM) == 0", "16 % LM == 0", "BN % (TN * 32 / LM) == 0",
    # sums as vectors; they must fit in registers
    "TM % 4 == 0", "TN % 4 == 0", "TM * TN * SIZE <= 512",
    # every group has k to multiply, and one k in advance; a step is whole vectors
    "BK % (4 * HOPS) == 0", "BK % KG == 0", "BK / KG >= 2", "STAGES >= 2", "HOPS <= 2",
    # sums of groups are added by halves
    "32 % KG == 0",
    # the threads copy whole rows of a stage
    "(KG * BM * BN / (TM * TN)) % BK == 0",
    # and each of them as many lines as the others
    "256 % BM == 0", "256 % BN == 0",
    "BLOCKS <= 65536",
]
dtypes    = ["float32", "float64", "int32"]
arch      = ">=80"
runs_on   = ["cuda", "emulator"]
source    = "this project: docs/performance.md"
---*/

#include "tuned.cuh"

extern "C" __global__ void __launch_bounds__(THREADS)
    gemm_tuned(int m, int n, int k, T alpha, const T* A, long long lda, const T* B, long long ldb,
               T beta, T* C, long long ldc, T* workspace, unsigned* flags) {
    tuned(m, n, k, alpha, A, lda, B, ldb, beta, C, ldc, workspace, flags);
}
