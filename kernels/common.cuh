// What all kernels share: elements of op(A) and op(B), vectors of four, and the one store to C.
// The host defines T, SIZE (bytes of T), TRANS_A, TRANS_B (0 or 1) before this text.
#pragma once

// op(A)(i, p) and op(B)(p, j); offsets have 64 bits.
__device__ inline T a_at(const T* A, long long lda, long long i, long long p) {
    return TRANS_A ? A[p * lda + i] : A[i * lda + p];
}

__device__ inline T b_at(const T* B, long long ldb, long long p, long long j) {
    return TRANS_B ? B[j * ldb + p] : B[p * ldb + j];
}

// Four neighbours, moved by 16-byte loads and stores.
struct alignas(16) Vec4 {
    T x[4];
};

// Whether every row of a matrix begins on 16 bytes, so that it can be read as Vec4.
__device__ inline bool aligned(const T* matrix, long long ld) {
    return (unsigned long long)matrix % 16 == 0 && ld * SIZE % 16 == 0;
}

__device__ inline Vec4 operator+(Vec4 u, const Vec4& v) {
#pragma unroll
    for (int i = 0; i < 4; ++i) u.x[i] += v.x[i];
    return u;
}

__device__ inline Vec4 operator*(T factor, Vec4 v) {
#pragma unroll
    for (int i = 0; i < 4; ++i) v.x[i] *= factor;
    return v;
}

// alpha * sum + beta * c, for one element or a Vec4. beta == 0 never reads c: what was there, NaN
// included, is gone.
template <typename V>
__device__ inline V result(const V* c, V sum, T alpha, T beta) {
    if (beta == T(0)) return alpha * sum;
    return alpha * sum + beta * *c;
}

template <typename V>
__device__ inline void store(V* c, V sum, T alpha, T beta) {
    *c = result(c, sum, alpha, beta);
}
