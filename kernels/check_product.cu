/*---
summary = "A times sums of B's rows: the sums that the rows of the product should have; float64, or modulo 2^64"
entry   = "check_product"
role    = "check_product"
# GROUPS  groups of columns of B
# READ    1: elements are numbers
params  = [{GROUPS = 8, READ = 1}]
block   = ["512", "1", "1"]
grid    = ["ceil(m / 64)", "1", "1"]
require = ["READ == 1", "GROUPS == 8"]
dtypes  = ["float32", "float64", "int32", "int64", "float16", "bfloat16"]
source  = "K. Huang and J. Abraham, Algorithm-based fault tolerance for matrix operations, 1984"
---*/
#include "check.cuh"

constexpr int WARPS = 16, HEIGHT = 64, DEPTH = 128;  // of a block: rows, and k at a time
constexpr int MINE = HEIGHT / WARPS;
// The next slab is read while one is multiplied, where registers hold both.
constexpr bool AHEAD = sizeof(E) < 8 && !EXACT;

// Where an element of k is in shared memory: first those that all lanes multiply first, so that a
// warp reads neighbours. The gaps spread what a warp writes, pairs of groups, over the banks.
constexpr int QUARTER = DEPTH / 4 + 2, PITCH = 4 * QUARTER + 4;
__device__ __forceinline__ int place(int p) { return p % 4 * QUARTER + p / 4; }

// What a row adds up: in each group, and the squares for the largest of the groups.
struct Row {
    Sum of[GROUPS], square;
};

// Two neighbouring groups' sums and squares of one row of B.
struct OfB {
    Two sums, squares;
};

