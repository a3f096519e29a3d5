// A block's tile of C, BM x BN, for `tuned`, `deep`, `short_k` and `stack_tile`: which element each
// thread loads, multiplies and stores. The main loop is copy_ring.cuh's, and so are the parameters,
// but
//
//   HOPS  1: an operand that lies along k is copied by elements; 2: by vectors, through registers
//
// The tiles of A and B lie in shared memory with k as their rows, whatever the layout in global
// memory. KG groups of warps share the k of each step and add up their sums at the end. In a group,
// a warp is LM lanes along m by LN along n, and a lane has TM x TN sums:
//
//                BN = WARPS_N * LN * TN
//        +-----------+-----------+
//        | warp 0    | warp 1    |      TM * LM rows a warp
//        | LM x LN   |           |
//        +-----------+-----------+      a lane's rows and columns come in vectors of VEC, LM * VEC
//        | warp 2    | warp 3    |      rows and LN * VEC columns apart
//        +-----------+-----------+
//
// Lanes 2 i and 2 i + 1 are neighbours along n, so LM is at most 16.
#pragma once
#include "copy_ring.cuh"
#include "shares.cuh"

constexpr bool TWO_HOPS = HOPS == 2;     // see TileCopy
constexpr int LN = 32 / LM;              // lanes of a warp along n
constexpr int WARPS_N = BN / (TN * LN);  // warps of a group along n
// Threads of a group, which share one slice of k, and of the block.
constexpr int GROUP = 32 * (BM / (TM * LM)) * WARPS_N, THREADS = KG * GROUP;
constexpr int KP = BK / KG;  // k of a step that one group multiplies
constexpr int VECTORS_OF_TILE = BM * BN / VEC;
// Elements added to each row of a tile that is written transposed, against bank conflicts.
constexpr int PAD = TWO_HOPS ? 16 / SIZE : 32 / SIZE;
constexpr int LD_A = BM + (TRANS_A ? 0 : PAD), LD_B = BN + (TRANS_B ? PAD : 0);
// A stage: elements of A, before those of B, and bytes of both.
constexpr int A_ELEMENTS = BK * LD_A, STAGE_BYTES = BK * (LD_A + LD_B) * SIZE;

// --- load ---------------------------------------------------------------------------------------

// How the block copies BK x BX of one operand into shared memory as [BK][LD].
//
// Where memory runs across k, it lies right: cp.async copies vectors. ALONG_K: where memory runs
// along k, the tile is transposed on its way,
//   HOPS = 1   an element a copy, or
//   HOPS = 2   by vectors from memory to registers (`fetch`), and from there, once they have come,
//              an element a store to shared memory (`put`).
// VECTORS: whether the operand can be read by vectors at all (vectors.cuh).
template <int BX, bool ALONG_K, bool VECTORS>
struct TileCopy {
    static constexpr int LD = BX + (ALONG_K ? PAD : 0);
    // Whether copies wait in registers between hops; elements of a copy.
    static constexpr bool HELD = ALONG_K && VECTORS && TWO_HOPS;
    static constexpr int V = VECTORS && (HELD || !ALONG_K) ? VEC : 1;
    // Threads along memory and across it; copies of a thread each way.
    static constexpr int ALONG = HELD      ? LEAST(BK / VEC, MOST(2, THREADS / BX))
                                 : ALONG_K ? (TWO_HOPS ? 8 : 4)
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

    // The tile of rows (or columns) from x0 on, of x_end, that begins at k0.
    __device__ __forceinline__ TileCopy(const T* p, long long ld, int x0, int x_end, long long k0) {
        step = ALONG_K ? BK : BK * ld;
        inside = x_end - x0 - along();
        UNROLL for (int i = 0; i < N_ACROSS; ++i) {
            const int a = across() + i * ACROSS;
            from[i] = ALONG_K ? p + LEAST(x0 + a, x_end - 1) * ld + (k0 + along())
                              : p + (k0 + a) * ld + (x0 + along());
        }
    }

    // Starts the copies of the next step's tile. SHORT: the first `skip` of its k do not exist.
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

