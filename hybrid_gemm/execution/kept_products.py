"""Products of runs, worked out once for matrices laid out alike: a run that comes again finds them
worked out, and starts each by one native call where the device has it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ..arrays.strides import address, lies
from ..catalog import Variant
from ..devices.base import Device, Stream
from ..devices.roles import BoundProduct, Prepared
from ..devices.split_operands import SplitView
from ..host.kept import Kept

MOST = 1024  # products of one variant on one device
MOST_VARIANTS = 64


class KeptProducts:
    """Those of all devices of a runner. It refers to the devices, and none refers to it."""

    def __init__(self) -> None:
        self._known: Kept[DeviceProducts] = Kept(MOST_VARIANTS)

    def of(self, device: Device, variant: Variant) -> DeviceProducts:
        """The products of one variant on one device."""
        known = self._known.get((device, variant))
        if known is None:
            known = DeviceProducts(device, variant)
            self._known.put((device, variant), known)
        return known


class DeviceProducts:
    """Products of one variant on one device."""

    def __init__(self, device: Device, variant: Variant) -> None:
        self.device, self.variant = device, variant
        self._known: Kept[_Known] = Kept(MOST)

    def bound(
        self, a: Any, b: Any, c: Any, *, alpha: float, beta: float
    ) -> Callable[[Stream], None]:
        """The product of these matrices, or `SplitView`s of them; see `Device.bound_gemm`."""
        key = _lies(a), _lies(b), _lies(c), alpha, beta
        known = self._known.get(key)
        if known is None:
            call = self.device.bind(self.variant, a, b, c, alpha=alpha, beta=beta)
            if call is None or not c.size:
                return self.device.bound_gemm(self.variant, a, b, c, alpha=alpha, beta=beta)
            reads = bool(a.shape[1]) and alpha != 0
            known = _Known(call, reads and self.device.preparable(self.variant, a, b))
            self._known.put(key, known)
        return Product(self, known, a, b, c)

    def start(self, known: _Known, a: Any, b: Any, c: Any, stream: Stream) -> None:
        """The third time on a stream, by one native call."""
        streams = known.ready  # asked once: threads with other streams may set it meanwhile
        if streams is None:
            known.call(a, b, c, stream)
            return
        split = isinstance(a, SplitView)
        others = (*a.arrays[1:], *b.arrays[1:]) if split else ()
        plain = (a.array, b.array, c) if split else (a, b, c)
        addresses = [address(x) for x in (*plain, *others)]
        aligned = not (addresses[0] | addresses[1] | addresses[2]) & 15
        ready = streams.get(stream)
        if ready and aligned:
            if status := ready.start(*addresses):
                ready.check(status)
            return
        known.call(a, b, c, stream)
        if ready is None:
            streams[stream] = False
        elif aligned and (made := self.device.prepared(known.call, a, b, c, stream, others)):
            streams[stream] = made
        elif aligned:
            known.ready = None


@dataclass(frozen=True, slots=True, eq=False)
class Product:
    """The product of matrices, or `SplitView`s of them, worked out: called with a stream."""

    kept: DeviceProducts
    known: _Known
    a: Any
    b: Any
    c: Any

    def __call__(self, stream: Stream) -> None:
        self.kept.start(self.known, self.a, self.b, self.c, stream)

    def listed(
        self, stream: Stream, passing: Sequence[range]
    ) -> tuple[Prepared, Sequence[int]] | None:
        """It as one native call on a stream, as `Products.listed`, and the three numbers that this
        takes; None where there is no such call."""
        device, call, (a, b, c) = self.kept.device, self.known.call, (self.a, self.b, self.c)
        if not self.known.preparable:
            return None
        if self.kept.variant.kernel.library:
            known = (self.known.ready or {}).get(stream)
            made = known or device.prepared(call, a, b, c, stream)
            return (made, [address(x) for x in (a, b, c)]) if made else None
        made = device.listed(functools.partial(call, a, b, c), stream, passing)
        return (made, (0, 0, 0)) if made else None


class _Known:
    """A bound product, and for each stream where it was called False, or it prepared; None where
    it is not prepared. `preparable` is as `Products.preparable` says."""

    def __init__(self, call: BoundProduct, preparable: bool) -> None:
        self.call, self.preparable = call, preparable
        self.ready: dict[Stream, Prepared | Literal[False]] | None = {} if preparable else None


def _lies(x: Any) -> tuple:
    """As `lies`, also of what was split."""
    if isinstance(x, SplitView):
        return *lies(x.array), x.parts.strides, len(x.states)
    return lies(x)
