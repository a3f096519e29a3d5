// Shares of k: where C has too few tiles to fill the GPU, several blocks make one tile, each from
// its share of the steps of k, and their partial sums are added afterwards.
//
//   split-K (`deep`, `vector`, `dots`, ...)   every tile has the same number of shares:
//
//       tile 0                  tile 1
//       |--------|--------|-------|--------|--------|-------|      steps of k ->
//        block 0  block 1  block 2 block 3  block 4  block 5
//
//   stream-K (`tuned`)     the steps of all such tiles form one line, cut into a run a block,
//   whether or not a run ends where a tile does:
//
//       tile 0          tile 1          tile 2
//       |-----------:----|-------:-------|----:-----------|
//        block 0     block 1      block 2      block 3
//
// The blocks hand in their sums through a workspace in global memory and count themselves in
// (`last_of` in last_block.cuh, `all_of` below). Which block comes last differs from launch to
// launch. The order in which partial sums are added does not: the same input gives the same bits.
#pragma once
#include "last_block.cuh"
#include "vectors.cuh"

// Adds up the sums that `shares` blocks left of a tile of TILE elements, by teams of the block's
// THREADS threads, each of every TEAMS-th share. Leaves tiles in parts[TEAMS][TILE], which add up
// to all shares.
template <int THREADS_, int TILE_, typename S>
__device__ __forceinline__ void add_shares(const S* all, int shares, S* parts) {
    constexpr int TEAMS_ = MOST(1, THREADS_ / TILE_);
    for (int e = threadIdx.x; e < TEAMS_ * TILE_; e += THREADS_) {
        S sum = S(0);
#pragma unroll 16
        for (int s = e / TILE_; s < shares; s += TEAMS_) sum += all[s * TILE_ + e % TILE_];
        parts[e] = sum;
    }
    __syncthreads();
}

// Counts this thread in, and waits until `count` have come or so many cycles are over. Returns
// whether all have come; what they wrote before is then visible to this thread.
#ifdef HYBRID_GEMM_EMULATOR
// No block can wait for another there: only the last learns that all have come.
__device__ inline bool all_of(unsigned* counter, int count, int) {
    return count_in(counter) == count - 1u;
}
#else
__device__ __forceinline__ bool all_of(unsigned* counter, int count, int cycles) {
    unsigned came = count_in(counter) + 1;
    const long long start = clock64();
    while (came != count && clock64() - start < cycles)
        asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(came) : "l"(counter) : "memory");
    return came == count;
}
#endif
