/*---
summary = "thread i reads and writes element i + 1: a warp straddles two lines"
entry   = "probe_misaligned"
role    = "probe"
block   = ["256", "1", "1"]
grid    = ["ceil(n / 256)", "1", "1"]
dtypes  = ["float32"]
source  = "S4, the lecture: coalescing, 3M floats in blocks of 256 threads"
---*/
#include "probe.cuh"

extern "C" __global__ void __launch_bounds__(THREADS)
    probe_misaligned(int count, const T* __restrict__ src, T* __restrict__ dst) {
    const int i = thread_index() + 1;
    if (i < count) dst[i] = src[i] + T(1);
}
