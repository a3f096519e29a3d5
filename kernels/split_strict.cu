/*---
summary = "what the verdict on a split product asks for instead of fp16: `tuned`, or the TF32 split"
entry   = "split_strict"
role    = "strict"
# BM, BN, BK, TM, TN, LM, KG, STAGES: see copy_ring.cuh
# HOPS: see tuned_tile.cuh
# BLOCKS: see tuned.cuh
# WIDE  1: splits in TF32 too, which small products do not
params  = [
    {BM = 128, BN = 256, BK = 8, TM = 16, TN = 8, LM = 4, KG = 1, HOPS = 1, STAGES = 5, BLOCKS = 132, WIDE = 1},
    {BM = 128, BN = 256, BK = 8, TM = 16, TN = 8, LM = 4, KG = 1, HOPS = 1, STAGES = 5, BLOCKS = 132, WIDE = 0},
    {BM = 64, BN = 128, BK = 16, TM = 16, TN = 8, LM = 4, KG = 4, HOPS = 1, STAGES = 5, BLOCKS = 132, WIDE = 1},
    {BM = 64, BN = 128, BK = 16, TM = 16, TN = 8, LM = 4, KG = 4, HOPS = 1, STAGES = 5, BLOCKS = 132, WIDE = 0},
]
block     = ["256", "1", "1"]
grid      = ["BLOCKS", "1", "1"]
scales    = ["BLOCKS"]
tile      = ["BM", "BN"]
# the ring; the sums that half of the groups hand to the others, or half of the tile
shared    = "max(STAGES * BK * (BM + BN + 64 / SIZE) * SIZE, KG * BM * BN * SIZE / 2)"
workspace = "2 * BLOCKS * BM * BN * SIZE"
flags     = "32 * BLOCKS"
early     = true
require   = [
    "KG * BM * BN == 256 * TM * TN",
    "BM % (TM * LM) == 0", "16 % LM == 0", "BN % (TN * 32 / LM) == 0",
    "TM % 4 == 0", "TN % 4 == 0", "TM * TN * SIZE <= 512",
    "BK % (4 * HOPS) == 0", "BK % KG == 0", "BK / KG >= 2", "STAGES >= 2", "HOPS <= 2",
    "256 % BK == 0", "32 % KG == 0",
    "BLOCKS <= 65536",
    # a tile of the TF32 split
    "STAGES * BK * (BM + BN) * SIZE >= 16640 * WIDE",
]
dtypes    = ["float32"]
arch      = ">=80"
source    = "this project: docs/tensor-cores.md"
---*/
#include "early_launch.cuh"
#include "split_rows.cuh"
#include "tuned.cuh"

#if WIDE
constexpr int SLICE = 4 * STEP;  // of k, that a block splits before it goes on

// hi and lo of rows `row0` on of an operand, from k0 on, in TF32, by the powers of two in
// `exponent`.
template <bool ALONG>
__device__ inline void split_tf32(const Source<unsigned, ALONG>& source, int row0, int k0,
                                  unsigned* parts, const int* exponent, Tile<unsigned>& tile) {
    const int pitch = pitch_of(source.k), warp = threadIdx.x / 32;
    float scale[MINE];
#pragma unroll
    for (int i = 0; i < MINE; ++i) {
        const int row = row0 + warp + WARPS * i;
        scale[i] = power_of_two(row < source.rows ? max(-126, min(127, -exponent[row])) : 0);
    }
    const int steps = (source.k + STEP - 1) / STEP * STEP;
    for_each_four(source, row0, k0, min(steps, k0 + SLICE), tile,
                  [&](int i, int k, const Four<unsigned>& four) {
                      const int row = row0 + warp + WARPS * i;
                      Four<unsigned> hi, lo;
#pragma unroll
                      for (int x = 0; x < 4; ++x) {
                          const float value = as_float(four.x[x]) * scale[i];
                          hi.x[x] = to_tf32(value);
                          lo.x[x] = to_tf32(value - as_float(hi.x[x]));
                      }
                      if (row >= source.rows || k >= pitch) return;
                      unsigned* const to = parts + (long long)row * 2 * pitch + k;
                      *(Four<unsigned>*)to = hi;
                      *(Four<unsigned>*)(to + pitch) = lo;
                  });
}
#endif

extern "C" __global__ void __launch_bounds__(256)
    split_strict(int m, int n, int k, float alpha, const float* A, long long lda, const float* B,
                 long long ldb, float beta, float* C, long long ldc, float* workspace,
                 unsigned* flags, void* parts_a, void* parts_b, const int* exponent_a,
                 const int* exponent_b, State* state) {
    wait_for_launch_before();
    if (blockIdx.x == 0 && threadIdx.x == 0) forget(state);
    if (state->verdict == FP16_SPLIT) return;
    if (state->verdict == STRICT) {
        tuned<(KG > 1 ? 1 : 2)>(m, n, k, alpha, A, lda, B, ldb, beta, C, ldc, workspace, flags);
        return;
    }
#if WIDE
    DYNAMIC_SHARED(raw);
    Tile<unsigned>& tile = *reinterpret_cast<Tile<unsigned>*>(raw);
    const int groups = (m + ROWS - 1) / ROWS + (n + ROWS - 1) / ROWS;
    const int slices = (k + SLICE - 1) / SLICE;
    for (long long t = blockIdx.x; t < (long long)groups * slices; t += gridDim.x) {
        const int group = int(t / slices), k0 = int(t % slices) * SLICE;
        for_group<unsigned, ROWS>(
            group, m, n, k, A, lda, B, ldb, [&](const auto& source, int row0, bool of_b) {
                unsigned* const parts = (unsigned*)(of_b ? parts_b : parts_a);
                split_tf32(source, row0, k0, parts, of_b ? exponent_b : exponent_a, tile);
            });
        __syncthreads();
    }
#endif
}
