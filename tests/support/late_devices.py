"""Emulated devices that are as GPUs are: with late streams, memory of their own, and products that
native threads start."""

import contextlib
import ctypes
import functools
import threading
import weakref
from ctypes import c_int, c_uint64, c_void_p

import numpy as np

from hybrid_gemm.arrays.strides import address, runs, span
from hybrid_gemm.devices.emulator.device import EmulatorDevice
from hybrid_gemm.execution import native_executor, staging

from .late_streams import Late, LateStream, Pool, bytes_at, like, unowned

_kept = []  # native threads may still be in these functions when a test is over


class _Thread(threading.local):
    stream = None  # the current one
    noted = None  # launches, where they are not to be done


_thread = _Thread()


def _matrix_of(x, passing):
    """A kernel's argument; of an array in memory that passes the address alone is kept."""
    passes = isinstance(x, np.ndarray) and any(address(x) in each for each in passing)
    return unowned(x) if passes else x


class Listed:
    """A list of launches as one native call; see `roles.Prepared`."""

    def __init__(self, late, start):
        def native(_list, *_addresses):
            return late.failing("start") or start() or 0

        self.function = ctypes.CFUNCTYPE(c_int, c_void_p, c_uint64, c_uint64, c_uint64)(native)
        _kept.append(self.function)
        self.native = ctypes.cast(self.function, c_void_p).value, 0

    def check(self, status):
        raise RuntimeError(f"a product said {status}")


class Prepared:
    """A product that Python starts; see `roles.Prepared`."""

    native = None

    def __init__(self, late, call, matrices, stream):
        lie = [unowned(x) for x in matrices]

        def start(*addresses):
            if not (status := late.failing("start")):
                call(*map(like, lie, addresses), stream)
            return status

        self.start, self.check = start, Listed.check.__get__(self)


class _Gpu:
    """What emulated devices have in place of their own."""

    queues, late = True, None

    def _pool(self):
        return self.__dict__.setdefault("_late_pool", Pool(self.late))

    def _current(self):
        if _thread.stream is None:
            return self.__dict__.setdefault("_late_default", LateStream(self.late))
        return _thread.stream

    def calls(self):
        return self.late.calls

    def stream(self, urgent=False):
        return LateStream(self.late)

    def enter(self, stream):
        _thread.stream = stream

    @contextlib.contextmanager
    def using(self, stream):
        before, _thread.stream = _thread.stream, stream
        try:
            yield
        finally:
            _thread.stream = before

    def empty(self, rows, cols, dtype):
        size = rows * cols * np.dtype(dtype).itemsize
        flat = self._pool().take(size, self._current().pointer)
        return flat[:size].view(dtype).reshape(rows, cols)

    def free_unused(self):
        self._pool().free_all()

    def pinned(self, size):
        memory, locked = np.empty(size, np.uint8), self.late.locked
        locked[memory.ctypes.data] = size
        weakref.finalize(memory, locked.pop, memory.ctypes.data, None)
        return memory

    def reads(self, array):
        if not array.size or min(array.strides) < 0:
            return False
        where = span(array)
        return self.late.is_locked(where.start) and self.late.is_locked(where.stop - 1)

    def copy(self, dst, src, stream):
        if not dst.size:
            return
        shape = runs(dst, src)
        if status := self.late.failing("copy"):
            check(status)
        if shape is None:
            stream.synchronize()
            dst[...] = src
        else:
            to_pitch, pitch, width, height = shape
            to, source = address(dst), address(src)
            self.late.copy(stream.pointer, to, to_pitch, source, pitch, width, height)

    def pointers(self, matrices):
        at = tuple(map(address, matrices))
        tables = self.__dict__.setdefault("_late_tables", {})
        return tables.setdefault(at, np.array(at, np.uint64))

    def launch(self, function, launch, args, stream):
        what = function, launch, tuple(args), stream.pointer
        if _thread.noted is not None:
            _thread.noted.append(what)
            return
        if status := self.late.failing("launch"):
            check(status)
        _give(self.late, self.options, *what)

    def clear(self, array, stream):
        self.launch(None, None, [array], stream)

    def zeros(self, count, dtype, stream):
        made = self.empty(1, count, dtype)
        _give(self.late, self.options, None, None, [made], self._current().pointer)
        return made

    def listed(self, call, stream, passing):
        _thread.noted = noted = []
        try:
            with self.using(stream):
                call(stream)
        finally:
            _thread.noted = None
        late, options = self.late, self.options
        launches = [
            (function, launch, [_matrix_of(x, passing) for x in args], pointer)
            for function, launch, args, pointer in noted
        ]

        def start():
            late.said.append(("start", stream.pointer))
            for each in launches:
                _give(late, options, *each)

        return Listed(late, start)

    def prepared(self, call, a, b, c, stream, others=()):
        return None if others else Prepared(self.late, call, (a, b, c), stream)


def _give(late, options, function, launch, args, pointer):
    """Has a stream launch a kernel, or clear an array where there is none."""
    args = [unowned(x) if isinstance(x, np.ndarray) else x for x in args]
    if function is None:
        late.give(pointer, "a clearing", functools.partial(args[0].fill, 0), [], args)
        return
    reads, writes = [], []
    for x, parameter in zip(args, function._parameters, strict=True):
        if parameter.pointer:
            (writes if parameter.pointer == 2 else reads).append(x)
            reads += _partials(args) if x.dtype == np.uint64 else []
    work = functools.partial(function.launch, launch, args, options=options)
    late.give(pointer, function.label, work, reads, writes)


def _partials(args):
    """What a sum reads, by its arguments (docs/kernels.md)."""
    rows, cols, _count, _alpha, table, pitch = args[:6]
    size = args[-2].itemsize
    return [bytes_at(int(at), int(pitch) * size, int(cols) * size, int(rows)) for at in table]


def all_free(devices):
    """What these devices have free of memory, which is now taken."""
    pools = [device._pool() for device in devices]
    return [x.take(size, at) for x in pools for (at, size), some in x.free.items() for _ in [*some]]


def check(status):
    raise RuntimeError(f"the driver said {status}")


def play(monkeypatch, random, *, eager=0.0):
    """Emulated devices are as GPUs are, with one `Late` driver, from now on in this test."""
    late = Late(random, eager)
    for name, value in vars(_Gpu).items():
        if not name.startswith("__"):
            monkeypatch.setattr(EmulatorDevice, name, value, raising=False)
    monkeypatch.setattr(EmulatorDevice, "late", late)
    monkeypatch.setattr(native_executor, "check", check)
    monkeypatch.setattr(staging.driver, "check", check)
    return late
