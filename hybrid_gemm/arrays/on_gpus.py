"""Places and copies of the caller's arrays on GPUs, on the current streams of these, as CuPy's own
are."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from ..errors import UsageError
from .caller_arrays import by_rows, cast_into, module_of, wait_for_streams
from .strides import is_device_array


@contextlib.contextmanager
def on_gpu_of(*arrays: Any) -> Iterator[None]:
    """Makes the GPU of the first of these that lies on one the current one, as CuPy wants it for
    what it does with that array. Where others lie on other GPUs, the current streams of all are
    waited for, before and after."""
    there = list(dict.fromkeys(x.data.device_id for x in arrays if is_device_array(x)))
    if not there:
        yield
        return
    if len(there) > 1:
        wait_for_streams(*arrays)
    with sys.modules["cupy"].cuda.Device(there[0]):
        yield
    if len(there) > 1:
        wait_for_streams(*arrays)


def refuse_captured(*arrays: Any) -> None:
    """Raises `UsageError` where a graph records what the current stream of an array's GPU is given,
    of a product that is waited for, or whose operands are copied."""
    for x in filter(is_device_array, arrays):
        with on_gpu_of(x):
            if module_of(x).cuda.get_current_stream().is_capturing():
                raise UsageError(
                    "this product is checked, takes a plan, or copies its operands first, and a "
                    "graph is being captured on the current stream, which can neither be waited "
                    "for nor keep copies: one GPU's products that are not checked, of arrays that "
                    "kernels read as they lie, can be captured"
                )


def empty_beside(arrays: Iterable[Any], shape: tuple[int, ...], dtype: Any) -> Any:
    """An uninitialised array on the GPU of the first of these that lies on one, otherwise of the
    host; None among them is nothing."""
    there = next(filter(is_device_array, arrays), None)
    if there is None:
        return np.empty(shape, dtype)
    with on_gpu_of(there):
        return module_of(there).empty(shape, dtype)


def lie_together(x: Any, y: Any) -> bool:
    """Whether both lie on the same GPU, or both on the host."""
    one, other = (v.data.device_id if is_device_array(v) else None for v in (x, y))
    return bool(one == other)


def copied(x: Any, dtype: str) -> Any:
    """A copy of that dtype without gaps, on the same GPU."""
    if x.dtype != dtype:  # whose name takes NumPy 3 us
        return x.astype(dtype, order="C")
    if x.dtype.kind in "fciu":
        return x.copy(order="C")
    return x.view(f"u{x.itemsize}").copy(order="C").view(x.dtype)  # bfloat16


def moved(x: Any, ordinal: int) -> Any:
    """A copy on GPU `ordinal` of an array of another GPU, in its order of storage, without gaps.

    It is made after what the current stream of the array's GPU was given, and before what that of
    the other GPU is given next; the first goes on when the array was read. Nothing is waited for.
    """
    cp = module_of(x)
    source, there = (cp.cuda.Device(i) for i in (x.data.device_id, ordinal))
    with source:
        its = cp.cuda.get_current_stream()
        if not (x.flags.c_contiguous or x.flags.f_contiguous):
            x = copied(x, x.dtype.name)
        ready = its.record()
    with there:
        ours = cp.cuda.get_current_stream()
        ours.wait_event(ready)
        made = cp.ndarray(x.shape, x.dtype, order="C" if x.flags.c_contiguous else "F")
        try:
            made.data.copy_from_device_async(x.data, x.nbytes, ours)
        except cp.cuda.runtime.CUDARuntimeError:
            # Memory of CUDA's own pools, or mapped by a library, that only its GPU may read.
            ends = made.data.ptr, ordinal, x.data.ptr, x.data.device_id
            cp.cuda.runtime.memcpyPeerAsync(*ends, x.nbytes, ours.ptr)
        read = ours.record()
    with source:
        its.wait_event(read)
    return made


def copy_into(dst: Any, src: Any) -> None:
    """dst[...] = src, cast as NumPy casts, on the GPU that has `dst`, if one does."""
    if is_device_array(src):
        if not is_device_array(dst):
            src = src.get()
        elif src.data.device_id != dst.data.device_id:
            src = moved(src, dst.data.device_id)
    if is_device_array(dst) or not dst.ndim:
        with on_gpu_of(dst):
            cast_into(dst, module_of(dst).asarray(src))
    else:
        by_rows(dst, lambda rows: cast_into(dst[rows], src[rows]))


def same_bits(x: Any, y: Any) -> bool:
    """Whether two arrays of one shape and dtype on the current GPU have the same bits, or of
    complex128 the same numbers. Waits for that."""
    if x.dtype.itemsize > 8:
        return bool(((x == y) | ((x != x) & (y != y))).all())
    bits = f"u{x.dtype.itemsize}"
    return bool((x.view(bits) == y.view(bits)).all())
