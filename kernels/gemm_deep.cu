/*---
summary   = "a small C over a long k: each block a share of k, and then a strip of the sum"
entry     = "gemm_deep"
rung      = 101
# BM, BN, BK, TM, TN, LM, KG, STAGES: see copy_ring.cuh
# HOPS: see tuned_tile.cuh
# BLOCKS  shares of k of all tiles of C together, at most
params    = [
    {BM = 64, BN = 128, BK = 16, TM = 16, TN = 8, LM = 4, KG = 4, HOPS = 1, STAGES = 5, BLOCKS = 132},
    {BM = 128, BN = 64, BK = 16, TM = 16, TN = 8, LM = 4, KG = 4, HOPS = 1, STAGES = 5, BLOCKS = 132},
    {BM = 128, BN = 64, BK = 32, TM = 16, TN = 8, LM = 4, KG = 4, HOPS = 2, STAGES = 3, BLOCKS = 132},
    {BM = 64, BN = 128, BK = 32, TM = 16, TN = 8, LM = 4, KG = 4, HOPS = 2, STAGES = 3, BLOCKS = 132},
    {BM = 128, BN = 128, BK = 8, TM = 16, TN = 8, LM = 4, KG = 2, HOPS = 1, STAGES = 6, BLOCKS = 132},
    {BM = 128, BN = 128, BK = 16, TM = 16, TN = 8, LM = 4, KG = 2, HOPS = 2, STAGES = 5, BLOCKS = 132},
    {BM = 64, BN = 64, BK = 16, TM = 8, TN = 8, LM = 4, KG = 4, HOPS = 1, STAGES = 5, BLOCKS = 132},
    {BM = 64, BN = 64, BK = 32, TM = 8, TN = 8, LM = 4, KG = 4, HOPS = 2, STAGES = 3, BLOCKS = 132},
    {BM = 128, BN = 16, BK = 16, TM = 8, TN = 4, LM = 8, KG = 4, HOPS = 1, STAGES = 5, BLOCKS = 132},
    {BM = 16, BN = 128, BK = 16, TM = 4, TN = 8, LM = 4, KG = 4, HOPS = 1, STAGES = 5, BLOCKS = 132},
    {BM = 128, BN = 32, BK = 16, TM = 16, TN = 4, LM = 4, KG = 4, HOPS = 1, STAGES = 5, BLOCKS = 264},
    {BM = 32, BN = 128, BK = 16, TM = 8, TN = 8, LM = 4, KG = 4, HOPS = 1, STAGES = 5, BLOCKS = 132},
    {BM = 64, BN = 32, BK = 16, TM = 8, TN = 4, LM = 4, KG = 4, HOPS = 1, STAGES = 5, BLOCKS = 132},
    {BM = 32, BN = 64, BK = 16, TM = 4, TN = 8, LM = 4, KG = 4, HOPS = 1, STAGES = 5, BLOCKS = 132},
]
block     = ["KG * BM * BN / (TM * TN)", "1", "1"]
grid      = ["ceil(m / BM) * ceil(n / BN) * max(1, min(ceil((BLOCKS + 1) / max(1, ceil(m / BM) * ceil(n / BN))) - 1, ceil(k / BK)))", "1", "1"]
tile      = ["BM", "BN"]
scales    = ["BLOCKS"]
# the ring; then the sums that half of the groups hand to the others; then those of the tile
shared    = "max(STAGES * BK * (BM + BN + 64 / SIZE) * SIZE, max(2, KG) * BM * BN * SIZE / 2)"
# partial sums of a tile for each share; three counters for each tile
workspace = "BLOCKS * BM * BN * SIZE"
flags     = "12 * BLOCKS"
require   = [
    # a group of warps of LM x 32 / LM lanes, at least two of them along n, makes the tile
    "BM % (TM * LM) == 0", "16 % LM == 0", "BN % (TN * 32 / LM) == 0",
    # sums as vectors; they must fit in registers
    "TM % 4 == 0", "TN % 4 == 0", "TM * TN * SIZE <= 512",
    # every group has k to multiply, and one k in advance; a step is whole vectors
    "BK % (4 * HOPS) == 0", "BK % KG == 0", "BK / KG >= 2", "STAGES >= 2", "HOPS <= 2",
    # sums of groups are added by halves
    "32 % KG == 0",
    # the threads copy whole rows of a stage
    "(KG * BM * BN / (TM * TN)) % BK == 0",
    # and each of them as many lines as the others
    "256 % BM == 0", "256 % BN == 0",
    "BLOCKS <= 65536",
]
dtypes    = ["float32", "int32"]
arch      = ">=80"
runs_on   = ["cuda", "emulator"]
source    = "this project: docs/performance.md"
---*/

// Where C has few tiles, each is made of many shares of k (split-K, see shares.cuh), and one block
// that adds them all takes as long as a tenth of the product. Here the blocks of a tile stay when
// they have handed in their partial sums; once all of them are there, whoever is still here adds
// strips of the tile until none is left. A block stays for a bounded time, so none depends on
// another's being scheduled; the last to come takes what nobody took. A strip is added in one order
// whoever does it, so the same input gives the same bits.
//
//   load, multiply   copy_ring.cuh and tuned_tile.cuh
//   finish           adds the partial sums up, strip by strip, and stores C
#include "tuned_tile.cuh"

constexpr int STAY = 1 << 16;  // cycles that a block stays for the others, at most

