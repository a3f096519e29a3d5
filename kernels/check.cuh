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

// COUNT neighbours as they are read. They stay as words until they are summed: elements of 16 bits
// that are taken apart where they are read would be waited for there.
template <typename X, int COUNT>
union Packed {
    static constexpr int WORDS = COUNT * sizeof(X) / sizeof(unsigned);
    unsigned words[WORDS];
    X x[COUNT];
};

// COUNT neighbours in a line that begin at `at`, zeros beyond the matrix. WHOLE: lines begin on 16
// bytes and have a multiple of COUNT elements.
template <bool WHOLE, int COUNT, bool ALONG>
__device__ __forceinline__ Packed<E, COUNT> packed(const Source<E, ALONG>& source, long long line,
                                                   int at) {
    typedef Packed<E, COUNT> Found;
    constexpr int EACH = Found::WORDS < 4 ? Found::WORDS : 4;  // words that are read at once
    struct alignas(4 * EACH) Words {
        unsigned x[EACH];
    };
    Found found = {};
    const int lines = ALONG ? source.rows : source.k, length = ALONG ? source.k : source.rows;
    if (line >= lines || at >= length) return found;
    const E* const from = source.from + line * source.ld + at;
    if (WHOLE) {
#pragma unroll
        for (int i = 0; i < Found::WORDS; i += EACH) {
            const Words words = ((const Words*)from)[i / EACH];
#pragma unroll
            for (int j = 0; j < EACH; ++j) found.words[i + j] = words.x[j];
        }
    } else {
#pragma unroll
        for (int i = 0; i < COUNT; ++i)
            if (i < length - at) found.x[i] = from[i];
    }
    return found;
}

// Whether lines begin on 16 bytes and have a multiple of COUNT elements.
template <int COUNT, bool ALONG>
__device__ __forceinline__ bool is_whole(const Source<E, ALONG>& source) {
    return (unsigned long long)source.from % 16 == 0 && source.ld * sizeof(E) % 16 == 0 &&
           (ALONG ? source.k : source.rows) % COUNT == 0;
}

__device__ __forceinline__ Sum number(E x) {
#if READ == 1 && DTYPE_float16 && !defined(HYBRID_GEMM_EMULATOR)
    double wide;  // at once: by way of float32 it would take turns with float64
    asm("cvt.f64.f16 %0, %1;" : "=d"(wide) : "h"(x));
    return wide;
#elif READ == 1 && DTYPE_float16
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

// A weighted sum, and that of the squares of what it adds up, or of integers by other weights.
struct Pair {
    Sum sum, second;
};

__device__ __forceinline__ void take(Pair& to, E element, Sum weight) {
    const Sum x = number(element);
    if (EXACT) {
        // The second weight is of the upper half: the lowest bits of both differ.
        to.sum += x * weight;
        to.second += x * Sum((unsigned long long)weight >> 32);
    } else {
        to.sum += x * weight;
        add(to.second, x * weight, x * weight);
    }
}
