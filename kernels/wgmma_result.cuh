// From a warpgroup's sums to C: float32 from registers, 16 bits through a piece of shared memory
// that each warp has for itself. BN, TERMS, OUT and DTYPE_* are the including file's.
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

constexpr int PIECE_PITCH = 64 * 2 + 16;          // bytes; eight rows lie in different banks
constexpr int PIECE_BYTES = (OUT == 2) * 64 * PIECE_PITCH;  // a warpgroup's: 16 x 64 a warp

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
    __device__ __forceinline__ void store(float (&sums)[BN / 2], int row, int col,
                                          unsigned piece) const {
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
        if (OUT == 4 || alpha != 1) {  // with float32 that branch would make products wait
#pragma unroll
            for (int i = 0; i < BN / 2; ++i) sums[i] *= alpha;
        }
        if (beta != 0) {
#pragma unroll
            for (int i = 0; i < BN / 2; ++i) {
                const int r = row + i / 2 % 2 * 8, c = col + i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2;
                if (r < m && c < n) sums[i] += beta * widened(C[r * ldc + c]);
            }
        }
        const bool vectors = (ldc * OUT | reinterpret_cast<u64>(C)) % 16 == 0;
        row -= OUT == 2 ? threadIdx.x % 32 / 4 : 0;
        if (vectors && col + BN <= n)
            write<true>(sums, row, col, piece);
        else
            write<false>(sums, row, col, piece);
    }

#if OUT == 4
    // Neighbours trade pairs: each then has four columns of the even or of the odd eight.
    template <bool WHOLE>
    __device__ __forceinline__ void write(const float (&sums)[BN / 2], int row, int col,
                                          unsigned) const {
        const bool odd = threadIdx.x % 2;
        col += 8 * odd + threadIdx.x % 4 / 2 * 4;
#pragma unroll
        for (int half = 0; half < 2; ++half, row += 8) {
            float* const to = C + row * ldc + col;
#pragma unroll
            for (int j = 0; j < BN / 8; j += 2) {
                const float* const x = sums + 4 * j + 2 * half;  // the pairs: x[0], x[1]; x[4], x[5]
                const float send[2] = {odd ? x[0] : x[4], odd ? x[1] : x[5]};
                const float got[2] = {__shfl_xor_sync(~0u, send[0], 1),
                                      __shfl_xor_sync(~0u, send[1], 1)};
                float4 four;
                four.x = odd ? got[0] : x[0];
                four.y = odd ? got[1] : x[1];
                four.z = odd ? x[4] : got[0];
                four.w = odd ? x[5] : got[1];
                if (row >= m) continue;
                if constexpr (WHOLE) {
                    *reinterpret_cast<float4*>(to + 8 * j) = four;
                } else {
                    const float each[] = {four.x, four.y, four.z, four.w};
#pragma unroll
                    for (int e = 0; e < 4; ++e)
                        if (col + 8 * j + e < n) to[8 * j + e] = each[e];
                }
            }
        }
    }
#else
    // A warp writes 16 x 64 at a time into its piece, and reads whole lines of C there.
    template <bool WHOLE>
    __device__ __forceinline__ void write(const float (&sums)[BN / 2], int row, int col,
                                          unsigned piece) const {
        const int lane = threadIdx.x % 32;
        piece += threadIdx.x / 32 % 4 * 16 * PIECE_PITCH;
        const unsigned in = piece + lane % 16 * PIECE_PITCH + lane / 16 * 16;
        const unsigned out = piece + lane / 8 * PIECE_PITCH + lane % 8 * 16;
        row += lane / 8;
        col += lane % 8 * 8;
        Out* to = C + row * ldc + col;
#pragma unroll
        for (int c = 0; c < BN / 64; ++c, to += 64, col += 64) {
            __syncwarp();  // the piece is read
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const float* const x = sums + 32 * c + 8 * j;
                store_matrices(in + 32 * j, rounded(x[0], x[1]), rounded(x[2], x[3]),
                               rounded(x[4], x[5]), rounded(x[6], x[7]));
            }
            __syncwarp();
            uint4 all[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) all[i] = shared_vector(out + 4 * i * PIECE_PITCH);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                Out* const at = to + 4 * i * ldc;
                if (row + 4 * i >= m) continue;
                if constexpr (WHOLE) {
                    *reinterpret_cast<uint4*>(at) = all[i];
                } else {
                    const unsigned pairs[] = {all[i].x, all[i].y, all[i].z, all[i].w};
#pragma unroll
                    for (int e = 0; e < 8; ++e)
                        if (col + e < n) at[e] = static_cast<Out>(pairs[e / 2] >> e % 2 * 16);
                }
            }
        }
    }
#endif
};
