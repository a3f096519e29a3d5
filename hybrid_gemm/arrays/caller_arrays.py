"""Matrices as callers give them: NumPy's, a GPU's, or anything with their protocols."""

from __future__ import annotations

import numpy as np

from ..errors import DTypeError, UsageError
from ..problem import Problem
from .strides import address


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


def check_device(arrays, kind: str) -> None:
    """Raises `DTypeError` for arrays of a GPU where that is not what multiplies."""
    if kind != "cuda" and any(map(is_device_array, arrays)):
        raise DTypeError(
            f"arrays on a GPU were given, and the device is {kind}: cupy.asnumpy makes arrays of "
            "the host of them"
        )


def wait_for_streams(*arrays) -> None:
    """Waits for the caller's current streams on the GPUs that have some of the arrays."""
    for ordinal, cp in {x.device.id: module_of(x) for x in arrays if is_device_array(x)}.items():
        with cp.cuda.Device(ordinal):
            cp.cuda.get_current_stream().synchronize()


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
    if isinstance(out, np.ndarray) and not out.flags.writeable:
        raise UsageError("out is read-only")
    for name, x in (("A", a), ("B", b)):
        if type(x) is type(out) and shares_memory(x, out):
            raise UsageError(f"out overlaps {name}; give it memory of its own")
    if c is not None and type(c) is type(out) and shares_memory(c, out):
        same = c.dtype == out.dtype and c.strides == out.strides
        if not (same and address(c) == address(out)):
            raise UsageError("out overlaps C without being C; give it memory of its own, or C")
        return out
    return c


class _Addresses:
    """Where an array's elements are, in words that NumPy reads: no element is looked at."""

    def __init__(self, array):
        self.__array_interface__ = {
            "version": 3, "data": (address(array), True), "shape": array.shape,
            "strides": array.strides, "typestr": f"|V{array.itemsize}",
        }  # fmt: skip


def shares_memory(x, y) -> bool:
    """Whether two arrays of the host, or two of GPUs, have a byte in common.

    Decided by NumPy for both: CuPy compares all elements' addresses, which takes longer than
    many a product.
    """
    if not (x.size and y.size):
        return False
    try:
        return np.shares_memory(_Addresses(x), _Addresses(y), max_work=10**5)
    except np.exceptions.TooHardError:
        return True