// c = alpha * sum + beta * c for neighbours in row r of C from column c on, element by element.
__device__ __forceinline__ void store_elements(const Vec& sum, int n, T alpha, T beta, T* C,
                                               long long ldc, int r, int c) {
    UNROLL for (int q = 0; q < VEC; ++q) {
        if (c + q >= n) return;
        store(C + r * ldc + (c + q), sum.x[q ^ 1], alpha, beta);
    }
}

// Adds vectors [begin, end) of a tile's `count` parts, at most THREADS vectors, and stores them in
// C. The threads form as many teams as that leaves, each of which adds its run of the parts.
__device__ __forceinline__ void add_strip(const Vec* parts, int count, int begin, int end, int m,
                                          int n, T alpha, T beta, T* C, long long ldc, int row,
                                          int col) {
    DYNAMIC_SHARED(raw);
    Vec* const sums = reinterpret_cast<Vec*>(raw);
    const int size = end - begin, teams = THREADS / size;
    const int team = threadIdx.x / size, v = begin + threadIdx.x % size;
    Vec total = {};
    if (team < teams) {
        const int last = count * (team + 1) / teams;
#pragma unroll 8
        for (int p = count * team / teams; p < last; ++p) {
            const Vec x = parts[(long long)p * VECTORS_OF_TILE + v];
            add(total, x);
        }
        sums[threadIdx.x] = total;
    }
    __syncthreads();
    if (team == 0) {
        for (int t = 1; t < teams; ++t) {
            const Vec x = sums[t * size + threadIdx.x];
            add(total, x);
        }
        const int r = row + row_of(v);
        if (r < m) store_elements(total, n, alpha, beta, C, ldc, r, col + col_of(v));
    }
    __syncthreads();
}

// Adds the partial sums of a tile, which its `shares` blocks have left in `parts`, and stores them
// in C at (row, col). `flags` has three counters for the tile; `strip`, in shared memory, is the
// one that this block adds next.
__device__ __forceinline__ void finish(const Vec* parts, int shares, unsigned* flags, int& strip,
                                       int m, int n, T alpha, T beta, T* C, long long ldc, int row,
                                       int col) {
    unsigned* const handed_in = flags;  // blocks whose partial sums are there
    unsigned* const taken = flags + 1;  // strips that a block has begun
    unsigned* const gone = flags + 2;   // blocks that look at the counters no more
    const int size = LEAST(THREADS, (VECTORS_OF_TILE / 32 + shares - 1) / shares * 32);
    const int strips = (VECTORS_OF_TILE + size - 1) / size;
    __syncthreads();  // the block's part is written: handed on by one thread's release
    if (threadIdx.x == 0) strip = all_of(handed_in, shares, STAY) ? int(count_in(taken)) : strips;
    __syncthreads();
    while (strip < strips) {
        const int begin = strip * size, end = LEAST(begin + size, VECTORS_OF_TILE);
        add_strip(parts, shares, begin, end, m, n, alpha, beta, C, ldc, row, col);
        if (threadIdx.x == 0) strip = int(count_in(taken));
        __syncthreads();
    }
    if (threadIdx.x == 0 && count_in(gone) == shares - 1u) *handed_in = *taken = *gone = 0;
}

extern "C" __global__ void __launch_bounds__(THREADS)
    gemm_deep(int m, int n, int k, T alpha, const T* A, long long lda, const T* B, long long ldb,
              T beta, T* C, long long ldc, T* workspace, unsigned* flags) {
    __shared__ int strip;
    const int thread = threadIdx.x % GROUP, group = threadIdx.x / GROUP;
    const int from_a = (group * KP * LD_A + row_in(thread)) * SIZE;
    const int from_b = (A_ELEMENTS + group * KP * LD_B + col_in(thread)) * SIZE;

    const int tiles_m = (m + BM - 1) / BM, tiles_n = (n + BN - 1) / BN, tiles = tiles_m * tiles_n;
    const int shares = gridDim.x / tiles, tile = blockIdx.x / shares, share = blockIdx.x % shares;
    const int row = tile % tiles_m * BM, col = tile / tiles_m * BN;
    const int steps = MOST(1, (k + BK - 1) / BK), skip = steps * BK - k;
    const int least = steps / shares, more = steps - least * shares;
    const int first = run_begin(share, least, more), count = run_length(share, least, more);
    const bool vectors = VECTORS_FIT(m, n, k, A, lda, B, ldb);
    T sum[TM][TN];
    if (vectors)
        multiply<true>(sum, m, n, A, lda, B, ldb, row, col, first, skip, count, from_a, from_b);
    else
        multiply<false>(sum, m, n, A, lda, B, ldb, row, col, first, skip, count, from_a, from_b);
    if (KG > 1) add_groups(sum, group, thread);
    if (shares == 1) {
        if (!TWO_HOPS)  // with two, the main loop is ordered better beside the longer code
            store_in_loop(sum, m, n, alpha, beta, C, ldc, row, col, group, thread);
        else if (group == 0)
            store_tile(sum, m, n, alpha, beta, C, ldc, row + row_in(thread), col + col_in(thread));
        return;
    }
    Vec* const parts =
        reinterpret_cast<Vec*>(workspace) + (long long)tile * shares * VECTORS_OF_TILE;
    if (group == 0) put_sums(parts + (long long)share * VECTORS_OF_TILE + thread, sum);
    finish(parts, shares, flags + 3 * tile, strip, m, n, alpha, beta, C, ldc, row, col);
}
