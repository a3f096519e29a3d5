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

// What one product leaves on the device.
struct State {
    int verdict;
    int taken[3];       // products so far, by verdict
    unsigned done;      // blocks that have packed
    unsigned hopeless;  // whether a row has shown that the fp16 split will not do
};

// Exponent of the leading bit; for subnormals the least there is.
__device__ inline int exponent_of(unsigned magnitude) {
    return magnitude >> 23 ? int(magnitude >> 23) - 127 : -149;
}
