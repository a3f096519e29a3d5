/*---
summary    = "tf32 by wgmma where an operand lies across k: that one comes from registers"
entry      = "wgmma_across"
role       = "across"
# BM, BN, SPAN, STAGES, CLUSTER: see ring.cuh
# SHARES: see tensor_shares.cuh
params     = [
    {BM = 128, BN = 256, SPAN = 128, STAGES = 4, CLUSTER = 2, SHARES = 1},
    {BM = 128, BN = 256, SPAN = 128, STAGES = 4, CLUSTER = 1, SHARES = 1},
    {BM = 128, BN = 192, SPAN = 128, STAGES = 5, CLUSTER = 1, SHARES = 1},
    {BM = 128, BN = 128, SPAN = 128, STAGES = 6, CLUSTER = 1, SHARES = 1},
    {BM = 64, BN = 128, SPAN = 128, STAGES = 8, CLUSTER = 1, SHARES = 1},
    {BM = 128, BN = 256, SPAN = 128, STAGES = 4, CLUSTER = 1, SHARES = 256},
    {BM = 128, BN = 128, SPAN = 128, STAGES = 6, CLUSTER = 1, SHARES = 256},
    {BM = 128, BN = 64, SPAN = 128, STAGES = 8, CLUSTER = 1, SHARES = 256},
    {BM = 64, BN = 128, SPAN = 128, STAGES = 8, CLUSTER = 1, SHARES = 256},
    {BM = 64, BN = 64, SPAN = 128, STAGES = 10, CLUSTER = 1, SHARES = 256},
]
block      = ["128 + 2 * BM", "1", "1"]
grid       = ["CLUSTER * ceil(m / (CLUSTER * BM)) * ceil(n / BN)", "1", "1"]
tile       = ["BM", "BN"]
step       = "2 * SPAN / SIZE"
cluster    = "CLUSTER"
persistent = true
early      = true
# TMA copies A, which lies across k, in boxes of 32 of its rows; B in rows of SPAN bytes along k
tma        = [
    {operand = "A", across_k = ["128 / SIZE", "SPAN / SIZE"]},
    {operand = "B", along_k = ["SPAN / SIZE", "BN / CLUSTER"]},
]
# alignment; the stages and their barriers
shared     = "1024 + STAGES * (16 + (BM + BN) * SPAN)"
layouts    = ["tt", "nn"]
require    = [
    "SPAN == 128", "BM % 64 == 0", "BM <= 128", "BN % 64 == 0", "BN <= 256", "STAGES >= 3",
]
dtypes     = ["tfloat32"]
arch       = "==90a"
runs_on    = ["cuda"]
source     = "this project: docs/tensor-cores.md"
---*/

// C (m x n) = alpha A B + beta C for layouts "tt", where A lies across k. For "nn", where B does,
// the kernel is given C^T = B^T A^T instead, as if that were m x n, and stores C by columns. With
// 32 bits the tensor cores read shared memory along k alone, but they take their first operand
// from registers too, where threads put it in any order. Both come as boxes of tensor maps, which
// round to TF32. What tiles.cuh calls a step is a pair of steps here.
//
// The warps of a block have roles, as in gemm_wgmma.cu; ring.cuh draws how they work together:
//
//   warp 0 of warpgroup 0     load_tiles (ring.cuh) with load_step
//   the other warpgroups      multiply_tiles: multiply, then Result::store; each 64 x BN of a tile
#define KIND "k8.f32.tf32.tf32"
#define WAYS ""
#define TOGETHER 2  // four sets of registers, in turn
#include "cut_tiles.cuh"
#include "tensor_shares.cuh"
#include "wgmma.cuh"

constexpr bool TURNED = !TRANS_A;  // C is stored by columns
constexpr int BK = SPAN / 4;       // k of a step
constexpr int BOX = 128 * BK;      // bytes of 32 of A's rows: for each k 128, swizzled
constexpr int A_BYTES = BM * SPAN, STAGE_BYTES = (BM + BN) * SPAN;
#include "ring.cuh"

// --- load ---------------------------------------------------------------------------------------

// Starts the copies of one step into the stage at `to`: this block's rows of A, 32 a box, and its
// share of the cluster's columns of B.
__device__ __forceinline__ void load_step(unsigned to, const TensorMap& A, const TensorMap& B,
                                          int row, int col, int k, unsigned rank, unsigned full) {
    constexpr int SHARE = BN / CLUSTER;
#pragma unroll
    for (int i = 0; i < BM / 32; ++i)
        copy_box<1>(to + i * BOX, A, row + rank * BM + 32 * i, k, 0, full);
    copy_box<CLUSTER>(to + A_BYTES + rank * SHARE * SPAN, B, k, col + rank * SHARE, 0, full);
}

