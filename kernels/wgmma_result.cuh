// From a warpgroup's sums to C. A C of float32 is stored from registers. A C of 16 bits goes
// through boxes in shared memory, which a warp of its own hands to TMA while the next tile is
// multiplied; ring.cuh draws which of them lie in a borrowed stage. BM, BN, TERMS, OUT,
// SHARES and DTYPE_* are the including file's.
//
// A thread's sums: of each 8 columns of its warpgroup's 64 x BN it has a pair, in two rows 8 apart;
// sums[4 j] and [4 j + 1] are the pair of the first row, [4 j + 2] and [4 j + 3] that of the
// second.
#pragma once
#include "numbers.cuh"
#include "tensor_shares.cuh"

// Two numbers rounded to 16 bits, the first in the lower half.
__device__ __forceinline__ unsigned rounded(float first, float second) {
    unsigned pair;
#if DTYPE_bfloat16
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
#else
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
#endif
    return pair;
}

// Writes a warpgroup's 64 x BN, in rows of BN.
__device__ __forceinline__ void write_part(const float (&sums)[BN / 2], float* to) {
    to += (threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4) * BN + threadIdx.x % 4 * 2;
#pragma unroll
    for (int i = 0; i < BN / 2; i += 2) {
        float* const pair = to + i / 2 % 2 * 8 * BN + i / 4 * 8;
        *reinterpret_cast<float2*>(pair) = make_float2(sums[i], sums[i + 1]);
    }
}

// A warpgroup's 64 x BN of a C of 16 bits is BOXES boxes of 64 x 64, swizzled by 128 bytes. The
// first BORROWED of them lie in the stage that the tile read last, the others beside the ring.
constexpr int BOX_BYTES = 64 * 128;
constexpr int BOXES = OUT == 2 ? BN / 64 : 0;
constexpr int BORROWED = BOXES > 2 ? 2 : 0;
constexpr int BESIDE_BYTES = BM / 64 * (BOXES - BORROWED) * BOX_BYTES;

struct Boxes {
    unsigned stage, beside;  // addresses in shared memory

    // Where box j of a warpgroup begins.
    __device__ __forceinline__ unsigned at(int consumer, int j) const {
        return j < BORROWED ? stage + (consumer * BORROWED + j) * BOX_BYTES
                            : beside + (consumer * (BOXES - BORROWED) + j - BORROWED) * BOX_BYTES;
    }
};

// Barriers by number: a warpgroup's boxes may be written again (FREE + consumer); all boxes are
// written; all warpgroups have read the borrowed stage.
constexpr int FREE = 8, WRITTEN = 11, READ = 12;

struct alignas(2 * OUT) Pair {  // neighbours in a row of C
    Out x, y;
};

struct Result {
    int m, n;
    float alpha, beta;
    const int *exponent_a, *exponent_b;
    Out* C;
    long long ldc;

    // Where the sums of a share of k go.
    __device__ __forceinline__ Result of_share(int share) const {
        Result part = *this;
        part.C = matrix_of_share(C, share, m, ldc);
        return part;
    }

    // Whether rows of C begin on 16 bytes. TMA, which writes 16 bytes at a time, needs that of the
    // ends of rows too.
    __device__ __forceinline__ bool vectors() const {
        return (ldc * OUT | (OUT == 2) * 2 * n | reinterpret_cast<u64>(C)) % 16 == 0;
    }

    // sums = alpha 2^exponents sums + beta C, for the warpgroup's 64 x BN at (row, col).
    __device__ __forceinline__ void scale(float (&sums)[BN / 2], int row, int col) const {
        row += threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4;
        if (TERMS == 3 && exponent_a) {
            int of_rows[2] = {};
#pragma unroll
            for (int half = 0; half < 2; ++half)
                if (row + 8 * half < m) of_rows[half] = exponent_a[row + 8 * half];
#pragma unroll
            for (int i = 0; i < BN / 2; i += 4) {
#pragma unroll
                for (int j = 0; j < 2; ++j) {
                    const int c = col + 2 * i + threadIdx.x % 4 * 2 + j;
                    const int of_col = c < n ? exponent_b[c] : 0;
                    sums[i + j] = scaled(sums[i + j], of_rows[0] + of_col);
                    sums[i + j + 2] = scaled(sums[i + j + 2], of_rows[1] + of_col);
                }
            }
        }
        if (OUT == 4 || alpha != 1) {  // with float32 that branch would make products wait
#pragma unroll
            for (int i = 0; i < BN / 2; ++i) sums[i] *= alpha;
        }
        if (beta == 0) return;
        const u64 rows = ldc * OUT | reinterpret_cast<u64>(C);  // what they begin on
        const int from = col + threadIdx.x % 4 * 2;
#if OUT == 2
        if (rows % 16 == 0 && col + BN <= n) return add_vectors(sums, row, col);
#endif
        const bool whole = rows % sizeof(Pair) == 0 && col + BN <= n;
        whole ? add_old<true>(sums, row, from) : add_old<false>(sums, row, from);
    }

