// Element by element over rows x cols, by blocks 32 threads wide.
//
//   BM    rows that a block passes over
//   BN    columns that a block passes over
//   ROWS  rows that it passes over at once: threads of a block along y
#pragma once
#include "common.cuh"

// body(i, j, Vec4()) for the elements (i, j) to (i, j + 3) where all rows are `aligned`, and
// body(i, j, T()) for single elements elsewhere. Neighbouring threads take neighbours of a row.
template <typename Body>
__device__ inline void for_each(int rows, int cols, bool aligned, Body body) {
    const long long row0 = (long long)blockIdx.y * BM, col0 = (long long)blockIdx.x * BN;
#pragma unroll 1
    for (int r = threadIdx.y; r < BM && row0 + r < rows; r += ROWS) {
        if (aligned) {
#pragma unroll
            for (int c = 0; c < BN; c += 128) {
                long long j = col0 + c + 4 * threadIdx.x;
                if (j + 4 <= cols) {
                    body(row0 + r, j, Vec4());
                } else {
#pragma unroll 1
                    for (; j < cols; ++j) body(row0 + r, j, T());
                }
            }
        } else {
#pragma unroll 1
            for (int c = threadIdx.x; c < BN && col0 + c < cols; c += 32) {
                body(row0 + r, col0 + c, T());
            }
        }
    }
}
