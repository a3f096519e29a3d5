// Switching between stacks: x86-64 and AArch64 by hand, others through ucontext.
//
// Always inlined: every place that waits then has a jump of its own, which the CPU foresees.
// Through a function, its return would be foreseen to where the thread that left had waited,
// and be wrong at every barrier. The asm names every register that the CPU has as overwritten,
// so that the compiler keeps only what lives; it pushes, so there must be no red zone.
#pragma once
#if !(defined __x86_64__ && !defined __APX_F__ || defined __aarch64__) || \
    defined HYBRID_GEMM_UCONTEXT
#define EMULATOR_UCONTEXT
#include <ucontext.h>
#endif

namespace emulator {

#ifndef EMULATOR_UCONTEXT
using Context = void*;  // the stack pointer; above it lie where to go on and the frame pointer

inline void make(Context& context, char*, char* top, void (*entry)()) {
    void** words = (void**)top - 2;
    words[0] = nullptr;
    words[1] = nullptr;
#ifdef __x86_64__
    words[0] = (void*)entry;
#else
    words[1] = (void*)entry;
#endif
    context = words;
}

[[gnu::always_inline]] inline void swap(Context& from, Context& to) {
    Context *save = &from, load = to;
#ifdef __x86_64__
    asm volatile(R"(
        push %%rbp
        lea 1f(%%rip), %%rcx
        push %%rcx
        mov %%rsp, (%0)
        mov %1, %%rsp
        pop %%rcx
        jmp *%%rcx
    1:  pop %%rbp
    )"
                 : "+a"(save), "+d"(load)
                 :
                 : "rbx", "rcx", "rsi", "rdi", "r8", "r9", "r10", "r11", "r12", "r13", "r14", "r15",
                   "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9",
                   "xmm10", "xmm11", "xmm12", "xmm13", "xmm14", "xmm15",
#ifdef __AVX512F__
                   "xmm16", "xmm17", "xmm18", "xmm19", "xmm20", "xmm21", "xmm22", "xmm23", "xmm24",
                   "xmm25", "xmm26", "xmm27", "xmm28", "xmm29", "xmm30", "xmm31", "k0", "k1", "k2",
                   "k3", "k4", "k5", "k6", "k7",
#endif
                   "memory", "cc");
#else
    register Context* x0 asm("x0") = save;
    register Context x1 asm("x1") = load;
    asm volatile(R"(
        adr x16, 1f
        stp x29, x16, [sp, #-16]!
        mov x9, sp
        str x9, [%0]
        mov sp, %1
        ldp x29, x16, [sp], #16
        br x16
    1:  hint #34
    )"  // a landing pad, where branch targets are guarded
                 : "+r"(x0), "+r"(x1)
                 :
                 : "x2", "x3", "x4", "x5", "x6", "x7", "x8", "x9", "x10", "x11", "x12", "x13",
                   "x14", "x15", "x16", "x17", "x18", "x19", "x20", "x21", "x22", "x23", "x24",
                   "x25", "x26", "x27", "x28", "x30", "v0", "v1", "v2", "v3", "v4", "v5", "v6",
                   "v7", "v8", "v9", "v10", "v11", "v12", "v13", "v14", "v15", "v16", "v17", "v18",
                   "v19", "v20", "v21", "v22", "v23", "v24", "v25", "v26", "v27", "v28", "v29",
                   "v30", "v31",
#ifdef __ARM_FEATURE_SVE
                   "p0", "p1", "p2", "p3", "p4", "p5", "p6", "p7", "p8", "p9", "p10", "p11", "p12",
                   "p13", "p14", "p15",
#endif
                   "memory", "cc");
#endif
}
#else
using Context = ucontext_t;

inline void make(Context& context, char* bottom, char* top, void (*entry)()) {
    getcontext(&context);
    context.uc_stack.ss_sp = bottom;
    context.uc_stack.ss_size = top - bottom;
    makecontext(&context, entry, 0);
}

inline void swap(Context& from, Context& to) { swapcontext(&from, &to); }
#endif

}  // namespace emulator
