/*---
summary   = "up to 16 rows or columns by mma.sync: the large matrix is read once, as it lies"
entry     = "gemm_skinny"
rung      = 99
# THIN    most rows or columns of the thin operand
# WIDE    lines of the large matrix that a block takes, of which each makes a row or column of C
# STAGES  stages of the ring in shared memory: one is multiplied, the others are on their way
# BLOCKS  blocks of the grid to aim at, by sharing k where C has fewer tiles
# KIB     of the large matrix that a block reads at least where blocks share k
# OUT: see numbers.cuh
params    = [
    {THIN = 8, WIDE = 64, STAGES = 4, BLOCKS = 264, KIB = 64, OUT = 2},
    {THIN = 8, WIDE = 64, STAGES = 3, BLOCKS = 396, KIB = 64, OUT = 2},
    {THIN = 16, WIDE = 64, STAGES = 4, BLOCKS = 264, KIB = 64, OUT = 2},
    {THIN = 16, WIDE = 64, STAGES = 3, BLOCKS = 396, KIB = 64, OUT = 2},
    {THIN = 8, WIDE = 64, STAGES = 4, BLOCKS = 264, KIB = 64, OUT = 4},
    {THIN = 8, WIDE = 64, STAGES = 3, BLOCKS = 396, KIB = 64, OUT = 4},
    {THIN = 16, WIDE = 64, STAGES = 4, BLOCKS = 264, KIB = 64, OUT = 4},
    {THIN = 16, WIDE = 64, STAGES = 3, BLOCKS = 396, KIB = 64, OUT = 4},
]
block     = ["256", "1", "1"]
grid      = ["ceil(max(m, n) / WIDE) * max(1, min(ceil((BLOCKS + 1) / max(1, ceil(max(m, n) / WIDE))) - 1, ceil((k * WIDE * SIZE + 1) / (KIB * 1024)) - 1, ceil(k / 256)))", "1", "1"]
tile      = ["WIDE", "THIN"]
scales    = ["BLOCKS"]
# the ring, vectors beyond it, and two steps of the thin operand; or sums
shared    = "max(STAGES * (256 * WIDE + 2048) + 608 * THIN, 16 * THIN * (WIDE + 1))"
workspace = "BLOCKS * WIDE * THIN * 4"
flags     = "4 * BLOCKS"
limits    = ["min(m, n) <= THIN"]
require   = [
    "THIN % 8 == 0", "THIN <= 16", "WIDE % 64 == 0", "THIN * WIDE <= 2048", "STAGES >= 2",
    "OUT % 2 == 0", "OUT <= 4",
]
dtypes    = ["float16", "bfloat16"]
early     = true
arch      = ">=80"
runs_on   = ["cuda", "emulator"]
source    = "this project: docs/tensor-cores.md"
---*/

// C = alpha op(A) op(B) + beta C where C has a few rows or columns: THIN lines of one operand times
// the many lines of the other, the matrix, whose bytes decide the time.
//
// The matrix comes by vectors that begin on 16 bytes, whatever its lines begin on. VEC lines
// further a line lies as far from 16 bytes as before, so each of the VEC warps takes lines of the
// matrix that lie alike, as in gemv.cuh:
//
//   Along   lines along k: warp c makes C's lines c, c + VEC, ... of the block's WIDE, and reads
//           the thin operand as far from a vector as these lines lie; what is before the first
//           vector is multiplied apart
//   Across  lines across k: warp c adds up every VEC-th k from c on, of WIDE elements that begin
//           `off` elements before the block's, and of a vector beyond them
//
// A product of a warp is 16 x 8 with 16 of k, and which k these are is free, as long as both
// operands have the same in the same place. So a thread's vector along k is used as it came; and
// across k a thread has 4 of k, of which neighbours make pairs.
//
// A step has STEP of k. A warp copies its own part of each stage, so that warps wait for each other
// for the thin operand alone, of which shared memory has two steps. Blocks share k as in gemv.cuh.
#include "narrow.cuh"

