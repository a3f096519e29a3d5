// Operands for the tensor cores: an fp32 matrix as the sum of two matrices of fewer bits, each
// row of op(A) and column of op(B) ("row" below) scaled by a power of two of its own.
// docs/tensor-cores.md says which split keeps what, and proves when it is taken.
#pragma once

constexpr int ROWS = 64, STEP = 64;  // a tile: rows by k

constexpr unsigned INFINITE = 0x7f800000u;  // magnitudes from here on are Inf and NaN

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
    int taken[3];  // products so far, by verdict
    unsigned done;      // blocks that have packed
    unsigned hopeless;  // whether a row has shown that the fp16 split will not do
};

// Exponent of the leading bit; for subnormals the least there is.
__device__ inline int exponent_of(unsigned magnitude) {
    return magnitude >> 23 ? int(magnitude >> 23) - 127 : -149;
}

#ifdef HYBRID_GEMM_EMULATOR
__device__ inline float as_float(unsigned bits) { return __builtin_bit_cast(float, bits); }
__device__ inline unsigned as_bits(float x) { return __builtin_bit_cast(unsigned, x); }

// To the nearest half, ties to even, as cvt.rn.f16.f32.
__device__ inline unsigned short to_half(float x) {
    const unsigned bits = as_bits(x), sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
    if (magnitude > INFINITE) return sign | 0x7fff;
    if (magnitude >= 0x47800000u) return sign | 0x7c00;  // 2^16 and beyond
    const int exponent = int(magnitude >> 23) - 127;
    if (exponent < -25) return sign;
    const int drop = exponent < -14 ? -1 - exponent : 13;
    const unsigned mantissa = (magnitude & 0x7fffff) | 0x800000, half = 1u << (drop - 1);
    unsigned kept = mantissa >> drop;
    const unsigned rest = mantissa & ((1u << drop) - 1);
    if (rest > half || (rest == half && kept & 1)) ++kept;
    return sign | (exponent < -14 ? kept : kept + ((exponent + 14) << 10));
}
__device__ inline float from_half(unsigned short half) {
    const unsigned magnitude = half & 0x7fff, sign = (half & 0x8000u) << 16;
    const float x = magnitude >= 0x7c00 ? as_float(magnitude << 13 | INFINITE)
                    : magnitude < 0x400 ? magnitude * as_float(103u << 23)  // times 2^-24
                                        : as_float((magnitude << 13) + (112u << 23));
    return as_float(as_bits(x) | sign);
}
#else
__device__ inline float as_float(unsigned bits) { return __uint_as_float(bits); }
__device__ inline unsigned as_bits(float x) { return __float_as_uint(x); }
__device__ inline unsigned short to_half(float x) {
    unsigned short half;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(half) : "f"(x));
    return half;
}
__device__ inline float from_half(unsigned short half) {
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(half));
    return x;
}
#endif

__device__ inline float power_of_two(int exponent) { return as_float((exponent + 127) << 23); }

// To the nearest TF32, ties to even, as the copy engine does; the low 13 bits are zero.
__device__ inline unsigned to_tf32(float x) {
    const unsigned bits = as_bits(x), magnitude = bits & 0x7fffffff;
    if (magnitude >= INFINITE) return magnitude > INFINITE ? bits | 0x400000 : bits;
    return (bits + 0xfff + (bits >> 13 & 1)) & ~0x1fffu;
}

__device__ inline float from_bfloat(unsigned short x) { return as_float((unsigned)x << 16); }

// To the nearest bfloat16, ties to even.
__device__ inline unsigned short to_bfloat(float x) {
    const unsigned bits = as_bits(x);
    if ((bits & 0x7fffffff) > INFINITE) return bits >> 16 | 0x40;
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
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
