// C of a k so short that writing C decides the time, for `outer` and `outer_narrow`: a sum of a few
// outer products.
//
//   load       a thread takes op(B) at its columns, for all of k, into registers; the block takes
//              op(A) at its rows into shared memory
//   multiply   row after row: a warp makes neighbours of a row
//   store      at once, as they lie in C
//
//   DEPTH    k that there may be
//   COLS     columns of a thread, 32 apart
//   ROWS     rows of a block, which its warps take in turn
//   THREADS  of a block
//
// T is what the matrices hold, Sum what they are multiplied and added in, Out what C holds; `wide`
// makes a Sum of a T.
#pragma once
#include "early_launch.cuh"
#include "lines.cuh"

constexpr int WARPS = THREADS / 32, WIDTH = 32 * COLS;
constexpr int AHEAD = 4;  // rows of a warp of which C is read at once

// The block's tile of C = op(A) op(B). `value` is what to store for an element's sum where C held
// that; it is read where `reads` says so.
template <typename Value>
__device__ __forceinline__ void outer_products(int m, int n, int k, const T* A, long long lda,
                                               const T* B, long long ldb, Out* C, long long ldc,
                                               bool reads, const Value& value) {
    __shared__ Sum rows[ROWS * DEPTH];
    const Operand a = lines_of_a(A, lda, m), b = lines_of_b(B, ldb, n);
    const int across = (n + WIDTH - 1) / WIDTH;
    const int row = blockIdx.x / across * ROWS, col = blockIdx.x % across * WIDTH;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;

    wait_for_launch_before();
    for (int e = threadIdx.x; e < ROWS * DEPTH; e += THREADS) {
        // neighbours in memory by neighbouring threads
        const int p = TRANS_A ? e / ROWS : e % DEPTH, i = TRANS_A ? e % ROWS : e / DEPTH;
        rows[i * DEPTH + p] = p < k ? wide(a.line(row + i)[p * a.p]) : Sum(0);
    }
    Sum y[DEPTH][COLS];
    UNROLL for (int q = 0; q < COLS; ++q) {
        const T* const line = b.line(col + q * 32 + lane);
        UNROLL for (int p = 0; p < DEPTH; ++p) y[p][q] = p < k ? wide(line[p * b.p]) : Sum(0);
    }
    __syncthreads();
    Out* const to = C + col + lane;
#pragma unroll 1
    for (int r = warp; r < ROWS && row + r < m; r += AHEAD * WARPS) {
        Out old[AHEAD][COLS] = {};
        auto each = [&](auto&& use) {  // elements of C of this thread
            UNROLL for (int i = 0; i < AHEAD; ++i) {
                const int of = r + i * WARPS;
                if (of >= ROWS || row + of >= m) break;
                UNROLL for (int q = 0; q < COLS; ++q) {
                    if (col + q * 32 + lane < n) use(i, q, of, to[(row + of) * ldc + q * 32]);
                }
            }
        };
        if (reads) each([&](int i, int q, int, const Out& c) { old[i][q] = c; });
        each([&](int i, int q, int of, Out& c) {
            Sum sum = Sum(0);
            UNROLL for (int p = 0; p < DEPTH; ++p) sum += rows[of * DEPTH + p] * y[p][q];
            c = value(&old[i][q], sum);
        });
    }
}