// --- multiply -----------------------------------------------------------------------------------

#if BN == 64
#define FROM_REGISTERS "{%32, %33, %34, %35}, %36"
#elif BN == 128
#define FROM_REGISTERS "{%64, %65, %66, %67}, %68"
#elif BN == 192
#define FROM_REGISTERS "{%96, %97, %98, %99}, %100"
#else
#define FROM_REGISTERS "{%128, %129, %130, %131}, %132"
#endif

// sums (64 x BN of a warpgroup) += a (64 x 8) B (8 x BN), B from a tile so described.
__device__ __forceinline__ void wgmma(float (&sums)[BN / 2], const unsigned (&a)[4], u64 b) {
    asm volatile(WGMMA_(FROM_REGISTERS, "1")
                 : SUMS(sums)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

// Which of the warpgroup's 64 rows a thread has: this one and the next. For the tensor cores they
// are rows g and g + 8 of the warp's 16, g = lane / 4: so chosen, the 16 threads that read shared
// memory together hit every bank once, and C is written in whole sectors.
__device__ __forceinline__ int my_row() {
    const int g = threadIdx.x % 32 / 4, warp = threadIdx.x / 32 % 4;
    return warp / 2 * 32 + warp % 2 * 8 + g / 4 * 4 + g / 2 % 2 * 16 + g % 2 * 2;
}

// The rows' elements for k = 8 s + t and 8 s + t + 4, t = lane % 4, of half a step, from boxes of
// 32 rows with 128 bytes a k; 16 bytes at a time lie where the swizzle puts them.
__device__ __forceinline__ void take(unsigned (&a)[2][4], unsigned boxes, int half) {
    const int row = my_row(), t = threadIdx.x % 4;
    const unsigned from = boxes + row / 32 * BOX + row % 4 * 4;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int k = 16 * half + 4 * i + t;
        asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];"
                     : "=r"(a[i / 2][i % 2 * 2]), "=r"(a[i / 2][i % 2 * 2 + 1])
                     : "r"(from + k * 128 + (row % 32 / 4 ^ k % 8) * 16)
                     : "memory");
    }
}

// sums += A B over an even number of `steps`, in the accumulators. A's elements pass through four
// sets of registers, each for half a step; one set is fetched while another is multiplied.
__device__ __forceinline__ void multiply(float (&sums)[BN / 2], const Places& places, Ring& ring,
                                         const int& consumer, unsigned b, int steps) {
    unsigned a[4][2][4];
    const auto fetch = [&](int part) {
        if (part % 2 == 0) barrier_wait(places.full_of(ring.stage), ring.phase);
        take(a[part], places.stage(ring.stage) + consumer * 2 * BOX, part % 2);
    };
    int last = 0;
    fetch(0);
    for (int step = 0; step < steps; step += 2) {
#pragma unroll
        for (int part = 0; part < 4; ++part) {
            const int now = ring.stage;
            const unsigned half = b + (now * STAGE_BYTES + part % 2 * 64) / 16;
            wgmma_begin();
            wgmma(sums, a[part][0], descriptor<SPAN>(half));
            wgmma(sums, a[part][1], descriptor<SPAN>(half + 32 / 16));
            wgmma_commit();
            if (part % 2) ring.advance();
            if (part < 3 || step + 2 < steps) fetch((part + 1) % 4);
            wgmma_wait<1>();
            if (part == 2 || (part == 0 && step)) release(places, last);
            last = now;
        }
    }
    wgmma_wait<0>();
    if (steps) release(places, last);
}

// --- store --------------------------------------------------------------------------------------

struct Result {
    int m, n;
    float alpha, beta;
    float* C;
    long long ldc;

    // Where the sums of a share of k go.
    __device__ __forceinline__ Result of_share(int share) const {
        Result part = *this;
        part.C = matrix_of_share(C, share, TURNED ? n : m, ldc);
        return part;
    }

    // The warpgroup's 64 x BN at (row, col): of each 8 columns a thread has a pair in two rows.
    __device__ __forceinline__ void store(float (&sums)[BN / 2], int row, int col) const {
        row += my_row();
        const bool pairs = (reinterpret_cast<u64>(C) | ldc * 4) % 8 == 0;
        const bool whole = pairs && row + 1 < m && col + BN <= n;
        col += threadIdx.x % 4 * 2;
        whole ? write<true>(sums, row, col) : write<false>(sums, row, col);
    }

