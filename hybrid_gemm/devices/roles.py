"""What a device offers, role by role: facts, streams and clock, memory, copies, products.

A matrix of a device (`Array`) is a 2-D view of NumPy's or CuPy's: it has `.shape`, `.strides`,
`.dtype` and slices. Sizes are in elements unless a name says bytes. A method that takes a stream
queues its work there and may return before that is done.
"""

from __future__ import annotations

import abc
import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import DTypeLike

from ..arrays.strides import Array, layout
from ..catalog import Variant
from ..host.kept import cached_property
from ..kernel_choice.library_kernels import Launched
from ..kernel_choice.tables import Machine
from ..planning.hardware import DeviceSpec
from ..problem import Problem
from .cuda.driver import Calls
from .split_operands import Splitter
from .streams import Event, HostStream, Stream

# A product that is worked out: called with A, B, C and a stream.
BoundProduct = Callable[[Array, Array, Array, Stream], None]


class Facts(abc.ABC):
    """What a device is."""

    kind: str  # as users name it: cuda, cpu or emulator
    name: str
    on_gpu = False  # its matrices are CuPy arrays in a GPU's memory
    ordinal: int | None = None  # CUDA's number of that GPU
    capability = 0  # of a GPU's instructions: 90 for 9.0; 0 where kernels ask for none
    processors = 1  # that run blocks of threads side by side
    host_memory = False  # it multiplies matrices of the host where they lie
    queues = False  # whether calls return before what they start is done
    checks = False  # whether it checks what it multiplies, sums and copies
    chunk_flops: int | None = None  # products are cut into pieces of about so many operations
    together = 1  # devices that were opened to share the work, this one included

    @property
    def port(self) -> object:
        """What devices behind one link to the host have in common."""
        return "host"

    @abc.abstractmethod
    def spec(self, dtype: str = "float32", mode: str | None = None) -> DeviceSpec:
        """What planning needs to know; rates are those of products in `dtype`, and on tensor cores
        in this `mode` (`cost_model.mode`), or in all."""

    def machine(self, dtype: str) -> Machine | None:
        """What choosing among GPU kernels for products in `dtype` needs to know; None where
        there is no such choice."""
        return None

    def library_launch(self, problem: Problem, layout: str) -> Launched | None:
        """What the device's library would launch for a problem of operands in a layout such as
        "nt"; None where it has none, or that cannot be told."""
        return None

    def describe(self) -> str:
        """Its name and what it is, for people."""
        return self.name

    def peak_tflops(self, dtype: str) -> float | None:
        """10^12 operations a second that the hardware could do, if that is known."""
        return None

    def readings(self) -> dict[str, Any]:
        """What the hardware measures now: clock (MHz), power (W), what slows it down. Empty
        where it measures nothing."""
        return {}


class Streams:
    """A device's streams, and its clock."""

    def stream(self, urgent: bool = False) -> Stream:
        """A new stream. Work of an urgent one goes before that of others."""
        return HostStream()

    @contextlib.contextmanager
    def streams(self, count: int, urgent: bool = False) -> Iterator[list[Stream]]:
        """Streams for work that leaves them idle, in errors too. They are used again, since a
        memory pool keeps what it keeps for one stream."""
        taken = []
        for _ in range(count):
            try:
                taken.append(self._idle[urgent].pop())
            except IndexError:
                taken.append(self.stream(urgent))
        try:
            yield taken
        finally:  # each for the work that it did before: it has the memory for that
            self._idle[urgent] += reversed(taken)

    @cached_property
    def _idle(self) -> dict[bool, list[Stream]]:
        return {False: [], True: []}

    def enter(self, stream: Stream) -> None:
        """Makes this device and stream current for as long as the calling thread lives."""

    def using(self, stream: Stream) -> contextlib.AbstractContextManager[None]:
        """Makes this device and stream current in the calling thread."""
        return contextlib.nullcontext()

    def session(self) -> contextlib.AbstractContextManager[None]:
        """Entered once around a run, whatever its threads."""
        return contextlib.nullcontext()

    def repeated(
        self, work: Callable[[], None], count: int, stream: Stream
    ) -> Callable[[], None]:  # fmt: skip
        """A call that does `work` `count` times on a stream, for timing."""

        def replay() -> None:
            for _ in range(count):
                work()

        return replay

    def start_clock(self) -> None:
        """Sets zero for `clock` and `time_ms`."""
        self._zero_seconds = time.perf_counter()

    def clock(self) -> Callable[[Event], float]:
        """`time_ms` by the zero of now, also after a later `start_clock`."""
        zero = self._zero_seconds
        return lambda event: (event.seconds - zero) * 1e3

    def time_ms(self, event: Event) -> float:
        """Milliseconds from the last `start_clock` to a finished event."""
        return self.clock()(event)


