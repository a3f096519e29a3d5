/*---
summary = "tensor cores by mma.sync, operands where they lie: any alignment, thin sides, short and long k"
entry   = "gemm_mma_in_place"
role    = "tensor"
# TERMS   1: A B
# BM      rows of C that a block computes
# BN      columns of C that a block computes
# WM      warps along the rows of C; the other 8 / WM are along its columns
# STAGES  stages of the ring in shared memory: STAGES - 1 steps are on their way while one is multiplied
# OUT: see numbers.cuh
# SHARES: see tensor_shares.cuh
params  = [
    {TERMS = 1, BM = 64, BN = 64, WM = 2, STAGES = 4, OUT = 4, SHARES = 1},
    {TERMS = 1, BM = 128, BN = 128, WM = 2, STAGES = 3, OUT = 4, SHARES = 1},
    {TERMS = 1, BM = 16, BN = 128, WM = 1, STAGES = 4, OUT = 4, SHARES = 1},
    {TERMS = 1, BM = 128, BN = 16, WM = 8, STAGES = 4, OUT = 4, SHARES = 1},
    {TERMS = 1, BM = 64, BN = 64, WM = 2, STAGES = 4, OUT = 4, SHARES = 256},
    {TERMS = 1, BM = 16, BN = 128, WM = 1, STAGES = 4, OUT = 4, SHARES = 256},
    {TERMS = 1, BM = 128, BN = 16, WM = 8, STAGES = 4, OUT = 4, SHARES = 256},
    {TERMS = 1, BM = 128, BN = 32, WM = 4, STAGES = 4, OUT = 4, SHARES = 256},
    {TERMS = 1, BM = 32, BN = 128, WM = 2, STAGES = 4, OUT = 4, SHARES = 256},
    {TERMS = 1, BM = 64, BN = 64, WM = 2, STAGES = 4, OUT = 2, SHARES = 1},
    {TERMS = 1, BM = 128, BN = 128, WM = 2, STAGES = 3, OUT = 2, SHARES = 1},
    {TERMS = 1, BM = 16, BN = 128, WM = 1, STAGES = 4, OUT = 2, SHARES = 1},
    {TERMS = 1, BM = 128, BN = 16, WM = 8, STAGES = 4, OUT = 2, SHARES = 1},
    {TERMS = 1, BM = 64, BN = 64, WM = 2, STAGES = 4, OUT = 2, SHARES = 256},
    {TERMS = 1, BM = 16, BN = 128, WM = 1, STAGES = 4, OUT = 2, SHARES = 256},
    {TERMS = 1, BM = 128, BN = 16, WM = 8, STAGES = 4, OUT = 2, SHARES = 256},
    {TERMS = 1, BM = 128, BN = 32, WM = 4, STAGES = 4, OUT = 2, SHARES = 256},
    {TERMS = 1, BM = 32, BN = 128, WM = 2, STAGES = 4, OUT = 2, SHARES = 256},
]
block   = ["256", "1", "1"]
grid    = ["ceil(m / BM) * ceil(n / BN)", "1", "1"]
tile    = ["BM", "BN"]
step    = "128 / SIZE"
# the ring: lines along k with 16 bytes to spare, or across it with 8 elements; then the tile's sums
shared  = "max(STAGES * (144 * (BM + BN) + 2048), BM * (BN + 4) * 4)"
rung    = 105
in_place = true
require = [
    "TERMS == 1", "8 % WM == 0", "BM % (16 * WM) == 0", "BN * WM % 64 == 0", "OUT % 2 == 0", "OUT <= 4",
    "STAGES >= 2", "BM % 16 == 0", "BN % 16 == 0", "BM <= 128", "BN <= 128",
]
dtypes  = ["float16", "bfloat16", "tfloat32"]
arch    = ">=80"
source  = "this project: docs/tensor-cores.md"
---*/

// C (m x n) = alpha op(A) op(B) + beta C, from operands as they lie; float32 is rounded to TF32 as
// it leaves shared memory.
//
// Shares of k (tensor_shares.cuh) are the z of the grid.
//
//   load       copies of a step's lines of A and B into a stage (lines_anywhere.cuh)
//   multiply   fragments from a stage, and the products of warps
//   store      sums to shared memory, and from there to C, row by row
#include "tensor_shares.cuh"

#include "mma.cuh"

constexpr int BK = 128 / SIZE;                          // k of a step
constexpr int AHEAD = 8;                                // elements of C that are read at once
constexpr int WN = 8 / WM;                              // warps along n
constexpr int FM = BM / (16 * WM), FN = BN / (8 * WN);  // products of 16 x 8 of a warp, each way

#include "lines_anywhere.cuh"

// To the nearest TF32, ties to even.
__device__ __forceinline__ unsigned as_operand(unsigned bits) {
#if __CUDA_ARCH__ >= 900
    asm("cvt.rn.tf32.f32 %0, %1;" : "=r"(bits) : "f"(as_float(bits)));
    return bits;
#else
    return to_tf32(as_float(bits));
#endif
}

typedef Tile<BM, !TRANS_A> TileA;
typedef Tile<BN, TRANS_B> TileB;
static_assert((TileA::ELEMENTS + TileB::ELEMENTS) * SIZE <= 144 * (BM + BN) + 2048,
              "the header says how large a stage is");

