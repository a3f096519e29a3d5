// C of one long side whose other side is thin, and a short k, for `tall` and `tall_narrow`: memory
// decides the time.
//
//   load       the operand of the thin side, for all of k, to shared memory
//   multiply   a thread makes LINES lines of C, of THIN elements each, from as many lines of the
//              long operand
//   store      writes C: where its rows are short, through shared memory as they follow each other
//
//   THIN     elements of the thin side that there may be
//   LINES    lines of a thread, THREADS apart
//   THREADS  of a block
//
// T is what the matrices hold, Sum what they are multiplied and added in, Out what C holds; `wide`
// makes a Sum of a T.
#pragma once
#include "early_launch.cuh"
#include "lines.cuh"
#include "shared_memory.cuh"

constexpr int OF_BLOCK = THREADS * LINES;  // lines
constexpr int STEP = MOST(4, VEC);         // of k
// Elements of C stored at once: by the largest power of two that divides THIN, at most.
constexpr int OUT_VEC = LEAST(16 / (int)sizeof(Out), THIN & -THIN);

// The sums of this thread's lines from `first` on. Lines along k are read by pieces of EACH.
template <bool ALONG, int EACH>
__device__ __forceinline__ void multiply(const Operand& matrix, const Sum* thin, int first, int k,
                                         Sum (&sum)[LINES][THIN]) {
    const T* line[LINES];
    UNROLL for (int l = 0; l < LINES; ++l) line[l] = matrix.line(first + l * THREADS);
#pragma unroll 1
    for (int p = 0; p < k; p += STEP) {
        T y[LINES][STEP] = {};
        UNROLL for (int q = 0; q < STEP; q += EACH) {
            if (p + q >= k) break;
            UNROLL for (int l = 0; l < LINES; ++l) {
                if constexpr (ALONG) {
                    const Piece<EACH> piece =
                        *reinterpret_cast<const Piece<EACH>*>(line[l] + p + q);
                    UNROLL for (int e = 0; e < EACH; ++e) y[l][q + e] = piece.x[e];
                } else {
                    y[l][q] = line[l][(p + q) * matrix.p];
                }
            }
        }
        UNROLL for (int q = 0; q < STEP; ++q) {
            UNROLL for (int t = 0; t < THIN; ++t) {
                const Sum factor = thin[(p + q) * THIN + t];
                UNROLL for (int l = 0; l < LINES; ++l) sum[l][t] += wide(y[l][q]) * factor;
            }
        }
    }
}

// As `multiply`, by the largest pieces that lines along k are made of.
template <int EACH>
__device__ __forceinline__ void multiply_by_pieces(const Operand& matrix, const Sum* thin,
                                                   int first, int k, Sum (&sum)[LINES][THIN]) {
    if constexpr (EACH > 1) {
        if (!pieces<EACH>(matrix.at, matrix.x, k))
            return multiply_by_pieces<EACH / 2>(matrix, thin, first, k, sum);
    }
    multiply<true, EACH>(matrix, thin, first, k, sum);
}

// The block's lines of C = op(A) op(B), `value` is what to store for an element of C and its sum.
template <typename Value>
__device__ __forceinline__ void multiply_lines(int m, int n, int k, const T* A, long long lda,
                                               const T* B, long long ldb, Out* C, long long ldc,
                                               const Value& value) {
    DYNAMIC_SHARED(raw);
    Sum* const thin = reinterpret_cast<Sum*>(raw);  // [k and more, of zeros][THIN]
    Out* const tile = reinterpret_cast<Out*>(raw);  // [OF_BLOCK][width], later
    const Operand a = lines_of_a(A, lda, m), b = lines_of_b(B, ldb, n);
    const bool high = m >= n, along = high ? !TRANS_A : TRANS_B;
    const Operand matrix = high ? a : b, other = high ? b : a;
    const int begin = blockIdx.x * OF_BLOCK, first = begin + threadIdx.x, width = other.end;

    wait_for_launch_before();
    for (int e = threadIdx.x; e < (k + STEP - 1) / STEP * STEP * THIN; e += THREADS) {
        const int p = e / THIN, t = e % THIN;
        thin[e] = p < k && t < width ? wide(other.at[t * other.x + p * other.p]) : Sum(0);
    }
    __syncthreads();
    Sum sum[LINES][THIN] = {};
    if (along)
        multiply_by_pieces<VEC>(matrix, thin, first, k, sum);
    else
        multiply<false, 1>(matrix, thin, first, k, sum);

    auto each = [&](auto&& use) {  // elements of C of this thread
        UNROLL for (int l = 0; l < LINES; ++l) {
            if (first + l * THREADS >= matrix.end) break;
            UNROLL for (int t = 0; t < THIN; ++t) {
                if (t < width) use(l, t);
            }
        }
    };
    if (!high) {
        each([&](int l, int t) {
            Out* const to = C + t * ldc + first + l * THREADS;
            *to = value(to, sum[l][t]);
        });
        return;
    }
    auto row = [&](int l) { return C + (first + l * THREADS) * ldc; };
    const unsigned long long off = (unsigned long long)C | (width | ldc) * sizeof(Out);
    if (off % (OUT_VEC * sizeof(Out)) == 0) {  // whole vectors
        struct alignas(OUT_VEC * sizeof(Out)) {
            Out x[OUT_VEC];
        } v;
        each([&](int l, int t) {
            v.x[t % OUT_VEC] = value(row(l) + t, sum[l][t]);
            if (t % OUT_VEC == OUT_VEC - 1)
                *reinterpret_cast<decltype(v)*>(row(l) + t + 1 - OUT_VEC) = v;
        });
    } else if (ldc != width) {
        each([&](int l, int t) { row(l)[t] = value(row(l) + t, sum[l][t]); });
    } else {
        __syncthreads();
        each([&](int l, int t) {
            tile[(threadIdx.x + l * THREADS) * width + t] = value(row(l) + t, sum[l][t]);
        });
        __syncthreads();
        const int count = LEAST(OF_BLOCK, matrix.end - begin) * width;
        Out* const to = C + begin * ldc;
        if ((unsigned long long)C % 16 == 0) {
            struct alignas(16) Piece16 {
                Out x[16 / sizeof(Out)];
            };
            constexpr int OF = 16 / sizeof(Out);
            for (int e = threadIdx.x * OF; e + OF <= count; e += THREADS * OF)
                *reinterpret_cast<Piece16*>(to + e) = *reinterpret_cast<const Piece16*>(tile + e);
            for (int e = count / OF * OF + threadIdx.x; e < count; e += THREADS) to[e] = tile[e];
        } else {
            for (int e = threadIdx.x; e < count; e += THREADS) to[e] = tile[e];
        }
    }
}
