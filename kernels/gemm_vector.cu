/*---
summary   = "C a few rows high or columns wide: the large operand streams by once"
entry     = "gemm_vector"
rung      = 96
# BM      rows of C that a block computes
# BN      columns of C that a block computes; the wider side is the one of the large operand
# BK      k of a step: blocks share k in whole steps
# BLOCKS  blocks of the grid to aim at, by sharing k where C has fewer tiles
params    = [
    {BM = 1, BN = 64, BK = 256, BLOCKS = 264},
    {BM = 64, BN = 1, BK = 256, BLOCKS = 264},
    {BM = 4, BN = 64, BK = 256, BLOCKS = 264},
    {BM = 64, BN = 4, BK = 256, BLOCKS = 264},
    {BM = 8, BN = 64, BK = 256, BLOCKS = 264},
    {BM = 64, BN = 8, BK = 256, BLOCKS = 264},
]
block     = ["256", "1", "1"]
grid      = ["ceil(m / BM) * ceil(n / BN) * max(1, min(ceil(BLOCKS / max(1, ceil(m / BM) * ceil(n / BN))), ceil(k / BK)))", "1", "1"]
tile      = ["BM", "BN"]
scales    = ["BLOCKS"]
# the thin operand for a step of k; then a tile of sums for each of 8 warps
shared    = "max(BK * min(BM, BN), 8 * BM * BN) * SIZE"
# partial sums and a counter for each block; there are fewer than 2 * BLOCKS that share k
workspace = "2 * BLOCKS * BM * BN * SIZE"
flags     = "4 * BLOCKS"
# one side is wide, a multiple of 64, the other thin, 16 at most; lanes and warps share them evenly
require   = [
    "BM % 64 * (BN % 64) == 0", "BM % 64 + BN % 64 <= 16",
    "512 % ((BM - BM % 64 + BN - BN % 64) * SIZE) == 0",
    "16 * (BM - BM % 64 + BN - BN % 64) % (BM * BN) == 0", "BK % 128 == 0",
]
runs_on   = ["cuda", "emulator"]
source    = "this project: docs/performance.md"
---*/

// One side of a tile is WIDE, the other THIN. The operand of the wide side is large, is read once
// from memory, and decides the time. Blocks share k (split-K, see shares.cuh): each leaves the sums
// of its share of k, and the last block to come adds the shares in a fixed order, so the same input
// gives the same bits.
//
//   load, multiply   sum_along where the wide operand lies along k, sum_across where it lies across
//   collect          adds the shares up
//   store            writes C
#include "lines.cuh"
#include "shares.cuh"

constexpr int THREADS = 256, WARPS = 8;
constexpr bool COLUMN = BM > BN;  // C is high and narrow: its columns are the thin side
constexpr int WIDE = COLUMN ? BM : BN, THIN = COLUMN ? BN : BM;
constexpr bool ALONG_K = COLUMN ? !TRANS_A : TRANS_B;  // how the wide operand lies
constexpr int TILE = WIDE * THIN;
// Sums of a thread along k: as many as were fastest on an H200. With more of 4 bytes, only one
// block fits a multiprocessor.
constexpr int SUMS = SIZE == 8 ? 64 : 32;
constexpr int FLY = THIN >= 4 ? 4 : 8;  // vectors of the wide operand a thread has on their way

// --- load and multiply --------------------------------------------------------------------------

// A vector that is read once only, and so need not stay in the first cache.
__device__ __forceinline__ Vec stream(const T* at) {
#ifdef HYBRID_GEMM_EMULATOR
    return *reinterpret_cast<const Vec*>(at);
#else
    union {
        unsigned u[4];
        Vec v;
    } x;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.u[0]), "=r"(x.u[1]), "=r"(x.u[2]), "=r"(x.u[3])
                 : "l"(at));
    return x.v;
#endif
}

// The sum over the lanes of a warp whose numbers agree modulo `from`, in each of them.
__device__ __forceinline__ T over_lanes(T sum, int from) {
    for (int bit = from; bit < 32; bit *= 2) sum += __shfl_xor_sync(~0u, sum, bit);
    return sum;
}

// Adds up each of COUNT values over the lanes of a warp; with each exchange a lane is left with
// half of the values. Value i is then in sum[i % EACH] of the SPREAD lanes from i / EACH * SPREAD
// on.
template <int COUNT, int BIT = 16>
__device__ __forceinline__ void share_out(T* sum, int lane) {
    if constexpr (BIT > 0) {
        constexpr int HALF = COUNT / 2;
        if constexpr (HALF == 0) {
            sum[0] += __shfl_xor_sync(~0u, sum[0], BIT);
        } else {
            const bool upper = lane & BIT;
            UNROLL for (int i = 0; i < HALF; ++i) {
                const T kept = upper ? sum[i + HALF] : sum[i],
                        sent = upper ? sum[i] : sum[i + HALF];
                sum[i] = kept + __shfl_xor_sync(~0u, sent, BIT);
            }
        }
        share_out<MOST(1, HALF), BIT / 2>(sum, lane);
    }
}

