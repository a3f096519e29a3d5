// What the checks of products have in common: elements as they are summed, in groups of columns.
// Floating point is summed in float64, integers modulo 2^64; with READ = 2 the squares of any
// element's bits are, modulo 2^64.
#pragma once
#include "numbers.cuh"
#include "source.cuh"

#if READ == 2
#if SIZE == 8
typedef unsigned long long E;
#elif SIZE == 4
typedef unsigned E;
#else
typedef unsigned short E;
#endif
constexpr bool EXACT = true;
#elif DTYPE_float16 || DTYPE_bfloat16
typedef unsigned short E;
constexpr bool EXACT = false;
#else
typedef T E;
constexpr bool EXACT = T(1) / 2 == T(0);
#endif

template <bool exact>
struct SumOf {
    typedef double type;
};
template <>
struct SumOf<true> {
    typedef unsigned long long type;
};
typedef SumOf<EXACT>::type Sum;

// Two neighbours, read at once.
struct alignas(16) Two {
    Sum x[2];
};

// Four elements as they are read. They stay as words until they are summed: elements of 16 bits that
// are taken apart where they are read would be waited for there.
union Packed {
    unsigned long long words[sizeof(Four<E>) / 8];
    E x[4];
};

// As `Source::four`. WHOLE: lines are on vectors' addresses and of a multiple of four elements.
template <bool WHOLE, bool ALONG>
__device__ __forceinline__ Packed packed(const Source<E, ALONG>& source, long long line, int at,
                                         bool vectors) {
    Packed out = {};
    if (WHOLE) {
        const int lines = ALONG ? source.rows : source.k, length = ALONG ? source.k : source.rows;
        struct alignas(sizeof(Four<E>)) Words {
            unsigned long long x[sizeof(Four<E>) / 8];
        };
        if (line < lines && at < length) {
            const Words words = *(const Words*)(source.from + line * source.ld + at);
#pragma unroll
            for (int i = 0; i < (int)sizeof(Four<E>) / 8; ++i) out.words[i] = words.x[i];
        }
    } else {
        const Four<E> four = source.four(line, at, vectors);
#pragma unroll
        for (int i = 0; i < 4; ++i) out.x[i] = four.x[i];
    }
    return out;
}

__device__ __forceinline__ Sum number(E x) {
#if READ == 1 && DTYPE_float16
    return from_half(x);
#elif READ == 1 && DTYPE_bfloat16
    return from_bfloat(x);
#elif READ == 2 && SIZE == 8
    const Sum low = x & 0xffffffff, high = x >> 32;
    return low * low + high * high * 0x9e3779b97f4a7c15ull;
#elif READ == 2
    return Sum(x) * x;  // equal changes of several do not cancel
#else
    return Sum(x);
#endif
}

__device__ __forceinline__ void add(double& to, double x, double y) { to = fma(x, y, to); }
__device__ __forceinline__ void add(unsigned long long& to, unsigned long long x,
                                    unsigned long long y) {
    to += x * y;
}

__device__ __forceinline__ Sum over_warp(Sum x) {
#pragma unroll
    for (int lanes = 16; lanes; lanes /= 2) x += __shfl_xor_sync(~0u, x, lanes);
    return x;
}
