"""A device that does everything as another one does, for classes that change a part of it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from ..catalog import Variant
from ..kernel_choice.library_kernels import Launched
from ..kernel_choice.tables import Machine
from ..planning.hardware import DeviceSpec
from ..problem import Problem
from .base import Array, Device, Event, Stream
from .cuda.driver import Calls
from .roles import BoundProduct, Facts


class WrappedDevice(Device):
    """Hands every call on to `device`. Every member of `Device` that is not made of others is
    here, so that a role's default never stands in for what `device` does."""

    def __init__(self, device: Device):
        self.device = device
        self.kind, self.name = device.kind, device.name
        self.on_gpu, self.ordinal = device.on_gpu, device.ordinal
        self.capability, self.processors = device.capability, device.processors
        self.host_memory, self.queues = device.host_memory, device.queues
        self.chunk_flops, self.together = device.chunk_flops, device.together
        self.checks = device.checks

    @property
    def unwrapped(self) -> Device:
        return self.device.unwrapped

    def detached(self) -> Device:
        return self.device.detached()

    # --- facts ----------------------------------------------------------------------------

    @property
    def port(self) -> object:
        return self.device.port

    def spec(self, dtype: str = "float32", mode: str | None = None) -> DeviceSpec:
        return self.device.spec(dtype, mode)

    def machine(self, dtype: str) -> Machine | None:
        return self.device.machine(dtype)

    def library_launch(self, problem: Problem, layout: str) -> Launched | None:
        return self.device.library_launch(problem, layout)

    def describe(self) -> str:
        return self.device.describe()

    def peak_tflops(self, dtype: str) -> float | None:
        return self.device.peak_tflops(dtype)

    def readings(self) -> dict[str, Any]:
        return self.device.readings()

    # --- streams and clock ----------------------------------------------------------------

    def stream(self, urgent: bool = False) -> Stream:
        return self.device.stream(urgent)

    @contextlib.contextmanager
    def streams(self, count: int, urgent: bool = False) -> Iterator[list[Stream]]:
        with self.device.streams(count, urgent) as taken:
            yield taken

    def enter(self, stream: Stream) -> None:
        self.device.enter(stream)

    def using(self, stream: Stream) -> contextlib.AbstractContextManager[None]:
        return self.device.using(stream)

    def session(self) -> contextlib.AbstractContextManager[None]:
        return self.device.session()

    def repeated(self, work: Callable[[], None], count: int, stream: Stream) -> Callable[[], None]:
        return self.device.repeated(work, count, stream)

    def start_clock(self) -> None:
        self.device.start_clock()

    def clock(self) -> Callable[[Event], float]:
        return self.device.clock()

    # --- memory ---------------------------------------------------------------------------

    def empty(self, rows: int, cols: int, dtype: str) -> Array:
        return self.device.empty(rows, cols, dtype)

    @property
    def allocation_stream(self) -> Stream:
        return self.device.allocation_stream

    def free_unused(self) -> None:
        self.device.free_unused()

    def pinned(self, size: int) -> np.ndarray:
        return self.device.pinned(size)

    # --- copies ---------------------------------------------------------------------------

    def copy(self, dst: Array, src: Array, stream: Stream) -> None:
        self.device.copy(dst, src, stream)

    def bound_copy(self, dst: Array, src: Array) -> Callable[[Stream], None]:
        return self.device.bound_copy(dst, src)

    def copy_pinned(self, dst: Array, src: Array, stream: Stream) -> None:
        self.device.copy_pinned(dst, src, stream)

    def reads(self, array: np.ndarray) -> bool:
        return self.device.reads(array)

    def reaches(self, other: Facts) -> bool:
        return self.device.reaches(other)

    def reads_memory_of(self, ordinal: int) -> bool:
        return self.device.reads_memory_of(ordinal)

    def calls(self) -> Calls | None:
        return self.device.calls()

    # --- products -------------------------------------------------------------------------

    def prepare(
        self, variant: Variant, a: Array, b: Array, dtype: str, *, summed: bool = True
    ) -> None:
        self.device.prepare(variant, a, b, dtype, summed=summed)

    def prepare_ahead(
        self, variant: Variant, a: Array, b: Array, dtype: str, *, summed: bool = True
    ) -> None:
        self.prepare(variant, a, b, dtype, summed=summed)  # what the wrapper needs, too

    @property
    def awaits_kernels(self) -> bool:
        return self.device.awaits_kernels

    def prepare_combine(self, dtype: str) -> None:
        self.device.prepare_combine(dtype)

    def make_room(
        self, variant: Variant, m: int, n: int, k: int, dtype: str, stream: Stream
    ) -> None:
        self.device.make_room(variant, m, n, k, dtype, stream)

    def compile(self, variant: Variant, dtype: str, layouts: str) -> None:
        self.device.compile(variant, dtype, layouts)

    def gemm(
        self, variant: Variant, a: Array, b: Array, c: Array, *,
        alpha: float, beta: float, stream: Stream,
    ) -> None:  # fmt: skip
        self.device.gemm(variant, a, b, c, alpha=alpha, beta=beta, stream=stream)

    def bound_gemm(
        self, variant: Variant, a: Array, b: Array, c: Array, *, alpha: float, beta: float
    ) -> Callable[[Stream], None]:
        return self.device.bound_gemm(variant, a, b, c, alpha=alpha, beta=beta)

    # What changes products reads their operands as they are, and each by itself.

    def bind(
        self, variant: Variant, a: Array, b: Array, c: Array, *, alpha: float, beta: float
    ) -> BoundProduct | None:
        return None

    def preparable(self, variant: Variant, a: Array, b: Array) -> bool:
        return False

    def prepared(
        self, call: BoundProduct, a: Array, b: Array, c: Array, stream: Stream,
        others: Sequence[Array] = (),
    ) -> None:  # fmt: skip
        return None

    def listed(
        self, call: Callable[[Stream], None], stream: Stream, passing: Sequence[range]
    ) -> None:
        return None

    def splitter(self, variant: Variant, dtype: str) -> None:
        return None

    def sum(
        self, partials: Sequence[Array], out: Array, *, alpha: float, beta: float, stream: Stream
    ) -> None:
        self.device.sum(partials, out, alpha=alpha, beta=beta, stream=stream)

    def bound_sum(
        self, partials: Sequence[Array], out: Array, *, alpha: float, beta: float
    ) -> Callable[[Stream], None]:
        return self.device.bound_sum(partials, out, alpha=alpha, beta=beta)

    def add(self, dst: Array, src: Array, stream: Stream) -> None:
        self.device.add(dst, src, stream)

    def combine(
        self, alpha: float, x: Array, beta: float, y: Array, out: Array, stream: Stream
    ) -> None:
        self.device.combine(alpha, x, beta, y, out, stream)
