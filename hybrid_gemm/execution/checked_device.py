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

import numpy as np

from ..arrays.caller_arrays import module_of
from ..arrays.on_gpus import same_bits
from ..catalog import Variant
from ..devices.base import Array, Device, Stream
from ..devices.checksums import Checksums, KernelChecksums, Sums, is_exact, words
from ..devices.host_checksums import HostChecksums, line_sums
from ..devices.kernel_launcher import KernelLauncher
from ..devices.long_sides import bound_in_pieces
from ..devices.roles import BoundProduct
from ..devices.wrapped import WrappedDevice
from ..errors import VerificationError
from ..host import forks
from ..planning.hardware import DeviceSpec
from ..problem import Problem, is_long
from . import staging
from .checked_work import ATTEMPTS, CheckedWork, on_host
from .checks import (
    Checks,
    Fault,
    FloatBounds,
    IntegerBounds,
    compute_of,
    problem_of,
    total,
)

AHEAD_BYTES = 8 << 20  # that are summed while they are copied: fewer take no longer than a thread

_counting = threading.RLock()  # a signal's handler that multiplies may come in between


def _forget() -> None:
    global _counting
    _counting = threading.RLock()


forks.forget_in_child(_forget)


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

    def spec(self, dtype: str = "float32", mode: str | None = None) -> DeviceSpec:
        return dataclasses.replace(self.device.spec(dtype, mode), checked=True)

    @property
    def tally(self) -> Checks:
        """What checks came to so far."""
        return self._tally + Checks(products=self._right)

    def count(self, done: Checks) -> None:
        """Adds to the tally."""
        with _counting:
            before = None
            while before is not self._tally:  # the handler counts, too
                before = self._tally
                after = before + done
            self._tally = after

    def count_right(self, products: int = 1) -> None:
        """Adds products that were right at once."""
        with _counting:
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
        return CheckedWork(self, c, beta, make, product, bounds, (a, b)).run

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
            made = functools.partial(make, a, b, c)
            CheckedWork(self, c, beta, made, product, bounds, (a, b)).run(stream)

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
        return CheckedWork(self, out, beta, make, total, bounds, None).run

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
        if found is None:
            if self._has(dst) and self._has(src):
                with self.using(stream):
                    same = same_bits(dst, src)
            else:  # copies that transpose: row by row of one, and column by column
                there, here = (np.ascontiguousarray(on_host(x)).view("u1") for x in (dst, src))
                same = np.array_equal(there, here)
            return None if same else ((0, len(dst)), (0, dst.shape[1]))
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
                return line_sums(on_host(x))
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


def tallies_of(devices: Sequence[Device]) -> list[Checks]:
    """What the checks of each of these devices have come to so far; empty if they check nothing."""
    return [device.tally for device in devices if isinstance(device, CheckedDevice)]


def checks_since(devices: Sequence[Device], before: Sequence[Checks]) -> Checks | None:
    """What the checks of all these devices came to after `before`, which `tallies_of` gave; None
    if they check nothing."""
    now = tallies_of(devices)
    return total(x.since(y) for x, y in zip(now, before, strict=True)) if now else None
