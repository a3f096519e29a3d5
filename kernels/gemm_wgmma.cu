/*---
summary   = "tensor cores of Hopper: TMA ring, warpgroups that load and that multiply, persistent"
entry     = "gemm_wgmma"
role      = "tensor"
params    = [
    {TERMS = 1, BM = 128, BN = 256, SPAN = 128, STAGES = 4, CHUNK = 1, CLUSTER = 2, OUT = 4},
    {TERMS = 1, BM = 128, BN = 256, SPAN = 128, STAGES = 4, CHUNK = 1, CLUSTER = 1, OUT = 4},
    {TERMS = 1, BM = 128, BN = 192, SPAN = 128, STAGES = 5, CHUNK = 1, CLUSTER = 1, OUT = 4},
    {TERMS = 1, BM = 128, BN = 128, SPAN = 128, STAGES = 6, CHUNK = 1, CLUSTER = 1, OUT = 4},
    {TERMS = 1, BM = 64, BN = 128, SPAN = 128, STAGES = 8, CHUNK = 1, CLUSTER = 1, OUT = 4},
    {TERMS = 1, BM = 128, BN = 256, SPAN = 128, STAGES = 4, CHUNK = 1, CLUSTER = 2, OUT = 2},
    {TERMS = 1, BM = 128, BN = 256, SPAN = 128, STAGES = 4, CHUNK = 1, CLUSTER = 1, OUT = 2},
    {TERMS = 1, BM = 128, BN = 192, SPAN = 128, STAGES = 5, CHUNK = 1, CLUSTER = 1, OUT = 2},
    {TERMS = 1, BM = 128, BN = 128, SPAN = 128, STAGES = 6, CHUNK = 1, CLUSTER = 1, OUT = 2},
    {TERMS = 1, BM = 64, BN = 128, SPAN = 128, STAGES = 8, CHUNK = 1, CLUSTER = 1, OUT = 2},
    {TERMS = 3, BM = 128, BN = 128, SPAN = 128, STAGES = 3, CHUNK = 32, CLUSTER = 2, OUT = 4},
    {TERMS = 3, BM = 128, BN = 64, SPAN = 128, STAGES = 4, CHUNK = 32, CLUSTER = 1, OUT = 4},
]
block     = ["128 + 2 * BM", "1", "1"]
grid      = ["CLUSTER * ceil(m / (CLUSTER * BM)) * ceil(n / BN)", "1", "1"]
shared    = "1024 + STAGES * (16 + (TERMS + 1) / 2 * (BM + BN) * SPAN) + (OUT == 2) * 2 * BM * (BN - 128 * (BN > 128))"
rung      = 110
layouts   = ["nt", "nn", "tn", "tt"]
require   = ["SPAN % 64 == 0", "SPAN <= 128", "BM % 64 == 0", "BM <= 192", "BN % 64 == 0", "BN <= 256", "CLUSTER <= 4",
    "STAGES >= 3", "SPAN % (SIZE * CHUNK) == 0", "(TERMS - 1) * CHUNK * SIZE % 64 == 0",
    "(OUT == 2) * (BN > 128) * BM * 256 <= (BM + BN) * SPAN"]
dtypes    = ["float16", "bfloat16", "tfloat32"]
arch      = "==90a"
runs_on   = ["cuda"]
source    = "this project: docs/tensor-cores.md"
---*/

// C (m x n) = alpha 2^(exponent_a[i] + exponent_b[j]) A B + beta C. A and B come as boxes of
// tensor maps over (k, rows, part), or (rows, k, part) where TRANS_A, or not TRANS_B; parts are
// hi and lo where TERMS is 3: then A B is lo hi + hi lo + hi hi.
//
// One warp of the first warpgroup keeps a ring of STAGES steps of BK filled; each other
// warpgroup multiplies 64 x BN of the block's tile. Where TERMS is 3, sums leave the tensor
// cores' accumulators, which truncate, after CHUNK of k, and are added in registers while the
// other warpgroup multiplies: first those of a RUN of steps, then runs, so that a long k does not
// make one long chain of roundings. CLUSTER blocks, one above the other, load a share of their B
// each. A second warp of the first warpgroup stores C of 16 bits, part of which lies in the stage
// that a tile read last: it is this warp that releases that stage.
#if DTYPE_float16
#define KIND "k16.f32.f16.f16"
#elif DTYPE_bfloat16
#define KIND "k16.f32.bf16.bf16"
#else
#define KIND "k8.f32.tf32.tf32"
#endif
#if SIZE == 2 && TRANS_A && TRANS_B
#define WAYS ", 1, 0"
#elif SIZE == 2 && TRANS_A
#define WAYS ", 1, 1"
#elif SIZE == 2 && TRANS_B
#define WAYS ", 0, 0"
#elif SIZE == 2
#define WAYS ", 0, 1"
#else
#define WAYS ""
#endif
#include "wgmma.cuh"
#include "ring.cuh"
#include "wgmma_result.cuh"

