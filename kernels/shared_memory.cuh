// Shared memory by its address, and asynchronous copies into it (cp.async). Each function has a
// plain form for the emulator.
//
// A thread starts copies, closes the group that they make with `copies_commit`, and goes on. Once
// `copies_wait<N>` returns, all of its groups but the N last are in shared memory; a barrier after
// that makes them visible to the whole block.
#pragma once

#ifdef HYBRID_GEMM_EMULATOR

// The dynamic shared memory that a launch gives each block.
#define DYNAMIC_SHARED(raw) \
    unsigned char* const raw = reinterpret_cast<unsigned char*>(emulator::worker->shared)

typedef char* Shared;  // an address in shared memory, in bytes

__device__ inline Shared shared_address(void* p) { return static_cast<char*>(p); }
template <typename Address>
__device__ inline Address opaque(Address p) {
    return p;
}
template <typename E>
__device__ inline void store_shared(Shared to, E x) {
    *reinterpret_cast<E*>(to) = x;
}
template <int SPACE, typename E>
__device__ inline void copy_some(Shared to, const E* from, int real) {
    struct alignas(SPACE) Words {  // both addresses have to be multiples of SPACE, as on a GPU
        char x[SPACE];
    } words = {};
    if (real == SPACE)
        words = *reinterpret_cast<const Words*>(from);
    else
        __builtin_memcpy(&words, from, real);
    *reinterpret_cast<Words*>(to) = words;
}
template <int BYTES, typename E>
__device__ inline void copy_async(Shared to, const E* from, bool real = true) {
    copy_some<BYTES>(to, from, real ? BYTES : 0);
}
__device__ inline void copies_commit() {}
template <int PENDING>
__device__ inline void copies_wait() {}

#else

#define DYNAMIC_SHARED(raw) extern __shared__ __align__(16) unsigned char raw[]

typedef unsigned Shared;

__device__ __forceinline__ Shared shared_address(const void* p) {
    return static_cast<unsigned>(__cvta_generic_to_shared(p));
}

// The same address, as a number the compiler knows nothing of. Without this it takes sums of
// addresses apart and computes each load's address anew, instead of using the constant offset
// that a load instruction has.
template <typename Address>
__device__ __forceinline__ Address opaque(Address p) {
    asm volatile("" : "+r"(p));
    return p;
}

template <typename E>
__device__ __forceinline__ void store_shared(Shared to, E x) {
    *static_cast<E*>(__cvta_shared_to_generic(to)) = x;
}

// Starts a copy of SPACE bytes (4, 8 or 16) from global to shared memory, of which the first `real`
// are read and the others are zeros.
template <int SPACE, typename E>
__device__ __forceinline__ void copy_some(Shared to, const E* from, int real) {
    if constexpr (SPACE == 16)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(real)
                     : "memory");
    else
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(to), "l"(from),
                     "n"(SPACE), "r"(real)
                     : "memory");
}
// The same of all BYTES; where not `real`, of none.
template <int BYTES, typename E>
__device__ __forceinline__ void copy_async(Shared to, const E* from, bool real) {
    copy_some<BYTES>(to, from, real ? BYTES : 0);
}
template <int BYTES, typename E>
__device__ __forceinline__ void copy_async(Shared to, const E* from) {
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

#endif
