// C of one row or one column: a matrix times a vector, for `gemv` and `gemv_narrow`.
//
// The matrix is read once from memory, and decides the time. Its lines lie along k or across it:
//
//   sum_along    a thread adds up eight lines, next to TEAM others along k: a block, WIDE lines
//   sum_across   a thread adds up neighbours of a line, of every ROWS-th k: a block, WIDE of them
//
// Both ask for FLY vectors a thread before they multiply the first. Where C has few tiles of WIDE
// elements, blocks share k (split-K, see shares.cuh): each leaves the sums of its share, and the last
// block to come adds the shares in a fixed order, so the same input gives the same bits.
//
//   WIDE     elements of C that a block computes
//   THREADS  of a block
//   FLY      vectors of the matrix that a thread has on their way
//   BLOCKS   blocks of the grid to aim at, by sharing k where C has fewer tiles
//   KIB      of the matrix that a block reads at least where blocks share k
//
// T is what the matrix and the vector hold, Sum what they are multiplied and added in; `wide` makes
// one of the other.
#pragma once
#include "early_launch.cuh"
#include "lines.cuh"
#include "shares.cuh"

constexpr int WARPS = THREADS / 32;
constexpr int LINES = LEAST(WIDE, 8), TEAM = THREADS * LINES / WIDE;
constexpr int LANES = WIDE / VEC, ROWS = THREADS / LANES;
constexpr int UNIT = 256;  // blocks share k in whole units
// Tiles of sums that a block leaves in shared memory: from its warps along k.
constexpr int TILES_ALONG = MOST(1, TEAM / 32), TILES_ACROSS = THREADS / MOST(32, LANES);

// EACH neighbours, from q on in a vector: of a matrix that is read once, and so need not stay in
// the first cache.
template <int EACH>
__device__ __forceinline__ void stream(Vec& to, int q, const T* at) {
    if constexpr (EACH == 1) {
        to.x[q] = *at;
    } else {
#ifdef HYBRID_GEMM_EMULATOR
        UNROLL for (int i = 0; i < EACH; ++i) to.x[q + i] = at[i];
#else
        unsigned u[4];
        if constexpr (EACH == VEC)
            asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                         : "=r"(u[0]), "=r"(u[1]), "=r"(u[2]), "=r"(u[3])
                         : "l"(at));
        else
            asm volatile("ld.global.nc.L1::no_allocate.u32 %0, [%1];" : "=r"(u[0]) : "l"(at));
        reinterpret_cast<unsigned*>(&to)[q * SIZE / 4] = u[0];
        UNROLL for (int i = 1; i < EACH * SIZE / 4;
                    ++i) reinterpret_cast<unsigned*>(&to)[q * SIZE / 4 + i] = u[i];
#endif
    }
}

// The sums over teams of a warp of LINES numbers in each lane; lane l of a team gets the one of line
// l / (lanes / LINES), where a team has so many lanes of the warp.
__device__ __forceinline__ Sum over_team(Sum (&sum)[LINES]) {
    constexpr int OF_WARP = LEAST(TEAM, 32);
    const int lane = threadIdx.x % 32;
    int bit = OF_WARP / 2;
    UNROLL for (int half = LINES / 2; half >= 1; half /= 2) {
        const bool upper = lane & bit;
        UNROLL for (int i = 0; i < half; ++i) {
            const Sum mine = upper ? sum[i + half] : sum[i];
            const Sum theirs = upper ? sum[i] : sum[i + half];
            sum[i] = mine + __shfl_xor_sync(~0u, theirs, bit);
        }
        bit /= 2;
    }
    UNROLL for (; bit >= 1; bit /= 2) sum[0] += __shfl_xor_sync(~0u, sum[0], bit);
    return sum[0];
}