#include "early_launch.cuh"
#include "lines.cuh"
#include "mma.cuh"
#include "shares.cuh"

constexpr int WARPS = THREADS / 32;
static_assert(WARPS == VEC, "a warp for each way that lines lie");
constexpr int TILE = THIN * WIDE, PARTS = THIN / 8;   // of C; products side by side along THIN
constexpr int STEP = 128, UNIT = 256;                 // blocks share k in whole units
constexpr int GROUPS = WIDE / 64;                     // of 8 lines, or vectors, of a thread
constexpr int SLOTS = 4;                              // tiles of sums that warps across k leave
constexpr int WIDER = WIDE + 1, SLOT = THIN * WIDER;  // so that fewer banks meet

// A warp's part of a stage: ROWS rows of VECTORS vectors, which are lines along k, or k across it.
template <bool ALONG>
constexpr int ROWS = ALONG ? WIDE / VEC : STEP / VEC;
template <bool ALONG>
constexpr int VECTORS = (ALONG ? STEP : WIDE) / VEC;
constexpr int OF_WARP = WIDE * STEP / VEC / VEC;  // vectors

// Where a line of the thin operand begins in shared memory: so that 8 lines, read at 4 places that
// are 16 bytes apart, meet no bank twice.
__device__ __forceinline__ int line_at(int line) { return line * 138 + line / 4 * 56; }

struct Stage {
    Vec vectors[WARPS][OF_WARP];
    Vec beyond[WARPS][STEP / VEC];  // across k: one more of each row
};
struct Memory {
    Stage ring[STAGES];
    T thin[2][THIN * 152];
};
static_assert(sizeof(Memory) == STAGES * (256 * WIDE + 2048) + 608 * THIN, "as the header says");

// What a block makes: `count` lines of the thin operand times lines of the matrix from w0 on, for k
// from k0 to k1 of `depth`.
struct Work {
    Operand matrix, thin;
    int count, w0, k0, k1, depth;
};

__device__ __forceinline__ unsigned word(const Vec& v, int i) {
    return reinterpret_cast<const unsigned*>(&v)[i];
}

// Where vector v of a row lies in the warp's part of a stage: so that 8 threads side by side, which
// read two rows of 4 or four rows of 2, meet no bank twice.
template <bool ALONG>
__device__ __forceinline__ int place(int row, int v) {
    return row * VECTORS<ALONG> + (v ^ (ALONG ? row % 2 * 4 : row / 4 % 4 * 2));
}

// A thread's elements of the thin operand on their way to shared memory: of STEP of k, and of the
// VEC after them, which a matrix along k reads, too.
struct Thin {
    static constexpr int EACH = THIN * STEP / THREADS, LINES = THREADS / STEP;
    static_assert(4 % LINES == 0, "line_at of a sum is a sum");
    T x[EACH] = {}, after = T(0);
    const T *at, *at_after;     // in memory, the first, and that of those after STEP
    int to, to_after;           // in shared memory
    int left, left_after, few;  // of k, from these on; of x that are in lines of the operand
    bool along;                 // each of the next line, and otherwise of the same one
    long long next, step;       // in memory, from one to the next, and from step to step

