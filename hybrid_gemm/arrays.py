"""Matrices as callers give them: NumPy's, a GPU's, or anything with their protocols."""

from __future__ import annotations

import numpy as np

from .errors import DTypeError, UsageError
from .problem import Problem


def is_device_array(x) -> bool:
    return type(x).__module__.partition(".")[0] == "cupy"


def module_of(x):
    if not is_device_array(x):
        return np
    import cupy

    return cupy


def as_matrix(x):
    """NumPy arrays and CuPy arrays as they are; others by their protocol, or by np.asarray."""
    if isinstance(x, np.ndarray) or is_device_array(x):
        return x
    if hasattr(x, "__cuda_array_interface__"):
        import cupy

        return cupy.asarray(x)
    if hasattr(x, "__dlpack_device__") and x.__dlpack_device__()[0] in (2, 13):  # CUDA
        import cupy

        return cupy.from_dlpack(x)
    return np.asarray(x)


def check_out(out, problem: Problem, a, b, c):
    """`c`, or `out` in its place where they are the same matrix; raises if `out` is unfit."""
    if not (isinstance(out, np.ndarray) or is_device_array(out)):
        raise DTypeError(f"out must be a NumPy or CuPy array, not {type(out).__name__}")
    if tuple(out.shape) != (problem.m, problem.n):
        raise UsageError(
            f"out has shape {tuple(out.shape)}; this product is ({problem.m}, {problem.n})"
        )
    if not np.can_cast(problem.out_dtype, out.dtype, "same_kind"):
        raise DTypeError(
            f"out has dtype {out.dtype}; the product has dtype {problem.out_dtype}, which "
            "does not cast to it"
        )
    if not isinstance(out, np.ndarray):
        shares = module_of(out).shares_memory
    else:
        if not out.flags.writeable:
            raise UsageError("out is read-only")
        shares = _shares_memory
    for name, x in (("A", a), ("B", b)):
        if type(x) is type(out) and shares(x, out):
            raise UsageError(f"out overlaps {name}; give it memory of its own")
    if c is not None and type(c) is type(out) and shares(c, out):
        same = c.dtype == out.dtype and c.strides == out.strides
        start = (lambda x: x.ctypes.data) if isinstance(out, np.ndarray) else (lambda x: x.data.ptr)
        if not (same and start(c) == start(out)):
            raise UsageError("out overlaps C without being C; give it memory of its own, or C")
        return out
    return c


def _shares_memory(x, y) -> bool:
    try:
        return np.shares_memory(x, y, max_work=10**5)
    except np.exceptions.TooHardError:
        return True
