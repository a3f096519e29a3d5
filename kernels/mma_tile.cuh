// A step of a block's 128 x 128 of C from packed operands, for `mma`. An operand comes in PARTS, hi
// alone or hi and lo; shared memory holds two steps of all parts of A and B.
#pragma once
#include "mma.cuh"

constexpr int SIDE = 128, WORDS = 16;  // of the tile; a step of k, in words
constexpr int PITCH = WORDS + 4;       // 8 rows by 4 words fall in distinct banks
constexpr int TILE = SIDE * PITCH;     // words of one part of one operand

// A thread's place in the tile: it is lane 4 g + t of the warp whose 64 x 32 begin at (row, col).
struct Place {
    int row, col, g, t;
};

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