    // Threads side by side read neighbours in memory.
    __device__ __forceinline__ Thin(const Work& of) : along(of.thin.p == 1) {
        const Operand& thin = of.thin;
        const int line = along ? threadIdx.x / STEP : threadIdx.x % THIN;
        const int p = along ? threadIdx.x % STEP : threadIdx.x / THIN;
        few = along ? (of.count - line + LINES - 1) / LINES : line < of.count ? EACH : 0;
        next = along ? LINES * thin.x : THREADS / THIN * thin.p;
        at = thin.at + line * thin.x + (of.k0 + p) * thin.p;
        to = line_at(line) + p;
        left = of.k1 - of.k0 - p;
        const int other = threadIdx.x / VEC, q = STEP + threadIdx.x % VEC;
        at_after = thin.at + other * thin.x + (of.k0 + q) * thin.p;
        to_after = line_at(other) + q;
        left_after = other < of.count ? of.k1 - of.k0 - q : 0;
        step = STEP * thin.p;
    }
    // Asks for the next step.
    __device__ __forceinline__ void ask() {
        UNROLL for (int i = 0; i < EACH; ++i) x[i] =
            i < few && (along ? 0 : i * (THREADS / THIN)) < left ? at[i * next] : T(0);
        after = left_after > 0 ? *at_after : T(0);
        at += step, at_after += step;
        left -= STEP, left_after -= STEP;
    }
    __device__ __forceinline__ void store(T* shared) const {
        UNROLL for (int i = 0; i < EACH; ++i)
            shared[to + (along ? line_at(i * LINES) : i * (THREADS / THIN))] = x[i];
        if (threadIdx.x < THIN * VEC) shared[to_after] = after;
    }
};

// Sums of a warp's lines: thread (g, t) reads lines g + 8 l, and has sums of lines 2 t + 8 l and
// the next, with the thin operand's g and g + 8.
struct Along {
    const Work& of;
    const T* line;  // the warp's first
    int begin;      // elements before the first vector
    int rows;       // lines that there are
    Sum sums[GROUPS][4] = {};

    __device__ __forceinline__ Along(const Work& of_) : of(of_) {
        line = of.matrix.at + (of.w0 + int(threadIdx.x) / 32) * of.matrix.x;
        begin = before_vector(line + of.k0);
        rows = (of.matrix.end - of.w0 - int(threadIdx.x) / 32 + VEC - 1) / VEC;
    }
    __device__ __forceinline__ void copy(Stage& to, int k) const {
        constexpr int APART = 32 / VECTORS<true>;  // rows
        static_assert(APART % 2 == 0, "a thread's vectors have one place in their rows");
        const int lane = threadIdx.x % 32, row = lane / VECTORS<true>, v = lane % VECTORS<true>;
        const int p = k + begin + VEC * v;
        const long long next = VEC * APART * of.matrix.x;
        const T* from = line + VEC * row * of.matrix.x + p;
        Vec* part = to.vectors[threadIdx.x / 32] + place<true>(row, v);
        if (k + STEP + VEC <= of.k1 && rows >= ROWS<true>) {
            UNROLL for (int i = 0; i < OF_WARP / 32; ++i) {
                copy_async<16>(shared_address(part + 32 * i), from);
                from += next;
            }
            return;
        }
        const int real = MOST(0, LEAST(VEC, of.k1 - p)) * SIZE;
#pragma unroll 1
        for (int i = row; i < LEAST(rows, ROWS<true>); i += APART) {
            copy_some<16>(shared_address(part), real ? from : line + begin, real);
            from += next, part += 32;
        }
    }
    // Adds the products of 8 elements of each line with x.
    __device__ __forceinline__ void add(const Vec (&y)[GROUPS], const unsigned (&x)[PARTS][4]) {
        UNROLL for (int half = 0; half < 4; half += 2) {
            unsigned a[4] = {x[0][half], 0, x[0][half + 1], 0};
            if (PARTS > 1) a[1] = x[PARTS - 1][half], a[3] = x[PARTS - 1][half + 1];
            UNROLL for (int l = 0; l < GROUPS; ++l) {
                const unsigned b[2] = {word(y[l], half), word(y[l], half + 1)};
                mma(sums[l], a, b);
            }
        }
    }
    // Adds what lies before the first vector, by the threads with t = 0.
    __device__ __forceinline__ void add_first() {
        const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
        Vec y[GROUPS] = {};
        unsigned x[PARTS][4] = {};
        UNROLL for (int q = 0; q < VEC; ++q) {
            const int p = of.k0 + q;
            if (t > 0 || q >= begin || p >= of.k1) continue;
            UNROLL for (int l = 0; l < GROUPS; ++l) if (g + 8 * l < rows) y[l].x[q] =
                line[VEC * (g + 8 * l) * of.matrix.x + p];
            UNROLL for (int part = 0; part < PARTS; ++part) {
                const int i = 8 * part + g;
                const unsigned one =
                    i < of.count ? of.thin.at[i * of.thin.x + p * of.thin.p] : T(0);
                x[part][q / 2] |= one << 16 * (q % 2);
            }
        }
        add(y, x);
    }
    __device__ __forceinline__ void multiply(const Stage& from, const T* thin) {
        const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
        const Vec* const part_of = from.vectors[threadIdx.x / 32];
        const unsigned* const thin_words =
            reinterpret_cast<const unsigned*>(thin) + (line_at(g) + begin + VEC * t) / 2;
        UNROLL for (int j = 0; j < STEP / 32; ++j) {
            unsigned x[PARTS][4];
            UNROLL for (int part = 0; part < PARTS; ++part) {
                const unsigned* const words = thin_words + (line_at(8 * part) + 32 * j) / 2;
                UNROLL for (int i = 0; i < 4; ++i) x[part][i] =
                    from_bit(words[i], words[i + 1], begin % 2 * 16);
            }
            Vec y[GROUPS];
            UNROLL for (int l = 0; l < GROUPS; ++l) y[l] =
                part_of[place<true>(g + 8 * l, 4 * j + t)];
            add(y, x);
        }
    }
    __device__ __forceinline__ void leave(Sum* parts) const {
        const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
        UNROLL for (int l = 0; l < GROUPS; ++l) {
            UNROLL for (int i = 0; i < 2 * PARTS; ++i)
                parts[(g + i / 2 * 8) * WIDER + threadIdx.x / 32 + VEC * (2 * t + i % 2 + 8 * l)] =
                    sums[l][i];
        }
    }
};

