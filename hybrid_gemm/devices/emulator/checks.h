// What AddressSanitizer and UBSan find in a kernel, as reports of its launch. Part of runtime.cpp.
// The sanitizers' own run-time library would end the process; these functions are found first.
#pragma once
#include "cuda_threads.h"
#include <sanitizer/asan_interface.h>
#include <signal.h>
#include <ucontext.h>

extern "C" __attribute__((visibility("hidden"))) const char __ehdr_start[];  // of this library

namespace emulator {

[[noreturn, gnu::noinline]] inline void fail_access(void* address, size_t bytes, bool written,
                                                    uintptr_t code) {
    Report report = report_of(memory, threadIdx, {});
    report.written = written;
    report.address = (uintptr_t)address;
    report.bytes = bytes;
    report.code = code - (uintptr_t)__ehdr_start;
    void* region = nullptr;
    size_t region_bytes = 0;
    char name[1];
    __asan_locate_address(address, name, sizeof name, &region, &region_bytes);
    report.region = (uintptr_t)region;
    report.region_bytes = region_bytes;
    fail(*worker, report);
}

#define EMULATOR_HANDLER extern "C" [[noreturn]] inline __attribute__((used)) void
#define EMULATOR_CALLER ((uintptr_t)__builtin_return_address(0) - 1)
#define EMULATOR_ACCESS(access, bytes, written)                     \
    EMULATOR_HANDLER __asan_report_##access##bytes(void* address) { \
        fail_access(address, bytes, written, EMULATOR_CALLER);      \
    }
#define EMULATOR_ACCESSES(access, written)                                     \
    EMULATOR_ACCESS(access, 1, written)                                        \
    EMULATOR_ACCESS(access, 2, written)                                        \
    EMULATOR_ACCESS(access, 4, written)                                        \
    EMULATOR_ACCESS(access, 8, written)                                        \
    EMULATOR_ACCESS(access, 16, written)                                       \
    EMULATOR_HANDLER __asan_report_##access##_n(void* address, size_t bytes) { \
        fail_access(address, bytes, written, EMULATOR_CALLER);                 \
    }
EMULATOR_ACCESSES(load, false)
EMULATOR_ACCESSES(store, true)

// The layout that the compiler passes; the two checks below begin alike.
struct Check {
    const char* file;
    unsigned line, column;
    const void* type;
    unsigned char log_alignment, kind;
};

[[noreturn]] inline void fail_check(What what, const Check& check, unsigned long long value) {
    Report report = report_of(what, threadIdx, {check.file, (int)check.line});
    report.address = value;
    report.bytes = what == alignment ? 1ull << check.log_alignment : 0;
    fail(*worker, report);
}

EMULATOR_HANDLER __ubsan_handle_type_mismatch_v1_abort(void* check, void* pointer) {
    fail_check(alignment, *(Check*)check, (uintptr_t)pointer);
}
EMULATOR_HANDLER __ubsan_handle_out_of_bounds_abort(void* check, void* index) {
    fail_check(bounds, *(Check*)check, (uintptr_t)index);
}
EMULATOR_HANDLER __ubsan_handle_divrem_overflow_abort(void* check, void*, void*) {
    fail_check(division, *(Check*)check, 0);
}

// Around an OS thread's work: nothing may touch what lies beside dynamic shared memory, and an
// address so wild that not even its check can be read is reported too. Checked launches take
// turns, so the signal is theirs while they last.
struct Checks {
    const char* memory;
    size_t bytes;
    struct sigaction before[2];

    static void wild_access(int number, siginfo_t* info, [[maybe_unused]] void* context) {
        if (!worker) {  // another thread of the process, at something else
            signal(number, SIG_DFL);
            return;
        }
#ifdef __x86_64__
        const uintptr_t code = ((ucontext_t*)context)->uc_mcontext.gregs[REG_RIP];
#elif defined __aarch64__
        const uintptr_t code = ((ucontext_t*)context)->uc_mcontext.pc;
#else
        const uintptr_t code = 0;
#endif
        fail_access(info->si_addr, 0, false, code);
    }

    Checks(const Worker& w, size_t gap) : memory((char*)&w), bytes(w.bytes) {
        const char* const end = w.shared + w.run->launch.shared_bytes;
        __asan_poison_memory_region(w.shared - gap, gap);
        __asan_poison_memory_region(end, w.stacks - end);
        struct sigaction action{};
        action.sa_sigaction = wild_access;
        action.sa_flags = SA_SIGINFO | SA_NODEFER;  // the handler is left without a return
        sigaction(SIGSEGV, &action, &before[0]);
        sigaction(SIGBUS, &action, &before[1]);
    }

    void end() const {
        sigaction(SIGSEGV, &before[0], nullptr);
        sigaction(SIGBUS, &before[1], nullptr);
        __asan_unpoison_memory_region(memory, bytes);
    }
};

}  // namespace emulator
