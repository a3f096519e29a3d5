/*---
summary   = "small tiles of C; the blocks of a cluster share a tile's k and each other's memory"
entry     = "gemm_cluster"
rung      = 95
# BM, BN, BK, TM, TN, LM, KG, STAGES: see copy_ring.cuh
# KV        neighbours along k that a thread reads from shared memory at once
# CLUSTER   blocks of a cluster, which share the k of a tile and read each other's memory
# BLOCKS    blocks of the grid, at most; where one cluster a tile leaves some over, a tile gets more
# RESIDENT  blocks that must fit on a multiprocessor: limits the registers of a thread
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
tile      = ["BM", "BN"]
cluster   = "CLUSTER"
scales    = ["BLOCKS"]
# the ring; then a tile of sums for each group
shared    = "max(STAGES * (BK * (BM + BN) + 16 / SIZE * (BM + BN)) * SIZE, KG * BM * BN * SIZE)"
# partial sums and a counter for each block's slice of a tile
workspace = "BLOCKS * BM * BN * SIZE"
flags     = "4 * BLOCKS"
require   = [
    # a group of warps of LM x 32 / LM lanes makes the tile
    "BM % (TM * LM) == 0", "32 % LM == 0", "BN % (TN * 32 / LM) == 0",
    # sums as vectors; each group reads KV of k while it multiplies KV others
    "TM % 4 == 0", "TN % 4 == 0", "BK % (2 * KV * KG) == 0", "16 % (KV * SIZE) == 0", "STAGES >= 2",
    "CLUSTER <= 8",
    # the threads copy whole lines of a stage
    "(KG * BM * BN / (TM * TN)) % BK == 0", "(KG * BM * BN / (TM * TN)) % BM == 0",
    "(KG * BM * BN / (TM * TN)) % BN == 0",
]
dtypes    = ["float32", "int32"]
arch      = ">=90"
runs_on   = ["cuda", "emulator"]
source    = "this project: docs/performance.md"
---*/

// A cluster of blocks makes a tile of C, BM x BN, each block from its share of k; where k is long,
// several clusters make one (split-K, see shares.cuh). In a block, KG groups of threads share the k
// of each step. Partial sums meet on three levels, each time in a fixed order, so the same input
// gives the same bits:
//
//   groups of a block      through the block's shared memory (put_sums, add_groups)
//   blocks of a cluster    each adds its slice of the tile from all blocks' memory (add_blocks)
//   clusters of a tile     through the workspace; the last to come adds them (add_clusters)
//
//   load        TileCopy below
//   multiply    copy_ring.cuh, from Fragments
//   store       store_slice
#include "clusters.cuh"
#include "copy_ring.cuh"
#include "shares.cuh"

constexpr int LN = 32 / LM;              // lanes of a warp along n
constexpr int WARPS_N = BN / (TN * LN);  // warps of a group along n
constexpr int GROUP = BM * BN / (TM * TN);
constexpr int THREADS = KG * GROUP;
constexpr int KP = BK / KG;  // k of a step that one group multiplies
constexpr bool A_ALONG_K = !TRANS_A, B_ALONG_K = TRANS_B;
// Neighbours in a vector of sums change places, so that the sum of column j lies in the other
// register bank than element j of B (docs/performance.md).
constexpr int SWAP = B_ALONG_K ? 0 : 1;
constexpr int VECTORS_OF_TILE = BM * BN / VEC;

// --- load ---------------------------------------------------------------------------------------

// How the block copies BK x BX of an operand into shared memory, as it lies: lines of BK along k
// ([BX][LD]), or lines of BX ([BK][LD]).
template <int BX, bool ALONG_K, bool VECTORS>
struct TileCopy {
    static constexpr int V = VECTORS ? VEC : 1;
    static constexpr int LD = ALONG_K ? BK + VEC : BX;
    static constexpr int LENGTH = ALONG_K ? BK : BX, LINES = ALONG_K ? BX : BK;
    static constexpr int BYTES = LINES * LD * SIZE;  // in a stage
    static constexpr int ALONG = LENGTH / V;         // threads along a line
    static constexpr int ACROSS = THREADS / ALONG;   // lines at once
    static constexpr int N = (LINES + ACROSS - 1) / ACROSS;

    const T* from[N];
    long long step;

    __device__ __forceinline__ static int along() { return threadIdx.x % ALONG * V; }
    __device__ __forceinline__ static int across() { return threadIdx.x / ALONG; }
    __device__ __forceinline__ static int to() { return (across() * LD + along()) * SIZE; }

