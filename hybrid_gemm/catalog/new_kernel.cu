/*---
summary = "SAY IN ONE LINE WHAT NAME DOES"
entry   = "gemm_NAME"
rung    = 99
# TILE  columns of C that a block computes, and k of a step
# PER   rows of C that a thread computes
params  = [{TILE = 16, PER = 2}, {TILE = 16, PER = 1}, {TILE = 16, PER = 4}, {TILE = 8, PER = 2}]
space   = {TILE = [8, 16, 32], PER = [1, 2, 4, 8]}
block   = ["TILE", "TILE", "1"]
grid    = ["ceil(n / TILE)", "ceil(m / (TILE * PER))", "1"]
tile    = ["TILE * PER", "TILE"]
require = ["SIZE * TILE * (TILE * PER + TILE + 1) <= 49152"]
source  = "our own"
---*/
// The header above says all that the host must know; docs/kernels.md lists its keys.
//   params   the variants: TILE and PER are compile-time names below; the first is the default
//   block    threads of a block, by x, y, z        grid    blocks, for C of m x n
//   space    what `hybrid-gemm tune --kernel NAME` tries, in every combination
//   tile     rows and columns of C that a block computes
//   require  what parameters must hold: checked by the host, and by the compiler
// T is the element type and SIZE its bytes; a_at and b_at read op(A) and op(B), store writes C.
#include "common.cuh"

// C = alpha * op(A) @ op(B) + beta * C, all three with leading dimensions. To begin with: a
// block of TILE x TILE threads makes TILE * PER rows by TILE columns of C; a thread owns PER
// elements of one column. Each step of K brings tiles of A and B to shared memory, so that each
// element is read from global memory once a block.
extern "C" __global__ void __launch_bounds__(TILE * TILE)
    gemm_NAME(int m, int n, int k, T alpha, const T* __restrict__ A, long long lda,
              const T* __restrict__ B, long long ldb, T beta, T* C, long long ldc) {
    __shared__ T As[TILE * PER][TILE], Bs[TILE][TILE + 1];
    const int tx = threadIdx.x, ty = threadIdx.y;
    const unsigned row0 = blockIdx.y * (TILE * PER), col0 = blockIdx.x * TILE;
    const unsigned col = col0 + tx;
    T sum[PER] = {};  // lives in registers: every index is known once the loops are unrolled
    for (int left = k, p0 = 0; left > 0; left -= TILE, p0 += TILE) {
        // 1. Load. Threads that are neighbours in x read neighbours in memory. Zeros beyond the
        //    edges add nothing, so the tile need not divide m, n or k.
#pragma unroll
        for (int i = 0; i < PER; ++i) {
            const unsigned row = row0 + i * TILE + ty;
            As[i * TILE + ty][tx] = row < m && tx < left ? a_at(A, lda, row, p0 + tx) : T(0);
        }
        Bs[ty][tx] = col < n && ty < left ? b_at(B, ldb, p0 + ty, col) : T(0);
        __syncthreads();  // the tiles are whole

        // 2. Multiply. One element of B serves PER multiply-adds.
#pragma unroll
        for (int p = 0; p < TILE; ++p) {
            const T b = Bs[p][tx];
#pragma unroll
            for (int i = 0; i < PER; ++i) sum[i] += As[i * TILE + ty][p] * b;
        }
        __syncthreads();  // all are done with the tiles
    }
    // 3. Store. beta == 0 never reads C.
#pragma unroll
    for (int i = 0; i < PER; ++i) {
        const unsigned row = row0 + i * TILE + ty;
        if (row < m && col < n) store(C + row * ldc + col, sum[i], alpha, beta);
    }
}
