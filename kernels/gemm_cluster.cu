/*---
summary   = "small tiles of C; the blocks of a cluster share a tile's k and each other's memory"
entry     = "gemm_cluster"
rung      = 95
params    = [
    {BM = 16, BN = 32, BK = 32, TM = 4, TN = 4, LM = 4, KG = 4, KV = 4, STAGES = 4, CLUSTER = 1, BLOCKS = 132, RESIDENT = 2},
    {BM = 16, BN = 32, BK = 32, TM = 4, TN = 4, LM = 4, KG = 4, KV = 4, STAGES = 4, CLUSTER = 2, BLOCKS = 132, RESIDENT = 2},
    {BM = 32, BN = 32, BK = 32, TM = 8, TN = 4, LM = 4, KG = 8, KV = 2, STAGES = 4, CLUSTER = 1, BLOCKS = 132, RESIDENT = 2},
    {BM = 32, BN = 32, BK = 64, TM = 8, TN = 4, LM = 4, KG = 8, KV = 2, STAGES = 3, CLUSTER = 2, BLOCKS = 132, RESIDENT = 2},
    {BM = 32, BN = 32, BK = 32, TM = 8, TN = 4, LM = 4, KG = 8, KV = 2, STAGES = 4, CLUSTER = 3, BLOCKS = 132, RESIDENT = 2},
    {BM = 32, BN = 64, BK = 32, TM = 8, TN = 4, LM = 4, KG = 4, KV = 2, STAGES = 4, CLUSTER = 1, BLOCKS = 132, RESIDENT = 2},
    {BM = 32, BN = 64, BK = 32, TM = 8, TN = 4, LM = 4, KG = 4, KV = 2, STAGES = 4, CLUSTER = 2, BLOCKS = 264, RESIDENT = 2},
    {BM = 32, BN = 64, BK = 32, TM = 8, TN = 4, LM = 4, KG = 4, KV = 2, STAGES = 4, CLUSTER = 3, BLOCKS = 132, RESIDENT = 2},
    {BM = 64, BN = 64, BK = 32, TM = 8, TN = 8, LM = 4, KG = 4, KV = 2, STAGES = 3, CLUSTER = 2, BLOCKS = 132, RESIDENT = 1},
    {BM = 64, BN = 128, BK = 16, TM = 8, TN = 8, LM = 4, KG = 2, KV = 2, STAGES = 5, CLUSTER = 2, BLOCKS = 132, RESIDENT = 1},
]
block     = ["KG * BM * BN / (TM * TN)", "1", "1"]
grid      = ["CLUSTER * ceil(m / BM) * ceil(n / BN) * max(1, min(ceil((BLOCKS + 1) / max(1, CLUSTER * ceil(m / BM) * ceil(n / BN))) - 1, ceil(k / (2 * CLUSTER * BK))))", "1", "1"]
shared    = "max(STAGES * (BK * (BM + BN) + 16 / SIZE * (BM + BN)) * SIZE, KG * BM * BN * SIZE)"
workspace = "BLOCKS * BM * BN * SIZE"
flags     = "4 * BLOCKS"
require   = [
    "BM % (TM * LM) == 0", "32 % LM == 0", "BN % (TN * 32 / LM) == 0", "TM % 4 == 0", "TN % 4 == 0",
    "BK % (2 * KV * KG) == 0", "KV * SIZE <= 16", "STAGES >= 2", "CLUSTER <= 8",
    "(KG * BM * BN / (TM * TN)) % BK == 0", "(KG * BM * BN / (TM * TN)) % BM == 0",
    "(KG * BM * BN / (TM * TN)) % BN == 0",
]
dtypes    = ["float32", "int32"]
arch      = ">=90"
runs_on   = ["cuda", "emulator"]
source    = "this project: docs/performance.md"
---*/

// A cluster of blocks makes a tile of C, BM x BN, each from its share of k; or several clusters
// do, whose sums go through the workspace. In a block, KG groups of threads share the k of a
// step. All sums are added in a fixed order, so the same input gives the same bits.
#include "tuned.cuh"

