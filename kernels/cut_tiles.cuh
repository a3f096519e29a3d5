// The last tiles, of which several clusters make a part of k each (tiles.cuh). The sums of a part
// go to a matrix of its own, and sum_parts.cu, launched behind, adds up those of each tile:
//
//      the line of steps    | tile 8          | tile 9          |
//                           |--------:--------|-----------:-----|
//      run of cluster         0          1          1        2
//      matrix                 0          1          2        3
#pragma once
#include "tiles.cuh"

#if SHARES > 1  // no tile is cut
#define AND_CUT
constexpr int cut = 0, runs = 1;
constexpr float* parts = nullptr;
#else
#define AND_CUT , int cut, int runs, float *parts
#endif

// Where the sums of a part go: a matrix of the size of a tile.
__device__ __forceinline__ float* matrix_of_part(float* parts, const Tiles& tiles,
                                                 const Part& part) {
    const int cluster = blockIdx.x / CLUSTER;
    return parts + tiles.part_of(cluster, part.t - tiles.whole()) * (CLUSTER * BM * BN);
}
