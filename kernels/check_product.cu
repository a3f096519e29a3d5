/*---
summary = "A times sums of B's rows: the sums that the rows of the product should have, by shares of k"
entry   = "check_product"
role    = "check_product"
# GROUPS  groups of columns of B
# READ    1: elements are numbers
# SUMS    1: those of B's rows are given; 2: each warp makes those that it needs; 3: so of stacks
params  = [
    {GROUPS = 8, READ = 1, SUMS = 1}, {GROUPS = 8, READ = 1, SUMS = 2},
    {GROUPS = 8, READ = 1, SUMS = 3},
]
block   = ["256", "1", "1"]
grid    = ["ceil(m / 256)", "max(1, min(ceil(k / 256), max(16, ceil(2048 / max(8, ceil(m / 32))))))", "1"]
require = ["READ == 1", "GROUPS == 8", "SUMS <= 3"]
dtypes  = ["float32", "float64", "int32", "int64", "float16", "bfloat16"]
source  = "K. Huang and J. Abraham, Algorithm-based fault tolerance for matrix operations, 1984"
---*/
#include "check.cuh"

// A warp multiplies rows of A by sums of B's rows, of 8 groups: the width of an instruction of
// tensor cores in float64. Lane 4 g + t has ROWS rows, and of STEP columns MINE. It reads 16 bytes
// at once, EACH elements, and a warp whole runs of 128 bytes:
//   rows run along k     of rows g, g + 8, ... every fourth vector from the t-th on
//   rows run across      of every fourth k from the t-th on vectors of rows, which lie 8 EACH apart
constexpr int THREADS = 256, EACH = 16 / SIZE;
constexpr int ROWS = TRANS_A && SIZE == 2 ? 8 : 4, MINE = TRANS_A ? 4 : 2 * EACH, STEP = 4 * MINE;
constexpr int WARPS = THREADS / 32, HEIGHT = 8 * ROWS * WARPS;

// sum (16 x 8) += a (16 x 8) b (8 x 8). Lane 4 g + t has rows g (even i) and g + 8 (odd i) of a in
// columns t + 4 (i / 2), column g of b in rows t + 4 i, and columns 2 t and 2 t + 1 of the sum in
// row g (i < 2) and g + 8.
#if __CUDA_ARCH__ >= 900
__device__ __forceinline__ void multiply(double (&sum)[4], const double (&a)[4],
                                         const double (&b)[2]) {
    asm("mma.sync.aligned.m16n8k8.row.col.f64.f64.f64.f64 {%0, %1, %2, %3}, "
        "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+d"(sum[0]), "+d"(sum[1]), "+d"(sum[2]), "+d"(sum[3])
        : "d"(a[0]), "d"(a[1]), "d"(a[2]), "d"(a[3]), "d"(b[0]), "d"(b[1]));
}
#elif __CUDA_ARCH__ >= 800
__device__ __forceinline__ void multiply(double (&sum)[4], const double (&a)[4],
                                         const double (&b)[2]) {
#pragma unroll
    for (int i = 0; i < 4; ++i)
        asm("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%0, %1}, {%2}, {%3}, {%0, %1};"
            : "+d"(sum[2 * (i % 2)]), "+d"(sum[2 * (i % 2) + 1])
            : "d"(a[i]), "d"(b[i / 2]));
}
#endif

// The same of integers, and without such tensor cores.
template <typename X>
__device__ __forceinline__ void multiply(X (&sum)[4], const X (&a)[4], const X (&b)[2]) {
    const int lane = threadIdx.x % 32, row = lane / 4, col = lane % 4 * 2;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll 1
        for (int t = 0; t < 4; ++t) {
            const X low = __shfl_sync(~0u, a[2 * i], 4 * row + t);
            const X high = __shfl_sync(~0u, a[2 * i + 1], 4 * row + t);
#pragma unroll
            for (int x = 0; x < 2; ++x) {
                const X of = __shfl_sync(~0u, b[i], 4 * (col + x) + t);
                add(sum[x], low, of), add(sum[2 + x], high, of);
            }
        }
    }
}

// A thread's elements of its rows, of STEP of k.
struct Slab {
    static constexpr int RUN = (TRANS_A ? ROWS : MINE) / EACH;  // vectors of a line
    Packed<E, EACH> of[TRANS_A ? MINE : ROWS][RUN];

    __device__ __forceinline__ Sum at(int row, int i) const {
        const int line = TRANS_A ? i : row, place = TRANS_A ? row : i;
        return number(of[line][place / EACH].x[place % EACH]);
    }
};

