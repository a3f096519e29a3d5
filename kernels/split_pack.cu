/*---
summary = "op(A) and op(B) packed for the tensor cores: rows along k, or as they lie, padded with zeros"
entry   = "split_pack"
role    = "pack"
# SLICE  of k, that a block packs of 16 rows
params  = [{SLICE = 1024}, {SLICE = 256}]
block   = ["256", "1", "1"]
grid    = ["ceil(m / 16) + ceil(n / 16)", "max(1, ceil(k / SLICE))", "1"]
early   = true
require = ["SLICE % 256 == 0"]
dtypes  = ["float16", "tfloat32"]
source  = "this project: docs/tensor-cores.md"
---*/
#include "early_launch.cuh"
#include "split_rows.cuh"

// float32 is rounded to TF32 (tfloat32), and operands of 16 bits are copied as they are (float16).
// Matrices whose lines keep their order are given as rows along k: m and n lines, of k_a and k_b.
template <bool TWO_BYTES>
struct Bits {
    typedef unsigned Type;
};
template <>
struct Bits<true> {
    typedef unsigned short Type;
};
typedef Bits<SIZE == 2>::Type E;

template <bool ALONG>
__device__ inline void pack(const Source<E, ALONG>& source, int row0, E* parts, Tile<E>& tile) {
    const int pitch = pitch_of(source.k), row = row0 + threadIdx.x / 32;
    const int steps = (source.k + STEP - 1) / STEP * STEP, k0 = blockIdx.y * SLICE;
    for_each_four(source, row0, k0, min(steps, k0 + SLICE), tile, [&](int i, int k, Four<E> four) {
#pragma unroll
        for (int x = 0; SIZE == 4 && x < 4; ++x) four.x[x] = to_tf32(as_float(four.x[x]));
        if (row + WARPS * i >= source.rows || k >= pitch) return;
        *(Four<E>*)(parts + (long long)(row + WARPS * i) * pitch + k) = four;
    });
}

extern "C" __global__ void __launch_bounds__(256)
    split_pack(int m, int n, int k_a, int k_b, const void* A, long long lda, const void* B,
               long long ldb, void* parts_a, void* parts_b) {
    __shared__ Tile<E> tile;
    wait_for_launch_before();
    for_group<E, ROWS>(blockIdx.x, m, n, k_a, A, lda, B, ldb,
                       [&](auto source, int row0, bool of_b) {
                           if (of_b) source.k = k_b;
                           pack(source, row0, (E*)(of_b ? parts_b : parts_a), tile);
                       });
}
