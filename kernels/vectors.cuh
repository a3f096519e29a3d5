// Vectors of 16 bytes and the edges of matrices, for `tuned`, its relatives, `cluster` and `vector`.
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

// c = alpha * sum + beta * c for neighbours in a row of C, from column c on of n, which lies at
// `to`; beta == 0 never reads C. `vectors`: whether C can be written by vectors.
__device__ __forceinline__ void store_vector(T* to, const Vec& sum, int c, int n, T alpha, T beta,
                                             bool vectors) {
    if (vectors && c + VEC <= n) {
        Vec v = {};
        if (beta != T(0)) v = *reinterpret_cast<Vec*>(to);
        UNROLL for (int q = 0; q < VEC; ++q) {
            const T product = alpha * sum.x[q];
            v.x[q] = beta == T(0) ? product : product + beta * v.x[q];
        }
        *reinterpret_cast<Vec*>(to) = v;
    } else {
        UNROLL for (int q = 0; q < VEC; ++q) {
            const T product = alpha * sum.x[q];
            if (c + q < n) to[q] = beta == T(0) ? product : product + beta * to[q];
        }
    }
}
