"""Weighted sums of matrices, by which products and copies are checked, on the device itself.

A matrix with n columns has `GROUPS` groups of `width(n)` columns. Sums of floating point are
float64, those of integers and of bits uint64 (modulo 2^64).
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

import numpy as np

from .. import catalog
from ..arrays.strides import address, layout, leading, stored
from ..catalog import Launch, Variant
from ..host.kept import cached_property
from ..problem import INT_LIMIT, NARROW
from .base import Array, Device, Stream
from .kernel_launcher import KernelLauncher
from .long_sides import pieces

GROUPS = 8
ALARM_BYTES = 4096  # of all alarms of a device
NUMBERS, BITS = 1, 2  # how the kernels read elements
GIVEN, MADE, STACKED = 1, 2, 3  # the sums of B's rows, in check_product
OF_A_PAIR = 3  # launches of the checks of a product that is not in a stack
# Of checks on an H200, as bytes of sums that are written or read meanwhile: a warp's sums of 8
# columns of a row of B, a byte of B read once for all, and a launch; and the k from which on all
# multiprocessors are busy. Fitted to docs/results/checked_fit_before_h200.json and
# checked_fit_forms_h200.json.
EIGHT_COLUMNS, OF_B, LAUNCH_BYTES, BUSY_K = 24, 0.3, 8 << 20, 1 << 16


def below(x: Array) -> Array:
    """A stack without gaps as one matrix: its matrices one below the other. A matrix as it is."""
    return x.reshape(-1, x.shape[2]) if x.ndim == 3 else x


def width(cols: int) -> int:
    """Columns of a group; the last groups may have fewer, or none."""
    return max(8, -(-cols // (8 * GROUPS)) * 8)


class Sums(NamedTuple):
    """For each row and group the weighted sum of the elements, and a `second` sum: that of the
    squares of what was added, or for integers one by other weights. Those of products may come in
    shares that are to be added up, along a first dimension."""

    of: Array
    second: Array

    def whole(self) -> Sums:
        """With shares added up."""
        return Sums(*(x.sum(axis=0) for x in self)) if self.of.ndim == 3 else self


class Limits(NamedTuple):
    """How far sums of floating point may be from those they should be: alpha, beta; variances per
    square of a product, of a sum, of C and of C before, times the square of how many deviations are
    allowed; and what is allowed besides."""

    alpha: float
    beta: float
    of_products: float
    of_sums: float
    of_c: float
    of_before: float
    tiny: float


class ExactLimits(NamedTuple):
    """What sums of integers may differ by: alpha and beta modulo 2^64, and the bits of C, in which
    they have to be equal."""

    alpha: int
    beta: int
    mask: int


# Where the sums of a product lie: of B's rows, if they are made, and of the product.
Rooms = tuple[Sums, Sums]

# Whether a sum of C is beyond its limits: of limits, the product's sums, those of C before it was
# added to, and C's. Waits for them.
Judge = Callable[[Limits | ExactLimits, Sums, Sums | None, Sums, Stream], bool]


class Alarm(NamedTuple):
    """A number in page-locked memory of the host that kernels add to. Who waits for them holds the
    lock until it is read, and 0 again."""

    number: np.ndarray
    lock: threading.Lock
    place: Any  # the number as kernels take it


class Weights:
    """Weights of columns, drawn afresh for each device: of either sign and between 1 and 2 for
    floating point, odd numbers for integers, so that no single error is lost."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self._kept: dict[tuple[int, str], Array] = {}
        self._random = np.random.default_rng()

    def of(self, cols: int, exact: bool) -> Array:
        """For the groups of so many columns, one after the other, on the device."""
        return self._for(cols, "odd" if exact else "float")

    def ones(self, cols: int) -> Array:
        """As `of`, of the integer 1."""
        return self._for(cols, "one")

    def _for(self, cols: int, kind: str) -> Array:
        key = 1 << (GROUPS * width(cols) - 1).bit_length(), kind
        # Without a lock, for which a signal's handler or a forked child could wait for ever: where
        # two make the same weights at once, both take those that are there first.
        if key not in self._kept:
            self._kept.setdefault(key, self._made(*key))
        return self._kept[key]

    def _made(self, count: int, kind: str) -> Array:
        random, device = self._random, self.device
        if kind == "one":
            host = np.ones(count, np.uint64)
        elif kind == "odd":
            host = random.integers(0, 2**64, count, np.uint64) | np.uint64(1)
        else:
            host = (1 + random.integers(0, 128, count) / 128) * random.choice([-1.0, 1.0], count)
        stream = device.stream()
        # Its own memory: what another stream gave back may still be in use there.
        with device.using(stream):
            made = device.empty(1, count, host.dtype.name)
            device.copy(made, host[None], stream)
            stream.synchronize()
        return made[0]


