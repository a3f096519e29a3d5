// Early launch (programmatic dependent launch), for kernels whose header says `early`.
#pragma once

// Allows the next kernel of the stream to start its blocks where blocks of this one end; then waits
// until the kernel launched before this one is done and what it wrote is visible. Before this call
// a kernel must touch no global memory.
#if __CUDA_ARCH__ >= 900
__device__ __forceinline__ void wait_for_launch_before() {
    asm volatile(
        "griddepcontrol.launch_dependents;\n"
        "griddepcontrol.wait;" ::
            : "memory");
}
#else  // no kernel starts early there
__device__ inline void wait_for_launch_before() {}
#endif
