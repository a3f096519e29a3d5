// Sums in float32 that several blocks left of a product on tensor cores, added in their order, four
// neighbours of a row at a time, and what becomes of them in C.
#pragma once
#include "numbers.cuh"
#include "source.cuh"

__device__ __forceinline__ void add(Four<float>& sum, const Four<float>& more) {
#pragma unroll
    for (int i = 0; i < 4; ++i) sum.x[i] += more.x[i];
}

// The next `count` shares' four, each `apart` elements after the one before.
__device__ __forceinline__ Four<float> sum_of(const float* from, long long apart, int count) {
    Four<float> sum = {};
    int s = 0;
    for (; s + 4 <= count; s += 4) {  // four loads in flight; the additions keep their order
        Four<float> part[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) part[i] = *(const Four<float>*)(from + (s + i) * apart);
#pragma unroll
        for (int i = 0; i < 4; ++i) add(sum, part[i]);
    }
    for (; s < count; ++s) add(sum, *(const Four<float>*)(from + s * apart));
    return sum;
}

// Where sums go: C = alpha 2^(exponent_a[i] + exponent_b[j]) sums + beta C, of `cols` columns;
// without exponent_a no powers of two.
struct Sums {
    int cols;
    float alpha;
    const int *exponent_a, *exponent_b;
    float beta;
    Out* C;
    long long ldc;

    // Stores four sums at (row, col), as far as there are columns.
    __device__ __forceinline__ void store(Four<float>& sum, int row, int col) const {
        Out* const to = C + row * ldc + col;
        if (exponent_a) {
            const int of_row = exponent_a[row];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                if (col + i < cols) sum.x[i] = scaled(sum.x[i], of_row + exponent_b[col + i]);
            }
        }
        Four<Out> out;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float old = beta != 0 && col + i < cols ? beta * widened(to[i]) : 0;
            out.x[i] = narrowed(beta == 0 ? alpha * sum.x[i] : alpha * sum.x[i] + old);
        }
        if (col + 4 <= cols && ldc % 4 == 0 && (unsigned long long)C % sizeof(Four<Out>) == 0) {
            *(Four<Out>*)to = out;
            return;
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if (col + i < cols) to[i] = out.x[i];
        }
    }
};
