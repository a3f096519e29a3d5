"""A CUDA GPU, or one of several that one GPU plays: CuPy arrays, streams and events."""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from ...arrays.strides import span
from ...catalog import Launch, Variant
from ...errors import KernelError, UnavailableError
from ...host.kept import Kept
from ...kernel_choice import choices, tables
from ...kernel_choice.library_kernels import Launched
from ...kernel_choice.tables import Machine
from ...kernel_choice.time_model import FLOP_A_BYTE
from ...planning import cost_model, link_rates
from ...planning.hardware import DeviceSpec
from ...problem import Problem
from .. import residue_products
from ..base import Array, Event, Stream
from ..kernel_device import KernelDevice
from ..roles import BoundProduct, Prepared
from . import cublas, driver, launch_list, nvml, nvrtc, pcie, pinned_memory, pools
from .copies import CudaCopies, OwnStream
from .stream import CudaStream

_MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
# CUDA_ERROR_INVALID_VALUE, _LAUNCH_OUT_OF_RESOURCES and _INVALID_CLUSTER_SIZE
_REFUSED_LAUNCHES = (1, 701, 912)
# Multiply-adds a cycle and multiprocessor (CUDA Programming Guide, arithmetic throughput);
# float64 of data-centre parts counts the tensor cores.
_LANES = {
    (7, 0): {"float32": 64, "float64": 32, "int32": 64},
    (7, 5): {"float32": 64, "float64": 2, "int32": 64},
    (8, 0): {"float32": 64, "float64": 64, "int32": 64},
    (8, 6): {"float32": 128, "float64": 2, "int32": 64},
    (8, 9): {"float32": 128, "float64": 2, "int32": 64},
    (9, 0): {"float32": 128, "float64": 128, "int32": 64},
    (10, 0): {"float32": 128, "float64": 64, "int32": 64},
    (12, 0): {"float32": 128, "float64": 2, "int32": 64},
    # Orin, B300, Thor and GB10: cores by their data sheets; of float64 the driver tells.
    **{x: {"float32": 128, "int32": 64} for x in [(8, 7), (10, 3), (11, 0), (12, 1)]},
}
# What goes to tensor cores, as the cost model names it and as models of times do.
_MODES = {"fp32x3": "fp32x3", "tf32": "tf32", "narrow": "float16"}
_URGENT = -5  # the highest priority that streams have; CUDA takes the nearest it knows
MAX_STAND_IN_BYTES = 64 << 20  # for longer products, the host's time does not count
MAX_TABLES = 4096  # tables of pointers kept; what has not been used for so long has been read


def count() -> int:
    """GPUs that this process sees; 0 without a driver."""
    if driver.unavailable():
        return 0
    import cupy

    return cupy.cuda.runtime.getDeviceCount()


@functools.cache
def uuids() -> tuple[str, ...]:
    """The UUIDs of the GPUs that this process sees, by number."""
    import cupy

    properties = map(cupy.cuda.runtime.getDeviceProperties, range(count()))
    return tuple(p["uuid"].hex() for p in properties)


