// Where a thread's TM x TN elements lie in its block's tile of C so that shared memory serves a
// warp without conflicts: in pieces of 4 x 4, ROW_STEP rows and COL_STEP columns apart (with
// 8 x 8 a thread: four quarters, BM / 2 and BN / 2 apart).
#pragma once
#include "tile.cuh"

constexpr int ROW_STEP = 4 * (BM / TM), COL_STEP = 4 * (BN / TN);

// The first row and column of this thread. A warp is 4 x 8 threads: its reads of a column of A
// are 4 vectors, of a row of B 8 neighbouring ones.
__device__ inline int thread_row() {
    return 4 * (threadIdx.x / 32 / (BN / TN / 8) * 4 + threadIdx.x % 32 / 8);
}

__device__ inline int thread_col() {
    return 4 * (threadIdx.x / 32 % (BN / TN / 8) * 8 + threadIdx.x % 8);
}

// sum += A tile * B tile over one step of K.
__device__ inline void multiply(T (&sum)[TM][TN], const T (&A)[BK][BM + PAD],
                                const T (&B)[BK][BN + PAD], int row, int col) {
#pragma unroll
    for (int p = 0; p < BK; ++p) {
        Vec4 a[TM / 4], b[TN / 4];
#pragma unroll
        for (int q = 0; q < TM / 4; ++q) a[q] = *(const Vec4*)&A[p][row + q * ROW_STEP];
#pragma unroll
        for (int q = 0; q < TN / 4; ++q) b[q] = *(const Vec4*)&B[p][col + q * COL_STEP];
        add_outer(sum, a, b);
    }
}
