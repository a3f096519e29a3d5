// How the blocks that share work learn which of them came last.
#pragma once
#include "runs.cuh"

// Counts this block in. Returns true in all threads of the last of `count` blocks, which then
// see what the other blocks wrote before, and sets the counter back to zero.
__device__ __forceinline__ bool last_of(unsigned* counter, int count) {
    __shared__ unsigned before;
    __syncthreads();  // one thread's release hands on what the whole block wrote
    if (threadIdx.x == 0) {
        before = count_in(counter);
        if (before == count - 1u) *counter = 0;
    }
    __syncthreads();
    const bool last = before == count - 1u;
    __syncthreads();  // `before` may be written again
    return last;
}
