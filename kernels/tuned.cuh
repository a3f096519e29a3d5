// C in tiles, by blocks that are persistent: the text of `tuned`, and of the strict product behind
// a verdict.
//
// C is cut into tiles of BM x BN. Blocks are persistent: each makes tile after tile. When the tiles
// do not fill the blocks evenly, the last of them are cut along k into equal runs of steps
// (stream-K, see shares.cuh); the partial sums meet in the workspace and are added in a fixed
// order, so the same input gives the same bits.
//
//   BLOCKS  blocks of the grid, at most: as many as a GPU of 132 multiprocessors runs at once
//   SPLIT   blocks for each tile of C, at most: 1 starts no more blocks than there are tiles
//
//   load, multiply   copy_ring.cuh and tuned_tile.cuh
//   collect          adds up the partial sums of a tile that is cut
//   store            tuned_tile.cuh
#pragma once
#include "tuned_tile.cuh"

constexpr int STRIP = 8;  // tile rows that are worked through together, so that L2 keeps A and B
constexpr int FAN = 16;   // partial sums that one block adds

// The tiles that are cut along k: their steps form one line, of which each block has a run.
struct CutTiles {
    int steps;        // of a tile
    int least, more;  // see shares.cuh

    __device__ CutTiles(int tiles, int steps_) : steps(steps_) {
        const int units = tiles * steps;
        least = units / int(gridDim.x);
        more = units - least * int(gridDim.x);
    }
    __device__ int begin(int block) const { return run_begin(block, least, more); }
    // The first and the last block that have steps of a tile.
    __device__ int first(int tile) const { return run_of(tile * steps, least, more); }
    __device__ int last(int tile) const { return run_of(tile * steps + steps - 1, least, more); }
    // The place in the workspace, in tiles, of a block's partial sums of a tile. A block leaves
    // those of two tiles at most: of the one that its run begins in, and of the one it ends in.
    __device__ int slot(int block, int tile) const {
        return 2 * block + (begin(block) / steps != tile);
    }
};

// Hands in this block's partial sums of a tile. Returns true in the one block that ends up with
// the whole sum: sums are added FAN at a time, always in the same order, by whichever of the FAN
// blocks comes last; FAN such sums are added likewise, until one is left.
__device__ __forceinline__ bool collect(T (&sum)[TM][TN], const CutTiles& cut, int tile,
                                        T* workspace, unsigned* flags, int group, int thread) {
    const int first = cut.first(tile), parts = cut.last(tile) - first + 1;
    int mine = int(blockIdx.x) - first;
#pragma unroll 1
    for (int stride = 1; stride < parts; stride *= FAN, flags += 2 * gridDim.x) {
        if (group == 0) {
            const int slot = cut.slot(first + mine, tile);
            T* const to = workspace + (long long)slot * (BM * BN) + thread * VEC;
            put_sums(reinterpret_cast<Vec*>(to), sum);
        }
        mine -= mine / stride % FAN * stride;  // the first of those that are added together
        const int count = LEAST(FAN, (parts - mine + stride - 1) / stride);
        if (!last_of(flags + cut.slot(first + mine, tile), count)) return false;
        UNROLL for (int i = 0; i < TM; ++i) {
            UNROLL for (int j = 0; j < TN; ++j) sum[i][j] = T(0);
        }
#pragma unroll 1
        for (int c = group; c < count; c += KG) {
            const int slot = cut.slot(first + mine + c * stride, tile);
            const Vec* const from = reinterpret_cast<const Vec*>(workspace);
            add_sums(sum, from + (long long)slot * VECTORS_OF_TILE + thread);
        }
        if (KG > 1) add_groups(sum, group, thread);
    }
    return true;
}

// ROUNDS of store_in_loop; 0: by store_tile.
template <int ROUNDS = 0>
__device__ __forceinline__ void tuned(int m, int n, int k, T alpha, const T* A, long long lda,
                                      const T* B, long long ldb, T beta, T* C, long long ldc,
                                      T* workspace, unsigned* flags) {
    const int thread = threadIdx.x % GROUP, group = threadIdx.x / GROUP;
    const int from_a = (group * KP * LD_A + row_in(thread)) * SIZE;
    const int from_b = (A_ELEMENTS + group * KP * LD_B + col_in(thread)) * SIZE;

    const int tiles_m = (m + BM - 1) / BM, tiles_n = (n + BN - 1) / BN, tiles = tiles_m * tiles_n;
    const int steps = MOST(1, (k + BK - 1) / BK), skip = steps * BK - k;
    const bool vectors = VECTORS_FIT(m, n, k, A, lda, B, ldb);

    // Whole waves of tiles go one to a block. The rest, and one wave more, are cut along k.
    const int blocks = gridDim.x;
    int cut_tiles = tiles % blocks;
    if (cut_tiles && tiles > blocks) cut_tiles += blocks;
    const CutTiles cut(cut_tiles, steps);
    int unit = cut.begin(blockIdx.x), end = cut.begin(blockIdx.x + 1);
    int whole = cut_tiles + blockIdx.x;
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
            multiply<true>(sum, m, n, A, lda, B, ldb, row, col, k0, skip, count, from_a, from_b);
        else
            multiply<false>(sum, m, n, A, lda, B, ldb, row, col, k0, skip, count, from_a, from_b);
        if (KG > 1) add_groups(sum, group, thread);
        if (count < steps && !collect(sum, cut, tile, workspace, flags, group, thread)) continue;
        if constexpr (ROUNDS > 0) {
            __syncthreads();  // the ring is read
            store_in_loop<ROUNDS>(sum, m, n, alpha, beta, C, ldc, row, col, group, thread);
            __syncthreads();  // and may be filled again
            continue;
        }
        if (group != 0) continue;
        store_tile(sum, m, n, alpha, beta, C, ldc, row + row_in(thread), col + col_in(thread));
    }
}
