// What the probes of global memory share: thread i of a row of blocks, and its one addition.
// `count` elements of T; what a probe does to them is add 1 to each that it touches.
#pragma once
#include "common.cuh"

constexpr int THREADS = 256;

__device__ inline int thread_index() { return blockIdx.x * THREADS + threadIdx.x; }
