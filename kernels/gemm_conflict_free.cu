/*---
summary = "block tiles, A transposed in shared memory, threads in quarters: no bank conflicts"
entry   = "gemm_conflict_free"
rung    = 80
# BM, BN, BK, TM, TN: see tile.cuh
params  = [
    {BM = 128, BN = 128, BK = 8, TM = 8, TN = 8}, {BM = 64, BN = 64, BK = 16, TM = 4, TN = 4},
    {BM = 128, BN = 64, BK = 8, TM = 8, TN = 8},
]
block   = ["(BM / TM) * (BN / TN)", "1", "1"]
grid    = ["ceil(n / BN)", "ceil(m / BM)", "1"]
tile    = ["BM", "BN"]
require = [
    "TM % 4 == 0", "TN % 4 == 0", "BK % 4 == 0", "BM % (4 * TM) == 0", "BN % (8 * TN) == 0",
    "4 * (BN / TN) % TM == 0", "4 * (BM / TM) % TN == 0",
    "4 * (BM / TM) * (BN / TN) % BK == 0",
    "BM * BK % (4 * (BM / TM) * (BN / TN)) == 0", "BN * BK % (4 * (BM / TM) * (BN / TN)) == 0",
    "SIZE * BK * (BM + BN + 32 / SIZE) <= 49152",
]
source  = "S1, the article: v2"
---*/
#include "quarters.cuh"

// The tile of A is kept with K as its rows, so that a thread's elements of a column of A are
// neighbours and come as vectors, like those of B; quarters.cuh says which threads take which,
// so that a warp's vectors fall in distinct banks.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    gemm_conflict_free(int m, int n, int k, T alpha, const T* __restrict__ A, long long lda,
                       const T* __restrict__ B, long long ldb, T beta, T* C, long long ldc) {
    alignas(16) __shared__ T As[BK][BM + PAD];
    alignas(16) __shared__ T Bs[BK][BN + PAD];
    const long long row0 = (long long)blockIdx.y * BM, col0 = (long long)blockIdx.x * BN;
    const int row = thread_row(), col = thread_col();
    PanelA a_panel(A, lda, row0, m);
    PanelB b_panel(B, ldb, col0, n);
    T sum[TM][TN] = {};
    for_each_step(a_panel, b_panel, k, [&] {
        __syncthreads();  // all are done with the tiles of the step before
        a_panel.template put<1, BM + PAD>(As[0]);
        b_panel.template put<1, BN + PAD>(Bs[0]);
        __syncthreads();
        multiply(sum, As, Bs, row, col);
    });
    store_tile<ROW_STEP, COL_STEP>(m, n, alpha, sum, beta, C, ldc, row0 + row, col0 + col);
}
