/*---
summary = "as float3, but a block moves its elements in three aligned passes through shared memory"
entry   = "probe_float3_shared"
role    = "probe"
block   = ["256", "1", "1"]
grid    = ["ceil(n / 768)", "1", "1"]
dtypes  = ["float32"]
source  = "S4, the lecture: float3 through shared memory"
---*/
#include "probe.cuh"

// A thread's three elements lie 3 apart from its neighbour's in shared memory: 3 is odd, so a
// warp's accesses fall in distinct banks.
extern "C" __global__ void __launch_bounds__(THREADS)
    probe_float3_shared(int count, const T* __restrict__ src, T* __restrict__ dst) {
    __shared__ T part[3 * THREADS];
    const int t = threadIdx.x, first = blockIdx.x * 3 * THREADS;
#pragma unroll
    for (int x = t; x < 3 * THREADS; x += THREADS) {
        if (first + x < count) part[x] = src[first + x];
    }
    __syncthreads();
#pragma unroll
    for (int x = 0; x < 3; ++x) part[3 * t + x] += T(1);
    __syncthreads();
#pragma unroll
    for (int x = t; x < 3 * THREADS; x += THREADS) {
        if (first + x < count) dst[first + x] = part[x];
    }
}
