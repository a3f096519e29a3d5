/*---
summary = "two weighted sums of each row in groups of columns, in float64 or modulo 2^64"
entry   = "check_sums"
role    = "check_sums"
# GROUPS  groups of columns
# READ    1: elements are numbers; 2: their bits are, whatever the dtype
params  = [{GROUPS = 8, READ = 1}, {GROUPS = 8, READ = 2}]
block   = ["128", "1", "1"]
grid    = ["ceil(m / 64)", "min(GROUPS, max(1, ceil(65536 / max(1, m))))", "max(1, min(ceil(n / 4096), ceil(1024 / (GROUPS * max(1, ceil(m / 64))))))"]
workspace = "2097152 * (n > 4096)"
flags   = "4096 * (n > 4096)"
require = ["READ <= 2"]
dtypes  = ["float32", "float64", "int32", "int64", "float16", "bfloat16"]
source  = "K. Huang and J. Abraham, Algorithm-based fault tolerance for matrix operations, 1984"
---*/
#include "check.cuh"
#include "last_block.cuh"

constexpr int THREADS = 128, WARPS = THREADS / 32;
constexpr int HEIGHT = 64;              // rows of a block
constexpr int FEW = SIZE == 2 ? 8 : 4;  // neighbours in a row that a thread reads at once
constexpr int SOME = TRANS_A ? 2 : 4;   // rows of a thread at a time
constexpr int COLUMNS = 8;              // that a thread reads before it sums them up

// The sums of some rows over columns from `begin` up to `end`, which may be the last int, by
// `lanes` lanes that are neighbours.
template <bool WHOLE>
__device__ __forceinline__ void sum_rows(const Source<E, !TRANS_A>& source, const int (&rows)[SOME],
                                         int lanes, int begin, unsigned end, const Sum* weights,
                                         Pair (&mine)[SOME]) {
    struct alignas(16) Weights {
        Sum x[FEW];
    };
#pragma unroll 2
    for (unsigned j = begin + FEW * (threadIdx.x & (lanes - 1)); j < end; j += FEW * lanes) {
        Packed<E, FEW> read[SOME];
#pragma unroll
        for (int i = 0; i < SOME; ++i) read[i] = packed<WHOLE, FEW>(source, rows[i], j);
        const Weights of = *(const Weights*)(weights + j);
#pragma unroll
        for (int i = 0; i < SOME; ++i) {
#pragma unroll
            for (int x = 0; x < FEW; ++x) take(mine[i], read[i].x[x], of.x[x]);
        }
    }
}

// The same of some rows by a thread, over its warp's columns.
template <bool WHOLE>
__device__ __forceinline__ void sum_columns(const Source<E, !TRANS_A>& source, int row, int begin,
                                            unsigned end, const Sum* weights, Pair (&mine)[SOME]) {
#pragma unroll 1
    for (unsigned j = begin + threadIdx.x / 32; j < end; j += WARPS * COLUMNS) {
        Packed<E, SOME> read[COLUMNS];
#pragma unroll
        for (int c = 0; c < COLUMNS; ++c) {
            read[c] = {};
            if (j + WARPS * c < end) read[c] = packed<WHOLE, SOME>(source, j + WARPS * c, row);
        }
#pragma unroll
        for (int c = 0; c < COLUMNS; ++c) {
            const Sum weight = weights[j + WARPS * c < end ? j + WARPS * c : begin];
#pragma unroll
            for (int x = 0; x < SOME; ++x) take(mine[x], read[c].x[x], weight);
        }
    }
}

