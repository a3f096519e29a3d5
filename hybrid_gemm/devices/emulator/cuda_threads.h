// The threads of a block, each with a stack while it waits.
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

namespace emulator {

constexpr unsigned max_threads = 1024;
constexpr size_t stack_bytes = 256 << 10;  // a frame of more than half of it does not compile

// --- structures that program.py mirrors

struct Launch {
    uint3 grid, block;
    unsigned shared_bytes, workers;
    unsigned order;  // 0 forward, 1 reverse, 2 shuffled by seed
    unsigned long long seed;
};

enum What : unsigned { nothing, barrier, warp, mask, memory, alignment, bounds, no_memory };

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

struct Worker {  // an OS thread at work on a block
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
static thread_local Worker* worker;

// --- one thread gives way to another

// The next thread of the walk that can run; `count` if none can.
inline unsigned next(const Worker& w) {
    unsigned t = w.current;
    for (unsigned i = 0; i < w.count; ++i) {
        t += w.stride;
        if (t >= w.count) t -= w.count;
        if (w.state[t] <= ready) return t;
    }
    return w.count;
}

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

[[noreturn]] inline void leave(Worker& w) {
    go(w.thread[w.current], w.home, true);
    __builtin_unreachable();
}

// The first report of a launch stands. Threads that wait are dropped where they are.
[[noreturn, gnu::noinline]] inline void fail(Worker& w, Report& report) {
    if (w.run->first_to_fail()) {
        report.block = blockIdx;
        w.run->report = report;
    }
    leave(w);
}

// Thread t waits, and the other is not where it should be.
[[noreturn, gnu::noinline]] inline void fail_apart(Worker& w, unsigned t, unsigned other) {
    Report report{};
    report.what = w.state[t] == in_warp ? warp : barrier;
    report.thread = w.thread[t].index;
    report.file = w.thread[t].place.file;
    report.line = w.thread[t].place.line;
    report.other = w.thread[other].index;
    if (w.state[other] != done) {
        report.other_file = w.thread[other].place.file;
        report.other_line = w.thread[other].place.line;
    }
    fail(w, report);
}

// Nobody can run and not all are done: name one who waits and one who does not come.
[[noreturn, gnu::noinline]] inline void fail_stuck(Worker& w) {
    for (unsigned t = 0; t < w.count; ++t) {
        for (unsigned other = 0; other < w.count; ++other) {
            const bool awaited = w.state[t] == at_barrier ||
                                 (w.state[t] == in_warp && other / warpSize == t / warpSize &&
                                  w.thread[t].mask >> other % warpSize & 1);
            if (awaited && w.state[other] != w.state[t]) fail_apart(w, t, other);
        }
    }
    __builtin_unreachable();
}

void run_threads();

// Makes thread t the current one, with a stack if it has none.
inline Thread& call_up(Worker& w, unsigned t) {
    Thread& thread = w.thread[t];
    if (w.state[t] == fresh) {
        const unsigned n = w.stacks_used++;
        thread.stack = w.stacks + n * stack_bytes;
        thread.stack_size = stack_bytes;
        make(thread.context, thread.stack, thread.stack + stack_bytes - n % 16 * 256, run_threads);
    }
    w.current = t;
    threadIdx = thread.index;
    return thread;
}

struct Step {
    Thread &from, &to;
};

[[gnu::always_inline]] inline void take(Step step) {
    if (&step.from != &step.to) go(step.from, step.to, false);
}

inline Step step_from(Worker& w, unsigned me) {
    const unsigned t = next(w);
    if (t == w.count) fail_stuck(w);
    return {w.thread[me], call_up(w, t)};
}

[[gnu::noinline]] inline Step wait_for_block(Place place) {
    Worker& w = *worker;
    const unsigned me = w.current;
    if (w.count == 1) return {w.thread[me], w.thread[me]};
    w.thread[me].place = place;
    w.state[me] = at_barrier;
    if (w.waiting == 0) w.waiter = me;
    if (!(w.thread[w.waiter].place == place)) fail_apart(w, w.waiter, me);
    if (++w.waiting == w.count) {
        w.waiting = 0;
        __builtin_memset(w.state, ready, w.count);
        w.current = w.first + w.count - w.stride;  // the walk starts anew
        if (w.current >= w.count) w.current -= w.count;
    }
    return step_from(w, me);
}

[[gnu::noinline]] inline Step wait_for_warp(unsigned mask, Place place) {
    Worker& w = *worker;
    const unsigned me = w.current, lane = me % warpSize, first = me - lane;
    Thread* const lanes = w.thread + first;
    if (w.count - first < warpSize) mask &= (1u << (w.count - first)) - 1;  // lanes there are
    lanes[lane].place = place;
    lanes[lane].mask = mask;
    if (!(mask >> lane & 1)) {
        Report report{};
        report.what = emulator::mask;
        report.thread = threadIdx;
        report.file = place.file;
        report.line = place.line;
        fail(w, report);
    }
    w.state[me] = in_warp;
    unsigned& arrived = w.arrived[me / warpSize];
    arrived |= 1u << lane;
    if ((arrived & mask) == mask) {
        arrived &= ~mask;
        for (unsigned l = 0; l < warpSize; ++l) {
            const bool same = lanes[l].mask == mask && lanes[l].place == place;
            if (mask >> l & 1 && !same) fail_apart(w, me, first + l);
        }
        for (unsigned rest = mask; rest; rest &= rest - 1) {
            const unsigned l = __builtin_ctz(rest), source = lanes[l].source;
            lanes[l].heard = mask >> source & 1 ? lanes[source].sent : ~0ull;
            w.state[first + l] = ready;
        }
    }
    return step_from(w, me);
}

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

// What runs on a stack: threads, one after another, until one waits.
inline void run_threads() {
    Worker& w = *worker;
#ifdef __SANITIZE_ADDRESS__
    const void* from;
    size_t from_bytes;
    __sanitizer_finish_switch_fiber(nullptr, &from, &from_bytes);
    if (w.stacks_used == 1) {
        w.home.stack = (char*)from;
        w.home.stack_size = from_bytes;
    }
#endif
    char* const stack = w.thread[w.current].stack;
    for (;;) {
        w.run->call(w.run->args);
        const unsigned me = w.current;
        w.state[me] = done;
        ++w.finished;
        const unsigned t = next(w);
        if (t == w.count) {
            if (w.finished < w.count) fail_stuck(w);
            leave(w);
        }
        if (w.state[t] != fresh) go(w.thread[me], call_up(w, t), true);
        w.current = t;
        w.thread[t].stack = stack;
        w.thread[t].stack_size = stack_bytes;
        threadIdx = w.thread[t].index;
    }
}

}  // namespace emulator
