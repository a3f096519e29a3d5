// For kernels of Hopper whose blocks stay: the ring of stages that one warp fills and the others
// empty, and the order of tiles of C. STAGES, CLUSTER, BM and BN are the including file's.
#pragma once

// A kernel that says it runs in clusters of one is slower than one that says nothing.
#if CLUSTER > 1
#define IN_CLUSTERS __cluster_dims__(CLUSTER, 1, 1)
#else
#define IN_CLUSTERS
#endif

constexpr int STRIP = 16 / CLUSTER;  // tile rows worked through together, for L2

struct Ring {  // a place in the ring, and how often it came around, modulo 2
    int stage = 0;
    unsigned phase = 0;
    __device__ __forceinline__ void advance() {
        if (++stage == STAGES) stage = 0, phase ^= 1;
    }
};

// The barriers of all stages: filled, and emptied by so many arrivals.
__device__ __forceinline__ void init_stages(unsigned full, unsigned empty, int arrivals) {
    for (int s = 0; s < STAGES; ++s) {
        barrier_init(full + 8 * s, 1);
        barrier_init(empty + 8 * s, arrivals);
    }
    barriers_ready();
}

struct Tiles {  // of CLUSTER * BM x BN, in an order that keeps A and B in L2
    int m, n;
    __device__ __forceinline__ int rows() const { return (m + CLUSTER * BM - 1) / (CLUSTER * BM); }
    __device__ __forceinline__ int cols() const { return (n + BN - 1) / BN; }
    __device__ __forceinline__ int count() const { return rows() * cols(); }
    __device__ __forceinline__ void at(int t, int& row, int& col) const {
        const int strip = t / (STRIP * cols()), within = t % (STRIP * cols());
        const int high = min(STRIP, rows() - strip * STRIP);
        row = (strip * STRIP + within % high) * CLUSTER * BM;
        col = within / high * BN;
    }
};
