"""GPUs that are played (`late_gpus`) for calls with their arrays, in one process or by ranks, each
of which has one and reads the others' memory, which are files of /dev/shm."""

import contextlib
import ctypes
import itertools
import mmap
import os
import random
import tempfile
from types import SimpleNamespace
from typing import ClassVar

from hybrid_gemm import RankRunner
from hybrid_gemm.arrays import complex_numbers, three_products
from hybrid_gemm.devices.cuda.device import CudaDevice
from hybrid_gemm.programs.writers import Writers
from hybrid_gemm.ranks import launch

from . import late_gpus
from .cupy_arrays import Array
from .links import separate_links

_numbers = itertools.count()


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


def held(x):
    """An array of a GPU or of the host as NumPy's."""
    return x.get() if isinstance(x, Array) else x


def play(monkeypatch, comm) -> SimpleNamespace:
    """Lets each rank play a GPU of its own: `array` makes its arrays, and `opened` is what it has
    open of the others' memory."""
    played = play_here(monkeypatch, max(2, comm.size), comm.rank)
    opened: dict[int, mmap.mmap] = {}

    def open_handle(handle):
        file = os.open(handle.decode(), os.O_RDWR)
        memory = mmap.mmap(file, 0)
        os.close(file)
        pointer = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        opened[pointer] = memory
        return pointer

    cuda = played.cupy.cuda
    cuda.Memory, runtime = Memory, cuda.runtime
    runtime.ipcGetMemHandle = lambda pointer: Memory.files[pointer].encode()
    runtime.ipcOpenMemHandle, runtime.ipcCloseMemHandle = open_handle, opened.pop
    monkeypatch.setattr(RankRunner, "_gpu", lambda self: f"GPU {comm.rank}")
    monkeypatch.setattr(launch, "gpus_of", lambda *_: [comm.rank])
    played.opened = opened
    return played


def play_here(monkeypatch, count, first=0, *, planned=True) -> SimpleNamespace:
    """Lets this process play so many GPUs, of which the `first` is the current one. Where all is
    `planned`, small products of one GPU take a plan, too, as large ones do."""
    if planned:
        monkeypatch.setattr(Writers, "_gpus", lambda self, alone: {})
    played = late_gpus.play(monkeypatch, random.Random(0), count, eager=1)
    separate_links(monkeypatch, f"played {next(_numbers)}")
    played.thread.gpu = first
    monkeypatch.setattr(complex_numbers, "_expand_on_gpu", _expand)
    monkeypatch.setattr(three_products, "_gpu_kernels", lambda: (_parts, _combine))
    cp, launched = played.module, CudaDevice.launch

    def launch_here(device, function, launch, args, stream):
        if function.role == "gemm":  # a check may read another GPU's memory
            given = (x for x in args if isinstance(x, Array))
            assert all(x.gpu == device.ordinal or not x.size for x in given)
        launched(device, function, launch, args, stream)

    monkeypatch.setattr(CudaDevice, "launch", launch_here)

    def array(x, gpu=first):
        with cp.cuda.Device(gpu):
            return cp.asarray(x)

    return SimpleNamespace(array=array, cupy=cp, count=count, late=played.late)


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