// The row of a thread, whose first is `first`, and its i-th k from k0 on.
__device__ __forceinline__ int row_of(int first, int row) {
    return first + (TRANS_A ? row / EACH * 8 * EACH + row % EACH : 8 * row);
}
__device__ __forceinline__ int k_of(int k0, int i) {
    const int t = threadIdx.x % 4;
    return k0 + (TRANS_A ? 4 * i + t : (i / EACH * 4 + t) * EACH + i % EACH);
}

template <bool WHOLE>
__device__ __forceinline__ Slab slab_at(const Source<E, !TRANS_A>& source, int first, int k0) {
    Slab found;
#pragma unroll
    for (int i = 0; i < (TRANS_A ? MINE : ROWS); ++i) {
#pragma unroll
        for (int v = 0; v < Slab::RUN; ++v)
            found.of[i][v] =
                TRANS_A ? packed<WHOLE, EACH>(source, k_of(k0, i), row_of(first, EACH * v))
                        : packed<WHOLE, EACH>(source, row_of(first, i), k_of(k0, EACH * v));
    }
    return found;
}

// Of 16 rows each, columns 2 t and 2 t + 1 of two products, as `multiply` has them.
struct Totals {
    Sum first[ROWS / 2][4] = {}, second[ROWS / 2][4] = {};
};

// The sums of B's rows: as check_sums.cu makes them of B, k x GROUPS each,
struct Given {
    const Sum *sums, *seconds;

    __device__ __forceinline__ Pair at(int k, int group) const {
        const long long place = (long long)k * GROUPS + group;
        return {sums[place], seconds[place]};
    }
};

// or from B itself, whose `width` columns of a group are a multiple of 8.
struct Made {
    Source<E, !TRANS_B> b;
    const Sum* weights;
    int width;
    bool whole;

    __device__ __forceinline__ Pair at(int k, int group) const {
        Pair found = {};
        const long long first = (long long)group * width;
#pragma unroll 1
        for (long long j = first; j < first + width && j < b.k; j += 8) {
            E x[8];
#pragma unroll
            for (int i = 0; i < 8; i += TRANS_B ? 1 : EACH) {
                if (TRANS_B) {
                    x[i] = j + i < b.k ? b.from[(j + i) * b.ld + k] : E(0);
                    continue;
                }
                const Packed<E, EACH> read = whole ? packed<true, EACH>(b, k, (int)j + i)
                                                   : packed<false, EACH>(b, k, (int)j + i);
#pragma unroll
                for (int e = 0; e < EACH; ++e) x[i + e] = read.x[e];
            }
#pragma unroll
            for (int i = 0; i < 8; ++i) take(found, x[i], weights[j + i]);
        }
        return found;
    }
};

// The products of a warp's rows, a thread's from `row` on, from k = `begin` up to `end`.
template <bool WHOLE, typename RowsOfB>
__device__ __forceinline__ Totals products(const Source<E, !TRANS_A>& source, int row, int begin,
                                           int end, const RowsOfB& rows_of_b) {
    const int g = threadIdx.x % 32 / 4;
    Totals mine;
#pragma unroll 1
    for (int k0 = begin; k0 < end; k0 += STEP) {
        const Slab slab = slab_at<WHOLE>(source, row, k0);
#pragma unroll
        for (int from = 0; from < MINE; from += 2) {
            Sum b[2] = {}, of_second[2] = {};
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int k = k_of(k0, from + i);
                if (k >= end) continue;
                const Pair of_b = rows_of_b.at(k, g);
                b[i] = of_b.sum, of_second[i] = of_b.second;
            }
#pragma unroll
            for (int r = 0; r < ROWS; r += 2) {
                Sum a[4], other[4];
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    a[i] = slab.at(r + i % 2, from + i / 2);
                    other[i] = EXACT ? a[i] : a[i] * a[i];
                }
                multiply(mine.first[r / 2], a, b);
                multiply(mine.second[r / 2], other, of_second);
            }
        }
    }
    return mine;
}

