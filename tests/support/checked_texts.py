"""Runs a kernel text that reads and writes where it must not, in every way that AddressSanitizer
should report, and prints the reports:

python -m support.checked_texts
"""

import numpy as np

from hybrid_gemm import catalog
from hybrid_gemm.catalog import Launch
from hybrid_gemm.devices.emulator.program import Options
from hybrid_gemm.errors import KernelError

from .emulation import compiled

TEXT = """
#include "shared_memory.cuh"
extern "C" __global__ void kernel(float* x, int what, long long by) {
    __shared__ float tile[64];
    extern __shared__ float more[];
    const int t = threadIdx.x;
    float* p = tile;
    if (what == 8) x[t + by] = 0;
    p[t] = more[t] = x[t];
    __syncthreads();
    if (what == 1) x[t + by] = 0;
    if (what == 2) x[t] = p[t + by];
    if (what == 3) more[t + by] = 0;
    if (what == 4) tile[t + by] = 0;
    if (what == 5) *(float4*)(x + 4 * (t / 8) + by) = make_float4(0, 0, 0, 0);
    if (what == 6) copy_async<16>(shared_address(more) + t / 8 * 16, x + t / 8 * 4 + by);
    if (what == 7) x[t] = t / (int)by;
}
"""
FREED = None  # `by` elements from x lies memory that was an array's, and is nobody's
# name: (what, by), and what the report must contain
CASES = {
    "right": (0, 0, ""),
    "global": (1, 1, "thread (63, 0, 0) writes 4 bytes, 0 past the end of an array of 256 bytes, "
               "at kernel.cu:10"),
    "at once": (8, 1, "0 past the end of an array of 256 bytes, at kernel.cu:7"),
    "before": (1, -2, "thread (0, 0, 0) writes 4 bytes, 8 before an array of 256 bytes, "
               "at kernel.cu:10"),
    "freed": (1, FREED, "thread (0, 0, 0) writes 4 bytes outside all arrays at kernel.cu:10"),
    "wild": (1, 2**30, "accesses address"),
    "shared": (2, 1, "thread (63, 0, 0) reads 4 bytes, 0 past the end of an array of 256 bytes, "
               "at kernel.cu:11"),
    "dynamic": (3, 2, "thread (62, 0, 0) writes 4 bytes outside all arrays at kernel.cu:12"),
    "index": (4, 1, "thread (63, 0, 0) has index 64, outside the array, at kernel.cu:13"),
    "aligned": (5, 4, ""),
    "misaligned": (5, 1, "thread (0, 0, 0) uses address 0x"),
    "aligned copy": (6, 4, ""),
    "misaligned copy": (6, 1, "thread (0, 0, 0) uses address 0x"),
    "division": (7, 1, ""),
    "division by zero": (7, 0, "thread (0, 0, 0) divides an integer by zero at kernel.cu:16"),
}  # fmt: skip


def main() -> None:
    for name, (what, by, _wanted) in CASES.items():
        checked = compiled(TEXT, catalog.directory(), name, Options(sanitize=True))
        try:
            x, other = np.zeros(64, np.float32), np.zeros(10000, np.float32)
            if by is FREED:
                by = (other[5000:].ctypes.data - x.ctypes.data) // x.itemsize
            del other
            args = [x, np.int32(what), np.int64(by)]
            checked.launch(Launch((1, 1, 1), (64, 1, 1), 256), args, threads=2)
        except KernelError as error:
            print(f"{name}: {error}")
        else:
            print(f"{name}:")


if __name__ == "__main__":
    main()
