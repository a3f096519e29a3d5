// C of one row or one column: a matrix times a vector, for `gemv` and `gemv_narrow`.
//
// The matrix is read once from memory, and decides the time. Its lines lie along k or across it:
//
//   sum_along    TEAM threads along k add up eight lines together: a block, WIDE lines
//   sum_across   a thread adds up neighbours of a line, of every ROWS-th k: a block, WIDE of them
//
// Both ask for as many vectors a thread as FLY says before they multiply the first. VEC lines
// further, a line lies as far from 16 bytes as before. So a thread takes lines that lie alike, and
// vectors where memory has them, with elements of other lines (o) at the ends:
//
//     line p          o x x x|x x x x|x x x x|x o o o     VEC = 4, and a tile of 12 elements that
//     line p + VEC    o x x x|x x x x|x x x x|x o o o     begins `off` = 1 element after a vector
//
// Along k the first and the last vector are left out, and single elements read in their place.
// Across k all lines of the thread have (o) at the same places, where they come into sums that
// nobody asks for; but of the first and the last VEC - 1 lines single elements are read, since
// vectors of these can reach out of the matrix. Elements of 4 and 8 bytes are all read singly
// there: that was measured to be faster.
//
// Where C has few tiles of WIDE elements, blocks share k (split-K, see shares.cuh): each leaves the
// sums of its share, and the last block to come adds the shares in a fixed order, so the same input
// gives the same bits.
//
//   WIDE     elements of C that a block computes
//   THREADS  of a block
//   FLY      vectors of the matrix, or their elements one by one, that a thread has on their way;
//            of lines off 16 bytes that are read by vectors eight at most
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
constexpr int LINES = LEAST(WIDE, 8), TEAM = THREADS * LINES / WIDE, TEAMS = WIDE / LINES;
constexpr int LANES = WIDE / VEC, ROWS = THREADS / LANES;
constexpr int UNIT = 256;  // blocks share k in whole units
// Tiles of sums that a block leaves in shared memory: from its warps along k.
constexpr int TILES_ALONG = MOST(1, TEAM / 32), TILES_ACROSS = THREADS / MOST(32, LANES);

// Vectors that a thread asks for at once. Where lines begin anywhere, other things take registers.
template <bool WHOLE>
constexpr int ASKED = WHOLE ? FLY : LEAST(FLY, 8);

// The VEC - 1 numbers at each end of those from `begin` to `end`, for e from 0 to ENDS; -1 where
// there are fewer.
constexpr int ENDS = 2 * (VEC - 1);
__device__ __forceinline__ int at_ends(int e, int begin, int end) {
    const bool low = e < VEC - 1;
    const int p = low ? begin + e : end - 1 - (e - (VEC - 1));
    return e < ENDS && (low ? p < end : p >= begin + VEC - 1) ? p : -1;
}

// A vector of the matrix, which is read once, and so need not stay in the first cache; but where
// lines begin anywhere (not WHOLE), two loads may ask for parts of the same 32 bytes.
template <bool WHOLE>
__device__ __forceinline__ void stream(Vec& to, const T* at) {
#ifdef HYBRID_GEMM_EMULATOR
    to = *reinterpret_cast<const Vec*>(at);
#else
    unsigned* const u = reinterpret_cast<unsigned*>(&to);
    if constexpr (WHOLE)
        asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(u[0]), "=r"(u[1]), "=r"(u[2]), "=r"(u[3])
                     : "l"(at));
    else
        asm volatile("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(u[0]), "=r"(u[1]), "=r"(u[2]), "=r"(u[3])
                     : "l"(at));
#endif
}

// The sums over teams of a warp of LINES numbers in each lane; lane l of a team gets the one of
// line l / (lanes / LINES), where a team has so many lanes of the warp.
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

