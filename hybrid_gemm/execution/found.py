"""What was worked out for products of arrays that lie alike, on one GPU."""

from __future__ import annotations

from typing import Any, Literal

from ..arrays.strides import Reach, reach
from ..devices.cuda.device import CudaDevice
from ..devices.cuda.launch_list import BUSY
from ..devices.cuda.stream import CudaStream
from ..devices.roles import BoundProduct, Prepared
from .first_calls import FirstCalls
from .native_calls import Reaches, Started, note, phase


class Found:
    """The bound product, the shape and the dtype of C, and the bytes that A, B and C lie in.
    `turned`: the product is C^T = B^T A^T, whose rows are C's columns.

    `ready` has the product prepared for streams, by their addresses, and for the `phase` of A, B
    and C: False where it was called once so. It is None for products that are not prepared.
    """

    __slots__ = "call", "dtype", "reaches", "ready", "shape", "turned"

    def __init__(
        self, call: BoundProduct, shape: tuple[int, ...], dtype: str,
        reaches: Reaches, preparable: bool, *, turned: bool = False,
    ) -> None:  # fmt: skip
        self.call, self.shape, self.dtype, self.reaches = call, shape, dtype, reaches
        self.turned = turned
        self.ready: dict[tuple[int, int], Prepared | Literal[False]] | None
        self.ready = {} if preparable else None

    def start_prepared(
        self, device: CudaDevice, stream: int, at: tuple[int, int, int], *, alone: bool = True
    ) -> bool:
        """Starts it for matrices at these addresses, if it is prepared for them and this stream of
        the current GPU; whether it did. `alone`: it is all that a call does."""
        ready = self.ready and self.ready.get((stream, phase(*at)))
        if not ready:
            return False
        a, b, c = at
        if status := ready.start(b, a, c) if self.turned else ready.start(a, b, c):
            if status == BUSY:
                return False  # `start` waits for the other thread
            ready.check(status)
        if alone:
            note(Started(ready, device, stream, at, self.reaches, self.dtype, self.turned))
        return True

    def start(self, device: CudaDevice, stream: CudaStream, a: Any, b: Any, c: Any) -> None:
        """Starts it; the second time, it is prepared for this stream and such addresses, once it is
        known which of several products it is."""
        if isinstance(self.call, FirstCalls) and self.call.fastest:
            self.call, self.ready = self.call.fastest, {}
        at, known = (stream.cupy.ptr, phase(a.data.ptr, b.data.ptr, c.data.ptr)), self.ready
        if self.turned:
            a, b, c = b.T, a.T, c.T

        def launches() -> None:
            with stream.unrestricted():
                self.call(a, b, c, stream)

        stream.start(launches)
        if known is None:
            return
        if at not in known:
            known[at] = False
        elif not known[at] and not stream.capturing():
            if made := device.prepared(self.call, a, b, c, stream):
                known[at] = made
            else:
                self.ready = None


class CurrentStreams:
    """The callers' current streams of one GPU. An object of its own, so that what takes it need not
    know who else does: a circle of references would keep the GPU's memory until Python looks."""

    def __init__(self, device: CudaDevice) -> None:
        self._current, self._ordinal = device.cp.cuda.get_current_stream, device.ordinal
        self._known: dict[int, CudaStream] = {}

    def __call__(self) -> CudaStream:
        """That of the calling thread."""
        current = self._current(self._ordinal)
        known = self._known.get(current.ptr)
        if known is None:
            known = self._known[current.ptr] = CudaStream(current)
        return known


def reach_of(x: Any) -> Reach:
    """Of an array whose strides are positive."""
    return reach(x.shape, x.strides, x.itemsize)


def overlap(at: tuple[int, int, int], reaches: Reaches) -> bool:
    """Whether C may have a byte in common with A or B."""
    c, at_c = reaches[2], at[2]
    return any(x.meets(at_x, c, at_c) for x, at_x in zip(reaches[:2], at[:2], strict=True))
