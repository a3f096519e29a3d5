/*---
summary = "tensor cores by mma.sync, operands where they lie: any alignment, thin sides, short and long k"
entry   = "gemm_mma_in_place"
role    = "tensor"
# TERMS   1: A B
# BM      rows of C that a block computes
# BN      columns of C that a block computes
# WM      warps along the rows of C; the other 8 / WM are along its columns
# STAGES  stages of the ring in shared memory: one is multiplied, the others are on their way
# OUT: see numbers.cuh
# SHARES: see tensor_shares.cuh
params  = [
    {TERMS = 1, BM = 64, BN = 64, WM = 2, STAGES = 4, OUT = 4, SHARES = 1},
    {TERMS = 1, BM = 128, BN = 128, WM = 2, STAGES = 3, OUT = 4, SHARES = 1},
    {TERMS = 1, BM = 16, BN = 128, WM = 1, STAGES = 4, OUT = 4, SHARES = 1},
    {TERMS = 1, BM = 128, BN = 16, WM = 8, STAGES = 4, OUT = 4, SHARES = 1},
    {TERMS = 1, BM = 64, BN = 64, WM = 2, STAGES = 4, OUT = 4, SHARES = 256},
    {TERMS = 1, BM = 16, BN = 128, WM = 1, STAGES = 4, OUT = 4, SHARES = 256},
    {TERMS = 1, BM = 128, BN = 16, WM = 8, STAGES = 4, OUT = 4, SHARES = 256},
    {TERMS = 1, BM = 128, BN = 32, WM = 4, STAGES = 4, OUT = 4, SHARES = 256},
    {TERMS = 1, BM = 32, BN = 128, WM = 2, STAGES = 4, OUT = 4, SHARES = 256},
    {TERMS = 1, BM = 64, BN = 64, WM = 2, STAGES = 4, OUT = 2, SHARES = 1},
    {TERMS = 1, BM = 128, BN = 128, WM = 2, STAGES = 3, OUT = 2, SHARES = 1},
    {TERMS = 1, BM = 16, BN = 128, WM = 1, STAGES = 4, OUT = 2, SHARES = 1},
    {TERMS = 1, BM = 128, BN = 16, WM = 8, STAGES = 4, OUT = 2, SHARES = 1},
    {TERMS = 1, BM = 64, BN = 64, WM = 2, STAGES = 4, OUT = 2, SHARES = 256},
    {TERMS = 1, BM = 16, BN = 128, WM = 1, STAGES = 4, OUT = 2, SHARES = 256},
    {TERMS = 1, BM = 128, BN = 16, WM = 8, STAGES = 4, OUT = 2, SHARES = 256},
    {TERMS = 1, BM = 128, BN = 32, WM = 4, STAGES = 4, OUT = 2, SHARES = 256},
    {TERMS = 1, BM = 32, BN = 128, WM = 2, STAGES = 4, OUT = 2, SHARES = 256},
]
block   = ["256", "1", "1"]
grid    = ["ceil(m / BM) * ceil(n / BN)", "1", "1"]
tile    = ["BM", "BN"]
step    = "128 / SIZE"
# the ring: lines along k with 16 bytes to spare, or across it with 8 elements; then the tile's sums
shared  = "max(STAGES * (144 * (BM + BN) + 2048), BM * (BN + 4) * 4)"
rung    = 105
in_place = true
require = [
    "TERMS == 1", "8 % WM == 0", "BM % (16 * WM) == 0", "BN * WM % 64 == 0", "OUT % 2 == 0", "OUT <= 4",
    "STAGES >= 2", "BM % 16 == 0", "BN % 16 == 0", "BM <= 128", "BN <= 128",
]
dtypes  = ["float16", "bfloat16", "tfloat32"]
arch    = ">=80"
source  = "this project: docs/tensor-cores.md"
---*/

// C (m x n) = alpha op(A) op(B) + beta C, from operands as they lie; float32 is rounded to TF32 as
// it leaves shared memory.
//
// Lines of an operand begin anywhere. They are copied by 16 bytes that begin on 16 bytes: a line
// that begins within such a vector comes with what lies before it, and is shifted by so many
// elements in shared memory. What lies before the matrix itself is not read: a line's first
// elements are copied one by one.
//
// Shares of k (tensor_shares.cuh) are the z of the grid.
//
//   load       copies of a step's lines of A and B into a stage
//   multiply   fragments from a stage, and the products of warps
//   store      sums to shared memory, and from there to C, row by row
#include "tensor_shares.cuh"

#include "mma.cuh"

constexpr int BK = 128 / SIZE;                          // k of a step
constexpr int EACH = 16 / SIZE;                         // elements of a vector
constexpr int AHEAD = 8;                                // elements of C that are read at once
constexpr int WN = 8 / WM;                              // warps along n
constexpr int FM = BM / (16 * WM), FN = BN / (8 * WN);  // products of 16 x 8 of a warp, each way

#if SIZE == 4
typedef unsigned Element;
#else
typedef unsigned short Element;
#endif

