// What Hopper's kernels have in common: the ring of stages in shared memory through which they
// multiply, the roles of a block's warps, and the order of the tiles of C. Blocks are persistent:
// each cluster makes tile after tile, and the ring goes on from one tile to the next.
//
// Parameters of these kernels; STAGE_BYTES, the size of a stage, and SHARES are the kernel's too:
//
//   BM       rows of C that a block computes, 64 by each warpgroup that multiplies
//   BN       columns of C that a block computes
//   SPAN     bytes of k in a step: rows of that length lie swizzled in shared memory
//   STAGES   stages of the ring that TMA fills and wgmma empties, a step each
//   CLUSTER  blocks, one above the other in C, that load a share of their B each, for all of them
//
//      stage      0         1         2         3            STAGES = 4
//            +---------+---------+---------+---------+
//            | A  |  B | A  |  B | A  |  B | A  |  B |       one step of k each
//            +---------+---------+---------+---------+
//      full  [    0        1         2         3     ]       barriers, one of each kind a stage
//      empty [    0        1         2         3     ]
//
//   load (one warp)                          multiply (a warpgroup for each 64 rows of the tile)
//
//   wait for empty[s]                        wait for full[s]
//   full[s] expects STAGE_BYTES              start wgmma on stage s
//   start TMA copies into stage s;           wait for wgmma on stage s - 1
//     their bytes are counted at full[s]     arrive at empty[s - 1] in all blocks of the cluster
//   next s                                   next s
//
// full[s] is over when the loading thread has arrived and all bytes are there; empty[s] when every
// warp that multiplies, in every block of the cluster, has read the stage: with CLUSTER blocks,
// each loads its share of B into the shared memory of all of them (multicast), so that none may
// overwrite what another still reads. A barrier counts its phases by one bit: `phase` is 0 on the
// first way around the ring, 1 on the second, 0 again. Nobody has to empty a stage before its first
// use: waiting for the phase before the first returns at once.
//
// The borrowed stage (C of 16 bits, tiles of more than 128 columns; wgmma_result.cuh). Sums go to C
// through boxes in shared memory, and there is no room for all of them beside the ring. So the
// stage that a tile has read last is not released by the warps that multiply. They write boxes into
// it:
//
//   multiply   last wgmma -> boxes beside the ring -> READ -> boxes in stage s -> WRITTEN -> next
//              of a tile                                                           |     tile
//   store                                                                          v
//   (one warp)                    start TMA stores of all boxes, those in stage s first; once these
//                                 are read: arrive at empty[s], in all blocks of the cluster
//
// READ and WRITTEN are barriers of the block: all warpgroups have read stage s; all boxes are
// written. The warp that stores arrives at empty[s] for all warps that multiply. The other
// STAGES - 1 stages fill meanwhile.
#pragma once
#include "tiles.cuh"
#include "wgmma.cuh"

// A kernel that says it runs in clusters of one is slower than one that says nothing.
#if CLUSTER > 1
#define IN_CLUSTERS __cluster_dims__(CLUSTER, 1, 1)
#else
#define IN_CLUSTERS
#endif

#ifndef TOGETHER
#define TOGETHER 1  // steps of the ring that are one of tiles.cuh
#endif

constexpr int CONSUMERS = BM / 64;  // warpgroups that multiply

struct Ring {  // a place in the ring, and how often it came around, modulo 2
    int stage = 0;
    unsigned phase = 0;
    __device__ __forceinline__ void advance() {
        if (++stage == STAGES) stage = 0, phase ^= 1;
    }
};

// Where the ring lies in shared memory: its stages, and the barriers of each.
struct Places {
    unsigned stages, full, empty;

    __device__ __forceinline__ unsigned stage(int s) const { return stages + s * STAGE_BYTES; }
    __device__ __forceinline__ unsigned full_of(int s) const { return full + 8 * s; }
    __device__ __forceinline__ unsigned empty_of(int s) const { return empty + 8 * s; }
};

// The ring in the block's dynamic shared memory: stages, which swizzles want on 1024 bytes,
// `beside` bytes for the kernel's own use, and barriers.
__device__ __forceinline__ Places places_in(const char* memory, int beside = 0) {
    const unsigned stages = (shared_address(memory) + 1023) / 1024 * 1024;
    const unsigned full = stages + STAGES * STAGE_BYTES + beside;
    return {stages, full, full + 8 * STAGES};
}

// Prepares the barriers of all stages. A stage is read by four warps of each consumer, in all
// blocks of the cluster.
__device__ __forceinline__ void init_ring(const Places& places) {
    for (int s = 0; s < STAGES; ++s) {
        barrier_init(places.full_of(s), 1);
        barrier_init(places.empty_of(s), 4 * CONSUMERS * CLUSTER);
    }
    barriers_ready();
}