// Leaves sums for k from k0 to k1 in parts[TILES_ALONG][WIDE], of lines from w0 on. WHOLE: they and
// the vector are whole vectors.
template <bool WHOLE>
__device__ __forceinline__ void sum_along(const Operand& matrix, const Operand& vector, int w0,
                                          int k0, int k1, Sum* parts) {
    constexpr int AHEAD = MOST(1, ASKED<WHOLE> / LINES), STEP = TEAM * VEC;
    constexpr int KINDS = WHOLE ? 1 : MOST(1, VEC / TEAMS);  // every KINDS-th line lies alike
    const int team = threadIdx.x / TEAM, member = threadIdx.x % TEAM;
    const T* line[LINES];  // beyond the last one, others that lie alike
    UNROLL for (int l = 0; l < LINES; ++l) {
        const int i = w0 + team + l * TEAMS;
        line[l] = l < KINDS || i < matrix.end ? matrix.line(i) : line[l % KINDS];
    }
    int begin[KINDS], farthest = 0;  // of the vectors
    UNROLL for (int c = 0; c < KINDS; ++c) {
        begin[c] = WHOLE ? 0 : before_vector(line[c] + k0);
        farthest = MOST(farthest, begin[c]);
    }
    Sum sum[LINES] = {};
    auto steps = [&](int k, bool whole) {
        auto at = [&](int i, int c) { return k + i * STEP + member * VEC + begin[c]; };
        Vec y[AHEAD][LINES] = {};
        UNROLL for (int i = 0; i < AHEAD; ++i) {
            UNROLL for (int l = 0; l < LINES; ++l) {
                const int p = at(i, l % KINDS);
                if (whole || p + VEC <= k1) stream<WHOLE>(y[i][l], line[l] + p);
            }
        }
        UNROLL for (int i = 0; i < AHEAD; ++i) {
            UNROLL for (int c = 0; c < KINDS; ++c) {
                const int p = at(i, c);
                Vec x = {};
                if (whole || p + VEC <= k1) {
                    if constexpr (WHOLE)
                        x = *reinterpret_cast<const Vec*>(vector.at + p);
                    else
                        UNROLL for (int q = 0; q < VEC; ++q) x.x[q] = vector.at[(p + q) * vector.p];
                }
                UNROLL for (int q = 0; q < VEC; ++q) {
                    const Sum factor = wide(x.x[q]);
                    UNROLL for (int l = c; l < LINES; l += KINDS) sum[l] +=
                        wide(y[i][l].x[q]) * factor;
                }
            }
        }
    };
    int k = k0;
#pragma unroll 1
    for (; k + AHEAD * STEP + farthest <= k1; k += AHEAD * STEP) steps(k, true);
#pragma unroll 1
    for (; k < k1; k += AHEAD * STEP) steps(k, false);
    if constexpr (!WHOLE) {  // the elements beside the vectors, a line's by as many threads
        Sum single = 0;
        UNROLL for (int e = member; e < ENDS * LINES; e += TEAM) {
            const int i = w0 + team + e % LINES * TEAMS, p = at_ends(e / LINES, k0, k1);
            if (p < 0 || i >= matrix.end) continue;
            const T* const at = matrix.line(i);
            const int first = k0 + before_vector(at + k0);
            if (p < first || p >= first + (k1 - first) / VEC * VEC)
                single += wide(at[p]) * wide(vector.at[p * vector.p]);
        }
        UNROLL for (int l = 0; l < LINES; ++l) sum[l] += l == member % LINES ? single : Sum(0);
    }
    const Sum total = over_team(sum);
    constexpr int LANES_OF_LINE = LEAST(TEAM, 32) / LINES;
    if (member % LANES_OF_LINE == 0)
        parts[member / 32 * WIDE + team + member % 32 / LANES_OF_LINE * TEAMS] = total;
}

