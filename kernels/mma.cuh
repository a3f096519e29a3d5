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

// What a word of A and a word of B add to a sum.
__device__ inline double times(unsigned a, unsigned b) {
#if DTYPE_int8
    int sum = 0;
    for (int i = 0; i < 32; i += 8) sum += (signed char)(a >> i) * (signed char)(b >> i);
    return sum;
#elif DTYPE_float16
    return (double)from_half(a) * from_half(b) + (double)from_half(a >> 16) * from_half(b >> 16);
#elif DTYPE_bfloat16
    return (double)from_bfloat(a) * from_bfloat(b) +
           (double)from_bfloat(a >> 16) * from_bfloat(b >> 16);
#else
    return (double)as_float(a) * as_float(b);
#endif
}

#if DTYPE_int8
__device__ inline Sum rounded(double x) { return (int)(unsigned)(long long)x; }
#else
__device__ inline Sum rounded(double x) { return x; }
#endif

// sum (16 x 8) += a (16 x 8 words) b (8 words x 8). Lane 4 g + t has rows g and g + 8 of a in
// words t and t + 4, column g of b in the same words, and columns 2 t and 2 t + 1 of the sum.
__device__ inline void mma(Sum (&sum)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
    __shared__ unsigned words[THREADS][6];
    const int first = threadIdx.x / 32 * 32, lane = threadIdx.x % 32;
    for (int i = 0; i < 6; ++i) words[threadIdx.x][i] = i < 4 ? a[i] : b[i - 4];
    __syncwarp();
    for (int i = 0; i < 4; ++i) {
        const int row = lane / 4, col = lane % 4 * 2 + i % 2;
        double total = sum[i];
        for (int w = 0; w < 8; ++w)
            total += times(words[first + row * 4 + w % 4][i / 2 + w / 4 * 2],
                           words[first + col * 4 + w % 4][4 + w / 4]);
        sum[i] = rounded(total);
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

#endif
