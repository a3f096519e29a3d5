/*---
summary = "tensor cores by mma.sync: 64 x 32 a warp, packed operands in a cp.async ring of two"
entry   = "gemm_mma"
role    = "tensor"
params  = [{TERMS = 1, OUT = 4}, {TERMS = 3, OUT = 4}, {TERMS = 1, OUT = 2}]
block   = ["256", "1", "1"]
grid    = ["ceil(n / 128)", "ceil(m / 128)", "1"]
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
#include "mma.cuh"

constexpr int BM = 128, BN = 128, WORDS = 16;  // a step of k, in words
constexpr int PITCH = WORDS + 4;               // 8 rows by 4 words fall in distinct banks
constexpr int PARTS = (TERMS + 1) / 2;
constexpr int TILE = 128 * PITCH;              // words of one part of one operand

#if OUT == 4
typedef float Out;
__device__ inline float widened(Out x) { return x; }
__device__ inline Out narrowed(float x) { return x; }
#elif DTYPE_bfloat16
typedef unsigned short Out;
__device__ inline float widened(Out x) { return from_bfloat(x); }
__device__ inline Out narrowed(float x) { return to_bfloat(x); }
#else
typedef unsigned short Out;
__device__ inline float widened(Out x) { return from_half(x); }
__device__ inline Out narrowed(float x) { return to_half(x); }
#endif

// A step's 128 rows from `row0` on of all parts of an operand; beyond the edge the last row again.
__device__ inline void fetch(unsigned* tiles, const unsigned* parts, long long pitch, int rows,
                             int row0, int word) {
#pragma unroll
    for (int i = threadIdx.x; i < PARTS * 128 * 4; i += THREADS) {
        const int part = i / 512, row = i / 4 % 128, w = i % 4 * 4;
        const long long line = (long long)part * rows + min(row0 + row, rows - 1);
        copy_async(tiles + part * TILE + row * PITCH + w, parts + line * pitch + word + w);
    }
}

// The power of two in halves of one sign: what the product keeps, no half loses.
__device__ inline float scaled(float x, int exponent) {
    const int half = exponent >> 1;
    return x * power_of_two(half) * power_of_two(exponent - half);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    gemm_mma(const void* A, long long lda, const void* B, long long ldb, int m, int n, int k,
             float alpha, const int* exponent_a, const int* exponent_b, float beta, void* C,
             long long ldc, const int* verdict, int wanted) {
    const bool split = wanted >= 0;  // else there are no exponents, and no verdict
    if (split && *verdict != wanted) return;
    extern __shared__ __align__(16) unsigned memory[];  // [2][A and B][PARTS][128][PITCH]
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int g = lane / 4, t = lane % 4, row = warp / 4 * 64, col = warp % 4 * 32;
    const int row0 = blockIdx.y * BM, col0 = blockIdx.x * BN;
    const int steps = (int)((long long)k * SIZE / 4 / WORDS);

    const auto bring = [&](int step) {
        unsigned* const stage = memory + step % 2 * 2 * PARTS * TILE;
        fetch(stage, (const unsigned*)A, lda * SIZE / 4, m, row0, step * WORDS);
        fetch(stage + PARTS * TILE, (const unsigned*)B, ldb * SIZE / 4, n, col0, step * WORDS);
    };
    float part[4][4][4] = {}, total[TERMS == 3 ? 4 : 1][4][4] = {};
    bring(0);
    copies_commit();
    for (int step = 0; step < steps; ++step) {
        if (step + 1 < steps) bring(step + 1);
        copies_commit();
        copies_wait<1>();
        __syncthreads();
        const unsigned* const stage = memory + step % 2 * 2 * PARTS * TILE;
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
                    for (int j = 0; j < 4; ++j) mma(part[i][j], a[pa][i], b[pb][j]);
                }
            }
#pragma unroll
            for (int i = 0; TERMS == 3 && i < 4; ++i) {
#pragma unroll
                for (int x = 0; x < 16; ++x) {
                    total[TERMS == 3 ? i : 0][x / 4][x % 4] += part[i][x / 4][x % 4];
                    part[i][x / 4][x % 4] = 0;
                }
            }
        }
        __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int r = row0 + row + 16 * i + 8 * h + g;
            if (r >= m) continue;
            const int exponent = split ? exponent_a[r] : 0;
#pragma unroll
            for (int j = 0; j < 4; ++j) {
#pragma unroll
                for (int x = 0; x < 2; ++x) {
                    const int c = col0 + col + 8 * j + 2 * t + x;
                    if (c >= n) continue;
                    Out* const to = (Out*)C + r * ldc + c;
                    float sum = TERMS == 3 ? total[TERMS == 3 ? i : 0][j][2 * h + x]
                                           : part[i][j][2 * h + x];
                    if (split) sum = scaled(sum, exponent + exponent_b[c]);
                    *to = narrowed(beta == 0 ? alpha * sum : alpha * sum + beta * widened(*to));
                }
            }
        }
    }
}
