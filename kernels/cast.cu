/*---
summary = "dst = src, cast: stacks of matrices with any steps between their elements"
entry   = "cast"
role    = "cast"
# FROM  what elements of src are: see Number
# TO    and those of dst
params  = [{FROM = 9, TO = 11}]
block   = ["32", "8", "1"]
grid    = ["ceil(n / 128)", "min(ceil(m / 8), 65535)", "min(k, 65535)"]
require = ["FROM <= 14", "TO <= 14"]
dtypes  = ["float32"]
source  = "this project: docs/design.md, programs"
---*/
#include "numbers.cuh"

// A complex number.
template <typename R>
struct alignas(2 * sizeof(R)) Complex {
    R real, imag;
};

// The types of elements by their numbers. Of float16 and bfloat16 they are the bits.
template <int NUMBER>
struct Number;
#define NUMBER(number, type) \
    template <>              \
    struct Number<number> {  \
        typedef type Type;   \
    };
NUMBER(1, signed char)
NUMBER(2, unsigned char)
NUMBER(3, short)
NUMBER(4, unsigned short)
NUMBER(5, int)
NUMBER(6, unsigned)
NUMBER(7, long long)
NUMBER(8, unsigned long long)
NUMBER(9, unsigned short)   // float16
NUMBER(10, unsigned short)  // bfloat16
NUMBER(11, float)
NUMBER(12, double)
NUMBER(13, Complex<float>)
NUMBER(14, Complex<double>)
typedef Number<FROM>::Type From;
typedef Number<TO>::Type To;

__device__ inline auto value(From x) {
#if FROM == 9
    return from_half(x);
#elif FROM == 10
    return from_bfloat(x);
#else
    return x;
#endif
}

__device__ inline To made(From from) {
#if FROM == TO
    return from;
#elif FROM >= 13
    return {(decltype(To::real))from.real, (decltype(To::real))from.imag};
#elif TO == 9
    return to_half((float)value(from));
#elif TO == 10
    return to_bfloat((float)value(from));
#elif TO == 13
    return {(float)value(from), 0};
#elif TO == 14
    return {(double)value(from), 0};
#else
    return (To)value(from);
#endif
}

// Steps are in elements. Of the matrices of a stack, `inner` at a time lie one step apart. A warp
// takes neighbours along the columns, of which a thread has four.
extern "C" __global__ void __launch_bounds__(256)
    cast(int count, int inner, int rows, int cols, const void* __restrict__ src,
         long long src_outer, long long src_inner, long long src_row, long long src_col,
         void* __restrict__ dst, long long dst_outer, long long dst_inner, long long dst_row,
         long long dst_col) {
    const long long col0 = 128ll * blockIdx.x + threadIdx.x;
#pragma unroll 1
    for (long long s = blockIdx.z; s < count; s += gridDim.z) {
        const From* from = (const From*)src + s / inner * src_outer + s % inner * src_inner;
        To* to = (To*)dst + s / inner * dst_outer + s % inner * dst_inner;
#pragma unroll 1
        for (long long i = 8ll * blockIdx.y + threadIdx.y; i < rows; i += 8ll * gridDim.y) {
#pragma unroll
            for (int x = 0; x < 4; ++x) {
                const long long j = col0 + 32 * x;
                if (j < cols) to[i * dst_row + j * dst_col] = made(from[i * src_row + j * src_col]);
            }
        }
    }
}
