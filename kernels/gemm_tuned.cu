/*---
summary   = "16 x 8 a thread from a cp.async ring, sums in the other register bank than B, stream-K"
entry     = "gemm_tuned"
rung      = 100
params    = [
    {BM = 128, BN = 256, BK = 8, TM = 16, TN = 8, LM = 4, KG = 1, HOPS = 1, STAGES = 5, BLOCKS = 132, SPLIT = 132},
    {BM = 128, BN = 256, BK = 8, TM = 16, TN = 8, LM = 4, KG = 1, HOPS = 1, STAGES = 5, BLOCKS = 132, SPLIT = 1},
    {BM = 128, BN = 256, BK = 8, TM = 16, TN = 8, LM = 4, KG = 1, HOPS = 2, STAGES = 3, BLOCKS = 132, SPLIT = 132},
    {BM = 256, BN = 128, BK = 8, TM = 16, TN = 8, LM = 4, KG = 1, HOPS = 2, STAGES = 4, BLOCKS = 132, SPLIT = 132},
    {BM = 128, BN = 128, BK = 8, TM = 16, TN = 8, LM = 4, KG = 1, HOPS = 1, STAGES = 5, BLOCKS = 264, SPLIT = 264},
    {BM = 64, BN = 128, BK = 16, TM = 16, TN = 8, LM = 4, KG = 4, HOPS = 1, STAGES = 5, BLOCKS = 132, SPLIT = 1},
    {BM = 64, BN = 128, BK = 16, TM = 16, TN = 8, LM = 4, KG = 4, HOPS = 1, STAGES = 5, BLOCKS = 132, SPLIT = 132},
    {BM = 64, BN = 128, BK = 16, TM = 16, TN = 8, LM = 4, KG = 4, HOPS = 2, STAGES = 4, BLOCKS = 132, SPLIT = 1},
    {BM = 128, BN = 64, BK = 16, TM = 16, TN = 8, LM = 4, KG = 4, HOPS = 1, STAGES = 5, BLOCKS = 132, SPLIT = 132},
    {BM = 64, BN = 64, BK = 32, TM = 8, TN = 8, LM = 4, KG = 4, HOPS = 2, STAGES = 3, BLOCKS = 132, SPLIT = 132},
    {BM = 16, BN = 256, BK = 16, TM = 8, TN = 8, LM = 2, KG = 4, HOPS = 1, STAGES = 6, BLOCKS = 132, SPLIT = 4},
    {BM = 256, BN = 16, BK = 16, TM = 8, TN = 8, LM = 16, KG = 4, HOPS = 2, STAGES = 4, BLOCKS = 132, SPLIT = 4},
    {BM = 8, BN = 256, BK = 32, TM = 8, TN = 8, LM = 1, KG = 8, HOPS = 2, STAGES = 3, BLOCKS = 132, SPLIT = 4},
]
block     = ["KG * BM * BN / (TM * TN)", "1", "1"]
grid      = ["max(1, min(BLOCKS, SPLIT * ceil(m / BM) * ceil(n / BN), ceil(m / BM) * ceil(n / BN) * ceil(k / BK)))", "1", "1"]
shared    = "max(STAGES * BK * (BM + BN + 64 / SIZE) * SIZE, (KG > 1) * KG * BM * BN * SIZE / 2)"
workspace = "2 * BLOCKS * BM * BN * SIZE"
flags     = "32 * BLOCKS"
require   = [
    "BM % (TM * LM) == 0", "32 % LM == 0", "BN % (TN * 32 / LM) == 0", "TM % 4 == 0", "TN % 4 == 0",
    "HOPS <= 2", "BK % 4 == 0", "BK % KG == 0", "BLOCKS <= 65536", "BK / KG >= 2", "STAGES >= 2",
    "(KG * BM * BN / (TM * TN)) % BK == 0", "TM * TN * SIZE <= 512",
]
dtypes    = ["float32", "float64", "int32"]
arch      = ">=80"
runs_on   = ["cuda", "emulator"]
source    = "this project: docs/performance.md"
---*/

// A block of 32 * KG * (BM / (TM * LM)) * (BN / (TN * 32 / LM)) threads makes tiles of C, BM x BN.
// KG groups of warps share the k of each step among them and add up through shared memory.
// When the tiles do not fill the blocks evenly, the last of them are cut along k into equal
// runs of steps (stream-K); their parts meet in the workspace and are added in a fixed order, so
// the same input gives the same bits.
#include "tuned.cuh"

