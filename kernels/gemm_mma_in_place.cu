/*---
summary = "tensor cores by mma.sync, operands where they lie: any alignment, thin sides, short and long k"
entry   = "gemm_mma_in_place"
role    = "tensor"
# TERMS   1: A B
# BM      rows of C that a block computes
# BN      columns of C that a block computes
# WM      warps along the rows of C; the other 8 / WM are along its columns
# STAGES  stages of the ring in shared memory: STAGES - 1 steps are on their way while one is multiplied
# OUT     bytes of an element of C: 4 is float32, 2 the type of the operands
# SHARES  the most shares that the k of a tile is cut into; 1: the kernel cuts none, and makes C
params  = [
    {TERMS = 1, BM = 64, BN = 64, WM = 2, STAGES = 4, OUT = 4, SHARES = 1},
    {TERMS = 1, BM = 128, BN = 128, WM = 2, STAGES = 3, OUT = 4, SHARES = 1},
    {TERMS = 1, BM = 16, BN = 128, WM = 1, STAGES = 4, OUT = 4, SHARES = 1},
    {TERMS = 1, BM = 128, BN = 16, WM = 8, STAGES = 4, OUT = 4, SHARES = 1},
    {TERMS = 1, BM = 64, BN = 64, WM = 2, STAGES = 4, OUT = 4, SHARES = 256},
    {TERMS = 1, BM = 16, BN = 128, WM = 1, STAGES = 4, OUT = 4, SHARES = 256},
    {TERMS = 1, BM = 128, BN = 16, WM = 8, STAGES = 4, OUT = 4, SHARES = 256},
    {TERMS = 1, BM = 64, BN = 64, WM = 2, STAGES = 4, OUT = 2, SHARES = 1},
    {TERMS = 1, BM = 128, BN = 128, WM = 2, STAGES = 3, OUT = 2, SHARES = 1},
    {TERMS = 1, BM = 16, BN = 128, WM = 1, STAGES = 4, OUT = 2, SHARES = 1},
    {TERMS = 1, BM = 128, BN = 16, WM = 8, STAGES = 4, OUT = 2, SHARES = 1},
    {TERMS = 1, BM = 64, BN = 64, WM = 2, STAGES = 4, OUT = 2, SHARES = 256},
    {TERMS = 1, BM = 16, BN = 128, WM = 1, STAGES = 4, OUT = 2, SHARES = 256},
    {TERMS = 1, BM = 128, BN = 16, WM = 8, STAGES = 4, OUT = 2, SHARES = 256},
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
// Lines of an operand begin anywhere. Where all of them begin on 16 bytes they are copied by 16;
// otherwise by words of 4. A line of 16-bit elements that begins within a word comes with the half
// word before it, and lies one element further on in shared memory (`shift`).
//
// With SHARES > 1 the k of each tile is cut into shares of `each` steps, one for each z of the grid.
// Their sums go to matrices of their own, in float32: C is these matrices, one below the other, and
// sum_shares.cu adds them up. Alpha and beta are left to that.
//
//   load       copies of a step's lines of A and B into a stage
//   multiply   fragments from a stage, and the products of warps
//   store      sums to shared memory, and from there to C, row by row
#if SHARES > 1
#undef OUT
#define OUT 4
#endif
#include "mma.cuh"

constexpr int BK = 128 / SIZE, EACH = 4 / SIZE;         // k of a step; elements of a word
constexpr int WN = 8 / WM;                              // warps along n
constexpr int FM = BM / (16 * WM), FN = BN / (8 * WN);  // products of 16 x 8 of a warp, each way

#if SIZE == 4
typedef unsigned Element;
#else
typedef unsigned short Element;
#endif

// Starts a copy of BYTES, of which the first `real` are read and the others are zeros.
template <int BYTES>
__device__ __forceinline__ void copy_part(Shared to, const void* from, int real) {
#ifdef HYBRID_GEMM_EMULATOR
    __builtin_memset(to, 0, BYTES);
    __builtin_memcpy(to, from, real);
#else
    if constexpr (BYTES == 16)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(real)
                     : "memory");
    else
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(to), "l"(from),
                     "n"(BYTES), "r"(real)
                     : "memory");
#endif
}

// An operand's tile in a stage: BX lines along k, or BK lines across it. X is its side of C.
template <int BX, bool ALONG>
struct Tile {
    static constexpr int LINES = ALONG ? BX : BK, LENGTH = ALONG ? BK : BX;
    static constexpr int PITCH = ALONG ? 36 : (BX + 8) / EACH;  // words; no bank conflicts
    static constexpr int WORDS = LINES * PITCH;

    const Element* from;
    long long ld;
    int x0, x_end, k_end;
    bool vectors;   // every line begins on 16 bytes
    int odd, step;  // whether line 0 begins within a word; whether the next one differs in that

    __device__ Tile(const void* matrix, long long ld_, int x0_, int x_end_, int k_end_)
        : from((const Element*)matrix), ld(ld_), x0(x0_), x_end(x_end_), k_end(k_end_) {
        const unsigned long long at = (unsigned long long)matrix;
        vectors = (at | ld * SIZE) % 16 == 0;
        odd = SIZE == 2 ? at / 2 % 2 : 0;
        step = SIZE == 2 ? ld % 2 : 0;
    }
    __device__ bool shifted() const { return odd || step; }
    // Elements by which a line is shifted; tiles begin at even lines.
    __device__ __forceinline__ int shift(int line) const { return odd ^ (step & line); }

    __device__ __forceinline__ void load(unsigned* stage, int k0) const {
        const int line0 = ALONG ? x0 : k0, lines = min(LINES, (ALONG ? x_end : k_end) - line0);
        const int first = ALONG ? k0 : x0, length = (ALONG ? k_end : x_end) - first;
        if (vectors)
            load_vectors(stage, from + line0 * ld + first, lines, length);
        else
            load_words(stage, from + line0 * ld + first, lines, length, first == 0);
    }

    __device__ __forceinline__ void load_vectors(unsigned* stage, const Element* at, int lines,
                                                 int length) const {
        constexpr int EACH_LINE = LENGTH * SIZE / 16;  // vectors
#pragma unroll 4
        for (int i = 0; i < (LINES * EACH_LINE + THREADS - 1) / THREADS; ++i) {
            const int t = threadIdx.x + i * THREADS, line = t / EACH_LINE, v = t % EACH_LINE;
            if (LINES * EACH_LINE % THREADS && line >= LINES) break;
            const int off = v * (16 / SIZE);
            const int real = line < lines ? max(0, min(16, (length - off) * SIZE)) : 0;
            copy_part<16>(shared_address(stage + line * PITCH + 4 * v),
                          real ? at + line * ld + off : from, real);
        }
    }

    __device__ __forceinline__ void load_words(unsigned* stage, const Element* at, int lines,
                                               int length, bool begins) const {
        constexpr int EACH_LINE = LENGTH / EACH;  // words, and one more where 16 bits are shifted
#pragma unroll 4
        for (int i = 0; i < (LINES * EACH_LINE + THREADS - 1) / THREADS; ++i) {
            const int t = threadIdx.x + i * THREADS;
            if (LINES * EACH_LINE % THREADS && t >= LINES * EACH_LINE) break;
            load_word(stage, at, t / EACH_LINE, t % EACH_LINE, lines, length, begins);
        }
        if (SIZE == 2 && (int)threadIdx.x < LINES && shift(threadIdx.x))
            load_word(stage, at, threadIdx.x, EACH_LINE, lines, length, begins);
    }

    __device__ __forceinline__ void load_word(unsigned* stage, const Element* at, int line, int w,
                                              int lines, int length, bool begins) const {
        const int off = w * EACH - shift(line);
        const int real = line < lines ? max(0, min(4, (length - off) * SIZE)) : 0;
        unsigned* const to = stage + line * PITCH + w;
        if (SIZE == 2 && begins && off < 0) {  // the half before the line is another's
            ((Element*)to)[1] = real > 2 ? at[line * ld] : Element(0);
            return;
        }
        copy_part<4>(shared_address(to), real ? at + line * ld + off : from, real);
    }

    // Word w, along k, of line x across it. PLAIN: nothing is shifted.
    template <bool PLAIN>
    __device__ __forceinline__ unsigned word(const unsigned* stage, int x, int w) const {
        if constexpr (SIZE == 4) {
            return to_tf32(as_float(stage[ALONG ? x * PITCH + w : w * PITCH + x]));
        } else if constexpr (ALONG && PLAIN) {
            return stage[x * PITCH + w];
        } else {
            const Element* const halves = (const Element*)stage;
            const int one = ALONG ? x * 2 * PITCH + 2 * w + (PLAIN ? 0 : shift(x))
                                  : 2 * w * 2 * PITCH + x + (PLAIN ? 0 : shift(0));
            const int two = ALONG ? one + 1 : (2 * w + 1) * 2 * PITCH + x + (PLAIN ? 0 : shift(1));
            return halves[one] | (unsigned)halves[two] << 16;
        }
    }
};

typedef Tile<BM, !TRANS_A> TileA;
typedef Tile<BN, TRANS_B> TileB;
constexpr int STAGE = TileA::WORDS + TileB::WORDS;
static_assert(STAGE * 4 <= 144 * (BM + BN) + 2048, "the header says how large a stage is");

// A thread's sums: of each product of 16 x 8, pairs in two rows 8 apart.
typedef float Sums[FM][FN][4];

// Adds the products of a step's k for the warp's rows and columns from (row, col) of the tile on.
template <bool PLAIN>
__device__ __forceinline__ void multiply_step(Sums& sums, const unsigned* stage, const TileA& a,
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
                    a.template word<PLAIN>(stage, row + 16 * i + g + r % 2 * 8, w + t + r / 2 * 4);
        }
#pragma unroll
        for (int j = 0; j < FN; ++j) {
#pragma unroll
            for (int r = 0; r < 2; ++r)
                of_b[j][r] =
                    b.template word<PLAIN>(stage + TileA::WORDS, col + 8 * j + g, w + t + r * 4);
        }
#pragma unroll
        for (int i = 0; i < FM; ++i) {
#pragma unroll
            for (int j = 0; j < FN; ++j) mma(sums[i][j], of_a[i], of_b[j]);
        }
    }
}

// sums = the products of steps `first` to `end`.
template <bool PLAIN>
__device__ __forceinline__ void multiply(Sums& sums, unsigned* ring, const TileA& a, const TileB& b,
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
            b.load(ring + next * STAGE + TileA::WORDS, k0);
        }
        copies_commit();
        next = next == STAGES - 1 ? 0 : next + 1;
        if (step < first) continue;
        multiply_step<PLAIN>(sums, ring + stage * STAGE, a, b, row, col);
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
#pragma unroll 4
    for (int e = threadIdx.x; e < BM * BN; e += THREADS) {
        const int r = e / BN, c = e % BN;
        if (r >= rows || c >= cols) continue;
        Out* const to = C + (row0 + r) * ldc + col0 + c;
        const float sum = alpha * tile[r * LD + c];
        *to = narrowed(beta == 0 ? sum : sum + beta * widened(*to));
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, BM* BN > 64 * 64 ? 1 : 2)
    gemm_mma_in_place(const void* A, long long lda, const void* B, long long ldb, int m, int n,
                      int k, float alpha, float beta, void* C, long long ldc
#if SHARES > 1
                      ,
                      int each
#endif
    ) {
    extern __shared__ __align__(16) unsigned memory[];
    const int warp = threadIdx.x / 32, row = warp / WN * (FM * 16), col = warp % WN * (FN * 8);
    const int across = (n + BN - 1) / BN;
    const int row0 = blockIdx.x / across * BM, col0 = blockIdx.x % across * BN;
    const int steps = (k + BK - 1) / BK;
#if SHARES > 1
    const int first = blockIdx.z * each, end = min(first + each, steps);
    Out* const to = (Out*)C + (long long)blockIdx.z * m * ldc;
#else
    const int first = 0, end = steps;
    Out* const to = (Out*)C;
#endif
    const TileA a(A, lda, row0, m, k);
    const TileB b(B, ldb, col0, n, k);
    Sums sums = {};
    if (SIZE == 4 || !(a.shifted() || b.shifted()))
        multiply<true>(sums, memory, a, b, first, end, row, col);
    else
        multiply<false>(sums, memory, a, b, first, end, row, col);
    store(sums, (float*)memory, row, col, m, n, row0, col0, alpha, beta, to, ldc);
}
