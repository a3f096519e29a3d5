/*---
summary = "A times sums of B's rows: the sums that the rows of the product should have, by shares of k"
entry   = "check_product"
role    = "check_product"
# GROUPS  groups of columns of B
# READ    1: elements are numbers
# PART    bytes of sums of a few floating-point elements; see check.cuh
params  = [{GROUPS = 8, READ = 1, PART = 8}, {GROUPS = 8, READ = 1, PART = 4}]
block   = ["128", "1", "1"]
grid    = ["ceil(m / 32)", "max(1, min(16, ceil(k / 512)))", "1"]
require = ["READ == 1", "GROUPS == 8", "PART % 4 == 0", "PART <= 8", "SIZE <= PART"]
dtypes  = ["float32", "float64", "int32", "int64", "float16", "bfloat16"]
source  = "K. Huang and J. Abraham, Algorithm-based fault tolerance for matrix operations, 1984"
---*/
#include "check.cuh"

// A block has 32 rows of A. Where these run along k, the four threads of a quad read neighbouring
// vectors of a row, and a warp has 8 rows. Where they run across, a thread has a row, and the warps
// share k.
constexpr int HEIGHT = 32;

// For one k: the sums of B's row in each group, and the largest sum of squares.
template <typename X>
struct alignas(16) Sums {
    X of[GROUPS] = {}, square = 0;
};

// So many k are in shared memory at a time, of which a thread multiplies a quarter.
constexpr int STEP = 16, MINE = STEP / 4;

// The k of an entry of shared memory. Threads of a quad have neighbouring entries.
__device__ __forceinline__ int k_of(int entry, int k0) {
    return TRANS_A ? k0 + entry : k0 + MINE * (entry % 4) + entry / 4;
}

// What a thread brings of B's sums: of one k a group's.
struct OfB {
    Part sum, square;
};

__device__ __forceinline__ OfB of_b(const Part* sums, const Part* squares, int k0, int end) {
    const int t = threadIdx.x, k = k_of(t / GROUPS, k0);
    OfB found = {};
    if (k < end) {
        const long long from = (long long)k * GROUPS + t % GROUPS;
        found.sum = sums[from];
        if (!EXACT) found.square = squares[from];
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

typedef Packed<E, MINE> Elements;

// A thread's elements of a row, of STEP of k.
template <bool WHOLE>
__device__ __forceinline__ Elements elements(const Source<E, !TRANS_A>& source, int row, int k0) {
    const int t = threadIdx.x;
    if (!TRANS_A) return packed<WHOLE, MINE>(source, row, k0 + MINE * (t % 4));
    Elements found = {};
#pragma unroll
    for (int i = 0; i < MINE; ++i) {
        const int k = k0 + MINE * (t / 32) + i;
        if (k < source.k && row < source.rows) found.x[i] = source.from[k * source.ld + row];
    }
    return found;
}

// What a thread's part of a row adds up to over k from `begin` up to `end`.
template <bool WHOLE>
__device__ __forceinline__ Sums<Part> sum_up(const Source<E, !TRANS_A>& source, int row, int begin,
                                             int end, const Part* sums, const Part* squares,
                                             Sums<Part> (&shared)[STEP]) {
    const int t = threadIdx.x, first = TRANS_A ? MINE * (t / 32) : t % 4;
    Sums<Part> mine;
    Elements next = elements<WHOLE>(source, row, begin);
    OfB next_b = of_b(sums, squares, begin, end);
#pragma unroll 1
    for (int k0 = begin; k0 < end; k0 += STEP) {
        const Elements few = next;
        const Part largest = EXACT ? Part(0) : most(next_b.square);
        __syncthreads();  // what was there has been read
        shared[t / GROUPS].of[t % GROUPS] = next_b.sum;
        if (t % GROUPS == 0) shared[t / GROUPS].square = largest;
        __syncthreads();
        next_b = of_b(sums, squares, k0 + STEP, end);
        next = elements<WHOLE>(source, row, k0 + STEP);
#pragma unroll
        for (int i = 0; i < MINE; ++i) {
            const Sums<Part>& of = shared[TRANS_A ? first + i : 4 * i + first];
            const Part x = number(few.x[i]);
#pragma unroll
            for (int g = 0; g < GROUPS; ++g) add(mine.of[g], x, of.of[g]);
            if (!EXACT) add(mine.square, x * x, of.square);
        }
    }
    return mine;
}

__device__ __forceinline__ Sum over_quad(Sum x) {
    x += __shfl_xor_sync(~0u, x, 1);
    return x + __shfl_xor_sync(~0u, x, 2);
}

// `sums` and `squares` are k x GROUPS, of B's rows; a square beside sum s is x * x * s there. A share of k is that of the blocks of one blockIdx.y; each writes a matrix of m x GROUPS
// sums, and m squares (not for integers), behind those of the share before.
extern "C" __global__ void SMALL_BLOCKS check_product(int m, int k, const void* A, long long lda,
                                                      const Part* sums, const Part* squares,
                                                      Sum* out, Sum* out_squares) {
    __shared__ Sums<Part> shared[STEP];
    const int shares = gridDim.y, share = blockIdx.y;
    const int each = (k + shares * STEP - 1) / (shares * STEP) * STEP;
    const int begin = min(k, share * each), end = min(k, begin + each);
    // Beyond its share a row has zeros, since B's sums have.
    const Source<E, !TRANS_A> source = {(const E*)A, lda, m, k};
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int row = blockIdx.x * HEIGHT + (TRANS_A ? lane : 8 * warp + lane / 4);
    const Sums<Part> mine = !TRANS_A && is_whole<MINE>(source)
                                ? sum_up<true>(source, row, begin, end, sums, squares, shared)
                                : sum_up<false>(source, row, begin, end, sums, squares, shared);
    Part* const of_other = (Part*)shared;  // a sum of each row, from another warp
    const long long at = (long long)share * m + row;
#pragma unroll
    for (int g = 0; g <= GROUPS; ++g) {
        Sum sum = g < GROUPS ? mine.of[g % GROUPS] : mine.square;
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
