// Operands for the tensor cores: an fp32 matrix as the sum of two matrices of fewer bits, each
// row of op(A) and column of op(B) ("row" below) scaled by a power of two of its own.
// docs/tensor-cores.md says which split keeps what, and proves when it is taken.
#pragma once
#include "numbers.cuh"
#include "source.cuh"

constexpr int ROWS = 16, STEP = 256;           // a tile: rows by k
constexpr int WARPS = 8, MINE = ROWS / WARPS;  // of a block; rows of a thread, WARPS apart

// Where a row's largest magnitude is put: its exponent after scaling.
constexpr int TOP_FP16 = 14, TOP_TF32 = 50;

enum Verdict { FP16_SPLIT, TF32_SPLIT, STRICT };

// Largest and smallest nonzero magnitude of a row, as bits: they order as integers do.
// {0, ~0} where all is zero.
struct Extremes {
    unsigned largest, smallest;
};

__device__ inline Extremes merge(Extremes x, Extremes y) {
    return {max(x.largest, y.largest), min(x.smallest, y.smallest)};
}

// What the rows of an operand allow, each as the largest of a number that is 0 where nothing is
// known: exponents of the largest magnitudes of rows that are not zero, BIAS more and BIAS less
// them; exponents between a row's largest and smallest; elements of a row that are not within 2^-7
// of its largest; and those that the fp16 split would cut short.
enum Worst { HIGHEST, LOWEST, RANGE, SMALL, CUT };
constexpr int BIAS = 200;

// What one product, or one part of an operand that is split alone, leaves on the device.
struct State {
    int verdict;
    int taken[3];          // products so far, by verdict
    unsigned done;         // groups of rows that are packed
    unsigned hopeless;     // whether a row has shown that the fp16 split will not do
    unsigned worst[2][5];  // of A's rows, and of B's columns, by `Worst`
};

// docs/tensor-cores.md proves these rules. Where blocks gave up, rows have been counted in part, but
// the one that was hopeless is so already: 8 of its cut elements exceed k, and `large` cannot.
__device__ inline Verdict decide(const unsigned (&worst)[2][5], int k, int least_k_tf32) {
    const auto most = [&](int what) { return (int)max(worst[0][what], worst[1][what]); };
    const auto sum = [&](int what) { return (long long)worst[0][what] + worst[1][what]; };
    int doublings = 0;
    while (doublings < 31 && 1ll << doublings < k) ++doublings;
    const int highest[2] = {(int)worst[0][HIGHEST] - BIAS, (int)worst[1][HIGHEST] - BIAS};
    const bool none = !worst[0][HIGHEST] || !worst[1][HIGHEST];  // all of A or B is zero
    const bool moderate = most(LOWEST) - BIAS <= 76 && most(HIGHEST) - BIAS <= 96;
    if (!moderate || (!none && highest[0] + highest[1] + 2 + doublings > 127)) return STRICT;
    const long long large = (long long)k - sum(SMALL);
    if (sum(CUT) == 0 || 8 * sum(CUT) <= large) return FP16_SPLIT;
    const bool held = most(RANGE) <= 153 && sum(RANGE) <= 203;
    return held && k >= least_k_tf32 && doublings <= 24 ? TF32_SPLIT : STRICT;
}

// Elements of one part of a packed row: hi of a row lies before lo.
__device__ inline int pitch_of(int k) { return (k + 63) / 64 * 64; }

// Exponent of the leading bit; for subnormals the least there is.
__device__ inline int exponent_of(unsigned magnitude) {
    return magnitude >> 23 ? int(magnitude >> 23) - 127 : -149;
}

template <typename E>
struct Tile {
    alignas(16) E rows[ROWS][STEP + 4];
};

// Calls body(i, at, four) for the elements from k0 to k1, multiples of STEP, of ROWS rows from
// `row0` on: each thread has fours along k of rows w + WARPS i, w being the number of its warp.
// Zeros are beyond the matrix. Where memory runs across k, the tile turns it.
template <typename E, bool ALONG, typename Body>
__device__ __forceinline__ void for_each_four(const Source<E, ALONG>& source, int row0, int k0,
                                              int k1, Tile<E>& tile, Body body) {
    const bool vectors = source.vectors();
    const int t = threadIdx.x, warp = t / 32, lane = t % 32;
    constexpr int LINES = 64, FOURS = 4;  // lines of k at once, a thread's fours of a tile
    for (int k = k0; k < k1; k += STEP) {
        Four<E> four[FOURS];
#pragma unroll
        for (int x = 0; x < FOURS; ++x) {
            four[x] = ALONG ? source.four(row0 + warp + WARPS * (x / 2),
                                          k + 128 * (x % 2) + 4 * lane, vectors)
                            : source.four(k + t / 4 + LINES * x, row0 + t % 4 * 4, vectors);
        }
        if (!ALONG) {
            __syncthreads();  // all have read the tile before
#pragma unroll
            for (int x = 0; x < FOURS; ++x) {
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    tile.rows[t % 4 * 4 + i][t / 4 + LINES * x] = four[x].x[i];
            }
            __syncthreads();
#pragma unroll
            for (int x = 0; x < FOURS; ++x)
                four[x] =
                    *(const Four<E>*)&tile.rows[warp + WARPS * (x / 2)][128 * (x % 2) + 4 * lane];
        }
#pragma unroll
        for (int x = 0; x < FOURS; ++x) body(x / 2, k + 128 * (x % 2) + 4 * lane, four[x]);
    }
}
