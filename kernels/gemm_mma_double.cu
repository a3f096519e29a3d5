/*---
summary   = "float64 on tensor cores by mma.sync, operands where they lie: any alignment"
entry     = "gemm_mma_double"
rung      = 106
# BM      rows of C that a block computes
# BN      columns of C that a block computes
# BK      k of a step
# WM      warps along the rows of C; the other 8 / WM are along its columns
# STAGES  stages of the ring in shared memory: one is multiplied, the others are on their way
# BLOCKS  blocks of the grid at most where C has fewer tiles, whose k they share
params    = [
    {BM = 128, BN = 128, BK = 16, WM = 2, STAGES = 4, BLOCKS = 132},
    {BM = 128, BN = 128, BK = 16, WM = 4, STAGES = 4, BLOCKS = 132},
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
# lines along k of both tiles with 4 elements to spare; those across k take no more
shared    = "STAGES * 160 * (BM + BN)"
# partial sums of a tile for each share, and a counter for each tile
workspace = "BLOCKS * BM * BN * SIZE"
flags     = "4 * BLOCKS"
require   = [
    "8 % WM == 0", "BM % (16 * WM) == 0", "BN * WM % 64 == 0", "BK == 16", "STAGES >= 2",
    "BM <= 128", "16 <= BN", "BN <= 128", "BLOCKS <= 65536",
]
dtypes    = ["float64"]
arch      = ">=80"
runs_on   = ["cuda", "emulator"]
source    = "this project: docs/performance.md"
---*/

// Tensor cores multiply and add float64 in its own precision, twice as fast as ordinary cores.
//
//   load       copies of a step's lines of A and B into a stage: of 16 bytes, or all of 8 where
//              lines of one begin elsewhere
//   multiply   fragments from a stage, and the products of warps
//   collect    where blocks share the k of a tile (shares.cuh), the last to come adds their sums
//   store      pairs of neighbours from registers
#include "shared_memory.cuh"
#include "shares.cuh"

constexpr int THREADS = 256;
constexpr int WN = 8 / WM;                              // warps along n
constexpr int FM = BM / (16 * WM), FN = BN / (8 * WN);  // products of 16 x 8 of a warp, each way
constexpr int BAND = 8;                                 // rows of tiles that are made together

// An operand's tile in a stage: BX lines along k, or BK lines across it. X is its side of C. EACH
// elements are copied at once.
template <int BX, bool ALONG, int EACH>
struct Tile {
    static constexpr int LINES = ALONG ? BX : BK, LENGTH = ALONG ? BK : BX;
    static constexpr int PITCH = LENGTH + 4;  // 4 lines by 4 elements fall in distinct banks
    static constexpr int ELEMENTS = LINES * PITCH;
    static constexpr int OF_LINE = LENGTH / EACH, APART = THREADS / OF_LINE;  // of a thread's lines

    const T* from;
    long long ld, apart;    // elements from line to line, and between a thread's
    int lines, length, to;  // real ones, from its first copy on; where that goes in a stage

    // Of k up to `k_end`.
    __device__ __forceinline__ Tile(const T* matrix, long long ld_, int x0, int x_end, int k_end)
        : ld(ld_), apart(APART * ld_) {
        const int line = threadIdx.x / OF_LINE, at = threadIdx.x % OF_LINE * EACH;
        from = matrix + (ALONG ? x0 + line : line) * ld + at + (ALONG ? 0 : x0);
        lines = (ALONG ? x_end - x0 : k_end) - line;
        length = (ALONG ? k_end : x_end - x0) - at;
        to = line * PITCH + at;
    }

    // Beyond the end of k, zeros.
    __device__ __forceinline__ void load(T* stage, int k0) const {
        const T* here = from + (ALONG ? k0 : k0 * ld);
        const int end = lines - (ALONG ? 0 : k0);
        const int real = max(0, min(EACH, length - (ALONG ? k0 : 0))) * SIZE;
        const Shared there = shared_address(stage + to);
#pragma unroll
        for (int i = 0; i < LINES; i += APART, here += apart) {
            if ((LINES % APART || THREADS % OF_LINE) && to + i * PITCH >= LINES * PITCH) break;
            copy_some<EACH * SIZE>(there + i * PITCH * SIZE, here, i < end ? real : 0);
        }
    }

    // Where the element of line x across k at `p` along it lies.
    __device__ __forceinline__ static int place(int x, int p) {
        return ALONG ? x * PITCH + p : p * PITCH + x;
    }
};

template <int EACH>
using TileA = Tile<BM, !TRANS_A, EACH>;
template <int EACH>
using TileB = Tile<BN, TRANS_B, EACH>;
constexpr int OF_A = TileA<1>::ELEMENTS, STAGE = OF_A + TileB<1>::ELEMENTS;
static_assert(STAGE * SIZE <= 160 * (BM + BN), "the header says how large a stage is");

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
    asm("mma.sync.aligned.m16n8k8.row.col.f64.f64.f64.f64"
        " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+d"(sum[0]), "+d"(sum[1]), "+d"(sum[2]), "+d"(sum[3])
        : "d"(a[0]), "d"(a[1]), "d"(a[2]), "d"(a[3]), "d"(b[0]), "d"(b[1]));
