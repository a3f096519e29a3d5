/*---
summary = "a thread owns three neighbouring elements: three accesses, each 12 bytes apart in a warp"
entry   = "probe_float3"
role    = "probe"
block   = ["256", "1", "1"]
grid    = ["ceil(n / 768)", "1", "1"]
dtypes  = ["float32"]
source  = "S4, the lecture: an array of float3 read as it lies"
---*/
#include "probe.cuh"

extern "C" __global__ void __launch_bounds__(THREADS)
    probe_float3(int count, const T* __restrict__ src, T* __restrict__ dst) {
    const int i = 3 * thread_index();
    if (i + 3 > count) return;
#pragma unroll
    for (int x = 0; x < 3; ++x) dst[i + x] = src[i + x] + T(1);
}