// As sum_along, for a matrix of `depth` lines that lie across k: LANES threads along a line, ROWS
// lines at once, and sums in parts[TILES_ACROSS][WIDE]. Where a tile begins after a vector, it ends
// in one vector more, which the threads along a line take in turn: each, those of some lines.
template <bool WHOLE>
__device__ __forceinline__ void sum_across(const Operand& matrix, const Operand& vector, int depth,
                                           int w0, int k0, int k1, Sum* parts) {
    static_assert(ROWS % VEC == 0, "a thread's lines lie alike");
    constexpr int TURNS = LEAST(LANES, 32), AHEAD = ASKED<WHOLE> / (WHOLE || TURNS > 2 ? 1 : 2);
    constexpr int MORE = WHOLE ? 0 : (AHEAD + TURNS - 1) / TURNS;
    constexpr int SINGLE = WHOLE ? 1 : (ENDS + ROWS - 1) / ROWS;
    const int lane = threadIdx.x % LANES, row = threadIdx.x / LANES;
    const int off = WHOLE ? 0 : after_vector(matrix.at + (k0 + row) * matrix.p + w0);
    const int begin = w0 - off, end = begin + WIDE;
    // Beyond the last vector with elements of the line, that one again.
    const int from = begin + LEAST(lane, (matrix.end - 1 - begin) / VEC) * VEC;
    const bool takes_more = off > 0 && end < matrix.end && lane < TURNS;
    // Asked for here, so that they come while vectors do.
    T y_single[SINGLE][VEC] = {}, x_single[SINGLE] = {};
    if constexpr (!WHOLE) {
        UNROLL for (int i = 0; i < SINGLE; ++i) {
            const int p = at_ends(i * ROWS + row, 0, depth);
            if (p < k0 || p >= k1) continue;
            UNROLL for (int q = 0; q < VEC; ++q) y_single[i][q] =
                matrix.at[p * matrix.p + LEAST(w0 + lane * VEC + q, matrix.end - 1)];
            x_single[i] = vector.at[p * vector.p];
        }
    }
    const int first = WHOLE ? k0 : MOST(k0, VEC - 1);  // and last, to read by vectors
    const int last = WHOLE ? k1 : LEAST(k1, depth - (VEC - 1));
    Sum sum[VEC] = {}, sum_more[VEC] = {};
    auto steps = [&](int k, bool whole) {
        Vec y[AHEAD + MORE] = {};
        T x[AHEAD + MORE] = {};
        auto fetch = [&](int to, int i, int column) {
            const int p = k + i * ROWS + row;
            if (!whole && (p < first || p >= last)) return;
            stream<WHOLE>(y[to], matrix.at + p * matrix.p + column);
            x[to] = vector.at[p * vector.p];
        };
        UNROLL for (int i = 0; i < AHEAD; ++i) fetch(i, i, from);
        UNROLL for (int j = 0; j < MORE; ++j) {
            const int i = j * TURNS + lane;
            if (takes_more && i < AHEAD) fetch(AHEAD + j, i, end);
        }
        UNROLL for (int i = 0; i < AHEAD; ++i) {
            UNROLL for (int q = 0; q < VEC; ++q) sum[q] += wide(x[i]) * wide(y[i].x[q]);
        }
        UNROLL for (int i = AHEAD; i < AHEAD + MORE; ++i) {
            UNROLL for (int q = 0; q < VEC; ++q) sum_more[q] += wide(x[i]) * wide(y[i].x[q]);
        }
    };
    int k = k0;
    if (!WHOLE && k < first) {
        steps(k, false);
        k += AHEAD * ROWS;
    }
#pragma unroll 1
    for (; k + AHEAD * ROWS <= last; k += AHEAD * ROWS) steps(k, true);
#pragma unroll 1
    for (; k < last; k += AHEAD * ROWS) steps(k, false);
    if constexpr (!WHOLE) {  // gives each sum to the thread whose place it has
        Sum* const line = parts + row * WIDE;
        UNROLL for (int q = 0; q < VEC; ++q) {
            UNROLL for (int bit = 1; bit < TURNS; bit *= 2) sum_more[q] +=
                __shfl_xor_sync(~0u, sum_more[q], bit);
            const int place = lane * VEC + q - off;
            if (place >= 0) line[place] = sum[q];
            if (lane == 0 && q < off) line[WIDE - off + q] = sum_more[q];
        }
        __syncthreads();
        UNROLL for (int q = 0; q < VEC; ++q) {
            sum[q] = line[lane * VEC + q];
            UNROLL for (int i = 0; i < SINGLE; ++i) sum[q] +=
                wide(x_single[i]) * wide(y_single[i][q]);
        }
        __syncthreads();
    }
    UNROLL for (int q = 0; q < VEC; ++q) {
        UNROLL for (int bit = LANES; bit < 32; bit *= 2) sum[q] +=
            __shfl_xor_sync(~0u, sum[q], bit);
    }
    // Of warps with several rows the first one's lanes have it.
    if (threadIdx.x % 32 < LANES) {
        UNROLL for (int q = 0; q < VEC; ++q)
            parts[threadIdx.x / MOST(32, LANES) * WIDE + lane * VEC + q] = sum[q];
    }
}

