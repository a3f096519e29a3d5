"""Matrices in memory of the host that play those of a GPU, and products that note their calls."""

import ctypes
from ctypes import c_int, c_uint64, c_void_p
from types import SimpleNamespace

import numpy as np

from hybrid_gemm.arrays.strides import reach


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
    """A product that notes the addresses that it is started with, and fails with `status`."""

    def __init__(self):
        self.started, self.status = [], 0
        kind = ctypes.CFUNCTYPE(c_int, c_void_p, c_uint64, c_uint64, c_uint64)
        self.function = kind(lambda _mine, *at: self.started.append(at) or self.status)
        self.native = ctypes.cast(self.function, c_void_p).value, 0

    def check(self, status):
        raise MemoryError(status)


def reach_of(x):
    return reach(x.shape, x.strides, x.itemsize)
