"""Kernels that are chosen by what they take: the first calls of a product run several in turn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ..devices.base import Array, Event, Stream
from ..devices.roles import BoundProduct

ROUNDS = 2  # calls of each; the last is timed, when all is loaded


class Clocked(Protocol):
    """A device that times what its streams do."""

    def start_clock(self) -> None: ...

    def time_ms(self, event: Event) -> float: ...


class FirstCalls:
    """A bound product that is made by one of several: its first calls take `products` in turn,
    `ROUNDS` times, each a whole product. The next call waits for these, and `fastest` is then what
    took the least time on the device; a tie goes to the one named first. Threads may share it."""

    def __init__(self, products: Sequence[BoundProduct], device: Clocked) -> None:
        self.products, self._device = list(products), device
        self.fastest: BoundProduct | None = None
        self._calls = 0
        self._spans: dict[int, tuple[Event, Event]] = {}  # by the product's place

    def __call__(self, a: Array, b: Array, c: Array, stream: Stream) -> None:
        """C = A B by one of the products. In a graph it is the fastest, or the first while that is
        not known: nothing is timed there."""
        if stream.capturing():
            (self.fastest or self.products[0])(a, b, c, stream)
            return
        if self.fastest is None and len(self._spans) == len(self.products):
            self._settle()
        if self.fastest is not None:
            self.fastest(a, b, c, stream)
            return
        if not self._calls:
            self._device.start_clock()
        turn, at = divmod(self._calls, len(self.products))
        self._calls += 1
        start = stream.record()
        self.products[at](a, b, c, stream)
        if turn >= ROUNDS - 1:  # beyond it while one runs in another thread, or where one failed
            self._spans[at] = start, stream.record()

    def _settle(self) -> None:
        for _start, stop in self._spans.values():
            stop.synchronize()
        took = [self._device.time_ms(stop) - self._device.time_ms(start)
                for _at, (start, stop) in sorted(self._spans.items())]  # fmt: skip
        self.fastest = self.products[took.index(min(took))]
