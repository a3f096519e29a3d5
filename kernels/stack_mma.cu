/*---
summary = "products of a stack of 16-bit matrices on tensor cores, one for each z of the grid"
entry   = "stack_mma"
role    = "stack_mma"
# SIDE  of the tile of C that a block makes, and of a step of k
# OUT   bytes of an element of C: 2 is the type of the operands
params  = [{SIDE = 32, OUT = 2}, {SIDE = 64, OUT = 2}]
block   = ["SIDE * SIDE / 16", "1", "1"]
grid    = ["ceil(m / SIDE) * ceil(n / SIDE)", "1", "1"]
tile    = ["SIDE", "SIDE"]
# a warp makes 16 x 32
require = ["OUT == 2", "SIDE % 32 == 0", "SIDE <= 64"]
dtypes  = ["float16", "bfloat16"]
arch    = ">=80"
early   = true
source  = "this project: docs/calls.md"
---*/

// C = A B for matrices that lie one step after the other, with sums in float32. A block makes
// SIDE x SIDE of C in steps of as much of k, a warp 16 x 32 of that. What one block waits for,
// others hide: there are many on a multiprocessor.
//
//   load      lines of A and B as they lie in memory, all of a step at once
//   multiply  warps read both operands by ldmatrix, and turn those that lie across k
//   store     by way of shared memory, as vectors
#include "early_launch.cuh"
#include "mma.cuh"

typedef unsigned short Half;  // a number of 16 bits, of either type

constexpr int BLOCK = SIDE * SIDE / 16;    // threads
constexpr int VEC = 8, LINE = SIDE + VEC;  // numbers of a line in shared memory: no conflicts
constexpr int ALONG = SIDE / VEC;          // vectors of a line of the tile
constexpr int VECTORS = SIDE * ALONG;      // of an operand's tile
constexpr int RESIDENT = 1536 / BLOCK;     // blocks on a multiprocessor

struct alignas(16) Eight {
    unsigned pairs[VEC / 2];
};

// A matrix with lines of numbers that are neighbours in memory.
struct Lines {
    const Half* at;
    long long ld;
    int count, length;
    bool vectors;  // every line begins on 16 bytes
};

__device__ __forceinline__ bool on_vectors(const Half* matrix, long long ld) {
    return (unsigned long long)matrix % 16 == 0 && ld % VEC == 0;
}

// Load: the tile from line `first` and number `from` on; zeros beyond the matrix.
__device__ __forceinline__ void load(Half* tile, const Lines& matrix, int first, int from) {
#pragma unroll
    for (int e = threadIdx.x; e < VECTORS; e += BLOCK) {
        const int line = first + e / ALONG, x = from + e % ALONG * VEC;
        const int left = line < matrix.count ? min(VEC, matrix.length - x) : 0;
        const Half* const here = matrix.at + line * matrix.ld + x;
        Half* const to = tile + e / ALONG * LINE + e % ALONG * VEC;
        if (matrix.vectors && (left == VEC || left <= 0)) {
            copy_async<16>(shared_address(to), left > 0 ? here : matrix.at, left > 0);
        } else {
#pragma unroll
            for (int i = 0; i < VEC; ++i) to[i] = i < left ? here[i] : Half(0);
        }
    }
}

// Four matrices of 8 x 8 words' numbers for `mma`: x from x0 on in two steps of 8, and k from k0
// on, where X_FIRST says which of them changes first.
template <bool ALONG_K, bool X_FIRST>
__device__ __forceinline__ void four(unsigned (&words)[4], const Half* tile, int x0, int k0) {
    const int lane = threadIdx.x % 32, first = lane / 8 % 2 * 8, second = lane / 16 * 8;
    const int x = x0 + (X_FIRST ? first : second), k = k0 + (X_FIRST ? second : first);
    const int line = (ALONG_K ? x : k) + lane % 8, at = ALONG_K ? k : x;
    load_matrices<!ALONG_K>(words, tile + line * LINE + at);
}

extern "C" __global__ void __launch_bounds__(BLOCK, RESIDENT)
    stack_mma(int m, int n, int k, const void* A, long long lda, long long step_a, const void* B,
              long long ldb, long long step_b, void* C, long long ldc, long long step_c) {
    wait_for_launch_before();
    __shared__ __align__(16) Half tiles[2][SIDE * LINE];
    const Half* const a_at = (const Half*)A + blockIdx.z * step_a;
    const Half* const b_at = (const Half*)B + blockIdx.z * step_b;
    const Lines a = {a_at, lda, TRANS_A ? k : m, TRANS_A ? m : k, on_vectors(a_at, lda)};
    const Lines b = {b_at, ldb, TRANS_B ? n : k, TRANS_B ? k : n, on_vectors(b_at, ldb)};
    const int tiles_m = (m + SIDE - 1) / SIDE;
    const int row0 = blockIdx.x % tiles_m * SIDE, col0 = blockIdx.x / tiles_m * SIDE;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int row = warp % (SIDE / 16) * 16, col = warp / (SIDE / 16) * 32;  // of the warp

    float sum[4][4] = {};
    for (int k0 = 0; k0 < k; k0 += SIDE) {
        if (k0) __syncthreads();
        load(tiles[0], a, TRANS_A ? k0 : row0, TRANS_A ? row0 : k0);
        load(tiles[1], b, TRANS_B ? col0 : k0, TRANS_B ? k0 : col0);
        copies_commit();
        copies_wait<0>();
        __syncthreads();
#pragma unroll
        for (int p = 0; p < SIDE; p += 16) {
            unsigned of_a[4], of_b[2][4];
            four<!TRANS_A, true>(of_a, tiles[0], row, p);
#pragma unroll
            for (int j = 0; j < 2; ++j) four<TRANS_B, false>(of_b[j], tiles[1], col + 16 * j, p);
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const unsigned words[2] = {of_b[j / 2][j % 2 * 2], of_b[j / 2][j % 2 * 2 + 1]};
                mma(sum[j], of_a, words);
            }
        }
    }

    __syncthreads();
    Half* const made = tiles[0];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int at = (row + lane / 4 + 8 * h) * LINE + col + 8 * j + lane % 4 * 2;
            *reinterpret_cast<unsigned*>(made + at) =
                narrowed(sum[j][2 * h]) | (unsigned)narrowed(sum[j][2 * h + 1]) << 16;
        }
    }
    __syncthreads();
    Half* const c_at = (Half*)C + blockIdx.z * step_c;
    const bool vectors = on_vectors(c_at, ldc);
#pragma unroll
    for (int e = threadIdx.x; e < VECTORS; e += BLOCK) {
        const int r = row0 + e / ALONG, c = col0 + e % ALONG * VEC;
        const Half* const from = made + e / ALONG * LINE + e % ALONG * VEC;
        if (r >= m) continue;
        Half* const to = c_at + r * ldc + c;
        if (vectors && c + VEC <= n) {
            *reinterpret_cast<Eight*>(to) = *reinterpret_cast<const Eight*>(from);
            continue;
        }
#pragma unroll
        for (int q = 0; q < VEC; ++q) {
            if (c + q < n) to[q] = from[q];
        }
    }
}
