"""What every device offers the runtime: streams, memory, copies, and four operations.

Matrices on a device are 2-D array views with `.shape`, `.strides`, `.dtype` and slicing
(NumPy's or CuPy's). `home` tells where a matrix lives: a `Device`, or None for the host.
"""

from __future__ import annotations

import abc
import contextlib
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..arrays.strides import layout
from ..catalog import Variant
from ..planning.planner import DeviceSpec
from .cuda.driver import Calls


class Stream(abc.ABC):
    """An ordered queue of work on one device; an event is a point in it."""

    def __init__(self):
        self.scratch: list = []  # of kernels whose blocks work together

    @abc.abstractmethod
    def record(self, event=None):
        """The event now in the queue: a new one, or one of this stream's that is used again."""

    @abc.abstractmethod
    def wait(self, event) -> None:
        """Later work of this stream starts after `event`."""

    def passed(self, event) -> bool:
        """Whether an event is over."""
        return True

    @abc.abstractmethod
    def synchronize(self) -> None: ...


class HostEvent:
    def __init__(self):
        self.seconds = time.perf_counter()

    def synchronize(self) -> None:
        pass


class HostStream(Stream):
    """Work that is done when the call returns."""

    def record(self, event=None) -> HostEvent:
        return HostEvent()

    def wait(self, event) -> None:
        pass

    def synchronize(self) -> None:
        pass


class Device(abc.ABC):
    """One place that multiplies. Used by several threads at once, each with its stream."""

    kind: str
    name: str
    capability = 0  # of a GPU's instructions: 90 for 9.0
    processors = 1  # that run blocks of threads side by side
    host_memory = False  # matrices of the host are used where they lie
    queues = False  # whether calls return before what they start is done
    chunk_flops: int | None = None  # products are cut into pieces of about so much

    @abc.abstractmethod
    def spec(self, dtype: str = "float32") -> DeviceSpec:
        """What planning needs to know; rates are those of products in `dtype`."""

    together = 1  # devices that were opened to share the work, this one included
    port: object = "host"  # what devices behind one link to the host have in common

    def stream(self, urgent: bool = False) -> Stream:
        """A new stream; work of an urgent one goes before that of others."""
        return HostStream()

    @contextlib.contextmanager
    def streams(self, count: int, urgent: bool = False):
        """Streams for work that leaves them idle. They are used again: what a memory pool keeps,
        it keeps for one stream."""
        taken = []
        for _ in range(count):
            try:
                taken.append(self._idle[urgent].pop())
            except IndexError:
                taken.append(self.stream(urgent))
        yield taken
        self._idle[urgent] += reversed(taken)  # each for what it did: it has the room for that

    @functools.cached_property
    def _idle(self) -> dict[bool, list[Stream]]:
        return {False: [], True: []}

    def detached(self) -> Device:
        """For what outlives this device: one like it that shares neither memory nor streams with
        it; itself where it keeps none."""
        return self

    @functools.cached_property
    def allocation_stream(self) -> Stream:
        """The stream that is current while memory for a whole run is taken."""
        return self.stream()

    def pinned(self, size: int) -> np.ndarray:
        """So many bytes of host memory that copies to and from this device read straight."""
        return np.empty(size, np.uint8)

    def calls(self) -> Calls | None:
        """What threads without Python need to copy to and from this device, if they can."""
        return None

    def reads(self, array: np.ndarray) -> bool:
        """Whether copies to and from this device read such host memory straight."""
        return False

    def reaches(self, other: Device) -> bool:
        """Whether memory of the other is read over a link between them, or is memory here."""
        return True

    def free_unused(self) -> None:  # noqa: B027
        """Gives back memory that is kept for later."""

    def enter(self, stream: Stream) -> None:  # noqa: B027
        """As `using`, for as long as the calling thread lives."""

    def using(self, stream: Stream) -> contextlib.AbstractContextManager:
        """Makes this device and stream current in the calling thread."""
        return contextlib.nullcontext()

    def describe(self) -> str:
        """Its name and what it is, for people."""
        return self.name

    def prepare(self, variant: Variant, a, b, dtype: str) -> None:  # noqa: B027
        """Compiles what a product of these views needs, so that no clock runs meanwhile."""

    def make_room(  # noqa: B027
        self, variant: Variant, m: int, n: int, k: int, dtype: str, stream: Stream
    ) -> None:
        """Makes what such products on this stream need besides their matrices, and keep."""

    def compile(self, variant: Variant, dtype: str, layouts: str) -> None:  # noqa: B027
        """Leaves a compiled kernel in the cache, from any thread."""

    def repeated(self, work: Callable[[], None], count: int, stream: Stream) -> Callable:
        """A call that does `work` so many times on a stream, for timing."""

        def replay():
            for _ in range(count):
                work()

        return replay

    def peak_tflops(self, dtype: str) -> float | None:
        """10^12 operations a second that the hardware could do, if that is known."""
        return None

    def readings(self) -> dict:
        """What the hardware says of itself now: clock, power, what holds it back."""
        return {}

    def session(self) -> contextlib.AbstractContextManager:
        """Entered once around a run, whatever its threads."""
        return contextlib.nullcontext()

    def start_clock(self) -> None:
        """Sets zero for `clock` and `time_ms`."""
        self._zero = time.perf_counter()

    def clock(self) -> Callable[[Any], float]:
        """`time_ms` as it is now: by this zero, also when there is another one."""
        zero = self._zero
        return lambda event: (event.seconds - zero) * 1e3

    def time_ms(self, event) -> float:
        """Milliseconds from the last `start_clock` to a finished event."""
        return self.clock()(event)

    @abc.abstractmethod
    def empty(self, rows: int, cols: int, dtype: str):
        """An uninitialised row-major matrix on this device."""

    def empty_like(self, view, dtype: str):
        """An uninitialised matrix here in the order of `view`, so that a copy is straight."""
        rows, cols = view.shape
        found = layout(view)
        if found and found[0] == "t":
            return self.empty(cols, rows, dtype).T
        return self.empty(rows, cols, dtype)

    @abc.abstractmethod
    def copy(self, dst, src, stream: Stream) -> None:
        """dst[...] = src for matrices of equal shape and dtype, at least one of them here."""

    def copy_pinned(self, dst, src, stream: Stream) -> None:
        """As `copy`, where host memory is page-locked: it returns at once."""
        self.copy(dst, src, stream)

    @abc.abstractmethod
    def gemm(self, variant: Variant, a, b, c, *, alpha, beta, stream: Stream) -> None:
        """c = alpha * a @ b + beta * c for op(A), op(B) views that live here."""

    @abc.abstractmethod
    def sum(self, partials: Sequence, out, *, alpha, beta, stream: Stream) -> None:
        """out = alpha * (partials in order) + beta * out, in one pass.

        The partials have one leading dimension.
        """

    # The same three for given matrices, worked out before they are due: calls with a stream.

    def bound_copy(self, dst, src) -> Callable[[Stream], None]:
        return lambda stream: self.copy(dst, src, stream)

    def bound_gemm(self, variant: Variant, a, b, c, *, alpha, beta) -> Callable[[Stream], None]:
        return lambda stream: self.gemm(variant, a, b, c, alpha=alpha, beta=beta, stream=stream)

    def bound_sum(self, partials: Sequence, out, *, alpha, beta) -> Callable[[Stream], None]:
        return lambda stream: self.sum(partials, out, alpha=alpha, beta=beta, stream=stream)

    @abc.abstractmethod
    def add(self, dst, src, stream: Stream) -> None:
        """dst += src."""