    // The tile of rows (or columns) from x0 on, of x_end, that begins at k0.
    __device__ __forceinline__ TileCopy(const T* p, long long ld, int x0, int x_end, long long k0) {
        step = ALONG_K ? BK : BK * ld;
        UNROLL for (int i = 0; i < N; ++i) {
            const int a = across() + i * ACROSS;
            from[i] = ALONG_K ? p + LEAST(x0 + a, x_end - 1) * ld + (k0 + along())
                              : p + (k0 + a) * ld + LEAST(x0 + along(), x_end - V);
        }
    }
    // Starts the copies of the next step's tile. SHORT: the first `skip` of its k do not exist.
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
    __device__ __forceinline__ void put(Shared) const {}  // nothing waits in registers
};

// --- multiply -----------------------------------------------------------------------------------

// Where a thread's element i lies in its warp's part of a tile: every LANES-th along k, where
// neighbours are read together; by vectors otherwise.
template <bool ALONG_K, int LANES>
__device__ __forceinline__ int place(int lane, int i) {
    return ALONG_K ? i * LANES + lane : i / VEC * (LANES * VEC) + lane * VEC + i % VEC;
}

struct alignas(sizeof(T) * KV) Few {  // neighbours along k
    T x[KV];
};

// A thread's COUNT elements at k = p to p + KV - 1, as out[q][i].
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

// What a thread multiplies of each stage (see copy_ring.cuh).
template <int LD_A, int LD_B, int A_BYTES>
struct Fragments {
    static constexpr int K_EACH = KP, K_READ = KV;
    int row_in, col_in, group;  // the thread's place in the tile, and its share of k

    __device__ __forceinline__ void begin(int& a, int& b) const {
        const int in_a = A_ALONG_K ? row_in * LD_A + group * KP : row_in + group * KP * LD_A;
        const int in_b = B_ALONG_K ? col_in * LD_B + group * KP : col_in + group * KP * LD_B;
        a = in_a * SIZE;
        b = A_BYTES + in_b * SIZE;
    }
    __device__ __forceinline__ void read(T (&a)[KV][TM], T (&b)[KV][TN], const unsigned char* at_a,
                                         const unsigned char* at_b, int p) const {
        fragment<TM, A_ALONG_K, LM, LD_A>(a, at_a, p);
        fragment<TN, B_ALONG_K, LN, LD_B>(b, at_b, p);
    }
};

// sum = the product of `count` steps from step `first` on, of this group's k, for the tile of C
// at (row, col); row_in and col_in: this thread's place in the tile.
template <bool VECTORS>
__device__ __forceinline__ void multiply(T (&sum)[TM][TN], int m, int n, const T* A, long long lda,
                                         const T* B, long long ldb, int row, int col, int first,
                                         int count, int skip, int group, int row_in, int col_in) {
    DYNAMIC_SHARED(raw);
    const long long k0 = (long long)first * BK - skip;
    TileCopy<BM, A_ALONG_K, VECTORS> a(A, lda, row, m, k0);
    TileCopy<BN, B_ALONG_K, VECTORS> b(B, ldb, col, n, k0);
    constexpr int LD_A = decltype(a)::LD, LD_B = decltype(b)::LD;
    constexpr int A_BYTES = decltype(a)::BYTES, STAGE_BYTES = A_BYTES + decltype(b)::BYTES;
    const Shared base = shared_address(raw);
    const Shared to_a = opaque(base + a.to()), to_b = opaque(base + (A_BYTES + b.to()));
    const Fragments<LD_A, LD_B, A_BYTES> fragments = {row_in, col_in, group};
    multiply_ring<STAGE_BYTES, false, int>(sum, a, b, to_a, to_b, first == 0, skip, count,
                                           fragments);
}

// --- store --------------------------------------------------------------------------------------

// Writes a thread's sums to its group's tile in shared memory, as BM x BN; (row_w, col_w) is where
// its warp's part begins.
__device__ __forceinline__ void put_sums(const T (&sum)[TM][TN], int group, int row_w, int col_w,
                                         int lane_m, int lane_n) {
    DYNAMIC_SHARED(raw);
    T* const tile = reinterpret_cast<T*>(raw) + group * (BM * BN);
    UNROLL for (int i = 0; i < TM; ++i) {
        T* const line = tile + (row_w + place<A_ALONG_K, LM>(lane_m, i)) * BN + col_w;
        UNROLL for (int j = 0; j < TN; j += VEC) {
            if (B_ALONG_K) {
                UNROLL for (int q = 0; q < VEC; ++q) {
                    line[place<true, LN>(lane_n, j + q)] = sum[i][j + q];
                }
            } else {
                Vec v;
                UNROLL for (int q = 0; q < VEC; ++q) v.x[q] = sum[i][j + (q ^ SWAP)];
                *reinterpret_cast<Vec*>(line + place<false, LN>(lane_n, j)) = v;
            }
        }
    }
}

