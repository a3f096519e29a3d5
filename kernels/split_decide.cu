/*---
summary = "the verdict on a product of operands whose parts were packed alone"
entry   = "split_decide"
role    = "decide"
params  = [{}]
block   = ["32", "1", "1"]
grid    = ["1", "1", "1"]
dtypes  = ["float32"]
source  = "this project: docs/tensor-cores.md"
---*/
#include "split.cuh"

// What `count` parts of an operand allow together, to every lane of the warp.
__device__ inline Summary together(const State* parts, int count, int k) {
    Summary all = no_rows(k);
    for (int i = threadIdx.x; i < count; i += 32) all = merge(all, parts[i].allowed);
    for (int lanes = 1; lanes < 32; lanes *= 2) {
        all = merge(
            all, {__shfl_xor_sync(~0u, all.highest, lanes), __shfl_xor_sync(~0u, all.lowest, lanes),
                  __shfl_xor_sync(~0u, all.range, lanes), __shfl_xor_sync(~0u, all.large, lanes),
                  __shfl_xor_sync(~0u, all.cut, lanes)});
    }
    return all;
}

extern "C" __global__ void __launch_bounds__(32)
    split_decide(const int* parts_a, int count_a, const int* parts_b, int count_b, int k,
                 int* memory) {
    const Summary a = together((const State*)parts_a, count_a, k);
    const Summary b = together((const State*)parts_b, count_b, k);
    if (threadIdx.x != 0) return;
    State* const state = (State*)memory;
    state->verdict = decide(a, b, k);
    ++state->taken[state->verdict];
}
