/*---
summary = "the last tiles of C from the parts of k that clusters of blocks left, added in their order"
entry   = "sum_parts"
role    = "parts"
# BM, BN, CLUSTER: see ring.cuh
# TURN  1: the product's kernel makes C; 2: it makes C^T
# OUT: see numbers.cuh
params  = [{BM = 128, BN = 256, CLUSTER = 2, TURN = 1, OUT = 4}]
# k is the number of tiles that are cut
block   = ["256", "1", "1"]
grid    = ["CLUSTER * BM * BN / 1024", "k", "1"]
early   = true
require = ["CLUSTER * BM * BN % 1024 == 0", "CLUSTER * BM % 4 == 0", "BN % 4 == 0", "TURN <= 2",
           "OUT % 2 == 0", "OUT <= 4"]
dtypes  = ["float16", "bfloat16", "tfloat32"]
source  = "this project: docs/tensor-cores.md"
---*/

// C = alpha 2^(exponent_a[i] + exponent_b[j]) (the sum of its parts) + beta C, of the last `cut` of
// the tiles of m x n, of `steps` of k each, that were made in so many `runs` (cut_tiles.cuh). m and
// n are those of C^T where the product's kernel makes that. With `wanted` from 0 on nothing happens
// unless that is the verdict; exponents are read if `scales`. A thread adds four neighbours of a
// row.
#define SHARES 1
#include "adding.cuh"
#include "early_launch.cuh"
#include "tiles.cuh"

constexpr bool TURNED = TURN == 2;
constexpr int HIGH = TURNED ? BN : CLUSTER * BM, WIDE = TURNED ? CLUSTER * BM : BN;  // a tile of C

extern "C" __global__ void __launch_bounds__(256)
    sum_parts(int m, int n, int steps, int cut, int runs, const float* parts, float alpha,
              const int* exponent_a, const int* exponent_b, int scales, float beta, void* C,
              long long ldc, const int* verdict, int wanted) {
    wait_for_launch_before();
    if (wanted >= 0 && *verdict != wanted) return;
    const Tiles tiles = {m, n, steps, 0, cut, runs};
    const int tile = blockIdx.y, at = 4 * (blockIdx.x * 256 + threadIdx.x);
    int down, across;
    tiles.at(tiles.whole() + tile, down, across);
    const int row = (TURNED ? across : down) + at / WIDE,
              col = (TURNED ? down : across) + at % WIDE;
    const int rows = TURNED ? n : m, cols = TURNED ? m : n;
    if (row >= rows || col >= cols) return;

    const int first = tiles.cluster_of(tile * steps),
              last = tiles.cluster_of((tile + 1) * steps - 1);
    const long long apart = HIGH * WIDE;
    Four<float> sum =
        sum_of(parts + tiles.part_of(first, tile) * apart + at, apart, last - first + 1);
    const Sums to = {cols, alpha, scales ? exponent_a : nullptr, exponent_b, beta, (Out*)C, ldc};
    to.store(sum, row, col);
}
