// A launch: its blocks, shared out over OS threads, and what the host sees of it.
// A block stays on one OS thread, so that its shared memory can be thread_local.
#pragma once
#include "cuda_threads.h"
#include <pthread.h>
#include <sys/mman.h>
#ifdef __linux__
#include <link.h>
#endif
#ifdef __SANITIZE_ADDRESS__
#include "checks.h"
#endif

namespace emulator {

// --- a kernel's parameters and its call

template <class P>
constexpr char kind() {
    if constexpr (__is_class(P))
        return 'V';
    else if constexpr (__is_same(P, bool))
        return 'b';
    else
        return P(0.5) != 0 ? 'f' : P(-1) < P(0) ? 'i' : 'u';
}
template <class P>
struct Value {
    static constexpr char kind = emulator::kind<P>();
    static constexpr unsigned bytes = sizeof(P);
};
template <class P>
struct Value<P*> {
    static constexpr char kind = 'u';
    static constexpr unsigned bytes = sizeof(P*);
};
template <>
struct Value<void> {
    static constexpr char kind = 'V';
    static constexpr unsigned bytes = 0;
};

template <class P>
constexpr Parameter parameter{Value<P>::kind, 0, Value<P>::bytes};
template <class P>
constexpr Parameter parameter<const P*>{Value<P>::kind, 1, Value<P>::bytes};
template <class P>
constexpr Parameter parameter<P*>{Value<P>::kind, 2, Value<P>::bytes};

template <auto kernel>
struct Entry;
template <class... P, void (*kernel)(P...)>
struct Entry<kernel> {
    static_assert((!__is_class(P) && ...), "a kernel takes numbers and pointers");
    struct Call {
        Call(P... p) { kernel(p...); }
    };
    // In braces, unlike in a call, the arguments are taken in order.
    static void call(void** args) { Call{*(P*)*args++...}; }
    static constexpr unsigned count = sizeof...(P);
    static constexpr Parameter parameters[count + 1] = {parameter<P>...};
};

// --- the order of blocks and threads

inline unsigned long long mix(unsigned long long x) {  // the finaliser of splitmix64
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9;
    x = (x ^ x >> 27) * 0x94d049bb133111eb;
    return x ^ x >> 31;
}

inline Walk walk(const Launch& launch, unsigned long long salt, unsigned long long count) {
    if (launch.order == 0 || count < 2) return {0, 1};
    if (launch.order == 1) return {count - 1, count - 1};
    const unsigned long long seed = mix(launch.seed + mix(salt + 1));
    unsigned long long stride = seed % (count - 1) + 1;
    for (;; stride = stride % (count - 1) + 1) {
        unsigned long long a = count, b = stride;
        while (b) {
            const unsigned long long rest = a % b;
            a = b;
            b = rest;
        }
        if (a == 1) return {mix(seed) % count, stride};
    }
}

// --- blocks

// This library's thread_locals in this OS thread: the kernel's shared memory, and what is ours.
struct Locals {
    char* begin;
    size_t bytes;
};

#if defined __linux__ && !defined __SANITIZE_ADDRESS__
inline int find_locals(dl_phdr_info* library, size_t, void* found) {
    char* const begin = (char*)library->dlpi_tls_data;
    for (int i = 0; begin && i < library->dlpi_phnum; ++i) {
        const size_t bytes = library->dlpi_phdr[i].p_memsz;
        if (library->dlpi_phdr[i].p_type == PT_TLS && size_t((char*)&worker - begin) < bytes) {
            *(Locals*)found = {begin, bytes};
            return 1;
        }
    }
    return 0;
}
#endif

inline Locals find_locals() {
    Locals found{};
#if defined __linux__ && !defined __SANITIZE_ADDRESS__
    worker = nullptr;  // they are made when first used
    dl_iterate_phdr(find_locals, &found);
#endif
    return found;
}

inline void run_block(Worker& w, Locals locals, unsigned long long b) {
    const Launch& launch = w.run->launch;
    const uint3 grid = launch.grid, block = launch.block;
    // Shared memory begins as NaNs, so that reading what no thread wrote shows.
    if (locals.bytes) __builtin_memset(locals.begin, 0xff, locals.bytes);
    __builtin_memset(w.shared, 0xff, launch.shared_bytes);
    worker = &w;
    blockDim = {block.x, block.y, block.z};
    gridDim = {grid.x, grid.y, grid.z};
    blockIdx = {unsigned(b % grid.x), unsigned(b / grid.x % grid.y), unsigned(b / grid.x / grid.y)};
    const Walk threads = walk(launch, b + 1, w.count);
    w.first = threads.first;
    w.stride = threads.stride;
    w.finished = w.waiting = w.stacks_used = 0;
    __builtin_memset(w.arrived, 0, sizeof w.arrived);
    __builtin_memset(w.state, fresh, w.count);
    go(w.home, call_up(w, w.first), false);
    worker = nullptr;
}

inline void run_blocks(Worker& w) {
    Run& run = *w.run;
    const Locals locals = find_locals();
    while (!__atomic_load_n(&run.failed, __ATOMIC_RELAXED)) {
        const unsigned long long i = __atomic_fetch_add(&run.taken, 1, __ATOMIC_RELAXED);
        if (i >= run.count) break;
        const auto far = (unsigned __int128)i * run.blocks.stride;
        run_block(w, locals, (run.blocks.first + far) % run.count);
    }
}

constexpr size_t gap = 4096;  // on both sides of dynamic shared memory
constexpr size_t pages(size_t bytes) { return (bytes + gap - 1) / gap * gap; }

// What an OS thread does.
inline void* work(void* argument) {
    Run& run = *(Run*)argument;
    const uint3 block = run.launch.block;
    const unsigned count = block.x * block.y * block.z;
    const size_t shared_bytes = run.launch.shared_bytes;
    const size_t shared_at = pages(sizeof(Worker)) + gap;
    const size_t stacks_at = shared_at + pages(shared_bytes) + gap;
    const size_t bytes = stacks_at + count * stack_bytes;
    char* const memory = (char*)mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) {
        if (run.first_to_fail()) {
            run.report.what = no_memory;
            run.report.bytes = bytes;
        }
        return nullptr;
    }
#ifdef MADV_NOHUGEPAGE
    madvise(memory, bytes, MADV_NOHUGEPAGE);  // of most stacks a page is used
#endif
    Worker& w = *(Worker*)memory;
    w.run = &run;
    w.shared = memory + shared_at;
    w.stacks = memory + stacks_at;
    w.count = count;
    for (unsigned t = 0; t < count; ++t) {
        w.thread[t].index = {t % block.x, t / block.x % block.y, t / block.x / block.y};
    }
#ifdef __SANITIZE_ADDRESS__
    const Checks checks(memory, bytes, w.shared, shared_bytes, gap);
#endif
    run_blocks(w);
#ifdef __SANITIZE_ADDRESS__
    checks.end();
#endif
    munmap(memory, bytes);
    return nullptr;
}

// 0, or 1 with a report. `args` point to the kernel's arguments.
inline int run(const Launch* launch, void (*call)(void**), void** args, Report* report) {
    const unsigned long long count = 1ull * launch->grid.x * launch->grid.y * launch->grid.z;
    Run run{*launch, call, args, *report, count, walk(*launch, 0, count), 0, 0};
    pthread_t helper[255];
    unsigned helpers = 0;
    while (helpers < 255 && helpers + 1 < launch->workers && helpers + 1 < count &&
           !pthread_create(&helper[helpers], nullptr, work, &run)) {
        ++helpers;
    }
    work(&run);
    while (helpers) pthread_join(helper[--helpers], nullptr);
    return run.failed;
}

}  // namespace emulator
