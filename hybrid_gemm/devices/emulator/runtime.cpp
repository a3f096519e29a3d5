// What all kernels share: waiting, and launches, whose blocks are shared out over OS threads.
// A block stays on one OS thread, so that its shared memory can be thread_local. Compiled once, and
// linked to each kernel: it takes g++ longer than a small kernel does.
#include "cuda_words.h"
#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>
#ifdef __linux__
#include <link.h>
#endif

constinit thread_local uint3 threadIdx, blockIdx;
constinit thread_local dim3 blockDim, gridDim;

namespace emulator {

constinit thread_local Worker* worker;

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

inline Report report_of(What what, uint3 thread, Place place) {
    Report report{};
    report.what = what;
    report.thread = thread;
    report.file = place.file;
    report.line = place.line;
    return report;
}

// A thread finds at this place what must not be.
[[noreturn, gnu::noinline]] inline void fail_at(Worker& w, What what, Place place) {
    Report report = report_of(what, threadIdx, place);
    fail(w, report);
}

void fail_assert(Place place) { fail_at(*worker, assertion, place); }

// Thread t waits, and the other is not where it should be.
[[noreturn, gnu::noinline]] inline void fail_apart(Worker& w, unsigned t, unsigned other) {
    const Thread& waits = w.thread[t];
    Report report = report_of(w.state[t] == in_warp ? warp : barrier, waits.index, waits.place);
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

inline Step step_from(Worker& w, unsigned me) {
    const unsigned t = next(w);
    if (t == w.count) fail_stuck(w);
    return {w.thread[me], call_up(w, t)};
}

Step wait_for_block(Place place) {
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

Step wait_for_warp(unsigned mask, Place place) {
    Worker& w = *worker;
    const unsigned me = w.current, lane = me % warpSize, first = me - lane;
    Thread* const lanes = w.thread + first;
    if (w.count - first < warpSize) mask &= (1u << (w.count - first)) - 1;  // lanes there are
    lanes[lane].place = place;
    lanes[lane].mask = mask;
    if (!(mask >> lane & 1)) fail_at(w, emulator::mask, place);
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
        // In reverse the warp goes on at once, so that a barrier which is missing shows.
        if (w.run->launch.order == 1) {
            return {w.thread[me], call_up(w, first + warpSize - 1 - __builtin_clz(mask))};
        }
    }
    return step_from(w, me);
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

#ifdef __SANITIZE_ADDRESS__
#include "checks.h"
#endif

namespace emulator {

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

// --- the memory of an OS thread in a launch: its Worker, dynamic shared memory, and stacks

constexpr size_t gap = 4096;  // on both sides of dynamic shared memory
constexpr size_t pages(size_t bytes) { return (bytes + gap - 1) / gap * gap; }
constexpr size_t shared_at = pages(sizeof(Worker)) + gap;
constexpr size_t stacks_at = shared_at + pages(max_shared_bytes) + gap;

// Kept for the next launch of any kernel, since new pages take longer than most launches. Of an
// inline variable that is visible the dynamic linker makes one for all libraries.
[[gnu::visibility("default")]] inline Worker* kept[16];

inline Worker* take_memory(size_t bytes) {
#ifndef __SANITIZE_ADDRESS__  // which finds what is used when a launch is over
    for (Worker*& place : kept) {
        Worker* const w = __atomic_exchange_n(&place, nullptr, __ATOMIC_ACQUIRE);
        if (w && w->bytes >= bytes) return w;
        if (w) munmap(w, w->bytes);
    }
#endif
    void* const memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                              MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) return nullptr;
#ifdef MADV_NOHUGEPAGE
    madvise(memory, bytes, MADV_NOHUGEPAGE);  // of most stacks a page is used
#endif
    Worker* const w = (Worker*)memory;
    w->bytes = bytes;
    return w;
}

inline void give_memory(Worker* w) {
#ifndef __SANITIZE_ADDRESS__
    for (Worker*& place : kept) {
        Worker* nobody = nullptr;
        if (__atomic_compare_exchange_n(&place, &nobody, w, false, __ATOMIC_RELEASE,
                                        __ATOMIC_RELAXED))
            return;
    }
#endif
    munmap(w, w->bytes);
}

// --- a kernel that crashes

// What took these signals before; Python may, or another kernel's library.
constexpr int crashes[] = {SIGSEGV, SIGBUS, SIGFPE};
inline struct sigaction before[3];
inline bool watched;
[[gnu::visibility("default")]] inline bool said;  // of all libraries, as `kept`

// Says whose crash it is. What the kernel did is done again when this returns, and ends the
// process.
inline void crashed(int number) {
    constexpr char words[] =
        "hybrid-gemm: the kernel crashes on the emulator: it reads or writes outside its memory, "
        "or divides by 0; `run --check` in place of `run --device emulator` names the line\n";
    if (worker && !__atomic_exchange_n(&said, true, __ATOMIC_ACQ_REL)) {
        if (write(STDERR_FILENO, words, sizeof words - 1) < 0) worker = nullptr;
    }
    for (int i = 0; i < 3; ++i) {
        if (crashes[i] == number) sigaction(number, &before[i], nullptr);
    }
}

inline void watch_for_crashes() {
    if (__atomic_exchange_n(&watched, true, __ATOMIC_ACQ_REL)) return;
    struct sigaction action{};
    action.sa_handler = crashed;
    for (int i = 0; i < 3; ++i) sigaction(crashes[i], &action, &before[i]);
}

// What an OS thread does.
inline void* work(void* argument) {
    Run& run = *(Run*)argument;
    const uint3 block = run.launch.block;
    const unsigned count = block.x * block.y * block.z;
    const size_t bytes = stacks_at + count * stack_bytes;
    Worker* const taken = take_memory(bytes);
    if (!taken) {
        if (run.first_to_fail()) {
            run.report.what = no_memory;
            run.report.bytes = bytes;
        }
        return nullptr;
    }
    Worker& w = *taken;
    w.run = &run;
    w.shared = (char*)taken + shared_at;
    w.stacks = (char*)taken + stacks_at;
    w.count = count;
    for (unsigned t = 0; t < count; ++t) {
        w.thread[t].index = {t % block.x, t / block.x % block.y, t / block.x / block.y};
    }
#ifdef __SANITIZE_ADDRESS__
    const Checks checks(w, gap);
#endif
    run_blocks(w);
#ifdef __SANITIZE_ADDRESS__
    checks.end();
#endif
    give_memory(taken);
    return nullptr;
}

int run(const Launch* launch, void (*call)(void**), void** args, Report* report) {
    const unsigned long long count = 1ull * launch->grid.x * launch->grid.y * launch->grid.z;
    Run run{*launch, call, args, *report, count, walk(*launch, 0, count), 0, 0};
#ifndef __SANITIZE_ADDRESS__
    watch_for_crashes();
#endif
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
