// Products of warps on tensor cores behind a small function that has a plain form for the emulator.
// Operands are words of 32 bits: one TF32 number each, two numbers of 16 bits, or four of 8.
#pragma once
#include "numbers.cuh"
#include "shared_memory.cuh"

constexpr int THREADS = 256;

#if DTYPE_int8
typedef int Sum;  // which wraps around
#else
typedef float Sum;
#endif

#ifdef HYBRID_GEMM_EMULATOR

// The numbers of a word, in a type that holds their products, and the type in which these are
// added.
#if DTYPE_int8
constexpr int NUMBERS = 4;
typedef int Number;
typedef unsigned Total;
__device__ inline Number number(unsigned word, int i) { return (signed char)(word >> 8 * i); }
#elif DTYPE_float16
constexpr int NUMBERS = 2;
typedef double Number, Total;
__device__ inline Number number(unsigned word, int i) { return from_half(word >> 16 * i); }
#elif DTYPE_bfloat16
constexpr int NUMBERS = 2;
typedef double Number, Total;
__device__ inline Number number(unsigned word, int i) { return from_bfloat(word >> 16 * i); }
#else
constexpr int NUMBERS = 1;
typedef double Number, Total;
__device__ inline Number number(unsigned word, int) { return as_float(word); }
#endif

// sum (16 x 8) += a (16 x 8 words) b (8 words x 8). Lane 4 g + t has rows g and g + 8 of a in
// words t and t + 4, column g of b in the same words, and columns 2 t and 2 t + 1 of the sum.
__device__ inline void mma(Sum (&sum)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
    __shared__ Number numbers[THREADS][6][NUMBERS];
    Number(*const mine)[NUMBERS] = numbers[threadIdx.x];
    for (int w = 0; w < 6; ++w)
        for (int i = 0; i < NUMBERS; ++i) mine[w][i] = number(w < 4 ? a[w] : b[w - 4], i);
    __syncwarp();
    const int lane = threadIdx.x % 32, row = lane / 4, col = lane % 4 * 2;
    Number(*const warp)[6][NUMBERS] = numbers + threadIdx.x / 32 * 32;
    for (int i = 0; i < 4; ++i) {
        Total total = sum[i];
        for (int w = 0; w < 8; ++w) {
            const Number* const x = warp[row * 4 + w % 4][i / 2 + w / 4 * 2];
            const Number* const y = warp[(col + i % 2) * 4 + w % 4][4 + w / 4];
            Total added = x[0] * y[0];
            for (int j = 1; j < NUMBERS; ++j) added += x[j] * y[j];
            total += added;
        }
        sum[i] = total;
    }
    __syncwarp();
}

// Four matrices of 8 x 8 numbers of 16 bits in shared memory: lane 8 i + r gives where row r of the
// i-th begins, 16 bytes. Lane 4 g + t gets the numbers 2 t and 2 t + 1 of row g of each, or, where
// TRANSPOSED, of column g.
template <bool TRANSPOSED>
__device__ inline void load_matrices(unsigned (&words)[4], const unsigned short* row) {
    __shared__ const unsigned short* rows[THREADS];
    rows[threadIdx.x] = row;
    __syncwarp();
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    const unsigned short* const* const first = rows + threadIdx.x / 32 * 32;
    for (int i = 0; i < 4; ++i) {
        unsigned pair[2];
        for (int h = 0; h < 2; ++h)
            pair[h] = TRANSPOSED ? first[8 * i + 2 * t + h][g] : first[8 * i + g][2 * t + h];
        words[i] = pair[0] | pair[1] << 16;
    }
    __syncwarp();
}

#else

#define HELD "+f"
#if DTYPE_int8
#undef HELD
#define HELD "+r"
#define KIND "m16n8k32.row.col.s32.s8.s8.s32"
#elif DTYPE_float16
#define KIND "m16n8k16.row.col.f32.f16.f16.f32"
#elif DTYPE_bfloat16
#define KIND "m16n8k16.row.col.f32.bf16.bf16.f32"
#else
#define KIND "m16n8k8.row.col.f32.tf32.tf32.f32"
#endif

__device__ __forceinline__ void mma(Sum (&sum)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
    asm volatile("mma.sync.aligned." KIND
                 " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : HELD(sum[0]), HELD(sum[1]), HELD(sum[2]), HELD(sum[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

template <bool TRANSPOSED>
__device__ __forceinline__ void load_matrices(unsigned (&words)[4], const unsigned short* row) {
    const Shared at = shared_address(row);
    if constexpr (TRANSPOSED)
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                     : "r"(at)
                     : "memory");
    else
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                     : "r"(at)
                     : "memory");
}

#endif
