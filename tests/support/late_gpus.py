"""GPUs that are played: the package's own CUDA devices, with streams that work late
(`late_streams`), a driver of Python functions, kernels that the emulator runs, and a stand-in for
CuPy."""

import functools
import sys
import threading
from types import SimpleNamespace

import numpy as np

from hybrid_gemm import catalog, devices
from hybrid_gemm.devices.cuda import device as cuda
from hybrid_gemm.devices.cuda import driver, launch_list
from hybrid_gemm.devices.emulator import program as emulation
from hybrid_gemm.execution import native_executor
from hybrid_gemm.host import gpu_context
from hybrid_gemm.host.libraries import Library

from . import cupy_arrays
from .late_arrays import Array, Pointer
from .late_driver import Driver, Kernel
from .late_streams import CONTEXT, Late, LateEvent, LateStream, Pool

PROPERTIES = {
    "major": 8, "minor": 0, "multiProcessorCount": 4, "sharedMemPerBlockOptin": 163 << 10,
    "name": b"Played", "memoryBusWidth": 4096, "l2CacheSize": 1 << 20, "uuid": b"played",
}  # fmt: skip


class _Thread(threading.local):
    gpu = 0

    def __init__(self):
        self.streams = {}


class CudaError(RuntimeError):
    status = 700


class Played:
    """The stand-in for CuPy, with so many GPUs."""

    def __init__(self, late, count):
        self.late, self.count, self.thread = late, count, _Thread()
        self.driver = Driver(late)
        self.pinned = {}
        self.default = [self._pool() for _ in range(count)]
        self.nulls = [Stream.of(self, gpu) for gpu in range(count)]
        kinds = {}
        for kind in (Array, Stream, Event, Device):
            kinds[kind.__name__] = type(kind.__name__, (kind,), {"played": self})
            kinds[kind.__name__].__module__ = "cupy"
        self.array = kinds["Array"]
        Stream_, Event_, Device_ = kinds["Stream"], kinds["Event"], kinds["Device"]
        Stream_.null = self.nulls[0]
        self.module = cp = cupy_arrays.Module(self.array, self.made)
        runtime = SimpleNamespace(
            getDeviceCount=lambda: count, getDevice=lambda: self.thread.gpu,
            setDevice=lambda gpu: setattr(self.thread, "gpu", gpu),
            getDeviceProperties=lambda gpu: PROPERTIES, memGetInfo=lambda: (1 << 34, 1 << 34),
            memcpyDefault=4, memcpy=self._memcpy, memcpyAsync=self._memcpy_async,
            memcpy2DAsync=self._memcpy_2d, hostAlloc=self._host_alloc, freeHost=self._free_host,
            pointerGetAttributes=lambda at: SimpleNamespace(type=int(late.is_locked(at))),
            deviceSynchronize=self._synchronize, driverGetVersion=lambda: 12030,
            deviceCanAccessPeer=lambda x, y: 1, deviceEnablePeerAccess=lambda gpu: None,
            deviceGetPCIBusId=lambda gpu: f"bus {gpu}", CUDARuntimeError=CudaError,
            deviceGetAttribute=lambda what, gpu: 9 if what == driver.CAPABILITY[0] else 0,
        )  # fmt: skip
        cp.cuda = SimpleNamespace(
            Device=Device_, Stream=Stream_, Event=Event_, runtime=runtime,
            get_current_stream=self.current, get_elapsed_time=lambda x, y: _ms(x, y),
            MemoryPool=self._pool, MemoryPointer=lambda memory, at: memory,
            UnownedMemory=lambda at, size, owner, gpu: Pointer(at, gpu, owner),
            driver=SimpleNamespace(
                ctxGetCurrent=lambda: CONTEXT, check_status=check, CUDADriverError=CudaError,
                occupancyMaxActiveBlocksPerMultiprocessor=lambda *_: 1,
            ),
        )  # fmt: skip
        cp.empty = lambda shape, dtype=float, order="C": self.array(shape, dtype, order=order)

    def _pool(self):
        return MemoryPool(self)

    def current(self, gpu=None):
        gpu = self.thread.gpu if gpu is None else gpu
        return self.thread.streams.get(gpu) or self.nulls[gpu]

    def made(self, held):
        """An array of these values, by the current stream."""
        held = np.asarray(held)
        order = "F" if held.flags.f_contiguous and not held.flags.c_contiguous else "C"
        there = self.array(held.shape, held.dtype, order=order)
        there.put(np.copyto, held.copy())
        return there

    def _memcpy(self, to, source, size, _kind):
        stream = self.nulls[self.thread.gpu]
        self.late.copy(stream.ptr, to, size, source, size, size, 1)
        stream.synchronize()

    def _memcpy_async(self, to, source, size, _kind, stream):
        self._fail("memcpyAsync")
        self.late.copy(stream, to, size, source, size, size, 1)

    def _memcpy_2d(self, to, to_pitch, source, pitch, width, height, _kind, stream):
        self._fail("memcpyAsync")
        self.late.copy(stream, to, to_pitch, source, pitch, width, height)

    def _fail(self, name):
        if status := self.late.failing(name):
            check(status)

    def _host_alloc(self, size, _flags):
        memory = np.empty(size, np.uint8)
        self.pinned[memory.ctypes.data] = memory
        self.late.locked[memory.ctypes.data] = size
        return memory.ctypes.data

    def _free_host(self, at):
        self._synchronize()
        del self.late.locked[at], self.pinned[at]

    def _synchronize(self):
        for stream in list(self.late.queues):
            self.late.synchronize(stream)


