// From a warpgroup's sums to C, from registers. BN, TERMS, OUT and DTYPE_* are the including
// file's.
#pragma once

#if OUT == 4
typedef float Out;
#else
typedef unsigned short Out;
#endif

__device__ __forceinline__ float power_of_two(int e) { return __int_as_float((e + 127) << 23); }

__device__ __forceinline__ float widened(Out x) {
#if OUT == 4
    return x;
#elif DTYPE_bfloat16
    return __int_as_float(static_cast<unsigned>(x) << 16);
#else
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x));
    return y;
#endif
}

__device__ __forceinline__ unsigned rounded(float first, float second) {  // to two of 16 bits
    unsigned pair;
#if DTYPE_bfloat16
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
#else
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
#endif
    return pair;
}

constexpr int WIDE = 16 / OUT;  // elements of C that a thread writes at once

struct Vector {
    union {
        uint4 all;
        Out each[WIDE];
    };
};

// The power of two in halves of one sign: what the product keeps, no half loses.
__device__ __forceinline__ float scaled(float x, int exponent) {
    const int half = exponent >> 1;
    return x * power_of_two(half) * power_of_two(exponent - half);
}

struct Result {
    int m, n;
    float alpha, beta;
    const int *exponent_a, *exponent_b;
    Out* C;
    long long ldc;

    // The warpgroup's 64 x BN at (row, col). Of each 8 columns a thread has a pair, in two rows.
    __device__ __forceinline__ void store(float (&sums)[BN / 2], int row, int col) const {
        row += threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4;
        if (TERMS == 3 && exponent_a) {
            int of_rows[2] = {};
#pragma unroll
            for (int half = 0; half < 2; ++half)
                if (row + 8 * half < m) of_rows[half] = exponent_a[row + 8 * half];
#pragma unroll
            for (int i = 0; i < BN / 2; i += 4) {
#pragma unroll
                for (int j = 0; j < 2; ++j) {
                    const int c = col + 2 * i + threadIdx.x % 4 * 2 + j;
                    const int of_col = c < n ? exponent_b[c] : 0;
                    sums[i + j] = scaled(sums[i + j], of_rows[0] + of_col);
                    sums[i + j + 2] = scaled(sums[i + j + 2], of_rows[1] + of_col);
                }
            }
        }
#pragma unroll
        for (int i = 0; i < BN / 2; ++i) sums[i] *= alpha;
        if (beta != 0) {
#pragma unroll
            for (int i = 0; i < BN / 2; ++i) {
                const int r = row + i / 2 % 2 * 8, c = col + i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2;
                if (r < m && c < n) sums[i] += beta * widened(C[r * ldc + c]);
            }
        }
        const bool vectors = (ldc * OUT | reinterpret_cast<u64>(C)) % 16 == 0;
        if (vectors && col + BN <= n)
            write<true>(sums, row, col);
        else
            write<false>(sums, row, col);
    }

    // The threads of a row trade their pairs for WIDE columns in a row each.
    template <bool WHOLE>
    __device__ __forceinline__ void write(const float (&sums)[BN / 2], int row, int col) const {
        const bool odd = threadIdx.x % 2, upper = threadIdx.x % 4 / 2;
        col += OUT == 4 ? 8 * odd + 4 * upper : 8 * odd + 16 * upper;
#pragma unroll
        for (int half = 0; half < 2; ++half, row += 8) {
            Out* const to = C + row * ldc + col;
#pragma unroll
            for (int j = 0; j < BN / 8; j += WIDE / 2) {
                const float* const x = sums + 4 * j + 2 * half;  // pair i is x[4 i], x[4 i + 1]
                uint4 all;
#if OUT == 4
                const float send[2] = {odd ? x[0] : x[4], odd ? x[1] : x[5]};
                const float got[2] = {__shfl_xor_sync(~0u, send[0], 1), __shfl_xor_sync(~0u, send[1], 1)};
                all.x = __float_as_uint(odd ? got[0] : x[0]);
                all.y = __float_as_uint(odd ? got[1] : x[1]);
                all.z = __float_as_uint(odd ? x[4] : got[0]);
                all.w = __float_as_uint(odd ? x[5] : got[1]);
#else
                unsigned two[2][2];  // pairs beside each other, of columns j + 2 i + odd
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    const unsigned a = rounded(x[8 * i], x[8 * i + 1]);
                    const unsigned b = rounded(x[8 * i + 4], x[8 * i + 5]);
                    const unsigned got = __shfl_xor_sync(~0u, odd ? a : b, 1);
                    two[i][0] = odd ? got : a;
                    two[i][1] = odd ? b : got;
                }
                const unsigned got[2] = {__shfl_xor_sync(~0u, upper ? two[0][0] : two[1][0], 2),
                                         __shfl_xor_sync(~0u, upper ? two[0][1] : two[1][1], 2)};
                all.x = upper ? got[0] : two[0][0];
                all.y = upper ? got[1] : two[0][1];
                all.z = upper ? two[1][0] : got[0];
                all.w = upper ? two[1][1] : got[1];
#endif
                if (row >= m) continue;
                if constexpr (WHOLE) {
                    *reinterpret_cast<uint4*>(to + 8 * j) = all;
                } else {
                    Vector v;
                    v.all = all;
#pragma unroll
                    for (int i = 0; i < WIDE; ++i)
                        if (col + 8 * j + i < n) to[8 * j + i] = v.each[i];
                }
            }
        }
    }
};
