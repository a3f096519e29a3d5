/*---
summary = "A times sums of B's rows: the sums that the rows of the product should have, by shares of k"
entry   = "check_product"
role    = "check_product"
# GROUPS  groups of columns of B
# READ    1: elements are numbers
# PART    bytes of sums of a few floating-point elements; see check.cuh
params  = [{GROUPS = 8, READ = 1, PART = 8}, {GROUPS = 8, READ = 1, PART = 4}]
block   = ["64", "1", "1"]
grid    = ["ceil(m / 32)", "max(1, min(16, ceil(k / 512)))", "1"]
require = ["READ == 1", "GROUPS == 8", "PART % 4 == 0", "PART <= 8", "SIZE <= PART"]
dtypes  = ["float32", "float64", "int32", "int64", "float16", "bfloat16"]
source  = "K. Huang and J. Abraham, Algorithm-based fault tolerance for matrix operations, 1984"
---*/
#include "check.cuh"

// A block has 32 rows of A. Where these run along k, the four threads of a quad read neighbouring
// vectors of two rows, and a warp has 16 rows. Where they run across, a thread has one row, and the
// two warps share k.
constexpr int HEIGHT = 32, ROWS = TRANS_A ? 1 : 2;
constexpr int READ_AT_ONCE = TRANS_A ? 8 : SIZE == 2 ? 8 : 4;  // of k, by a thread in a row

// For one k: the sums of B's row in each group, and the largest sum of squares.
template <typename X>
struct alignas(16) Sums {
    X of[GROUPS] = {}, square = 0;
};

// So many of them are in shared memory at a time, of which a thread multiplies a quarter or a half.
constexpr int STEP = 16, MINE = TRANS_A ? STEP / WARPS : STEP / 4;
constexpr int STEPS = READ_AT_ONCE / MINE, DEPTH = STEP * STEPS;  // of k, that are read at once

struct alignas(16) Two {
    Sum x[2];
};

// What a thread brings of B's sums: of one k two neighbouring groups'.
struct OfB {
    Two sums, squares;
};

// The k of an entry of shared memory. Threads of a quad have neighbouring entries.
__device__ __forceinline__ int k_of(int entry, int k0, int step) {
    return TRANS_A ? k0 + entry : k0 + READ_AT_ONCE * (entry % 4) + MINE * step + entry / 4;
}

__device__ __forceinline__ OfB of_b(const Sum* sums, const Sum* squares, int k0, int step,
                                    int end) {
    const int t = threadIdx.x, k = k_of(t / 4, k0, step);
    OfB found = {};
    if (k < end) {
        const long long from = (long long)k * GROUPS + 2 * (t % 4);
        found.sums = *(const Two*)(sums + from);
        if (!EXACT) found.squares = *(const Two*)(squares + from);
    }
    return found;
}

// The largest of a row's squares, in each of its four threads.
__device__ __forceinline__ Sum most(const Two& squares) {
    Sum found = squares.x[0] > squares.x[1] ? squares.x[0] : squares.x[1];
#pragma unroll
    for (int lanes = 1; lanes < 4; lanes *= 2) {
        const Sum other = __shfl_xor_sync(~0u, found, lanes);
        found = other > found ? other : found;
    }
    return found;
}

// The elements of a thread's rows that it reads at once.
struct Slab {
    Packed<E, READ_AT_ONCE> of[ROWS];
};

template <bool WHOLE>
__device__ __forceinline__ Slab slab_at(const Source<E, !TRANS_A>& source, int row, int k0) {
    const int warp = threadIdx.x / 32;
    Slab found = {};
    if (!TRANS_A) {
#pragma unroll
        for (int r = 0; r < ROWS; ++r)
            found.of[r] = packed<WHOLE, READ_AT_ONCE>(source, row + 8 * r,
                                                      k0 + READ_AT_ONCE * (threadIdx.x % 4));
    } else {
#pragma unroll
        for (int i = 0; i < READ_AT_ONCE; ++i) {
            const int k = k0 + MINE * warp + i;
            if (k < source.k && row < source.rows)
                found.of[0].x[i] = source.from[k * source.ld + row];
        }
    }
    return found;
}

