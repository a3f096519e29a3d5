// Operands for the tensor cores: an fp32 matrix as the sum of two matrices of fewer bits, each
// row of op(A) and column of op(B) ("row" below) scaled by a power of two of its own.
// docs/tensor-cores.md says which split keeps what.
#pragma once
#include "numbers.cuh"
#include "source.cuh"
#include "verdict.cuh"

// Where a row's largest magnitude is put: its exponent after scaling.
constexpr int TOP_FP16 = 14, TOP_TF32 = 50;

// Largest and smallest nonzero magnitude of a row, as bits: they order as integers do.
// {0, ~0} where all is zero.
struct Extremes {
    unsigned largest, smallest;
};

__device__ inline Extremes merge(Extremes x, Extremes y) {
    return {max(x.largest, y.largest), min(x.smallest, y.smallest)};
}

// Exponent of the leading bit; for subnormals the least there is.
__device__ inline int exponent_of(unsigned magnitude) {
    return magnitude >> 23 ? int(magnitude >> 23) - 127 : -149;
}
