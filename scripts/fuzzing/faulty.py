"""Devices whose products, sums and copies come out wrong, as memory or arithmetic that fails would
leave them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

from hybrid_gemm.devices.wrapped import WrappedDevice

# (what: product, sum or copy; which of these, from 0 on, or None: each) to what is done to the
# result.
Faults = Mapping[tuple[str, int | None], Callable[[Any], None]]


class FaultyDevice(WrappedDevice):
    """Another device that does `faults` to what it makes, on that device, between the product
    and what comes next."""

    def __init__(self, device, faults: Faults) -> None:
        super().__init__(device)
        self.faults, self.done = dict(faults), {"product": 0, "sum": 0, "copy": 0}
        self.lock = threading.Lock()

    def damage(self, what: str, made) -> None:
        with self.lock:
            number = self.done[what]
            self.done[what] += 1
        for which in (number, None):
            if fault := self.faults.get((what, which)):
                fault(made)

    def bound_gemm(self, variant, a, b, c, *, alpha, beta):
        make = self.device.bound_gemm(variant, a, b, c, alpha=alpha, beta=beta)

        def call(stream):
            make(stream)
            self.damage("product", c)

        return call

    def gemm(self, variant, a, b, c, *, alpha, beta, stream):
        self.bound_gemm(variant, a, b, c, alpha=alpha, beta=beta)(stream)

    def bound_sum(self, partials, out, *, alpha, beta):
        make = self.device.bound_sum(partials, out, alpha=alpha, beta=beta)

        def call(stream):
            make(stream)
            self.damage("sum", out)

        return call

    def sum(self, partials, out, *, alpha, beta, stream):
        self.bound_sum(partials, out, alpha=alpha, beta=beta)(stream)

    def bound_copy(self, dst, src):
        copy = self.device.bound_copy(dst, src)

        def call(stream):
            copy(stream)
            stream.synchronize()
            self.damage("copy", dst)

        return call

    def copy(self, dst, src, stream):
        self.bound_copy(dst, src)(stream)


def flip(bit: int, rows=slice(0, 1), cols=slice(0, 1)) -> Callable[[Any], None]:
    """Flips a bit of each of these elements; `bit` counts from the sign down."""

    def fault(made) -> None:
        size = made.dtype.itemsize
        words = made.view(f"u{size}")
        words[rows, cols] ^= words.dtype.type(1 << (8 * size - 1 - bit))

    return fault


def put(value: float, rows=slice(0, 1), cols=slice(0, 1)) -> Callable[[Any], None]:
    """Puts a value in the place of these elements."""

    def fault(made) -> None:
        made[rows, cols] = value

    return fault