constexpr bool HOLD = HOPS == 2;          // see Copier
constexpr int LN = 32 / LM;                // lanes of a warp: LM along m by LN along n
constexpr int WARPS_N = BN / (TN * LN);
constexpr int GROUP = 32 * (BM / (TM * LM)) * WARPS_N;  // threads that share one slice of k
constexpr int THREADS = KG * GROUP;
constexpr int KP = BK / KG;                // k of a step that one group multiplies
constexpr int PAD = HOLD ? 16 / SIZE : 32 / SIZE;  // after each row of a tile written transposed
constexpr int LD_A = BM + (TRANS_A ? 0 : PAD), LD_B = BN + (TRANS_B ? PAD : 0);
constexpr int STAGE = BK * (LD_A + LD_B) * SIZE;  // bytes
constexpr int STRIP = 8;                   // tile rows that are worked through together, for L2
constexpr int FAN = 16;                    // parts added by one block

// How the block brings BK x BX of one operand into shared memory as [BK][LD].
// ALONG_K: memory runs along k, so the tile is transposed on its way: an element at a time, or
// (HOLD) by vectors that wait in registers. VECTORS: every row of the operand begins on 16 bytes.
template <int BX, bool ALONG_K, bool VECTORS>
struct Copier {
    static constexpr int LD = BX + (ALONG_K ? PAD : 0);
    static constexpr bool HELD = ALONG_K && VECTORS && HOLD;
    static constexpr int V = VECTORS && (HELD || !ALONG_K) ? VEC : 1;
    // Threads along memory and across it; copies of a thread each way.
    static constexpr int ALONG = HELD      ? LEAST(BK / VEC, MOST(2, THREADS / BX))
                                 : ALONG_K ? (HOLD ? 8 : 4)
                                           : LEAST(BX / V, THREADS / BK);
    static constexpr int ACROSS = THREADS / ALONG;
    static constexpr int EXTENT = ALONG_K ? BX : BK;
    static constexpr int N_ALONG = (ALONG_K ? BK : BX) / (ALONG * V);
    static constexpr int N_ACROSS = (EXTENT + ACROSS - 1) / ACROSS;
    static constexpr bool ALL = EXTENT >= ACROSS;  // every thread copies

    const T* from[N_ACROSS];
    Vec held[HELD ? N_ACROSS * N_ALONG : 1];
    long long step;
    int inside;  // elements of the operand from this thread's first on, along x

    __device__ __forceinline__ static int along() { return threadIdx.x % ALONG * V; }
    __device__ __forceinline__ static int across() { return threadIdx.x / ALONG; }
    __device__ __forceinline__ static bool works() { return ALL || across() < EXTENT; }
    __device__ __forceinline__ static int to() {  // where in the tile, in bytes
        return (ALONG_K ? along() * LD + across() : across() * LD + along()) * SIZE;
    }

    __device__ __forceinline__ Copier(const T* p, long long ld, int x0, int x_end, long long k0) {
        step = ALONG_K ? BK : BK * ld;
        inside = x_end - x0 - along();
        UNROLL for (int i = 0; i < N_ACROSS; ++i) {
            const int a = across() + i * ACROSS;
            // beyond the edge the last row again: what it gives is never stored
            from[i] = ALONG_K ? p + LEAST(x0 + a, x_end - 1) * ld + (k0 + along())
                              : p + (k0 + a) * ld + (x0 + along());
        }
    }

    // The next tile: into shared memory, or the first half of the way. `skip`: k at the front
    // that do not exist; the first step of a ragged k is the short one.
    template <bool SHORT>
    __device__ __forceinline__ void fetch(Shared tile, int skip) {
        UNROLL for (int i = 0; i < N_ACROSS; ++i) {
            UNROLL for (int c = 0; c < N_ALONG; ++c) {
                if (!works()) continue;
                const int off = c * ALONG * V;
                const int p = ALONG_K ? off + along() : across() + i * ACROSS;
                const T* const at = from[i] + off;
                if constexpr (HELD) {
                    const Vec none = {};
                    held[i * N_ALONG + c] =
                        SHORT && p < skip ? none : *reinterpret_cast<const Vec*>(at);
                } else if constexpr (ALONG_K) {
                    const Shared to = tile + (i * ACROSS + off * LD) * SIZE;
                    if (SHORT)
                        copy_async<SIZE>(to, p >= skip ? at : from[i] + skip, p >= skip);
                    else
                        copy_async<SIZE>(to, at);
                } else {
                    const Shared to = tile + (i * ACROSS * LD + off) * SIZE;
                    copy_async<SIZE * V>(to, at, off < inside && (!SHORT || p >= skip));
                }
            }
        }
        UNROLL for (int i = 0; i < N_ACROSS; ++i) from[i] += step;
    }
    // The second half of the way.
    __device__ __forceinline__ void put(Shared tile) const {
        if constexpr (HELD) {
            UNROLL for (int i = 0; i < N_ACROSS; ++i) {
                UNROLL for (int c = 0; c < N_ALONG; ++c) {
                    UNROLL for (int q = 0; q < VEC; ++q) {
                        const int at = (c * ALONG * V + q) * LD + i * ACROSS;
                        if (works()) store_shared(tile + at * SIZE, held[i * N_ALONG + c].x[q]);
                    }
                }
            }
        }
    }
};