class Memory(Streams):
    """A device's memory, and page-locked memory of the host."""

    @property
    def row_gap(self) -> int:
        """Bytes that a run leaves between the rows of a matrix in this memory."""
        return 0

    @abc.abstractmethod
    def empty(self, rows: int, cols: int, dtype: DTypeLike) -> Array:
        """An uninitialised row-major matrix on this device. Raises `MemoryError` where there is
        no room for it."""

    def empty_like(self, view: Array, dtype: str) -> Array:
        """An uninitialised matrix on this device in the storage order of `view`, so that a copy
        needs no transposing."""
        rows, cols = view.shape
        found = layout(view)
        if found and found[0] == "t":
            return self.empty(cols, rows, dtype).T
        return self.empty(rows, cols, dtype)

    @cached_property
    def allocation_stream(self) -> Stream:
        """The stream that is current while memory for a whole run is taken."""
        return self.stream()

    def free_unused(self) -> None:
        """Gives memory that nothing uses back to the system."""

    def pinned(self, size: int) -> np.ndarray:
        """`size` bytes of host memory that copies to and from this device read directly."""
        return np.empty(size, np.uint8)


class Copies(abc.ABC):
    """Copies between a device, the host and other devices."""

    @abc.abstractmethod
    def copy(self, dst: Array, src: Array, stream: Stream) -> None:
        """dst[...] = src for matrices of equal shape and dtype, at least one of them on this
        device."""

    def bound_copy(self, dst: Array, src: Array) -> Callable[[Stream], None]:
        """`copy` of these matrices, worked out before it is due."""
        return lambda stream: self.copy(dst, src, stream)

    def copy_pinned(self, dst: Array, src: Array, stream: Stream) -> None:
        """As `copy`, where host memory is page-locked: returns at once."""
        self.copy(dst, src, stream)

    def reads(self, array: np.ndarray) -> bool:
        """Whether copies to and from this device read this host memory directly."""
        return False

    def reaches(self, other: Facts) -> bool:
        """Whether this device reads the other's memory over a link between them, or has the same
        memory."""
        return True

    def reads_memory_of(self, ordinal: int) -> bool:
        """Lets this device's kernels read the memory of a GPU over a link; whether there is one."""
        return False

    def calls(self) -> Calls | None:
        """What threads without Python need to copy to and from this device; None if they
        cannot."""
        return None


class Prepared(Protocol):
    """A product on one stream: `start` takes the addresses of its matrices, and returns 0 or a
    status of which `check` makes an error. `native` are the addresses of a native function and of
    its first argument, which do the same; None where Python starts it."""

    start: Callable[..., int]
    native: tuple[int, int] | None

    def check(self, status: int) -> None: ...