// The wide operand lies along k: a warp multiplies WIDE / WARPS of its lines, LINES at once, with
// its lanes along k. Leaves the sums for k from k0 to k1 in parts[TILE].
template <bool VECTORS>
__device__ __forceinline__ void sum_along(const Operand& wide, const Operand& thin, int w0, int t0,
                                          int k0, int k1, T* parts) {
    constexpr int LINES = LEAST(WIDE / WARPS, MOST(1, SUMS / THIN));
    constexpr int EACH = MOST(1, LINES * THIN / 32);      // totals that a lane has
    constexpr int SPREAD = MOST(1, 32 / (LINES * THIN));  // lanes that have the same ones
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll 1
    for (int l0 = warp * (WIDE / WARPS); l0 < (warp + 1) * (WIDE / WARPS); l0 += LINES) {
        T sum[LINES][THIN] = {};
        const T* from[LINES];
        UNROLL for (int l = 0; l < LINES; ++l) {
            from[l] = wide.line(w0 + l0 + l) + lane * (VECTORS ? VEC : 1);
        }
        auto step = [&](int k, bool whole) {
            Vec y[LINES];
            UNROLL for (int l = 0; l < LINES; ++l) {
                if (VECTORS) {
                    y[l] = Vec{};
                    if (whole || k + lane * VEC < k1) y[l] = stream(from[l] + k);
                } else {
                    UNROLL for (int q = 0; q < VEC; ++q) {
                        y[l].x[q] = whole || k + lane + 32 * q < k1 ? from[l][k + 32 * q] : T(0);
                    }
                }
            }
            UNROLL for (int t = 0; t < THIN; ++t) {
                const T* const x_at = thin.line(t0 + t);
                Vec x = {};
                if (VECTORS) {
                    if (whole || k + lane * VEC < k1)
                        x = *reinterpret_cast<const Vec*>(x_at + k + lane * VEC);
                } else {
                    UNROLL for (int q = 0; q < VEC; ++q) {
                        const int p = k + lane + 32 * q;
                        x.x[q] = whole || p < k1 ? x_at[p * thin.p] : T(0);
                    }
                }
                UNROLL for (int l = 0; l < LINES; ++l) {
                    UNROLL for (int q = 0; q < VEC; ++q) sum[l][t] += y[l].x[q] * x.x[q];
                }
            }
        };
        int k = k0;
#pragma unroll 1
        for (; k + 32 * VEC <= k1; k += 32 * VEC) step(k, true);
        if (k < k1) step(k, false);
        share_out<LINES * THIN>(&sum[0][0], lane);
        if (lane % SPREAD == 0) {
            UNROLL for (int i = 0; i < EACH; ++i) {
                const int at = lane / SPREAD * EACH + i;
                parts[at % THIN * WIDE + l0 + at / THIN] = (&sum[0][0])[i];
            }
        }
    }
}

// The wide operand lies across k: LANES threads along its lines, ROWS lines of k at once. The thin
// operand comes through shared memory. Leaves a tile of sums for each warp in parts[WARPS][TILE].
template <bool VECTORS>
__device__ __forceinline__ void sum_across(const Operand& wide, const Operand& thin, int w0, int t0,
                                           int k0, int k1, T* parts) {
    constexpr int LANES = WIDE / VEC, ROWS = THREADS / LANES;
    const int lane = threadIdx.x % LANES, row = threadIdx.x / LANES;
    T sum[THIN][VEC] = {};
    int place[VEC];  // in the tile
    UNROLL for (int q = 0; q < VEC; ++q) place[q] = VECTORS ? lane * VEC + q : lane + q * LANES;
    int offset[VEC];
    UNROLL for (int q = 0; q < VEC; ++q) {
        offset[q] = LEAST(w0 + place[q], wide.end - (VECTORS ? VEC - q : 1));
    }
    T* const xs = parts;  // [BK][THIN], until the sums are done
#pragma unroll 1
    for (; k0 < k1; k0 += BK) {
        __syncthreads();
        const int count = LEAST(BK, k1 - k0);
        for (int e = threadIdx.x; e < BK * THIN; e += THREADS) {
            const int t = e / BK, p = e % BK;
            xs[p * THIN + t] = p < count ? thin.line(t0 + t)[(k0 + p) * thin.p] : T(0);
        }
        __syncthreads();
        const T* const from = wide.at + k0 * wide.p;
        auto step = [&](int p0, bool whole) {
            Vec y[FLY];
            UNROLL for (int i = 0; i < FLY; ++i) {
                const int p = p0 + i * ROWS;
                y[i] = Vec{};
                if (whole || p < count) {
                    const T* const line = from + p * wide.p;
                    if (VECTORS)
                        y[i] = stream(line + offset[0]);
                    else
                        UNROLL for (int q = 0; q < VEC; ++q) y[i].x[q] = line[offset[q]];
                }
            }
            UNROLL for (int i = 0; i < FLY; ++i) {
                UNROLL for (int t = 0; t < THIN; ++t) {
                    const T x = xs[(p0 + i * ROWS) * THIN + t];
                    UNROLL for (int q = 0; q < VEC; ++q) sum[t][q] += x * y[i].x[q];
                }
            }
        };
#pragma unroll 1
        for (int p = row; p < BK; p += FLY * ROWS) step(p, count == BK);
    }
    __syncthreads();
    UNROLL for (int t = 0; t < THIN; ++t) {
        UNROLL for (int q = 0; q < VEC; ++q) {
            if (LANES < 32) sum[t][q] = over_lanes(sum[t][q], LANES);
            if (threadIdx.x % 32 < LANES)
                parts[threadIdx.x / 32 * TILE + t * WIDE + place[q]] = sum[t][q];
        }
    }
}

