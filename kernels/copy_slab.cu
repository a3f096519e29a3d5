/*---
summary = "dst = src (rows x cols): a slab of columns into a compact matrix, or back"
entry   = "copy_slab"
role    = "copy"
# BM, BN, ROWS: see elementwise.cuh
params  = [{BM = 32, BN = 128, ROWS = 8}]
block   = ["32", "ROWS", "1"]
grid    = ["ceil(n / BN)", "ceil(m / BM)", "1"]
require = ["BM % ROWS == 0", "BN % 128 == 0"]
source  = "S3, the lab report, task 2, columns"
---*/
#include "elementwise.cuh"

extern "C" __global__ void __launch_bounds__(32 * ROWS)
    copy_slab(int rows, int cols, const T* __restrict__ src, long long lds, T* __restrict__ dst,
              long long ldd) {
    for_each(rows, cols, aligned(src, lds) && aligned(dst, ldd),
             [&](long long i, long long j, auto item) {
                 using V = decltype(item);
                 *(V*)(dst + i * ldd + j) = *(const V*)(src + i * lds + j);
             });
}
