// Small device functions of the tuned kernels: shared memory by address, asynchronous copies,
// vectors of 16 bytes. Each has a plain form for the emulator.
#pragma once

#ifdef HYBRID_GEMM_EMULATOR
#define UNROLL
#else
#define UNROLL _Pragma("unroll")
#endif
#define LEAST(a, b) ((a) < (b) ? (a) : (b))
#define MOST(a, b) ((a) > (b) ? (a) : (b))

constexpr int VEC = 16 / SIZE;  // elements of a vector

struct alignas(16) Vec {
    T x[VEC];
};

#ifdef HYBRID_GEMM_EMULATOR

// The memory that the launch gives a block.
#define DYNAMIC_SHARED(raw) \
    unsigned char* const raw = reinterpret_cast<unsigned char*>(emulator::worker->shared)

typedef char* Shared;  // an address in shared memory, in bytes

__device__ inline Shared shared_address(void* p) { return static_cast<char*>(p); }
template <typename Address>
__device__ inline Address opaque(Address p) {
    return p;
}
__device__ inline void store_shared(Shared at, T x) { *reinterpret_cast<T*>(at) = x; }
template <int BYTES>
__device__ inline void copy_async(Shared to, const T* from, bool real = true) {
    for (int i = 0; i < BYTES / SIZE; ++i) reinterpret_cast<T*>(to)[i] = real ? from[i] : T(0);
}
__device__ inline void copies_commit() {}
template <int PENDING>
__device__ inline void copies_wait() {}
__device__ inline unsigned add_in_order(unsigned* p) { return atomicAdd(p, 1u); }
// There no block can wait for another: true in the last alone.
__device__ inline bool all_came(unsigned* counter, int count, int) {
    return add_in_order(counter) == count - 1u;
}

#else

#define DYNAMIC_SHARED(raw) extern __shared__ __align__(16) unsigned char raw[]

typedef unsigned Shared;

__device__ __forceinline__ Shared shared_address(void* p) {
    return static_cast<unsigned>(__cvta_generic_to_shared(p));
}

// The compiler must not take an address apart: it would compute each load's address anew
// instead of using the load's immediate offset.
template <typename Address>
__device__ __forceinline__ Address opaque(Address p) {
    asm volatile("" : "+r"(p));
    return p;
}

__device__ __forceinline__ void store_shared(Shared at, T x) {
    *static_cast<T*>(__cvta_shared_to_generic(at)) = x;
}

// Copies BYTES (4, 8 or 16) from global to shared memory; writes zeros where not `real`.
template <int BYTES>
__device__ __forceinline__ void copy_async(Shared to, const T* from, bool real) {
    const int bytes = real ? BYTES : 0;
    if constexpr (BYTES == 16)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
                     "r"(bytes)
                     : "memory");
    else
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(to), "l"(from),
                     "n"(BYTES), "r"(bytes)
                     : "memory");
}
template <int BYTES>
__device__ __forceinline__ void copy_async(Shared to, const T* from) {
    if constexpr (BYTES == 16)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
    else
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(to), "l"(from), "n"(BYTES)
                     : "memory");
}
__device__ __forceinline__ void copies_commit() { asm volatile("cp.async.commit_group;"); }
template <int PENDING>
__device__ __forceinline__ void copies_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// Adds 1: what came before is visible to whoever reads the sum this way.
__device__ __forceinline__ unsigned add_in_order(unsigned* p) {
    unsigned before;
    asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], 1;"
                 : "=r"(before)
                 : "l"(p)
                 : "memory");
    return before;
}

// Counts this block in. True once `count` blocks came, if that is within so many cycles; what they
// wrote before is then visible to this thread.
__device__ __forceinline__ bool all_came(unsigned* counter, int count, int cycles) {
    unsigned came = add_in_order(counter) + 1;
    const long long start = clock64();
    while (came != count && clock64() - start < cycles)
        asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(came) : "l"(counter) : "memory");
    return came == count;
}

#endif

__device__ __forceinline__ bool on_16_bytes(const T* p, long long ld) {
    return reinterpret_cast<unsigned long long>(p) % 16 == 0 && ld % VEC == 0;
}

// True in the last of `count` blocks to come here, for all its threads; what the others wrote
// before is then visible. Leaves the counter at zero.
__device__ __forceinline__ bool last_of(unsigned* counter, int count) {
    __shared__ unsigned before;
    __syncthreads();  // the block's writes, handed on by one thread's release
    if (threadIdx.x == 0) {
        before = add_in_order(counter);
        if (before == count - 1u) *counter = 0;
    }
    __syncthreads();
    const bool last = before == count - 1u;
    __syncthreads();
    return last;
}
