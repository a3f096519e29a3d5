// A block's tile of C: the next tiles of A and B are fetched while these are multiplied.
#pragma once
#include "quarters.cuh"

// One step's tiles, both with K as the rows.
struct Tiles {
    alignas(16) T A[BK][BM + PAD];
    alignas(16) T B[BK][BN + PAD];
};

__device__ inline void double_buffered(int m, int n, int k, T alpha, const T* __restrict__ A,
                                       long long lda, const T* __restrict__ B, long long ldb,
                                       T beta, T* C, long long ldc) {
    __shared__ Tiles tiles[2];
    const long long row0 = (long long)blockIdx.y * BM, col0 = (long long)blockIdx.x * BN;
    const int row = thread_row(), col = thread_col();
    PanelA a_panel(A, lda, row0, m);
    PanelB b_panel(B, ldb, col0, n);
    T sum[TM][TN] = {};

    a_panel.fetch(k);
    b_panel.fetch(k);
    a_panel.template put<1, BM + PAD>(tiles[0].A[0]);
    b_panel.template put<1, BN + PAD>(tiles[0].B[0]);
    __syncthreads();
    int now = 0;
    // The fetch before each call is under way while this multiplies. One barrier a step: nobody
    // reads the other buffer any more, for all have passed the barrier after multiplying from it.
    for_each_step(a_panel, b_panel, k - BK, [&] {
        multiply(sum, tiles[now].A, tiles[now].B, row, col);
        now ^= 1;
        a_panel.template put<1, BM + PAD>(tiles[now].A[0]);
        b_panel.template put<1, BN + PAD>(tiles[now].B[0]);
        __syncthreads();
    });
    multiply(sum, tiles[now].A, tiles[now].B, row, col);
    store_tile<ROW_STEP, COL_STEP>(m, n, alpha, sum, beta, C, ldc, row0 + row, col0 + col);
}
