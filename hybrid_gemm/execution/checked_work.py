"""A product or sum that is checked when it is made, and made again where it came out wrong."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from ..arrays.on_gpus import on_gpu_of
from ..devices.base import Array, Device, Stream
from ..devices.checksums import GROUPS, Checksums, Sums, width
from ..errors import VerificationError
from .checks import Checks, Expected, Fault, FloatBounds, IntegerBounds, Judgement

ATTEMPTS = 3  # at a product, a sum or a copy


class Checking(Protocol):
    """What is asked of a `CheckedDevice`: the device that works, and its sums."""

    device: Device
    sums: Checksums

    @property
    def name(self) -> str: ...

    def count(self, done: Checks) -> None: ...


class CheckedWork:
    """One product or sum into `c`: `make` makes it, and `product` what its sums should be. `c` may
    be those of a stack of `count`, one below the other, which are made together. `operands` are A
    and B, None of a sum."""

    def __init__(
        self, device: Checking, c: Array, beta: float, make: Callable[[Stream], None],
        product: Callable[[Stream], Sums], bounds: FloatBounds | IntegerBounds,
        operands: tuple[Array, Array] | None, count: int = 1,
    ) -> None:  # fmt: skip
        self.device, self.c, self.beta, self.operands = device, c, beta, operands
        self.what = "sum" if operands is None else "product"
        self.count, self.height = count, len(c) // count
        self.make, self.product, self.bounds = make, product, bounds

    def run(self, stream: Stream, *, made: bool = False, before: Array | None = None) -> None:
        """Returns when C is right. Raises `VerificationError` if it is wrong again. Where it is
        `made` already, `before` is a copy of C before, if it was read."""
        raw = self.device.device
        if self.beta != 0 and not made:
            before = raw.empty_like(self.c, self.c.dtype.name)
            raw.copy(before, self.c, stream)
        first: tuple[Judgement, np.ndarray] | None = None
        bits: np.ndarray | None = None
        kept: np.ndarray | None = None  # the sums of C before
        for attempt in range(ATTEMPTS):
            if attempt and before is not None:
                raw.copy(self.c, before, stream)
            ready = made and not attempt
            expected, got = self._attempt(stream, before if ready else self.c, made=ready)
            if first is None and not self.suspicious(expected, got, stream):
                self.device.count(self._one())
                return
            expected, got = _all_on_host(expected, got)
            if expected.before is not None:
                kept = expected.before.of if kept is None else kept
                if kept.tobytes() != expected.before.of.tobytes():
                    raise VerificationError(
                        f"the copy of C that {self.device.name} adds to again is damaged, too"
                    )
            found = self._judged(expected, got)
            bits, last = self.device.sums.bits(self.c, stream), bits
            same = last is not None and bool((bits == last).all())
            if first is None:
                first = found, bits
            elif not found.bad.any() or (same and not found.impossible.any()):
                self._settle(*first, bits)
                return
            elif same:
                break
        raise VerificationError(f"{self._fault(found)}, again when it was made again")

    def _attempt(
        self, stream: Stream, added: Array, *, made: bool
    ) -> tuple[Expected, Sums]:  # fmt: skip
        """Makes C unless it is `made`, and the sums; `added` is C before. Those of A and B are made
        on a stream of their own: on a GPU they run where the product's last blocks leave
        multiprocessors idle."""
        raw, sums = self.device.device, self.device.sums
        before = sums.sums(added, stream) if self.beta != 0 else None
        ready = stream.record()
        if not made:
            self.make(stream)  # first: its blocks are started before those of the checks
        with raw.streams(1) as (beside,), np.errstate(all="ignore"):
            beside.wait(ready)
            with raw.using(beside):
                expected = Expected(self.product(beside), before)
            got = sums.sums(self.c, stream)
            stream.wait(beside.record())
        return expected, got

    def suspicious(self, expected: Expected, got: Sums, stream: Stream) -> bool:
        """Whether a sum is beyond its bound. Waits for the sums."""
        if judge := self.device.sums.judge:
            return judge(self.bounds.limits, *expected, got, stream)
        with np.errstate(all="ignore"):
            return bool(self.bounds.judge(expected, got).bad.any())

    def _judged(self, expected: Expected, got: Sums) -> Judgement:
        """With what the worst case explains; sums in host memory."""
        with np.errstate(all="ignore"):
            found = self.bounds.judge(expected, got)
            if isinstance(self.bounds, FloatBounds):
                found = self.bounds.explained(found, expected, got, self._tops(self.bounds))
        return found

    def _tops(self, bounds: FloatBounds) -> tuple[np.ndarray, np.ndarray] | None:
        """As `FloatBounds.explained` takes them; None where operands are not rounded, and where all
        their squares are numbers."""
        rounded = bounds.rounding.operand_limit < math.inf
        if self.operands is None or not (rounded or bounds.wide):
            return None
        rows, columns = (_top(x, axis) for x, axis in zip(self.operands, (-1, -2), strict=True))
        rows, n = rows.reshape(-1, 1), columns.shape[-1]
        groups = np.zeros((self.count, GROUPS * width(n)))
        groups[:, :n] = columns
        tops = groups.reshape(self.count, GROUPS, -1).max(axis=2)
        return rows, np.repeat(tops, len(rows) // self.count, axis=0)

    def _settle(self, found: Judgement, wrong: np.ndarray, bits: np.ndarray) -> None:
        """Counts what was wrong at first: tiles that came out otherwise."""
        changed, done = wrong != bits, self._one()
        for first in self._suspected(found.bad | changed):
            own = slice(first, first + self.height)
            if not changed[own].any():
                done += Checks(confirmed=1)
                continue
            bad = np.zeros_like(found.bad)
            bad[own] = found.bad[own] & changed[own]
            if not bad.any():
                bad[own] = found.bad[own]
            if not bad.any():  # the device alone found it wrong
                bad[own] = changed[own]
            done += Checks(repeated=1, faults=(self._fault(found._replace(bad=bad)),))
        self.device.count(done)

    def _suspected(self, bad: np.ndarray) -> list[int]:
        """The first rows of the products that have bad sums, or came out otherwise. One that is
        alone is among them where only the device, which rounds otherwise, found it bad."""
        rows = np.flatnonzero(bad.any(axis=1))
        return np.unique(rows // self.height * self.height).tolist() if self.count > 1 else [0]

    def _one(self, **more: Any) -> Checks:
        more[self.what + "s"] = self.count
        return Checks(**more)

    def _fault(self, found: Judgement) -> Fault:
        """The tile around the sum that is furthest off: its group, and rows of its product around
        that are wrong there."""
        if (found.impossible & found.bad).any():
            found = found._replace(bad=found.impossible & found.bad)
        row, group = found.worst()
        first = row // self.height * self.height
        rows = np.flatnonzero(found.bad[first : first + self.height, group])
        wide, n = width(self.c.shape[1]), self.c.shape[1]
        return Fault(
            self.device.name, self.what, (int(rows[0]), int(rows[-1]) + 1),
            (group * wide, min(n, (group + 1) * wide)),
            float(found.error[row, group]), float(found.bound[row, group]),
        )  # fmt: skip


def _top(x: Array, axis: int) -> np.ndarray:
    """The largest magnitudes along an axis, as float64 in host memory; NaN where there is one."""
    with contextlib.nullcontext() if isinstance(x, np.ndarray) else on_gpu_of(x):
        ends = x.max(axis=axis), x.min(axis=axis)
    return np.maximum(*(abs(on_host(end).astype("f8")) for end in ends))


def _all_on_host(expected: Expected, got: Sums) -> tuple[Expected, Sums]:
    def here(x: Sums) -> Sums:
        return Sums(*map(on_host, x))

    product, before = expected
    with np.errstate(all="ignore"):  # shares may be Inf of both signs
        return Expected(here(product.whole()), before and here(before)), here(got)


def on_host(x: Array) -> np.ndarray:
    if isinstance(x, np.ndarray):
        return x
    with on_gpu_of(x):
        return x.get()