__device__ __forceinline__ OfB of_b(const Sum* sums, const Sum* squares, int k0, int k) {
    const long long from = (long long)k0 * GROUPS + 2 * threadIdx.x;
    OfB found = {};
    if (k0 + (int)threadIdx.x / 4 < k) {
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

// A slab of A as a thread has it: of four rows four neighbours, or of one row every eighth element.
struct Slab {
    Packed fours[TRANS_A ? 1 : MINE];
    E ones[TRANS_A ? DEPTH / (WARPS / 2) : 1];
};

template <bool WHOLE>
__device__ __forceinline__ Slab slab_at(const Source<E, !TRANS_A>& source, int row0, int k0,
                                        bool vectors) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    Slab slab;
    if (!TRANS_A) {
#pragma unroll
        for (int i = 0; i < MINE; ++i)
            slab.fours[TRANS_A ? 0 : i] =
                packed<WHOLE>(source, row0 + warp * MINE + i, k0 + 4 * lane, vectors);
    } else {
        const int row = row0 + warp % 2 * 32 + lane;
#pragma unroll
        for (int i = 0; i < DEPTH / (WARPS / 2); ++i) {
            const int p = k0 + warp / 2 + WARPS / 2 * i;
            const bool there = p < source.k && row < source.rows;
            slab.ones[TRANS_A ? i : 0] = there ? source.from[p * source.ld + row] : E(0);
        }
    }
    return slab;
}

struct Shared {
    Sum sums[GROUPS][PITCH], squares[PITCH];
};

// What this thread's rows add up to.
template <bool WHOLE>
__device__ __forceinline__ void sum_up(const Source<E, !TRANS_A>& source, const Sum* sums,
                                       const Sum* squares, Shared& shared,
                                       Row (&mine)[TRANS_A ? 1 : MINE]) {
    const int k = source.k, row0 = blockIdx.x * HEIGHT;
    const int t = threadIdx.x, lane = t % 32, warp = t / 32;
    const bool vectors = source.vectors();
    Slab next;
    OfB next_b;
    if (AHEAD) {
        next = slab_at<WHOLE>(source, row0, 0, vectors);
        next_b = of_b(sums, squares, 0, k);
    }
#pragma unroll 1
    for (int k0 = 0; k0 < k; k0 += DEPTH) {
        if (!AHEAD) {
            next = slab_at<WHOLE>(source, row0, k0, vectors);
            next_b = of_b(sums, squares, k0, k);
        }
        const Slab slab = next;
        const Sum largest = EXACT ? Sum(0) : most(next_b.squares);
        __syncthreads();  // what was there has been read
#pragma unroll
        for (int i = 0; i < 2; ++i) shared.sums[2 * (t % 4) + i][place(t / 4)] = next_b.sums.x[i];
        if (!EXACT && t % 4 == 0) shared.squares[place(t / 4)] = largest;
        __syncthreads();
        if (AHEAD && k0 + DEPTH < k) {
            next = slab_at<WHOLE>(source, row0, k0 + DEPTH, vectors);
            next_b = of_b(sums, squares, k0 + DEPTH, k);
        }
        if (!TRANS_A) {
#pragma unroll
            for (int x = 0; x < 4; ++x) {
                Sum elements[MINE];
#pragma unroll
                for (int i = 0; i < MINE; ++i)
                    elements[i] = number(slab.fours[TRANS_A ? 0 : i].x[x]);
#pragma unroll
                for (int g = 0; g < GROUPS; ++g) {
                    const Sum sum = shared.sums[g][QUARTER * x + lane];
#pragma unroll
                    for (int i = 0; i < MINE; ++i)
                        add(mine[TRANS_A ? 0 : i].of[g], elements[i], sum);
                }
                if (!EXACT) {
                    const Sum square = shared.squares[QUARTER * x + lane];
#pragma unroll
                    for (int i = 0; i < MINE; ++i)
                        add(mine[TRANS_A ? 0 : i].square, elements[i] * elements[i], square);
                }
            }
        } else {
#pragma unroll
            for (int i = 0; i < DEPTH / (WARPS / 2); ++i) {
                const int p = warp / 2 + WARPS / 2 * i;
                const Sum x = number(slab.ones[TRANS_A ? i : 0]);
#pragma unroll
                for (int g = 0; g < GROUPS; ++g) add(mine[0].of[g], x, shared.sums[g][place(p)]);
                if (!EXACT) add(mine[0].square, x * x, shared.squares[place(p)]);
            }
        }
    }
}

// `sums` and `squares` are k x GROUPS, of B's rows, on 16 bytes; a square beside sum s is x * x * s
// there. Writes m x GROUPS sums and m squares (not for integers).
extern "C" __global__ void __launch_bounds__(512)
    check_product(int m, int k, const void* A, long long lda, const Sum* sums, const Sum* squares,
                  Sum* out, Sum* out_squares) {
    __shared__ Shared shared;
    __shared__ Row shared_rows[TRANS_A ? WARPS : 1][TRANS_A ? 32 : 1];
    const Source<E, !TRANS_A> source = {(const E*)A, lda, m, k};
    const int t = threadIdx.x, lane = t % 32, warp = t / 32;
    const int row0 = blockIdx.x * HEIGHT;
    Row mine[TRANS_A ? 1 : MINE] = {};
    if (!TRANS_A && source.vectors() && k % 4 == 0)
        sum_up<true>(source, sums, squares, shared, mine);
    else
        sum_up<false>(source, sums, squares, shared, mine);
    if (!TRANS_A) {
#pragma unroll
        for (int i = 0; i < MINE; ++i) {
            const int row = row0 + warp * MINE + i;
#pragma unroll
            for (int g = 0; g < GROUPS; ++g) {
                const Sum sum = over_warp(mine[TRANS_A ? 0 : i].of[g]);
                if (lane == 0 && row < m) out[(long long)row * GROUPS + g] = sum;
            }
            const Sum square = EXACT ? Sum(0) : over_warp(mine[TRANS_A ? 0 : i].square);
            if (!EXACT && lane == 0 && row < m) out_squares[row] = square;
        }
        return;
    }
    shared_rows[TRANS_A ? warp : 0][TRANS_A ? lane : 0] = mine[0];
    __syncthreads();
    const int local = t / GROUPS, row = row0 + local, g = t % GROUPS;  // HEIGHT by GROUPS
    if (row < m) {
        Sum sum = 0, square = 0;
        for (int w = local / 32; w < WARPS; w += 2) {
            const Row& part = shared_rows[TRANS_A ? w : 0][TRANS_A ? local % 32 : 0];
            sum += part.of[g];
            square += part.square;
        }
        out[(long long)row * GROUPS + g] = sum;
        if (!EXACT && g == 0) out_squares[row] = square;
    }
}
