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

// alpha * sum + beta * c, rounded; beta == 0 never reads c.
__device__ __forceinline__ Out result(const Out* c, float sum, float alpha, float beta) {
    const float product = alpha * sum;
    return narrowed(beta == 0 ? product : product + beta * widened(*c));
}
