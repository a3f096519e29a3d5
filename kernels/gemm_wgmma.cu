/*---
summary    = "tensor cores of Hopper: TMA ring, warpgroups that load and that multiply, persistent"
entry      = "gemm_wgmma"
role       = "tensor"
# TERMS    1: A B; 3: A and B come in parts hi and lo, and lo hi + hi lo + hi hi is computed
# BM, BN, SPAN, STAGES, CLUSTER: see ring.cuh
# CHUNK    with TERMS = 3: elements of k after which sums leave the accumulators; else 1
# OUT: see numbers.cuh
# SHARES: see tensor_shares.cuh
params     = [
    {TERMS = 1, BM = 128, BN = 256, SPAN = 128, STAGES = 4, CHUNK = 1, CLUSTER = 2, OUT = 4, SHARES = 1},
    {TERMS = 1, BM = 128, BN = 256, SPAN = 128, STAGES = 4, CHUNK = 1, CLUSTER = 1, OUT = 4, SHARES = 1},
    {TERMS = 1, BM = 128, BN = 192, SPAN = 128, STAGES = 5, CHUNK = 1, CLUSTER = 1, OUT = 4, SHARES = 1},
    {TERMS = 1, BM = 128, BN = 128, SPAN = 128, STAGES = 6, CHUNK = 1, CLUSTER = 1, OUT = 4, SHARES = 1},
    {TERMS = 1, BM = 64, BN = 128, SPAN = 128, STAGES = 8, CHUNK = 1, CLUSTER = 1, OUT = 4, SHARES = 1},
    {TERMS = 1, BM = 128, BN = 256, SPAN = 128, STAGES = 4, CHUNK = 1, CLUSTER = 1, OUT = 4, SHARES = 256},
    {TERMS = 1, BM = 128, BN = 128, SPAN = 128, STAGES = 6, CHUNK = 1, CLUSTER = 1, OUT = 4, SHARES = 256},
    {TERMS = 1, BM = 128, BN = 64, SPAN = 128, STAGES = 8, CHUNK = 1, CLUSTER = 1, OUT = 4, SHARES = 256},
    {TERMS = 1, BM = 64, BN = 128, SPAN = 128, STAGES = 8, CHUNK = 1, CLUSTER = 1, OUT = 4, SHARES = 256},
    {TERMS = 1, BM = 64, BN = 64, SPAN = 128, STAGES = 10, CHUNK = 1, CLUSTER = 1, OUT = 4, SHARES = 256},
    {TERMS = 1, BM = 128, BN = 256, SPAN = 128, STAGES = 4, CHUNK = 1, CLUSTER = 2, OUT = 2, SHARES = 1},
    {TERMS = 1, BM = 128, BN = 256, SPAN = 128, STAGES = 4, CHUNK = 1, CLUSTER = 1, OUT = 2, SHARES = 1},
    {TERMS = 1, BM = 128, BN = 192, SPAN = 128, STAGES = 5, CHUNK = 1, CLUSTER = 1, OUT = 2, SHARES = 1},
    {TERMS = 1, BM = 128, BN = 128, SPAN = 128, STAGES = 6, CHUNK = 1, CLUSTER = 1, OUT = 2, SHARES = 1},
    {TERMS = 1, BM = 64, BN = 128, SPAN = 128, STAGES = 8, CHUNK = 1, CLUSTER = 1, OUT = 2, SHARES = 1},
    {TERMS = 1, BM = 128, BN = 256, SPAN = 128, STAGES = 4, CHUNK = 1, CLUSTER = 1, OUT = 2, SHARES = 256},
    {TERMS = 1, BM = 128, BN = 128, SPAN = 128, STAGES = 6, CHUNK = 1, CLUSTER = 1, OUT = 2, SHARES = 256},
    {TERMS = 1, BM = 128, BN = 64, SPAN = 128, STAGES = 8, CHUNK = 1, CLUSTER = 1, OUT = 2, SHARES = 256},
    {TERMS = 1, BM = 64, BN = 128, SPAN = 128, STAGES = 8, CHUNK = 1, CLUSTER = 1, OUT = 2, SHARES = 256},
    {TERMS = 1, BM = 64, BN = 64, SPAN = 128, STAGES = 10, CHUNK = 1, CLUSTER = 1, OUT = 2, SHARES = 256},
    {TERMS = 3, BM = 128, BN = 128, SPAN = 128, STAGES = 3, CHUNK = 32, CLUSTER = 2, OUT = 4, SHARES = 1},
    {TERMS = 3, BM = 128, BN = 64, SPAN = 128, STAGES = 4, CHUNK = 32, CLUSTER = 1, OUT = 4, SHARES = 1},
    {TERMS = 3, BM = 128, BN = 128, SPAN = 128, STAGES = 3, CHUNK = 32, CLUSTER = 1, OUT = 4, SHARES = 256},
    {TERMS = 3, BM = 128, BN = 64, SPAN = 128, STAGES = 4, CHUNK = 32, CLUSTER = 1, OUT = 4, SHARES = 256},
    {TERMS = 3, BM = 64, BN = 64, SPAN = 128, STAGES = 6, CHUNK = 32, CLUSTER = 1, OUT = 4, SHARES = 256},
]
block      = ["128 + 2 * BM", "1", "1"]
grid       = ["CLUSTER * ceil(m / (CLUSTER * BM)) * ceil(n / BN)", "1", "1"]
tile       = ["BM", "BN"]
step       = "SPAN / SIZE"
cluster    = "CLUSTER"
persistent = true
early      = true
# TMA copies an operand along k in rows of SPAN bytes, one across k in boxes 128 bytes wide. It
# stores a C of 16 bits in boxes 128 bytes wide, too.
tma        = [
    {operand = "A", along_k = ["SPAN / SIZE", "BM"], across_k = ["128 / SIZE", "SPAN / SIZE"]},
    {operand = "B", along_k = ["SPAN / SIZE", "BN / CLUSTER"], across_k = ["128 / SIZE", "SPAN / SIZE"]},
    {operand = "C", box = ["64", "64"], where = "(OUT == 2) * (SHARES == 1) == 1"},
]
# alignment; the stages and their barriers; boxes of C beside them, 16 bits an element
shared     = "1024 + STAGES * (16 + (TERMS + 1) / 2 * (BM + BN) * SPAN) + (OUT == 2) * (SHARES == 1) * 2 * BM * (BN - 128 * (BN > 128))"
rung       = 110
layouts    = ["nt", "nn", "tn", "tt"]
require    = [
    # swizzles of 64 or 128 bytes; wgmma multiplies 64 rows by up to 256 columns
    "SPAN % 64 == 0", "SPAN <= 128", "BM % 64 == 0", "BM <= 192", "BN % 64 == 0", "BN <= 256",
    "CLUSTER <= 4", "STAGES >= 3", "TERMS != 2", "TERMS <= 3", "OUT % 2 == 0", "OUT <= 4",
    # a block loads whole columns of 64; sums fit in the registers of its threads
    "BN % (64 * CLUSTER) == 0", "BM * BN <= 36864",
    # sums of chunks leave as float32
    "(TERMS == 3) * (OUT == 2) == 0",
    # a step is whole chunks, a chunk whole instructions of 32 bytes of k
    "SPAN % (SIZE * CHUNK) == 0", "(TERMS - 1) * CHUNK * SIZE % 64 == 0",
    # two boxes of C of each 64 rows fit in a stage that is borrowed (ring.cuh)
    "(OUT == 2) * (SHARES == 1) * (BN > 128) * BM * 256 <= (BM + BN) * SPAN",
]
dtypes     = ["float16", "bfloat16", "tfloat32"]
arch       = "==90a"
runs_on    = ["cuda"]
source     = "this project: docs/tensor-cores.md"
---*/