    // The second hop: writes what `fetch` left in registers to the tile.
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

// --- multiply -----------------------------------------------------------------------------------

// A thread's first row and column in the tile.
__device__ __forceinline__ int row_in(int thread) {
    return thread / 32 / WARPS_N * (TM * LM) + thread % 32 / 2 % LM * VEC;
}
__device__ __forceinline__ int col_in(int thread) {
    const int lane = thread % 32;
    return thread / 32 % WARPS_N * (TN * LN) + (lane % 2 + lane / (2 * LM) * 2) * VEC;
}

// What a thread multiplies of each stage (see copy_ring.cuh).
struct Fragments {
    static constexpr int K_EACH = KP, K_READ = 1;
    int from_a, from_b;

    __device__ __forceinline__ void begin(int& a, int& b) const {
        a = from_a;
        b = from_b;
    }
    __device__ __forceinline__ void read(T (&a)[1][TM], T (&b)[1][TN], const unsigned char* at_a,
                                         const unsigned char* at_b, int p) const {
        UNROLL for (int i = 0; i < TM; i += VEC) {
            const Vec v = *reinterpret_cast<const Vec*>(at_a + (p * LD_A + i * LM) * SIZE);
            UNROLL for (int q = 0; q < VEC; ++q) a[0][i + q] = v.x[q];
        }
        UNROLL for (int j = 0; j < TN; j += VEC) {
            const Vec v = *reinterpret_cast<const Vec*>(at_b + (p * LD_B + j * LN) * SIZE);
            UNROLL for (int q = 0; q < VEC; ++q) b[0][j + q] = v.x[q];
        }
    }
};

// sum = the product of `count` steps from step k0 on, for the tile of C at (row, col). `skip`: k
// missing in front of step 0.
template <bool VECTORS_A, bool VECTORS_B = VECTORS_A>
__device__ __forceinline__ void multiply(T (&sum)[TM][TN], int m, int n, const T* A, long long lda,
                                         const T* B, long long ldb, int row, int col, int k0,
                                         int skip, int count, int a_in, int b_in) {
    DYNAMIC_SHARED(raw);
    const long long first = (long long)k0 * BK - skip;
    TileCopy<BM, !TRANS_A, VECTORS_A> a(A, lda, row, m, first);
    TileCopy<BN, TRANS_B, VECTORS_B> b(B, ldb, col, n, first);
    const Shared base = shared_address(raw);
    const Shared to_a = opaque(base + a.to()), to_b = opaque(base + (A_ELEMENTS * SIZE + b.to()));
    multiply_ring<STAGE_BYTES, TWO_HOPS, int&>(sum, a, b, to_a, to_b, k0 == 0, skip, count,
                                               Fragments{a_in, b_in});
}

// --- a thread's sums as vectors -----------------------------------------------------------------

// Neighbours change places in pairs: the registers of a vector begin at an even one, so the sum in
// column j comes to lie in the other register bank than element j of B, and a multiply-add reads
// both in one cycle (docs/performance.md).
__device__ __forceinline__ Vec part(const T (&sum)[TM][TN], int i, int j) {
    Vec v;
    UNROLL for (int q = 0; q < VEC; ++q) v.x[q] = sum[i][j + (q ^ 1)];
    return v;
}
__device__ __forceinline__ void add_part(T (&sum)[TM][TN], int i, int j, const Vec& v) {
    UNROLL for (int q = 0; q < VEC; ++q) sum[i][j + (q ^ 1)] += v.x[q];
}

// A tile of partial sums lies as TM * TN / VEC vectors of each thread of a group, neighbouring
// threads side by side; `to` and `from` are the thread's first.
template <int COUNT = TM>  // rows of sums, from `first` on
__device__ __forceinline__ void put_sums(Vec* to, const T (&sum)[TM][TN], int first = 0) {
    UNROLL for (int i = 0; i < COUNT; ++i) {
        UNROLL for (int j = 0; j < TN; j += VEC) to[(i * TN + j) / VEC * GROUP] =
            part(sum, first + i, j);
    }
}
__device__ __forceinline__ void add_sums(T (&sum)[TM][TN], const Vec* from) {
    UNROLL for (int i = 0; i < TM; ++i) {
        UNROLL for (int j = 0; j < TN; j += VEC)
            add_part(sum, i, j, from[(i * TN + j) / VEC * GROUP]);
    }
}

// Adds the groups' sums into those of group 0, through shared memory, by halves.
__device__ __forceinline__ void add_groups(T (&sum)[TM][TN], int group, int thread) {
    DYNAMIC_SHARED(raw);
    UNROLL for (int half = KG / 2; half > 0; half /= 2) {
        Vec* const mine =
            reinterpret_cast<Vec*>(raw) + group % half * GROUP * TM * TN / VEC + thread;
        if (group >= half && group < 2 * half) put_sums(mine, sum);
        __syncthreads();
        if (group < half) add_sums(sum, mine);
        __syncthreads();
    }
}

// --- store --------------------------------------------------------------------------------------

// c = alpha * sum + beta * c for the thread's sums, the first of which is C(row, col). What beta
// scales is read for VEC rows before these are written, so that its loads overlap.
__device__ __forceinline__ void store_tile(const T (&sum)[TM][TN], int m, int n, T alpha, T beta,
                                           T* C, long long ldc, int row, int col) {
    const bool vectors = aligned(C, ldc);
    UNROLL for (int first = 0; first < TM; first += VEC) {
        const int r0 = row + first * LM;
        Vec old[VEC][TN / VEC] = {};
        if (beta != T(0)) {
            UNROLL for (int i = 0; i < VEC; ++i) {
                UNROLL for (int j = 0; j < TN; j += VEC) {
                    const int r = r0 + i, c = col + j * LN;
                    if (r < m) old[i][j / VEC] = old_vector(C + r * ldc + c, c, n, vectors);
                }
            }
        }
        UNROLL for (int i = 0; i < VEC; ++i) {
            const int r = r0 + i;
            if (r >= m) continue;
            UNROLL for (int j = 0; j < TN; j += VEC) {
                const int c = col + j * LN;
                Vec v;
                UNROLL for (int q = 0; q < VEC; ++q) v.x[q] = sum[first + i][j + q];
                store_vector(C + r * ldc + c, v, old[i][j / VEC], c, n, alpha, beta, vectors);
            }
        }
    }
}

// The first row and column, in the tile, of vector v of its sums (see put_sums).
__device__ __forceinline__ int row_of(int v) {
    const int i = v / GROUP * VEC / TN;
    return row_in(v % GROUP) + i / VEC * (LM * VEC) + i % VEC;
}
__device__ __forceinline__ int col_of(int v) {
    return col_in(v % GROUP) + v / GROUP * VEC % TN * LN;
}

// As `store_tile`, for the tile at (row, col). The sums of group 0 go through shared memory, so
// that all threads store them, in a loop: from one group's registers, by `store_tile`, the code is
// longer than all of the rest, and takes the compiler as long. In ROUNDS, so many parts of the
// tile, where shared memory does not hold all of it.
template <int ROUNDS = 1>
__device__ __forceinline__ void store_in_loop(const T (&sum)[TM][TN], int m, int n, T alpha, T beta,
                                              T* C, long long ldc, int row, int col, int group,
                                              int thread) {
    DYNAMIC_SHARED(raw);
    Vec* const sums = reinterpret_cast<Vec*>(raw);
    const bool vectors = aligned(C, ldc);
    constexpr int ROWS_AT_ONCE = TM / ROUNDS, AT_ONCE = VECTORS_OF_TILE / ROUNDS;
    UNROLL for (int round = 0; round < ROUNDS; ++round) {
        if (round > 0) __syncthreads();  // the part before is stored
        if (group == 0) put_sums<ROWS_AT_ONCE>(sums + thread, sum, round * ROWS_AT_ONCE);
        __syncthreads();
#pragma unroll 1
        for (int v = threadIdx.x; v < AT_ONCE; v += THREADS) {
            const int r = row + row_of(round * AT_ONCE + v), c = col + col_of(round * AT_ONCE + v);
            if (r >= m) continue;
            Vec x;
            UNROLL for (int q = 0; q < VEC; ++q) x.x[q] = sums[v].x[q ^ 1];
            store_vector(C + r * ldc + c, x, c, n, alpha, beta, vectors);
        }
    }
}
