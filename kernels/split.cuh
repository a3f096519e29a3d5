// Operands for the tensor cores: an fp32 matrix as the sum of two matrices of fewer bits, each
// row of op(A) and column of op(B) ("row" below) scaled by a power of two of its own.
// docs/tensor-cores.md says which split keeps what, and proves when it is taken.
#pragma once
#include "numbers.cuh"
#include "source.cuh"

constexpr int STEP = 64;  // k of a tile of ROWS rows

// Where a row's largest magnitude is put: its exponent after scaling.
constexpr int TOP_FP16 = 14, TOP_TF32 = 50;

// What the TF32 split leaves out does not grow with k, and fp32's own error does: below this k it
// is the larger of the two.
constexpr int LEAST_K_TF32 = 512;

enum Verdict { FP16_SPLIT, TF32_SPLIT, STRICT };

// Largest and smallest nonzero magnitude of a row, as bits: they order as integers do.
// {0, ~0} where all is zero.
struct Extremes {
    unsigned largest, smallest;
};

__device__ inline Extremes merge(Extremes x, Extremes y) {
    return {max(x.largest, y.largest), min(x.smallest, y.smallest)};
}

// What the rows of one operand allow.
struct Summary {
    int highest, lowest;  // exponents of the largest magnitudes of rows that are not zero
    int range;            // most exponents between a row's largest and smallest
    int large;            // fewest elements of a row within 2^-7 of its largest
    int cut;              // most elements of a row that the fp16 split would cut short
};

__device__ inline Summary merge(const Summary& x, const Summary& y) {
    return {max(x.highest, y.highest), min(x.lowest, y.lowest), max(x.range, y.range),
            min(x.large, y.large), max(x.cut, y.cut)};
}

// What rows of zeros allow, of k elements each: everything.
__device__ inline Summary no_rows(int k) { return {-200, 200, 0, k, 0}; }

// What one product, or one part of an operand that is packed alone, leaves on the device.
struct State {
    int verdict;
    int taken[3];       // products so far, by verdict
    unsigned done;      // blocks that have packed
    unsigned hopeless;  // whether a row has shown that the fp16 split will not do
    Summary allowed;    // of an operand that was packed alone
    int unused;
};

// docs/tensor-cores.md proves these rules. Where blocks gave up, rows have been tallied in part,
// but the one that was hopeless is so already: 8 of its cut elements exceed k, and `large` cannot.
__device__ inline Verdict decide(const Summary& a, const Summary& b, int k) {
    int doublings = 0;
    while (doublings < 31 && 1ll << doublings < k) ++doublings;
    const bool moderate = min(a.lowest, b.lowest) >= -76 && max(a.highest, b.highest) <= 96;
    if (!moderate || a.highest + b.highest + 2 + doublings > 127) return STRICT;
    const long long cut = (long long)a.cut + b.cut, large = (long long)a.large + b.large - k;
    if (cut == 0 || 8 * cut <= large) return FP16_SPLIT;
    const bool held = max(a.range, b.range) <= 153 && a.range + b.range <= 203;
    return held && k >= LEAST_K_TF32 && doublings <= 24 ? TF32_SPLIT : STRICT;
}

// Exponent of the leading bit; for subnormals the least there is.
__device__ inline int exponent_of(unsigned magnitude) {
    return magnitude >> 23 ? int(magnitude >> 23) - 127 : -149;
}
