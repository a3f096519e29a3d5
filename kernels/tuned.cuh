// Small device functions of the tuned kernels: shared memory by address, asynchronous copies,
// vectors of 16 bytes. Each has a plain form for the emulator.
#pragma once

constexpr int VEC = 16 / SIZE;  // elements of a vector

struct alignas(16) Vec {
    T x[VEC];
};

#ifdef HYBRID_GEMM_EMULATOR

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

#else

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
    static_assert(BYTES < 16, "vectors need to know whether they are real");
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(to), "l"(from), "n"(BYTES)
                 : "memory");
}
__device__ __forceinline__ void copies_commit() { asm volatile("cp.async.commit_group;"); }
template <int PENDING>
__device__ __forceinline__ void copies_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

#endif