// Word w, along k, of line x across it, where both belong to this thread. PAIRS: see Tile.
template <bool PAIRS, int BX, bool ALONG>
__device__ __forceinline__ unsigned word(const Tile<BX, ALONG>& tile, const Element* stage, int x,
                                         int w) {
    if constexpr (SIZE == 4) {
        return as_operand(stage[tile.place(x, w)]);
    } else if constexpr (ALONG && PAIRS) {
        return *(const unsigned*)(stage + tile.place(x, 2 * w));
    } else {
        const int one = tile.place(x, 2 * w);
        const int two = ALONG ? one + 1 : (2 * w + 1) * tile.PITCH + x + tile.shifts[1];
        return stage[one] | (unsigned)stage[two] << 16;
    }
}

// A thread's sums: of each product of 16 x 8, pairs in two rows 8 apart.
typedef float Sums[FM][FN][4];

// Adds the products of a step's k for the warp's rows and columns from (row, col) of the tile on.
template <bool PAIRS>
__device__ __forceinline__ void multiply_step(Sums& sums, const Element* stage, const TileA& a,
                                              const TileB& b, int row, int col) {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int w = 0; w < 32; w += 8) {
        unsigned of_a[FM][4], of_b[FN][2];
#pragma unroll
        for (int i = 0; i < FM; ++i) {
#pragma unroll
            for (int r = 0; r < 4; ++r)
                of_a[i][r] = word<PAIRS>(a, stage, row + 16 * i + g + r % 2 * 8, w + t + r / 2 * 4);
        }
#pragma unroll
        for (int j = 0; j < FN; ++j) {
#pragma unroll
            for (int r = 0; r < 2; ++r)
                of_b[j][r] =
                    word<PAIRS>(b, stage + TileA::ELEMENTS, col + 8 * j + g, w + t + r * 4);
        }
#pragma unroll
        for (int i = 0; i < FM; ++i) {
#pragma unroll
            for (int j = 0; j < FN; ++j) mma(sums[i][j], of_a[i], of_b[j]);
        }
    }
}

// C at (row0, col0) from the block's sums, which are gathered in `tile`.
__device__ __forceinline__ void store(const Sums& sums, float* tile, int row, int col, int m, int n,
                                      int row0, int col0, float alpha, float beta, Out* C,
                                      long long ldc) {
    constexpr int LD = BN + 4;
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int i = 0; i < FM; ++i) {
#pragma unroll
        for (int j = 0; j < FN; ++j) {
#pragma unroll
            for (int x = 0; x < 4; ++x)
                tile[(row + 16 * i + g + x / 2 * 8) * LD + col + 8 * j + 2 * t + x % 2] =
                    sums[i][j][x];
        }
    }
    __syncthreads();
    const int rows = min(BM, m - row0), cols = min(BN, n - col0);
#pragma unroll 1
    for (int from = threadIdx.x; from < BM * BN; from += AHEAD * THREADS) {
        Out old[AHEAD] = {};
        auto each = [&](auto&& use) {  // elements of C of this thread
#pragma unroll
            for (int i = 0; i < AHEAD; ++i) {
                const int e = from + i * THREADS, r = e / BN, c = e % BN;
                if (r < rows && c < cols) use(i, r * LD + c, C[(row0 + r) * ldc + col0 + c]);
            }
        };
        if (beta != 0) each([&](int i, int, const Out& c) { old[i] = c; });
        each([&](int i, int at, Out& c) {
            const float sum = alpha * tile[at];
            c = narrowed(beta == 0 ? sum : sum + beta * widened(old[i]));
        });
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, BM* BN > 64 * 64 ? 1 : 2)
    gemm_mma_in_place(const void* A, long long lda, const void* B, long long ldb, int m, int n,
                      int k, float alpha, float beta, void* C, long long ldc AND_EACH) {
    extern __shared__ __align__(16) unsigned memory[];
    const int warp = threadIdx.x / 32, row = warp / WN * (FM * 16), col = warp % WN * (FN * 8);
    const int across = (n + BN - 1) / BN;
    const int row0 = blockIdx.x / across * BM, col0 = blockIdx.x % across * BN;
    const int steps = (k + BK - 1) / BK;
    const int first = SHARES > 1 ? blockIdx.z * each : 0;
    const int end = SHARES > 1 ? min(first + each, steps) : steps;
    Out* const to = matrix_of_share((Out*)C, blockIdx.z, m, ldc);
    const TileA a(A, lda, row0, m, k);
    const TileB b(B, ldb, col0, n, k);
    Sums sums = {};
    Element* const ring = (Element*)memory;
    if (a.pairs() && b.pairs())
        for_each_step(ring, a, b, first, end, [&](const Element* stage) {
            multiply_step<true>(sums, stage, a, b, row, col);
        });
    else
        for_each_step(ring, a, b, first, end, [&](const Element* stage) {
            multiply_step<false>(sums, stage, a, b, row, col);
        });
    store(sums, (float*)memory, row, col, m, n, row0, col0, alpha, beta, to, ldc);
}
