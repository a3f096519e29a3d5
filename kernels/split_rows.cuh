// How the passes over operands for the tensor cores go over rows of op(A) and columns of op(B), by
// blocks of 256 threads.
#pragma once
#include "split.cuh"

constexpr int ROWS = 16, STEP = 256;           // a tile: rows by k
constexpr int WARPS = 8, MINE = ROWS / WARPS;  // of a block; rows of a thread, WARPS apart

// Elements of one part of a packed row: hi of a row lies before lo.
__device__ inline int pitch_of(int k) { return (k + 63) / 64 * 64; }

template <typename E>
struct Tile {
    alignas(16) E rows[ROWS][STEP + 4];
};

// Calls body(i, at, four) for the elements from k0 to k1, multiples of STEP, of ROWS rows from
// `row0` on: each thread has fours along k of rows w + WARPS i, w being the number of its warp.
// Zeros are beyond the matrix. Where memory runs across k, the tile turns it.
template <typename E, bool ALONG, typename Body>
__device__ __forceinline__ void for_each_four(const Source<E, ALONG>& source, int row0, int k0,
                                              int k1, Tile<E>& tile, Body body) {
    const bool vectors = source.vectors();
    const int t = threadIdx.x, warp = t / 32, lane = t % 32;
    constexpr int LINES = 64, FOURS = 4;  // lines of k at once, a thread's fours of a tile
    for (int k = k0; k < k1; k += STEP) {
        Four<E> four[FOURS];
#pragma unroll
        for (int x = 0; x < FOURS; ++x) {
            four[x] = ALONG ? source.four(row0 + warp + WARPS * (x / 2),
                                          k + 128 * (x % 2) + 4 * lane, vectors)
                            : source.four(k + t / 4 + LINES * x, row0 + t % 4 * 4, vectors);
        }
        if (!ALONG) {
            __syncthreads();  // all have read the tile before
#pragma unroll
            for (int x = 0; x < FOURS; ++x) {
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    tile.rows[t % 4 * 4 + i][t / 4 + LINES * x] = four[x].x[i];
            }
            __syncthreads();
#pragma unroll
            for (int x = 0; x < FOURS; ++x)
                four[x] =
                    *(const Four<E>*)&tile.rows[warp + WARPS * (x / 2)][128 * (x % 2) + 4 * lane];
        }
#pragma unroll
        for (int x = 0; x < FOURS; ++x) body(x / 2, k + 128 * (x % 2) + 4 * lane, four[x]);
    }
}
