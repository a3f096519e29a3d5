/*---
summary = "products of a stack of 16-bit matrices on tensor cores, one for each z of the grid"
entry   = "stack_mma"
role    = "stack_mma"
# OUT  bytes of an element of C: 2 is the type of the operands
params  = [{OUT = 2}]
block   = ["256", "1", "1"]
grid    = ["ceil(m / 32) * ceil(n / 32)", "1", "1"]
tile    = ["32", "32"]
require = ["OUT == 2"]
dtypes  = ["float16", "bfloat16"]
arch    = ">=80"
source  = "this project: docs/performance.md"
---*/

// C = A B for matrices that lie one step after the other, with sums in float32. A block makes
// 32 x 32 of C, a warp 16 x 8 of that. A step is 32 of k, and each thread loads 16 bytes of it, from
// A or from B. Blocks are small and many: what one waits for, others hide.
//
//     A        B             load: threads 0 to 127 bring A's rows in memory, the others B's
//   [32][20] [32][20]        words of shared memory, as the matrices lie: 16 and 4 against conflicts
//   w0 w1 w2 w3              multiply: warps over the tile of C
//   w4 w5 w6 w7
#include "mma.cuh"

typedef unsigned short Half;  // a number of 16 bits, of either type

constexpr int TILE = 32, PITCH = 20, LINE = 2 * PITCH;  // of a row in shared memory: words, numbers

struct alignas(16) Eight {
    Half x[8];
};

// Eight neighbours of a row in memory, of which `left` are there; zeros for the others.
__device__ __forceinline__ Eight eight(const Half* from, int left, bool vectors) {
    if (vectors && left >= 8) return *reinterpret_cast<const Eight*>(from);
    Eight v = {};
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        if (i < left) v.x[i] = from[i];
    }
    return v;
}

// Numbers 2 word and 2 word + 1 of k in row (or column) x of an operand's tile.
template <bool ALONG_K>
__device__ __forceinline__ unsigned pair(const unsigned* tile, int x, int word) {
    if (ALONG_K) return tile[x * PITCH + word];
    const Half* const at = reinterpret_cast<const Half*>(tile) + 2 * word * LINE + x;
    return at[0] | (unsigned)at[LINE] << 16;
}

__device__ __forceinline__ bool on_vectors(const Half* matrix, long long ld) {
    return (unsigned long long)matrix % 16 == 0 && ld % 8 == 0;
}

// Multiply: adds the products of a step, for the warp's 16 x 8 from (row, col) of the tile on; lane
// 4 g + t.
__device__ __forceinline__ void multiply(float (&sum)[4], const unsigned (&tiles)[2][TILE * PITCH],
                                         int row, int col, int g, int t) {
#pragma unroll
    for (int word = 0; word < TILE / 2; word += 8) {
        unsigned a[4], b[2];
#pragma unroll
        for (int r = 0; r < 4; ++r)
            a[r] = pair<!TRANS_A>(tiles[0], row + g + r % 2 * 8, word + t + r / 2 * 4);
#pragma unroll
        for (int r = 0; r < 2; ++r) b[r] = pair<TRANS_B>(tiles[1], col + g, word + t + r * 4);
        mma(sum, a, b);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    stack_mma(int m, int n, int k, const void* A, long long lda, long long step_a, const void* B,
              long long ldb, long long step_b, void* C, long long ldc, long long step_c) {
    __shared__ __align__(16) unsigned tiles[2][TILE * PITCH];
    const Half* const a_at = (const Half*)A + blockIdx.z * step_a;
    const Half* const b_at = (const Half*)B + blockIdx.z * step_b;
    Half* const c_at = (Half*)C + blockIdx.z * step_c;
    const int tiles_m = (m + TILE - 1) / TILE;
    const int row0 = blockIdx.x % tiles_m * TILE, col0 = blockIdx.x / tiles_m * TILE;

    // This thread's part of a load: row `line` of A's or B's tile as it lies, from `at` on.
    const bool of_b = threadIdx.x >= 128, along_k = of_b ? TRANS_B : !TRANS_A;
    const int line = threadIdx.x % 128 / 4, at = threadIdx.x % 4 * 8;
    const int x0 = of_b ? col0 : row0, x_end = of_b ? n : m;
    const Half* const matrix = of_b ? b_at : a_at;
    const long long ld = of_b ? ldb : lda;
    const bool vectors = on_vectors(matrix, ld);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    const int row = warp / 4 * 16, col = warp % 4 * 8;

    const auto load = [&](int k0) {
        const int y = (along_k ? x0 : k0) + line, x = (along_k ? k0 : x0) + at;
        const bool there = y < (along_k ? x_end : k);
        const int left = there ? (along_k ? k : x_end) - x : 0;
        return eight(matrix + y * ld + x, left, vectors);
    };
    float sum[4] = {};
    for (int k0 = 0; k0 < k; k0 += TILE) {
        const Eight v = load(k0);
        __syncthreads();
        *reinterpret_cast<Eight*>(tiles[of_b] + line * PITCH + at / 2) = v;
        __syncthreads();
        multiply(sum, tiles, row, col, g, t);
    }
    const bool pairs = (unsigned long long)c_at % 4 == 0 && ldc % 2 == 0;
    const int c = col0 + col + 2 * t;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        const int r = row0 + row + g + 8 * h;
        if (r >= m || c >= n) continue;
        Half* const to = c_at + r * ldc + c;
        const Half first = narrowed(sum[2 * h]), second = narrowed(sum[2 * h + 1]);
        if (pairs && c + 1 < n) {
            *reinterpret_cast<unsigned*>(to) = first | (unsigned)second << 16;
        } else {
            to[0] = first;
            if (c + 1 < n) to[1] = second;
        }
    }
}