constexpr int LN = 32 / LM;
constexpr int WARPS_N = BN / (TN * LN);
constexpr int GROUP = BM * BN / (TM * TN);
constexpr int THREADS = KG * GROUP;
constexpr int KP = BK / KG;
constexpr bool A_ALONG_K = !TRANS_A, B_ALONG_K = TRANS_B;
// Neighbours in a vector of sums change places, so that column j's sum lands in the other
// register bank than element j of B (see docs/performance.md).
constexpr int SWAP = B_ALONG_K ? 0 : 1;
constexpr int VECTORS_OF_TILE = BM * BN / VEC;

#if defined(HYBRID_GEMM_EMULATOR) || CLUSTER == 1
// No block can wait for another there: the first of a cluster does all of its work.
constexpr int SHARES = 1;
#define CLUSTER_DIMS
__device__ __forceinline__ void cluster_arrive() { __syncthreads(); }
__device__ __forceinline__ void cluster_wait() {}
__device__ __forceinline__ const Vec* shared_of(const Vec* mine, int) { return mine; }
#else
constexpr int SHARES = CLUSTER;
#define CLUSTER_DIMS __cluster_dims__(CLUSTER, 1, 1)
__device__ __forceinline__ void cluster_arrive() {
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() {
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// The same place in the shared memory of another block of the cluster.
__device__ __forceinline__ const Vec* shared_of(const Vec* mine, int rank) {
    const Vec* theirs;
    asm("mapa.u64 %0, %1, %2;" : "=l"(theirs) : "l"(mine), "r"(rank));
    return theirs;
}
#endif

// Brings BK x BX of an operand into shared memory as it lies: [BX][LD] along k, else [BK][LD].
template <int BX, bool ALONG_K, bool VECTORS>
struct Bringer {
    static constexpr int V = VECTORS ? VEC : 1;
    static constexpr int LD = ALONG_K ? BK + VEC : BX;
    static constexpr int LENGTH = ALONG_K ? BK : BX, LINES = ALONG_K ? BX : BK;
    static constexpr int ALONG = LENGTH / V;            // threads along a line
    static constexpr int ACROSS = THREADS / ALONG;      // lines at once
    static constexpr int N = (LINES + ACROSS - 1) / ACROSS;

    const T* from[N];
    long long step;

    __device__ __forceinline__ static int along() { return threadIdx.x % ALONG * V; }
    __device__ __forceinline__ static int across() { return threadIdx.x / ALONG; }
    __device__ __forceinline__ static int to() { return (across() * LD + along()) * SIZE; }

    __device__ __forceinline__ Bringer(const T* p, long long ld, int x0, int x_end, long long k0) {
        step = ALONG_K ? BK : BK * ld;
        UNROLL for (int i = 0; i < N; ++i) {
            const int a = across() + i * ACROSS;
            // beyond the edge the last again: what it gives is never stored
            from[i] = ALONG_K ? p + LEAST(x0 + a, x_end - 1) * ld + (k0 + along())
                              : p + (k0 + a) * ld + LEAST(x0 + along(), x_end - V);
        }
    }
    // The next step's tile. `skip`: k at its front that do not exist, in a ragged k's first step.
    template <bool SHORT>
    __device__ __forceinline__ void fetch(Shared tile, int skip) {
        UNROLL for (int i = 0; i < N; ++i) {
            if (LINES % ACROSS && across() + i * ACROSS >= LINES) continue;
            const Shared to = tile + i * ACROSS * LD * SIZE;
            const int p = ALONG_K ? along() : across() + i * ACROSS;
            if (SHORT)
                copy_async<SIZE * V>(to, from[i], p >= skip);
            else
                copy_async<SIZE * V>(to, from[i]);
            from[i] += step;
        }
    }
};

// Where a thread's element i lies in its warp's part of a tile: every LANES-th along k, where
// neighbours are read together; by vectors otherwise.
template <bool ALONG_K, int LANES>
__device__ __forceinline__ int place(int lane, int i) {
    return ALONG_K ? i * LANES + lane : i / VEC * (LANES * VEC) + lane * VEC + i % VEC;
}

struct alignas(KV * SIZE) Few {
    T x[KV];
};

// A thread's COUNT elements at k = p .. p + KV - 1, as out[q][i].
template <int COUNT, bool ALONG_K, int LANES, int LD>
__device__ __forceinline__ void fragment(T (&out)[KV][COUNT], const unsigned char* at, int p) {
    if constexpr (ALONG_K) {
        UNROLL for (int i = 0; i < COUNT; ++i) {
            const Few v = *reinterpret_cast<const Few*>(at + (i * LANES * LD + p) * SIZE);
            UNROLL for (int q = 0; q < KV; ++q) out[q][i] = v.x[q];
        }
    } else {
        UNROLL for (int q = 0; q < KV; ++q) {
            UNROLL for (int i = 0; i < COUNT; i += VEC) {
                const int from = ((p + q) * LD + i * LANES) * SIZE;
                const Vec v = *reinterpret_cast<const Vec*>(at + from);
                UNROLL for (int r = 0; r < VEC; ++r) out[q][i + r] = v.x[r];
            }
        }
    }
}

// sum = the product of `count` steps from step `first` on, of this group's k, for the tile of C
// at (row, col); row_in and col_in: this thread's place in the tile.
template <bool VECTORS>
__device__ __forceinline__ void multiply(T (&sum)[TM][TN], int m, int n, const T* A, long long lda,
                                         const T* B, long long ldb, int row, int col, int first,
                                         int count, int skip, int group, int row_in, int col_in) {
    extern __shared__ __align__(16) unsigned char raw[];
    const long long k0 = (long long)first * BK - skip;
    Bringer<BM, A_ALONG_K, VECTORS> a(A, lda, row, m, k0);
    Bringer<BN, B_ALONG_K, VECTORS> b(B, ldb, col, n, k0);
    constexpr int LD_A = decltype(a)::LD, LD_B = decltype(b)::LD;
    constexpr int SIZE_A = (A_ALONG_K ? BM : BK) * LD_A * SIZE;
    constexpr int STAGE = SIZE_A + (B_ALONG_K ? BN : BK) * LD_B * SIZE;
    const Shared base = shared_address(raw);
    const Shared to_a = opaque(base + a.to()), to_b = opaque(base + (SIZE_A + b.to()));
    unsigned write = 0;
    int fetch = count;
    UNROLL for (int s = 0; s < STAGES - 1; ++s) {
        if (fetch > 0) {
            if (s == 0 && first == 0) {
                a.template fetch<true>(to_a, skip);
                b.template fetch<true>(to_b, skip);
            } else {
                a.template fetch<false>(to_a + write, 0);
                b.template fetch<false>(to_b + write, 0);
            }
        }
        --fetch;
        write += STAGE;
        copies_commit();
    }
    UNROLL for (int i = 0; i < TM; ++i) {
        UNROLL for (int j = 0; j < TN; ++j) sum[i][j] = T(0);
    }
    T fa[2][KV][TM], fb[2][KV][TN];
    const int in_a = A_ALONG_K ? row_in * LD_A + group * KP : row_in + group * KP * LD_A;
    const int in_b = B_ALONG_K ? col_in * LD_B + group * KP : col_in + group * KP * LD_B;
    int read_a = opaque(in_a * SIZE), read_b = opaque(SIZE_A + in_b * SIZE);
    copies_wait<STAGES - 2>();
    __syncthreads();
    unsigned read = 0;
    fragment<TM, A_ALONG_K, LM, LD_A>(fa[0], raw + read_a, 0);
    fragment<TN, B_ALONG_K, LN, LD_B>(fb[0], raw + read_b, 0);
#pragma unroll 1
    for (; count > 0; --count) {
        UNROLL for (int p = 0; p < KP; p += KV) {
            if (p == KP - KV) {  // the next step's tile must be there, and all done with this one
                copies_wait<STAGES - 2>();
                __syncthreads();
                const int go = read == (STAGES - 1) * STAGE ? -(STAGES - 1) * STAGE : STAGE;
                read += go;
                read_a += go;
                read_b += go;
            }
            fragment<TM, A_ALONG_K, LM, LD_A>(fa[(p / KV + 1) % 2], raw + read_a, (p + KV) % KP);
            fragment<TN, B_ALONG_K, LN, LD_B>(fb[(p / KV + 1) % 2], raw + read_b, (p + KV) % KP);
            if (p == 0) {
                if (fetch > 0) {
                    a.template fetch<false>(to_a + write, 0);
                    b.template fetch<false>(to_b + write, 0);
                }
                copies_commit();
                --fetch;
                write = write == (STAGES - 1) * STAGE ? 0 : write + STAGE;
            }
            UNROLL for (int q = 0; q < KV; ++q) {
                // there and back along n: one operand of each multiply-add is the one before's
                UNROLL for (int i = 0; i < TM; ++i) {
                    UNROLL for (int j = 0; j < TN; ++j) {
                        const int jj = i % 2 ? TN - 1 - j : j;
                        sum[i][jj] += fa[p / KV % 2][q][i] * fb[p / KV % 2][q][jj];
                    }
                }
            }
        }
    }
    copies_wait<0>();
    __syncthreads();
}

__device__ __forceinline__ void add(Vec& sum, const Vec& v) {
    UNROLL for (int q = 0; q < VEC; ++q) sum.x[q] += v.x[q];
}

// Neighbours in a row of C.
__device__ __forceinline__ void store_vector(const Vec& sum, int m, int n, T alpha, T beta, T* C,
                                             long long ldc, int r, int c, bool vectors) {
    if (r >= m || c >= n) return;
    T* const to = C + r * ldc + c;
    if (vectors && c + VEC <= n) {
        Vec v = {};
        if (beta != T(0)) v = *reinterpret_cast<Vec*>(to);
        UNROLL for (int q = 0; q < VEC; ++q) {
            const T product = alpha * sum.x[q ^ SWAP];
            v.x[q] = beta == T(0) ? product : product + beta * v.x[q];
        }
        *reinterpret_cast<Vec*>(to) = v;
    } else {
        UNROLL for (int q = 0; q < VEC; ++q) {
            const T product = alpha * sum.x[q ^ SWAP];
            if (c + q < n) to[q] = beta == T(0) ? product : product + beta * to[q];
        }
    }
}

extern "C" __global__ void CLUSTER_DIMS __launch_bounds__(THREADS, RESIDENT)
gemm_cluster(int m, int n, int k, T alpha, const T* A, long long lda, const T* B, long long ldb,
             T beta, T* C, long long ldc, T* workspace, unsigned* flags) {
    extern __shared__ __align__(16) unsigned char raw[];
    const int rank = blockIdx.x % CLUSTER;
    if (rank >= SHARES) return;
    const int tiles_m = (m + BM - 1) / BM, tiles_n = (n + BN - 1) / BN;
    const int clusters = gridDim.x / CLUSTER / (tiles_m * tiles_n);  // of a tile
    const int cluster = blockIdx.x / CLUSTER, tile = cluster / clusters;
    const int row = tile % tiles_m * BM, col = tile / tiles_m * BN;

    const int thread = threadIdx.x % GROUP, group = threadIdx.x / GROUP;
    const int warp = thread / 32, lane_m = thread % 32 / LN, lane_n = thread % LN;
    const int row_w = warp / WARPS_N * (TM * LM), col_w = warp % WARPS_N * (TN * LN);

    const int steps = (k + BK - 1) / BK, shares = clusters * SHARES;
    const int share = (cluster - tile * clusters) * SHARES + rank;
    const int least = steps / shares, more = steps - least * shares;
    const int skip = steps * BK - k;
    const int first = share * least + LEAST(share, more), count = least + (share < more);
    const bool vectors = on_16_bytes(A, lda) && on_16_bytes(B, ldb) &&
                         (TRANS_A ? m : k) % VEC == 0 && (TRANS_B ? k : n) % VEC == 0;
    T sum[TM][TN];
    const int row_in = row_w + place<A_ALONG_K, LM>(lane_m, 0);
    const int col_in = col_w + place<B_ALONG_K, LN>(lane_n, 0);
    if (vectors)
        multiply<true>(sum, m, n, A, lda, B, ldb, row, col, first, count, skip, group, row_in,
                       col_in);
    else
        multiply<false>(sum, m, n, A, lda, B, ldb, row, col, first, count, skip, group, row_in,
                        col_in);

    // The groups' sums as tiles in shared memory.
    T* const mine = reinterpret_cast<T*>(raw) + group * (BM * BN);
    UNROLL for (int i = 0; i < TM; ++i) {
        T* const line = mine + (row_w + place<A_ALONG_K, LM>(lane_m, i)) * BN + col_w;
        UNROLL for (int j = 0; j < TN; j += VEC) {
            if (B_ALONG_K) {
                UNROLL for (int q = 0; q < VEC; ++q)
                    line[place<true, LN>(lane_n, j + q)] = sum[i][j + q];
            } else {
                Vec v;
                UNROLL for (int q = 0; q < VEC; ++q) v.x[q] = sum[i][j + (q ^ SWAP)];
                *reinterpret_cast<Vec*>(line + place<false, LN>(lane_n, j)) = v;
            }
        }
    }
    Vec* const parts = reinterpret_cast<Vec*>(raw);
    if (KG > 1) {
        __syncthreads();
        UNROLL for (int v = threadIdx.x; v < VECTORS_OF_TILE; v += THREADS) {
            Vec total = parts[v];
            UNROLL for (int g = 1; g < KG; ++g) add(total, parts[g * VECTORS_OF_TILE + v]);
            parts[v] = total;
        }
    }
    cluster_arrive();
    cluster_wait();

    // A block finishes its slice of the tile.
    constexpr int SLICE = (VECTORS_OF_TILE + SHARES - 1) / SHARES;
    constexpr int EACH = (SLICE + THREADS - 1) / THREADS;
    Vec total[EACH];
    UNROLL for (int i = 0; i < EACH; ++i) {
        const int v = threadIdx.x + i * THREADS;
        if (v >= SLICE || rank * SLICE + v >= VECTORS_OF_TILE) continue;
        const Vec* const part = parts + rank * SLICE + v;
        total[i] = *shared_of(part, 0);
        UNROLL for (int s = 1; s < SHARES; ++s) add(total[i], *shared_of(part, s));
    }
    cluster_arrive();  // they are read: the other blocks may end
    bool last = true;
    if (clusters > 1) {
        Vec* const slices = reinterpret_cast<Vec*>(workspace) +
                            (long long)(tile * SHARES + rank) * clusters * SLICE;
        UNROLL for (int i = 0; i < EACH; ++i) {
            const int v = threadIdx.x + i * THREADS;
            if (v < SLICE) slices[(cluster - tile * clusters) * SLICE + v] = total[i];
        }
        last = last_of(flags + tile * SHARES + rank, clusters);
        if (last) {
            UNROLL for (int i = 0; i < EACH; ++i) {
                const int v = threadIdx.x + i * THREADS;
                if (v >= SLICE) continue;
                total[i] = slices[v];
#pragma unroll 8
                for (int s = 1; s < clusters; ++s) add(total[i], slices[s * SLICE + v]);
            }
        }
    }
    if (last) {
        const bool whole = on_16_bytes(C, ldc);
        UNROLL for (int i = 0; i < EACH; ++i) {
            const int v = threadIdx.x + i * THREADS;
            const int at = (rank * SLICE + v) * VEC, r = row + at / BN, c = col + at % BN;
            if (v < SLICE && at < BM * BN)
                store_vector(total[i], m, n, alpha, beta, C, ldc, r, c, whole);
        }
    }
    cluster_wait();
}