// Leaves sums for k from k0 to k1 in parts[TILES_ALONG][WIDE], of lines from w0 on. They and the
// vector are read by EACH elements.
template <int EACH>
__device__ __forceinline__ void sum_along(const Operand& matrix, const Operand& vector, int w0,
                                          int k0, int k1, Sum* parts) {
    constexpr int AHEAD = MOST(1, FLY / LINES), STEP = TEAM * VEC;
    const int team = threadIdx.x / TEAM, member = threadIdx.x % TEAM, l0 = team * LINES;
    Sum sum[LINES] = {};
    const T* line[LINES];  // the last one again for those beyond
    UNROLL for (int l = 0; l < LINES; ++l) line[l] =
        matrix.at + LEAST(w0 + l0 + l, matrix.end - 1) * matrix.x;
    auto steps = [&](int k, bool whole) {
        Vec y[AHEAD][LINES] = {}, x[AHEAD] = {};
        UNROLL for (int i = 0; i < AHEAD; ++i) {
            UNROLL for (int q = 0; q < VEC; q += EACH) {
                const int p = k + i * STEP + q * TEAM + member * EACH;
                if (!whole && p >= k1) continue;
                UNROLL for (int l = 0; l < LINES; ++l) stream<EACH>(y[i][l], q, line[l] + p);
                if constexpr (EACH == VEC) {
                    x[i] = *reinterpret_cast<const Vec*>(vector.at + p);
                } else {
                    UNROLL for (int e = 0; e < EACH; ++e) x[i].x[q + e] =
                        vector.at[(p + e) * vector.p];
                }
            }
        }
        UNROLL for (int i = 0; i < AHEAD; ++i) {
            UNROLL for (int q = 0; q < VEC; ++q) {
                const Sum factor = wide(x[i].x[q]);
                UNROLL for (int l = 0; l < LINES; ++l) sum[l] += wide(y[i][l].x[q]) * factor;
            }
        }
    };
    int k = k0;
#pragma unroll 1
    for (; k + AHEAD * STEP <= k1; k += AHEAD * STEP) steps(k, true);
#pragma unroll 1
    for (; k < k1; k += AHEAD * STEP) steps(k, false);
    const Sum total = over_team(sum);
    constexpr int LANES_OF_LINE = LEAST(TEAM, 32) / LINES;
    if (member % LANES_OF_LINE == 0)
        parts[member / 32 * WIDE + l0 + member % 32 / LANES_OF_LINE] = total;
}

// As sum_along, for a matrix that lies across k: LANES threads along its lines, ROWS lines at once,
// and sums in parts[TILES_ACROSS][WIDE].
template <int EACH>
__device__ __forceinline__ void sum_across(const Operand& matrix, const Operand& vector, int w0,
                                           int k0, int k1, Sum* parts) {
    const int lane = threadIdx.x % LANES, row = threadIdx.x / LANES;
    Sum sum[VEC] = {};
    int place[VEC],
        from[VEC];  // in the tile, and in the matrix: there the last ones for those beyond
    UNROLL for (int q = 0; q < VEC; ++q) {
        const int first = q / EACH * LANES * EACH + lane * EACH;
        place[q] = first + q % EACH;
        from[q] = LEAST(w0 + first, matrix.end - EACH);
    }
    auto steps = [&](int k, bool whole) {
        Vec y[FLY] = {};
        T x[FLY] = {};
        UNROLL for (int i = 0; i < FLY; ++i) {
            const int p = k + i * ROWS + row;
            if (!whole && p >= k1) continue;
            const T* const line = matrix.at + p * matrix.p;
            UNROLL for (int q = 0; q < VEC; q += EACH) stream<EACH>(y[i], q, line + from[q]);
            x[i] = vector.at[p * vector.p];
        }
        UNROLL for (int i = 0; i < FLY; ++i) {
            UNROLL for (int q = 0; q < VEC; ++q) sum[q] += wide(x[i]) * wide(y[i].x[q]);
        }
    };
    int k = k0;
#pragma unroll 1
    for (; k + FLY * ROWS <= k1; k += FLY * ROWS) steps(k, true);
#pragma unroll 1
    for (; k < k1; k += FLY * ROWS) steps(k, false);
    UNROLL for (int q = 0; q < VEC; ++q) {
        UNROLL for (int bit = LANES; bit < 32; bit *= 2) sum[q] +=
            __shfl_xor_sync(~0u, sum[q], bit);
    }
    // Of warps with several rows the first one's lanes have it.
    if (threadIdx.x % 32 < LANES) {
        UNROLL for (int q = 0; q < VEC; ++q)
            parts[threadIdx.x / MOST(32, LANES) * WIDE + place[q]] = sum[q];
    }
}

