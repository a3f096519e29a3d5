"""The kernels of the catalog on the CPU: one fiber a CUDA thread."""
