/*---
summary = "dst = the transpose of src (rows x cols), through tiles in shared memory"
entry   = "transpose"
role    = "transpose"
# TILE  rows and columns that a block transposes
# ROWS  rows that it copies at once: threads of a block along y
params  = [{TILE = 32, ROWS = 8}]
block   = ["TILE", "ROWS", "1"]
grid    = ["ceil(n / TILE)", "ceil(m / TILE)", "1"]
require = ["TILE % ROWS == 0", "SIZE * TILE * (TILE + 1) <= 49152"]
source  = "S3, the lab report, improvements; S4, the lecture: coalescing through shared memory"
---*/
#include "common.cuh"

extern "C" __global__ void __launch_bounds__(TILE * ROWS)
    transpose(int rows, int cols, const T* __restrict__ src, long long lds, T* __restrict__ dst,
              long long ldd) {
    __shared__ T tile[TILE][TILE + 1];  // the odd pitch puts a column in distinct banks
    const int tx = threadIdx.x, ty = threadIdx.y;
    const unsigned row0 = blockIdx.y * TILE, col0 = blockIdx.x * TILE;
#pragma unroll
    for (int r = ty; r < TILE; r += ROWS) {
        if (row0 + r < rows && col0 + tx < cols) {
            tile[r][tx] = src[(row0 + r) * lds + col0 + tx];
        }
    }
    __syncthreads();
#pragma unroll
    for (int c = ty; c < TILE; c += ROWS) {
        if (col0 + c < cols && row0 + tx < rows) {
            dst[(col0 + c) * ldd + row0 + tx] = tile[tx][c];
        }
    }
}
