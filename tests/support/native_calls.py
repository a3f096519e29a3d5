"""Matrices in memory of the host that play those of a GPU, and products that note their calls."""

import ctypes
import sys
from ctypes import c_int, c_uint64, c_void_p
from types import SimpleNamespace

import numpy as np
import pytest

from hybrid_gemm.arrays.strides import reach
from hybrid_gemm.devices.cuda import driver
from hybrid_gemm.programs import signature


class There(np.ndarray):
    """A matrix of GPU 0, as far as these calls ask."""

    ordinal = 0

    @property
    def data(self):
        return SimpleNamespace(ptr=self.ctypes.data, device_id=self.ordinal)

    @property
    def _c_contiguous(self):
        return self.flags.c_contiguous


def there(*shape, dtype="f4"):
    whole = np.zeros(64 + int(np.prod(shape)), dtype)
    start = -whole.ctypes.data % 64 // whole.itemsize
    return whole[start : start + int(np.prod(shape))].reshape(shape).view(There)


class Prepared:
    """A product that notes the addresses that it is started with, and what `look` finds there, and
    fails with `status`."""

    def __init__(self, look=lambda *at: None):
        self.started, self.seen, self.status = [], [], 0
        kind = ctypes.CFUNCTYPE(c_int, c_void_p, c_uint64, c_uint64, c_uint64)

        def start(_mine, *at):
            self.started.append(at)
            self.seen.append(look(*at))
            return self.status

        self.function = kind(start)
        self.native = ctypes.cast(self.function, c_void_p).value, 0

    def check(self, status):
        raise MemoryError(status)


def reach_of(x):
    return reach(x.shape, x.strides, x.itemsize)


CONTEXT, STREAM = 4711, 12


def play(monkeypatch):
    """What CuPy and the driver say; `context` and `stream` are the current ones, and `capturing`
    may be what asking for it raises."""
    if reason := signature.unavailable():
        pytest.skip(reason)
    now = SimpleNamespace(context=CONTEXT, stream=STREAM, device=0, capturing=False)

    def current(at):
        at[0] = now.context
        return 0

    def is_capturing():
        if isinstance(now.capturing, Exception):
            raise now.capturing
        return now.capturing

    call = ctypes.CFUNCTYPE(c_int, ctypes.POINTER(c_void_p))(current)
    now.kept = call
    cuda = SimpleNamespace(
        get_current_stream=lambda ordinal: SimpleNamespace(
            ptr=now.stream, is_capturing=is_capturing
        ),
        runtime=SimpleNamespace(getDevice=lambda: now.device),
    )
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(ndarray=There, cuda=cuda))
    monkeypatch.setattr(driver, "address_of", lambda name: ctypes.cast(call, c_void_p).value)
    monkeypatch.setattr(driver, "current_context", lambda: now.context)
    return now
