/*---
summary = "BM x BN of C a block, TM x TN a thread; tiles of A and B in shared memory, by vectors"
entry   = "gemm_block_tile"
rung    = 70
# BM, BN, BK, TM, TN: see tile.cuh
params  = [
    {BM = 128, BN = 128, BK = 8, TM = 8, TN = 8}, {BM = 64, BN = 64, BK = 16, TM = 4, TN = 4},
    {BM = 128, BN = 64, BK = 8, TM = 8, TN = 8},
]
block   = ["(BM / TM) * (BN / TN)", "1", "1"]
grid    = ["ceil(n / BN)", "ceil(m / BM)", "1"]
tile    = ["BM", "BN"]
require = [
    "TM % 4 == 0", "TN % 4 == 0", "BK % 4 == 0", "BM % TM == 0", "BN % TN == 0",
    "4 * (BN / TN) % TM == 0", "4 * (BM / TM) % TN == 0",
    "4 * (BM / TM) * (BN / TN) % BK == 0",
    "BM * BK % (4 * (BM / TM) * (BN / TN)) == 0", "BN * BK % (4 * (BM / TM) * (BN / TN)) == 0",
    "SIZE * BK * (BM + BN + 16 / SIZE) <= 49152",
]
source  = "S1, the article: v1, 128 x 128 x 8 with 8 x 8 a thread"
---*/
#include "tile.cuh"

// Each element of a tile is read from global memory once a block, and used BN times (A) or BM
// times (B). Threads read a column of As, where neighbours are BK apart, and vectors of Bs that
// are TN apart: both meet in few banks, which conflict_free mends.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    gemm_block_tile(int m, int n, int k, T alpha, const T* __restrict__ A, long long lda,
                    const T* __restrict__ B, long long ldb, T beta, T* C, long long ldc) {
    alignas(16) __shared__ T As[BM][BK];
    alignas(16) __shared__ T Bs[BK][BN + PAD];
    const long long row0 = (long long)blockIdx.y * BM, col0 = (long long)blockIdx.x * BN;
    const int row = threadIdx.x / (BN / TN) * TM, col = threadIdx.x % (BN / TN) * TN;
    PanelA a_panel(A, lda, row0, m);
    PanelB b_panel(B, ldb, col0, n);
    T sum[TM][TN] = {};
    for_each_step(a_panel, b_panel, k, [&] {
        __syncthreads();  // all are done with the tiles of the step before
        a_panel.template put<BK, 1>(&As[0][0]);
        b_panel.template put<1, BN + PAD>(&Bs[0][0]);
        __syncthreads();
#pragma unroll 2  // pairs of a row of As come together; four would not fit in registers
        for (int p = 0; p < BK; ++p) {
            Vec4 a[TM / 4], b[TN / 4];
#pragma unroll
            for (int i = 0; i < TM; ++i) a[i / 4].x[i % 4] = As[row + i][p];
#pragma unroll
            for (int j = 0; j < TN; j += 4) b[j / 4] = *(const Vec4*)&Bs[p][col + j];
            add_outer(sum, a, b);
        }
    });
    store_tile<4, 4>(m, n, alpha, sum, beta, C, ldc, row0 + row, col0 + col);
}
