/*---
summary = "dst = alpha * x + beta * y (rows x cols), in one pass; dst may be x or y; beta = 0 never reads y"
entry   = "combine"
role    = "combine"
# BM, BN, ROWS: see elementwise.cuh
params  = [{BM = 32, BN = 128, ROWS = 8}]
block   = ["32", "ROWS", "1"]
grid    = ["ceil(n / BN)", "ceil(m / BM)", "1"]
require = ["BM % ROWS == 0", "BN % 128 == 0"]
source  = "S3, the lab report, improvements: the sums and differences of Strassen's algorithm"
---*/
#include "elementwise.cuh"

extern "C" __global__ void __launch_bounds__(32 * ROWS)
    combine(int rows, int cols, T alpha, const T* x, long long ldx, T beta, const T* y,
            long long ldy, T* dst, long long ldd) {
    for_each(rows, cols, aligned(x, ldx) && aligned(y, ldy) && aligned(dst, ldd),
             [&](long long i, long long j, auto item) {
                 using V = decltype(item);
                 item = alpha * *(const V*)(x + i * ldx + j);
                 if (beta != T(0)) item = item + beta * *(const V*)(y + i * ldy + j);
                 *(V*)(dst + i * ldd + j) = item;
             });
}