class Products(abc.ABC):
    """Products, sums, and what these have to compile or allocate first."""

    def prepare(  # noqa: B027
        self, variant: Variant, a: Array, b: Array, dtype: str, *, summed: bool = True
    ) -> None:
        """Compiles what a product of these views in `dtype` needs, before a clock runs; what sums
        partial C, too, where they are `summed`."""

    def prepare_ahead(
        self, variant: Variant, a: Array, b: Array, dtype: str, *, summed: bool = True
    ) -> None:
        """As `prepare`, where no clock has to wait: other threads may compile, and what needs a
        kernel waits for it."""
        self.prepare(variant, a, b, dtype, summed=summed)

    @property
    def awaits_kernels(self) -> bool:
        """Whether other threads still compile for it."""
        return False

    def prepare_combine(self, dtype: str) -> None:  # noqa: B027
        """Compiles what `combine` needs."""

    def make_room(  # noqa: B027
        self, variant: Variant, m: int, n: int, k: int, dtype: str, stream: Stream
    ) -> None:
        """Allocates what such products on this stream need besides their matrices, and keeps
        it."""

    def compile(self, variant: Variant, dtype: str, layouts: str) -> None:  # noqa: B027
        """Leaves a compiled kernel in the cache, from any thread."""

    @abc.abstractmethod
    def gemm(
        self, variant: Variant, a: Array, b: Array, c: Array, *,
        alpha: float, beta: float, stream: Stream,
    ) -> None:  # fmt: skip
        """c = alpha * a @ b + beta * c for op(A) of m x k, op(B) of k x n, and C of m x n, all on
        this device."""

    def bound_gemm(
        self, variant: Variant, a: Array, b: Array, c: Array, *, alpha: float, beta: float
    ) -> Callable[[Stream], None]:
        """`gemm` of these matrices, worked out before it is due."""
        return lambda stream: self.gemm(variant, a, b, c, alpha=alpha, beta=beta, stream=stream)

    def bind(
        self, variant: Variant, a: Array, b: Array, c: Array, *, alpha: float, beta: float
    ) -> BoundProduct | None:
        """A call that multiplies matrices laid out as these, worked out once for many; None where
        each product is worked out by itself."""
        return None

    def preparable(self, variant: Variant, a: Array, b: Array) -> bool:
        """Whether a bound product of matrices laid out as these, with k and alpha that are not 0,
        takes no memory but what stays with its stream, so that `prepared` may take it."""
        return False

    def prepared(
        self, call: BoundProduct, a: Array, b: Array, c: Array, stream: Stream,
        others: Sequence[Array] = (),
    ) -> Prepared | None:  # fmt: skip
        """A bound product as one native call, on a stream on which it was called before; None where
        there is none. It is started with matrices whose addresses, divided by 16, leave what those
        of A, B and C do. `others` are what A and B have besides, whose addresses `start`
        takes after theirs."""
        return None

    def listed(
        self, call: Callable[[Stream], None], stream: Stream, passing: Sequence[range]
    ) -> Prepared | None:
        """What a call launches on a stream as one native call, with the same matrices; `start`
        takes three numbers, which mean nothing. The call takes no memory but what stays with the
        stream. Of matrices with addresses in `passing` only these are kept. None where there is no
        such call."""
        return None

    def splitter(self, variant: Variant, dtype: str) -> Splitter | None:
        """What splits blocks of operands in `dtype` that several products by this variant read:
        once, part by part, and the products take `SplitView`s of them. None where each product
        reads them as they are."""
        return None

    @abc.abstractmethod
    def sum(
        self, partials: Sequence[Array], out: Array, *, alpha: float, beta: float, stream: Stream
    ) -> None:
        """out = alpha * (the partials, added in this order) + beta * out, in one pass.

        All have one shape, and the partials one leading dimension.
        """

    def bound_sum(
        self, partials: Sequence[Array], out: Array, *, alpha: float, beta: float
    ) -> Callable[[Stream], None]:
        """`sum` of these matrices, worked out before it is due."""
        return lambda stream: self.sum(partials, out, alpha=alpha, beta=beta, stream=stream)

    @abc.abstractmethod
    def add(self, dst: Array, src: Array, stream: Stream) -> None:
        """dst += src for row-major matrices."""

    @abc.abstractmethod
    def combine(
        self, alpha: float, x: Array, beta: float, y: Array, out: Array, stream: Stream
    ) -> None:
        """out = alpha * x + beta * y for matrices of one shape, dtype and storage order; `out`
        may be x or y. With beta = 0, y is not read."""
