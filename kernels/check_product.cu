/*---
summary = "A times sums of B's rows: the sums that the rows of the product should have, by shares of k"
entry   = "check_product"
role    = "check_product"
# GROUPS  groups of columns of B
# READ    1: elements are numbers
# PART    bytes of sums of a few floating-point elements; see check.cuh
params  = [{GROUPS = 8, READ = 1, PART = 8}, {GROUPS = 8, READ = 1, PART = 4}]
block   = ["128", "1", "1"]
grid    = ["ceil(m / 128)", "max(1, min(16, ceil(k / 512)))", "1"]
require = ["READ == 1", "GROUPS == 8", "PART % 4 == 0", "PART <= 8", "SIZE <= PART"]
dtypes  = ["float32", "float64", "int32", "int64", "float16", "bfloat16"]
source  = "K. Huang and J. Abraham, Algorithm-based fault tolerance for matrix operations, 1984"
---*/
#include "check.cuh"

// A thread has four rows of A, a block 128. Where rows run along k, the four threads of a quad read
// neighbouring vectors of the same rows, which are 8 apart. Where they run across, the threads of a
// warp read neighbouring rows, its rows are 32 apart, and the warps share k.
constexpr int ROWS = 4, HEIGHT = 128, APART = TRANS_A ? 32 : 8;

// For one k: the sums of B's row in each group, and the largest sum of squares.
template <typename X>
struct alignas(16) Sums {
    X of[GROUPS] = {}, square = 0;
};

// So many k are in shared memory at a time, of which a thread multiplies a quarter.
constexpr int STEP = SIZE == 2 && !TRANS_A ? 32 : 16, MINE = STEP / 4;
// B's sums that a thread brings: of one k a group's, so many times.
constexpr int BRINGS = STEP * GROUPS / THREADS;

// The k of an entry of shared memory. Threads of a quad have neighbouring entries.
__device__ __forceinline__ int k_of(int entry, int k0) {
    return TRANS_A ? k0 + entry : k0 + MINE * (entry % 4) + entry / 4;
}

struct OfB {
    Part sums[BRINGS], squares[BRINGS];
};

__device__ __forceinline__ OfB of_b(const Part* sums, const Part* squares, int k0, int end) {
    const int t = threadIdx.x;
    OfB found = {};
#pragma unroll
    for (int i = 0; i < BRINGS; ++i) {
        const int k = k_of((t + THREADS * i) / GROUPS, k0);
        if (k >= end) continue;
        const long long from = (long long)k * GROUPS + t % GROUPS;
        found.sums[i] = sums[from];
        if (!EXACT) found.squares[i] = squares[from];
    }
    return found;
}

// The largest of a row's squares, in each of its eight threads.
__device__ __forceinline__ Part most(Part found) {
#pragma unroll
    for (int lanes = 1; lanes < GROUPS; lanes *= 2) {
        const Part other = __shfl_xor_sync(~0u, found, lanes);
        found = other > found ? other : found;
    }
    return found;
}

// A thread's elements of its rows, of STEP of k.
struct Slab {
    Packed<E, MINE> of[ROWS];
};

template <bool WHOLE>
__device__ __forceinline__ Slab slab_at(const Source<E, !TRANS_A>& source, int row, int k0) {
    const int t = threadIdx.x;
    Slab found = {};
    if (!TRANS_A) {
#pragma unroll
        for (int r = 0; r < ROWS; ++r)
            found.of[r] = packed<WHOLE, MINE>(source, row + APART * r, k0 + MINE * (t % 4));
    } else {
#pragma unroll
        for (int i = 0; i < MINE; ++i) {
            const int k = k0 + MINE * (t / 32) + i;
#pragma unroll
            for (int r = 0; r < ROWS; ++r)
                if (k < source.k && row + APART * r < source.rows)
                    found.of[r].x[i] = source.from[k * source.ld + row + APART * r];
        }
    }
    return found;
}

