/*---
summary   = "tensor cores of Hopper: TMA ring, warpgroups that load and that multiply, persistent"
entry     = "gemm_wgmma"
role      = "tensor"
params    = [
    {TERMS = 1, BM = 128, BN = 256, SPAN = 64, STAGES = 9, CHUNK = 1, CLUSTER = 2, LEAD = 3, OUT = 4},
    {TERMS = 1, BM = 128, BN = 256, SPAN = 64, STAGES = 9, CHUNK = 1, CLUSTER = 1, LEAD = 3, OUT = 4},
    {TERMS = 1, BM = 128, BN = 192, SPAN = 64, STAGES = 10, CHUNK = 1, CLUSTER = 1, LEAD = 3, OUT = 4},
    {TERMS = 1, BM = 128, BN = 128, SPAN = 128, STAGES = 6, CHUNK = 1, CLUSTER = 1, LEAD = 1, OUT = 4},
    {TERMS = 1, BM = 64, BN = 128, SPAN = 128, STAGES = 8, CHUNK = 1, CLUSTER = 1, LEAD = 1, OUT = 4},
    {TERMS = 1, BM = 128, BN = 256, SPAN = 64, STAGES = 9, CHUNK = 1, CLUSTER = 2, LEAD = 1, OUT = 2},
    {TERMS = 1, BM = 128, BN = 256, SPAN = 64, STAGES = 9, CHUNK = 1, CLUSTER = 1, LEAD = 3, OUT = 2},
    {TERMS = 1, BM = 128, BN = 192, SPAN = 64, STAGES = 10, CHUNK = 1, CLUSTER = 1, LEAD = 3, OUT = 2},
    {TERMS = 1, BM = 128, BN = 128, SPAN = 128, STAGES = 6, CHUNK = 1, CLUSTER = 1, LEAD = 1, OUT = 2},
    {TERMS = 1, BM = 64, BN = 128, SPAN = 128, STAGES = 8, CHUNK = 1, CLUSTER = 1, LEAD = 1, OUT = 2},
    {TERMS = 3, BM = 128, BN = 192, SPAN = 64, STAGES = 5, CHUNK = 1, CLUSTER = 2, LEAD = 1, OUT = 4},
    {TERMS = 3, BM = 128, BN = 128, SPAN = 128, STAGES = 3, CHUNK = 1, CLUSTER = 2, LEAD = 1, OUT = 4},
    {TERMS = 3, BM = 64, BN = 128, SPAN = 128, STAGES = 4, CHUNK = 1, CLUSTER = 1, LEAD = 1, OUT = 4},
]
block     = ["128 + 2 * BM", "1", "1"]
grid      = ["CLUSTER * ceil(m / (CLUSTER * BM)) * ceil(n / BN)", "1", "1"]
shared    = "1024 + STAGES * (24 + (TERMS + 1) / 2 * (BM + BN) * SPAN)"
rung      = 110
layouts   = ["nt", "nn", "tn", "tt"]
require   = ["SPAN % 64 == 0", "SPAN <= 128", "BM % 64 == 0", "BM <= 192", "BN % 64 == 0", "BN <= 256", "CLUSTER <= 4",
    "STAGES >= LEAD + 2"]
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
// cores' accumulators, which truncate, after CHUNK steps, and are added in registers while the
// other warpgroup multiplies. CLUSTER blocks, one above the other, load a share of their B each.
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

constexpr bool ACROSS_A = TRANS_A, ACROSS_B = !TRANS_B;  // operands whose memory runs across k
static_assert(SIZE == 2 || !(ACROSS_A || ACROSS_B), "TF32 operands lie along k");
constexpr int PARTS = (TERMS + 1) / 2;
constexpr int CONSUMERS = BM / 64;
constexpr int BK = SPAN / SIZE;                   // k of a step
constexpr int A_BYTES = BM * SPAN, B_BYTES = BN * SPAN;  // of one part
constexpr int STAGE_BYTES = PARTS * (A_BYTES + B_BYTES);
constexpr int STRIP = 16 / CLUSTER;               // tile rows worked through together, for L2
constexpr bool CHUNKED = TERMS == 3;
constexpr bool LEADS = !CHUNKED && CONSUMERS == 2;
static_assert(!ACROSS_B || BN % (64 * CLUSTER) == 0, "a block loads whole columns of 64");
static_assert(STAGES >= 2 * CHUNK || !CHUNKED, "the ring holds a chunk and the next");

#if OUT == 4
typedef float Out;
#else
typedef unsigned short Out;
#endif

struct Ring {  // a place in the ring, and how often it came around, modulo 2
    int stage = 0;
    unsigned phase = 0;
    __device__ __forceinline__ void advance() {
        if (++stage == STAGES) stage = 0, phase ^= 1;
    }
};

struct Tiles {  // of CLUSTER * BM x BN, in an order that keeps A and B in L2
    int rows, cols;
    __device__ __forceinline__ Tiles(int m, int n)
        : rows((m + CLUSTER * BM - 1) / (CLUSTER * BM)), cols((n + BN - 1) / BN) {}
    __device__ __forceinline__ int count() const { return rows * cols; }
    __device__ __forceinline__ void at(int t, int& row, int& col) const {
        const int strip = t / (STRIP * cols), within = t % (STRIP * cols);
        const int high = min(STRIP, rows - strip * STRIP);
        row = (strip * STRIP + within % high) * CLUSTER * BM;
        col = within / high * BN;
    }
};

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

__device__ __forceinline__ float power_of_two(int e) { return __int_as_float((e + 127) << 23); }

__device__ __forceinline__ float widened(Out x) {
#if OUT == 4
    return x;
#elif DTYPE_bfloat16
    return __int_as_float(static_cast<unsigned>(x) << 16);
#else
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x));
    return y;
#endif
}

__device__ __forceinline__ unsigned rounded(float first, float second) {  // to two of 16 bits
    unsigned pair;
#if DTYPE_bfloat16
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
#else
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
#endif
    return pair;
}

constexpr int WIDE = 16 / OUT;  // elements of C that a thread writes at once

struct Vector {
    union {
        uint4 all;
        Out each[WIDE];
    };
};

// The power of two in halves of one sign: what the product keeps, no half loses.
__device__ __forceinline__ float scaled(float x, int exponent) {
    const int half = exponent >> 1;
    return x * power_of_two(half) * power_of_two(exponent - half);
}

struct Result {
    int m, n;
    float alpha, beta;
    const int *exponent_a, *exponent_b;
    Out* C;
    long long ldc;

    // The warpgroup's 64 x BN at (row, col). Of each 8 columns a thread has a pair, in two rows.
    __device__ __forceinline__ void store(float (&sums)[BN / 2], int row, int col) const {
        row += threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4;
        if (CHUNKED && exponent_a) {
            int of_rows[2] = {};
#pragma unroll
            for (int half = 0; half < 2; ++half)
                if (row + 8 * half < m) of_rows[half] = exponent_a[row + 8 * half];
#pragma unroll
            for (int i = 0; i < BN / 2; i += 4) {
#pragma unroll
                for (int j = 0; j < 2; ++j) {
                    const int c = col + 2 * i + threadIdx.x % 4 * 2 + j;
                    const int of_col = c < n ? exponent_b[c] : 0;
                    sums[i + j] = scaled(sums[i + j], of_rows[0] + of_col);
                    sums[i + j + 2] = scaled(sums[i + j + 2], of_rows[1] + of_col);
                }
            }
        }
#pragma unroll
        for (int i = 0; i < BN / 2; ++i) sums[i] *= alpha;
        if (beta != 0) {
#pragma unroll
            for (int i = 0; i < BN / 2; ++i) {
                const int r = row + i / 2 % 2 * 8, c = col + i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2;
                if (r < m && c < n) sums[i] += beta * widened(C[r * ldc + c]);
            }
        }
        const bool vectors = (ldc * OUT | reinterpret_cast<u64>(C)) % 16 == 0;
        if (vectors && col + BN <= n)
            write<true>(sums, row, col);
        else
            write<false>(sums, row, col);
    }

    // The threads of a row trade their pairs for WIDE columns in a row each.
    template <bool WHOLE>
    __device__ __forceinline__ void write(const float (&sums)[BN / 2], int row, int col) const {
        const bool odd = threadIdx.x % 2, upper = threadIdx.x % 4 / 2;
        col += OUT == 4 ? 8 * odd + 4 * upper : 8 * odd + 16 * upper;
#pragma unroll
        for (int half = 0; half < 2; ++half, row += 8) {
            Out* const to = C + row * ldc + col;
#pragma unroll
            for (int j = 0; j < BN / 8; j += WIDE / 2) {
                const float* const x = sums + 4 * j + 2 * half;  // pair i is x[4 i], x[4 i + 1]
                uint4 all;
#if OUT == 4
                const float send[2] = {odd ? x[0] : x[4], odd ? x[1] : x[5]};
                const float got[2] = {__shfl_xor_sync(~0u, send[0], 1), __shfl_xor_sync(~0u, send[1], 1)};
                all.x = __float_as_uint(odd ? got[0] : x[0]);
                all.y = __float_as_uint(odd ? got[1] : x[1]);
                all.z = __float_as_uint(odd ? x[4] : got[0]);
                all.w = __float_as_uint(odd ? x[5] : got[1]);
#else
                unsigned two[2][2];  // pairs beside each other, of columns j + 2 i + odd
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    const unsigned a = rounded(x[8 * i], x[8 * i + 1]);
                    const unsigned b = rounded(x[8 * i + 4], x[8 * i + 5]);
                    const unsigned got = __shfl_xor_sync(~0u, odd ? a : b, 1);
                    two[i][0] = odd ? got : a;
                    two[i][1] = odd ? b : got;
                }
                const unsigned got[2] = {__shfl_xor_sync(~0u, upper ? two[0][0] : two[1][0], 2),
                                         __shfl_xor_sync(~0u, upper ? two[0][1] : two[1][1], 2)};
                all.x = upper ? got[0] : two[0][0];
                all.y = upper ? got[1] : two[0][1];
                all.z = upper ? two[1][0] : got[0];
                all.w = upper ? two[1][1] : got[1];
#endif
                if (row >= m) continue;
                if constexpr (WHOLE) {
                    *reinterpret_cast<uint4*>(to + 8 * j) = all;
                } else {
                    Vector v;
                    v.all = all;
#pragma unroll
                    for (int i = 0; i < WIDE; ++i)
                        if (col + 8 * j + i < n) to[8 * j + i] = v.each[i];
                }
            }
        }
    }
};

// Multiplies the warpgroup's 64 rows of A with B of the stage at `tiles`, for parts pa and pb.
__device__ __forceinline__ void multiply(float (&sums)[BN / 2], unsigned tiles, int pa, int pb,
                                         int consumer, bool add) {
    constexpr int STEP = 32 / SIZE;  // k of an instruction
    const unsigned a = tiles + pa * A_BYTES + consumer * 64 * SPAN;
    const unsigned b = tiles + PARTS * A_BYTES + pb * B_BYTES;
#pragma unroll
    for (int k = 0; k < BK; k += STEP)
        wgmma(sums, descriptor<ACROSS_A ? 128 : SPAN>(a + (ACROSS_A ? k * 128 : k * SIZE), 64 * SPAN),
              descriptor<ACROSS_B ? 128 : SPAN>(b + (ACROSS_B ? k * 128 : k * SIZE), 64 * SPAN),
              add || k > 0);
}

extern "C" __global__ void __launch_bounds__(128 + 2 * BM, 1) __cluster_dims__(CLUSTER, 1, 1)
    gemm_wgmma(const __grid_constant__ TensorMap A, const __grid_constant__ TensorMap B, int m,
               int n, int k, float alpha, const int* exponent_a, const int* exponent_b, float beta,
               Out* C, long long ldc, const int* verdict, int wanted) {
    if (verdict && *verdict != wanted) return;
    extern __shared__ char memory[];
    const unsigned stages = (shared_address(memory) + 1023) / 1024 * 1024;
    const unsigned full = stages + STAGES * STAGE_BYTES, empty = full + 8 * STAGES;
    const unsigned issued = empty + 8 * STAGES;
    const unsigned rank = CLUSTER > 1 ? block_of_cluster() : 0;
    if (threadIdx.x == 0) {
        if (k > 0) {
            prefetch_map(A);
            prefetch_map(B);
        }
        for (int s = 0; s < STAGES; ++s) {
            barrier_init(full + 8 * s, 1);
            barrier_init(empty + 8 * s, 4 * CONSUMERS * CLUSTER);  // a warp's arrival each
            barrier_init(issued + 8 * s, 1);
        }
        barriers_ready();
    }
    __syncthreads();
    if (CLUSTER > 1) cluster_barrier();

    const Tiles tiles(m, n);
    const int steps = (k + BK * CHUNK - 1) / (BK * CHUNK) * CHUNK;
    const int consumer = static_cast<int>(threadIdx.x / 128) - 1;
    Ring ring;
    if (consumer < 0) {
        if constexpr (CONSUMERS > 1) registers_fewer<CONSUMERS == 2 ? 40 : 32>();
        if (threadIdx.x == 0) {
            for (int t = blockIdx.x / CLUSTER; t < tiles.count(); t += gridDim.x / CLUSTER) {
                int row, col;
                tiles.at(t, row, col);
                for (int step = 0; step < steps; ++step, ring.advance()) {
                    constexpr int SHARE = BN / CLUSTER;
                    const unsigned to = stages + ring.stage * STAGE_BYTES;
                    const unsigned whole = full + 8 * ring.stage;
                    barrier_wait(empty + 8 * ring.stage, ring.phase ^ 1);
                    barrier_expect(whole, STAGE_BYTES);
                    load<BM, A_BYTES, ACROSS_A, 1>(to, A, row + rank * BM, step * BK, whole);
                    load<SHARE, B_BYTES, ACROSS_B, CLUSTER>(
                        to + PARTS * A_BYTES + rank * SHARE * SPAN, B, col + rank * SHARE,
                        step * BK, whole);
                }
            }
        }
    } else {
        if constexpr (CONSUMERS == 2) registers_more<232>();
        if constexpr (CONSUMERS == 3) registers_more<160>();
        const Result result = {m, n, alpha, beta, exponent_a, exponent_b, C, ldc};
        const auto release = [&](int stage) {  // this warp has read it
            const unsigned lane = threadIdx.x % 32;
            if (lane < CLUSTER) barrier_arrive(empty + 8 * stage, lane);
        };
        // Consumers take turns at the tensor cores, so that one adds while the next multiplies.
        constexpr bool TURNS = CHUNKED && CONSUMERS > 1;
        if (TURNS && consumer == CONSUMERS - 1) pass(1, 256);
        // The second of two runs LEAD steps behind the first, so that one stores its tile while
        // the other multiplies.
        Ring leader;
        int left = 0;
        if (LEADS) {
            const int first = blockIdx.x / CLUSTER, stride = gridDim.x / CLUSTER;
            left = (tiles.count() - first + stride - 1) / stride * steps - LEAD;
            for (int i = 0; i < LEAD; ++i) leader.advance();
        }
        for (int t = blockIdx.x / CLUSTER; t < tiles.count(); t += gridDim.x / CLUSTER) {
            float sums[BN / 2];
#pragma unroll
            for (int i = 0; i < BN / 2; ++i) sums[i] = 0;
            if constexpr (CHUNKED) {
                for (int step = 0; step < steps; step += CHUNK) {
                    float part[BN / 2];
                    int used[CHUNK];
#pragma unroll
                    for (int s = 0; s < CHUNK; ++s, ring.advance()) {
                        barrier_wait(full + 8 * ring.stage, ring.phase);
                        used[s] = ring.stage;
                    }
                    if (TURNS) meet(1 + consumer, 256);
                    wgmma_begin();
#pragma unroll
                    for (int term = 0; term < 3; ++term)  // small ones first: lo hi, hi lo, hi hi
#pragma unroll
                        for (int s = 0; s < CHUNK; ++s)
                            multiply(part, stages + used[s] * STAGE_BYTES, term == 0, term == 1,
                                     consumer, term > 0 || s > 0);
                    wgmma_commit();
                    if (TURNS) pass(1 + (consumer + 1) % CONSUMERS, 256);
                    wgmma_wait<0>();
#pragma unroll
                    for (int s = 0; s < CHUNK; ++s) release(used[s]);
#pragma unroll
                    for (int i = 0; i < BN / 2; ++i) sums[i] += part[i];
                }
            } else {
                int last = 0;
                for (int step = 0; step < steps; ++step, ring.advance()) {
                    if (LEADS && consumer == 1 && left-- > 0) {
                        barrier_wait(issued + 8 * leader.stage, leader.phase);
                        leader.advance();
                    }
                    barrier_wait(full + 8 * ring.stage, ring.phase);
                    wgmma_begin();
                    multiply(sums, stages + ring.stage * STAGE_BYTES, 0, 0, consumer, true);
                    wgmma_commit();
                    if (LEADS && threadIdx.x == 128) barrier_arrive(issued + 8 * ring.stage, rank);
                    wgmma_wait<1>();
                    if (step) release(last);
                    last = ring.stage;
                }
                wgmma_wait<0>();
                if (steps) release(last);
            }
            int row, col;
            tiles.at(t, row, col);
            result.store(sums, row + rank * BM + consumer * 64, col);
        }
    }
    // A block stays while others may still reach for its shared memory.
    __syncwarp();
    if (CLUSTER > 1) cluster_barrier();
}
