"""CUDA GPUs: CuPy arrays, the driver, NVRTC, cuBLAS, NCCL and tensor maps."""