// To the nearest TF32, ties to even.
__device__ __forceinline__ unsigned as_operand(unsigned bits) {
#if __CUDA_ARCH__ >= 900
    asm("cvt.rn.tf32.f32 %0, %1;" : "=r"(bits) : "f"(as_float(bits)));
    return bits;
#else
    return to_tf32(as_float(bits));
#endif
}

// An operand's tile in a stage: BX lines along k, or BK lines across it. X is its side of C.
template <int BX, bool ALONG>
struct Tile {
    static constexpr int LINES = ALONG ? BX : BK, LENGTH = ALONG ? BK : BX;
    // Elements from line to line: a vector more, and no bank conflicts.
    static constexpr int PITCH = ALONG ? 36 * 4 / SIZE : BX + 8;
    static constexpr int WORDS = LINES * PITCH * SIZE / 4;
    static constexpr int VECTORS = LENGTH / EACH;  // of a line

    const Element* from;
    long long ld;
    int x0, x_end, k_end;
    int shift0, step;  // the shift of line 0, and by how much more that of the next one is
    int shifts[2];     // of the lines that this thread reads

    __device__ Tile(const void* matrix, long long ld_, int x0_, int x_end_, int k_end_)
        : from((const Element*)matrix), ld(ld_), x0(x0_), x_end(x_end_), k_end(k_end_) {
        shift0 = int((unsigned long long)matrix % 16 / SIZE);
        step = int(ld % EACH);
        // Their numbers differ by multiples of 8 from these; tiles begin at multiples of 16.
        const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
        shifts[0] = shift(ALONG ? g : 4 / SIZE * t);
        shifts[1] = shift(4 / SIZE * t + 1);
    }
    // Elements by which a line is shifted.
    __device__ __forceinline__ int shift(int line) const {
        return (shift0 + (line % EACH) * step) % EACH;
    }
    // Whether pairs of elements lie in one word.
    __device__ bool pairs() const { return SIZE == 4 || (shift0 | step) % 2 == 0; }

    __device__ __forceinline__ void load(Element* stage, int k0) const {
        const int line0 = ALONG ? x0 : k0, first = ALONG ? k0 : x0;
        const int lines = min(LINES, (ALONG ? x_end : k_end) - line0);
        const int length = (ALONG ? k_end : x_end) - first;
        const Element* const at = from + line0 * ld + first;
#pragma unroll 4
        for (int i = 0; i < (LINES * VECTORS + THREADS - 1) / THREADS; ++i) {
            const int t = threadIdx.x + i * THREADS;
            if (LINES * VECTORS % THREADS && t >= LINES * VECTORS) break;
            load_vector(stage, at, t / VECTORS, t % VECTORS, lines, length, first == 0);
        }
        if ((shift0 | step) && (int)threadIdx.x < LINES)  // a vector more
            load_vector(stage, at, threadIdx.x, VECTORS, lines, length, false);
    }

    __device__ __forceinline__ void load_vector(Element* stage, const Element* at, int line, int v,
                                                int lines, int length, bool begins) const {
        const int off = v * EACH - shift(line);  // of its first element, in the line
        const int real = line < lines ? max(0, min(EACH, length - off)) * SIZE : 0;
        Element* const to = stage + line * PITCH + v * EACH;
        if (begins && off < 0) {  // before it lies what is another's
            for (int e = -off; e < EACH; ++e)
                to[e] = e * SIZE < real ? at[line * ld + off + e] : Element(0);
            return;
        }
        copy_some<16>(shared_address(to), real ? at + line * ld + off : from - shift0, real);
    }

    // Word w, along k, of line x across it, where `x` and `w` belong to this thread. PAIRS: see
    // pairs().
    template <bool PAIRS>
    __device__ __forceinline__ unsigned word(const Element* stage, int x, int w) const {
        if constexpr (SIZE == 4) {
            return as_operand(stage[(ALONG ? x * PITCH + w : w * PITCH + x) + shifts[0]]);
        } else if constexpr (ALONG && PAIRS) {
            return *(const unsigned*)(stage + x * PITCH + 2 * w + shifts[0]);
        } else {
            const int one = (ALONG ? x * PITCH + 2 * w : 2 * w * PITCH + x) + shifts[0];
            const int two = ALONG ? one + 1 : (2 * w + 1) * PITCH + x + shifts[1];
            return stage[one] | (unsigned)stage[two] << 16;
        }
    }
};

typedef Tile<BM, !TRANS_A> TileA;
typedef Tile<BN, TRANS_B> TileB;
constexpr int STAGE = (TileA::WORDS + TileB::WORDS) * 4 / SIZE;  // elements
static_assert(STAGE * SIZE <= 144 * (BM + BN) + 2048, "the header says how large a stage is");

// A thread's sums: of each product of 16 x 8, pairs in two rows 8 apart.
typedef float Sums[FM][FN][4];