// What a thread's rows, from `row` on, add up to over its part of k from `begin` up to `end`.
template <bool WHOLE>
__device__ __forceinline__ void sum_up(const Source<E, !TRANS_A>& source, int row, int begin,
                                       int end, const Part* sums, const Part* squares,
                                       Sums<Part> (&shared)[STEP], Sums<Part> (&mine)[ROWS]) {
    const int t = threadIdx.x, first = TRANS_A ? MINE * (t / 32) : t % 4;
    Slab next = slab_at<WHOLE>(source, row, begin);
    OfB next_b = of_b(sums, squares, begin, end);
#pragma unroll 1
    for (int k0 = begin; k0 < end; k0 += STEP) {
        const Slab slab = next;
        __syncthreads();  // what was there has been read
#pragma unroll
        for (int i = 0; i < BRINGS; ++i) {
            Sums<Part>& to = shared[(t + THREADS * i) / GROUPS];
            const Part largest = EXACT ? Part(0) : most(next_b.squares[i]);
            to.of[t % GROUPS] = next_b.sums[i];
            if (t % GROUPS == 0) to.square = largest;
        }
        __syncthreads();
        next_b = of_b(sums, squares, k0 + STEP, end);
        next = slab_at<WHOLE>(source, row, k0 + STEP);
#pragma unroll
        for (int i = 0; i < MINE; ++i) {
            const Sums<Part>& of = shared[TRANS_A ? first + i : 4 * i + first];
#pragma unroll
            for (int r = 0; r < ROWS; ++r) {
                const Part x = number(slab.of[r].x[i]);
#pragma unroll
                for (int g = 0; g < GROUPS; ++g) add(mine[r].of[g], x, of.of[g]);
                if (!EXACT) add(mine[r].square, x * x, of.square);
            }
        }
    }
}

__device__ __forceinline__ Sum over_quad(Sum x) {
    x += __shfl_xor_sync(~0u, x, 1);
    return x + __shfl_xor_sync(~0u, x, 2);
}

// `sums` and `squares` are k x GROUPS, of B's rows; a square beside sum s is x * x * s there. A
// share of k is that of the blocks of one blockIdx.y; each writes a matrix of m x GROUPS
// sums, and m squares (not for integers), behind those of the share before.
extern "C" __global__ void __launch_bounds__(THREADS, PART == 8 ? 3 : 4)
    check_product(int m, int k, const void* A, long long lda, const Part* sums, const Part* squares,
                  Sum* out, Sum* out_squares) {
    __shared__ Sums<Part> shared[STEP];
    const int shares = gridDim.y, share = blockIdx.y;
    const int each = (k + shares * STEP - 1) / (shares * STEP) * STEP;
    const int begin = min(k, share * each), end = min(k, begin + each);
    // Beyond its share a row counts for nothing, since B's sums have.
    const Source<E, !TRANS_A> source = {(const E*)A, lda, m, k};
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int first = blockIdx.x * HEIGHT + (TRANS_A ? lane : 8 * ROWS * warp + lane / 4);
    Sums<Part> mine[ROWS];
    if (!TRANS_A && is_whole<MINE>(source))
        sum_up<true>(source, first, begin, end, sums, squares, shared, mine);
    else
        sum_up<false>(source, first, begin, end, sums, squares, shared, mine);
    Part* const of_other = (Part*)shared;  // a sum of each row, from another warp
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
        const int row = first + APART * r;
        const long long at = (long long)share * m + row;
#pragma unroll
        for (int g = 0; g <= GROUPS; ++g) {
            Sum sum = g < GROUPS ? mine[r].of[g % GROUPS] : mine[r].square;
            bool stores = row < m;
            if (TRANS_A) {
                for (int other = 1; other < WARPS; ++other) {
                    __syncthreads();
                    if (warp == other) of_other[lane] = Part(sum);
                    __syncthreads();
                    if (!warp) sum += of_other[lane];
                }
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