    // sums += beta C, from the thread's first row and column on. A row beyond the last reads the
    // last one, for its sums are not stored. WHOLE: all columns are in C, and pairs of them are
    // aligned. There is no branch between loads, so that many are on their way together: as many as
    // there are registers for.
    template <bool WHOLE>
    __device__ __forceinline__ void add_old(float (&sums)[BN / 2], int row, int col) const {
        constexpr int PAIRS = BN / 8, TURNS = (PAIRS * OUT + 63) / 64, AT_ONCE = PAIRS / TURNS;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const Out* const from = C + min(row + 8 * half, m - 1) * ldc + col;
#pragma unroll
            for (int first = 0; first < PAIRS; first += AT_ONCE) {
                Pair old[AT_ONCE];
#pragma unroll
                for (int j = 0; j < AT_ONCE; ++j) {
                    const int c = 8 * (first + j);
                    if constexpr (WHOLE) {
                        old[j] = *reinterpret_cast<const Pair*>(from + c);
                    } else {
                        old[j].x = col + c < n ? from[c] : Out(0);
                        old[j].y = col + c + 1 < n ? from[c + 1] : Out(0);
                    }
                }
#pragma unroll
                for (int j = 0; j < AT_ONCE; ++j) {
                    float* const x = sums + 4 * (first + j) + 2 * half;
                    x[0] += beta * widened(old[j].x), x[1] += beta * widened(old[j].y);
                }
                __syncwarp();
            }
        }
    }

#if OUT == 2
    // As `add_old`, with 16 bytes a load: of each 32 columns the four threads of a row read eight
    // each, and then exchange pairs.
    __device__ __forceinline__ void add_vectors(float (&sums)[BN / 2], int row, int col) const {
        constexpr int LOADS = BN / 32;
        col += threadIdx.x % 4 * 8;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const Out* const from = C + min(row + 8 * half, m - 1) * ldc + col;
            uint4 old[LOADS];
#pragma unroll
            for (int i = 0; i < LOADS; ++i) old[i] = *reinterpret_cast<const uint4*>(from + 32 * i);
#pragma unroll
            for (int i = 0; i < LOADS; ++i) {
                unsigned pairs[4] = {old[i].x, old[i].y, old[i].z, old[i].w};
                exchange<1>(pairs), exchange<2>(pairs);
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    float* const x = sums + 4 * (4 * i + j) + 2 * half;
                    const Pair pair = *reinterpret_cast<const Pair*>(pairs + j);
                    x[0] += beta * widened(pair.x), x[1] += beta * widened(pair.y);
                }
            }
            __syncwarp();
        }
    }

    // A step of transposing the 4 x 4 values of four neighbouring threads: those apart by BIT
    // exchange the values whose number has that bit where the thread's has not, and the reverse.
    template <int BIT>
    __device__ __forceinline__ static void exchange(unsigned (&values)[4]) {
        const bool upper = threadIdx.x & BIT;
#pragma unroll
        for (int low = 0; low < 4; ++low) {
            if (low & BIT) continue;
            const int high = low | BIT;
            const unsigned got = __shfl_xor_sync(~0u, upper ? values[low] : values[high], BIT);
            (upper ? values[low] : values[high]) = got;
        }
    }
#endif