constexpr bool ACROSS_A = TRANS_A, ACROSS_B = !TRANS_B;  // operands whose memory runs across k
static_assert(SIZE == 2 || !(ACROSS_A || ACROSS_B), "TF32 operands lie along k");
constexpr int PARTS = (TERMS + 1) / 2;
constexpr int CONSUMERS = BM / 64;
constexpr int STEP = 32 / SIZE, BK = SPAN / SIZE;  // k of an instruction, of a step
constexpr int A_BYTES = BM * SPAN, B_BYTES = BN * SPAN;  // of one part
constexpr int STAGE_BYTES = PARTS * (A_BYTES + B_BYTES);
constexpr bool CHUNKED = TERMS == 3;
constexpr int RUN = 2048 / SPAN;  // steps
static_assert(!(CHUNKED && LENT), "only whole sums leave through a stage");
static_assert(!ACROSS_B || BN % (64 * CLUSTER) == 0, "a block loads whole columns of 64");

// ROWS rows or columns of all parts of an operand at (x, k) into a stage.
template <int ROWS, int BYTES, bool ACROSS, int BLOCKS>
__device__ __forceinline__ void load(unsigned to, const TensorMap& map, int x, int k,
                                     unsigned full) {
#pragma unroll
    for (int part = 0; part < PARTS; ++part, to += BYTES) {
        if constexpr (ACROSS) {
#pragma unroll
            for (int i = 0; i < ROWS; i += 64)
                copy_box<BLOCKS>(to + i * SPAN, map, x + i, k, part, full);
        } else {
            copy_box<BLOCKS>(to, map, k, x, part, full);
        }
    }
}

// Multiplies 64 rows of A with B, tiles of parts 0 of a stage, for parts pa and pb, by COUNT
// instructions from k on.
template <int COUNT>
__device__ __forceinline__ void multiply(float (&sums)[BN / 2], unsigned a, unsigned b, int pa,
                                         int pb, int k, bool add) {
    a += pa * A_BYTES / 16, b += pb * B_BYTES / 16;
#pragma unroll
    for (int i = 0; i < COUNT; ++i, k += STEP)
        wgmma(sums, descriptor<ACROSS_A ? 128 : SPAN>(a + (ACROSS_A ? k * 128 : k * SIZE) / 16),
              descriptor<ACROSS_B ? 128 : SPAN>(b + (ACROSS_B ? k * 128 : k * SIZE) / 16),
              add || i > 0);
}