// Sums of a thread as vectors. Elements change places in pairs: a vector's registers begin at
// an even one, so the sum in column j lands in the other register bank than element j of B,
// and a multiply-add reads both in one cycle.
__device__ __forceinline__ Vec part(const T (&sum)[TM][TN], int i, int j) {
    Vec v;
    UNROLL for (int q = 0; q < VEC; ++q) v.x[q] = sum[i][j + (q ^ 1)];
    return v;
}
__device__ __forceinline__ void add_part(T (&sum)[TM][TN], int i, int j, const Vec& v) {
    UNROLL for (int q = 0; q < VEC; ++q) sum[i][j + (q ^ 1)] += v.x[q];
}

// sum = the product of `count` steps from step k0 on, for the tile of C at (row, col).
template <bool VECTORS>
__device__ __forceinline__ void multiply(T (&sum)[TM][TN], int m, int n, const T* A, long long lda,
                                         const T* B, long long ldb, int row, int col, int k0,
                                         int skip, int count, int a_in, int b_in) {
    extern __shared__ __align__(16) unsigned char raw[];
    const long long first = (long long)k0 * BK - skip;
    Copier<BM, !TRANS_A, VECTORS> a(A, lda, row, m, first);
    Copier<BN, TRANS_B, VECTORS> b(B, ldb, col, n, first);
    const Shared base = shared_address(raw);
    const Shared to_a = opaque(base + a.to()), to_b = opaque(base + (BK * LD_A * SIZE + b.to()));
    unsigned write = 0;
    int fetch = count;  // steps to fetch yet
    UNROLL for (int s = 0; s < STAGES - 1; ++s) {
        if (fetch > 0) {
            if (s == 0 && k0 == 0) {
                a.template fetch<true>(to_a, skip);
                b.template fetch<true>(to_b, skip);
            } else {
                a.template fetch<false>(to_a + write, 0);
                b.template fetch<false>(to_b + write, 0);
            }
            a.put(to_a + write);
            b.put(to_b + write);
        }
        --fetch;
        write += STAGE;
        copies_commit();
    }
    UNROLL for (int i = 0; i < TM; ++i) {
        UNROLL for (int j = 0; j < TN; ++j) sum[i][j] = T(0);
    }
    T fa[2][TM], fb[2][TN];
    int read_a = opaque(a_in), read_b = opaque(b_in);
    auto fragment = [&](int half, int p) {
        UNROLL for (int i = 0; i < TM; i += VEC) {
            const Vec v = *reinterpret_cast<const Vec*>(raw + read_a + (p * LD_A + i * LM) * SIZE);
            UNROLL for (int q = 0; q < VEC; ++q) fa[half][i + q] = v.x[q];
        }
        UNROLL for (int j = 0; j < TN; j += VEC) {
            const Vec v = *reinterpret_cast<const Vec*>(raw + read_b + (p * LD_B + j * LN) * SIZE);
            UNROLL for (int q = 0; q < VEC; ++q) fb[half][j + q] = v.x[q];
        }
    };
    copies_wait<STAGES - 2>();
    __syncthreads();
    unsigned read = 0;
    fragment(0, 0);
#pragma unroll 1
    for (; count > 0; --count) {
        UNROLL for (int p = 0; p < KP; ++p) {
            if (p == KP - 1) {  // the next step's tile must be there, and all done with this one
                copies_wait<STAGES - 2>();
                __syncthreads();
                const int go = read == (STAGES - 1) * STAGE ? -(STAGES - 1) * STAGE : STAGE;
                read += go;
                read_a += go;
                read_b += go;
            }
            fragment((p + 1) % 2, (p + 1) % KP);
            if (p == 0) {
                if (fetch > 0) {
                    a.template fetch<false>(to_a + write, 0);
                    b.template fetch<false>(to_b + write, 0);
                }
                copies_commit();
                --fetch;
                if (!HOLD) write = write == (STAGES - 1) * STAGE ? 0 : write + STAGE;
            }
            if (HOLD && p == KP - 2) {
                if (fetch >= 0) {
                    a.put(to_a + write);
                    b.put(to_b + write);
                }
                write = write == (STAGES - 1) * STAGE ? 0 : write + STAGE;
            }
            // there and back along n: one operand of each multiply-add is the one before's
            UNROLL for (int i = 0; i < TM; ++i) {
                UNROLL for (int j = 0; j < TN; ++j) {
                    const int jj = i % 2 ? TN - 1 - j : j;
                    sum[i][jj] += fa[p % 2][i] * fb[p % 2][jj];
                }
            }
        }
    }
    copies_wait<0>();
    __syncthreads();
}