class CudaDevice(CudaCopies, KernelDevice):
    """GPU `ordinal`; `part` is its number among the devices that this GPU plays, if any.

    Each device has a memory pool of its own, so that one GPU playing several keeps their
    memory apart and copies between them as real peers would.
    """

    kind = "cuda"
    on_gpu = True
    queues = True
    ordinal: int

    def __init__(self, ordinal: int, part: int | None = None) -> None:
        super().__init__()
        if reason := driver.unavailable():
            raise UnavailableError(f"GPU {ordinal} was asked for: {reason}")
        import cupy

        if not 0 <= ordinal < cupy.cuda.runtime.getDeviceCount():
            raise UnavailableError(
                f"GPU {ordinal} is not here; this process sees "
                f"{cupy.cuda.runtime.getDeviceCount()} (numbered from 0)"
            )
        if reason := driver.left_out(ordinal):
            raise UnavailableError(f"GPU {ordinal} was asked for: {reason}")
        pools.free_outliving()
        self.cp = cupy
        self.ordinal = ordinal
        self.name = f"cuda:{ordinal}" + ("" if part is None else f".{part}")
        self.pool = cupy.cuda.MemoryPool()
        self._spoiler: Array = None
        self._tables: Kept[Array] = Kept(MAX_TABLES)
        self._aside: CudaStream | None = None  # on which launches are recorded, and nothing runs
        self._recording = threading.Lock()
        self.properties = cupy.cuda.runtime.getDeviceProperties(ordinal)
        self.capability = 10 * self.properties["major"] + self.properties["minor"]
        self.arch = f"sm_{self.capability}"
        self.processors = self.properties["multiProcessorCount"]

    def detached(self) -> CudaDevice:
        other = CudaDevice(self.ordinal)
        other.together = self.together
        return other

    @property
    def model(self) -> str:
        """Such as "NVIDIA H200"."""
        return self.properties["name"].decode()

    def describe(self) -> str:
        return f"{self.name} {self.model}"

    def machine(self, dtype: str) -> Machine:
        peak, shared = self.peak_tflops(dtype), self.properties["sharedMemPerBlockOptin"]
        return Machine(
            self.model, self.processors, self.capability, peak, shared, self._memory_gbps or None
        )

    def library_launch(self, problem: Problem, layout: str) -> Launched | None:
        with self._recording_aside() as aside, self.using(aside):
            return cublas.launched(problem, layout, aside)

    def spec(self, dtype: str = "float32", mode: str | None = None) -> DeviceSpec:
        with self.cp.cuda.Device(self.ordinal):
            free, _total = self.cp.cuda.runtime.memGetInfo()
        # Of most: 128 multiply-adds of float32 a cycle and multiprocessor.
        usual = 2 * 128 * self.processors * self._told[0] * 1e3 / 1e12
        memory_gbps = self._memory_gbps or usual * 1e3 / FLOP_A_BYTE
        machine, known = self.machine(dtype), link_rates.known(uuids())
        measured, peak = tables.best_tflops(machine, dtype), machine.peak_tflops
        modes = [x for x in _MODES if dtype == "float32" and mode in (None, x)]
        # Of these alone: to read a model of times takes 20 ms or more.
        rates = {x: choices.best_tflops(machine, _MODES[x]) for x in modes}
        assumed = pcie.of_gpu(self.cp, self.ordinal) or cost_model.ASSUMED_LINK_GBPS
        return DeviceSpec(
            self.name, self.kind, self.ordinal, free + self.pool.free_bytes(),
            tflops=0.95 * measured if measured else 0.6 * (peak or usual),
            memory_gbps=0.8 * memory_gbps,
            link_gbps=cost_model.each(known.h2d, len(uuids())) if known else assumed,
            peer_gbps=cost_model.each(known.peers, len(uuids())) if known else 100,
            best_tflops=measured or peak, links=known, rated=bool(measured),
            mode_tflops=tuple((name, found) for name, found in rates.items() if found),
        )  # fmt: skip

    @property
    def _memory_gbps(self) -> float:
        """What its memory reaches at most; 0 where the driver does not tell, as some do of no
        integrated GPU, such as Thor's."""
        return 2 * self._told[1] * 1e3 * self.properties["memoryBusWidth"] / 8 / 1e9

    def peak_tflops(self, dtype: str) -> float | None:
        """Multiply-adds outside the tensor cores, but for float64, where cuBLAS uses them."""
        known = _LANES.get((self.properties["major"], self.properties["minor"]), {})
        lanes: float | None = known.get(dtype)
        if known and dtype == "float64" and lanes is None and self._told[2]:
            lanes = known["float32"] / self._told[2]
        clock = self._told[0] * 1e3
        return lanes and 2 * lanes * self.properties["multiProcessorCount"] * clock / 1e12

    @functools.cached_property
    def _told(self) -> tuple[int, int, int]:
        """The highest clocks of its multiprocessors and of its memory, and how many times as fast
        as float64 float32 is, 0 where that is not told. CuPy asks the driver for some hundred
        attributes to give one."""
        told = self.cp.cuda.Device(self.ordinal).attributes
        ratio = told.get("SingleToDoublePrecisionPerfRatio", 0)
        return told["ClockRate"], told["MemoryClockRate"], ratio

    def readings(self) -> dict[str, Any]:
        return nvml.readings(self.cp.cuda.runtime.deviceGetPCIBusId(self.ordinal))

    def flush_cache(self, stream: OwnStream) -> None:
        """Fills the L2 cache with other data."""
        if self._spoiler is None:
            self._spoiler = self.empty(1, self.properties["l2CacheSize"] // 2, "float32")
        self._spoiler.fill(0)

    @property
    def port(self) -> object:
        return self.kind, self.ordinal

    def stream(self, urgent: bool = False) -> CudaStream:
        with self.cp.cuda.Device(self.ordinal):
            priority = _URGENT if urgent else None
            return CudaStream(self.cp.cuda.Stream(non_blocking=True, priority=priority))

    def pinned(self, size: int) -> np.ndarray:
        with self.cp.cuda.Device(self.ordinal):
            return pinned_memory.empty(size)

    def free_unused(self) -> None:
        pools.Pool(self.pool, self.cp, self.ordinal).free()
        pools.free_outliving()

    def __del__(self) -> None:
        if sys is None or sys.is_finalizing():  # None: modules are taken apart already
            return
        residue_products.forget(self)
        kept = self.__dict__
        pool = pools.Pool(*(kept.pop(name, None) for name in ("pool", "cp", "ordinal")))
        kept.clear()  # first what came from the pool
        if pool.of is not None:
            pools.end(pool)

    def enter(self, stream: OwnStream) -> None:
        self.cp.cuda.Device(self.ordinal).use()
        stream.cupy.use()

    @contextlib.contextmanager
    def using(self, stream: OwnStream) -> Iterator[None]:
        with self.cp.cuda.Device(self.ordinal), stream.cupy:
            yield

    def is_current(self) -> bool:
        """Whether this is the GPU that the thread works on; its context is then the thread's."""
        if self.cp.cuda.runtime.getDevice() != self.ordinal:
            return False
        if not driver.current_context():  # a new thread works on GPU 0, without a context
            self.cp.cuda.runtime.setDevice(self.ordinal)
        return True

    def current(self) -> contextlib.AbstractContextManager[Any]:
        """Makes it the GPU that the thread works on, for as long as it is entered."""
        made: contextlib.AbstractContextManager[Any] = self.cp.cuda.Device(self.ordinal)
        return made

    def start_clock(self) -> None:
        with self.cp.cuda.Device(self.ordinal):
            self.cp.cuda.runtime.deviceSynchronize()
            self._zero = self.cp.cuda.Event()
            self._zero.record(self._own_stream)
            self._zero.synchronize()

    @functools.cached_property
    def _own_stream(self) -> Any:
        """On which no kernel runs."""
        with self.cp.cuda.Device(self.ordinal):
            return self.cp.cuda.Stream(non_blocking=True)

    def clock(self) -> Callable[[Event], float]:
        cuda, ordinal, zero = self.cp.cuda, self.ordinal, self._zero

        def time_ms(event: Event) -> float:
            with cuda.Device(ordinal):
                return cuda.get_elapsed_time(zero, event)

        return time_ms

    def repeated(
        self, work: Callable[[], None], count: int, stream: OwnStream
    ) -> Callable[[], None]:
        """One launch of a graph, so that the host's time for each kernel is not measured."""
        stream.cupy.begin_capture()
        try:
            for _ in range(count):
                work()
        finally:
            graph = stream.cupy.end_capture()
        graph.upload(stream.cupy)
        return lambda: graph.launch(stream.cupy)

    def empty(self, rows: int, cols: int, dtype: DTypeLike) -> Array:
        of = np.dtype(dtype)
        return self.cp.ndarray((rows, cols), of, memptr=self._allocate(rows * cols * of.itemsize))

    def _allocate(self, size: int) -> Any:
        # A pool allocates on the current GPU, which is another one in a thread that is not ours.
        with self.cp.cuda.Device(self.ordinal):
            return self.pool.malloc(size)

    def zeros(self, count: int, dtype: str, stream: OwnStream) -> Array:
        if not stream.capturing():
            return super().zeros(count, dtype, stream)
        # A graph would clear them each time it runs; but what comes before that uses them, too.
        own = self._own_stream
        with self.cp.cuda.Device(self.ordinal), own:
            made = self.empty(1, count, dtype)
            made.data.memset_async(0, made.nbytes, own)
            own.synchronize()
        return made

    def is_finite(self, matrix: Array) -> bool:
        """Whether a matrix of this GPU without gaps has neither Inf nor NaN, nor magnitudes whose
        sum is too large. On the current stream, which is waited for."""
        try:
            from cupy import cublas as library  # which needs nothing compiled
        except ImportError:
            return bool(self.cp.isfinite(matrix).all())
        return bool(np.isfinite(library.asum(matrix.ravel(order="K")).item()))

    def pointers(self, matrices: Sequence[Array]) -> Array:
        # Kept, for a pool gives the same addresses again: a copy from ordinary host memory
        # would wait in line behind the downloads of other workers.
        host = np.array([m.data.ptr for m in matrices], np.uint64)
        key = host.tobytes()
        table = self._tables.get(key)
        if table is None:
            # What another stream gave back may still be in use there.
            with self.cp.cuda.Device(self.ordinal), self._own_stream:
                memory = self._allocate(host.nbytes)
            table = self.cp.ndarray(host.shape, host.dtype, memptr=memory)
            self.cp.cuda.runtime.memcpy(
                table.data.ptr, host.ctypes.data, host.nbytes, self.cp.cuda.runtime.memcpyDefault
            )
            # The call returns once the bytes are staged; other streams must find them there.
            self.cp.cuda.Stream.null.synchronize()
            self._tables.put(key, table)
        return table

    def compile(self, variant: Variant, dtype: str, layouts: str) -> None:
        self._compiled(variant, dtype, layouts)

    def _compiled(self, variant: Variant, dtype: str, layouts: str) -> tuple[bytes, nvrtc.Usage]:
        arch = variant.kernel.target(self.arch)
        return nvrtc.compile(variant.source(dtype, layouts), arch, f"{variant.name}.cu")

    def load(self, variant: Variant, dtype: str, layouts: str) -> Any:
        cubin, usage = self._compiled(variant, dtype, layouts)
        with self.cp.cuda.Device(self.ordinal):
            module = self.cp.cuda.function.Module()
            module.load(cubin)
            function = module.get_function(variant.kernel.entry)
            # Past 48 KiB, with the static part, it has to be asked for.
            most = self.properties["sharedMemPerBlockOptin"] - usage.shared_bytes
            self.cp.cuda.driver.funcSetAttribute(function.ptr, _MAX_DYNAMIC_SHARED, most)
            return function

    def launch(self, function: Any, launch: Launch, args: Sequence[Any], stream: OwnStream) -> None:
        """Raises `KernelError` if this GPU takes no such grid, block or shared memory."""
        try:
            driver.launch(
                function.ptr,
                launch.grid,
                launch.block,
                args,
                launch.shared_bytes,
                stream.cupy.ptr,
                early=launch.early and self.capability >= 90 and _early(),
            )
        except self.cp.cuda.driver.CUDADriverError as error:
            if error.status not in _REFUSED_LAUNCHES:
                raise
            most = self.properties["sharedMemPerBlockOptin"]
            raise KernelError(
                f"{self.model} does not start grid {launch.grid} with block {launch.block} and "
                f"{launch.shared_bytes} bytes of dynamic shared memory, of which a block has at "
                f"most {most}: {error}"
            ) from error

    def prepared(
        self, call: BoundProduct, a: Array, b: Array, c: Array, stream: OwnStream,
        others: Sequence[Array] = (),
    ) -> Prepared | None:  # fmt: skip
        """As `Products.prepared`, of a product of which `preparable` is true."""
        if isinstance(call, cublas.LibraryProduct):
            return self.prepared_library(call, [x.data.ptr for x in (a, b, c)], stream)
        if launch_list.unavailable():
            return None
        read = [getattr(x, "array", x) for x in (a, b)]
        arrays = [*read, c, *others]
        spans = [range(0) if x is None else span(x) for x in arrays]  # None is the B of a cast
        at = [0 if x is None else int(x.data.ptr) for x in arrays]
        if spans[0].start < spans[1].stop and spans[1].start < spans[0].stop:
            # Of which of them is an address? Of a B that lies elsewhere it is plain; the launches
            # are noted, and nothing reads it.
            if others or len(spans[1]) > MAX_STAND_IN_BYTES:
                return None
            b = self._stand_in(b, len(spans[1]))
            spans[1], at[1] = span(b), int(b.data.ptr)
        with driver.noted() as noted:
            call(a, b, c, stream)
        return launch_list.LaunchList(noted, stream.cupy.ptr, spans, busy=stream.busy, at=at)

    def listed(
        self, call: Callable[[Stream], None], stream: OwnStream, passing: Sequence[range]
    ) -> Prepared | None:
        if launch_list.unavailable():
            return None
        with self.using(stream), driver.noted() as noted:
            call(stream)
        return launch_list.LaunchList(
            [driver.without(x, passing) for x in noted], stream.cupy.ptr, ()
        )

    def clear(self, array: Array, stream: OwnStream) -> None:
        driver.clear(array.data.ptr, array.nbytes, stream.cupy.ptr)

    def prepared_library(
        self, product: cublas.LibraryProduct, addresses: Sequence[int], stream: OwnStream
    ) -> Prepared:
        """As `prepared`, of a product of cuBLAS's: its own launches, where they can be recorded."""
        if launch_list.unavailable():
            return cublas.Prepared(product, stream, launch_list.unavailable())
        with self._recording_aside() as aside:
            try:
                return cublas.recorded(product, addresses, stream, aside)
            except cublas.Unrecorded as why:
                return cublas.Prepared(product, stream, str(why))

    @contextlib.contextmanager
    def _recording_aside(self) -> Iterator[CudaStream]:
        """The stream on which launches are recorded, for one thread at a time."""
        with self._recording:
            if self._aside is None:
                self._aside = self.stream()
            yield self._aside

    def _stand_in(self, matrix: Array, size: int) -> Array:
        """A matrix laid out alike in memory of the host, where no GPU has any, and as far from
        multiples of 256."""
        memory = np.empty(size + 512, np.uint8)
        start = -(-memory.ctypes.data // 256) * 256 + matrix.data.ptr % 256
        there = self.cp.cuda.UnownedMemory(start, size, memory, self.ordinal)
        at = self.cp.cuda.MemoryPointer(there, 0)
        return self.cp.ndarray(matrix.shape, matrix.dtype, at, matrix.strides)

    def make_room(
        self, variant: Variant, m: int, n: int, k: int, dtype: str, stream: OwnStream
    ) -> None:
        super().make_room(variant, m, n, k, dtype, stream)
        if variant.kernel.library:
            stream.prepare_cublas()

    def bind_library(
        self, variant: Variant, a: Array, b: Array, c: Array, *, alpha: float, beta: float
    ) -> BoundProduct:
        tf32 = variant.kernel.role == "tensor"
        return cublas.bind(a, b, c, alpha=alpha, beta=beta, tf32=tf32)


@functools.cache
def _early() -> bool:
    """Whether early launches may be part of graphs: the driver is of CUDA 12.3 or later."""
    import cupy

    return cupy.cuda.runtime.driverGetVersion() >= 12030