// C (m x n) = alpha 2^(exponent_a[i] + exponent_b[j]) A B + beta C. A and B come as boxes of
// tensor maps over (k, rows, part), or (rows, k, part) where TRANS_A, or not TRANS_B; parts are
// hi and lo where TERMS is 3: then A B is lo hi + hi lo + hi hi. tensor_shares.cuh says what
// becomes of C where k is cut into shares.
//
// The warps of a block have roles; ring.cuh draws how they work together:
//
//   warp 0 of warpgroup 0       load_tiles (ring.cuh) with load_step
//   warp 1 of warpgroup 0       store_tiles, for C of 16 bits
//   the other warpgroups        multiply_tiles: multiply_whole or multiply_chunked, then
//                               Result::store; each has 64 x BN of the tile
#if DTYPE_float16
#define KIND "k16.f32.f16.f16"
#elif DTYPE_bfloat16
#define KIND "k16.f32.bf16.bf16"
#else
#define KIND "k8.f32.tf32.tf32"
#endif
#if SIZE == 2 && TRANS_A && TRANS_B  // how A and B lie: 0 along k, 1 across
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
#include "cut_tiles.cuh"
#include "tensor_shares.cuh"
#include "verdict.cuh"
#include "wgmma.cuh"

constexpr bool ACROSS_A = TRANS_A, ACROSS_B = !TRANS_B;  // operands whose memory runs across k
static_assert(SIZE == 2 || !(ACROSS_A || ACROSS_B), "TF32 operands lie along k");
constexpr int PARTS = (TERMS + 1) / 2;             // of an operand: hi alone, or hi and lo
constexpr int STEP = 32 / SIZE, BK = SPAN / SIZE;  // k of an instruction, of a step
// Bytes of one part in a stage, and of all parts of both operands.
constexpr int A_BYTES = BM * SPAN, B_BYTES = BN * SPAN;
constexpr int STAGE_BYTES = PARTS * (A_BYTES + B_BYTES);
constexpr bool CHUNKED = TERMS == 3;
constexpr int RUN = 2048 / SPAN;  // steps whose sums are added up before they join the others
#include "ring.cuh"
#include "wgmma_result.cuh"
static_assert(!(CHUNKED && BORROWED), "only whole sums leave through a stage");
static_assert(!ACROSS_B || BN % (64 * CLUSTER) == 0, "a block loads whole columns of 64");

