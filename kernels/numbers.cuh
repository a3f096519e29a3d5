// Numbers of 32, 16 and 11 bits, and powers of two, for the tensor cores: float32 as bits, TF32 and
// half precision rounded as the hardware does it, and the elements of C. A number of 16 bits is
// passed as an unsigned short.
#pragma once

constexpr unsigned INFINITE = 0x7f800000u;  // magnitudes from here on are Inf and NaN

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
#if __CUDA_ARCH__ >= 800
    unsigned short out;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(out) : "f"(x));
    return out;
#else
    const unsigned bits = as_bits(x);
    if ((bits & 0x7fffffff) > INFINITE) return 0x7fff;  // as the hardware does it
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
#endif
}

// x times 2^exponent, in two halves of one sign: what the product keeps, neither half loses.
__device__ __forceinline__ float scaled(float x, int exponent) {
    const int half = exponent >> 1;
    return x * power_of_two(half) * power_of_two(exponent - half);
}

// The elements of C:
//
//   OUT  bytes of an element of C: 4 is float32, 2 the type of the operands
#ifdef OUT
#if OUT == 4
typedef float Out;
__device__ __forceinline__ float widened(Out x) { return x; }
__device__ __forceinline__ Out narrowed(float x) { return x; }
#elif DTYPE_bfloat16
typedef unsigned short Out;
__device__ __forceinline__ float widened(Out x) { return from_bfloat(x); }
__device__ __forceinline__ Out narrowed(float x) { return to_bfloat(x); }
#else
typedef unsigned short Out;
__device__ __forceinline__ float widened(Out x) { return from_half(x); }
__device__ __forceinline__ Out narrowed(float x) { return to_half(x); }
#endif
#endif
