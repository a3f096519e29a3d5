// A block's 128 x 128 of C from packed operands, for `mma` and `residues_mma`: the load and the main
// loop. A block multiplies one step of k from one half of shared memory, while cp.async copies the
// next step into the other half. An operand comes in PARTS, such as hi and lo; a row has part after
// part, `pitch` words each.
#pragma once
#include "mma.cuh"

constexpr int SIDE = 128, WORDS = 16;  // of the tile; a step of k, in words
constexpr int PITCH = WORDS + 4;       // 8 rows by 4 words fall in distinct banks
constexpr int TILE = SIDE * PITCH;     // words of one part of one operand

// A thread's place in the tile: it is lane 4 g + t of the warp whose 64 x 32 begin at (row, col).
struct Place {
    int row, col, g, t;
};
__device__ inline Place my_place() {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    return {warp / 4 * 64, warp % 4 * 32, lane / 4, lane % 4};
}

// Load: starts the copies of a step's 128 rows from `row0` on, of all parts of an operand; beyond
// the edge the last row again.
template <int PARTS>
__device__ inline void load(unsigned* tiles, const unsigned* parts, long long pitch, int rows,
                            int row0, int word) {
#pragma unroll
    for (int i = threadIdx.x; i < PARTS * SIDE * 4; i += THREADS) {
        const int part = i / (SIDE * 4), row = i / 4 % SIDE, w = i % 4 * 4;
        const long long line = (long long)min(row0 + row, rows - 1) * PARTS + part;
        unsigned* const to = tiles + part * TILE + row * PITCH + w;
        const unsigned* const from = parts + line * pitch + word + w;
        copy_async<16>(shared_address(to), from);
    }
}

// Multiply: calls product(a, b) for each instruction's k of a step, with the thread's words of the
// warp's 64 rows of A and 32 columns of B, of all parts. The step lies at `stage`: the parts of A,
// then those of B.
template <int PARTS, typename Product>
__device__ inline void for_each_product(const unsigned* stage, const Place& at, Product product) {
#pragma unroll
    for (int word = 0; word < WORDS; word += 8) {
        unsigned a[PARTS][4][4], b[PARTS][4][2];
#pragma unroll
        for (int x = 0; x < PARTS; ++x) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const unsigned* const of_a =
                    stage + x * TILE + (at.row + 16 * i + at.g) * PITCH + word + at.t;
                const unsigned* const of_b =
                    stage + (PARTS + x) * TILE + (at.col + 8 * i + at.g) * PITCH + word + at.t;
#pragma unroll
                for (int r = 0; r < 4; ++r) a[x][i][r] = of_a[r % 2 * 8 * PITCH + r / 2 * 4];
#pragma unroll
                for (int r = 0; r < 2; ++r) b[x][i][r] = of_b[r * 4];
            }
        }
        product(a, b);
    }
}

// sums += a b, 4 x 4 products of 16 x 8.
__device__ inline void multiply_warp(Sum (&sums)[4][4][4], const unsigned (&a)[4][4],
                                     const unsigned (&b)[4][2]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) mma(sums[i][j], a[i], b[j]);
    }
}

// The main loop, over the steps from `first` up to `end`: load(stage, step) starts a step's copies,
// and multiply(stage) multiplies it once they are there.
template <int PARTS, typename Load, typename Multiply>
__device__ inline void for_each_step(unsigned* memory, int first, int end, Load load,
                                     Multiply multiply) {
    constexpr int HALF = 2 * PARTS * TILE;
    load(memory + first % 2 * HALF, first);
    copies_commit();
    for (int step = first; step < end; ++step) {
        if (step + 1 < end) load(memory + (step + 1) % 2 * HALF, step + 1);
        copies_commit();
        copies_wait<1>();
        __syncthreads();
        multiply(memory + step % 2 * HALF);
        __syncthreads();
    }
}
