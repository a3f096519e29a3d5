/*---
summary = "neighbouring threads touch elements STRIDE apart; all threads together touch all"
entry   = "probe_strided"
role    = "probe"
# STRIDE  elements from one thread's element to the next thread's
params  = [{STRIDE = 2}, {STRIDE = 4}, {STRIDE = 8}, {STRIDE = 16}, {STRIDE = 32}]
block   = ["256", "1", "1"]
grid    = ["ceil(n / 256)", "1", "1"]
dtypes  = ["float32"]
source  = "S4, the lecture: coalescing, 3M floats in blocks of 256 threads"
---*/
#include "probe.cuh"

// Column by column through the elements seen as rows of STRIDE: with STRIDE a divisor of count,
// every element is touched once.
extern "C" __global__ void __launch_bounds__(THREADS)
    probe_strided(int count, const T* __restrict__ src, T* __restrict__ dst) {
    const int t = thread_index(), rows = count / STRIDE;
    if (t >= rows * STRIDE) return;
    const int i = t % rows * STRIDE + t / rows;
    dst[i] = src[i] + T(1);
}
