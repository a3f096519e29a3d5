"""cuBLAS, the peer in every table: CuPy's library and handle, called directly.

CuPy refuses cuBLAS calls while a stream is captured, and a graph of launches is how small
products are timed; so the functions are called through ctypes on CuPy's own handle.
"""

from __future__ import annotations

import ctypes
import functools
import threading

import numpy as np

from ..errors import HybridGemmError
from .base import layout

WORKSPACE_BYTES = 32 << 20  # what cuBLAS asks for on Hopper
_OPERATION = {"n": 0, "t": 1}
_DEFAULT_MATH = 0  # no TF32, whatever the environment says
_local = threading.local()


@functools.cache
def _library() -> ctypes.CDLL:
    import cupy

    major = cupy.cuda.cublas.getVersion(cupy.cuda.device.get_cublas_handle()) // 10000
    return ctypes.CDLL(f"libcublas.so.{major}")  # CuPy has loaded it already


def _call(name: str, *args) -> None:
    if status := getattr(_library(), name)(*args):
        raise HybridGemmError(f"{name} failed with cuBLAS status {status}")


def gemm(a, b, c, *, alpha, beta, stream) -> None:
    """c = alpha * a @ b + beta * c for CuPy views in either order, float32 or float64.

    Row-major C is column-major C^T = op(B)^T op(A)^T, so the operands change places.
    """
    import cupy

    (m, n), k = c.shape, a.shape[1]
    (la, lda), (lb, ldb) = layout(a) or ("n", 1), layout(b) or ("n", 1)
    handle = ctypes.c_void_p(cupy.cuda.device.get_cublas_handle())
    _call("cublasSetStream_v2", handle, ctypes.c_void_p(stream.cupy.ptr))
    _call("cublasSetWorkspace_v2", handle, _workspace(), ctypes.c_size_t(WORKSPACE_BYTES))
    _call("cublasSetPointerMode_v2", handle, 0)
    _call("cublasSetMathMode", handle, _DEFAULT_MATH)
    scalars = np.array([alpha, beta], c.dtype)
    whole = ctypes.c_int64
    _call(
        {"float32": "cublasSgemm_v2_64", "float64": "cublasDgemm_v2_64"}[c.dtype.name],
        handle, _OPERATION[lb], _OPERATION[la], whole(n), whole(m), whole(k),
        ctypes.c_void_p(scalars.ctypes.data), ctypes.c_void_p(b.data.ptr), whole(max(ldb, 1)),
        ctypes.c_void_p(a.data.ptr), whole(max(lda, 1)),
        ctypes.c_void_p(scalars.ctypes.data + c.dtype.itemsize), ctypes.c_void_p(c.data.ptr),
        whole(layout(c)[1]),
    )  # fmt: skip


def _workspace() -> ctypes.c_void_p:
    """One a thread and GPU, as handles are; setting the stream forgets it each time."""
    import cupy

    kept = _local.__dict__.setdefault("workspaces", {})
    ordinal = cupy.cuda.runtime.getDevice()
    if ordinal not in kept:
        kept[ordinal] = cupy.cuda.Memory(WORKSPACE_BYTES)
    return ctypes.c_void_p(kept[ordinal].ptr)
