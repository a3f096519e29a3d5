"""Page-locked host memory, which a GPU copies from and to at the full speed of its link."""

from __future__ import annotations

import ctypes
import math
import weakref
from collections.abc import Sequence

import numpy as np
from numpy.typing import DTypeLike

_PORTABLE = 1  # cudaHostAllocPortable: page-locked for every GPU
_HOST = 1  # cudaMemoryTypeHost


def empty(size: int) -> np.ndarray:
    """`size` uninitialised bytes; freed with the last array that looks at them."""
    from cupy.cuda import runtime

    if not size:
        return np.empty(0, np.uint8)
    pointer = runtime.hostAlloc(size, _PORTABLE)
    memory = (ctypes.c_uint8 * size).from_address(pointer)
    weakref.finalize(memory, runtime.freeHost, pointer).atexit = False
    return np.frombuffer(memoryview(memory), np.uint8)


def empty_pinned(shape: int | Sequence[int], dtype: DTypeLike = "float32") -> np.ndarray:
    """An uninitialised C-ordered array in page-locked memory, like `numpy.empty`.

    `gemm` copies such arrays to and from GPUs without another copy on the way. The host cannot
    page this memory out, and taking it is slow: take few such arrays, and keep them. Raises
    `UnavailableError` without a GPU.

    >>> a = empty_pinned((4096, 4096))  # doctest: +SKIP
    """
    from ...errors import UnavailableError
    from .driver import unavailable

    if reason := unavailable():
        raise UnavailableError(f"page-locked memory is for GPUs: {reason}; numpy.empty works here")
    shape = (shape,) if isinstance(shape, int) else tuple(shape)
    dtype = np.dtype(dtype)
    return empty(math.prod(shape) * dtype.itemsize).view(dtype).reshape(shape)


def is_pinned(array: np.ndarray) -> bool:
    """Whether all that a 2-D array spans is page-locked."""
    from cupy.cuda import runtime

    if not array.size or min(array.strides) < 0:
        return False
    first = array.ctypes.data
    last = first + sum((n - 1) * s for n, s in zip(array.shape, array.strides, strict=True))
    return all(runtime.pointerGetAttributes(p).type == _HOST for p in (first, last))
