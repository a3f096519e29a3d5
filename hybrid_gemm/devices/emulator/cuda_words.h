// CUDA's words for g++: a kernel's own text, included after this, runs on the CPU.
// Light on purpose, for every kernel is compiled with it: no header of the C++ library.
#pragma once
#define HYBRID_GEMM_EMULATOR 1

#define EMULATOR_VECTORS(name, type, align2, align4)                               \
    struct alignas(align2) name##2 { type x, y; };                                 \
    struct name##3 { type x, y, z; };                                              \
    struct alignas(align4) name##4 { type x, y, z, w; };                           \
    constexpr name##2 make_##name##2(type x, type y) { return {x, y}; }            \
    constexpr name##3 make_##name##3(type x, type y, type z) { return {x, y, z}; } \
    constexpr name##4 make_##name##4(type x, type y, type z, type w) { return {x, y, z, w}; }
EMULATOR_VECTORS(int, int, 8, 16)
EMULATOR_VECTORS(uint, unsigned, 8, 16)
EMULATOR_VECTORS(float, float, 8, 16)
EMULATOR_VECTORS(double, double, 16, 16)
EMULATOR_VECTORS(longlong, long long, 16, 16)

struct dim3 {
    unsigned x, y, z;
    constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

[[gnu::visibility("hidden")]] extern constinit thread_local uint3 threadIdx, blockIdx;
[[gnu::visibility("hidden")]] extern constinit thread_local dim3 blockDim, gridDim;
constexpr int warpSize = 32;

extern "C" int printf(const char*, ...);  // as CUDA knows it, without a header

#include "launch.h"

#ifdef __SANITIZE_ADDRESS__
#define __shared__ static  // AddressSanitizer guards statics, not thread_locals
#else
#define __shared__ thread_local
#endif
#define __global__ __attribute__((noinline))
#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))

// Of <math.h>, as CUDA knows it without a header.
extern "C" {
double fma(double, double, double) noexcept;
double fmax(double, double) noexcept;
double fmin(double, double) noexcept;
double fabs(double) noexcept;
double sqrt(double) noexcept;
double exp(double) noexcept;
double log(double) noexcept;
double tanh(double) noexcept;
float fmaf(float, float, float) noexcept;
float fmaxf(float, float) noexcept;
float fminf(float, float) noexcept;
float fabsf(float) noexcept;
float sqrtf(float) noexcept;
float expf(float) noexcept;
float logf(float) noexcept;
float tanhf(float) noexcept;
}
inline float fma(float a, float b, float c) { return fmaf(a, b, c); }
template <class A, class B>
constexpr auto min(A a, B b) {
    return b < a ? b : a;
}
template <class A, class B>
constexpr auto max(A a, B b) {
    return a < b ? b : a;
}
template <class V>
inline V __ldg(const V* p) {
    return *p;
}

// Blocks run on several OS threads, one after another on each: a block may add to what others
// see, but must not wait for them.
inline void __threadfence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
template <class V>
inline V atomicAdd(V* p, V value) {
    static_assert(V(1) / 2 == 0,
                  "the emulator's atomicAdd takes integers: of floats the sum "
                  "depends on which thread comes first");
    return __atomic_fetch_add(p, value, __ATOMIC_SEQ_CST);
}
template <class V>
inline V atomicMax(V* p, V value) {
    V before = __atomic_load_n(p, __ATOMIC_SEQ_CST);
    while (before < value && !__atomic_compare_exchange_n(p, &before, value, false,
                                                          __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) {
    }
    return before;
}
template <class V>
inline V atomicExch(V* p, V value) {
    return __atomic_exchange_n(p, value, __ATOMIC_SEQ_CST);
}

// Where a kernel waits is the line that says so.
#define EMULATOR_PLACE const char *file = __builtin_FILE(), int line = __builtin_LINE()

__forceinline__ void __syncthreads(EMULATOR_PLACE) {
    emulator::take(emulator::wait_for_block({file, line}));
}

__forceinline__ void __syncwarp(unsigned mask = ~0u, EMULATOR_PLACE) {
    emulator::exchange(mask, 0, emulator::lane(), {file, line});
}

// As NVRTC has it, without a header.
#define assert(holds) \
    ((holds) ? (void)0 : emulator::fail_assert({__builtin_FILE(), __builtin_LINE()}))

// Lanes of a segment of `width` hear each other; one that asks beyond it hears itself.
template <class V>
__forceinline__ V __shfl_sync(unsigned mask, V value, int source, int width = 32, EMULATOR_PLACE) {
    const unsigned first = emulator::lane() & -width;
    return emulator::exchange(mask, value, first | (source & (width - 1)), {file, line});
}

template <class V>
__forceinline__ V __shfl_xor_sync(unsigned mask, V value, int bits, int width = 32,
                                  EMULATOR_PLACE) {
    const unsigned lane = emulator::lane(), source = lane ^ bits;
    const bool inside = source < (lane & -width) + width;
    return emulator::exchange(mask, value, inside ? source : lane, {file, line});
}

template <class V>
__forceinline__ V __shfl_down_sync(unsigned mask, V value, unsigned by, int width = 32,
                                   EMULATOR_PLACE) {
    const unsigned lane = emulator::lane(), source = lane + by;
    const bool inside = source < (lane & -width) + width;
    return emulator::exchange(mask, value, inside ? source : lane, {file, line});
}

template <class V>
__forceinline__ V __shfl_up_sync(unsigned mask, V value, unsigned by, int width = 32,
                                 EMULATOR_PLACE) {
    const unsigned lane = emulator::lane();
    const bool inside = (lane & (width - 1)) >= by;
    return emulator::exchange(mask, value, inside ? lane - by : lane, {file, line});
}

// What the library offers to the host, after the kernel's text.
#define EMULATOR_ENTRY(entry)                                                     \
    extern "C" __attribute__((visibility("default"))) int emulator_launch(        \
        const emulator::Launch* launch, void** args, emulator::Report* report) {  \
        return emulator::run(launch, emulator::Entry<entry>::call, args, report); \
    }                                                                             \
    extern "C" __attribute__((visibility("default"))) const emulator::Parameter*  \
    emulator_parameters(unsigned* count) {                                        \
        *count = emulator::Entry<entry>::count;                                   \
        return emulator::Entry<entry>::parameters;                                \
    }