// Sums of WIDE elements by the warp's k: thread (g, t) has 2 neighbours of each vector 8 v + g at a
// time, and 2 t and 2 t + 1 of each 8 along THIN.
struct Across {
    const Work& of;
    const T* first;  // vector of the warp's lines
    int off, begin;
    Sum sums[GROUPS][4][PARTS][4] = {}, more[PARTS][4] = {};

    __device__ __forceinline__ Across(const Work& of_) : of(of_) {
        first = of.matrix.at + (of.k0 + int(threadIdx.x) / 32) * of.matrix.p + of.w0;
        off = after_vector(first);
        begin = of.w0 - off;
        first -= off;
    }
    // Copies the vector that begins at element `i` of the line of k.
    __device__ __forceinline__ void copy_vector(Vec* to, int k, int i) const {
        const long long line = k * of.matrix.p;
        const int real = k < of.k1 ? MOST(0, LEAST(VEC, of.matrix.end - i)) : 0;
        if (line + i < 0) {  // before the matrix itself
            UNROLL for (int q = 0; q < VEC; ++q) to->x[q] =
                i + q >= 0 && q < real ? of.matrix.at[line + i + q] : T(0);
            return;
        }
        copy_some<16>(shared_address(to), real ? of.matrix.at + line + i : first, real * SIZE);
    }
    __device__ __forceinline__ void copy(Stage& to, int k) const {
        constexpr int APART = 32 / VECTORS<false>;  // rows
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        const int row = lane / VECTORS<false>, v = lane % VECTORS<false>, x = begin + VEC * v;
        Vec *const part = to.vectors[warp], *const beyond = to.beyond[warp] + lane;
        const bool takes_beyond = off && lane < STEP / VEC;
        k += warp;
        // The last lines, of which a vector can reach out of the matrix, or the first ones.
        if (k - warp + STEP > LEAST(of.k1, of.depth - VEC) || (k < VEC && begin < 0)) {
#pragma unroll 1
            for (int i = 0; i < OF_WARP / 32; ++i)
                copy_vector(part + place<false>(row + APART * i, v), k + VEC * (row + APART * i),
                            x);
            if (takes_beyond) copy_vector(beyond, k + VEC * lane, begin + WIDE);
            return;
        }
        // Beyond the end of a line its first vector again: nobody asks for what comes of it.
        const int left = of.matrix.end - x, after = of.matrix.end - begin - WIDE;
        const T* from = first + (k - warp - of.k0 + VEC * row) * of.matrix.p;
        from += left > 0 ? VEC * v : 0;
        UNROLL for (int i = 0; i < OF_WARP / 32; ++i) {
            Vec* const at = part + place<false>(row + APART * i, v);
            copy_async<16>(shared_address(at), from);
            from += VEC * APART * of.matrix.p;
        }
        if (takes_beyond) {
            const long long line = (k - warp - of.k0 + VEC * lane) * of.matrix.p;
            copy_async<16>(shared_address(beyond), first + line + (after > 0 ? WIDE : 0));
        }
    }
    __device__ __forceinline__ void add_first() {}
    __device__ __forceinline__ void multiply(const Stage& from, const T* thin) {
        const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
        unsigned x[PARTS][2];
        UNROLL for (int part = 0; part < PARTS; ++part) {
            const T* const at = thin + line_at(8 * part + g) + warp + VEC * 4 * t;
            UNROLL for (int i = 0; i < 2; ++i) x[part][i] =
                at[2 * i * VEC] | (unsigned)at[(2 * i + 1) * VEC] << 16;
        }
        UNROLL for (int v = 0; v < GROUPS; ++v) {
            Vec y[4];
            UNROLL for (int i = 0; i < 4; ++i) y[i] =
                from.vectors[warp][place<false>(4 * t + i, 8 * v + g)];
            UNROLL for (int i = 0; i < 4; ++i) {
                const unsigned a[4] = {low_pair(word(y[0], i), word(y[1], i)),
                                       high_pair(word(y[0], i), word(y[1], i)),
                                       low_pair(word(y[2], i), word(y[3], i)),
                                       high_pair(word(y[2], i), word(y[3], i))};
                UNROLL for (int part = 0; part < PARTS; ++part) mma(sums[v][i][part], a, x[part]);
            }
        }
        if (!off) return;
        T y[4];
        UNROLL for (int i = 0; i < 4; ++i) y[i] = from.beyond[warp][4 * t + i].x[g];
        const unsigned a[4] = {low_pair(y[0], y[1]), 0, low_pair(y[2], y[3]), 0};
        UNROLL for (int part = 0; part < PARTS; ++part) mma(more[part], a, x[part]);
    }
    // Warps 4 to 7 leave their sums, and the others add theirs.
    __device__ __forceinline__ void leave(Sum* parts) const {
        const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
        Sum* const slot = parts + warp % SLOTS * SLOT;
        UNROLL for (int turn = 1; turn >= 0; --turn) {
            if (warp / SLOTS == turn) {
                auto to = [&](int line, int at, Sum sum) {
                    Sum& total = slot[line * WIDER + at];
                    total = turn == 1 ? sum : total + sum;
                };
                UNROLL for (int part = 0; part < PARTS; ++part) {
                    UNROLL for (int x = 0; x < 4; ++x) {
                        const int line = 8 * part + 2 * t + x % 2;
                        UNROLL for (int v = 0; v < GROUPS; ++v) {
                            UNROLL for (int i = 0; i < 4; ++i) {
                                const int at = 64 * v + VEC * g + 2 * i + x / 2 - off;
                                if (at >= 0) to(line, at, sums[v][i][part][x]);
                            }
                        }
                        if (x < 2 && g < off) to(line, WIDE + g - off, more[part][x]);
                    }
                }
            }
            __syncthreads();
        }
    }
};