#else
    for (int i = 0; i < 4; ++i) {  // 8 x 8 x 4 each
        asm("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%0, %1}, {%2}, {%3}, {%0, %1};"
            : "+d"(sum[i % 2 * 2]), "+d"(sum[i % 2 * 2 + 1])
            : "d"(a[i]), "d"(b[i / 2]));
    }
#endif
}

// A thread's sums: of each product of 16 x 8, pairs in two rows 8 apart.
typedef T Sums[FM][FN][4];
constexpr int OF_THREAD = FM * FN * 4;

// A thread's operands of the warp's products with 8 of k.
struct Operands {
    T a[FM][4], b[FN][2];

    // Reads them at `p` of a step, for the warp's rows and columns from (row, col) of the tile on.
    __device__ __forceinline__ void read(const T* stage, int row, int col, int p) {
        const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
        for (int i = 0; i < FM; ++i) {
#pragma unroll
            for (int r = 0; r < 4; ++r)
                a[i][r] = stage[TileA<1>::place(row + 16 * i + g + r % 2 * 8, p + t + r / 2 * 4)];
        }
#pragma unroll
        for (int j = 0; j < FN; ++j) {
#pragma unroll
            for (int r = 0; r < 2; ++r)
                b[j][r] = stage[OF_A + TileB<1>::place(col + 8 * j + g, p + t + r * 4)];
        }
    }

    __device__ __forceinline__ void multiply(Sums& sums) const {
#pragma unroll
        for (int i = 0; i < FM; ++i) {
#pragma unroll
            for (int j = 0; j < FN; ++j) mma(sums[i][j], a[i], b[j]);
        }
    }
};

// sums = the products of steps `first` to `end`, for the warp's rows and columns from (row, col) of
// the tile on. Operands are read while those before are multiplied.
template <int EACH>
__device__ __forceinline__ void multiply(Sums& sums, T* ring, const TileA<EACH>& a,
                                         const TileB<EACH>& b, int first, int end, int row,
                                         int col) {
    auto load = [&](T* stage, int step) {
        a.load(stage, step * BK);
        b.load(stage + OF_A, step * BK);
        copies_commit();
    };
#pragma unroll
    for (int s = 0; s < STAGES - 1; ++s) load(ring + s * STAGE, first + s);
    T *stage = ring, *filled = ring + (STAGES - 1) * STAGE;  // that is read; that is filled
    auto wait = [] {  // for the next step; all are then done with the one before this
        copies_wait<STAGES - 2>();
        __syncthreads();
    };
    Operands operands[2];
    wait();
    operands[0].read(stage, row, col, 0);
#pragma unroll 1
    for (int step = first; step < end; ++step) {
#pragma unroll
        for (int p = 0; p < BK; p += 8) {
            const bool last = p + 8 == BK;
            if (last) {
                wait();
                filled = stage;
                stage = stage == ring + (STAGES - 1) * STAGE ? ring : stage + STAGE;
            }
            operands[(p / 8 + 1) % 2].read(stage, row, col, last ? 0 : p + 8);
            operands[p / 8 % 2].multiply(sums);
            if (p == 0) load(filled, step + STAGES - 1);  // in the gaps between products
        }
    }
    copies_wait<0>();
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

// Stores a thread's sums, the first of which belongs at (row, col) of C. Two rows are read before
// they are written, so that loads do not wait for stores.
__device__ __forceinline__ void store_sums(const Sums& sums, int m, int n, T alpha, T beta, T* C,
                                           long long ldc, int row, int col) {
    const bool vectors = aligned(C, ldc);
#pragma unroll
    for (int i = 0; i < FM; ++i) {
        const int r = row + 16 * i;
        Vec old[2][FN] = {};
        if (beta != T(0)) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
#pragma unroll
                for (int j = 0; j < FN; ++j)
                    if (r + 8 * half < m)
                        old[half][j] = old_vector(C + (r + 8 * half) * ldc + col + 8 * j,
                                                  col + 8 * j, n, vectors);
            }
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            if (r + 8 * half >= m) continue;
            T* const line = C + (r + 8 * half) * ldc + col;
#pragma unroll
            for (int j = 0; j < FN; ++j) {
                const T* const pair = sums[i][j] + 2 * half;
                const Vec sum = {pair[0], pair[1]};
                store_vector(line + 8 * j, sum, old[half][j], col + 8 * j, n, alpha, beta, vectors);
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
    T* const ring = reinterpret_cast<T*>(raw);
    Sums sums = {};
    const int k_end = min(k, end * BK);
    if (aligned(A, lda) && aligned(B, ldb))
        multiply<2>(sums, ring, TileA<2>(A, lda, row0, m, k_end), TileB<2>(B, ldb, col0, n, k_end),
                    first, end, row, col);
    else
        multiply<1>(sums, ring, TileA<1>(A, lda, row0, m, k_end), TileB<1>(B, ldb, col0, n, k_end),
                    first, end, row, col);
    T* const all = workspace + (long long)tile * shares * BM * BN;
    if (shares > 1 && !collect(sums, share, shares, all, flags + tile)) return;
    store_sums(sums, m, n, alpha, beta, C, ldc, row0 + row + threadIdx.x % 32 / 4,
               col0 + col + threadIdx.x % 4 * 2);
}
