"""Starts what a first product on a GPU waits for longest: the driver makes the GPU's context in a
quarter of a second, while Python imports what the product needs."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import threading
from importlib.util import find_spec

from .libraries import Library

LIBRARY = "libcuda.so.1"


@functools.cache
def begin(ordinal: int = 0) -> threading.Thread | None:
    """A thread that makes the primary context of a GPU, which CUDA's runtime takes as it is there;
    None where CuPy is not installed, without which no GPU is used. What fails here is said by what
    needs the context."""
    if find_spec("cupy") is None:
        return None
    thread = threading.Thread(target=_make, args=(ordinal,), name="context", daemon=True)
    thread.start()
    return thread


def _make(ordinal: int) -> None:
    with contextlib.suppress(OSError, AttributeError):
        driver = Library(LIBRARY)  # which lets Python's lock go
        device, context = ctypes.c_int(), ctypes.c_void_p()
        if driver.cuInit(0) == 0 and driver.cuDeviceGet(ctypes.byref(device), ordinal) == 0:
            driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
