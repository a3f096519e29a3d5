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

import numpy as np

from .. import catalog
from ..catalog import MAX_GRID, Launch, Variant
from ..errors import UsageError
from ..planner import DeviceSpec
from .driver import Calls
from .views import layout, leading


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

    def stranger(self) -> Device:
        """This device, sharing no memory or stream with it: for what outlives it."""
        return self

    @functools.cached_property
    def keeper(self) -> Stream:
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
        """Sets zero for `time_ms`."""
        self._zero = time.perf_counter()

    def time_ms(self, event) -> float:
        """Milliseconds from `start_clock` to a finished event."""
        return (event.seconds - self._zero) * 1e3

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


def readable(variant: Variant, a, b) -> str:
    """The layouts of a kernel that need the fewest operands transposed first, rather B."""
    return min(
        variant.kernel.layouts,
        key=lambda orders: 2 * (not leading(a, orders[0])) + (not leading(b, orders[1])),
    )


class KernelDevice(Device):
    """A device that runs the kernels of the catalog; subclasses load and launch them."""

    def __init__(self):
        self._loaded = {}

    @abc.abstractmethod
    def load(self, variant: Variant, dtype: str, layouts: str):
        """The compiled kernel, ready to launch."""

    @abc.abstractmethod
    def launch(self, function, launch: Launch, args: Sequence, stream: Stream) -> None:
        """Start a kernel. Arguments are NumPy scalars and matrices of this device."""

    @abc.abstractmethod
    def pointers(self, matrices: Sequence):
        """The matrices' addresses as an array on this device."""

    def function(self, variant: Variant, dtype: str, layouts: str = "nn"):
        key = (variant, dtype, layouts)
        if key not in self._loaded:
            self._loaded[key] = self.load(variant, dtype, layouts)
        return self._loaded[key]

    def prepare(self, variant, a, b, dtype):
        if variant.kernel.role == "tensor" and not variant.kernel.library:
            from . import tensor  # which is built on this module

            tensor.prepare(self, variant, a, b, dtype)
            dtype = "float32"  # of what is summed
        elif not variant.kernel.library:
            self.function(variant, dtype, readable(variant, a, b))
        for role in ("sum", "add", "transpose"):
            self.function(catalog.helper(role), dtype)

    def make_room(self, variant, m, n, k, dtype, stream):
        if not variant.kernel.library and variant.kernel.role == "gemm":
            for *_part, launch in launches(variant, m, n, k, dtype):
                if launch.workspace_bytes:
                    self._scratch(launch, dtype, stream)

    def gemm(self, variant, a, b, c, *, alpha, beta, stream):
        if not c.shape[0] or not c.shape[1]:
            return
        self.bind(variant, a, b, c, alpha=alpha, beta=beta)(a, b, c, stream)

    def bound_gemm(self, variant, a, b, c, *, alpha, beta):
        call = self.bind(variant, a, b, c, alpha=alpha, beta=beta)
        return lambda stream: call(a, b, c, stream)

    def bind(self, variant: Variant, a, b, c, *, alpha, beta) -> Callable:
        """A call that multiplies matrices laid out as these, worked out once for many."""
        if variant.kernel.library:
            return self.bind_library(variant, a, b, c, alpha=alpha, beta=beta)
        if variant.kernel.role == "tensor":
            from . import tensor

            return tensor.bind(self, variant, a, b, c, alpha=alpha, beta=beta)
        (m, n), k = c.shape, a.shape[1]
        dtype = c.dtype.name
        layouts = readable(variant, a, b)
        turned = [not leading(x, order) for x, order in zip((a, b), layouts, strict=True)]
        ld = [
            max(1, x.shape[order == "n"]) if turn else leading(x, order)
            for x, order, turn in zip((a, b), layouts, turned, strict=True)
        ]
        lda, ldb, ldc = map(np.int64, (*ld, layout(c)[1]))
        function = self.function(variant, dtype, layouts)
        scalar = np.dtype(dtype).type
        parts = launches(variant, m, n, k, dtype)
        whole = len(parts) == 1
        k, alpha, beta = np.int32(k), scalar(alpha), scalar(beta)

        def call(a, b, c, stream):
            if turned[0]:
                a = self.transposed(a, stream)
            if turned[1]:
                b = self.transposed(b, stream)
            for rows, cols, launch in parts:
                x, y, z = (a, b, c) if whole else (a[rows], b[:, cols], c[rows, cols])
                args = [
                    np.int32(z.shape[0]), np.int32(z.shape[1]), k, alpha,
                    x, lda, y, ldb, beta, z, ldc,
                ]  # fmt: skip
                if launch.workspace_bytes:
                    args += self._scratch(launch, dtype, stream)
                self.launch(function, launch, args, stream)

        return call

    def _scratch(self, launch: Launch, dtype: str, stream: Stream) -> list:
        """The stream's workspace and its flags, which kernels leave zero; larger ones where this
        launch needs them. Smaller ones are kept: a recorded graph may still launch with them."""
        size = np.dtype(dtype).itemsize
        wanted = -(-launch.workspace_bytes // size), -(-launch.flag_bytes // 4)
        for workspace, flags in stream.scratch:
            if workspace.dtype == dtype and workspace.size >= wanted[0] and flags.size >= wanted[1]:
                return [workspace, flags]
        workspace, flags = self.empty(1, wanted[0], dtype), self.empty(1, wanted[1], "uint32")
        flags[...] = 0
        stream.scratch.append((workspace, flags))
        return [workspace, flags]

    def bind_library(self, variant, a, b, c, *, alpha, beta) -> Callable:
        """As `bind`, for a kernel that is a library's."""
        raise UsageError(f"kernel {variant.name} does not run on the {self.kind} device")

    def transposed(self, view, stream):
        """The same matrix in the other storage order, made by the transpose kernel."""
        order, ld = layout(view)
        stored = view if order == "n" else view.T
        dst = self.empty(stored.shape[1], stored.shape[0], view.dtype.name)
        self._pass("transpose", stored, ld, dst, layout(dst)[1], stream)
        return dst.T if order == "n" else dst

    def add(self, dst, src, stream):
        self._pass("add", src, layout(src)[1], dst, layout(dst)[1], stream)

    def copy_here(self, dst, src, stream):
        """dst[...] = src, both here and row-major, by the slab-copy kernel."""
        self._pass("copy", src, layout(src)[1], dst, layout(dst)[1], stream)

    def _pass(self, role, src, lds, dst, ldd, stream):
        rows, cols = src.shape
        if not rows or not cols:
            return
        variant = catalog.helper(role)
        dtype = src.dtype.name
        function = self.function(variant, dtype)
        for r, c, launch in launches(variant, rows, cols, 0, dtype):
            part, into = src[r, c], dst[c, r] if role == "transpose" else dst[r, c]
            args = [
                np.int32(part.shape[0]), np.int32(part.shape[1]),
                part, np.int64(lds), into, np.int64(ldd),
            ]  # fmt: skip
            self.launch(function, launch, args, stream)

    def sum(self, partials, out, *, alpha, beta, stream):
        self.bound_sum(partials, out, alpha=alpha, beta=beta)(stream)

    def bound_sum(self, partials, out, *, alpha, beta):
        rows, cols = out.shape
        if not rows or not cols:
            return lambda stream: None
        variant = catalog.helper("sum")
        dtype = out.dtype.name
        function = self.function(variant, dtype)
        scalar = np.dtype(dtype).type
        ldp = layout(partials[0])[1]
        ldo = layout(out)[1]
        started = []
        for r, c, launch in launches(variant, rows, cols, 0, dtype):
            part = out[r, c]
            args = [
                np.int32(part.shape[0]), np.int32(part.shape[1]), np.int32(len(partials)),
                scalar(alpha), self.pointers([p[r, c] for p in partials]), np.int64(ldp),
                scalar(beta), part, np.int64(ldo), part, np.int64(ldo),
            ]  # fmt: skip
            started.append((launch, args))

        def call(stream):
            for launch, args in started:
                self.launch(function, launch, args, stream)

        return call


@functools.lru_cache(maxsize=4096)
def launches(
    variant: Variant, m: int, n: int, k: int, dtype: str
) -> tuple[tuple[slice, slice, Launch], ...]:
    """Rows and columns of C with their launch: one, or several where a grid has its limits."""

    def fits(rows, cols):
        grid = variant.launch(rows, cols, k, dtype).grid
        return all(g <= limit for g, limit in zip(grid, MAX_GRID, strict=True))

    rows, cols = m, n
    while not fits(rows, cols):
        # Halves that stay multiples of every tile side, so that only edges are ragged.
        if (rows >= cols and rows > 4096) or cols <= 4096:
            rows = -(-rows // 2 // 4096) * 4096
        else:
            cols = -(-cols // 2 // 4096) * 4096
    return tuple(
        (slice(i, i + p), slice(j, j + q), variant.launch(p, q, k, dtype))
        for i in range(0, m, rows)
        for j in range(0, n, cols)
        for p, q in [(min(rows, m - i), min(cols, n - j))]
    )
