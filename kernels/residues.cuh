// Float64 products by int8: rows of A and columns of B become integers, these their residues modulo
// pairwise coprime numbers, and products of residues give the product of the integers, by the
// Chinese remainder theorem. docs/fp64x.md has the arithmetic.
#pragma once

typedef unsigned long long u64;

constexpr int MOST_MODULI = 16;
constexpr int COLUMNS = 64;  // columns of B lie in groups of so many, in an order of their own
constexpr int LEVELS = 16;   // of magnitudes that are counted
constexpr int BIAS = -2147483647 - 1;  // sums of products begin here: their bytes are unsigned then

// What the device knows of a modulus p, one of the count whose product is P. The host makes it
// (devices/moduli.py). Weights are four signed bytes: residues of 256^0, 256^1, ... modulo p, by
// which bytes are multiplied.
struct Modulus {
    double part[3];        // P / p in three parts, from the highest
    unsigned a[2], b[2];   // weights of an integer's low and high four bytes; b's times (P / p)^-1
    int a_start, b_start;  // less what the bias of integers, 2^63, amounts to
    unsigned sum;          // weights of the bytes of a sum of products
    int sum_start;         // less what the bias of sums, 2^31, amounts to
    float p, inverse;
};

// What is decided of a product: how many moduli it takes, 0 where it is to be made natively, and
// bounds of the norms of scaled rows and columns, in eighths of log2.
struct Decision {
    int count, bits_a, bits_b;
};

// What is found of a row of A or a column of B ("row" in these files), over all of its k.
// Magnitudes are relative to 2^top, the power of two at or below the largest one.
struct Row {
    u64 squares, magnitudes;  // sums, in units of 2^-32
    unsigned count[LEVELS];   // elements within [2^(top - i), 2^(top - i + 1))
};
constexpr double UNIT = 4294967296;  // 2^32

// The power of two by which a row is scaled: its norm, at most 2^(norm / 8), comes to at most
// 2^(bits / 8).
__device__ __forceinline__ int shift_of(int bits, int norm) { return (bits - norm) >> 3; }

// Where column n of B lies: the tensor cores give a thread columns 8 j + 2 t and 8 j + 2 t + 1 for
// all j, so those are 16 neighbours.
__device__ __forceinline__ int place_of(int n) {
    return n / COLUMNS * COLUMNS + n / 2 % 8 * 8 + n / 16 % 4 * 2 + n % 2;
}

// Which column lies there.
__device__ __forceinline__ int column_of(int place) {
    return place / COLUMNS * COLUMNS + place / 2 % 4 * 16 + place / 8 % 8 * 2 + place % 2;
}

// 1.5 * 2^23. For whole x, |x| < 2^22, the bits of WHOLE + x are those of WHOLE, plus x. The starts
// of a `Modulus` have those of WHOLE in them, so sums from there on are such bits.
constexpr float WHOLE = 12582912;

#ifdef HYBRID_GEMM_EMULATOR
__device__ inline float float_of(int bits) { return __builtin_bit_cast(float, bits); }
__device__ inline unsigned bits_of(float x) { return __builtin_bit_cast(unsigned, x); }
__device__ inline int dot_bytes(unsigned bytes, unsigned weights, int sum) {
    for (int i = 0; i < 4; ++i)
        sum += int(bytes >> 8 * i & 255) * (signed char)(weights >> 8 * i & 255);
    return sum;
}
__device__ inline unsigned low_bytes(unsigned a, unsigned b, unsigned c, unsigned d) {
    return (a & 255) | (b & 255) << 8 | (c & 255) << 16 | d << 24;
}
__device__ inline float times_plus(float x, float y, float z) { return __builtin_fmaf(x, y, z); }
__device__ inline double real_of(u64 bits) { return __builtin_bit_cast(double, bits); }
__device__ inline long long nearest_integer(double x) { return __builtin_llrint(x); }
__device__ inline double nearest_whole(double x) { return __builtin_rint(x); }
__device__ inline double sqrt_of(double x) { return __builtin_sqrt(x); }
#else
__device__ __forceinline__ float float_of(int bits) { return __int_as_float(bits); }
__device__ __forceinline__ unsigned bits_of(float x) { return __float_as_uint(x); }
// sum + the four unsigned bytes times the four signed weights.
__device__ __forceinline__ int dot_bytes(unsigned bytes, unsigned weights, int sum) {
    int out;
    asm("dp4a.u32.s32 %0, %1, %2, %3;" : "=r"(out) : "r"(bytes), "r"(weights), "r"(sum));
    return out;
}
__device__ __forceinline__ unsigned low_bytes(unsigned a, unsigned b, unsigned c, unsigned d) {
    return __byte_perm(__byte_perm(a, b, 0x0040), __byte_perm(c, d, 0x0040), 0x5410);
}
__device__ __forceinline__ float times_plus(float x, float y, float z) {
    return __fmaf_rn(x, y, z);
}
__device__ __forceinline__ double real_of(u64 bits) { return __longlong_as_double(bits); }
__device__ __forceinline__ long long nearest_integer(double x) { return __double2ll_rn(x); }
__device__ __forceinline__ double nearest_whole(double x) { return rint(x); }
__device__ __forceinline__ double sqrt_of(double x) { return __dsqrt_rn(x); }
#endif

__device__ __forceinline__ double two_to(int exponent) {
    return real_of((u64)(exponent + 1023) << 52);
}

// A word whose low byte, signed, is x modulo p of least magnitude; `x` comes as the bits of
// WHOLE + x. What is rounded here moves the quotient by less than 2^-12, which is too little to
// take a remainder past half of p.
__device__ __forceinline__ unsigned remainder(int x, float p, float inverse) {
    const float biased = float_of(x);
    const float quotient = times_plus(biased - WHOLE, inverse, WHOLE) - WHOLE;
    return bits_of(times_plus(quotient, -p, biased));
}