// --- load ---------------------------------------------------------------------------------------

// Starts the copies of ROWS rows or columns of all parts of an operand at (x, k) to shared memory
// of BLOCKS blocks of the cluster.
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

// Starts the copies of one step into the stage at `to`: this block's rows of A, and its share of
// the cluster's columns of B.
__device__ __forceinline__ void load_step(unsigned to, const TensorMap& A, const TensorMap& B,
                                          int row, int col, int k, unsigned rank, unsigned full) {
    constexpr int SHARE = BN / CLUSTER;
    load<BM, A_BYTES, ACROSS_A, 1>(to, A, row + rank * BM, k, full);
    load<SHARE, B_BYTES, ACROSS_B, CLUSTER>(to + PARTS * A_BYTES + rank * SHARE * SPAN, B,
                                            col + rank * SHARE, k, full);
}

// --- multiply -----------------------------------------------------------------------------------

// Starts COUNT instructions, from k on: 64 rows of A by B, tiles of parts 0 of a stage, for parts
// pa and pb.
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

// sums += A B over `steps` stages, in the accumulators. Returns the last stage, which is kept where
// it is to be borrowed.
__device__ __forceinline__ int multiply_whole(float (&sums)[BN / 2], const Places& places,
                                              Ring& ring, unsigned a, unsigned b, int steps) {
    return multiply_stages<(BORROWED > 0)>(places, ring, steps, [&](unsigned stage) {
        multiply<BK / STEP>(sums, a + stage, b + stage, 0, 0, 0, true);
    });
}

// Consumers take turns at the tensor cores, so that one adds while the next multiplies.
constexpr bool TURNS = CHUNKED && CONSUMERS > 1;

// sums += A B over `steps` stages in three terms. The tensor cores' accumulators truncate, so sums
// leave them after each CHUNK of k and are added in registers, while the other warpgroup
// multiplies: first those of a RUN of steps, then runs, so that a long k does not make one long
// chain of roundings.
__device__ __forceinline__ void multiply_chunked(float (&sums)[BN / 2], const Places& places,
                                                 Ring& ring, unsigned a, unsigned b, int steps,
                                                 int consumer) {
    for (int step = 0; step < steps;) {
        float run[BN / 2];
#pragma unroll
        for (int i = 0; i < BN / 2; ++i) run[i] = 0;
        for (const int end = min(steps, step + RUN); step < end; ++step) {
            const unsigned stage = ring.stage * (STAGE_BYTES / 16);
            barrier_wait(places.full_of(ring.stage), ring.phase);
#pragma unroll
            for (int from = 0; from < BK; from += CHUNK) {
                float part[BN / 2];
                if (TURNS) barrier_sync(1 + consumer, 256);
                wgmma_begin();
#pragma unroll
                for (int term = 0; term < 3; ++term)  // lo hi, hi lo, hi hi
                    multiply<CHUNK / STEP>(part, a + stage, b + stage, term == 0, term == 1, from,
                                           term > 0);
                wgmma_commit();
                if (TURNS) barrier_signal(1 + (consumer + 1) % CONSUMERS, 256);
                wgmma_wait<0>();
                if (from + CHUNK == BK) release(places, ring.stage);
#pragma unroll
                for (int i = 0; i < BN / 2; ++i) run[i] += part[i];
            }
            ring.advance();
        }
#pragma unroll
        for (int i = 0; i < BN / 2; ++i) sums[i] += run[i];
    }
}

