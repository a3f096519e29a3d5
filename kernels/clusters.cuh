// Blocks of a cluster, CLUSTER of them, which wait for each other and reach each other's shared
// memory.
#pragma once

#if defined(HYBRID_GEMM_EMULATOR) || CLUSTER == 1 || __CUDA_ARCH__ < 900
// There are none, or no block can wait for another: the first of a cluster does all of its work.
constexpr int SHARES = 1;
#define CLUSTER_DIMS
__device__ __forceinline__ void cluster_arrive() { __syncthreads(); }
__device__ __forceinline__ void cluster_wait() {}
template <typename V>
__device__ __forceinline__ V* shared_of(V* mine, int) {
    return mine;
}
#else
constexpr int SHARES = CLUSTER;
#define CLUSTER_DIMS __cluster_dims__(CLUSTER, 1, 1)
__device__ __forceinline__ void cluster_arrive() {
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() {
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// The same place in the shared memory of another block of the cluster.
template <typename V>
__device__ __forceinline__ V* shared_of(V* mine, int rank) {
    V* theirs;
    asm("mapa.u64 %0, %1, %2;" : "=l"(theirs) : "l"(mine), "r"(rank));
    return theirs;
}
#endif
