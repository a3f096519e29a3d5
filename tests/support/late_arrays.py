"""Arrays of GPUs that are played (`late_gpus`): a stand-in for CuPy's, whose streams work late."""

import ctypes
import functools
from typing import NamedTuple

import numpy as np

from . import cupy_arrays
from .late_streams import bytes_at, unowned


class Array(cupy_arrays.Array):
    """CuPy's. It is computed with when what its stream was told is over."""

    played = None

    def __init__(self, shape=(), dtype=float, memptr=None, strides=None, order="C", held=None):
        played = self.played
        if held is not None:
            self.held, self.kept = held, memptr
        else:
            shape = (shape,) if isinstance(shape, int) else tuple(shape)
            dtype = np.dtype(dtype)
            size, before = int(np.prod(shape)) * dtype.itemsize, 0
            if memptr is None:
                memptr = played.default[played.thread.gpu].malloc(size)
            if strides is not None:
                ends = [(n - 1) * s for n, s in zip(shape, strides, strict=True)]
                before = -sum(min(0, x) for x in ends)
                size = before + sum(max(0, x) for x in ends) + dtype.itemsize
            whole = (ctypes.c_uint8 * max(1, size)).from_address(memptr.ptr - before)
            self.held = np.ndarray(shape, dtype, whole, before, strides, order)
            self.kept = memptr
        self.gpu = self.kept.device_id

    def need_current(self):
        assert self.played.thread.gpu == self.gpu, "another GPU is the current one"

    def like(self, held):
        if held.size and np.may_share_memory(held, self.held):
            return type(self)(held=held, memptr=self.kept)
        return self.played.made(held)

    def put(self, how, value):
        """how(self, value), by the current stream; a scalar or an array."""
        self.need_current()
        there = unowned(self.held)
        value = (
            unowned(value) if isinstance(value, np.ndarray) and value.base is not None else value
        )
        reads = [value] if isinstance(value, np.ndarray) else []
        work = functools.partial(_silently, how, there, value)
        self.played.late.give(self.played.current().ptr, "CuPy", work, reads, [there])

    data = property(lambda self: _Data(self))
    device = property(lambda self: self.played.module.cuda.Device(self.gpu))
    _c_contiguous = property(lambda self: self.held.flags.c_contiguous)

    def before(self):
        """What reads values waits for the current stream."""
        self.need_current()
        late, stream = self.played.late, self.played.current()
        late.give(stream.ptr, "CuPy", _nothing, [unowned(self.held)], [])
        stream.synchronize()

    def get(self):
        with self.played.module.cuda.Device(self.gpu):
            self.before()
        return self.held.copy()

    def item(self):
        self.before()
        return self.held.item()

    def __setitem__(self, where, values):
        cupy_arrays.check_assigned(values)
        to = self if where is Ellipsis else self[where]
        to.put(_fill, cupy_arrays._held(values))

    def fill(self, value):
        self.put(_fill, value)

    def __imul__(self, value):
        self.put(_multiply, cupy_arrays._held(value))
        return self


def _nothing():
    pass


def _silently(how, *args):
    with np.errstate(all="ignore"):
        how(*args)


def _fill(there, value):
    there[...] = value


def _multiply(there, value):
    there *= value


class Pointer(NamedTuple):
    """As CuPy's `MemoryPointer`; `held` refers to what keeps the memory."""

    ptr: int
    device_id: int
    held: object = None


class _Data:
    """Where an array lies."""

    def __init__(self, array, offset=0):
        self.array, self.device_id = array, array.gpu
        self.ptr = array.held.ctypes.data + offset

    def __add__(self, offset):
        return Pointer(self.ptr + offset, self.device_id, self.array)

    def memset_async(self, value, size, stream):
        there = bytes_at(self.ptr, size, size)
        self.array.played.late.give(
            stream.ptr, "a clearing", functools.partial(there.fill, value), [], [there]
        )

    def copy_from_device_async(self, source, size, stream):
        self.array.played.late.copy(stream.ptr, self.ptr, size, source.ptr, size, size, 1)