// Leaves the sums of a block in `parts`.
template <typename Way>
__device__ __forceinline__ void sum_up(const Work& of, Memory& memory, Sum* parts) {
    Way way(of);
    const int steps = (of.k1 - of.k0 + STEP - 1) / STEP;
#pragma unroll 1
    for (int i = 0; i < STAGES - 1; ++i) {
        if (i < steps) way.copy(memory.ring[i], of.k0 + i * STEP);
        copies_commit();
    }
    Thin thin(of);
    thin.ask();
    way.add_first();
    thin.store(memory.thin[0]);
    int stage = 0, next = STAGES - 1;  // that is multiplied; that is filled
#pragma unroll 1
    for (int i = 0; i < steps; ++i) {
        const int k = of.k0 + i * STEP;
        thin.ask();
        __syncwarp();  // all of the warp are done with the stage
        if (i + STAGES - 1 < steps) way.copy(memory.ring[next], k + (STAGES - 1) * STEP);
        copies_commit();
        copies_wait<STAGES - 1>();
        __syncthreads();  // the step is there, and all are done with the one before
        way.multiply(memory.ring[stage], memory.thin[i % 2]);
        thin.store(memory.thin[(i + 1) % 2]);
        stage = stage == STAGES - 1 ? 0 : stage + 1;
        next = next == STAGES - 1 ? 0 : next + 1;
    }
    copies_wait<0>();
    __syncthreads();
    way.leave(parts);
    __syncthreads();
}