// What a thread's rows, `row` and the one 8 below it, add up to over its k from `begin` up to `end`.
template <bool WHOLE>
__device__ __forceinline__ void sum_up(const Source<E, !TRANS_A>& source, int row, int begin,
                                       int end, const Sum* sums, const Sum* squares,
                                       Sums<Part> (&shared)[STEP], Sums<Part> (&mine)[ROWS]) {
    const int t = threadIdx.x;
    Slab next = slab_at<WHOLE>(source, row, begin);
    OfB next_b = of_b(sums, squares, begin, 0, end);
#pragma unroll 1
    for (int k0 = begin; k0 < end; k0 += DEPTH) {
        const Slab slab = next;
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
            const Sum largest = EXACT ? Sum(0) : most(next_b.squares);
            __syncthreads();  // what was there has been read
#pragma unroll
            for (int i = 0; i < 2; ++i) shared[t / 4].of[2 * (t % 4) + i] = Part(next_b.sums.x[i]);
            if (t % 4 == 0) shared[t / 4].square = Part(largest);
            __syncthreads();
            const bool last = step + 1 == STEPS;
            next_b = of_b(sums, squares, last ? k0 + DEPTH : k0, last ? 0 : step + 1, end);
            if (step == 0) next = slab_at<WHOLE>(source, row, k0 + DEPTH);
#pragma unroll
            for (int i = 0; i < MINE; ++i) {
                const Sums<Part> of = shared[TRANS_A ? MINE * (t / 32) + i : 4 * i + t % 4];
#pragma unroll
                for (int r = 0; r < ROWS; ++r) {
                    const Part x = number(slab.of[r].x[MINE * step + i]);
#pragma unroll
                    for (int g = 0; g < GROUPS; ++g) add(mine[r].of[g], x, of.of[g]);
                    if (!EXACT) add(mine[r].square, x * x, of.square);
                }
            }
        }
    }
}

__device__ __forceinline__ Sum over_quad(Sum x) {
    x += __shfl_xor_sync(~0u, x, 1);
    return x + __shfl_xor_sync(~0u, x, 2);
}

// `sums` and `squares` are k x GROUPS, of B's rows, on 16 bytes; a square beside sum s is x * x * s
// there. A share of k is that of the blocks of one blockIdx.y; each writes a matrix of m x GROUPS
// sums, and m squares (not for integers), behind those of the share before.
extern "C" __global__ void SMALL_BLOCKS check_product(int m, int k, const void* A, long long lda,
                                                      const Sum* sums, const Sum* squares, Sum* out,
                                                      Sum* out_squares) {
    __shared__ Sums<Part> shared[STEP];
    const int shares = gridDim.y, share = blockIdx.y;
    const int each = (k + shares * DEPTH - 1) / (shares * DEPTH) * DEPTH;
    const int begin = min(k, share * each), end = min(k, begin + each);
    // Beyond its share a row has zeros, since B's sums have.
    const Source<E, !TRANS_A> source = {(const E*)A, lda, m, k};
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int first = blockIdx.x * HEIGHT + (TRANS_A ? lane : 16 * warp + lane / 4);
    Sums<Part> mine[ROWS];
    if (!TRANS_A && is_whole<READ_AT_ONCE>(source))
        sum_up<true>(source, first, begin, end, sums, squares, shared, mine);
    else
        sum_up<false>(source, first, begin, end, sums, squares, shared, mine);
    Part* const of_other = (Part*)shared;  // a sum of each row, from the second warp
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
        const int row = first + 8 * r;
        const long long at = (long long)share * m + row;
#pragma unroll
        for (int g = 0; g <= GROUPS; ++g) {
            Sum sum = g < GROUPS ? mine[r].of[g % GROUPS] : mine[r].square;
            bool stores = row < m;
            if (TRANS_A) {
                __syncthreads();
                if (warp) of_other[lane] = Part(sum);
                __syncthreads();
                sum += of_other[lane];
                stores &= !warp;
            } else {
                sum = over_quad(sum);
                stores &= lane % 4 == g / 2 % 4;
            }
            if (stores && g < GROUPS) out[at * GROUPS + g] = sum;
            if (stores && g == GROUPS && !EXACT) out_squares[at] = sum;
        }
    }
}
