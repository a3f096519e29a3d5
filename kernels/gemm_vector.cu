/*---
summary   = "C a few rows high or columns wide: the large operand streams by once"
entry     = "gemm_vector"
rung      = 96
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
shared    = "max(BK * min(BM, BN), 8 * BM * BN) * SIZE"
workspace = "2 * BLOCKS * BM * BN * SIZE"
flags     = "4 * BLOCKS"
require   = ["BM % 64 * (BN % 64) == 0", "BM % 64 + BN % 64 <= 16", "BK % 128 == 0"]
runs_on   = ["cuda", "emulator"]
source    = "this project: docs/performance.md"
---*/

// One side of a tile is WIDE, the other THIN. The operand of the wide side is read once from
// memory; a block sums its share of k, and the last block to come adds the shares in a fixed
// order, so the same input gives the same bits.
#include "tuned.cuh"

constexpr int THREADS = 256, WARPS = 8;
constexpr bool COLUMN = BM > BN;
constexpr int WIDE = COLUMN ? BM : BN, THIN = COLUMN ? BN : BM;
constexpr bool ALONG_K = COLUMN ? !TRANS_A : TRANS_B;  // how the wide operand lies
constexpr int TILE = WIDE * THIN;
constexpr int FLY = THIN >= 4 ? 4 : 8;  // vectors of the wide operand in flight, a thread

// An operand by its steps along its side of C and along k.
struct Operand {
    const T* at;
    long long x, p;
    int end;  // of its side of C; what lies beyond is never stored, so the last is read for it

    __device__ __forceinline__ const T* line(int i) const { return at + LEAST(i, end - 1) * x; }
};

// A vector that nobody reads again.
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

__device__ __forceinline__ T over_lanes(T sum, int from) {
    for (int bit = from; bit < 32; bit *= 2) sum += __shfl_xor_sync(~0u, sum, bit);
    return sum;
}

