/*---
summary = "tensor cores by mma.sync: 64 x 32 a warp, packed operands in a cp.async ring of two"
entry   = "gemm_mma"
role    = "tensor"
# TERMS   1: A B; 3: A and B come in parts hi and lo, and lo hi + hi lo + hi hi is computed
# OUT: see numbers.cuh
# SHARES: see tensor_shares.cuh
params  = [
    {TERMS = 1, OUT = 4, SHARES = 1},
    {TERMS = 3, OUT = 4, SHARES = 1},
    {TERMS = 1, OUT = 2, SHARES = 1},
    {TERMS = 1, OUT = 4, SHARES = 256},
    {TERMS = 3, OUT = 4, SHARES = 256},
    {TERMS = 1, OUT = 2, SHARES = 256},
]
block   = ["256", "1", "1"]
grid    = ["ceil(m / 128) * ceil(n / 128)", "1", "1"]
tile    = ["128", "128"]
step    = "64 / SIZE"
# two steps of all parts of A and B: 128 rows of 20 words
shared  = "(TERMS + 1) / 2 * 2 * 2 * 128 * 20 * 4"
require = ["TERMS != 2", "TERMS <= 3", "OUT % 2 == 0", "OUT <= 4"]
dtypes  = ["float16", "bfloat16", "tfloat32"]
layouts = ["nt"]
arch    = ">=80"
source  = "this project: docs/tensor-cores.md"
---*/

// C (m x n) = alpha 2^(exponent_a[i] + exponent_b[j]) op(A) op(B) + beta C, from packed operands
// (split_pack.cu; in two parts split_halves.cu and split_strict.cu): k is a multiple of 64.
// TERMS = 3: op(A) op(B) is lo hi + hi lo + hi hi, and sums leave the tensor cores' accumulators,
// which truncate, after each k of an instruction. Shares of k (tensor_shares.cuh) are the z of the
// grid.
//
//   load       a step of packed operands to one half of shared memory, by cp.async, while the other
//              half is multiplied
//   multiply   the products of a step (mma_tile.cuh), in one term or three
//   store      sums to C
#include "tensor_shares.cuh"
#include "verdict.cuh"

#include "mma_tile.cuh"

constexpr int PARTS = (TERMS + 1) / 2;  // of an operand: hi alone, or hi and lo
constexpr bool CHUNKED = TERMS == 3;    // sums leave the accumulators after each instruction

// A thread's sums of a warp's 64 x 32: 4 x 4 products of 16 x 8, four sums of each. While CHUNKED,
// `part` has those of one instruction, and `total` has the rest.
struct Sums {
    float part[4][4][4];
    float total[CHUNKED ? 4 : 1][4][4];
};

// Starts the copies of a step's rows from `row0` on, of all parts of an operand; beyond the edge
// the last row again.
__device__ inline void load(unsigned* tiles, const unsigned* parts, long long pitch, int rows,
                            int row0, int word) {
#pragma unroll
    for (int i = threadIdx.x; i < PARTS * SIDE * 4; i += THREADS) {
        const int part = i / (SIDE * 4), row = i / 4 % SIDE, w = i % 4 * 4;
        const long long line = (long long)min(row0 + row, rows - 1) * PARTS + part;
        unsigned* const to = tiles + part * TILE + row * PITCH + w;
        const unsigned* const from = parts + line * pitch + word + w;
        copy_async<16>(shared_address(to), from);
    }
}

// Adds the products of one step, which lies at `stage`.
__device__ inline void multiply(Sums& sums, const unsigned* stage, const Place& at) {
    for_each_product<PARTS>(stage, at, [&](const auto& a, const auto& b) {
#pragma unroll
        for (int term = 0; term < TERMS; ++term)  // the small ones first: lo hi, hi lo, hi hi
            multiply_warp(sums.part, a[TERMS == 3 && term == 0], b[TERMS == 3 && term == 1]);
#pragma unroll
        for (int i = 0; CHUNKED && i < 4; ++i) {
#pragma unroll
            for (int x = 0; x < 16; ++x) {
                sums.total[CHUNKED ? i : 0][x / 4][x % 4] += sums.part[i][x / 4][x % 4];
                sums.part[i][x / 4][x % 4] = 0;
            }
        }
    });
}

// C from a thread's sums: rows from `row` on, 8 apart, and pairs of columns from `col` on, 8 apart.
__device__ inline void store(const Sums& sums, int m, int n, int row, int col, float alpha,
                             const int* exponent_a, const int* exponent_b, bool split, float beta,
                             Out* C, long long ldc) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int r = row + 16 * i + 8 * h;
            if (r >= m) continue;
            const int exponent = split ? exponent_a[r] : 0;
            Out old[4][2] = {};
            auto each = [&](auto&& use) {  // elements of the row of this thread
#pragma unroll
                for (int j = 0; j < 4; ++j) {
#pragma unroll
                    for (int x = 0; x < 2; ++x) {
                        const int c = col + 8 * j + x;
                        if (c < n) use(j, x, c, C[r * ldc + c]);
                    }
                }
            };
            if (beta != 0) each([&](int j, int x, int, const Out& to) { old[j][x] = to; });
            each([&](int j, int x, int c, Out& to) {
                float sum = CHUNKED ? sums.total[CHUNKED ? i : 0][j][2 * h + x]
                                    : sums.part[i][j][2 * h + x];
                if (split) sum = scaled(sum, exponent + exponent_b[c]);
                to = narrowed(beta == 0 ? alpha * sum : alpha * sum + beta * widened(old[j][x]));
            });
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    gemm_mma(const void* A, long long lda, const void* B, long long ldb, int m, int n, int k,
             float alpha, const int* exponent_a, const int* exponent_b, float beta, void* C,
             long long ldc, State* state, int wanted AND_EACH) {
    const bool split = wanted >= 0;  // else there are no exponents, and no verdict
    if (split && verdict_of(state) != wanted) return;
    extern __shared__ __align__(16) unsigned memory[];  // [2][A and B][PARTS][SIDE][PITCH]
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int g = lane / 4, t = lane % 4, row = warp / 4 * 64, col = warp % 4 * 32;
    const Place at = {row, col, g, t};
    const int across = (n + SIDE - 1) / SIDE;
    const int row0 = blockIdx.x / across * SIDE, col0 = blockIdx.x % across * SIDE;
    const int steps = (int)((long long)k * SIZE / 4 / WORDS);
    const int share = blockIdx.z;
    const int first = SHARES > 1 ? share * each : 0;
    const int end = SHARES > 1 ? min(first + each, steps) : steps;
    Out* const sums_at = matrix_of_share((Out*)C, share, m, ldc);
    const bool scales = SHARES > 1 ? false : split;  // sum_shares.cu scales sums of shares
    const auto load_step = [&](int step) {
        unsigned* const stage = memory + step % 2 * 2 * PARTS * TILE;
        load(stage, (const unsigned*)A, lda * SIZE / 4, m, row0, step * WORDS);
        load(stage + PARTS * TILE, (const unsigned*)B, ldb * SIZE / 4, n, col0, step * WORDS);
    };
    Sums sums = {};
    load_step(first);
    copies_commit();
    for (int step = first; step < end; ++step) {
        if (step + 1 < end) load_step(step + 1);
        copies_commit();
        copies_wait<1>();
        __syncthreads();
        multiply(sums, memory + step % 2 * 2 * PARTS * TILE, at);
        __syncthreads();
    }
    store(sums, m, n, row0 + row + g, col0 + col + 2 * t, alpha, exponent_a, exponent_b, scales,
          beta, sums_at, ldc);
}
