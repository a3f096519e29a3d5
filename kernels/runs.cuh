// Work that blocks share in equal runs, and how they count themselves in once they have handed in
// what they made of it.
#pragma once

// `units` of work in equal runs, one a share: each has the `least` number of units, units / shares,
// and the first `more` runs, units % shares, have one unit above that.
__device__ __forceinline__ int run_begin(int share, int least, int more) {
    return share * least + (share < more ? share : more);
}
__device__ __forceinline__ int run_length(int share, int least, int more) {
    return least + (share < more);
}
// The share that a unit belongs to.
__device__ __forceinline__ int run_of(int unit, int least, int more) {
    const int longer = more * (least + 1);  // units in the longer runs
    return unit < longer ? unit / (least + 1) : more + (unit - longer) / least;
}

// Adds 1 to a counter in global memory and returns what it was. What this thread wrote before, and
// what it saw others write, is visible to whoever counts up to here afterwards.
#ifdef HYBRID_GEMM_EMULATOR
__device__ inline unsigned count_in(unsigned* counter) { return atomicAdd(counter, 1u); }
#else
__device__ __forceinline__ unsigned count_in(unsigned* counter) {
    unsigned before;
    asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], 1;"
                 : "=r"(before)
                 : "l"(counter)
                 : "memory");
    return before;
}
#endif