// The wide operand lies along k: a warp sums WIDE / WARPS products of lines, its lanes along k.
// Leaves the tile in parts[TILE].
template <bool VECTORS>
__device__ __forceinline__ void sum_along(const Operand& wide, const Operand& thin, int w0, int t0,
                                          int k0, int k1, T* parts) {
    constexpr int LINES = LEAST(WIDE / WARPS, MOST(1, 64 / THIN));
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll 1
    for (int l0 = warp * (WIDE / WARPS); l0 < (warp + 1) * (WIDE / WARPS); l0 += LINES) {
        T sum[LINES][THIN] = {};
        const T* from[LINES];
        UNROLL for (int l = 0; l < LINES; ++l)
            from[l] = wide.line(w0 + l0 + l) + lane * (VECTORS ? VEC : 1);
        auto step = [&](int k, bool whole) {
            Vec y[LINES];
            UNROLL for (int l = 0; l < LINES; ++l) {
                if (VECTORS) {
                    y[l] = Vec{};
                    if (whole || k + lane * VEC < k1) y[l] = stream(from[l] + k);
                } else {
                    UNROLL for (int q = 0; q < VEC; ++q)
                        y[l].x[q] = whole || k + lane + 32 * q < k1 ? from[l][k + 32 * q] : T(0);
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
        UNROLL for (int l = 0; l < LINES; ++l) {
            UNROLL for (int t = 0; t < THIN; ++t) {
                const T total = over_lanes(sum[l][t], 1);
                if (lane == (l * THIN + t) % 32) parts[t * WIDE + l0 + l] = total;
            }
        }
    }
}

// The wide operand lies across k: threads along its lines, several lines of k at once.
// Leaves parts[WARPS][TILE].
template <bool VECTORS>
__device__ __forceinline__ void sum_across(const Operand& wide, const Operand& thin, int w0, int t0,
                                           int k0, int k1, T* parts) {
    constexpr int LANES = WIDE / VEC, ROWS = THREADS / LANES;
    const int lane = threadIdx.x % LANES, row = threadIdx.x / LANES;
    T sum[THIN][VEC] = {};
    int place[VEC];  // in the tile
    UNROLL for (int q = 0; q < VEC; ++q) place[q] = VECTORS ? lane * VEC + q : lane + q * LANES;
    int offset[VEC];
    UNROLL for (int q = 0; q < VEC; ++q)
        offset[q] = LEAST(w0 + place[q], wide.end - (VECTORS ? VEC - q : 1));
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

extern "C" __global__ void __launch_bounds__(THREADS)
gemm_vector(int m, int n, int k, T alpha, const T* A, long long lda, const T* B, long long ldb,
            T beta, T* C, long long ldc, T* workspace, unsigned* flags) {
    extern __shared__ __align__(16) unsigned char raw[];
    T* const parts = reinterpret_cast<T*>(raw);
    const Operand a = {A, TRANS_A ? 1 : lda, TRANS_A ? lda : 1, m};
    const Operand b = {B, TRANS_B ? ldb : 1, TRANS_B ? 1 : ldb, n};
    const Operand wide = COLUMN ? a : b, thin = COLUMN ? b : a;

    const int across = (wide.end + WIDE - 1) / WIDE;  // tiles along the wide side
    const int tiles = across * ((thin.end + THIN - 1) / THIN);
    const int shares = gridDim.x / tiles;
    const int tile = blockIdx.x / shares, share = blockIdx.x - tile * shares;
    const int w0 = tile % across * WIDE, t0 = tile / across * THIN;
    const int steps = (k + BK - 1) / BK, least = steps / shares, more = steps - least * shares;
    const int first = share * least + LEAST(share, more);
    const int k0 = first * BK, k1 = LEAST(k, (first + least + (share < more)) * BK);

    int count = 1;  // tiles in `parts` to be added up
    const bool aligned = (ALONG_K ? k : wide.end) % VEC == 0 &&
                         on_16_bytes(wide.at, ALONG_K ? wide.x : wide.p);
    if constexpr (ALONG_K) {
        const bool both = aligned && thin.p == 1 && on_16_bytes(thin.at, thin.end > 1 ? thin.x : 0);
        if (both)
            sum_along<true>(wide, thin, w0, t0, k0, k1, parts);
        else
            sum_along<false>(wide, thin, w0, t0, k0, k1, parts);
    } else {
        count = WARPS;
        if (aligned)
            sum_across<true>(wide, thin, w0, t0, k0, k1, parts);
        else
            sum_across<false>(wide, thin, w0, t0, k0, k1, parts);
    }
    __syncthreads();
    if (shares > 1) {
        T* const all = workspace + (long long)tile * shares * TILE;
        for (int e = threadIdx.x; e < TILE; e += THREADS) {
            T sum = parts[e];
            for (int i = 1; i < count; ++i) sum += parts[i * TILE + e];
            all[share * TILE + e] = sum;
        }
        if (!last_of(flags + tile, shares)) return;
        count = MOST(1, THREADS / TILE);
        for (int e = threadIdx.x; e < count * TILE; e += THREADS) {
            T sum = T(0);
#pragma unroll 8
            for (int s = e / TILE; s < shares; s += count) sum += all[s * TILE + e % TILE];
            parts[e] = sum;
        }
        __syncthreads();
    }
    for (int e = threadIdx.x; e < TILE; e += THREADS) {
        // neighbours of C by neighbouring threads
        const int w = COLUMN ? e / THIN : e % WIDE, t = COLUMN ? e % THIN : e / WIDE;
        if (w0 + w >= wide.end || t0 + t >= thin.end) continue;
        const int at = t * WIDE + w;
        T sum = parts[at];
        for (int i = 1; i < count; ++i) sum += parts[i * TILE + at];
        T* const c = COLUMN ? C + (w0 + w) * ldc + (t0 + t) : C + (t0 + t) * ldc + (w0 + w);
        *c = beta == T(0) ? alpha * sum : alpha * sum + beta * *c;
    }
}
