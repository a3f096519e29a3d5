/*---
summary   = "products of a stack of matrices, one for each z of the grid: tuned's tile, one a block"
entry     = "stack_tile"
role      = "stack"
# BM, BN, BK, TM, TN, LM, KG, STAGES: see copy_ring.cuh
# HOPS: see tuned_tile.cuh
params    = [
    {BM = 128, BN = 256, BK = 8, TM = 16, TN = 8, LM = 4, KG = 1, HOPS = 1, STAGES = 5},
    {BM = 64, BN = 64, BK = 16, TM = 8, TN = 4, LM = 4, KG = 1, HOPS = 1, STAGES = 4},
    {BM = 32, BN = 32, BK = 16, TM = 8, TN = 4, LM = 4, KG = 1, HOPS = 1, STAGES = 3},
]
block     = ["KG * BM * BN / (TM * TN)", "1", "1"]
grid      = ["ceil(m / BM) * ceil(n / BN)", "1", "1"]
tile      = ["BM", "BN"]
# the ring; then the sums that half of the groups hand to the others
shared    = "max(STAGES * BK * (BM + BN + 64 / SIZE) * SIZE, (KG > 1) * KG * BM * BN * SIZE / 2)"
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
]
dtypes    = ["float32"]
arch      = ">=80"
source    = "this project: docs/calls.md"
---*/

// C = A B for matrices that lie one step after the other. Blocks of a tile each, and many of them
// on a multiprocessor: what is not hidden within a short k, other blocks hide.
//
//   load, multiply   copy_ring.cuh and tuned_tile.cuh
//   store            tuned_tile.cuh
#include "tuned_tile.cuh"

extern "C" __global__ void __launch_bounds__(THREADS)
    stack_tile(int m, int n, int k, const T* A, long long lda, long long step_a, const T* B,
               long long ldb, long long step_b, T* C, long long ldc, long long step_c) {
    A += blockIdx.z * step_a;
    B += blockIdx.z * step_b;
    C += blockIdx.z * step_c;
    const int thread = threadIdx.x % GROUP, group = threadIdx.x / GROUP;
    const int from_a = (group * KP * LD_A + row_in(thread)) * SIZE;
    const int from_b = (A_ELEMENTS + group * KP * LD_B + col_in(thread)) * SIZE;
    const int tiles_m = (m + BM - 1) / BM;
    const int row = blockIdx.x % tiles_m * BM, col = blockIdx.x / tiles_m * BN;
    const int steps = MOST(1, (k + BK - 1) / BK), skip = steps * BK - k;
    T sum[TM][TN];
    if (VECTORS_FIT(m, n, k, A, lda, B, ldb))
        multiply<true>(sum, m, n, A, lda, B, ldb, row, col, 0, skip, steps, from_a, from_b);
    else
        multiply<false>(sum, m, n, A, lda, B, ldb, row, col, 0, skip, steps, from_a, from_b);
    if (KG > 1) add_groups(sum, group, thread);
    if (group == 0)
        store_tile(sum, m, n, T(1), T(0), C, ldc, row + row_in(thread), col + col_in(thread));
}
