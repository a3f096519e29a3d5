/*---
summary   = "float64 on tensor cores by mma.sync, operands where they lie: any alignment"
entry     = "gemm_mma_double"
rung      = 106
# BM      rows of C that a block computes
# BN      columns of C that a block computes
# BK      k of a step
# WM      warps along the rows of C; the other 8 / WM are along its columns
# STAGES  stages of the ring in shared memory: STAGES - 1 steps are on their way while one is multiplied
# BLOCKS  blocks of the grid at most where C has fewer tiles, whose k they share
params    = [
    {BM = 128, BN = 128, BK = 16, WM = 2, STAGES = 4, BLOCKS = 132},
    {BM = 64, BN = 128, BK = 16, WM = 2, STAGES = 4, BLOCKS = 132},
    {BM = 128, BN = 64, BK = 16, WM = 4, STAGES = 4, BLOCKS = 132},
    {BM = 64, BN = 64, BK = 16, WM = 2, STAGES = 4, BLOCKS = 264},
    {BM = 32, BN = 128, BK = 16, WM = 1, STAGES = 4, BLOCKS = 264},
    {BM = 128, BN = 32, BK = 16, WM = 4, STAGES = 4, BLOCKS = 264},
    {BM = 16, BN = 128, BK = 16, WM = 1, STAGES = 4, BLOCKS = 264},
    {BM = 128, BN = 16, BK = 16, WM = 8, STAGES = 4, BLOCKS = 264},
]
block     = ["256", "1", "1"]
grid      = ["ceil(m / BM) * ceil(n / BN) * max(1, min(ceil((BLOCKS + 1) / max(1, ceil(m / BM) * ceil(n / BN))) - 1, ceil(k / BK)))", "1", "1"]
tile      = ["BM", "BN"]
scales    = ["BLOCKS"]
# lines along k with 4 elements to spare, or across it with 4
shared    = "STAGES * (160 * (BM + BN) + 1024)"
# partial sums of a tile for each share, and a counter for each tile
workspace = "BLOCKS * BM * BN * SIZE"
flags     = "4 * BLOCKS"
require   = [
    "8 % WM == 0", "BM % (16 * WM) == 0", "BN * WM % 64 == 0", "BK == 16", "STAGES >= 2",
    "BM <= 128", "BN <= 128", "BLOCKS <= 65536",
]
dtypes    = ["float64"]
arch      = ">=80"
runs_on   = ["cuda", "emulator"]
source    = "this project: docs/performance.md"
---*/

// Tensor cores multiply and add float64 as ordinary cores do, with one rounding for each product that
// is added, and twice as fast.
//
//   load       copies of a step's lines of A and B into a stage (lines_anywhere.cuh)
//   multiply   fragments from a stage, and the products of warps
//   collect    where blocks share the k of a tile (shares.cuh), the last to come adds their sums
//   store      pairs of neighbours from registers
#include "shares.cuh"

constexpr int THREADS = 256;
constexpr int WN = 8 / WM;                              // warps along n
constexpr int FM = BM / (16 * WM), FN = BN / (8 * WN);  // products of 16 x 8 of a warp, each way
constexpr int BAND = 8;                                 // rows of tiles that are made together

#include "lines_anywhere.cuh"

typedef Tile<BM, !TRANS_A> TileA;
typedef Tile<BN, TRANS_B> TileB;
static_assert((TileA::ELEMENTS + TileB::ELEMENTS) * SIZE <= 160 * (BM + BN) + 1024,
              "the header says how large a stage is");

// sum (16 x 8) += a (16 x 8) b (8 x 8). Lane 4 g + t has rows g and g + 8 of a at t and t + 4 of k,
// column g of b at the same, and of the sum columns 2 t and 2 t + 1 of row g, then of row g + 8.
__device__ __forceinline__ void mma(T (&sum)[4], const T (&a)[4], const T (&b)[2]) {
#ifdef HYBRID_GEMM_EMULATOR
    __shared__ T numbers[THREADS][6];
    for (int i = 0; i < 6; ++i) numbers[threadIdx.x][i] = i < 4 ? a[i] : b[i - 4];
    __syncwarp();
    const T(*const warp)[6] = numbers + threadIdx.x / 32 * 32;
    const int row = threadIdx.x % 32 / 4, col = threadIdx.x % 4 * 2;
    for (int i = 0; i < 4; ++i) {
        for (int p = 0; p < 8; ++p)
            sum[i] += warp[row * 4 + p % 4][i / 2 + p / 4 * 2] *
                      warp[(col + i % 2) * 4 + p % 4][4 + p / 4];
    }
    __syncwarp();
#elif __CUDA_ARCH__ >= 900
    asm volatile(
        "mma.sync.aligned.m16n8k8.row.col.f64.f64.f64.f64"
        " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+d"(sum[0]), "+d"(sum[1]), "+d"(sum[2]), "+d"(sum[3])
        : "d"(a[0]), "d"(a[1]), "d"(a[2]), "d"(a[3]), "d"(b[0]), "d"(b[1]));
#else
    for (int i = 0; i < 4; ++i) {  // 8 x 8 x 4 each
        asm volatile(
            "mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%0, %1}, {%2}, {%3}, {%0, %1};"
            : "+d"(sum[i % 2 * 2]), "+d"(sum[i % 2 * 2 + 1])
            : "d"(a[i]), "d"(b[i / 2]));
    }
#endif
}

