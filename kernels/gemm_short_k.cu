/*---
summary   = "a short k: small blocks, several on a multiprocessor: one writes C while others load"
entry     = "gemm_short_k"
rung      = 97
# BM, BN, BK, TM, TN, LM, KG, STAGES: see copy_ring.cuh
# HOPS: see tuned_tile.cuh
# RESIDENT  blocks that must fit on a multiprocessor: limits the registers of a thread
params    = [
    {BM = 128, BN = 64, BK = 8, TM = 8, TN = 8, LM = 4, KG = 1, HOPS = 1, STAGES = 4, RESIDENT = 4},
    {BM = 128, BN = 128, BK = 8, TM = 8, TN = 8, LM = 4, KG = 1, HOPS = 1, STAGES = 4, RESIDENT = 2},
    {BM = 64, BN = 64, BK = 8, TM = 8, TN = 8, LM = 4, KG = 1, HOPS = 1, STAGES = 4, RESIDENT = 7},
    {BM = 64, BN = 64, BK = 16, TM = 8, TN = 4, LM = 4, KG = 1, HOPS = 1, STAGES = 3, RESIDENT = 5},
    {BM = 32, BN = 64, BK = 16, TM = 4, TN = 4, LM = 4, KG = 1, HOPS = 1, STAGES = 3, RESIDENT = 8},
    {BM = 128, BN = 32, BK = 8, TM = 8, TN = 4, LM = 4, KG = 1, HOPS = 1, STAGES = 4, RESIDENT = 5},
    {BM = 32, BN = 128, BK = 8, TM = 4, TN = 8, LM = 4, KG = 1, HOPS = 1, STAGES = 4, RESIDENT = 5},
    {BM = 64, BN = 32, BK = 8, TM = 4, TN = 4, LM = 4, KG = 1, HOPS = 1, STAGES = 4, RESIDENT = 8},
    {BM = 128, BN = 16, BK = 8, TM = 8, TN = 4, LM = 8, KG = 1, HOPS = 1, STAGES = 4, RESIDENT = 8},
    {BM = 64, BN = 64, BK = 8, TM = 8, TN = 4, LM = 4, KG = 1, HOPS = 1, STAGES = 4, RESIDENT = 5},
    {BM = 64, BN = 128, BK = 8, TM = 8, TN = 8, LM = 4, KG = 1, HOPS = 1, STAGES = 4, RESIDENT = 4},
]
block     = ["BM * BN / (TM * TN)", "1", "1"]
grid      = ["ceil(m / BM) * ceil(n / BN)", "1", "1"]
tile      = ["BM", "BN"]
# the ring; then the tile's sums
shared    = "max(STAGES * BK * (BM + BN + 64 / SIZE) * SIZE, BM * (BN * SIZE + 16))"
require   = [
    # the warps of LM x 32 / LM lanes, at least two of them along n, make the tile
    "BM % (TM * LM) == 0", "16 % LM == 0", "BN % (TN * 32 / LM) == 0",
    # sums as vectors; they must fit in registers
    "TM % 4 == 0", "TN % 4 == 0", "TM * TN * SIZE <= 512",
    # a step is whole vectors, and more than one k
    "KG == 1", "BK % (4 * HOPS) == 0", "STAGES >= 2", "HOPS <= 2",
    # the threads copy whole rows of a stage
    "(BM * BN / (TM * TN)) % BK == 0", "(BM * BN / (TM * TN)) % 32 == 0",
    # and each of them as many lines as the others
    "256 % BM == 0", "256 % BN == 0",
]
dtypes    = ["float32", "int32"]
arch      = ">=80"
runs_on   = ["cuda", "emulator"]
source    = "this project: docs/performance.md"
---*/

// With a short k most of a block's time goes before its first product, while operands come, and
// after its last, while C is written. So blocks are small, and others multiply meanwhile. A block
// makes one tile, alone.
//
// Each operand is read by vectors where it can be, whatever the other one is. Where rows of C begin
// off 16 bytes, the sums go through shared memory, so that a warp writes neighbours of a row:
// threads have four neighbours each, and written element by element these take four times the
// requests.
//
//   load, multiply   copy_ring.cuh and tuned_tile.cuh
//   store            tuned_tile.cuh, or store_rows
#include "tuned_tile.cuh"

constexpr int LD = BN + VEC;  // of the sums in shared memory
constexpr int AHEAD = 8;      // elements of a thread that are read from C at once

// c = alpha * sum + beta * c, for the block's tile at (row, col).
__device__ __forceinline__ void store_rows(const T (&sum)[TM][TN], int m, int n, T alpha, T beta,
                                           T* C, long long ldc, int row, int col) {
    DYNAMIC_SHARED(raw);
    T* const tile = reinterpret_cast<T*>(raw);
    const int thread = threadIdx.x;
    UNROLL for (int i = 0; i < TM; ++i) {
        const int r = row_in(thread) + i / VEC * (LM * VEC) + i % VEC;
        UNROLL for (int j = 0; j < TN; j += VEC) {
            Vec v;
            UNROLL for (int q = 0; q < VEC; ++q) v.x[q] = sum[i][j + q];
            *reinterpret_cast<Vec*>(tile + r * LD + col_in(thread) + j * LN) = v;
        }
    }
    __syncthreads();
    const int rows = LEAST(BM, m - row), cols = LEAST(BN, n - col);
#pragma unroll 1
    for (int first = thread; first < BM * BN; first += AHEAD * THREADS) {
        T old[AHEAD] = {};
        auto each = [&](auto&& use) {  // elements of C of this thread
            UNROLL for (int i = 0; i < AHEAD; ++i) {
                const int e = first + i * THREADS, r = e / BN, c = e % BN;
                if (r < rows && c < cols) use(i, r * LD + c, C[(row + r) * ldc + (col + c)]);
            }
        };
        if (beta != T(0)) each([&](int i, int, const T& c) { old[i] = c; });
        each([&](int i, int at, T& c) { c = result(&old[i], tile[at], alpha, beta); });
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
    gemm_short_k(int m, int n, int k, T alpha, const T* A, long long lda, const T* B, long long ldb,
                 T beta, T* C, long long ldc) {
    const int thread = threadIdx.x;
    const int from_a = row_in(thread) * SIZE, from_b = (A_ELEMENTS + col_in(thread)) * SIZE;
    const int tiles_n = (n + BN - 1) / BN;
    const int row = blockIdx.x / tiles_n * BM, col = blockIdx.x % tiles_n * BN;
    const int steps = MOST(1, (k + BK - 1) / BK), skip = steps * BK - k;
    const bool vectors_a = aligned(A, lda) && (TRANS_A ? m : k) % VEC == 0;
    const bool vectors_b = aligned(B, ldb) && (TRANS_B ? k : n) % VEC == 0;
    T sum[TM][TN];
#define MULTIPLY(BY_A, BY_B) \
    multiply<BY_A, BY_B>(sum, m, n, A, lda, B, ldb, row, col, 0, skip, steps, from_a, from_b)
    if (vectors_a && vectors_b)
        MULTIPLY(true, true);
    else if (vectors_a)
        MULTIPLY(true, false);
    else if (vectors_b)
        MULTIPLY(false, true);
    else
        MULTIPLY(false, false);
    if (aligned(C, ldc))
        store_tile(sum, m, n, alpha, beta, C, ldc, row + row_in(thread), col + col_in(thread));
    else
        store_rows(sum, m, n, alpha, beta, C, ldc, row, col);
}
