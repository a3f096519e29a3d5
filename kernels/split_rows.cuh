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

// A thread's fours along k of a tile: of rows w + WARPS i, w being the number of its warp.
template <typename E>
struct Fours {
    static constexpr int COUNT = 4;
    Four<E> four[COUNT];

    // Calls body(i, at, four) for each, of a tile from k0 on.
    template <typename Body>
    __device__ __forceinline__ void each(int k0, Body body) const {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int x = 0; x < COUNT; ++x) body(x / 2, k0 + 128 * (x % 2) + 4 * lane, four[x]);
    }
};

// The tile of ROWS rows from `row0` on and STEP elements from k on; zeros beyond the matrix. Where
// memory runs across k, all threads call this, and `turning` turns the tile.
template <typename E, bool ALONG>
__device__ __forceinline__ Fours<E> fours_at(const Source<E, ALONG>& source, int row0, int k,
                                             Tile<E>& turning) {
    constexpr int COUNT = Fours<E>::COUNT, LINES = 64;  // lines of k at once
    const bool vectors = source.vectors();
    const int t = threadIdx.x, warp = t / 32, lane = t % 32;
    Fours<E> found;
#pragma unroll
    for (int x = 0; x < COUNT; ++x) {
        found.four[x] = ALONG ? source.four(row0 + warp + WARPS * (x / 2),
                                            k + 128 * (x % 2) + 4 * lane, vectors)
                              : source.four(k + t / 4 + LINES * x, row0 + t % 4 * 4, vectors);
    }
    if (ALONG) return found;
    __syncthreads();  // all have read the tile before
#pragma unroll
    for (int x = 0; x < COUNT; ++x) {
#pragma unroll
        for (int i = 0; i < 4; ++i)
            turning.rows[t % 4 * 4 + i][t / 4 + LINES * x] = found.four[x].x[i];
    }
    __syncthreads();
#pragma unroll
    for (int x = 0; x < COUNT; ++x)
        found.four[x] =
            *(const Four<E>*)&turning.rows[warp + WARPS * (x / 2)][128 * (x % 2) + 4 * lane];
    return found;
}

// Calls body(i, at, four), as `Fours` does, for the elements from k0 to k1, multiples of STEP.
template <typename E, bool ALONG, typename Body>
__device__ __forceinline__ void for_each_four(const Source<E, ALONG>& source, int row0, int k0,
                                              int k1, Tile<E>& tile, Body body) {
    for (int k = k0; k < k1; k += STEP) fours_at(source, row0, k, tile).each(k, body);
}
