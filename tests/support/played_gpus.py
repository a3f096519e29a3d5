"""GPUs that ranks play: each has the emulator for one, whose arrays are those of a stand-in for
CuPy, and reads the others' memory, which are files of /dev/shm."""

import contextlib
import ctypes
import mmap
import os
import sys
import tempfile
import threading
from types import SimpleNamespace
from typing import ClassVar

import numpy as np

from hybrid_gemm import RankRunner, devices
from hybrid_gemm.arrays import complex_numbers, three_products
from hybrid_gemm.devices.cuda import device as cuda
from hybrid_gemm.devices.emulator.device import EmulatorDevice
from hybrid_gemm.host import gpu_context

from . import cupy_arrays

UNWRITTEN = 0xAB  # what is in memory that was just taken


class Array(cupy_arrays.Array):
    """A matrix of a GPU. What is made of it is made on the current GPU, which has to be its own."""

    __module__ = "cupy"

    def __init__(self, shape=(), dtype=float, memptr=None, *, order="C", held=None, gpu=None):
        if held is not None:
            self.held = held
        elif memptr is not None:
            size = _bytes(shape, dtype)
            memory = (ctypes.c_char * max(1, size)).from_address(memptr.ptr)
            self.held = np.frombuffer(memory, np.uint8, size).view(dtype).reshape(shape)
        else:
            self.held = np.frombuffer(bytearray([UNWRITTEN]) * _bytes(shape, dtype), dtype)
            self.held = self.held.reshape(shape, order=order)
        self.kept = memptr
        self.gpu = current.gpu if gpu is None else gpu

    def like(self, held):
        if np.may_share_memory(held, self.held) or not held.size:
            return Array(held=held, gpu=self.gpu, memptr=self.kept)
        self.need_current()
        return Array(held=held)

    def need_current(self):
        assert current.gpu == self.gpu, f"GPU {current.gpu} is current, the array is on {self.gpu}"

    ctypes = property(lambda self: self.held.ctypes)
    device = property(lambda self: SimpleNamespace(id=self.gpu))
    data = property(lambda self: _Data(self))

    def __setitem__(self, where, values):
        self.need_current()
        super().__setitem__(where, values)


def _bytes(shape, dtype):
    return int(np.prod(shape)) * np.dtype(dtype).itemsize


class _Data:
    """Where an array lies, and copies from another GPU."""

    def __init__(self, array):
        self.array, self.ptr, self.device_id = array, array.held.ctypes.data, array.gpu

    def copy_from_device_async(self, source, size, stream):
        ctypes.memmove(self.ptr, source.ptr, size)


class _Current(threading.local):
    first = 0

    def __init__(self):
        self.gpu = self.first


current = _Current()


class Current:
    """A GPU, which is the current one inside of `with`."""

    def __init__(self, gpu=None):
        self.id = current.gpu if gpu is None else gpu

    def __enter__(self):
        self.before, current.gpu = current.gpu, self.id
        return self

    def __exit__(self, *error):
        current.gpu = self.before


class Memory:
    """A whole allocation, which other ranks can open; the next `failing` find none."""

    failing = 0
    files: ClassVar[dict[int, str]] = {}

    def __init__(self, size):
        if Memory.failing:
            Memory.failing -= 1
            raise RuntimeError("out of memory, for a test")
        file, self.path = tempfile.mkstemp(dir="/dev/shm")
        os.ftruncate(file, size)
        self.map = mmap.mmap(file, size)
        os.close(file)
        self.ptr = ctypes.addressof(ctypes.c_char.from_buffer(self.map))
        Memory.files[self.ptr] = self.path

    def __del__(self):
        with contextlib.suppress(OSError, AttributeError):
            os.unlink(self.path)


def cupy_of(rank: int, ranks: int) -> tuple[cupy_arrays.Module, dict[int, mmap.mmap]]:
    """The stand-in for CuPy on a rank's GPU, and what it has open of the others'."""
    opened: dict[int, mmap.mmap] = {}

    def open_handle(handle):
        file = os.open(handle.decode(), os.O_RDWR)
        memory = mmap.mmap(file, 0)
        os.close(file)
        pointer = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        opened[pointer] = memory
        return pointer

    stream = SimpleNamespace(
        ptr=0,
        synchronize=lambda: None,
        is_capturing=lambda: False,
        record=lambda: None,
        wait_event=lambda event: None,
    )
    cp = cupy_arrays.Module(Array, lambda x: Array(held=x))
    cp.empty = Array
    cp.cuda = SimpleNamespace(
        Device=Current, get_current_stream=lambda: stream, Memory=Memory,
        UnownedMemory=lambda ptr, size, owner, gpu: SimpleNamespace(ptr=ptr, owner=owner),
        MemoryPointer=lambda memory, offset: SimpleNamespace(ptr=memory.ptr + offset, of=memory),
        runtime=SimpleNamespace(
            getDeviceCount=lambda: ranks, getDevice=lambda: current.gpu,
            deviceCanAccessPeer=lambda one, other: 1, deviceGetPCIBusId=lambda gpu: f"bus {gpu}",
            ipcGetMemHandle=lambda pointer: Memory.files[pointer].encode(),
            ipcOpenMemHandle=open_handle, ipcCloseMemHandle=opened.pop,
        ),
    )  # fmt: skip
    return cp, opened