def is_exact(dtype: np.dtype) -> bool:
    """Whether sums of such elements are exact: those of integers, modulo 2^64."""
    return dtype.kind in "iu"


class Checksums(Protocol):
    """What a device sums up."""

    @property
    def judge(self) -> Judge | None:
        """None where the device leaves that to the host."""

    def prepare(self, a: Array, b: Array, dtype: str) -> None:
        """Compiles what the checks of a product of such operands in `dtype` need."""

    def sums(self, x: Array, stream: Stream) -> Sums:
        """Of each row and group: rows x GROUPS."""

    def product(self, a: Array, b: Array, stream: Stream) -> Sums:
        """The sums that `a` times `b` should have: `a` times the sums of b's rows. Those of the
        squares of products may be one for each row, of the largest group."""

    def bits(self, x: Array, stream: Stream) -> np.ndarray:
        """As `sums`, of the squares of the elements' bits; in host memory, once they are there."""

    def lines(self, x: Array, stream: Stream) -> np.ndarray:
        """The sum of the squares of each row of unsigned words, modulo 2^64; in host memory, once
        it is there."""


class KernelChecksums:
    """By the kernels `check_sums` and `check_product`. Sums are also made of stacks, A and B with
    even steps and C without gaps: those of all their matrices, one below the other."""

    def __init__(self, device: KernelLauncher) -> None:
        self.device, self.weights = device, Weights(device)
        self._variants: dict[tuple[str, int, int | None], Variant] = {}

    def prepare(self, a: Array, b: Array, dtype: str) -> None:
        of_a, of_b = ((layout(x) or "n")[0] for x in (a, b))
        if self._alone(a, b.shape[1]):
            self._kernel("check_product", NUMBERS, dtype, of_a + of_b, of_b=MADE)
        else:
            self._kernel("check_product", NUMBERS, dtype, of_a + "n", of_b=GIVEN)
            self._kernel("check_sums", NUMBERS, dtype, of_b + "n")
        for result in {dtype, "float32" if dtype in NARROW else dtype}:
            self._kernel("check_sums", NUMBERS, result, "nn")
        self._kernel("check_sums", BITS, "int32", "nn")
        self.device.function(self._judges[is_exact(np.dtype(dtype))], "float64")

    @cached_property
    def _judges(self) -> list[Variant]:
        """Of sums of floating point, and of integers."""
        judge = catalog.helper("check_judge").kernel
        return [judge.variant({"GROUPS": GROUPS, "SUMS": sums}) for sums in (1, 2)]

    def judge(
        self, limits: Limits | ExactLimits, product: Sums, before: Sums | None, got: Sums,
        stream: Stream,
    ) -> bool:  # fmt: skip
        number, lock, place = self.alarm()
        with lock:
            self.count_beyond(limits, product, before, got, place, stream)
            stream.synchronize()
            found, number[0] = bool(number[0]), 0
        return found

    def count_beyond(
        self, limits: Limits | ExactLimits, product: Sums, before: Sums | None, got: Sums,
        place: Any, stream: Stream,
    ) -> None:  # fmt: skip
        """Adds to an alarm's number how many sums are beyond."""
        rows, shares = len(got.of), product.of.size // got.of.size
        sums = *product, *got, *(before or got)
        exact = isinstance(limits, ExactLimits)
        judge, number = self._judges[exact], np.uint64 if exact else np.float64
        args = [np.int32(rows), np.int32(shares), *sums, *map(number, limits), place]
        launch = judge.launch(rows, 1, shares, "float64")
        self.device.launch(self.device.function(judge, "float64"), launch, args, stream)

    def alarm(self) -> Alarm:
        """The next of some, which are taken in turns."""
        return next(self._alarms)

    @cached_property
    def _alarms(self) -> Iterator[Alarm]:
        words = self.device.pinned(ALARM_BYTES).view(np.uint32)
        words[:] = 0
        numbers = [words[i : i + 1] for i in range(len(words))]
        places = [np.uint64(address(x)) if self.device.on_gpu else x for x in numbers]
        return itertools.cycle(
            [Alarm(x, threading.Lock(), place) for x, place in zip(numbers, places, strict=True)]
        )

    def sums(self, x: Array, stream: Stream, into: Sums | None = None) -> Sums:
        return self._sums(below(x), NUMBERS, is_exact(x.dtype), stream, into=into)

    def bits(self, x: Array, stream: Stream) -> np.ndarray:
        return self._fetched(self._sums(x, BITS, True, stream).of, stream)

    def lines(self, x: Array, stream: Stream) -> np.ndarray:
        ones = self.weights.ones(x.shape[1])
        return self._fetched(self._sums(x, BITS, True, stream, ones).of, stream).sum(axis=1)

    def _fetched(self, made: Array, stream: Stream) -> np.ndarray:
        host = np.empty(made.shape, made.dtype)
        self.device.copy(host, made, stream)
        stream.synchronize()
        return host

    def _sums(
        self, x: Array, read: int, exact: bool, stream: Stream, weights: Array | None = None,
        into: Sums | None = None,
    ) -> Sums:  # fmt: skip
        (rows, cols), (order, ld) = x.shape, stored(x)
        made = into or Sums(*(self._room(rows, exact) for _ in "12"))
        if not rows:
            return made
        dtype = _OF_KERNELS.get(x.dtype.name, x.dtype.name)
        function, variant = self._kernel("check_sums", read, dtype, order + "n")
        if weights is None:
            weights = self.weights.of(cols, exact)
        for part in pieces(rows):
            count, sums = part.stop - part.start, [y[part] for y in made]
            sizes = np.int32(count), np.int32(cols), np.int32(width(cols))
            launch = variant.launch(count, cols, 0, dtype)
            room = self.device.scratch(launch, "float64", stream)
            args = [*sizes, x[part], np.int64(ld), weights, *sums, *room]
            self.device.launch(function, launch, args, stream)
        return made

    def product(self, a: Array, b: Array, stream: Stream, into: Rooms | None = None) -> Sums:
        """As `Checksums.product`, in shares of k; `into` where the sums shall lie."""
        into_b, into_product = into or (None, None)
        (rows, k), cols = a.shape[-2:], b.shape[-1]
        exact, dtype, stack = is_exact(a.dtype), a.dtype.name, a.ndim == 3
        order, of_a = _lying(a)
        launch = self._launch(a)
        (_, shares, count) = launch.grid
        made = into_product or Sums(*(self._room(shares * count * rows, exact) for _ in "12"))
        if stack or self._alone(a, cols):
            (order_b, of_b), form = _lying(b), STACKED if stack else MADE
            of_b = [np.int32(cols), np.int32(width(cols)), *of_b, self.weights.of(cols, exact)]
        else:
            order_b, form = "n", GIVEN
            of_b = list(self._sums(b, NUMBERS, exact, stream, into=into_b))
        function, _ = self._kernel("check_product", NUMBERS, dtype, order + order_b, of_b=form)
        args = [np.int32(rows), np.int32(k), *of_a, *of_b, *made]
        self.device.launch(function, launch, args, stream)
        return Sums(*(x.reshape(shares, count * rows, GROUPS) for x in made))

    def rooms(self, a: Array, cols: int) -> tuple[int, int]:
        """Rows of sums that `product` has of B, if it has these, and of the product."""
        rows, k = a.shape[-2:]
        (_, shares, count) = self._launch(a).grid
        return 0 if a.ndim == 3 or self._alone(a, cols) else k, shares * count * rows

    def _launch(self, a: Array) -> Launch:
        rows, k = a.shape[-2:]
        launch = self._variant("check_product", NUMBERS, GIVEN).launch(rows, k, k, a.dtype.name)
        return launch.cut(len(a)) if a.ndim == 3 else launch

    def worth_stacking(self, a: Array, cols: int) -> bool:
        """Whether the checks of a stack take less time together than pair by pair: the sums of B's
        rows are made by each warp that needs them, and launches saved."""
        count, rows, k = a.shape
        return _bytes_alone(rows, cols, count * k) < OF_A_PAIR * count * LAUNCH_BYTES

    def _alone(self, a: Array, cols: int) -> bool:
        """Whether it takes less time if each warp of `check_product` makes the sums of B's rows
        that it needs, than if they are made once for all, and written and read; in bytes of these
        sums. Few shares of k keep few multiprocessors busy."""
        (rows, k), sums = a.shape, 2 * GROUPS * 8
        blocks = -(-rows // 256)  # which read them
        once = k * (cols * a.itemsize * OF_B + sums * (1 + blocks)) + LAUNCH_BYTES
        return _bytes_alone(rows, cols, k) < once

    def _room(self, rows: int, exact: bool) -> Array:
        return self.device.empty(rows, GROUPS, "uint64" if exact else "float64")

    def _kernel(
        self, role: str, read: int, dtype: str, orders: str, *, of_b: int | None = None
    ) -> tuple[Any, Variant]:
        variant = self._variant(role, read, of_b)
        return self.device.function(variant, dtype, orders), variant

    def _variant(self, role: str, read: int, of_b: int | None) -> Variant:
        if (role, read, of_b) not in self._variants:
            params = {"GROUPS": GROUPS, "READ": read} | ({"SUMS": of_b} if of_b else {})
            self._variants[role, read, of_b] = catalog.helper(role).kernel.variant(params)
        return self._variants[role, read, of_b]


def _bytes_alone(rows: int, cols: int, k: int) -> float:
    """What the sums of B's rows take that warps make for themselves, for so many rows of A."""
    warps, groups = -(-rows // 32), -(-cols // 8)
    return k * warps * groups * EIGHT_COLUMNS * max(1, BUSY_K / max(1, k))


def _lying(x: Array) -> tuple[str, list[Any]]:
    """The storage order of a matrix, or of those of a stack, and how kernels are told where they
    lie: the first, its leading dimension, and the step from one to the next."""
    order, ld = stored(x[0] if x.ndim == 3 else x)
    steps = [np.int64(step // x.itemsize) for step in x.strides[:-2]]
    return order, [x, np.int64(ld), *steps]


_OF_KERNELS = {"uint16": "float16", "uint32": "int32", "uint64": "int64"}  # read as bits


def words(x: Array, y: Array) -> tuple[Array, Array] | None:
    """Two matrices of one shape and dtype as unsigned words, row by row as both are stored: of 4
    bytes, which are summed fastest, where rows are made of these and of no more than `INT_LIMIT`,
    and otherwise of their elements' size. None where the matrices have no storage order in common,
    and for rows of single bytes, which no kernel sums."""
    for order in "nt":
        if leading(x, order) and leading(y, order):
            lines = [v if order == "n" else v.T for v in (x, y)]
            size = x.dtype.itemsize
            bytes_of = lines[0].shape[1] * size, *(v.strides[0] for v in lines)
            fours = not any(v % 4 for v in (*bytes_of, *map(address, lines)))
            fours &= bytes_of[0] // 4 <= INT_LIMIT  # kernels count words in `int`
            # CuPy makes words of another size of whole matrices only.
            fours &= all(isinstance(v, np.ndarray) or v.flags.c_contiguous for v in lines)
            if size == 1 and not fours:
                return None
            kind = "u4" if fours else f"u{size}"
            return lines[0].view(kind), lines[1].view(kind)
    return None