// --- the shares of k, and C ---------------------------------------------------------------------

// Element e of the tile, of the `count` tiles in `parts` together.
__device__ __forceinline__ T total(const T* parts, int count, int e) {
    T sum = parts[e];
    for (int i = 1; i < count; ++i) sum += parts[i * TILE + e];
    return sum;
}

// Hands in a block's share of a tile, the sum of the `count` tiles in `parts`. Returns true in the
// last block to come, which then has tiles in `parts`, `count` of them, that add up to all shares.
__device__ __forceinline__ bool collect(T* parts, int& count, int tile, int share, int shares,
                                        T* workspace, unsigned* flags) {
    T* const all = workspace + (long long)tile * shares * TILE;
    for (int e = threadIdx.x; e < TILE; e += THREADS)
        all[share * TILE + e] = total(parts, count, e);
    if (!last_of(flags + tile, shares)) return false;
    count = MOST(1, THREADS / TILE);
    add_shares<THREADS, TILE>(all, shares, parts);
    return true;
}

// Stores the tile that begins at w0 of the wide side and t0 of the thin one.
__device__ __forceinline__ void store_tile(const T* parts, int count, int w0, int t0, int w_end,
                                           int t_end, T alpha, T beta, T* C, long long ldc) {
    for (int e = threadIdx.x; e < TILE; e += THREADS) {
        // neighbours of C by neighbouring threads
        const int w = COLUMN ? e / THIN : e % WIDE, t = COLUMN ? e % THIN : e / WIDE;
        if (w0 + w >= w_end || t0 + t >= t_end) continue;
        const T sum = total(parts, count, t * WIDE + w);
        store(COLUMN ? C + (w0 + w) * ldc + (t0 + t) : C + (t0 + t) * ldc + (w0 + w), sum, alpha,
              beta);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    gemm_vector(int m, int n, int k, T alpha, const T* A, long long lda, const T* B, long long ldb,
                T beta, T* C, long long ldc, T* workspace, unsigned* flags) {
    extern __shared__ __align__(16) unsigned char raw[];
    T* const parts = reinterpret_cast<T*>(raw);
    const Operand a = lines_of_a(A, lda, m), b = lines_of_b(B, ldb, n);
    const Operand wide = COLUMN ? a : b, thin = COLUMN ? b : a;

    const int across = (wide.end + WIDE - 1) / WIDE;  // tiles along the wide side
    const int tiles = across * ((thin.end + THIN - 1) / THIN);
    const int shares = gridDim.x / tiles;
    const int tile = blockIdx.x / shares, share = blockIdx.x - tile * shares;
    const int w0 = tile % across * WIDE, t0 = tile / across * THIN;
    const int steps = (k + BK - 1) / BK, least = steps / shares, more = steps - least * shares;
    const int first = run_begin(share, least, more);
    const int k0 = first * BK, k1 = LEAST(k, (first + run_length(share, least, more)) * BK);

    int count = 1;  // tiles in `parts` that are to be added
    const bool vectors =
        (ALONG_K ? k : wide.end) % VEC == 0 && aligned(wide.at, ALONG_K ? wide.x : wide.p);
    if constexpr (ALONG_K) {
        const bool both = vectors && thin.p == 1 && aligned(thin.at, thin.end > 1 ? thin.x : 0);
        if (both)
            sum_along<true>(wide, thin, w0, t0, k0, k1, parts);
        else
            sum_along<false>(wide, thin, w0, t0, k0, k1, parts);
    } else {
        count = WARPS;
        if (vectors)
            sum_across<true>(wide, thin, w0, t0, k0, k1, parts);
        else
            sum_across<false>(wide, thin, w0, t0, k0, k1, parts);
    }
    __syncthreads();
    if (shares > 1 && !collect(parts, count, tile, share, shares, workspace, flags)) return;
    store_tile(parts, count, w0, t0, wide.end, thin.end, alpha, beta, C, ldc);
}
