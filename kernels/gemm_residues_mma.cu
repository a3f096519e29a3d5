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
source  = "this project: docs/tensor-cores.md"
---*/

// As gemm_residues.cu, from pointers: R (m x n bytes, rows `ldr` apart, planes m * ldr) = A B modulo
// p, a modulus for each z of the grid, of `count`.
//
//   load       a step of residues to one half of shared memory, by cp.async, while the other half is
//              multiplied
//   multiply   the products of a step (mma_tile.cuh)
//   store      sums modulo p to R
#include "residues.cuh"

#include "mma_tile.cuh"

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

// R from a thread's sums, for the tile at (row0, col0) of a plane that begins at row `first_row`.
__device__ inline void store(const int (&sums)[4][4][4], const Place& at, int row0, int col0, int m,
                             int n, signed char* R, long long ldr, long long first_row,
                             const Modulus& modulus) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
#pragma unroll
            for (int x = 0; x < 4; ++x) {
                const int r = row0 + at.row + 16 * i + at.g + x / 2 * 8;
                const int c = column_of(col0 + at.col + 8 * j + 2 * at.t + x % 2);
                if (r >= m || c >= n) continue;
                const int sum = dot_bytes(sums[i][j][x], modulus.sum, modulus.sum_start);
                R[(first_row + r) * ldr + c] = remainder(sum, modulus.p, modulus.inverse);
            }
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    gemm_residues_mma(const void* A, const void* B, int m, int n, int steps, signed char* R,
                      long long ldr, int count, const void* tables) {
    __shared__ __align__(16) unsigned memory[2][2 * TILE];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int g = lane / 4, t = lane % 4, row = warp / 4 * 64, col = warp % 4 * 32;
    const Place at = {row, col, g, t};
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
        for_each_product<1>(memory[step % 2], at,
                            [&](const auto& a, const auto& b) { multiply_warp(sums, a[0], b[0]); });
        __syncthreads();
    }
    const Modulus& modulus = ((const Modulus*)tables)[count * MOST_MODULI + plane];
    store(sums, at, row0, col0, m, n, R, ldr, plane * (long long)m, modulus);
}