def held(x):
    """An array of a GPU or of the host as NumPy's."""
    return x.held if isinstance(x, Array) else x


def held_argument(x, parameter):
    """As `held`, of what a kernel takes: an address is that of a number of 4 bytes."""
    if parameter.pointer and isinstance(x, np.uint64):
        return np.frombuffer(ctypes.c_uint32.from_address(int(x)), np.uint32)
    return held(x)


def play(monkeypatch, comm) -> SimpleNamespace:
    """Lets each rank play a GPU of its own: `array` makes its arrays, and `opened` is what it has
    open of the others' memory."""
    return _play(monkeypatch, comm.rank, comm.size, [comm.rank])


def play_here(monkeypatch, count) -> SimpleNamespace:
    """Lets this process play so many GPUs."""
    return _play(monkeypatch, 0, count, range(count))


class PlayedGpu(EmulatorDevice):
    """A GPU whose memory is the host's, and whose kernels the emulator runs."""

    kind, on_gpu = "cuda", True

    def __init__(self, cp, ordinal):
        super().__init__()
        self.cp, self.ordinal = cp, ordinal

    @property
    def port(self):
        return f"played {self.ordinal}"

    def detached(self):
        return PlayedGpu(self.cp, self.ordinal)

    def calls(self):
        return None

    def using(self, stream):
        return Current(self.ordinal)

    def enter(self, stream):
        current.gpu = self.ordinal

    def empty(self, rows, cols, dtype):
        return Array((rows, cols), dtype, gpu=self.ordinal)

    def copy(self, dst, src, stream):
        assert (dst.dtype, dst.shape) == (src.dtype, src.shape)
        held(dst)[...] = held(src)

    def gemm(self, variant, a, b, c, **factors):
        assert all(isinstance(x, Array) and x.gpu == self.ordinal for x in (a, b, c))
        return super().gemm(variant, a, b, c, **factors)

    def launch(self, function, launch, args, stream):
        given = list(map(held_argument, args, function._parameters))
        super().launch(function, launch, given, stream)


def _parts(x, factor, scaled, conj, *made):
    for each in (x, *made):
        each.need_current()
    held_parts = tuple(each.held for each in made)
    alpha = factor if scaled else None
    three_products._split(x.held, x.dtype, conj, alpha, held_parts, slice(None))


def _combine(p1, p2, p3, c, alpha, beta, added, made):
    for each in (p1, p2, p3, c, made):
        each.need_current()
    products = p1.held, p2.held, p3.held
    c = c.held if added else None
    three_products._combine(*products, c, float(alpha), beta.item(), made.held)


def _expand(right, made, conj_left, conj, alpha):
    right.need_current()
    made.need_current()
    first, second = made.held[..., 0, :], made.held[..., 1, :]
    complex_numbers._expand(right.held, first, second, conj_left, conj, alpha)


def _play(monkeypatch, first, count, ours):
    cp, opened = cupy_of(first, count)

    def opening(_kind, _workers, *, gpus=None, **_more):
        return [PlayedGpu(cp, ordinal) for ordinal in gpus or ours]

    monkeypatch.setitem(sys.modules, "cupy", cp)
    monkeypatch.setattr(devices, "choose", lambda *_asked, **_more: ("cuda", ""))
    monkeypatch.setattr(devices, "open_devices", opening)
    monkeypatch.setattr(gpu_context, "begin", lambda *_gpus: None)
    monkeypatch.setattr(cuda, "count", lambda: count)
    monkeypatch.setattr(RankRunner, "_gpu", lambda self: f"GPU {first}")
    monkeypatch.setattr(complex_numbers, "_expand_on_gpu", _expand)
    monkeypatch.setattr(three_products, "_gpu_kernels", lambda: (_parts, _combine))
    monkeypatch.setattr(_Current, "first", first)
    monkeypatch.setattr(current, "gpu", first)
    return SimpleNamespace(
        array=lambda x, gpu=first: Array(held=np.asarray(x), gpu=gpu), opened=opened, cupy=cp
    )