def _ms(x, y):
    return (y.seconds - x.seconds) * 1e3


class MemoryPool:
    def __init__(self, played):
        self.played, self.pools = played, {}

    def malloc(self, size):
        gpu = self.played.thread.gpu
        pool = self.pools.setdefault(gpu, Pool(self.played.late))
        memory = pool.take(size, self.played.current().ptr)
        return Pointer(memory.ctypes.data, gpu, memory)

    def free_all_blocks(self):
        for pool in self.pools.values():
            pool.free_all()

    def used_bytes(self):
        return sum(pool.held for pool in self.pools.values())

    def free_bytes(self):
        return 0


class Device:
    played = None

    def __init__(self, gpu=None):
        self.id = self.played.thread.gpu if gpu is None else int(gpu)

    attributes = property(lambda self: {"ClockRate": 1_500_000, "MemoryClockRate": 1_000_000})

    def use(self):
        self.played.thread.gpu = self.id

    def synchronize(self):
        self.played._synchronize()

    def __enter__(self):
        self.before, self.played.thread.gpu = self.played.thread.gpu, self.id
        return self

    def __exit__(self, *error):
        self.played.thread.gpu = self.before


class Event(LateEvent):
    played = None

    def __init__(self, block=False, disable_timing=False):
        super().__init__(self.played.late)

    def record(self, stream=None):
        stream = stream or self.played.current()
        self.late.cuEventRecord(self.ptr, stream.ptr)


class Stream:
    """CuPy's, of the GPU that is the current one when it is made."""

    played = None

    def __init__(self, null=False, non_blocking=False, priority=None):
        self._open(self.played, self.played.thread.gpu)

    @classmethod
    def of(cls, played, gpu):
        made = cls.__new__(cls)
        made._open(played, gpu)
        return made

    def _open(self, played, gpu):
        self.of_played, self.gpu = played, gpu
        self.late = LateStream(played.late)
        self.ptr = self.late.pointer

    def use(self):
        self.of_played.thread.streams[self.gpu] = self

    def __enter__(self):
        streams = self.of_played.thread.streams
        self.__dict__.setdefault("before", []).append(streams.get(self.gpu))
        streams[self.gpu] = self
        return self

    def __exit__(self, *error):
        self.of_played.thread.streams[self.gpu] = self.before.pop()

    def record(self, event=None):
        event = event or self.of_played.module.cuda.Event()
        event.record(self)
        return event

    def wait_event(self, event):
        self.late.wait(event)

    def synchronize(self):
        self.late.synchronize()

    def is_capturing(self):
        return self.ptr in self.of_played.late.captured

    def begin_capture(self):
        self.of_played.late.captured[self.ptr] = []

    def end_capture(self):
        late = self.of_played.late
        return Graph(late, late.captured.pop(self.ptr))


class Graph:
    def __init__(self, late, works):
        self.late, self.works = late, works

    def upload(self, stream):
        pass

    def launch(self, stream):
        for work in self.works:
            self.late.give(stream.ptr, *work)


def check(status):
    if status:
        raise CudaError(f"the driver said {status}")


def play(monkeypatch, random, count=1, *, eager=0.0):
    """This process has so many GPUs from now on, in this test."""
    late = Late(random, eager)
    played = Played(late, count)
    made = played.driver

    def load(device, variant, dtype, layouts):
        program = emulation.compile(
            variant.source(dtype, layouts), variant.kernel.entry, include=catalog.directory(),
            label=f"{variant} {dtype} {layouts}",
        )  # fmt: skip
        at = id(program)
        made.kernels[at] = Kernel(at, program, variant.kernel.role, layouts, dtype, variant.params)
        return made.kernels[at]

    monkeypatch.setitem(sys.modules, "cupy", played.module)
    monkeypatch.setitem(sys.modules, "cupy.cuda", played.module.cuda)
    for owner, name, value in (
        (devices, "choose", lambda kind, *_more: (kind if kind == "cpu" else "cuda", "")),
        (gpu_context, "begin", lambda *_gpus: None),
        (driver, "unavailable", lambda: None),
        (driver, "function", made.function),
        (cuda, "count", lambda: count),
        (cuda, "uuids", lambda: ("played",) * count),
        (cuda.CudaDevice, "load", load),
        (cuda.CudaDevice, "compile", load),
        (native_executor, "check", check),
        *(
            (launch_list, name, functools.cache(getattr(launch_list, name).__wrapped__))
            for name in ("native", "unavailable")
        ),
        # Which let Python's lock go: the played driver wants it, in another thread's call.
        (launch_list, "LibraryUnderLock", Library),
    ):
        monkeypatch.setattr(owner, name, value)
    return played


def whole(rng, *shape, dtype="f4"):
    return rng.integers(-9, 9, shape).astype(dtype)


def all_free(devices):
    """What these devices have free of memory, which is now taken."""
    pools = [pool for device in devices for pool in device.pool.pools.values()]
    return [x.take(size, at) for x in pools for (at, size), some in x.free.items() for _ in [*some]]


def counted(monkeypatch, owner, name):
    """How often a method was called, from now on: a list with an item for each."""
    calls, method = [], getattr(owner, name)

    def call(*args, **keywords):
        calls.append(name)
        return method(*args, **keywords)

    monkeypatch.setattr(owner, name, call)
    return calls
