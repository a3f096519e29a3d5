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

// The worst of `count` parts of an operand: A (0) or B (1).
__device__ inline void join(const State* parts, int count, int of_b, unsigned (&worst)[2][5]) {
    for (int part = threadIdx.x; part < count; part += 32) {
#pragma unroll
        for (int i = 0; i < 5; ++i)
            worst[of_b][i] = max(worst[of_b][i], parts[part].worst[of_b][i]);
    }
#pragma unroll
    for (int i = 0; i < 5; ++i) {
        for (int lanes = 1; lanes < 32; lanes *= 2)
            worst[of_b][i] = max(worst[of_b][i], __shfl_xor_sync(~0u, worst[of_b][i], lanes));
    }
}

extern "C" __global__ void __launch_bounds__(32)
    split_decide(const int* parts_a, int count_a, const int* parts_b, int count_b, int k,
                 int least_k_tf32, int* memory) {
    unsigned worst[2][5] = {};
    join((const State*)parts_a, count_a, 0, worst);
    join((const State*)parts_b, count_b, 1, worst);
    if (threadIdx.x != 0) return;
    State* const state = (State*)memory;
    state->verdict = decide(worst, k, least_k_tf32);
    ++state->taken[state->verdict];
}