// Adds the products of a step's k for the warp's rows and columns from (row, col) of the tile on.
template <bool PAIRS>
__device__ __forceinline__ void multiply_step(Sums& sums, const Element* stage, const TileA& a,
                                              const TileB& b, int row, int col) {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int w = 0; w < 32; w += 8) {
        unsigned of_a[FM][4], of_b[FN][2];
#pragma unroll
        for (int i = 0; i < FM; ++i) {
#pragma unroll
            for (int r = 0; r < 4; ++r)
                of_a[i][r] =
                    a.template word<PAIRS>(stage, row + 16 * i + g + r % 2 * 8, w + t + r / 2 * 4);
        }
#pragma unroll
        for (int j = 0; j < FN; ++j) {
#pragma unroll
            for (int r = 0; r < 2; ++r)
                of_b[j][r] = b.template word<PAIRS>(stage + TileA::WORDS * 4 / SIZE,
                                                    col + 8 * j + g, w + t + r * 4);
        }
#pragma unroll
        for (int i = 0; i < FM; ++i) {
#pragma unroll
            for (int j = 0; j < FN; ++j) mma(sums[i][j], of_a[i], of_b[j]);
        }
    }
}

// sums = the products of steps `first` to `end`.
template <bool PAIRS>
__device__ __forceinline__ void multiply(Sums& sums, Element* ring, const TileA& a, const TileB& b,
                                         int first, int end, int row, int col) {
    int stage = 0, next = 0;  // that is multiplied; that is filled
#pragma unroll 1
    for (int step = first - (STAGES - 1); step < end; ++step) {
        if (step >= first) {
            copies_wait<STAGES - 2>();
            __syncthreads();  // this step is there, and all are done with the one before
        }
        if (const int k0 = (step + STAGES - 1) * BK; step + STAGES - 1 < end) {
            a.load(ring + next * STAGE, k0);
            b.load(ring + next * STAGE + TileA::WORDS * 4 / SIZE, k0);
        }
        copies_commit();
        next = next == STAGES - 1 ? 0 : next + 1;
        if (step < first) continue;
        multiply_step<PAIRS>(sums, ring + stage * STAGE, a, b, row, col);
        stage = stage == STAGES - 1 ? 0 : stage + 1;
    }
    copies_wait<0>();
    __syncthreads();
}

// C at (row0, col0) from the block's sums, which are gathered in `tile`.
__device__ __forceinline__ void store(const Sums& sums, float* tile, int row, int col, int m, int n,
                                      int row0, int col0, float alpha, float beta, Out* C,
                                      long long ldc) {
    constexpr int LD = BN + 4;
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int i = 0; i < FM; ++i) {
#pragma unroll
        for (int j = 0; j < FN; ++j) {
#pragma unroll
            for (int x = 0; x < 4; ++x)
                tile[(row + 16 * i + g + x / 2 * 8) * LD + col + 8 * j + 2 * t + x % 2] =
                    sums[i][j][x];
        }
    }
    __syncthreads();
    const int rows = min(BM, m - row0), cols = min(BN, n - col0);
#pragma unroll 1
    for (int from = threadIdx.x; from < BM * BN; from += AHEAD * THREADS) {
        Out old[AHEAD] = {};
        auto each = [&](auto&& use) {  // elements of C of this thread
#pragma unroll
            for (int i = 0; i < AHEAD; ++i) {
                const int e = from + i * THREADS, r = e / BN, c = e % BN;
                if (r < rows && c < cols) use(i, r * LD + c, C[(row0 + r) * ldc + col0 + c]);
            }
        };
        if (beta != 0) each([&](int i, int, const Out& c) { old[i] = c; });
        each([&](int i, int at, Out& c) {
            const float sum = alpha * tile[at];
            c = narrowed(beta == 0 ? sum : sum + beta * widened(old[i]));
        });
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, BM* BN > 64 * 64 ? 1 : 2)
    gemm_mma_in_place(const void* A, long long lda, const void* B, long long ldb, int m, int n,
                      int k, float alpha, float beta, void* C, long long ldc AND_EACH) {
    extern __shared__ __align__(16) unsigned memory[];
    const int warp = threadIdx.x / 32, row = warp / WN * (FM * 16), col = warp % WN * (FN * 8);
    const int across = (n + BN - 1) / BN;
    const int row0 = blockIdx.x / across * BM, col0 = blockIdx.x % across * BN;
    const int steps = (k + BK - 1) / BK;
    const int first = SHARES > 1 ? blockIdx.z * each : 0;
    const int end = SHARES > 1 ? min(first + each, steps) : steps;
    Out* const to = matrix_of_share((Out*)C, blockIdx.z, m, ldc);
    const TileA a(A, lda, row0, m, k);
    const TileB b(B, ldb, col0, n, k);
    Sums sums = {};
    Element* const ring = (Element*)memory;
    if (a.pairs() && b.pairs())
        multiply<true>(sums, ring, a, b, first, end, row, col);
    else
        multiply<false>(sums, ring, a, b, first, end, row, col);
    store(sums, (float*)memory, row, col, m, n, row0, col0, alpha, beta, to, ldc);
}
