// An operand as lines along k, for kernels of products with a small side: `gemv`, `vector`, `dots`,
// `tall`, `outer` and `skinny`. A line of op(A) is a row of it, and one of op(B) a column.
#pragma once
#include "vectors.cuh"

// `end` lines, from one to the next `x` elements and from k to k `p`, of which one is 1.
struct Operand {
    const T* at;
    long long x, p;
    int end;

    // The line i, or the last one for those beyond.
    __device__ __forceinline__ const T* line(int i) const { return at + LEAST(i, end - 1) * x; }
};

__device__ __forceinline__ Operand lines_of_a(const T* A, long long lda, int m) {
    return {A, TRANS_A ? 1 : lda, TRANS_A ? lda : 1, m};
}
__device__ __forceinline__ Operand lines_of_b(const T* B, long long ldb, int n) {
    return {B, TRANS_B ? ldb : 1, TRANS_B ? 1 : ldb, n};
}

// How many elements after a vector `at` lies.
__device__ __forceinline__ int after_vector(const T* at) {
    return (unsigned long long)at / SIZE % VEC;
}
// How many elements before one.
__device__ __forceinline__ int before_vector(const T* at) { return (VEC - after_vector(at)) % VEC; }

// EACH neighbours in memory, read at once.
template <int EACH>
struct alignas(EACH* SIZE) Piece {
    T x[EACH];
};

// Whether rows of `length` elements from `pitch` to `pitch` are whole pieces of EACH.
template <int EACH>
__device__ __forceinline__ bool pieces(const T* at, long long pitch, int length) {
    return ((unsigned long long)at | pitch * SIZE | (long long)length * SIZE) % (EACH * SIZE) == 0;
}
