// Element by element over rows x cols: a block is BM x BN, 32 threads wide.
#pragma once
#include "common.cuh"

// body(i, j, Vec4()) for vectors of elements (i, j) to (i, j + 3) where all rows are `aligned`
// and the block lies inside; body(i, j, T()) for single elements elsewhere. Neighbouring threads
// take neighbours of a row.
template <typename Body>
__device__ inline void for_each(int rows, int cols, bool aligned, Body body) {
    const long long first = (long long)blockIdx.x * BN;
    const bool vectors = aligned && first + BN <= cols;
#pragma unroll
    for (int r = 0; r < BM; r += ROWS) {
        const long long i = (long long)blockIdx.y * BM + threadIdx.y + r;
        if (i >= rows) return;
        if (vectors) {
#pragma unroll
            for (int c = 0; c < BN; c += 128) body(i, first + c + 4 * threadIdx.x, Vec4());
        } else {
#pragma unroll
            for (int c = 0; c < BN; c += 32) {
                const long long j = first + c + threadIdx.x;
                if (j < cols) body(i, j, T());
            }
        }
    }
}
