"""A device that checks what it multiplies, sums and copies, and does again what came out wrong.

Products and sums are checked by weighted sums of rows that are made on the device
(`devices/checksums.py`, bounds in `checks.py`), copies by the exact sums of their words on both
sides. All is waited for, so that nothing reads what is not checked.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from ..arrays.caller_arrays import module_of
from ..arrays.on_gpus import on_gpu_of, same_bits
from ..catalog import Variant
from ..devices.base import Array, Device, Stream
from ..devices.checksums import Checksums, KernelChecksums, Sums, is_exact, width, words
from ..devices.host_checksums import HostChecksums, line_sums
from ..devices.kernel_launcher import KernelLauncher
from ..devices.long_sides import bound_in_pieces
from ..devices.roles import BoundProduct
from ..devices.wrapped import WrappedDevice
from ..errors import VerificationError
from ..planning.hardware import DeviceSpec
from ..problem import Problem, is_long
from . import staging
from .checks import (
    Checks,
    Expected,
    Fault,
    FloatBounds,
    IntegerBounds,
    Judgement,
    compute_of,
    problem_of,
    total,
)

ATTEMPTS = 3  # at a product, a sum or a copy
AHEAD_BYTES = 8 << 20  # that are summed while they are copied: fewer take no longer than a thread


class CheckedDevice(WrappedDevice):
    """Another device with its products, sums and copies checked. `tally` says what they came to.

    Its calls return when their work is done and right. Raises `VerificationError` for what comes
    out wrong again. A product with beta, or a later piece of K, takes a copy of C besides.
    """

    def __init__(self, device: Device) -> None:
        super().__init__(device)
        self.checks, self.queues = True, False
        real = device.unwrapped
        self.sums: Checksums
        if isinstance(real, KernelLauncher):
            self.sums = KernelChecksums(real)
        else:
            self.sums = HostChecksums(real)
        # This process's other GPUs; not as checked devices, which would refer in a circle.
        self.others: Mapping[int | None, tuple[Device, Checksums]] = {}
        self._tally, self._right = Checks(), 0  # and products that were right at once
        self._lock = threading.Lock()

    def spec(self, dtype: str = "float32") -> DeviceSpec:
        return dataclasses.replace(self.device.spec(dtype), checked=True)

    @property
    def tally(self) -> Checks:
        """What checks came to so far."""
        return self._tally + Checks(products=self._right)

    def count(self, done: Checks) -> None:
        """Adds to the tally."""
        with self._lock:
            self._tally += done

    def count_right(self, products: int = 1) -> None:
        """Adds products that were right at once."""
        with self._lock:
            self._right += products

    def prepare(
        self, variant: Variant, a: Array, b: Array, dtype: str, *, summed: bool = True
    ) -> None:
        self.device.prepare(variant, a, b, dtype, summed=summed)
        self.sums.prepare(a, b, dtype)

    # --- products and sums ------------------------------------------------------------------

    def gemm(
        self, variant: Variant, a: Array, b: Array, c: Array, *,
        alpha: float, beta: float, stream: Stream,
    ) -> None:  # fmt: skip
        self.bound_gemm(variant, a, b, c, alpha=alpha, beta=beta)(stream)

    def bound_gemm(
        self, variant: Variant, a: Array, b: Array, c: Array, *, alpha: float, beta: float
    ) -> Callable[[Stream], None]:
        if not c.size:
            return lambda stream: None
        if self._counts_no(a, c):
            call = self._bound_in_pieces(variant, a, b, c, alpha, beta)
            return lambda stream: call(a, b, c, stream)
        make = self.device.bound_gemm(variant, a, b, c, alpha=alpha, beta=beta)
        bounds = bounds_of(variant, a, b, c, alpha, beta)
        product = functools.partial(self.sums.product, a, b)
        return CheckedWork(self, c, beta, make, product, bounds).run

    def bind(
        self, variant: Variant, a: Array, b: Array, c: Array, *, alpha: float, beta: float
    ) -> BoundProduct | None:
        """As `Products.bind`."""
        if self._counts_no(a, c):
            return self._bound_in_pieces(variant, a, b, c, alpha, beta)
        make = self.device.bind(variant, a, b, c, alpha=alpha, beta=beta)
        if make is None:
            return None
        bounds = bounds_of(variant, a, b, c, alpha, beta)

        def call(a: Array, b: Array, c: Array, stream: Stream) -> None:
            product = functools.partial(self.sums.product, a, b)
            work = CheckedWork(self, c, beta, functools.partial(make, a, b, c), product, bounds)
            work.run(stream)

        return call

    def _counts_no(self, a: Array, c: Array) -> bool:
        """Whether a product has sides that no launch of the checks takes."""
        return isinstance(self.sums, KernelChecksums) and is_long(*c.shape, a.shape[1])

    def _bound_in_pieces(
        self, variant: Variant, a: Array, b: Array, c: Array, alpha: float, beta: float
    ) -> BoundProduct:
        """As `bind`, each piece checked by itself."""

        def bind(a: Array, b: Array, c: Array, beta: float) -> BoundProduct:
            bound = self.bind(variant, a, b, c, alpha=alpha, beta=beta)
            assert bound is not None  # devices with kernels bind all products
            return bound

        return bound_in_pieces(bind, a, b, c, beta)

    def sum(
        self, partials: Sequence[Array], out: Array, *, alpha: float, beta: float, stream: Stream
    ) -> None:
        self.bound_sum(partials, out, alpha=alpha, beta=beta)(stream)

    def bound_sum(
        self, partials: Sequence[Array], out: Array, *, alpha: float, beta: float
    ) -> Callable[[Stream], None]:
        if not out.size:
            return lambda stream: None
        make = self.device.bound_sum(partials, out, alpha=alpha, beta=beta)
        (m, n), name = out.shape, out.dtype.name

        def total(stream: Stream) -> Sums:
            found = [self.sums.sums(partial, stream) for partial in partials]
            return functools.reduce(lambda x, y: Sums(x.of + y.of, x.second + y.second), found)

        bounds: IntegerBounds | FloatBounds
        if is_exact(out.dtype):
            bounds = IntegerBounds(alpha, beta, out.itemsize)
        else:  # alpha and beta may be Inf or NaN
            problem = Problem(m, n, len(partials), name, alpha, beta)
            bounds = FloatBounds(problem, out.dtype, len(partials))
        return CheckedWork(self, out, beta, make, total, bounds, "sum").run

    # --- copies -----------------------------------------------------------------------------

    def copy(self, dst: Array, src: Array, stream: Stream) -> None:
        self.bound_copy(dst, src)(stream)

    def copy_pinned(self, dst: Array, src: Array, stream: Stream) -> None:
        self.copy(dst, src, stream)

    def put(self, dst: Array, src: Array) -> None:
        """dst[...] = src of this GPU, cast and broadcast, on the current stream."""
        xp, fault = module_of(dst), None
        for attempt in range(ATTEMPTS):
            dst[...] = src
            if same_bits(dst, xp.broadcast_to(src, dst.shape).astype(dst.dtype, copy=False)):
                self.count(Checks(copies=1, repeated=int(attempt > 0)))
                return
            fault = Fault(self.name, "copy", (0, len(dst)), (0, dst.shape[1]), 0.0, 0.0)
            self.count(Checks(faults=(fault,)))
        raise VerificationError(f"{fault}, {ATTEMPTS} times")

    def bound_copy(self, dst: Array, src: Array) -> Callable[[Stream], None]:
        if not dst.size:
            return lambda stream: None
        copy = self._copying(dst, src)

        def call(stream: Stream) -> None:
            stream.synchronize()  # what it waits for is on the way on other devices, too
            for attempt in range(ATTEMPTS):
                here = self._copied(copy, dst, src, stream)
                wrong = self._differing(dst, src, stream, here)
                if not wrong:
                    self.count(Checks(copies=1, repeated=int(attempt > 0)))
                    return
                rows, cols = wrong
                fault = Fault(self.name, "copy", rows, cols, 0.0, 0.0)
                self.count(Checks(faults=(fault,)))
            raise VerificationError(f"{fault}, {ATTEMPTS} times")

        return call

    def _copying(self, dst: Array, src: Array) -> Callable[[Stream], None]:
        """The copy: through the link's slots between a GPU and more than a little ordinary
        memory of the host."""
        hosts = [isinstance(x, np.ndarray) for x in (dst, src)]
        if not self.on_gpu or not any(hosts) or dst.nbytes <= staging.SMALL_BYTES:
            return self.device.bound_copy(dst, src)
        return lambda stream: staging.copy_now(self.device, dst, src, stream)

    def _copied(
        self, copy: Callable[[Stream], None], dst: Array, src: Array, stream: Stream
    ) -> np.ndarray | None:
        """Copies, and waits for it. What goes from the host to a GPU is summed meanwhile, if it is
        much: returns the line sums of `src`, which the copy does not change, or None."""
        ahead = self.on_gpu and isinstance(src, np.ndarray) and src.nbytes >= AHEAD_BYTES
        found = words(dst, src) if ahead else None
        if found is None:
            copy(stream)
            stream.synchronize()
            return None
        with ThreadPoolExecutor(1) as thread:  # which has ended, too, when the copy fails
            here = thread.submit(line_sums, found[1])
            copy(stream)
            stream.synchronize()
            return here.result()

    def _differing(
        self, dst: Array, src: Array, stream: Stream, here: np.ndarray | None
    ) -> tuple | None:
        """Rows and columns around what differs between two copies; None if nothing does. `here` are
        the line sums of `src`, where they are made already."""
        found = words(dst, src)
        if found is None and self._has(dst) and self._has(src):
            with self.using(stream):
                same = same_bits(dst, src)
            return None if same else ((0, len(dst)), (0, dst.shape[1]))
        if found is None:  # copies that transpose: row by row of one, and column by column
            turned = [np.ascontiguousarray(_on_host(x)) for x in (dst, src)]
            wrong = turned[0].view("u1") != turned[1].view("u1")
            rows = np.flatnonzero(wrong.any(axis=1))
            return ((0, len(dst)), (0, dst.shape[1])) if len(rows) else None
        there = self.line_sums(found[0], stream)
        here = self.line_sums(found[1], stream) if here is None else here
        rows = np.flatnonzero(there != here)
        if not len(rows):
            return None
        lines = int(rows[0]), int(rows[-1]) + 1
        if dst.shape[0] == len(there) and dst.strides[0] >= dst.strides[1]:
            return lines, (0, dst.shape[1])
        return (0, dst.shape[0]), lines

    def _has(self, x: Array) -> bool:
        """Whether a matrix of a GPU lies on this one."""
        return self.on_gpu and not isinstance(x, np.ndarray) and x.device.id == self.ordinal

    def line_sums(self, x: Array, stream: Stream) -> np.ndarray:
        """The sum of the squares of each row of unsigned words, modulo 2^64: by the device that has
        them, or by this one where nobody here has."""
        if self.on_gpu and isinstance(x, np.ndarray):
            return line_sums(x)
        if not self.on_gpu or x.device.id == self.ordinal:
            with self.using(stream):
                return self.sums.lines(x, stream)
        ordinal = int(x.device.id)
        if ordinal not in self.others:  # another process's memory, or the caller's elsewhere
            if not self.device.reads_memory_of(ordinal):
                return line_sums(_on_host(x))
            with self.using(stream):
                return self.sums.lines(x, stream)
        owner, sums = self.others[ordinal]
        with owner.streams(1) as (its,), owner.using(its):
            return sums.lines(x, its)


def bounds_of(
    variant: Variant, a: Array, b: Array, c: Array, alpha: float, beta: float
) -> FloatBounds | IntegerBounds:
    """Those of a kernel's products of matrices laid out as these."""
    if is_exact(c.dtype):
        return IntegerBounds(alpha, beta, c.itemsize)
    sizes, compute = (*c.shape, a.shape[1]), compute_of(variant, a.dtype.name)
    problem = problem_of(compute, *sizes, a.dtype.name, c.dtype.name, alpha, beta)
    return FloatBounds(problem, c.dtype)


