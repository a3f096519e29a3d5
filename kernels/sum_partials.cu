/*---
summary = "out = alpha * (partials[0] + partials[1] + ...) + beta * C, in that order, in one pass"
entry   = "sum_partials"
role    = "sum"
# BM, BN, ROWS: see elementwise.cuh
params  = [{BM = 32, BN = 128, ROWS = 8}]
block   = ["32", "ROWS", "1"]
grid    = ["ceil(n / BN)", "ceil(m / BM)", "1"]
require = ["BM % ROWS == 0", "BN % 128 == 0"]
source  = "S3, the lab report, improvements: sum on the device instead of in a critical section"
---*/
#include "elementwise.cuh"

// `partials` are `parts` matrices of rows x cols, all with leading dimension ldp. out may be C.
extern "C" __global__ void __launch_bounds__(32 * ROWS)
    sum_partials(int rows, int cols, int parts, T alpha, const T* const* partials, long long ldp,
                 T beta, const T* C, long long ldc, T* out, long long ldo) {
    unsigned long long bits = 0;  // of all addresses, so of the least aligned one
    for (int x = 0; x < parts; ++x) bits |= (unsigned long long)partials[x];
    const bool vectors =
        aligned((const T*)bits, ldp) && aligned(out, ldo) && (beta == T(0) || aligned(C, ldc));
    for_each(rows, cols, vectors, [&](long long i, long long j, auto sum) {
        using V = decltype(sum);
        const long long at = i * ldp + j;
        int x = 0;
        // Four loads in flight; the additions keep their order.
        for (; x + 4 <= parts; x += 4) {
            V part[4];
#pragma unroll
            for (int y = 0; y < 4; ++y) part[y] = *(const V*)(partials[x + y] + at);
#pragma unroll
            for (int y = 0; y < 4; ++y) sum = sum + part[y];
        }
        for (; x < parts; ++x) sum = sum + *(const V*)(partials[x] + at);
        sum = alpha * sum;
        if (beta != T(0)) sum = sum + beta * *(const V*)(C + i * ldc + j);
        *(V*)(out + i * ldo + j) = sum;
    });
}
