/*---
summary = "tensor cores by mma.sync: 64 x 32 a warp, packed operands in a cp.async ring of two"
entry   = "gemm_mma"
role    = "tensor"
# TERMS   1: A B; 3: A and B come in parts hi and lo, and lo hi + hi lo + hi hi is computed
# OUT     bytes of an element of C: 4 is float32, 2 the type of the operands
# SHARES  the most shares that the k of a tile is cut into; 1: the kernel cuts none, and makes C
params  = [
    {TERMS = 1, OUT = 4, SHARES = 1},
    {TERMS = 3, OUT = 4, SHARES = 1},
    {TERMS = 1, OUT = 2, SHARES = 1},
    {TERMS = 1, OUT = 4, SHARES = 256},
    {TERMS = 3, OUT = 4, SHARES = 256},
    {TERMS = 1, OUT = 2, SHARES = 256},
]
block   = ["256", "1", "1"]
grid    = ["ceil(n / 128)", "ceil(m / 128)", "1"]
tile    = ["128", "128"]
step    = "64 / SIZE"
# two steps of all parts of A and B: 128 rows of 20 words
shared  = "(TERMS + 1) / 2 * 2 * 2 * 128 * 20 * 4"
require = ["TERMS != 2", "TERMS <= 3", "OUT % 2 == 0", "OUT <= 4"]
dtypes  = ["float16", "bfloat16", "tfloat32"]
layouts = ["nt"]
limits  = ["m <= 8388480"]
arch    = ">=80"
source  = "this project: docs/tensor-cores.md"
---*/

// C (m x n) = alpha 2^(exponent_a[i] + exponent_b[j]) op(A) op(B) + beta C, from operands that
// split_pack.cu packed: k is a multiple of 64. TERMS = 3: op(A) op(B) is lo hi + hi lo + hi hi,
// and sums leave the tensor cores' accumulators, which truncate, after each k of an instruction.
//
// With SHARES > 1 the k of each tile is cut into shares of `each` steps, one for each z of the grid.
// Their sums go to matrices of their own, in float32: C is these matrices, one below the other, and
// sum_shares.cu adds them up. Exponents, alpha and beta are left to that.
//
// A block makes 128 x 128 of C. It multiplies one step of k from one half of shared memory, while
// cp.async copies the next step into the other half: load, multiply, store below.
#if SHARES > 1
#undef OUT
#define OUT 4
#endif
#include "mma.cuh"

constexpr int BM = 128, BN = 128, WORDS = 16;  // a step of k, in words
constexpr int PITCH = WORDS + 4;               // 8 rows by 4 words fall in distinct banks
constexpr int PARTS = (TERMS + 1) / 2;         // of an operand: hi alone, or hi and lo
constexpr int TILE = 128 * PITCH;              // words of one part of one operand
constexpr bool CHUNKED = TERMS == 3;           // sums leave the accumulators after each instruction

// A thread's sums of a warp's 64 x 32: 4 x 4 products of 16 x 8, four sums of each. While CHUNKED,
// `part` has those of one instruction, and `total` has the rest.
struct Sums {
    float part[4][4][4];
    float total[CHUNKED ? 4 : 1][4][4];
};

// Starts the copies of a step's 128 rows from `row0` on, of all parts of an operand; beyond the
// edge the last row again.
__device__ inline void load(unsigned* tiles, const unsigned* parts, long long pitch, int rows,
                            int row0, int word) {
#pragma unroll
    for (int i = threadIdx.x; i < PARTS * 128 * 4; i += THREADS) {
        const int part = i / 512, row = i / 4 % 128, w = i % 4 * 4;
        const long long line = (long long)min(row0 + row, rows - 1) * PARTS + part;
        unsigned* const to = tiles + part * TILE + row * PITCH + w;
        const unsigned* const from = parts + line * pitch + word + w;
        copy_async<16>(shared_address(to), from);
    }
}

// Adds the products of one step, which lies at `stage`, for the warp's rows and columns from
// (row, col) of the tile on; lane 4 g + t.
__device__ inline void multiply(Sums& sums, const unsigned* stage, int row, int col, int g, int t) {
#pragma unroll
    for (int word = 0; word < WORDS; word += 8) {
        unsigned a[PARTS][4][4], b[PARTS][4][2];
#pragma unroll
        for (int x = 0; x < PARTS; ++x) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const unsigned* const from =
                    stage + x * TILE + (row + 16 * i + g) * PITCH + word + t;
                const unsigned* const of_b =
                    stage + (PARTS + x) * TILE + (col + 8 * i + g) * PITCH + word + t;
#pragma unroll
                for (int r = 0; r < 4; ++r) a[x][i][r] = from[r % 2 * 8 * PITCH + r / 2 * 4];
#pragma unroll
                for (int r = 0; r < 2; ++r) b[x][i][r] = of_b[r * 4];
            }
        }
#pragma unroll
        for (int term = 0; term < TERMS; ++term) {  // the small ones first
            const int pa = TERMS == 3 && term == 0, pb = TERMS == 3 && term == 1;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
#pragma unroll
                for (int j = 0; j < 4; ++j) mma(sums.part[i][j], a[pa][i], b[pb][j]);
            }
        }
#pragma unroll
        for (int i = 0; CHUNKED && i < 4; ++i) {
#pragma unroll
            for (int x = 0; x < 16; ++x) {
                sums.total[CHUNKED ? i : 0][x / 4][x % 4] += sums.part[i][x / 4][x % 4];
                sums.part[i][x / 4][x % 4] = 0;
            }
        }
    }
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
#pragma unroll
            for (int j = 0; j < 4; ++j) {
#pragma unroll
                for (int x = 0; x < 2; ++x) {
                    const int c = col + 8 * j + x;
                    if (c >= n) continue;
                    Out* const to = C + r * ldc + c;
                    float sum = CHUNKED ? sums.total[CHUNKED ? i : 0][j][2 * h + x]
                                        : sums.part[i][j][2 * h + x];
                    if (split) sum = scaled(sum, exponent + exponent_b[c]);
                    *to = narrowed(beta == 0 ? alpha * sum : alpha * sum + beta * widened(*to));
                }
            }
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    gemm_mma(const void* A, long long lda, const void* B, long long ldb, int m, int n, int k,
             float alpha, const int* exponent_a, const int* exponent_b, float beta, void* C,
             long long ldc, const int* verdict, int wanted
#if SHARES > 1
             ,
             int each
#endif
    ) {
    const bool split = wanted >= 0;  // else there are no exponents, and no verdict
    if (split && *verdict != wanted) return;
    extern __shared__ __align__(16) unsigned memory[];  // [2][A and B][PARTS][128][PITCH]
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int g = lane / 4, t = lane % 4, row = warp / 4 * 64, col = warp % 4 * 32;
    const int row0 = blockIdx.y * BM, col0 = blockIdx.x * BN;
    const int steps = (int)((long long)k * SIZE / 4 / WORDS);
#if SHARES > 1
    const int share = blockIdx.z, first = share * each, end = min(first + each, steps);
    Out* const sums_at = (Out*)C + (long long)share * m * ldc;
    const bool scales = false;
#else
    const int first = 0, end = steps;
    Out* const sums_at = (Out*)C;
    const bool scales = split;
#endif

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
        multiply(sums, memory + step % 2 * 2 * PARTS * TILE, row, col, g, t);
        __syncthreads();
    }
    store(sums, m, n, row0 + row + g, col0 + col + 2 * t, alpha, exponent_a, exponent_b, scales,
          beta, sums_at, ldc);
}
