/*---
summary = "conflict-free block tiles; the next is fetched while this one is multiplied"
entry   = "gemm_double_buffered"
rung    = 90
params  = [
    {BM = 128, BN = 128, BK = 8, TM = 8, TN = 8}, {BM = 64, BN = 64, BK = 16, TM = 4, TN = 4},
    {BM = 128, BN = 64, BK = 8, TM = 8, TN = 8},
]
block   = ["(BM / TM) * (BN / TN)", "1", "1"]
grid    = ["ceil(n / BN)", "ceil(m / BM)", "1"]
require = [
    "TM % 4 == 0", "TN % 4 == 0", "BK % 4 == 0", "BM % (4 * TM) == 0", "BN % (8 * TN) == 0",
    "4 * (BN / TN) % TM == 0", "4 * (BM / TM) % TN == 0",
    "4 * (BM / TM) * (BN / TN) % BK == 0",
    "BM * BK % (4 * (BM / TM) * (BN / TN)) == 0", "BN * BK % (4 * (BM / TM) * (BN / TN)) == 0",
    "2 * SIZE * BK * (BM + BN + 32 / SIZE) <= 49152",
]
source  = "S1, the article: v3"
---*/
#include "quarters.cuh"

// One step's tiles, both with K as the rows.
struct Tiles {
    alignas(16) T A[BK][BM + PAD];
    alignas(16) T B[BK][BN + PAD];
};

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    gemm_double_buffered(int m, int n, int k, T alpha, const T* __restrict__ A, long long lda,
                         const T* __restrict__ B, long long ldb, T beta, T* C, long long ldc) {
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
