// The tiles of C, each CLUSTER * BM x BN, that persistent clusters of blocks make one after the
// other, and how k is cut among them. SHARES is the including file's, as BM, BN and CLUSTER are.
//
// Clusters take tiles in turn. Where the last round would leave many of them idle, the tiles of
// that round are cut along k (stream-K): their steps form one line, which is cut into a run for
// each cluster. So a cluster makes whole tiles, and then its run, of two tiles at most
// (cut_tiles.cuh):
//
//      round 0        | round 1        | the rest, in runs of 4 steps
//      0   1   2   3  | 4   5   6   7  | 8          9
//                                       |---- ----|---- ----|         8 steps a tile
//      cluster:  0 1 2 3, 0 1 2 3         0    1    2    3
//
// With SHARES > 1 every tile is cut instead: its steps into shares of `each`, of which the last may
// be shorter. A cluster makes one share of a tile at a time, first share 0 of all tiles, then share
// 1 of all, so that clusters that work at one time read the same k of A and B.
#pragma once
#include "runs.cuh"

// Rows of tiles that are worked through together, so that L2 keeps A and B: of one round on 132
// multiprocessors, columns of B are 0.8 to 2 times as many as rows of A.
constexpr int STRIP = (BN > BM ? 16 : 8) / CLUSTER;

// What a cluster makes at a time: `length` steps of k, from `first` on, of tile t.
struct Part {
    int t, share, first, length;
};

struct Tiles {
    int m, n, steps, each;
    int cut = 0, runs = 1;  // the last tiles, so many, are cut into so many runs, a cluster's each

    __device__ __forceinline__ int rows() const { return (m + CLUSTER * BM - 1) / (CLUSTER * BM); }
    __device__ __forceinline__ int cols() const { return (n + BN - 1) / BN; }
    __device__ __forceinline__ int tiles() const { return rows() * cols(); }
    __device__ __forceinline__ int whole() const { return tiles() - cut; }

    // The first row and column of tile t.
    __device__ __forceinline__ void at(int t, int& row, int& col) const {
        const int strip = t / (STRIP * cols()), within = t % (STRIP * cols());
        const int high = min(STRIP, rows() - strip * STRIP);
        row = (strip * STRIP + within % high) * CLUSTER * BM;
        col = within / high * BN;
    }

    // Of the line of steps of the tiles that are cut: where a cluster's run begins, and whose run a
    // step belongs to.
    __device__ __forceinline__ int begin_of(int cluster) const {
        return run_begin(cluster, cut * steps / runs, cut * steps % runs);
    }
    __device__ __forceinline__ int cluster_of(int step) const {
        return run_of(step, cut * steps / runs, cut * steps % runs);
    }
    // The number of the part that a cluster makes of the tile that is so many-th of those cut.
    // Along the line numbers grow, and those of a tile follow one another.
    __device__ __forceinline__ long long part_of(int cluster, int tile) const {
        return cluster + tile;
    }
    // Whether a part is for sum_parts.cu to add.
    __device__ __forceinline__ bool is_cut(const Part& part) const { return part.t >= whole(); }
};

// Calls body(part) for what this cluster makes, of so many clusters.
template <typename Body>
__device__ __forceinline__ void for_each_part(const Tiles& tiles, int cluster, int clusters,
                                              Body body) {
    if constexpr (SHARES > 1) {
        const int count = tiles.tiles(), shares = (tiles.steps + tiles.each - 1) / tiles.each;
        for (int i = cluster; i < count * shares; i += clusters) {
            const int share = i / count, first = share * tiles.each;
            body(Part{i % count, share, first, min(tiles.each, tiles.steps - first)});
        }
    } else {
        // Whole tiles by number, and behind the last of them the steps of the line.
        const int whole = tiles.whole();
        const bool runs = tiles.cut && cluster < tiles.runs;
        const int end = whole + (runs ? tiles.begin_of(cluster + 1) : 0);
        int at = cluster;
        if (at >= whole) at = runs ? whole + tiles.begin_of(cluster) : end;
        while (at < end) {
            Part part = {at, 0, 0, tiles.steps};
            if (at >= whole) {
                const int tile = (at - whole) / tiles.steps, first = (at - whole) % tiles.steps;
                part = {whole + tile, 0, first, min(end - at, tiles.steps - first)};
            }
            body(part);  // once in the text: compiling it twice takes twice as long
            at += at < whole ? clusters : part.length;
            if (part.t < whole && at >= whole) at = runs ? whole + tiles.begin_of(cluster) : end;
        }
    }
}
