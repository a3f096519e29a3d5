// Vectors of 16 bytes and the edges of matrices.
//
// A kernel reads an operand by vectors where no vector can cross the operand's edge: every row in
// memory begins on 16 bytes and is a whole number of vectors long. Otherwise it reads elements.
// Beyond the last row or column of C it reads that last one again, or takes zeros: the sums that
// come of it are never stored, and no load needs a branch.
#pragma once
#include "common.cuh"

#ifdef HYBRID_GEMM_EMULATOR
#define UNROLL
#else
#define UNROLL _Pragma("unroll")
#endif
#define LEAST(a, b) ((a) < (b) ? (a) : (b))  // min and max that constants can be made of
#define MOST(a, b) ((a) > (b) ? (a) : (b))

constexpr int VEC = 16 / SIZE;  // elements of a vector

struct alignas(16) Vec {
    T x[VEC];
};

__device__ __forceinline__ void add(Vec& sum, const Vec& v) {
    UNROLL for (int q = 0; q < VEC; ++q) sum.x[q] += v.x[q];
}

// Whether both operands can be read by vectors. A macro, since a function that returns this costs
// `deep` and `cluster` instructions: the compiler keeps its result instead of branching.
#define VECTORS_FIT(m, n, k, A, lda, B, ldb)                               \
    (aligned(A, lda) && aligned(B, ldb) && (TRANS_A ? m : k) % VEC == 0 && \
     (TRANS_B ? k : n) % VEC == 0)

// Neighbours in a row of C as they were, from column c on of n, which lie at `from`.
__device__ __forceinline__ Vec old_vector(const T* from, int c, int n, bool vectors) {
    if (vectors && c + VEC <= n) return *reinterpret_cast<const Vec*>(from);
    Vec v = {};
    UNROLL for (int q = 0; q < VEC; ++q) if (c + q < n) v.x[q] = from[q];
    return v;
}

// c = alpha * sum + beta * old for neighbours in a row of C, from column c on of n, which lies at
// `to`; beta == 0 takes nothing of what was there. `vectors`: whether C can be written by vectors.
__device__ __forceinline__ void store_vector(T* to, const Vec& sum, const Vec& old, int c, int n,
                                             T alpha, T beta, bool vectors) {
    Vec v;
    UNROLL for (int q = 0; q < VEC; ++q) {
        const T product = alpha * sum.x[q];
        v.x[q] = beta == T(0) ? product : product + beta * old.x[q];
    }
    if (vectors && c + VEC <= n) {
        *reinterpret_cast<Vec*>(to) = v;
    } else {
        UNROLL for (int q = 0; q < VEC; ++q) if (c + q < n) to[q] = v.x[q];
    }
}

// The same, of C as it is.
__device__ __forceinline__ void store_vector(T* to, const Vec& sum, int c, int n, T alpha, T beta,
                                             bool vectors) {
    const Vec old = beta == T(0) ? Vec{} : old_vector(to, c, n, vectors);
    store_vector(to, sum, old, c, n, alpha, beta, vectors);
}