// Adds the groups' tiles into the first.
__device__ __forceinline__ void add_groups(Vec* tiles) {
    __syncthreads();
    UNROLL for (int v = threadIdx.x; v < VECTORS_OF_TILE; v += THREADS) {
        Vec total = tiles[v];
        UNROLL for (int g = 1; g < KG; ++g) add(total, tiles[g * VECTORS_OF_TILE + v]);
        tiles[v] = total;
    }
}

// A block's slice of the tile: vectors rank * SLICE on, of which a thread has EACH.
constexpr int SLICE = (VECTORS_OF_TILE + SHARES - 1) / SHARES;
constexpr int EACH = (SLICE + THREADS - 1) / THREADS;

// Adds a slice from the shared memory of all blocks of the cluster.
__device__ __forceinline__ void add_blocks(Vec (&total)[EACH], const Vec* tile, int rank) {
    UNROLL for (int i = 0; i < EACH; ++i) {
        const int v = threadIdx.x + i * THREADS;
        if (v >= SLICE || rank * SLICE + v >= VECTORS_OF_TILE) continue;
        const Vec* const part = tile + rank * SLICE + v;
        total[i] = *shared_of(part, 0);
        UNROLL for (int s = 1; s < SHARES; ++s) add(total[i], *shared_of(part, s));
    }
}

// Hands in the slice of one of a tile's `clusters` clusters. Returns true in the last to come,
// which then has the sum of all.
__device__ __forceinline__ bool add_clusters(Vec (&total)[EACH], int tile, int rank, int cluster,
                                             int clusters, T* workspace, unsigned* flags) {
    Vec* const slices =
        reinterpret_cast<Vec*>(workspace) + (long long)(tile * SHARES + rank) * clusters * SLICE;
    UNROLL for (int i = 0; i < EACH; ++i) {
        const int v = threadIdx.x + i * THREADS;
        if (v < SLICE) slices[cluster * SLICE + v] = total[i];
    }
    if (!last_of(flags + tile * SHARES + rank, clusters)) return false;
    UNROLL for (int i = 0; i < EACH; ++i) {
        const int v = threadIdx.x + i * THREADS;
        if (v >= SLICE) continue;
        total[i] = slices[v];
#pragma unroll 8
        for (int s = 1; s < clusters; ++s) add(total[i], slices[s * SLICE + v]);
    }
    return true;
}

// Stores a slice of the tile at (row, col) of C.
__device__ __forceinline__ void store_slice(const Vec (&total)[EACH], int rank, int m, int n,
                                            T alpha, T beta, T* C, long long ldc, int row,
                                            int col) {
    const bool vectors = aligned(C, ldc);
    UNROLL for (int i = 0; i < EACH; ++i) {
        const int v = threadIdx.x + i * THREADS;
        const int at = (rank * SLICE + v) * VEC, r = row + at / BN, c = col + at % BN;
        if (v >= SLICE || at >= BM * BN) continue;
        if (r >= m || c >= n) continue;
        Vec sum;
        UNROLL for (int q = 0; q < VEC; ++q) sum.x[q] = total[i].x[q ^ SWAP];
        store_vector(C + r * ldc + c, sum, c, n, alpha, beta, vectors);
    }
}

extern "C" __global__ void CLUSTER_DIMS __launch_bounds__(THREADS, RESIDENT)
    gemm_cluster(int m, int n, int k, T alpha, const T* A, long long lda, const T* B, long long ldb,
                 T beta, T* C, long long ldc, T* workspace, unsigned* flags) {
    DYNAMIC_SHARED(raw);
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
    const int first = run_begin(share, least, more), count = run_length(share, least, more);
    const bool vectors = VECTORS_FIT(m, n, k, A, lda, B, ldb);
    T sum[TM][TN];
    const int row_in = row_w + place<A_ALONG_K, LM>(lane_m, 0);
    const int col_in = col_w + place<B_ALONG_K, LN>(lane_n, 0);
    if (vectors)
        multiply<true>(sum, m, n, A, lda, B, ldb, row, col, first, count, skip, group, row_in,
                       col_in);
    else
        multiply<false>(sum, m, n, A, lda, B, ldb, row, col, first, count, skip, group, row_in,
                        col_in);

    put_sums(sum, group, row_w, col_w, lane_m, lane_n);
    Vec* const tiles = reinterpret_cast<Vec*>(raw);
    if (KG > 1) add_groups(tiles);
    cluster_arrive();
    cluster_wait();  // all blocks of the cluster have their sums in shared memory
    Vec total[EACH];
    add_blocks(total, tiles, rank);
    cluster_arrive();  // they are read: the other blocks may end
    bool last = true;
    if (clusters > 1)
        last =
            add_clusters(total, tile, rank, cluster - tile * clusters, clusters, workspace, flags);
    if (last) store_slice(total, rank, m, n, alpha, beta, C, ldc, row, col);
    cluster_wait();
}