def checked_devices(devices: Sequence[Device]) -> list[Device]:
    """These devices with their work checked."""
    made = [CheckedDevice(device) for device in devices]
    for device in made:
        device.others = {
            other.ordinal: (other.device, other.sums)
            for other in made
            if other.ordinal != device.ordinal
        }
    return list(made)


def checks_of(devices: Sequence[Device]) -> Checks | None:
    """What the checks of these devices have come to so far; None if they check nothing."""
    checked = [device.tally for device in devices if isinstance(device, CheckedDevice)]
    return total(checked) if checked else None


def _on_host(x: Array) -> np.ndarray:
    if isinstance(x, np.ndarray):
        return x
    with on_gpu_of(x):
        return x.get()


class CheckedWork:
    """One product or sum into `c`: `make` makes it, and `product` what its sums should be. `c` may
    be those of a stack of `count`, one below the other, which are made together."""

    def __init__(
        self, device: CheckedDevice, c: Array, beta: float, make: Callable[[Stream], None],
        product: Callable[[Stream], Sums], bounds: FloatBounds | IntegerBounds,
        what: str = "product", count: int = 1,
    ) -> None:  # fmt: skip
        self.device, self.what, self.c, self.beta = device, what, c, beta
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
                found = self.bounds.explained(found, expected, got)
        return found

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


def _all_on_host(expected: Expected, got: Sums) -> tuple[Expected, Sums]:
    def here(x: Sums) -> Sums:
        return Sums(*map(_on_host, x))

    product, before = expected
    return Expected(here(product.whole()), before and here(before)), here(got)