// As sum_across, by single elements: of the lanes of a line side by side, so that they ask for as
// many bytes together.
__device__ __forceinline__ void sum_across_singly(const Operand& matrix, const Operand& vector,
                                                  int w0, int k0, int k1, Sum* parts) {
    const int lane = threadIdx.x % LANES, row = threadIdx.x / LANES;
    Sum sum[VEC] = {};
    int from[VEC];  // beyond the last one, that one again
    UNROLL for (int q = 0; q < VEC; ++q) from[q] = LEAST(w0 + q * LANES + lane, matrix.end - 1);
    auto steps = [&](int k, bool whole) {
        T y[FLY][VEC] = {}, x[FLY] = {};
        UNROLL for (int i = 0; i < FLY; ++i) {
            const int p = k + i * ROWS + row;
            if (!whole && p >= k1) continue;
            const T* const line = matrix.at + p * matrix.p;
            UNROLL for (int q = 0; q < VEC; ++q) y[i][q] = line[from[q]];
            x[i] = vector.at[p * vector.p];
        }
        UNROLL for (int i = 0; i < FLY; ++i) {
            UNROLL for (int q = 0; q < VEC; ++q) sum[q] += wide(x[i]) * wide(y[i][q]);
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
        if (threadIdx.x % 32 < LANES)
            parts[threadIdx.x / MOST(32, LANES) * WIDE + q * LANES + lane] = sum[q];
    }
}

// Adds up the `count` tiles in parts[count][WIDE] and stores the sum; or hands it in as a share,
// and the last block to come adds up the shares.
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
    __shared__ Sum parts[THREADS * VEC];  // a tile of each row, TILES_ALONG or TILES_ACROSS tiles
    const Operand a = lines_of_a(A, lda, m), b = lines_of_b(B, ldb, n);
    const bool column = n == 1, along = column ? !TRANS_A : TRANS_B;
    const Operand matrix = column ? a : b, vector = column ? b : a;
    const long long pitch = along ? matrix.x : matrix.p;
    const int length = along ? k : matrix.end;
    const bool vectors = aligned(matrix.at, pitch) && length % VEC == 0 &&
                         (!along || (vector.p == 1 && aligned(vector.at, 0)));

    const int tiles = (matrix.end + WIDE - 1) / WIDE, shares = gridDim.x / tiles;
    const int tile = blockIdx.x / shares, share = blockIdx.x - tile * shares, w0 = tile * WIDE;
    const int units = (k + UNIT - 1) / UNIT, least = units / shares, more = units - least * shares;
    const int first = run_begin(share, least, more);
    const int k0 = first * UNIT, k1 = LEAST(k, (first + run_length(share, least, more)) * UNIT);

    wait_for_launch_before();
    if (along) {
        if (vectors)
            sum_along<true>(matrix, vector, w0, k0, k1, parts);
        else
            sum_along<false>(matrix, vector, w0, k0, k1, parts);
    } else {
        if (vectors)
            sum_across<true>(matrix, vector, k, w0, k0, k1, parts);
        else if constexpr (SIZE == 2)
            sum_across<false>(matrix, vector, k, w0, k0, k1, parts);
        else
            sum_across_singly(matrix, vector, w0, k0, k1, parts);
    }
    finish(parts, along ? TILES_ALONG : TILES_ACROSS, tile, share, shares, workspace, flags,
           [&](int e, Sum sum) {
               if (w0 + e < matrix.end) store(w0 + e, sum);
           });
}
