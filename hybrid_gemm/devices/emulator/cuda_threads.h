// The threads of a block, each with a stack while it waits: what kernels are compiled with. The
// rest is in runtime.cpp, which is compiled once.
//
// A CUDA thread is a call of the kernel. Threads of a block run one after another on one stack;
// only a thread that must wait (at a barrier or in a warp operation) keeps its stack, and the
// next thread starts on a fresh one. So a kernel whose threads never wait is a plain loop.
#pragma once
#include "stack_switch.h"
#include <stddef.h>
#include <stdint.h>
#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/common_interface_defs.h>
#endif

namespace [[gnu::visibility("hidden")]] emulator {

constexpr unsigned max_threads = 1024;
constexpr size_t max_shared_bytes = 227 << 10;  // as in program.py
constexpr size_t stack_bytes = 256 << 10;       // a frame of more than half of it does not compile

// --- structures that program.py mirrors

struct Launch {
    uint3 grid, block;
    unsigned shared_bytes, workers;
    unsigned order;  // 0 forward, 1 reverse, 2 shuffled by seed
    unsigned long long seed;
};

enum What : unsigned {
    nothing,
    barrier,
    warp,
    mask,
    memory,
    alignment,
    bounds,
    division,
    assertion,
    no_memory
};

struct Report {
    unsigned what, written;
    uint3 block, thread, other;
    int line, other_line;  // other_line is 0 where the other thread has returned
    const char *file, *other_file;
    unsigned long long address, bytes, region, region_bytes;
    unsigned long long code;  // in place of file and line: the instruction, in the library
};

struct Parameter {
    char kind;       // one of NumPy's: i u f b, or V for anything else
    char pointer;    // 0 a value, 1 a pointer, 2 a pointer to what the kernel may write
    unsigned bytes;  // of the value or of what is pointed to
};

// --- structures of our own

// Every number below `count` once: first, first + stride, ... modulo count.
struct Walk {
    unsigned long long first, stride;
};

enum State : unsigned char { fresh, ready, at_barrier, in_warp, done };

struct Place {
    const char* file;
    int line;
    bool operator==(const Place& other) const {
        return line == other.line && (file == other.file || !__builtin_strcmp(file, other.file));
    }
};

struct Thread {
    Context context;
    char* stack;  // its low end
    size_t stack_size;
    uint3 index;
    Place place;            // where it waits
    unsigned mask, source;  // of a warp operation: the lanes in it, the one it hears
    uint64_t sent, heard;
};

struct Run {  // a launch, as the OS threads share it
    const Launch& launch;
    void (*const call)(void** args);
    void** const args;
    Report& report;
    const unsigned long long count;  // of blocks
    const Walk blocks;
    unsigned long long taken;  // blocks so far
    int failed;

    bool first_to_fail() { return !__atomic_exchange_n(&failed, 1, __ATOMIC_RELAXED); }
};

struct Worker {    // an OS thread at work on a block
    size_t bytes;  // of the memory that begins with this
    Run* run;
    char *shared, *stacks;  // dynamic shared memory; a stack for each thread
    Thread home;
    unsigned count, first, stride;  // threads of the block, and the walk over them
    unsigned current, finished, stacks_used;
    unsigned waiting, waiter;                  // at the barrier: how many, and the first
    unsigned arrived[max_threads / warpSize];  // in warp operations: the lanes, a mask a warp
    State state[max_threads];
    Thread thread[max_threads];
};
extern constinit thread_local Worker* worker;

// --- one thread gives way to another

// From one stack to another. `over`: nothing comes back to the first.
[[gnu::always_inline]] inline void go(Thread& from, Thread& to, [[maybe_unused]] bool over) {
#ifdef __SANITIZE_ADDRESS__
    void* fake = nullptr;
    __sanitizer_start_switch_fiber(over ? nullptr : &fake, to.stack, to.stack_size);
#endif
    swap(from.context, to.context);
#ifdef __SANITIZE_ADDRESS__
    __sanitizer_finish_switch_fiber(fake, nullptr, nullptr);
#endif
}

struct Step {
    Thread &from, &to;
};

[[gnu::always_inline]] inline void take(Step step) {
    if (&step.from != &step.to) go(step.from, step.to, false);
}

// A thread waits: which goes on.
Step wait_for_block(Place place);
Step wait_for_warp(unsigned mask, Place place);

[[noreturn]] void fail_assert(Place place);

inline unsigned lane() { return worker->current % warpSize; }

// What lane `source` of the warp gives; each lane names its own source. A lane that gives
// nothing is heard as all ones, a NaN.
template <class V>
[[gnu::always_inline]] inline V exchange(unsigned mask, V value, unsigned source, Place place) {
    static_assert(sizeof(V) <= sizeof(uint64_t), "a shuffle moves at most 8 bytes");
    Thread& me = worker->thread[worker->current];
    __builtin_memcpy(&me.sent, &value, sizeof(V));
    me.source = source;
    take(wait_for_warp(mask, place));
    __builtin_memcpy(&value, &me.heard, sizeof(V));
    return value;
}

}  // namespace emulator
