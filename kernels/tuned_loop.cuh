// A block's tile of C, BM x BN, from a ring of tiles in shared memory: for `tuned` and `deep`.
// KG groups of warps share the k of each step among them and add up through shared memory.
#pragma once
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
    DYNAMIC_SHARED(raw);
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
    DYNAMIC_SHARED(raw);
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

// A thread's first row and column in the tile, of those in its group.
__device__ __forceinline__ int row_in(int thread) {
    return thread / 32 / WARPS_N * (TM * LM) + thread % 32 / 2 % LM * VEC;
}
__device__ __forceinline__ int col_in(int thread) {
    const int lane = thread % 32;
    return thread / 32 % WARPS_N * (TN * LN) + (lane % 2 + lane / (2 * LM) * 2) * VEC;
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
