"""cuBLAS, the peer in every table: CuPy's library, called directly.

CuPy refuses cuBLAS calls while a stream is captured, and a graph of launches is how small
products are timed; there the functions are called through ctypes.

Each stream has a handle of its own: cuBLAS promises the same bits every time only to a handle
that one stream uses, and a workspace is in use until the product that has it is done.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable

import numpy as np

from ..errors import HybridGemmError
from .base import layout

WORKSPACE_BYTES = 32 << 20  # what cuBLAS asks for on Hopper
_OPERATION = {"n": 0, "t": 1}
_DEFAULT_MATH = 0  # no TF32, whatever the environment says
_NARROW = {"float16": 2, "bfloat16": 14, "float32": 0}  # cudaDataType
_COMPUTE = {False: 68, True: 77}  # cublasComputeType: float32, float32 through TF32
_ANY_ALGORITHM = -1


@functools.cache
def library() -> ctypes.CDLL:
    """CuPy's own cuBLAS."""
    import cupy

    major = cupy.cuda.cublas.getVersion(cupy.cuda.device.get_cublas_handle()) // 10000
    return ctypes.CDLL(f"libcublas.so.{major}")  # CuPy has loaded it already


def _call(name: str, *args) -> None:
    if status := getattr(library(), name)(*args):
        raise HybridGemmError(f"{name} failed with cuBLAS status {status}")


class Handle:
    """What cuBLAS needs for the products of one stream, made on the current GPU."""

    def __init__(self):
        import cupy

        self.cublas = cupy.cuda.cublas
        self.value = self.cublas.create()

    @functools.cached_property
    def workspace(self):
        import cupy

        return cupy.cuda.Memory(WORKSPACE_BYTES)

    def __del__(self):
        if hasattr(self, "value") and not sys.is_finalizing():
            self.cublas.destroy(self.value)


def bind(a, b, c, *, alpha, beta, tf32: bool = False) -> Callable:
    """A call that multiplies CuPy matrices laid out as these, in any order: float32 (strict, or
    through TF32) or float64, or float16 or bfloat16 with sums in float32 and C of their dtype or
    float32.

    Row-major C is column-major C^T = op(B)^T op(A)^T, so the operands change places.
    """
    import cupy

    (m, n), k = c.shape, a.shape[1]
    (la, lda), (lb, ldb) = layout(a) or ("n", 1), layout(b) or ("n", 1)
    ldc = layout(c)[1]
    operations = _OPERATION[lb], _OPERATION[la]
    mixed = tf32 or a.dtype.itemsize == 2
    scalars = np.array([alpha, beta], np.float32 if mixed else c.dtype)
    alpha_at, beta_at = scalars.ctypes.data, scalars.ctypes.data + scalars.itemsize
    cublas = cupy.cuda.cublas
    quick, name = {
        "float32": (cublas.sgemm, "cublasSgemm_v2_64"),
        "float64": (cublas.dgemm, "cublasDgemm_v2_64"),
    }.get(c.dtype.name, (None, ""))
    small = max(lda, ldb, ldc) < 2**31

    def call(a, b, c, stream, _kept=scalars):
        if stream.cublas is None:
            stream.cublas = Handle()
        handle = stream.cublas.value
        if (
            small and not mixed and not stream.cupy.is_capturing()
        ):  # CuPy takes its current stream, this one
            cublas.setMathMode(handle, _DEFAULT_MATH)
            quick(
                handle, *operations, n, m, k, alpha_at, b.data.ptr, ldb, a.data.ptr, lda,
                beta_at, c.data.ptr, ldc,
            )  # fmt: skip
            return
        pointer, whole = ctypes.c_void_p, ctypes.c_int64
        _call("cublasSetStream_v2", pointer(handle), pointer(stream.cupy.ptr))
        _call("cublasSetWorkspace_v2", pointer(handle), pointer(stream.cublas.workspace.ptr),
              ctypes.c_size_t(WORKSPACE_BYTES))  # fmt: skip
        _call("cublasSetPointerMode_v2", pointer(handle), 0)
        _call("cublasSetMathMode", pointer(handle), _DEFAULT_MATH)
        head = pointer(handle), *operations, whole(n), whole(m), whole(k), pointer(alpha_at)
        matrices = [(pointer(x.data.ptr), ld) for x, ld in ((b, ldb), (a, lda), (c, ldc))]
        if not mixed:
            x, y, z = ((at, whole(ld)) for at, ld in matrices)
            _call(name, *head, *x, *y, pointer(beta_at), *z)
            return
        x, y, z = (
            (at, _NARROW[of.dtype.name], whole(ld))
            for (at, ld), of in zip(matrices, (b, a, c), strict=True)
        )
        _call("cublasGemmEx_64", *head, *x, *y, pointer(beta_at), *z, _COMPUTE[tf32],
              _ANY_ALGORITHM)  # fmt: skip

    return call
