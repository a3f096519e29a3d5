// The main loop of `tuned` and its relatives: a tile of C from a ring of stages in shared memory.
// There are no separate producers and consumers: every thread loads and multiplies. Parameters of
// these kernels:
//
//   BM      rows of C that a block computes
//   BN      columns of C that a block computes
//   BK      k of a step: what one stage of the ring in shared memory holds
//   TM      rows of C that a thread computes
//   TN      columns of C that a thread computes
//   LM      lanes of a warp along the rows of C; the other 32 / LM are along its columns
//   KG      groups of warps that share the k of each step; their sums are added at the end
//   STAGES  stages of the ring: STAGES - 1 steps are on their way while one is multiplied
//
//     stage       0        1        2        3        4         STAGES = 5
//             +--------+--------+--------+--------+--------+
//             | A    B | A    B | A    B | A    B | A    B |    BK of k each
//             +--------+--------+--------+--------+--------+
//             |  step   |                          |    step  |
//             |  s      |  steps s + 1 to s + 3    |    s + 4 |
//             |         |                          |          |
//             multiplied  on their way (cp.async)    copies are started into the stage
//                                                    that step s - 1 has left
//
// One barrier a step says both that the next stage is full and that all threads are done with the
// one before. Within a step a thread multiplies from one set of registers while the next few of k
// come from shared memory into another.
//
// The first step of a tile may be short: k is padded to whole steps at its front, where a copy can
// tell by its place alone (`skip` numbers that do not exist), so that all other steps need no test.
#pragma once
#include "shared_memory.cuh"
#include "vectors.cuh"

// Load: starts this thread's copies of the next step, to where they belong in the tiles of a stage.
// SHORT: the first `skip` of its k do not exist.
template <bool SHORT, typename CopyA, typename CopyB>
__device__ __forceinline__ void load_step(CopyA& copy_a, CopyB& copy_b, Shared to_a, Shared to_b,
                                          int skip) {
    copy_a.template fetch<SHORT>(to_a, skip);
    copy_b.template fetch<SHORT>(to_b, skip);
}

// sum = the product of `count` steps of k. `first`: whether these begin with the first of all.
//
//   copy_a, copy_b   load: fetch<SHORT>(tile, skip) starts the copies of the next step; put(tile)
//                    completes those that wait in registers (only where TWO_HOPS)
//   to_a, to_b       where this thread's copies go in stage 0
//   fragments        multiply: this thread has K_EACH of a step's k, and reads K_READ at once;
//                    begin(a, b) sets where its elements begin in stage 0, in bytes;
//                    read(a, b, at_a, at_b, p) reads those for k = p to p + K_READ - 1
//   Count            int, or int& for a count that the caller needs no more: decides which of two
//                    counters that run alike the compiler keeps, and with it the schedule
template <int STAGE_BYTES, bool TWO_HOPS, typename Count, typename CopyA, typename CopyB,
          typename Fragments>
__device__ __forceinline__ void multiply_ring(T (&sum)[TM][TN], CopyA& copy_a, CopyB& copy_b,
                                              Shared to_a, Shared to_b, bool first, int skip,
                                              Count count, const Fragments& fragments) {
    constexpr int K_EACH = Fragments::K_EACH, K_READ = Fragments::K_READ;
    constexpr int LAST = (STAGES - 1) * STAGE_BYTES;  // the last stage's place
    DYNAMIC_SHARED(raw);
    unsigned write = 0;    // the stage to be filled next, in bytes
    int to_fetch = count;  // steps
    UNROLL for (int s = 0; s < STAGES - 1; ++s) {
        if (to_fetch > 0) {
            if (s == 0 && first) {
                load_step<true>(copy_a, copy_b, to_a, to_b, skip);
            } else {
                load_step<false>(copy_a, copy_b, to_a + write, to_b + write, 0);
            }
            copy_a.put(to_a + write);
            copy_b.put(to_b + write);
        }
        --to_fetch;
        write += STAGE_BYTES;
        copies_commit();
    }
    UNROLL for (int i = 0; i < TM; ++i) { UNROLL for (int j = 0; j < TN; ++j) sum[i][j] = T(0); }
    T a[2][K_READ][TM], b[2][K_READ][TN];
    int read_a, read_b;
    fragments.begin(read_a, read_b);
    read_a = opaque(read_a);
    read_b = opaque(read_b);
    const auto read_into = [&](int half, int p) {
        fragments.read(a[half], b[half], raw + read_a, raw + read_b, p);
    };
    copies_wait<STAGES - 2>();
    __syncthreads();
    unsigned now = 0;  // the stage being multiplied, in bytes
    read_into(0, 0);
#pragma unroll 1
    for (; count > 0; --count) {
        UNROLL for (int p = 0; p < K_EACH; p += K_READ) {
            const int half = p / K_READ % 2;
            if (p == K_EACH - K_READ) {  // the next step must be there, and all done with this one
                copies_wait<STAGES - 2>();
                __syncthreads();
                const int go = now == LAST ? -LAST : STAGE_BYTES;
                now += go;
                read_a += go;
                read_b += go;
            }
            read_into(half ^ 1, (p + K_READ) % K_EACH);
            if (p == 0) {
                if (to_fetch > 0) load_step<false>(copy_a, copy_b, to_a + write, to_b + write, 0);
                copies_commit();
                --to_fetch;
                if (!TWO_HOPS) write = write == LAST ? 0 : write + STAGE_BYTES;
            }
            if (TWO_HOPS && p == K_EACH - 2 * K_READ) {
                if (to_fetch >= 0) {
                    copy_a.put(to_a + write);
                    copy_b.put(to_b + write);
                }
                write = write == LAST ? 0 : write + STAGE_BYTES;
            }
            UNROLL for (int q = 0; q < K_READ; ++q) {
                // There and back along n: each multiply-add shares an operand with the one before,
                // which the register file need not be asked for again.
                UNROLL for (int i = 0; i < TM; ++i) {
                    UNROLL for (int j = 0; j < TN; ++j) {
                        const int jj = i % 2 ? TN - 1 - j : j;
                        sum[i][jj] += a[half][q][i] * b[half][q][jj];
                    }
                }
            }
        }
    }
    copies_wait<0>();
    __syncthreads();
}
