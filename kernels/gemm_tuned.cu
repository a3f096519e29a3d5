/*---
summary   = "16 x 8 a thread from a cp.async ring, sums in the other register bank than B, stream-K"
entry     = "gemm_tuned"
rung      = 100
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
shared    = "max(STAGES * BK * (BM + BN + 64 / SIZE) * SIZE, (KG > 1) * KG * BM * BN * SIZE / 2)"
workspace = "2 * BLOCKS * BM * BN * SIZE"
flags     = "32 * BLOCKS"
require   = [
    "BM % (TM * LM) == 0", "32 % LM == 0", "BN % (TN * 32 / LM) == 0", "TM % 4 == 0", "TN % 4 == 0",
    "HOPS <= 2", "BK % 4 == 0", "BK % KG == 0", "BLOCKS <= 65536", "BK / KG >= 2", "STAGES >= 2",
    "(KG * BM * BN / (TM * TN)) % BK == 0", "TM * TN * SIZE <= 512",
]
dtypes    = ["float32", "float64", "int32"]
arch      = ">=80"
runs_on   = ["cuda", "emulator"]
source    = "this project: docs/performance.md"
---*/

// A block of 32 * KG * (BM / (TM * LM)) * (BN / (TN * 32 / LM)) threads makes tiles of C, BM x BN.
// When the tiles do not fill the blocks evenly, the last of them are cut along k into equal
// runs of steps (stream-K); their parts meet in the workspace and are added in a fixed order, so
// the same input gives the same bits.
#include "tuned_loop.cuh"

constexpr int STRIP = 8;                   // tile rows that are worked through together, for L2
constexpr int FAN = 16;                    // parts added by one block

// How the steps of the tiles that are cut along k are shared out among the blocks.
struct Shares {
    int steps, units, least, more;  // `more` blocks have one unit above the least

    __device__ Shares(int tiles, int steps_) : steps(steps_), units(tiles * steps_) {
        least = units / int(gridDim.x);
        more = units - least * int(gridDim.x);
    }
    __device__ int start(int block) const { return block * least + LEAST(block, more); }
    __device__ int owner(int unit) const {
        const int big = more * (least + 1);
        return unit < big ? unit / (least + 1) : more + (unit - big) / least;
    }
    // A block has parts of two tiles at most: of the one it begins in, and of its last.
    __device__ int slot(int block, int tile) const {
        return 2 * block + (start(block) / steps != tile);
    }
};

// Hands in this block's part of a tile. True in the one block that ends up with the whole sum:
// parts are added FAN at a time, always in the same order, by whichever block comes last.
__device__ __forceinline__ bool collect(T (&sum)[TM][TN], const Shares& shares, int tile,
                                        T* workspace, unsigned* flags, int group, int thread) {
    const int lo = shares.owner(tile * shares.steps);
    const int parts = shares.owner(tile * shares.steps + shares.steps - 1) - lo + 1;
    int mine = int(blockIdx.x) - lo;
#pragma unroll 1
    for (int stride = 1; stride < parts; stride *= FAN, flags += 2 * gridDim.x) {
        if (group == 0) {
            T* to = workspace + (long long)shares.slot(lo + mine, tile) * (BM * BN) + thread * VEC;
            UNROLL for (int i = 0; i < TM; ++i) {
                UNROLL for (int j = 0; j < TN; j += VEC)
                    *reinterpret_cast<Vec*>(to + (i * TN + j) * GROUP) = part(sum, i, j);
            }
        }
        mine -= mine / stride % FAN * stride;  // the first of those that are added together
        const int count = LEAST(FAN, (parts - mine + stride - 1) / stride);
        unsigned* counter = flags + shares.slot(lo + mine, tile);
        if (!last_of(counter, count)) return false;
        UNROLL for (int i = 0; i < TM; ++i) {
            UNROLL for (int j = 0; j < TN; ++j) sum[i][j] = T(0);
        }
#pragma unroll 1
        for (int c = group; c < count; c += KG) {
            const int slot = shares.slot(lo + mine + c * stride, tile);
            const Vec* from = reinterpret_cast<const Vec*>(workspace) +
                              (long long)slot * (BM * BN / VEC) + thread;
            UNROLL for (int i = 0; i < TM; ++i) {
                UNROLL for (int j = 0; j < TN; j += VEC)
                    add_part(sum, i, j, from[(i * TN + j) / VEC * GROUP]);
            }
        }
        if (KG > 1) add_groups(sum, group, thread);
    }
    return true;
}

extern "C" __global__ void __launch_bounds__(THREADS)
gemm_tuned(int m, int n, int k, T alpha, const T* A, long long lda, const T* B, long long ldb,
           T beta, T* C, long long ldc, T* workspace, unsigned* flags) {
    const int thread = threadIdx.x % GROUP, group = threadIdx.x / GROUP;
    const int a_in = (group * KP * LD_A + row_in(thread)) * SIZE;
    const int b_in = (BK * LD_A + group * KP * LD_B + col_in(thread)) * SIZE;

    const int tiles_m = (m + BM - 1) / BM, tiles_n = (n + BN - 1) / BN, tiles = tiles_m * tiles_n;
    const int steps = MOST(1, (k + BK - 1) / BK), skip = steps * BK - k;
    const bool vectors = on_16_bytes(A, lda) && on_16_bytes(B, ldb) &&
                         (TRANS_A ? m : k) % VEC == 0 && (TRANS_B ? k : n) % VEC == 0;

    // Whole waves of tiles, a tile a block; of the rest, and of one wave more, equal shares.
    const int blocks = gridDim.x;
    int cut = tiles % blocks;
    if (cut && tiles > blocks) cut += blocks;
    const Shares shares(cut, steps);
    int unit = shares.start(blockIdx.x), end = shares.start(blockIdx.x + 1);
    int whole = cut + blockIdx.x;
    while (unit < end || whole < tiles) {
        int tile, k0 = 0, count = steps;
        if (unit < end) {
            tile = unit / steps;
            k0 = unit - tile * steps;
            count = LEAST(steps - k0, end - unit);
            unit += count;
        } else {
            tile = whole;
            whole += blocks;
        }
        const int strip = tile / (STRIP * tiles_n), in = tile - strip * (STRIP * tiles_n);
        const int rows = LEAST(STRIP, tiles_m - strip * STRIP);
        const int row = (strip * STRIP + in % rows) * BM, col = in / rows * BN;

        T sum[TM][TN];
        if (vectors)
            multiply<true>(sum, m, n, A, lda, B, ldb, row, col, k0, skip, count, a_in, b_in);
        else
            multiply<false>(sum, m, n, A, lda, B, ldb, row, col, k0, skip, count, a_in, b_in);
        if (KG > 1) add_groups(sum, group, thread);
        if (count < steps && !collect(sum, shares, tile, workspace, flags, group, thread))
            continue;
        if (group != 0) continue;
        store_tile(sum, m, n, alpha, beta, C, ldc, row + row_in(thread), col + col_in(thread));
    }
}