extern "C" __global__ void __launch_bounds__(THREADS, 2)
    gemm_skinny(int m, int n, int k, float alpha, const void* A, long long lda, const void* B,
                long long ldb, float beta, void* C, long long ldc, float* workspace,
                unsigned* flags) {
    DYNAMIC_SHARED(raw);
    Memory& memory = *reinterpret_cast<Memory*>(raw);
    Sum* const parts = reinterpret_cast<Sum*>(raw);
    const Operand a = lines_of_a((const T*)A, lda, m), b = lines_of_b((const T*)B, ldb, n);
    const bool columns = n <= m, along = columns ? !TRANS_A : TRANS_B;
    const Operand matrix = columns ? a : b, thin = columns ? b : a;

    const int tiles = (matrix.end + WIDE - 1) / WIDE, shares = gridDim.x / tiles;
    const int tile = blockIdx.x / shares, share = blockIdx.x - tile * shares, w0 = tile * WIDE;
    const int units = (k + UNIT - 1) / UNIT, least = units / shares, more = units - least * shares;
    const int first = run_begin(share, least, more);
    const int k0 = first * UNIT, k1 = LEAST(k, (first + run_length(share, least, more)) * UNIT);
    const Work work = {matrix, thin, thin.end, w0, k0, k1, k};

    wait_for_launch_before();
    if (along)
        sum_up<Along>(work, memory, parts);
    else
        sum_up<Across>(work, memory, parts);
    const int slots = along ? 1 : SLOTS;
    auto total = [&](int e) {
        const int at = e / WIDE * WIDER + e % WIDE;
        Sum sum = parts[at];
        for (int i = 1; i < slots; ++i) sum += parts[i * SLOT + at];
        return sum;
    };
    if (shares > 1) {
        Sum* const all = workspace + (long long)tile * shares * TILE;
        for (int e = threadIdx.x; e < TILE; e += THREADS) all[share * TILE + e] = total(e);
        if (!last_of(flags + tile, shares)) return;
        add_shares<THREADS, TILE>(all, shares, parts);
    }
#pragma unroll 4
    for (int e = threadIdx.x; e < TILE; e += THREADS) {
        const int line = columns ? e % THIN : e / WIDE, i = columns ? e / THIN : e % WIDE;
        if (line >= thin.end || w0 + i >= matrix.end) continue;
        const int at = line * WIDE + i;
        Out* const to = (Out*)C + (columns ? (w0 + i) * ldc + line : line * ldc + w0 + i);
        *to = result(to, shares > 1 ? parts[at] : total(at), alpha, beta);
    }
}