// Adds the groups' sums into group 0's, by halves.
__device__ __forceinline__ void add_groups(T (&sum)[TM][TN], int group, int thread) {
    extern __shared__ __align__(16) unsigned char raw[];
    UNROLL for (int half = KG / 2; half > 0; half /= 2) {
        Vec* const mine =
            reinterpret_cast<Vec*>(raw) + group % half * GROUP * TM * TN / VEC + thread;
        if (group >= half && group < 2 * half) {
            UNROLL for (int i = 0; i < TM; ++i) {
                UNROLL for (int j = 0; j < TN; j += VEC)
                    mine[(i * TN + j) / VEC * GROUP] = part(sum, i, j);
            }
        }
        __syncthreads();
        if (group < half) {
            UNROLL for (int i = 0; i < TM; ++i) {
                UNROLL for (int j = 0; j < TN; j += VEC)
                    add_part(sum, i, j, mine[(i * TN + j) / VEC * GROUP]);
            }
        }
        __syncthreads();
    }
}

// How the steps of the tiles that are cut along k are shared out among the blocks.
struct Shares {
    int steps, units, least, more;  // `more` blocks have one unit above the least

    __device__ Shares(int tiles, int steps_) : steps(steps_), units(tiles * steps_) {
        least = units / int(gridDim.x);
        more = units - least * int(gridDim.x);
    }
    __device__ int start(int block) const { return block * least + LEAST(block, more); }
    __device__ int owner(int unit) const {
        const int big = more * (least + 1);
        return unit < big ? unit / (least + 1) : more + (unit - big) / least;
    }
    // A block has parts of two tiles at most: of the one it begins in, and of its last.
    __device__ int slot(int block, int tile) const {
        return 2 * block + (start(block) / steps != tile);
    }
};

// Hands in this block's part of a tile. True in the one block that ends up with the whole sum:
// parts are added FAN at a time, always in the same order, by whichever block comes last.
__device__ __forceinline__ bool collect(T (&sum)[TM][TN], const Shares& shares, int tile,
                                        T* workspace, unsigned* flags, int group, int thread) {
    const int lo = shares.owner(tile * shares.steps);
    const int parts = shares.owner(tile * shares.steps + shares.steps - 1) - lo + 1;
    int mine = int(blockIdx.x) - lo;
#pragma unroll 1
    for (int stride = 1; stride < parts; stride *= FAN, flags += 2 * gridDim.x) {
        if (group == 0) {
            T* to = workspace + (long long)shares.slot(lo + mine, tile) * (BM * BN) + thread * VEC;
            UNROLL for (int i = 0; i < TM; ++i) {
                UNROLL for (int j = 0; j < TN; j += VEC)
                    *reinterpret_cast<Vec*>(to + (i * TN + j) * GROUP) = part(sum, i, j);
            }
        }
        mine -= mine / stride % FAN * stride;  // the first of those that are added together
        const int count = LEAST(FAN, (parts - mine + stride - 1) / stride);
        unsigned* counter = flags + shares.slot(lo + mine, tile);
        if (!last_of(counter, count)) return false;
        UNROLL for (int i = 0; i < TM; ++i) {
            UNROLL for (int j = 0; j < TN; ++j) sum[i][j] = T(0);
        }
#pragma unroll 1
        for (int c = group; c < count; c += KG) {
            const int slot = shares.slot(lo + mine + c * stride, tile);
            const Vec* from = reinterpret_cast<const Vec*>(workspace) +
                              (long long)slot * (BM * BN / VEC) + thread;
            UNROLL for (int i = 0; i < TM; ++i) {
                UNROLL for (int j = 0; j < TN; j += VEC)
                    add_part(sum, i, j, from[(i * TN + j) / VEC * GROUP]);
            }
        }
        if (KG > 1) add_groups(sum, group, thread);
    }
    return true;
}

