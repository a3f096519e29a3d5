"""`python -m hybrid_gemm.experiments.library_cold N [GPU]`: cublasSgemm as the lab timed it.

It runs in a process of its own, because the first handle of a process takes long to make.
Prints one line of JSON. The clock starts when the library is loaded and the context exists.
"""

from __future__ import annotations

import json
import sys
import time
from types import ModuleType

import numpy as np

from ..bench.study import drawn_on_host, judged
from ..problem import Problem


def main(n: int, gpu: int) -> None:
    """Times a product of n x n float32 matrices on a GPU, and a second with the same handle."""
    import cupy as cp

    a, b = drawn_on_host(n, n, n, "float32", 0)
    c = np.zeros((n, n), np.float32)
    cublas = cp.cuda.cublas
    with cp.cuda.Device(gpu):
        cp.cuda.runtime.free(0)  # makes the context
        started = time.perf_counter()
        handle = cublas.create()
        handled = time.perf_counter()
        _multiply(cp, cublas, handle, a, b, c)
        done = time.perf_counter()
        _multiply(cp, cublas, handle, a, b, c)
        again = time.perf_counter()
        verdict = judged(Problem(n, n, n), cp.asarray(a), cp.asarray(b), cp.asarray(c))
    print(json.dumps({
        "time_ms": (done - started) * 1e3, "handle_ms": (handled - started) * 1e3,
        "warm_ms": (again - done) * 1e3, "samples": 1, **verdict,
    }))  # fmt: skip


def _multiply(
    cp: ModuleType, cublas: ModuleType, handle: int, a: np.ndarray, b: np.ndarray, c: np.ndarray
) -> None:
    """Allocates, copies in, multiplies, copies back and frees."""
    runtime, n = cp.cuda.runtime, len(a)
    places = [runtime.malloc(x.nbytes) for x in (a, b, c)]
    for host, there in zip((a, b), places, strict=False):
        runtime.memcpy(there, host.ctypes.data, host.nbytes, runtime.memcpyHostToDevice)
    one, zero = np.array([1], np.float32), np.array([0], np.float32)
    cublas.setPointerMode(handle, cublas.CUBLAS_POINTER_MODE_HOST)
    # cuBLAS is column-major: its B^T A^T is our A B.
    cublas.sgemm(
        handle, cublas.CUBLAS_OP_N, cublas.CUBLAS_OP_N, n, n, n, one.ctypes.data,
        places[1], n, places[0], n, zero.ctypes.data, places[2], n,
    )  # fmt: skip
    runtime.memcpy(c.ctypes.data, places[2], c.nbytes, runtime.memcpyDeviceToHost)
    for place in places:
        runtime.free(place)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0)
