/*---
summary = "A times sums of B's rows: the sums that the rows of the product should have; float64, or modulo 2^64"
entry   = "check_product"
role    = "check_product"
# GROUPS  groups of columns of B
# READ    1: elements are numbers
params  = [{GROUPS = 8, READ = 1}]
block   = ["256", "1", "1"]
grid    = ["ceil(m / 32)", "1", "1"]
require = ["READ == 1"]
dtypes  = ["float32", "float64", "int32", "int64", "float16", "bfloat16"]
source  = "K. Huang and J. Abraham, Algorithm-based fault tolerance for matrix operations, 1984"
---*/
#include "check.cuh"

constexpr int WARPS = 8, HEIGHT = 32, DEPTH = 128;  // of a block: rows, and k at a time
constexpr int MINE = HEIGHT / WARPS;

// Where an element of k is in shared memory: first those that all lanes multiply first, so that a
// warp reads neighbours.
__device__ __forceinline__ int place(int p) { return p % 4 * 32 + p / 4; }

// What a row adds up: in each group, and the squares for the largest of the groups.
struct Row {
    Sum of[GROUPS], square;
};

// `sums` and `squares` are k x GROUPS, of B's rows; a square beside sum s is x * x * s there. Writes m x GROUPS sums and m squares (not for integers).
extern "C" __global__ void __launch_bounds__(256, 2)
    check_product(int m, int k, const void* A, long long lda, const Sum* sums, const Sum* squares,
                  Sum* out, Sum* out_squares) {
    __shared__ Sum shared_sums[GROUPS][DEPTH];
    __shared__ Sum shared_squares[DEPTH];
    __shared__ Row shared_rows[TRANS_A ? WARPS : 1][TRANS_A ? HEIGHT : 1];
    const Source<E, !TRANS_A> source = {(const E*)A, lda, m, k};
    const bool vectors = source.vectors();
    const int t = threadIdx.x, lane = t % 32, warp = t / 32;
    const int row0 = blockIdx.x * HEIGHT;
    Row mine[TRANS_A ? 1 : MINE] = {};
    Four<E> fours[MINE];
    E ones[DEPTH / WARPS];
#pragma unroll 1
    for (int k0 = 0; k0 < k; k0 += DEPTH) {
        if (!TRANS_A) {
#pragma unroll
            for (int i = 0; i < MINE; ++i)
                fours[i] = source.four(row0 + warp * MINE + i, k0 + 4 * lane, vectors);
        } else {
#pragma unroll
            for (int i = 0; i < DEPTH / WARPS; ++i) {
                const int p = k0 + warp + WARPS * i, row = row0 + lane;
                ones[i] = p < k && row < m ? source.from[p * lda + row] : E(0);
            }
        }
        __syncthreads();  // what was there has been read
#pragma unroll
        for (int at = t; at < DEPTH * GROUPS; at += 256) {
            const int p = at / GROUPS, group = at % GROUPS;
            const bool there = k0 + p < k;
            const long long from = (long long)k0 * GROUPS + at;
            shared_sums[group][place(p)] = there ? sums[from] : Sum(0);
        }
        if (!EXACT && t < DEPTH) {
            Sum most = 0;
            for (int g = 0; g < GROUPS && k0 + t < k; ++g) {
                const Sum square = squares[(long long)(k0 + t) * GROUPS + g];
                most = square > most ? square : most;
            }
            shared_squares[place(t)] = most;
        }
        __syncthreads();
        if (!TRANS_A) {
#pragma unroll
            for (int x = 0; x < 4; ++x) {
                Sum elements[MINE];
#pragma unroll
                for (int i = 0; i < MINE; ++i) elements[i] = number(fours[i].x[x]);
#pragma unroll
                for (int g = 0; g < GROUPS; ++g) {
                    const Sum sum = shared_sums[g][32 * x + lane];
#pragma unroll
                    for (int i = 0; i < MINE; ++i) add(mine[i].of[g], elements[i], sum);
                }
                if (!EXACT) {
                    const Sum square = shared_squares[32 * x + lane];
#pragma unroll
                    for (int i = 0; i < MINE; ++i)
                        add(mine[i].square, elements[i] * elements[i], square);
                }
            }
        } else {
#pragma unroll
            for (int i = 0; i < DEPTH / WARPS; ++i) {
                const int p = warp + WARPS * i;
                const Sum x = number(ones[i]);
#pragma unroll
                for (int g = 0; g < GROUPS; ++g) add(mine[0].of[g], x, shared_sums[g][place(p)]);
                if (!EXACT) add(mine[0].square, x * x, shared_squares[place(p)]);
            }
        }
    }
    if (!TRANS_A) {
#pragma unroll
        for (int i = 0; i < MINE; ++i) {
            const int row = row0 + warp * MINE + i;
#pragma unroll
            for (int g = 0; g < GROUPS; ++g) {
                const Sum sum = over_warp(mine[i].of[g]);
                if (lane == 0 && row < m) out[(long long)row * GROUPS + g] = sum;
            }
            const Sum square = EXACT ? Sum(0) : over_warp(mine[i].square);
            if (!EXACT && lane == 0 && row < m) out_squares[row] = square;
        }
        return;
    }
    shared_rows[TRANS_A ? warp : 0][TRANS_A ? lane : 0] = mine[0];
    __syncthreads();
    const int row = row0 + t / GROUPS, g = t % GROUPS;  // 32 rows by GROUPS
    if (row < m && t < HEIGHT * GROUPS) {
        Sum sum = 0, square = 0;
        for (int w = 0; w < WARPS; ++w) {
            sum += shared_rows[w][t / GROUPS].of[g];
            square += shared_rows[w][t / GROUPS].square;
        }
        out[(long long)row * GROUPS + g] = sum;
        if (!EXACT && g == 0) out_squares[row] = square;
    }
}