// The role of a warpgroup that multiplies: its 64 x BN of all tiles, from the ring to C.
__device__ __forceinline__ void multiply_tiles(const Places& places, const Tiles& tiles,
                                               const int& consumer, unsigned rank, float* parts,
                                               unsigned beside, const Result& result) {
    const unsigned a = descriptor_of(places.stages + consumer * 64 * SPAN, 64 * SPAN);
    const unsigned b = descriptor_of(places.stages + PARTS * A_BYTES, 64 * SPAN);
    Ring ring;
    if (TURNS && consumer == CONSUMERS - 1) barrier_signal(1, 256);
    for_each_part(tiles, [&](const Part& part) {
        float sums[BN / 2];
#pragma unroll
        for (int i = 0; i < BN / 2; ++i) sums[i] = 0;
        int last = STAGES - 1;
        if constexpr (CHUNKED)
            multiply_chunked(sums, places, ring, a, b, part.length, consumer);
        else
            last = multiply_whole(sums, places, ring, a, b, part.length);
        if (SHARES == 1 && tiles.is_cut(part)) {
            float* const to = matrix_of_part(parts, tiles, part);
            write_part(sums, to + (rank * BM + consumer * 64) * BN);
            if (BORROWED) release(places, last);
            return;
        }
        int row = 0, col = 0;  // not looked at where TMA stores all of C: divisions take long
        if (OUT == 4 || CHUNKED || result.beta != 0 || !result.vectors())
            tiles.at(part.t, row, col);
        result.of_share(part.share)
            .store(sums, row + rank * BM + consumer * 64, col, consumer,
                   {places.stage(last), beside});
    });
}

// --- store --------------------------------------------------------------------------------------

#if OUT == 2
// The role of the warp that stores C of 16 bits: hands the boxes that the warpgroups wrote to TMA,
// and releases the stage that some of them lie in.
__device__ __forceinline__ void store_tiles(const Places& places, const Tiles& tiles, unsigned rank,
                                            unsigned beside, const Result& result,
                                            const TensorMap& map_of_c) {
    const bool stores = elected();
    int last = STAGES - 1;
    for_each_part(tiles, [&](const Part& part) {
        int row, col;
        tiles.at(part.t, row, col);
        last = (last + part.length) % STAGES;
        if (tiles.is_cut(part)) return;
        result.store_boxes(map_of_c, row + rank * BM, col, {places.stage(last), beside}, stores);
        if (BORROWED && threadIdx.x % 32 < 4 * CONSUMERS) {  // for all warps that multiply
#pragma unroll
            for (int to = 0; to < CLUSTER; ++to) barrier_arrive(places.empty_of(last), to);
        }
    });
    if (stores) stores_wait<0>();
}
#endif

extern "C" __global__ void __launch_bounds__(128 + 2 * BM, 1) IN_CLUSTERS
    gemm_wgmma(const __grid_constant__ TensorMap A, const __grid_constant__ TensorMap B,
#if OUT == 2
               const __grid_constant__ TensorMap map_of_c,
#endif
               int m, int n, int k, float alpha, const int* exponent_a, const int* exponent_b,
               float beta, Out* C, long long ldc, State* state, int wanted AND_EACH AND_CUT) {
    extern __shared__ char memory[];
    const Places places = places_in(memory, BESIDE_BYTES);
    const unsigned beside = places.stage(STAGES);  // boxes of C
    const unsigned rank = CLUSTER > 1 ? block_of_cluster() : 0;
#if OUT == 2
    begin_block(places, k > 0, A, B, map_of_c);
#else
    begin_block(places, k > 0, A, B);
#endif

    const Tiles tiles = {m, n, (k + BK - 1) / BK, each, cut, runs};
    const Result result = {m, n, alpha, beta, exponent_a, exponent_b, C, ldc};
    if (TERMS == 3) {
        wait_for_all();
        if (state && verdict_of(state) != wanted) return;
    }
    const auto begin = [] {
        if (TERMS != 3) wait_for_all();
    };
    const auto load = [&] {
        const auto load_one = [&](unsigned to, int row, int col, int step, unsigned full) {
            load_step(to, A, B, row, col, step * BK, rank, full);
        };
        load_tiles(places, tiles, begin, load_one);
    };
    const auto store = [&] {
#if OUT == 2
        store_tiles(places, tiles, rank, beside, result, map_of_c);
#endif
    };
    take_roles(begin, load, store, [&](const int& consumer) {
        multiply_tiles(places, tiles, consumer, rank, parts, beside, result);
    });
}