extern "C" __global__ void __launch_bounds__(128 + 2 * BM, 1) IN_CLUSTERS
    gemm_wgmma(const __grid_constant__ TensorMap A, const __grid_constant__ TensorMap B,
#if OUT == 2
               const __grid_constant__ TensorMap map_of_c,
#endif
               int m, int n, int k, float alpha, const int* exponent_a, const int* exponent_b,
               float beta, Out* C, long long ldc, const int* verdict, int wanted) {
    extern __shared__ char memory[];
    const unsigned stages = (shared_address(memory) + 1023) / 1024 * 1024;
    const unsigned beside = stages + STAGES * STAGE_BYTES;  // boxes of C
    const unsigned full = beside + BESIDE_BYTES, empty = full + 8 * STAGES;
    const unsigned rank = CLUSTER > 1 ? block_of_cluster() : 0;
    if (threadIdx.x == 0) {
        if (k > 0) {
            prefetch_map(A);
            prefetch_map(B);
#if OUT == 2
            prefetch_map(map_of_c);
#endif
        }
        init_stages(full, empty, 4 * CONSUMERS * CLUSTER);  // a warp's arrival each
    }
    __syncthreads();
    if (CLUSTER > 1) cluster_barrier();
    in_turn();
    if (verdict && *verdict != wanted) return;

    const Tiles tiles = {m, n};
    const int steps = (k + BK - 1) / BK;
    const int warp = warp_number(), consumer = warp / 4 - 1;
    const Result result = {m, n, alpha, beta, exponent_a, exponent_b, C, ldc};
    Ring ring;
    if (consumer < 0) {
        if constexpr (CONSUMERS > 1) registers_fewer<CONSUMERS == 2 ? 40 : 32>();
        if (warp == 0) {
            const bool loads = elected();
            for (int t = blockIdx.x / CLUSTER; t < tiles.count(); t += gridDim.x / CLUSTER) {
                int row, col;
                tiles.at(t, row, col);
                for (int step = 0; step < steps; ++step, ring.advance()) {
                    constexpr int SHARE = BN / CLUSTER;
                    const unsigned to = stages + ring.stage * STAGE_BYTES;
                    const unsigned whole = full + 8 * ring.stage;
                    barrier_wait(empty + 8 * ring.stage, ring.phase ^ 1);
                    if (!loads) continue;
                    barrier_expect(whole, STAGE_BYTES);
                    load<BM, A_BYTES, ACROSS_A, 1>(to, A, row + rank * BM, step * BK, whole);
                    load<SHARE, B_BYTES, ACROSS_B, CLUSTER>(
                        to + PARTS * A_BYTES + rank * SHARE * SPAN, B, col + rank * SHARE,
                        step * BK, whole);
                }
            }
        }
#if OUT == 2
        if (warp == 1) {
            const bool stores = elected();
            int last = STAGES - 1;
            for (int t = blockIdx.x / CLUSTER; t < tiles.count(); t += gridDim.x / CLUSTER) {
                int row, col;
                tiles.at(t, row, col);
                last = (last + steps) % STAGES;
                result.leave(map_of_c, row + rank * BM, col, {stages + last * STAGE_BYTES, beside},
                             stores);
                if (LENT && threadIdx.x % 32 < 4 * CONSUMERS) {  // for all warps that multiply
#pragma unroll
                    for (int to = 0; to < CLUSTER; ++to) barrier_arrive(empty + 8 * last, to);
                }
            }
            if (stores) stores_wait<0>();
        }
#endif
    } else {
        if constexpr (CONSUMERS == 2) registers_more<232>();
        if constexpr (CONSUMERS == 3) registers_more<160>();
        const auto release = [&](int stage) {  // this warp has read it
            const unsigned lane = threadIdx.x % 32;
            if (lane < CLUSTER) barrier_arrive(empty + 8 * stage, lane);
        };
        const unsigned a = tile_at(stages + consumer * 64 * SPAN, 64 * SPAN);
        const unsigned b = tile_at(stages + PARTS * A_BYTES, 64 * SPAN);
        // Consumers take turns at the tensor cores, so that one adds while the next multiplies.
        constexpr bool TURNS = CHUNKED && CONSUMERS > 1;
        if (TURNS && consumer == CONSUMERS - 1) pass(1, 256);
        for (int t = blockIdx.x / CLUSTER; t < tiles.count(); t += gridDim.x / CLUSTER) {
            float sums[BN / 2];
#pragma unroll
            for (int i = 0; i < BN / 2; ++i) sums[i] = 0;
            int last = STAGES - 1;
            if constexpr (CHUNKED) {
                for (int step = 0; step < steps;) {
                    float run[BN / 2];
#pragma unroll
                    for (int i = 0; i < BN / 2; ++i) run[i] = 0;
                    for (const int end = min(steps, step + RUN); step < end; ++step) {
                        const unsigned stage = ring.stage * (STAGE_BYTES / 16);
                        barrier_wait(full + 8 * ring.stage, ring.phase);
#pragma unroll
                        for (int from = 0; from < BK; from += CHUNK) {
                            float part[BN / 2];
                            if (TURNS) meet(1 + consumer, 256);
                            wgmma_begin();
#pragma unroll
                            for (int term = 0; term < 3; ++term)  // lo hi, hi lo, hi hi
                                multiply<CHUNK / STEP>(part, a + stage, b + stage, term == 0,
                                                       term == 1, from, term > 0);
                            wgmma_commit();
                            if (TURNS) pass(1 + (consumer + 1) % CONSUMERS, 256);
                            wgmma_wait<0>();
                            if (from + CHUNK == BK) release(ring.stage);
#pragma unroll
                            for (int i = 0; i < BN / 2; ++i) run[i] += part[i];
                        }
                        ring.advance();
                    }
#pragma unroll
                    for (int i = 0; i < BN / 2; ++i) sums[i] += run[i];
                }
            } else {
                for (int step = 0; step < steps; ++step, ring.advance()) {
                    barrier_wait(full + 8 * ring.stage, ring.phase);
                    wgmma_begin();
                    const unsigned stage = ring.stage * (STAGE_BYTES / 16);
                    multiply<BK / STEP>(sums, a + stage, b + stage, 0, 0, 0, true);
                    wgmma_commit();
                    wgmma_wait<1>();
                    if (step) release(last);
                    last = ring.stage;
                }
                wgmma_wait<0>();
                if (steps && !LENT) release(last);
            }
            int row = 0, col = 0;  // not looked at where TMA stores all of C: divisions take long
            if (OUT == 4 || CHUNKED || beta != 0 || !result.vectors()) tiles.at(t, row, col);
            result.store(sums, row + rank * BM + consumer * 64, col, consumer,
                         {stages + last * STAGE_BYTES, beside});
        }
    }
    // A block stays while others may still reach for its shared memory.
    __syncwarp();
    if (CLUSTER > 1) cluster_barrier();
}