// Adds up what the teams of a block have of the same rows, for the first.
__device__ __forceinline__ void add_up(Totals& mine, int teams) {
    constexpr int MOST_FROM = WARPS / 2, EACH_OF = 4 * ROWS / 2;
    __shared__ Sum left[2 * EACH_OF][MOST_FROM * 32];
    const int apart = THREADS / teams, team = threadIdx.x / apart;
#pragma unroll 1
    for (int half = teams / 2; half; half /= 2) {
        const int at = threadIdx.x - half * apart;
        __syncthreads();
        if (team >= half && team < 2 * half) {
#pragma unroll
            for (int i = 0; i < EACH_OF; ++i) {
                left[i][at] = mine.first[i / 4][i % 4];
                left[EACH_OF + i][at] = mine.second[i / 4][i % 4];
            }
        }
        __syncthreads();
        if (team < half) {
#pragma unroll
            for (int i = 0; i < EACH_OF; ++i) {
                mine.first[i / 4][i % 4] += left[i][threadIdx.x];
                mine.second[i / 4][i % 4] += left[EACH_OF + i][threadIdx.x];
            }
        }
    }
}

// A times sums of B's rows, and the squares of A's elements times their second sums, or of integers
// these themselves. A share of k is that of the blocks of one blockIdx.y; each writes two matrices
// of m x GROUPS, `all` rows behind those of the share before. Where rows are few, teams of warps
// have the same rows, and parts of the share.
template <typename RowsOfB>
__device__ __forceinline__ void sum_product(int m, int k, const void* A, long long lda,
                                            const RowsOfB& rows_of_b, int all, Sum* out,
                                            Sum* out_seconds) {
    int teams = 1;
    while (teams < WARPS && m <= HEIGHT / (2 * teams)) teams *= 2;
    const int shares = gridDim.y, share = blockIdx.y, apart = WARPS / teams;
    const int warp = threadIdx.x / 32, team = warp / apart;
    const int each = (k + shares * teams * STEP - 1) / (shares * teams * STEP) * STEP;
    const int begin = min(k, (share * teams + team) * each), end = min(k, begin + each);
    // Beyond its share a row counts for nothing, since B's sums have.
    const Source<E, !TRANS_A> source = {(const E*)A, lda, m, k};
    const int t = threadIdx.x % 4, g = threadIdx.x % 32 / 4;
    const long long of_warp = (long long)blockIdx.x * HEIGHT + warp % apart * 8 * ROWS;
    if (of_warp >= m && teams == 1) return;
    const int first = (int)min(of_warp, (long long)m) + (TRANS_A ? EACH * g : g);
    Totals mine = is_whole<EACH>(source) ? products<true>(source, first, begin, end, rows_of_b)
                                         : products<false>(source, first, begin, end, rows_of_b);
    if (teams > 1) add_up(mine, teams);
    if (team) return;
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
        const int row = row_of(first, r);
        if (row >= m) continue;
        const long long at = ((long long)share * all + row) * GROUPS + 2 * t;
#pragma unroll
        for (int x = 0; x < 2; ++x) {
            out[at + x] = mine.first[r / 2][2 * (r % 2) + x];
            out_seconds[at + x] = mine.second[r / 2][2 * (r % 2) + x];
        }
    }
}

#if SUMS == 3
// Of stacks: the blocks of one blockIdx.z have the matrices that lie so many steps behind the
// first. Sums of a share are those of all products, one below the other.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    check_product(int m, int k, const void* A, long long lda, long long step_a, int n, int width,
                  const void* B, long long ldb, long long step_b, const Sum* weights, Sum* out,
                  Sum* out_seconds) {
    const long long pair = blockIdx.z, first = pair * m * GROUPS;
    const E* const a = (const E*)A + pair * step_a;
    const Source<E, !TRANS_B> b = {(const E*)B + pair * step_b, ldb, k, n};
    const Made made = {b, weights, width, is_whole<EACH>(b)};
    sum_product(m, k, a, lda, made, gridDim.z * m, out + first, out_seconds + first);
}
#elif SUMS == 2
extern "C" __global__ void __launch_bounds__(THREADS, 2)
    check_product(int m, int k, const void* A, long long lda, int n, int width, const void* B,
                  long long ldb, const Sum* weights, Sum* out, Sum* out_seconds) {
    const Source<E, !TRANS_B> b = {(const E*)B, ldb, k, n};
    const Made made = {b, weights, width, is_whole<EACH>(b)};
    sum_product(m, k, A, lda, made, m, out, out_seconds);
}
#else
extern "C" __global__ void __launch_bounds__(THREADS, 2)
    check_product(int m, int k, const void* A, long long lda, const Sum* sums, const Sum* seconds,
                  Sum* out, Sum* out_seconds) {
    sum_product(m, k, A, lda, Given{sums, seconds}, m, out, out_seconds);
}
#endif
