// Operands for the tensor cores: an fp32 matrix as the sum of two matrices of fewer bits, each
// row of op(A) and column of op(B) ("row" below) scaled by a power of two of its own.
// docs/tensor-cores.md says which split keeps what, and proves when it is taken.
#pragma once
#include "numbers.cuh"

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

// What one product leaves on the device.
struct State {
    int verdict;
    int taken[3];          // products so far, by verdict
    unsigned done;         // groups of rows that are packed
    unsigned hopeless;     // whether a row has shown that the fp16 split will not do
    unsigned worst[2][5];  // of A's rows, and of B's columns, by `Worst`
};

// Exponent of the leading bit; for subnormals the least there is.
__device__ inline int exponent_of(unsigned magnitude) {
    return magnitude >> 23 ? int(magnitude >> 23) - 127 : -149;
}

// Four neighbours in memory.
template <typename E>
struct alignas(4 * sizeof(E)) Four {
    E x[4];
};

// An operand as it lies: line after line. ALONG: a line is a row, and runs along k; otherwise
// a line has one k of all rows.
template <typename E, bool ALONG>
struct Source {
    const E* from;
    long long ld;
    int rows, k;

    __device__ bool vectors() const {
        return (unsigned long long)from % sizeof(Four<E>) == 0 && ld % 4 == 0;
    }
    // Four from (line, at) on; zeros beyond the matrix.
    __device__ Four<E> four(long long line, int at, bool vectors) const {
        const int lines = ALONG ? rows : k, length = ALONG ? k : rows;
        Four<E> out = {};
        if (line >= lines || at >= length) return out;
        const E* const p = from + line * ld + at;
        if (vectors && at + 4 <= length) return *(const Four<E>*)p;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if (at + i < length) out.x[i] = p[i];
        }
        return out;
    }
};