// c = alpha * sum + beta * c; beta == 0 never reads c.
__device__ __forceinline__ void store_tile(const T (&sum)[TM][TN], int m, int n, T alpha, T beta,
                                           T* C, long long ldc, int row, int col) {
    const bool vectors = on_16_bytes(C, ldc);
    UNROLL for (int i = 0; i < TM; ++i) {
        const int r = row + i / VEC * (LM * VEC) + i % VEC;
        if (r >= m) continue;
        UNROLL for (int j = 0; j < TN; j += VEC) {
            const int c = col + j * LN;
            T* to = C + r * ldc + c;
            if (vectors && c + VEC <= n) {
                Vec v = {};
                if (beta != T(0)) v = *reinterpret_cast<Vec*>(to);
                UNROLL for (int q = 0; q < VEC; ++q) {
                    const T product = alpha * sum[i][j + q];
                    v.x[q] = beta == T(0) ? product : product + beta * v.x[q];
                }
                *reinterpret_cast<Vec*>(to) = v;
            } else {
                UNROLL for (int q = 0; q < VEC; ++q) {
                    const T product = alpha * sum[i][j + q];
                    if (c + q < n) to[q] = beta == T(0) ? product : product + beta * to[q];
                }
            }
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
gemm_tuned(int m, int n, int k, T alpha, const T* A, long long lda, const T* B, long long ldb,
           T beta, T* C, long long ldc, T* workspace, unsigned* flags) {
    const int thread = threadIdx.x % GROUP, group = threadIdx.x / GROUP;
    const int warp = thread / 32, lane = thread % 32;
    const int row_in = warp / WARPS_N * (TM * LM) + lane / 2 % LM * VEC;
    const int col_in = warp % WARPS_N * (TN * LN) + (lane % 2 + lane / (2 * LM) * 2) * VEC;
    const int a_in = (group * KP * LD_A + row_in) * SIZE;
    const int b_in = (BK * LD_A + group * KP * LD_B + col_in) * SIZE;

    const int tiles_m = (m + BM - 1) / BM, tiles_n = (n + BN - 1) / BN, tiles = tiles_m * tiles_n;
    const int steps = MOST(1, (k + BK - 1) / BK), skip = steps * BK - k;
    const bool vectors = on_16_bytes(A, lda) && on_16_bytes(B, ldb) &&
                         (TRANS_A ? m : k) % VEC == 0 && (TRANS_B ? k : n) % VEC == 0;

    // Whole waves of tiles, a tile a block; of the rest, and of one wave more, equal shares.
    const int blocks = gridDim.x;
    int cut = tiles % blocks;
    if (cut && tiles > blocks) cut += blocks;
    const Shares shares(cut, steps);
    int unit = shares.start(blockIdx.x), end = shares.start(blockIdx.x + 1);
    int whole = cut + blockIdx.x;
    while (unit < end || whole < tiles) {
        int tile, k0 = 0, count = steps;
        if (unit < end) {
            tile = unit / steps;
            k0 = unit - tile * steps;
            count = LEAST(steps - k0, end - unit);
            unit += count;
        } else {
            tile = whole;
            whole += blocks;
        }
        const int strip = tile / (STRIP * tiles_n), in = tile - strip * (STRIP * tiles_n);
        const int rows = LEAST(STRIP, tiles_m - strip * STRIP);
        const int row = (strip * STRIP + in % rows) * BM, col = in / rows * BN;

        T sum[TM][TN];
        if (vectors)
            multiply<true>(sum, m, n, A, lda, B, ldb, row, col, k0, skip, count, a_in, b_in);
        else
            multiply<false>(sum, m, n, A, lda, B, ldb, row, col, k0, skip, count, a_in, b_in);
        if (KG > 1) add_groups(sum, group, thread);
        if (count < steps && !collect(sum, shares, tile, workspace, flags, group, thread))
            continue;
        if (group == 0) store_tile(sum, m, n, alpha, beta, C, ldc, row + row_in, col + col_in);
    }
}
