"""Matrices in memory of the host that play those of a GPU, and launches that note their calls."""

import contextlib
import ctypes
import sys
from ctypes import c_int, c_uint64, c_void_p
from types import SimpleNamespace

import numpy as np
import pytest

from hybrid_gemm.devices.cuda import driver
from hybrid_gemm.programs import signature


class There(np.ndarray):
    """A matrix of GPU 0, or of another `ordinal`, as far as these calls ask."""

    def __array_finalize__(self, of):
        self.ordinal = getattr(of, "ordinal", 0)

    @property
    def data(self):
        return SimpleNamespace(ptr=self.ctypes.data, device_id=self.ordinal)

    @property
    def _c_contiguous(self):
        return self.flags.c_contiguous


def aligned(shape, dtype="f4", shift=0):
    """A matrix of the host so many bytes behind a multiple of 64."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    whole = np.zeros(128 + size, "u1")
    start = -whole.ctypes.data % 64 + shift
    return whole[start : start + size].view(dtype).reshape(shape)


def there(*shape, dtype="f4"):
    return aligned(shape, dtype).view(There)


class Prepared:
    """A product that notes the addresses that it is started with, and fails with `status`."""

    def __init__(self):
        self.started, self.status = [], 0
        kind = ctypes.CFUNCTYPE(c_int, c_void_p, c_uint64, c_uint64, c_uint64)
        self.function = kind(lambda _mine, *at: self.start(*at))
        self.native = ctypes.cast(self.function, c_void_p).value, 0

    def start(self, *at):
        if not self.status:
            self.started.append(at)
        return self.status

    def check(self, status):
        raise MemoryError(status)


CONTEXT, STREAM = 4711, 12


def play(monkeypatch):
    """What CuPy and the driver say; `context` and `stream` are the current ones."""
    if reason := signature.unavailable():
        pytest.skip(reason)
    now = SimpleNamespace(context=CONTEXT, stream=STREAM, capturing=False)

    def current(at):
        at[0] = now.context
        return 0

    def captured(_stream, to):
        to[0] = now.capturing
        return 0

    now.calls = {
        "cuCtxGetCurrent": ctypes.CFUNCTYPE(c_int, ctypes.POINTER(c_void_p))(current),
        "cuStreamIsCapturing": ctypes.CFUNCTYPE(c_int, c_void_p, ctypes.POINTER(c_int))(captured),
    }
    cuda = SimpleNamespace(
        get_current_stream=lambda ordinal: SimpleNamespace(
            ptr=now.stream, is_capturing=lambda: now.capturing
        )
    )
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(ndarray=There, cuda=cuda))
    address_of = lambda name: ctypes.cast(now.calls[name], c_void_p).value  # noqa: E731
    monkeypatch.setattr(driver, "address_of", address_of)
    monkeypatch.setattr(driver, "current_context", lambda: now.context)
    monkeypatch.setattr(driver, "relaxed_capture", contextlib.nullcontext)
    return now
