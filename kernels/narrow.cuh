// What kernels for numbers of 16 bits share that multiply and add in float32, on ordinary cores.
#pragma once
typedef unsigned short T;
#include "numbers.cuh"
#include "vectors.cuh"

typedef float Sum;
#if DTYPE_bfloat16
__device__ __forceinline__ float wide(T x) { return from_bfloat(x); }
#else
__device__ __forceinline__ float wide(T x) { return from_half(x); }
#endif

// Of two words of two such numbers: the low halves, the high ones, and the 32 bits from bit
// `shift`, 0 or 16, on.
#ifdef HYBRID_GEMM_EMULATOR
__device__ inline unsigned low_pair(unsigned x, unsigned y) { return (x & 0xffff) | y << 16; }
__device__ inline unsigned high_pair(unsigned x, unsigned y) { return x >> 16 | (y & 0xffff0000u); }
__device__ inline unsigned from_bit(unsigned x, unsigned y, int shift) {
    return shift ? x >> shift | y << (32 - shift) : x;
}
#else
__device__ __forceinline__ unsigned low_pair(unsigned x, unsigned y) {
    return __byte_perm(x, y, 0x5410);
}
__device__ __forceinline__ unsigned high_pair(unsigned x, unsigned y) {
    return __byte_perm(x, y, 0x7632);
}
__device__ __forceinline__ unsigned from_bit(unsigned x, unsigned y, int shift) {
    return __funnelshift_r(x, y, shift);
}
#endif

// alpha * sum + beta * c, rounded; beta == 0 never reads c.
__device__ __forceinline__ Out result(const Out* c, float sum, float alpha, float beta) {
    const float product = alpha * sum;
    return narrowed(beta == 0 ? product : product + beta * widened(*c));
}
