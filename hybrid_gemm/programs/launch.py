"""A launch: a product that is worked out, on the caller's current stream of a GPU. Python starts it
first; then it is prepared, where it can be, and native code starts it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..arrays.strides import Reach, reach
from ..devices.cuda import driver
from ..devices.cuda.device import CudaDevice
from ..devices.cuda.launch_list import BUSY
from ..devices.cuda.stream import CudaStream
from ..devices.roles import BoundProduct, Prepared
from ..execution.first_calls import FirstCalls
from .program import OUT, A, B, Make, NativeLaunch
from .signature import native_launch, phase

Reaches = tuple[Reach, Reach, Reach]  # of A, B and OUT
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
    """OUT = A B by a bound product, of A, B and OUT as `views` makes them: (B^T, A^T, OUT^T) where
    it is `turned`. Once it was called on a stream with such addresses, it is prepared for these, if
    it is `preparable`. `make` is what makes an OUT."""

    def __init__(
        self, streams: CurrentStreams, call: BoundProduct, reaches: Reaches,
        make: Make, views: Views | None = None, *, turned: bool = False, preparable: bool = True,
        slots: tuple[int, int, int] = (A, B, OUT),
    ) -> None:  # fmt: skip
        self.streams, self.call, self.reaches = streams, call, reaches
        self.views, self.turned, self.preparable, self.make = views, turned, preparable, make
        self.native: NativeLaunch | None = None
        self._slots = slots
        # By the stream and the `phase` of addresses: what a list of launches has in it besides.
        self._ready: dict[tuple[int, int], Prepared] = {}

    def __call__(self, slots: list[Any]) -> None:
        a, b, out = self._slots
        self.start(slots[a], slots[b], slots[out])

    def of(self, reaches: Reaches, make: Make, views: Views) -> Launch:
        """It, of arrays whose `views` it takes, with other reaches and another C."""
        mine = self.views

        def all_views(a: Any, b: Any, c: Any) -> tuple[Any, Any, Any]:
            arrays = views(a, b, c)
            return mine(*arrays) if mine else arrays

        return Launch(
            self.streams, self.call, reaches, make, all_views, turned=self.turned,
            preparable=self.preparable,
        )  # fmt: skip

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
        a, b, c = at
        if status := prepared.start(b, a, c) if self.turned else prepared.start(a, b, c):
            if status == BUSY:
                return False  # `CudaStream.start` waits for the other thread
            prepared.check(status)
        return True

    def begin(self, a: Any, b: Any, c: Any, stream: CudaStream) -> None:
        """Starts it from Python, and prepares it."""
        if isinstance(self.call, FirstCalls) and self.call.fastest:
            self.call, self.preparable = self.call.fastest, True
        here = stream.pointer, phase(a.data.ptr, b.data.ptr, c.data.ptr)
        if self.views is not None:
            a, b, c = self.views(a, b, c)

        def launches() -> None:
            with stream.unrestricted():
                self.call(a, b, c, stream)

        stream.start(launches)
        if not self.preparable or here in self._ready or stream.capturing():
            return
        made = self.streams.device.prepared(self.call, a, b, c, stream)
        self.preparable = made is not None
        if made is None:
            return
        self._ready[here] = made
        if made.native is not None and self.native is None:
            context = driver.current_context()
            launch = native_launch(made.native, context, here[1], self.reaches, turned=self.turned)
            self.native = launch, self.make, made


def reach_of(x: Any) -> Reach:
    """Of an array whose strides are positive."""
    return reach(x.shape, x.strides, x.itemsize)


def backwards(*arrays: Any) -> bool:
    """Whether one has bytes before its first element, of which `reach_of` does not tell."""
    return any(step < 0 for x in arrays for step in x.strides)