// What a block begins with, in two warps at once: one thread has the tensor maps fetched, if the
// kernel `reads` operands at all, and another prepares the barriers.
template <typename... Maps>
__device__ __forceinline__ void begin_block(const Places& places, bool reads, const Maps&... maps) {
    if (threadIdx.x == 0 && reads) (prefetch_map(maps), ...);
    if (threadIdx.x == 32) init_ring(places);
}

// What each warp does before it touches global memory or the ring: waits until the barriers are
// prepared, in all blocks of the cluster, and for the launch before.
__device__ __forceinline__ void wait_for_all() {
    barrier_sync(0, 128 + 128 * CONSUMERS);  // __syncthreads has to be one place for all warps
    if (CLUSTER > 1) cluster_barrier();
    wait_for_launch_before();
}

// Gives the block's warps their roles: warp 0 loads, warp 1 stores, and each warpgroup from the
// second on multiplies as a consumer, from 0 on. Those that multiply take over registers of the
// others. Each begins with begin(), which is `wait_for_all` or was called before; load() calls it.
template <typename Begin, typename Load, typename Store, typename Multiply>
__device__ __forceinline__ void take_roles(Begin begin, Load load, Store store, Multiply multiply) {
    const int warp = warp_number(), consumer = warp / 4 - 1;
    if (consumer < 0) {
        if constexpr (CONSUMERS > 1) registers_fewer<CONSUMERS == 2 ? 40 : 32>();
        if (warp != 0) begin();
        if (warp == 0) load();
        if (warp == 1) store();
    } else {
        if constexpr (CONSUMERS > 1) registers_more<CONSUMERS == 2 ? 232 : 160>();
        begin();
        multiply(consumer);
    }
    // A block stays while others may still reach for its shared memory.
    __syncwarp();
    if (CLUSTER > 1) cluster_barrier();
}

// Calls body(part) for what this block's cluster makes.
template <typename Body>
__device__ __forceinline__ void for_each_part(const Tiles& tiles, Body body) {
    for_each_part(tiles, blockIdx.x / CLUSTER, gridDim.x / CLUSTER, body);
}

// The role of the warp that loads: fills stage after stage, for all steps of all tiles.
// load(to, row, col, step, full) starts the copies of a step of the tile at (row, col) into the
// stage at `to`, which count their bytes at the barrier `full`. Where the first tile lies takes
// divisions, which are done before begin() waits.
template <typename Begin, typename Load>
__device__ __forceinline__ void load_tiles(const Places& places, const Tiles& tiles, Begin begin,
                                           Load load) {
    const bool loads = elected();
    bool begun = false;
    Ring ring;
    for_each_part(tiles, [&](const Part& part) {
        int row, col;
        tiles.at(part.t, row, col);
        if (!begun) {
            asm volatile("" : "+r"(row), "+r"(col));  // not later
            begin();
            begun = true;
        }
        const int end = TOGETHER * (part.first + part.length);
        for (int step = TOGETHER * part.first; step < end; ++step, ring.advance()) {
            const unsigned to = places.stage(ring.stage), full = places.full_of(ring.stage);
            barrier_wait(places.empty_of(ring.stage), ring.phase ^ 1);
            if (!loads) continue;
            barrier_expect(full, STAGE_BYTES);
            load(to, row, col, step, full);
        }
    });
    if (!begun) begin();
}

// This warp has read the stage: tells the loading warps of all blocks of the cluster.
__device__ __forceinline__ void release(const Places& places, int stage) {
    const unsigned lane = threadIdx.x % 32;
    if (lane < CLUSTER) barrier_arrive(places.empty_of(stage), lane);
}

// The products of `steps` stages: start(stage) begins those of a stage that is full, which lies so
// many units of descriptors (16 bytes) behind the first. A stage is released while the next one is
// multiplied; with KEEP the last one is not. Returns the last.
template <bool KEEP = false, typename Start>
__device__ __forceinline__ int multiply_stages(const Places& places, Ring& ring, int steps,
                                               Start start) {
    int last = STAGES - 1;
    for (int step = 0; step < steps; ++step, ring.advance()) {
        barrier_wait(places.full_of(ring.stage), ring.phase);
        wgmma_begin();
        start(ring.stage * (STAGE_BYTES / 16));
        wgmma_commit();
        wgmma_wait<1>();
        if (step) release(places, last);
        last = ring.stage;
    }
    wgmma_wait<0>();
    if (steps && !KEEP) release(places, last);
    return last;
}
