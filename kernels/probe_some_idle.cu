/*---
summary = "as aligned, but every third thread does nothing"
entry   = "probe_some_idle"
role    = "probe"
block   = ["256", "1", "1"]
grid    = ["ceil(n / 256)", "1", "1"]
dtypes  = ["float32"]
source  = "S4, the lecture: coalescing, 3M floats in blocks of 256 threads"
---*/
#include "probe.cuh"

extern "C" __global__ void __launch_bounds__(THREADS)
    probe_some_idle(int count, const T* __restrict__ src, T* __restrict__ dst) {
    const int i = thread_index();
    if (i < count && i % 3 != 2) dst[i] = src[i] + T(1);
}