// X is rows x cols, stored by columns with TRANS_A. Group g has the columns from g * width on;
// `weights` has GROUPS * width, on 16 bytes, and `width` is a multiple of 8. The second sum is
// that of the squares of what the first adds up, or of integers by other weights. Where rows are
// few and long, the blocks of one (blockIdx.x, blockIdx.y) share the columns of a group, and the
// last of them adds up what they left in `parts`; each has one group then.
extern "C" __global__ void __launch_bounds__(THREADS, 5)
    check_sums(int rows, int cols, int width, const void* X, long long ldx, const Sum* weights,
               Sum* sums, Sum* seconds, Pair* parts, unsigned* flags) {
    const Source<E, !TRANS_A> source = {(const E*)X, ldx, rows, cols};
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, row0 = blockIdx.x * HEIGHT;
    const int count = min(HEIGHT, rows - row0), shares = gridDim.z;
    const int each = (width + 8 * shares - 1) / (8 * shares) * 8;  // columns of a share
    __shared__ Pair found[HEIGHT][GROUPS];
#pragma unroll 1
    for (int group = blockIdx.y; group < GROUPS; group += gridDim.y) {
        const long long from = (long long)group * width;
        const long long at = from + (long long)each * blockIdx.z;
        const long long to = min(from + width, at + each);
        const int begin = at < cols ? (int)at : cols, end = to < cols ? (int)to : cols;
        if (!TRANS_A) {
            int lanes = 1;  // of a row: as many as have something to read
            while (lanes < 32 && FEW * lanes < width) lanes *= 2;
            const int apart = THREADS / lanes;
            const bool whole = is_whole<FEW>(source);
#pragma unroll 1
            for (int next = threadIdx.x / lanes; next < HEIGHT; next += SOME * apart) {
                int own[SOME];  // beyond the block's, those beyond the matrix, which are zero
#pragma unroll
                for (int i = 0; i < SOME; ++i)
                    own[i] = next + apart * i < count ? row0 + next + apart * i : rows;
                Pair mine[SOME] = {};
                if (whole)
                    sum_rows<true>(source, own, lanes, begin, end, weights, mine);
                else
                    sum_rows<false>(source, own, lanes, begin, end, weights, mine);
#pragma unroll 1
                for (int x = lanes / 2; x; x /= 2) {
#pragma unroll
                    for (int i = 0; i < SOME; ++i) {
                        mine[i].sum += __shfl_xor_sync(~0u, mine[i].sum, x);
                        mine[i].second += __shfl_xor_sync(~0u, mine[i].second, x);
                    }
                }
#pragma unroll
                for (int i = 0; i < SOME; ++i)
                    if (lane % lanes == 0 && own[i] < rows) found[own[i] - row0][group] = mine[i];
            }
            continue;
        }
        Pair mine[SOME] = {};
        if (is_whole<SOME>(source))
            sum_columns<true>(source, row0 + SOME * lane, begin, end, weights, mine);
        else
            sum_columns<false>(source, row0 + SOME * lane, begin, end, weights, mine);
#pragma unroll 1
        for (int other = 0; other < WARPS; ++other) {  // one warp after the other joins in
#pragma unroll
            for (int x = 0; x < SOME; ++x) {
                if (warp != other) continue;
                Pair& to = found[SOME * lane + x][group];
                to = other ? Pair{to.sum + mine[x].sum, to.second + mine[x].second} : mine[x];
            }
            __syncthreads();
        }
    }
    __syncthreads();
    if (shares > 1) {
        const int group = blockIdx.y, block = blockIdx.x * GROUPS + group, i = threadIdx.x;
        Pair* const all = parts + (long long)block * shares * HEIGHT;
        if (i < count) all[blockIdx.z * HEIGHT + i] = found[i][group];
        if (!last_of(flags + block, shares)) return;
        if (i < count) {
            Pair whole = {};
#pragma unroll 8
            for (int share = 0; share < shares; ++share) {
                const Pair part = all[share * HEIGHT + i];
                whole.sum += part.sum, whole.second += part.second;
            }
            found[i][group] = whole;
        }
        __syncthreads();
    }
    for (int i = threadIdx.x; i < HEIGHT * GROUPS; i += THREADS) {
        const int row = row0 + i / GROUPS, group = i % GROUPS;
        if (i / GROUPS >= count || group % gridDim.y != blockIdx.y) continue;
        sums[(long long)row * GROUPS + group] = found[row - row0][group].sum;
        seconds[(long long)row * GROUPS + group] = found[row - row0][group].second;
    }
}
