// C of few elements and a long k, for `dots` and `dots_narrow`: each element is a dot product, and
// reading A and B decides the time.
//
//   load, multiply   a thread takes every THREADS-th of the k of its block, and for each of them
//                    all of BM x BN products
//   add              the sums of all threads of a block; blocks share k (split-K, see shares.cuh):
//                    the last one to come adds the shares in a fixed order
//   store            writes C
//
//   BM       rows of C that a block computes
//   BN       columns of C that a block computes
//   THREADS  of a block
//   FLY      elements that a thread asks for before it multiplies the first
//   BLOCKS   blocks of the grid to aim at, by sharing k
//
// An operand that lies along k is read by neighbouring threads from neighbouring elements. Of one
// that lies across k a thread reads a row, by the largest pieces that all rows are made of.
//
// T is what the matrices hold, Sum what they are multiplied and added in; `wide` makes one of the
// other.
#pragma once
#include "early_launch.cuh"
#include "lines.cuh"
#include "shares.cuh"

constexpr int WARPS = THREADS / 32, TILE = BM * BN, TEAMS = MOST(1, THREADS / TILE);
constexpr int AHEAD = MOST(1, FLY / (BM + BN));  // k of a thread at once
constexpr int LEFT = MOST(1, TILE / 32);         // sums of a lane once its warp has added them up

// COUNT lines from `first` on, at one k: by pieces of EACH where they lie across k. Lines beyond
// the last are others again.
template <bool ACROSS, int EACH, int COUNT>
__device__ __forceinline__ void fetch(const Operand& from, int first, int k, T (&to)[COUNT]) {
    if constexpr (ACROSS) {
        constexpr int OF = LEAST(EACH, COUNT);
        const T* const row = from.at + k * from.p;
        UNROLL for (int q = 0; q < COUNT; q += OF) {
            const Piece<OF> piece =
                *reinterpret_cast<const Piece<OF>*>(row + LEAST(first + q, from.end - OF));
            UNROLL for (int e = 0; e < OF; ++e) to[q + e] = piece.x[e];
        }
    } else {
        UNROLL for (int q = 0; q < COUNT; ++q) to[q] = from.line(first + q)[k];
    }
}

// Adds this thread's products for k from k0 to k1.
template <int EACH>
__device__ __forceinline__ void multiply(const Operand& a, const Operand& b, int row, int col,
                                         int k0, int k1, Sum (&sum)[TILE]) {
    auto steps = [&](int k, bool whole) {
        T x[AHEAD][BM] = {}, y[AHEAD][BN] = {};
        UNROLL for (int i = 0; i < AHEAD; ++i) {
            const int p = k + i * THREADS;
            if (!whole && p >= k1) continue;
            fetch<TRANS_A, EACH>(a, row, p, x[i]);
            fetch<!TRANS_B, EACH>(b, col, p, y[i]);
        }
        UNROLL for (int i = 0; i < AHEAD; ++i) {
            UNROLL for (int r = 0; r < BM; ++r) {
                UNROLL for (int c = 0; c < BN; ++c) sum[r * BN + c] +=
                    wide(x[i][r]) * wide(y[i][c]);
            }
        }
    };
    int k = k0 + threadIdx.x;
#pragma unroll 1
    for (; k + (AHEAD - 1) * THREADS < k1; k += AHEAD * THREADS) steps(k, true);
#pragma unroll 1
    for (; k < k1; k += AHEAD * THREADS) steps(k, false);
}

// As `multiply`, by the largest pieces that the rows across k are made of.
template <int EACH>
__device__ __forceinline__ void multiply_by_pieces(const Operand& a, const Operand& b, int row,
                                                   int col, int k0, int k1, Sum (&sum)[TILE]) {
    if constexpr (EACH > 1 && (TRANS_A || !TRANS_B)) {
        const bool fit = (!TRANS_A || pieces<EACH>(a.at, a.p, a.end)) &&
                         (TRANS_B || pieces<EACH>(b.at, b.p, b.end));
        if (!fit) return multiply_by_pieces<EACH / 2>(a, b, row, col, k0, k1, sum);
        multiply<EACH>(a, b, row, col, k0, k1, sum);
    } else {
        multiply<1>(a, b, row, col, k0, k1, sum);
    }
}

// Adds up the sums of a warp's lanes, of which lanes that differ in `bit` take a half each. A lane
// is left with LEFT of TILE.
template <int HALF>
__device__ __forceinline__ void over_warp(Sum (&sum)[TILE], int bit) {
    if constexpr (HALF >= LEFT) {
        const bool upper = threadIdx.x & bit;
        UNROLL for (int i = 0; i < HALF; ++i) {
            const Sum low = sum[i], high = sum[i + HALF];
            sum[i] = (upper ? high : low) + __shfl_xor_sync(~0u, upper ? low : high, bit);
        }
        over_warp<HALF / 2>(sum, bit / 2);
    } else {
        for (; bit >= 1; bit /= 2) sum[0] += __shfl_xor_sync(~0u, sum[0], bit);
    }
}

// The block's tile of C = op(A) op(B). `store` takes a row, a column and the sum.
template <typename Store>
__device__ __forceinline__ void dot_products(int m, int n, int k, const T* A, long long lda,
                                             const T* B, long long ldb, Sum* workspace,
                                             unsigned* flags, const Store& store) {
    __shared__ Sum parts[MOST(WARPS, TEAMS) * TILE];
    const Operand a = lines_of_a(A, lda, m), b = lines_of_b(B, ldb, n);
    const int across = (n + BN - 1) / BN, tiles = (m + BM - 1) / BM * across;
    const int shares = gridDim.x / tiles;
    // Blocks side by side make other tiles of the same k, which is in the caches then.
    const int tile = blockIdx.x % tiles, share = blockIdx.x / tiles;
    const int row = tile / across * BM, col = tile % across * BN;
    const int units = (k + THREADS - 1) / THREADS, least = units / shares;
    const int more = units - least * shares, first = run_begin(share, least, more);
    const int k0 = first * THREADS;
    const int k1 = LEAST(k, (first + run_length(share, least, more)) * THREADS);

    wait_for_launch_before();
    Sum sum[TILE] = {};
    multiply_by_pieces<VEC>(a, b, row, col, k0, k1, sum);
    over_warp<TILE / 2>(sum, 16);
    const int lane = threadIdx.x % 32,
              place = TILE < 32 ? lane / (32 / LEAST(TILE, 32)) : lane * LEFT;
    UNROLL for (int i = 0; i < LEFT; ++i) parts[threadIdx.x / 32 * TILE + place + i] = sum[i];
    __syncthreads();
    auto total = [&](int count, int e) {
        Sum added = parts[e];
        UNROLL for (int i = 1; i < count; ++i) added += parts[i * TILE + e];
        return added;
    };
    auto put = [&](int e, Sum added) {
        if (row + e / BN < m && col + e % BN < n) store(row + e / BN, col + e % BN, added);
    };
    if (shares == 1) {
        for (int e = threadIdx.x; e < TILE; e += THREADS) put(e, total(WARPS, e));
        return;
    }
    Sum* const all = workspace + (long long)tile * shares * TILE;
    for (int e = threadIdx.x; e < TILE; e += THREADS) all[share * TILE + e] = total(WARPS, e);
    if (!last_of(flags + tile, shares)) return;
    add_shares<THREADS, TILE>(all, shares, parts);
    for (int e = threadIdx.x; e < TILE; e += THREADS) put(e, total(TEAMS, e));
}