// Adds up the `count` tiles in parts[count][WIDE] and stores the sum; or hands it in as a share, and
// the last block to come adds up the shares.
template <typename Store>
__device__ __forceinline__ void finish(Sum* parts, int count, int tile, int share, int shares,
                                       Sum* workspace, unsigned* flags, const Store& store) {
    __syncthreads();
    auto total = [&](int tiles, int e) {
        Sum sum = parts[e];
#pragma unroll 4
        for (int i = 1; i < tiles; ++i) sum += parts[i * WIDE + e];
        return sum;
    };
    Sum* const all = workspace + (long long)tile * shares * WIDE;
    for (int e = threadIdx.x; e < WIDE; e += THREADS) {
        const Sum sum = total(count, e);
        if (shares == 1)
            store(e, sum);
        else
            all[share * WIDE + e] = sum;
    }
    if (shares == 1 || !last_of(flags + tile, shares)) return;
    add_shares<THREADS, WIDE>(all, shares, parts);
    for (int e = threadIdx.x; e < WIDE; e += THREADS) store(e, total(THREADS / WIDE, e));
}

// The block's tile of C = op(A) op(B), of one row or, where n is 1, one column. `store` takes an
// element's number in C and its sum.
template <typename Store>
__device__ __forceinline__ void multiply(int m, int n, int k, const T* A, long long lda, const T* B,
                                         long long ldb, Sum* workspace, unsigned* flags,
                                         const Store& store) {
    __shared__ Sum parts[MOST(THREADS, TILES_ACROSS * WIDE)];  // also TILES_ALONG tiles
    const Operand a = lines_of_a(A, lda, m), b = lines_of_b(B, ldb, n);
    const bool column = n == 1, along = column ? !TRANS_A : TRANS_B;
    const Operand matrix = column ? a : b, vector = column ? b : a;
    const long long pitch = along ? matrix.x : matrix.p;
    const int length = along ? k : matrix.end;
    const bool vectors = aligned(matrix.at, pitch) && length % VEC == 0 &&
                         (!along || (vector.p == 1 && aligned(vector.at, 0)));
    const bool pairs =
        SIZE == 2 && (unsigned long long)matrix.at % 4 == 0 && (pitch | length) % 2 == 0;

    const int tiles = (matrix.end + WIDE - 1) / WIDE, shares = gridDim.x / tiles;
    const int tile = blockIdx.x / shares, share = blockIdx.x - tile * shares, w0 = tile * WIDE;
    const int units = (k + UNIT - 1) / UNIT, least = units / shares, more = units - least * shares;
    const int first = run_begin(share, least, more);
    const int k0 = first * UNIT, k1 = LEAST(k, (first + run_length(share, least, more)) * UNIT);

    wait_for_launch_before();
    if (along) {
        if (vectors)
            sum_along<VEC>(matrix, vector, w0, k0, k1, parts);
        else if (pairs)
            sum_along<LEAST(VEC, 4 / LEAST(SIZE, 4))>(matrix, vector, w0, k0, k1, parts);
        else
            sum_along<1>(matrix, vector, w0, k0, k1, parts);
    } else {
        if (vectors)
            sum_across<VEC>(matrix, vector, w0, k0, k1, parts);
        else if (pairs)
            sum_across<LEAST(VEC, 4 / LEAST(SIZE, 4))>(matrix, vector, w0, k0, k1, parts);
        else
            sum_across<1>(matrix, vector, w0, k0, k1, parts);
    }
    finish(parts, along ? TILES_ALONG : TILES_ACROSS, tile, share, shares, workspace, flags,
           [&](int e, Sum sum) {
               if (w0 + e < matrix.end) store(w0 + e, sum);
           });
}