#if OUT == 4
    // Stores the warpgroup's 64 x BN at (row, col) of C.
    __device__ __forceinline__ void store(float (&sums)[BN / 2], int row, int col, int,
                                          Boxes) const {
        scale(sums, row, col);
        row += threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4;
        if (vectors() && col + BN <= n)
            write<true>(sums, row, col);
        else
            write<false>(sums, row, col);
    }

    // Neighbouring threads exchange pairs: each then has four neighbours in a row, the even thread
    // in columns 16 j to 16 j + 7, the odd one in the eight after them, and stores 16 bytes.
    template <bool WHOLE>
    __device__ __forceinline__ void write(const float (&sums)[BN / 2], int row, int col) const {
        const bool odd = threadIdx.x % 2;
        col += 8 * odd + threadIdx.x % 4 / 2 * 4;
#pragma unroll
        for (int half = 0; half < 2; ++half, row += 8) {
            float* const to = C + row * ldc + col;
#pragma unroll
            for (int j = 0; j < BN / 8; j += 2) {
                // Its pairs are x[0], x[1] and x[4], x[5].
                const float* const x = sums + 4 * j + 2 * half;
                const float send[2] = {odd ? x[0] : x[4], odd ? x[1] : x[5]};
                const float got[2] = {__shfl_xor_sync(~0u, send[0], 1),
                                      __shfl_xor_sync(~0u, send[1], 1)};
                float4 four;
                four.x = odd ? got[0] : x[0];
                four.y = odd ? got[1] : x[1];
                four.z = odd ? x[4] : got[0];
                four.w = odd ? x[5] : got[1];
                if (row >= m) continue;
                if constexpr (WHOLE) {
                    *reinterpret_cast<float4*>(to + 8 * j) = four;
                } else {
                    const float each[] = {four.x, four.y, four.z, four.w};
#pragma unroll
                    for (int e = 0; e < 4; ++e)
                        if (col + 8 * j + e < n) to[8 * j + e] = each[e];
                }
            }
        }
    }
#else
    // Writes the warpgroup's 64 x BN, which belong at (row, col) of C, to its boxes: first to those
    // beside the ring, then, once all warpgroups are done with the stage, to those borrowed.
    __device__ __forceinline__ void store(float (&sums)[BN / 2], int row, int col, int consumer,
                                          Boxes boxes) const {
        scale(sums, row, col);
        barrier_sync(FREE + consumer, 128 + 32);
#pragma unroll
        for (int j = BORROWED; j < BOXES; ++j) write_box(sums, j, boxes.at(consumer, j));
        if (BORROWED) barrier_sync(READ, 2 * BM);
#pragma unroll
        for (int j = 0; j < BORROWED; ++j) write_box(sums, j, boxes.at(consumer, j));
        if (!vectors()) {
            __syncwarp();
            for (int j = 0; j < BOXES; ++j) copy_rows(boxes.at(consumer, j), row, col + 64 * j);
        }
        fence_for_copies();
        barrier_signal(WRITTEN, 2 * BM + 32);
    }

    // Writes a warp's 16 rows of box j from its sums.
    __device__ __forceinline__ static void write_box(const float (&sums)[BN / 2], int j,
                                                     unsigned box) {
        const int lane = threadIdx.x % 32;
        const unsigned to =
            box + (threadIdx.x / 32 % 4 * 16 + lane % 16) * 128 + (lane / 16 ^ lane % 8) * 16;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float* const x = sums + 32 * j + 8 * i;
            store_matrices(to ^ 32 * i, rounded(x[0], x[1]), rounded(x[2], x[3]),
                           rounded(x[4], x[5]), rounded(x[6], x[7]));
        }
    }

    // Copies a warp's 16 rows of a box to C, at (row, col) of the box, where TMA cannot.
    __device__ __forceinline__ void copy_rows(unsigned box, int row, int col) const {
        const int lane = threadIdx.x % 32, first = threadIdx.x / 32 % 4 * 16;
#pragma unroll 4
        for (int r = first; r < min(first + 16, m - row); ++r) {
#pragma unroll
            for (int c = lane; c < 64; c += 32)
                if (col + c < n)
                    C[(row + r) * ldc + col + c] =
                        shared_half(box + r * 128 + (c / 8 ^ r % 8) * 16 + c % 8 * 2);
        }
    }

    // Called by the warp that stores, of which one lane `stores`: once all boxes of the block's
    // tile are written, starts their stores to C at (row, col). Returns when the borrowed stage has
    // been read; the other boxes have been read after the next `stores_wait<0>`.
    __device__ __forceinline__ void store_boxes(const TensorMap& map, int row, int col, Boxes boxes,
                                                bool stores) const {
        if (stores) stores_wait<0>();
        __syncwarp();
#pragma unroll
        for (int consumer = 0; consumer < BM / 64; ++consumer)
            barrier_signal(FREE + consumer, 128 + 32);
        barrier_sync(WRITTEN, 2 * BM + 32);
        if (stores && vectors()) {
#pragma unroll
            for (int j = 0; j < BOXES; ++j) {
#pragma unroll
                for (int consumer = 0; consumer < BM / 64; ++consumer) {
                    const int r = row + 64 * consumer, c = col + 64 * j;
                    if (r < m && c < n) store_box(boxes.at(consumer, j), map, c, r, 0);
                }
                if (j + 1 == BORROWED) stores_commit();
            }
            stores_commit();
            stores_wait<1>();
        }
        __syncwarp();
    }
#endif
};
