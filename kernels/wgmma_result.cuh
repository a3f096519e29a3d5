// From a warpgroup's sums to C: float32 from registers, 16 bits through boxes in shared memory,
// which a warp of its own hands to TMA while the next tile is multiplied. BM, BN, TERMS, OUT and
// DTYPE_* are the including file's.
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

// C of 16 bits in boxes of 64 x 64, swizzled by 128 bytes. Of a warpgroup's, LENT lie in the stage
// that was read last, the others beside the ring.
constexpr int BOX_BYTES = 64 * 128;
constexpr int BOXES = OUT == 2 ? BN / 64 : 0, LENT = BOXES > 2 ? 2 : 0;
constexpr int BESIDE_BYTES = BM / 64 * (BOXES - LENT) * BOX_BYTES;

struct Boxes {
    unsigned stage, beside;
    __device__ __forceinline__ unsigned at(int consumer, int j) const {
        return j < LENT ? stage + (consumer * LENT + j) * BOX_BYTES
                        : beside + (consumer * (BOXES - LENT) + j - LENT) * BOX_BYTES;
    }
};

// Named barriers: a warpgroup's boxes (LEFT + consumer) may be written again; all are written; the
// stage that is lent is read.
constexpr int LEFT = 8, WRITTEN = 11, READ = 12;

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

    // Whether lines begin on 16 bytes. TMA needs that of their ends too: it fills up the last 16.
    __device__ __forceinline__ bool vectors() const {
        return (ldc * OUT | (OUT == 2) * 2 * n | reinterpret_cast<u64>(C)) % 16 == 0;
    }

    // The warpgroup's 64 x BN at (row, col). Of each 8 columns a thread has a pair, in two rows.
    __device__ __forceinline__ void scale(float (&sums)[BN / 2], int row, int col) const {
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
    }

#if OUT == 4
    __device__ __forceinline__ void store(float (&sums)[BN / 2], int row, int col, int,
                                          Boxes) const {
        scale(sums, row, col);
        row += threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4;
        if (vectors() && col + BN <= n)
            write<true>(sums, row, col);
        else
            write<false>(sums, row, col);
    }

    // Neighbours trade pairs: each then has four columns of the even or of the odd eight.
    template <bool WHOLE>
    __device__ __forceinline__ void write(const float (&sums)[BN / 2], int row, int col) const {
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
    __device__ __forceinline__ void store(float (&sums)[BN / 2], int row, int col, int consumer,
                                          Boxes boxes) const {
        scale(sums, row, col);
        meet(LEFT + consumer, 128 + 32);
#pragma unroll
        for (int j = LENT; j < BOXES; ++j) put(sums, j, boxes.at(consumer, j));
        if (LENT) meet(READ, 2 * BM);
#pragma unroll
        for (int j = 0; j < LENT; ++j) put(sums, j, boxes.at(consumer, j));
        if (!vectors()) {
            __syncwarp();
            for (int j = 0; j < BOXES; ++j) copy(boxes.at(consumer, j), row, col + 64 * j);
        }
        written_for_copies();
        pass(WRITTEN, 2 * BM + 32);
    }

    // A warp's 16 rows of box j, from its sums.
    __device__ __forceinline__ static void put(const float (&sums)[BN / 2], int j, unsigned box) {
        const int lane = threadIdx.x % 32;
        const unsigned to = box + (threadIdx.x / 32 % 4 * 16 + lane % 16) * 128 +
                            (lane / 16 ^ lane % 8) * 16;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float* const x = sums + 32 * j + 8 * i;
            store_matrices(to ^ 32 * i, rounded(x[0], x[1]), rounded(x[2], x[3]),
                           rounded(x[4], x[5]), rounded(x[6], x[7]));
        }
    }

    // The same rows to C at (row, col) of the box, where TMA cannot.
    __device__ __forceinline__ void copy(unsigned box, int row, int col) const {
        const int lane = threadIdx.x % 32, first = threadIdx.x / 32 % 4 * 16;
#pragma unroll 4
        for (int r = first; r < min(first + 16, m - row); ++r) {
#pragma unroll
            for (int c = lane; c < 64; c += 32)
                if (col + c < n)
                    C[(row + r) * ldc + col + c] =
                        shared_half(box + r * 128 + (c / 8 ^ r % 8) * 16 + c % 8 * 2);
        }
    }

    // By the storing warp, whose one lane `stores`: the block's tile at (row, col), once written. Returns when the stage
    // that was lent is read; the rest is with the next `stores_wait`.
    __device__ __forceinline__ void leave(const TensorMap& map, int row, int col, Boxes boxes,
                                          bool stores) const {
        if (stores) stores_wait<0>();
        __syncwarp();
#pragma unroll
        for (int consumer = 0; consumer < BM / 64; ++consumer) pass(LEFT + consumer, 128 + 32);
        meet(WRITTEN, 2 * BM + 32);
        if (stores && vectors()) {
#pragma unroll
            for (int j = 0; j < BOXES; ++j) {
#pragma unroll
                for (int consumer = 0; consumer < BM / 64; ++consumer) {
                    const int r = row + 64 * consumer, c = col + 64 * j;
                    if (r < m && c < n) store_box(boxes.at(consumer, j), map, c, r, 0);
                }
                if (j + 1 == LENT) stores_commit();
            }
            stores_commit();
            stores_wait<1>();
        }
        __syncwarp();
    }
#endif
};
