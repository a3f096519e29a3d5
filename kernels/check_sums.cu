/*---
summary = "two weighted sums of each row in groups of columns, in float64 or modulo 2^64"
entry   = "check_sums"
role    = "check_sums"
# GROUPS  groups of columns
# READ    1: elements are numbers; 2: their bits are, whatever the dtype
params  = [{GROUPS = 8, READ = 1}, {GROUPS = 8, READ = 2}]
block   = ["256", "1", "1"]
grid    = ["ceil(m / 128)", "GROUPS", "1"]
require = ["READ <= 2"]
dtypes  = ["float32", "float64", "int32", "int64", "float16", "bfloat16"]
source  = "K. Huang and J. Abraham, Algorithm-based fault tolerance for matrix operations, 1984"
---*/
#include "check.cuh"

constexpr int WARPS = 8, HEIGHT = 128;  // rows of a block

struct Pair {
    Sum sum, second;
};

__device__ __forceinline__ void take(Pair& to, E element, double weight) {
    const double x = number(element) * weight;
    to.sum += x;
    add(to.second, x, x);
}

// The second weight is of the upper half: the lowest bits of both differ.
__device__ __forceinline__ void take(Pair& to, E element, unsigned long long weight) {
    to.sum += number(element) * weight;
    to.second += number(element) * (weight >> 32);
}

// The sums of four rows from `row` on, over columns from `begin` up to `end`, by a warp.
template <bool WHOLE>
__device__ __forceinline__ void sum_rows(const Source<E, !TRANS_A>& source, int row, int begin,
                                         int end, const Sum* weights, Pair (&mine)[4]) {
    const bool vectors = source.vectors();
#pragma unroll 2
    for (int j = begin + 4 * (threadIdx.x % 32); j < end; j += 128) {
        const Two* const at = (const Two*)(weights + j);
        const Two two[2] = {at[0], at[1]};
        Packed fours[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) fours[i] = packed<WHOLE>(source, row + i, j, vectors);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
#pragma unroll
            for (int x = 0; x < 4; ++x) take(mine[i], fours[i].x[x], two[x / 2].x[x % 2]);
        }
    }
}

// The same over every 8th column, of four rows by a thread.
template <bool WHOLE>
__device__ __forceinline__ void sum_columns(const Source<E, !TRANS_A>& source, int row, int begin,
                                            int end, const Sum* weights, Pair (&mine)[4]) {
    const bool vectors = source.vectors();
#pragma unroll 8
    for (int j = begin + threadIdx.x / 32; j < end; j += WARPS) {
        const Packed four = packed<WHOLE>(source, j, row, vectors);
        const Sum weight = weights[j];
#pragma unroll
        for (int x = 0; x < 4; ++x) take(mine[x], four.x[x], weight);
    }
}

// X is rows x cols, stored by columns with TRANS_A. Group g has the columns from g * width on;
// `weights` has GROUPS * width, on 16 bytes, and `width` is a multiple of 4. The second sum is that of
// the squares of what the first adds up, or of integers by other weights.
extern "C" __global__ void __launch_bounds__(256)
    check_sums(int rows, int cols, int width, const void* X, long long ldx, const Sum* weights,
               Sum* sums, Sum* seconds) {
    const Source<E, !TRANS_A> source = {(const E*)X, ldx, rows, cols};
    const bool whole = source.vectors() && (TRANS_A ? rows : cols) % 4 == 0;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int row0 = blockIdx.x * HEIGHT, group = blockIdx.y;
    const long long from = (long long)group * width;
    const int begin = from < cols ? (int)from : cols;
    const int end = from + width < cols ? (int)(from + width) : cols;
    const auto store = [&](int row, Pair of) {
        sums[(long long)row * GROUPS + group] = of.sum;
        seconds[(long long)row * GROUPS + group] = of.second;
    };
    if (!TRANS_A) {  // four rows by a warp
#pragma unroll 1
        for (int row = row0 + 4 * warp; row < row0 + HEIGHT && row < rows; row += 4 * WARPS) {
            Pair mine[4] = {};
            if (whole)
                sum_rows<true>(source, row, begin, end, weights, mine);
            else
                sum_rows<false>(source, row, begin, end, weights, mine);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const Pair all = {over_warp(mine[i].sum), over_warp(mine[i].second)};
                if (lane == 0 && row + i < rows) store(row + i, all);
            }
        }
        return;
    }
    __shared__ Pair found[WARPS][HEIGHT];  // four rows by a thread, every 8th column by a warp
    Pair mine[4] = {};
    if (whole)
        sum_columns<true>(source, row0 + 4 * lane, begin, end, weights, mine);
    else
        sum_columns<false>(source, row0 + 4 * lane, begin, end, weights, mine);
#pragma unroll
    for (int x = 0; x < 4; ++x) found[warp][4 * lane + x] = mine[x];
    __syncthreads();
    const int t = threadIdx.x;
    if (t < HEIGHT && row0 + t < rows) {
        Pair all = found[0][t];
        for (int w = 1; w < WARPS; ++w) {
            all.sum += found[w][t].sum;
            all.second += found[w][t].second;
        }
        store(row0 + t, all);
    }
}
