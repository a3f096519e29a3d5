/*---
summary = "each thread owns TILE x TILE elements in registers, straight from global memory"
entry   = "gemm_register_tile"
rung    = 50
# TILE   rows and columns of C that a thread computes
# BLOCK  threads of a block along x and along y
params  = [
    {TILE = 8, BLOCK = 16}, {TILE = 1, BLOCK = 16}, {TILE = 2, BLOCK = 16},
    {TILE = 4, BLOCK = 16}, {TILE = 16, BLOCK = 16}, {TILE = 32, BLOCK = 16},
    {TILE = 64, BLOCK = 16},
]
block   = ["BLOCK", "BLOCK", "1"]
grid    = ["ceil(n / (BLOCK * TILE))", "ceil(m / (BLOCK * TILE))", "1"]
tile    = ["BLOCK * TILE", "BLOCK * TILE"]
# a thread's sums, where registers do not hold them
require = ["TILE * TILE * SIZE <= 65536"]
source  = "S0, the course project: TILE from 1 to 64; from 16 on the sums do not fit in registers"
---*/
#include "common.cuh"

// Registers cannot be indexed by a loop's variable: sums live there only if both loops over
// them are unrolled. Beyond 16 x 16 they do not fit anyway, so the rows stay a loop, and the
// sums are in local memory.
constexpr int ROWS_UNROLLED = TILE <= 16 ? TILE : 1;

// A step of k loads TILE elements of a column of op(A) and TILE of a row of op(B), and adds
// their outer product: 2 TILE loads for TILE * TILE multiply-adds.
extern "C" __global__ void __launch_bounds__(BLOCK * BLOCK)
    gemm_register_tile(int m, int n, int k, T alpha, const T* __restrict__ A, long long lda,
                       const T* __restrict__ B, long long ldb, T beta, T* C, long long ldc) {
    const unsigned row = (blockIdx.y * BLOCK + threadIdx.y) * TILE;
    const unsigned col = (blockIdx.x * BLOCK + threadIdx.x) * TILE;
    T sum[TILE][TILE] = {};
    for (int p = 0; p < k; ++p) {
        T a[TILE], b[TILE];
#pragma unroll
        for (int i = 0; i < TILE; ++i) {
            a[i] = row + i < m ? a_at(A, lda, row + i, p) : T(0);
            b[i] = col + i < n ? b_at(B, ldb, p, col + i) : T(0);
        }
#pragma unroll ROWS_UNROLLED
        for (int i = 0; i < TILE; ++i) {
#pragma unroll
            for (int j = 0; j < TILE; ++j) sum[i][j] += a[i] * b[j];
        }
    }
#pragma unroll ROWS_UNROLLED
    for (int i = 0; i < TILE; ++i) {
#pragma unroll
        for (int j = 0; j < TILE; ++j) {
            if (row + i < m && col + j < n) {
                store(C + (row + i) * ldc + col + j, sum[i][j], alpha, beta);
            }
        }
    }
}