    // Calls body(x, y, r, c) for each pair of sums that are neighbours in C, at (r, c) the first:
    // of two rows in a column, or of two columns in a row.
    template <typename Body>
    __device__ __forceinline__ void for_each_pair(float (&sums)[BN / 2], int row, int col,
                                                  Body body) const {
#pragma unroll
        for (int i = 0; i < BN / 2; i += 2) {
            const int odd = i / 2 % 2;
            float& x = TURNED ? sums[i / 4 * 4 + odd] : sums[i];
            float& y = TURNED ? sums[i / 4 * 4 + odd + 2] : sums[i + 1];
            body(x, y, row + (TURNED ? 0 : odd), col + i / 4 * 8 + (TURNED ? odd : 0));
        }
    }

    // WHOLE: all of the thread's pairs are in C, and begin on 8 bytes. What beta scales is read
    // before anything is written, so that loads are on their way together.
    template <bool WHOLE>
    __device__ __forceinline__ void write(float (&sums)[BN / 2], int row, int col) const {
        const auto at = [&](int r, int c) { return C + (TURNED ? c * ldc + r : r * ldc + c); };
        const auto both = [&](int r, int c) { return TURNED ? r + 1 < m : c + 1 < n; };
#pragma unroll
        for (int i = 0; i < BN / 2; ++i) sums[i] *= alpha;
        if (beta != 0)
            for_each_pair(sums, row, col, [&](float& x, float& y, int r, int c) {
                if constexpr (WHOLE) {
                    const float2 old = *reinterpret_cast<const float2*>(at(r, c));
                    x += beta * old.x, y += beta * old.y;
                } else if (r < m && c < n) {
                    x += beta * at(r, c)[0];
                    if (both(r, c)) y += beta * at(r, c)[1];
                }
            });
        for_each_pair(sums, row, col, [&](float x, float y, int r, int c) {
            if constexpr (WHOLE) {
                // Said to be aligned, or the compiler stores some pairs 4 bytes at a time.
                *static_cast<float2*>(__builtin_assume_aligned(at(r, c), 8)) = make_float2(x, y);
            } else if (r < m && c < n) {
                at(r, c)[0] = x;
                if (both(r, c)) at(r, c)[1] = y;
            }
        });
    }
};

// The role of a warpgroup that multiplies: its 64 x BN of all tiles, from the ring to C.
__device__ __forceinline__ void multiply_tiles(const Places& places, const Tiles& tiles,
                                               const int& consumer, unsigned rank, float* parts,
                                               const Result& result) {
    const unsigned b = descriptor_of(places.stages + A_BYTES, 64 * SPAN);
    Ring ring;
    for_each_part(tiles, [&](const Part& part) {
        float sums[BN / 2];
#pragma unroll
        for (int i = 0; i < BN / 2; ++i) sums[i] = 0;
        multiply(sums, places, ring, consumer, b, 2 * part.length);
        if (SHARES == 1 && tiles.is_cut(part)) {
            float* const to = matrix_of_part(parts, tiles, part);
            const Result tile = {CLUSTER * BM, BN, 1, 0, to, TURNED ? CLUSTER * BM : BN};
            tile.store(sums, rank * BM + consumer * 64, 0);
            return;
        }
        int row, col;
        tiles.at(part.t, row, col);
        result.of_share(part.share).store(sums, row + rank * BM + consumer * 64, col);
    });
}

extern "C" __global__ void __launch_bounds__(128 + 2 * BM, 1) __cluster_dims__(CLUSTER, 1, 1)
    wgmma_across(const __grid_constant__ TensorMap A, const __grid_constant__ TensorMap B, int m,
                 int n, int k, float alpha, float beta, float* C, long long ldc AND_EACH AND_CUT) {
    extern __shared__ char memory[];
    const Places places = places_in(memory);
    const unsigned rank = CLUSTER > 1 ? block_of_cluster() : 0;
    begin_block(places, true, A, B);

    const Tiles tiles = {m, n, (k + 2 * BK - 1) / (2 * BK), each, cut, runs};
    const Result result = {m, n, alpha, beta, C, ldc};
    const auto load = [&] {
        const auto load_one = [&](unsigned to, int row, int col, int step, unsigned full) {
            load_step(to, A, B, row, col, step * BK, rank, full);
        };
        load_tiles(places, tiles, wait_for_all, load_one);
    };
    take_roles(
        wait_for_all, load, [] {},
        [&](const int& consumer) { multiply_tiles(places, tiles, consumer, rank, parts, result); });
}
