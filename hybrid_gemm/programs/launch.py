"""Launches: products and casts that are worked out, on the caller's current stream of a GPU. Python
starts each the first time. The second time it is prepared, where it can be, and native code starts
it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..arrays.strides import NOWHERE, Reach
from ..devices.cuda import driver
from ..devices.cuda.device import CudaDevice
from ..devices.cuda.launch_list import BUSY
from ..devices.cuda.stream import CudaStream
from ..devices.roles import BoundProduct, Prepared
from ..execution.first_calls import FirstCalls
from .program import OUT, A, B, Make, NativeLaunches
from .signature import native_launch, native_reaches, phase

Views = Callable[[Any, Any, Any], tuple[Any, Any, Any]]


class CurrentStreams:
    """The callers' current streams of one GPU. An object of its own, so that what takes it need not
    know who else does: a circle of references would keep the GPU's memory until Python looks."""

    def __init__(self, device: CudaDevice) -> None:
        self.device = device
        self._current, self._ordinal = device.cp.cuda.get_current_stream, device.ordinal
        self._known: dict[int, CudaStream] = {}

    def __call__(self) -> CudaStream:
        """That of the calling thread."""
        current = self._current(self._ordinal)
        known = self._known.get(current.ptr)
        if known is None:
            known = self._known[current.ptr] = CudaStream(current)
        return known


class Launch:
    """A bound product of the arrays in three `slots`, as `views` makes them: also of (B^T, A^T,
    OUT^T). `make` is what makes the last where its slot is empty. Called again on a stream, with
    such addresses, it is prepared for these, if it is `preparable`."""

    def __init__(
        self, streams: CurrentStreams, call: BoundProduct, make: Make, views: Views | None = None,
        *, preparable: bool = True, slots: tuple[int, int, int] = (A, B, OUT),
    ) -> None:  # fmt: skip
        self.streams, self.call, self.make, self.views = streams, call, make, views
        self.preparable, self.slots = preparable, slots
        self.native: tuple[bytes, Make, Prepared] | None = None  # the first that was prepared
        # By the stream and the `phase` of addresses, which are in a list of launches besides; None
        # where it was called once.
        self._ready: dict[tuple[int, int], Prepared | None] = {}

    def __call__(self, slots: list[Any]) -> None:
        a, b, out = self.slots
        if slots[out] is None:
            array, shape, dtype = self.make
            slots[out] = array(shape, dtype)
        self.start(slots[a], slots[b], slots[out])

    def start(self, a: Any, b: Any, c: Any, /) -> None:
        """Starts it on the caller's current stream of this GPU, which is the current one."""
        stream = self.streams()
        if not self.started((a.data.ptr, b.data.ptr, c.data.ptr), stream):
            self.begin(a, b, c, stream)

    def started(self, at: tuple[int, int, int], stream: CudaStream) -> bool:
        """Starts it for arrays at these addresses, if it is prepared for them; whether it did."""
        prepared = self._ready.get((stream.pointer, phase(*at)))
        if prepared is None:
            return False
        if status := prepared.start(*at):
            if status == BUSY:
                return False  # `CudaStream.start` waits for the other thread
            prepared.check(status)
        return True

    def begin(self, a: Any, b: Any, c: Any, stream: CudaStream) -> None:
        """Starts it from Python or, the second time, prepares it and starts that."""
        if isinstance(self.call, FirstCalls) and self.call.fastest:
            self.call, self.preparable = self.call.fastest, True
        at = a.data.ptr, b.data.ptr, c.data.ptr
        here = stream.pointer, phase(*at)
        if self.views is not None:
            a, b, c = self.views(a, b, c)
        lists = self.preparable and not stream.capturing()
        if lists and here in self._ready and self._ready[here] is None:
            self._prepare(here, a, b, c, stream)
            if self.started(at, stream):
                return

        def launches() -> None:
            with stream.unrestricted():
                self.call(a, b, c, stream)

        stream.start(launches)
        if lists:
            self._ready.setdefault(here, None)

    def _prepare(self, here: tuple[int, int], a: Any, b: Any, c: Any, stream: CudaStream) -> None:
        made = self._ready[here] = self.streams.device.prepared(self.call, a, b, c, stream)
        self.preparable = made is not None
        if made is not None and made.native is not None and self.native is None:
            launch = native_launch(made.native, driver.current_context(), here[1], self.slots)
            self.native = launch, self.make, made


class Launches:
    """Launches one after the other, which native code starts in place of a program's commands once
    each is prepared. `reaches` are those of A, B, C and OUT by slot, where OUT must have no byte in
    common with others; the program looks at that, too."""

    def __init__(
        self, launches: Sequence[Launch], reaches: Mapping[int, Reach | None] | None = None,
        make: Make | None = None,
    ) -> None:  # fmt: skip
        self.launches, self.make = tuple(launches), make
        self.reaches = [(reaches or {}).get(i) or NOWHERE for i in range(OUT + 1)]
        self.native: NativeLaunches | None = None

    def __call__(self, slots: list[Any]) -> None:
        for launch in self.launches:
            launch(slots)
        if self.native is None:
            self.join()

    def join(self) -> None:
        """Has native code start them, if all are prepared."""
        found = [launch.native for launch in self.launches if launch.native]
        if len(found) == len(self.launches):
            starts, makes, kept = zip(*found, strict=True)
            if self.make is not None:
                makes = *makes[:-1], self.make
            self.native = native_reaches(self.reaches) + b"".join(starts), makes, kept