// A thread's sums: of each product of 16 x 8, pairs in two rows 8 apart.
typedef T Sums[FM][FN][4];
constexpr int OF_THREAD = FM * FN * 4;

// Adds the products of a step's k for the warp's rows and columns from (row, col) of the tile on.
__device__ __forceinline__ void multiply(Sums& sums, const Element* stage, const TileA& a,
                                         const TileB& b, int row, int col) {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int p = 0; p < BK; p += 8) {
        T of_a[FM][4], of_b[FN][2];
#pragma unroll
        for (int i = 0; i < FM; ++i) {
#pragma unroll
            for (int r = 0; r < 4; ++r)
                of_a[i][r] = stage[a.place(row + 16 * i + g + r % 2 * 8, p + t + r / 2 * 4)];
        }
#pragma unroll
        for (int j = 0; j < FN; ++j) {
#pragma unroll
            for (int r = 0; r < 2; ++r)
                of_b[j][r] = stage[TileA::ELEMENTS + b.place(col + 8 * j + g, p + t + r * 4)];
        }
#pragma unroll
        for (int i = 0; i < FM; ++i) {
#pragma unroll
            for (int j = 0; j < FN; ++j) mma(sums[i][j], of_a[i], of_b[j]);
        }
    }
}

// Hands in a block's share of a tile. Returns true in the last block to come, whose `sums` then are
// those of all shares.
__device__ __forceinline__ bool collect(Sums& sums, int share, int shares, T* all,
                                        unsigned* counter) {
    T* const mine = all + threadIdx.x;
    auto each = [&](int of, auto&& use) {  // a thread's sums of a share, of all threads in turn
#pragma unroll
        for (int e = 0; e < OF_THREAD; ++e)
            use((&sums[0][0][0])[e], mine[(of * OF_THREAD + e) * THREADS]);
    };
    each(share, [](T& sum, T& there) { there = sum; });
    if (!last_of(counter, shares)) return false;
    each(0, [](T& sum, T& there) { sum = there; });
    for (int s = 1; s < shares; ++s) each(s, [](T& sum, T& there) { sum += there; });
    return true;
}

struct alignas(16) Pair {
    T x, y;
};

// Stores a thread's sums, the first of which belongs at (row, col) of C.
__device__ __forceinline__ void store_sums(const Sums& sums, int m, int n, T alpha, T beta, T* C,
                                           long long ldc, int row, int col) {
    const bool pairs = aligned(C, ldc);
#pragma unroll
    for (int i = 0; i < FM; ++i) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int r = row + 16 * i + 8 * half;
            if (r >= m) continue;
            T* const line = C + r * ldc + col;
            Pair old[FN] = {};
            if (beta != T(0)) {
#pragma unroll
                for (int j = 0; j < FN; ++j) {
                    const int c = col + 8 * j;
                    if (pairs && c + 1 < n) {
                        old[j] = *reinterpret_cast<const Pair*>(line + 8 * j);
                    } else {
                        if (c < n) old[j].x = line[8 * j];
                        if (c + 1 < n) old[j].y = line[8 * j + 1];
                    }
                }
            }
#pragma unroll
            for (int j = 0; j < FN; ++j) {
                const int c = col + 8 * j;
                const T* const sum = sums[i][j] + 2 * half;
                const Pair made = {result(&old[j].x, sum[0], alpha, beta),
                                   result(&old[j].y, sum[1], alpha, beta)};
                if (pairs && c + 1 < n) {
                    *reinterpret_cast<Pair*>(line + 8 * j) = made;
                } else {
                    if (c < n) line[8 * j] = made.x;
                    if (c + 1 < n) line[8 * j + 1] = made.y;
                }
            }
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, BM* BN > 64 * 64 ? 1 : 2)
    gemm_mma_double(int m, int n, int k, T alpha, const T* A, long long lda, const T* B,
                    long long ldb, T beta, T* C, long long ldc, T* workspace, unsigned* flags) {
    DYNAMIC_SHARED(raw);
    const int warp = threadIdx.x / 32, row = warp / WN * (FM * 16), col = warp % WN * (FN * 8);
    const int high = (m + BM - 1) / BM, wide = (n + BN - 1) / BN, tiles = high * wide;
    const int shares = gridDim.x / tiles, tile = blockIdx.x / shares, share = blockIdx.x % shares;
    // Bands of tiles, column by column: blocks at work at a time read few lines of A and of B.
    const int band = tile / (BAND * wide), in_band = tile - band * BAND * wide;
    const int rows = min(BAND, high - band * BAND);
    const int row0 = (band * BAND + in_band % rows) * BM, col0 = in_band / rows * BN;
    const int steps = (k + BK - 1) / BK, least = steps / shares, more = steps - least * shares;
    const int first = run_begin(share, least, more), end = first + run_length(share, least, more);
    const TileA a(A, lda, row0, m, k);
    const TileB b(B, ldb, col0, n, k);
    Sums sums = {};
    for_each_step(reinterpret_cast<Element*>(raw), a, b, first, end,
                  [&](const Element* stage) { multiply(sums, stage, a, b, row, col); });
    T* const all = workspace + (long long)tile * shares * BM * BN;
    if (shares > 1 && !collect(sums, share, shares, all, flags + tile)) return;
    store_sums(sums, m, n, alpha, beta, C, ldc, row0 + row + threadIdx.x % 32 / 4,
               col0 + col + threadIdx.x % 4 * 2);
}
