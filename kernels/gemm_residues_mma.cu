/*---
summary = "residues multiplied on tensor cores by mma.sync: int8, 64 x 32 a warp, one product a modulus"
entry   = "gemm_residues_mma"
role    = "residues"
# MODULI  the most moduli that the host takes
params  = [{MODULI = 16}]
block   = ["256", "1", "1"]
grid    = ["ceil(n / 128)", "ceil(m / 128)", "1"]
tile    = ["128", "128"]
step    = "128"
rung    = 105
require = ["MODULI <= 16"]
dtypes  = ["int8"]
layouts = ["nt"]
limits  = ["m <= 8388480"]
arch    = ">=80"
source  = "this project: docs/fp64x.md"
---*/

// As gemm_residues.cu, from pointers: R (m x n bytes, rows `ldr` apart, planes m * ldr) = A B
// modulo p, a modulus for each z of the grid, of `count`.
//
// A block makes 128 x 128 of R. It multiplies one step of k from one half of shared memory, while
// cp.async copies the next step into the other half.
#include "residues.cuh"

#include "mma.cuh"

constexpr int SIDE = 128, WORDS = 16;  // of a tile; a step of k, in words
constexpr int PITCH = WORDS + 4;       // 8 rows by 4 words fall in distinct banks
constexpr int TILE = SIDE * PITCH;     // words of one operand

// Starts the copies of a step's rows from `row0` on; beyond the edge the last row again.
__device__ inline void load(unsigned* tile, const unsigned* from, long long pitch, int rows,
                            int row0) {
#pragma unroll
    for (int i = threadIdx.x; i < SIDE * 4; i += THREADS) {
        const int row = i / 4, w = i % 4 * 4;
        copy_async<16>(shared_address(tile + row * PITCH + w),
                       from + min(row0 + row, rows - 1) * pitch + w);
    }
}

// Adds the products of one step for the warp's rows and columns from (row, col) on; lane 4 g + t.
__device__ inline void multiply(int (&sums)[4][4][4], const unsigned* stage, int row, int col,
                                int g, int t) {
#pragma unroll
    for (int word = 0; word < WORDS; word += 8) {
        unsigned a[4][4], b[4][2];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const unsigned* const of_a = stage + (row + 16 * i + g) * PITCH + word + t;
            const unsigned* const of_b = stage + TILE + (col + 8 * i + g) * PITCH + word + t;
#pragma unroll
            for (int r = 0; r < 4; ++r) a[i][r] = of_a[r % 2 * 8 * PITCH + r / 2 * 4];
#pragma unroll
            for (int r = 0; r < 2; ++r) b[i][r] = of_b[r * 4];
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
#pragma unroll
            for (int j = 0; j < 4; ++j) mma(sums[i][j], a[i], b[j]);
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    gemm_residues_mma(const void* A, const void* B, int m, int n, int steps, signed char* R,
                      long long ldr, int count, const void* tables) {
    __shared__ __align__(16) unsigned memory[2][2 * TILE];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int g = lane / 4, t = lane % 4, row = warp / 4 * 64, col = warp % 4 * 32;
    const int row0 = blockIdx.y * SIDE, col0 = blockIdx.x * SIDE, plane = blockIdx.z;
    const int each = steps * 32, parts = each / WORDS;  // words of k, and steps here
    const long long pitch = (long long)count * each;
    const int columns = (n + COLUMNS - 1) / COLUMNS * COLUMNS;

    const auto load_step = [&](int step) {
        unsigned* const stage = memory[step % 2];
        const int word = plane * each + step * WORDS;
        load(stage, (const unsigned*)A + word, pitch, m, row0);
        load(stage + TILE, (const unsigned*)B + word, pitch, columns, col0);
    };
    int sums[4][4][4];
#pragma unroll
    for (int i = 0; i < 64; ++i) sums[i / 16][i / 4 % 4][i % 4] = BIAS;
    load_step(0);
    copies_commit();
    for (int step = 0; step < parts; ++step) {
        if (step + 1 < parts) load_step(step + 1);
        copies_commit();
        copies_wait<1>();
        __syncthreads();
        multiply(sums, memory[step % 2], row, col, g, t);
        __syncthreads();
    }
    const Modulus& modulus = ((const Modulus*)tables)[count * MOST_MODULI + plane];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
#pragma unroll
            for (int x = 0; x < 4; ++x) {
                const int r = row0 + row + 16 * i + g + x / 2 * 8;
                const int c = column_of(col0 + col + 8 * j + 2 * t + x % 2);
                if (r >= m || c >= n) continue;
                const int sum = dot_bytes(sums[i][j][x], modulus.sum, modulus.sum_start);
                R[(plane * (long long)m + r) * ldr + c] =
                    remainder(sum, modulus.p, modulus.inverse);
            }
        }
    }
}
