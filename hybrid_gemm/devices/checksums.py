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
from ..catalog import Variant
from ..host.kept import cached_property
from ..problem import NARROW
from .base import Array, Device, Stream
from .kernel_launcher import KernelLauncher

GROUPS = 8
ALARM_BYTES = 4096  # of all alarms of a device
NUMBERS, BITS = 1, 2  # how the kernels read elements


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


# Whether a sum of C is beyond its limits: of limits, the product's sums, those of C before it was
# added to, and C's. Waits for them.
Judge = Callable[[Limits, Sums, Sums | None, Sums, Stream], bool]


class Alarm(NamedTuple):
    """A number in page-locked memory of the host that kernels add to. The lock is held until it is
    read."""

    number: np.ndarray
    lock: threading.Lock


class Weights:
    """Weights of columns, drawn afresh for each device: of either sign and between 1 and 2 for
    floating point, odd numbers for integers, so that no single error is lost."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self._lock = threading.Lock()
        self._kept: dict[tuple[int, str], Array] = {}
        self._random = np.random.default_rng()

    def of(self, cols: int, exact: bool, *, narrow: bool = False) -> Array:
        """For the groups of so many columns, one after the other, on the device; `narrow`: the same
        numbers in float32."""
        if not narrow:
            return self._for(cols, "odd" if exact else "float")
        wide = self._for(cols, "float")
        with self._lock:
            key = wide.size, "narrow"
            if key not in self._kept:
                self._kept[key] = self._made(wide.size, "narrow", wide)
            return self._kept[key]

    def ones(self, cols: int) -> Array:
        """As `of`, of the integer 1."""
        return self._for(cols, "one")

    def _for(self, cols: int, kind: str) -> Array:
        count = 1 << (GROUPS * width(cols) - 1).bit_length()
        with self._lock:
            if (count, kind) not in self._kept:
                self._kept[count, kind] = self._made(count, kind)
            return self._kept[count, kind]

    def _made(self, count: int, kind: str, wide: Array = None) -> Array:
        random, device = self._random, self.device
        if kind == "narrow":
            wide = wide if isinstance(wide, np.ndarray) else wide.get()
            host = wide.astype(np.float32)
        elif kind == "one":
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
    """What a device sums up. `narrow` allows sums of a few elements in float32."""

    def prepare(self, a: Array, b: Array, dtype: str, *, narrow: bool) -> None:
        """Compiles what the checks of a product of such operands in `dtype` need."""

    def sums(self, x: Array, stream: Stream, *, narrow: bool = False) -> Sums:
        """Of each row and group: rows x GROUPS."""

    def product(self, a: Array, b: Array, stream: Stream, *, narrow: bool = False) -> Sums:
        """The sums that `a` times `b` should have: `a` times the sums of b's rows. Of the squares
        of products it is one sum a row, for the largest group."""

    def judge(self, stream: Stream) -> Judge | None:
        """What judges a product's sums on a stream, made ready on this one before; None where the
        device leaves that to the host."""

    def bits(self, x: Array, stream: Stream) -> np.ndarray:
        """As `sums`, of the squares of the elements' bits; in host memory, once they are there."""

    def lines(self, x: Array, stream: Stream) -> np.ndarray:
        """The sum of the squares of each row of unsigned words, modulo 2^64; in host memory, once
        it is there."""


class KernelChecksums:
    """By the kernels `check_sums` and `check_product`."""

    def __init__(self, device: KernelLauncher) -> None:
        self.device, self.weights = device, Weights(device)
        self._variants: dict[tuple[Any, ...], Variant] = {}

    def prepare(self, a: Array, b: Array, dtype: str, *, narrow: bool) -> None:
        of_a, of_b = ((layout(x) or "n")[0] for x in (a, b))
        self._kernel("check_product", NUMBERS, dtype, of_a, narrow)
        self._kernel("check_sums", NUMBERS, dtype, of_b, narrow, WRITE=4 if narrow else 8)
        for result in {dtype, "float32" if dtype in NARROW else dtype}:
            self._kernel("check_sums", NUMBERS, result, "n", narrow, WRITE=8)
        self._kernel("check_sums", BITS, "int32", "n", narrow=False, WRITE=8)
        self.device.function(self._judge, "float64")

    @cached_property
    def _judge(self) -> Variant:
        return catalog.helper("check_judge").kernel.variant({"GROUPS": GROUPS})

    def judge(self, stream: Stream) -> Judge:
        bad = self.device.empty(1, 1, "uint32")
        bad[...] = 0

        def beyond(
            limits: Limits, product: Sums, before: Sums | None, got: Sums, stream: Stream
        ) -> bool:  # fmt: skip
            self.count_beyond(limits, product, before, got, bad, stream)
            return bool(self._fetched(bad, stream)[0, 0])

        return beyond

    def count_beyond(
        self, limits: Limits, product: Sums, before: Sums | None, got: Sums, bad: Any,
        stream: Stream,
    ) -> None:  # fmt: skip
        """Adds to the number at `bad`, an array or an address, how many sums are beyond."""
        rows, shares = len(got.of), product.of.size // got.of.size
        sums = *product, *got, *(before or got)
        args = [np.int32(rows), np.int32(shares), *sums, *map(np.float64, limits), bad]
        launch = self._judge.launch(rows, 1, 0, "float64")
        self.device.launch(self.device.function(self._judge, "float64"), launch, args, stream)

    def alarm(self) -> Alarm:
        """The next of some, which are taken in turns."""
        return next(self._alarms)

    @cached_property
    def _alarms(self) -> Iterator[Alarm]:
        words = self.device.pinned(ALARM_BYTES).view(np.uint32)
        words[:] = 0
        return itertools.cycle(
            [Alarm(words[i : i + 1], threading.Lock()) for i in range(len(words))]
        )

    def sums(
        self, x: Array, stream: Stream, *, narrow: bool = False, into: Sums | None = None
    ) -> Sums:
        return self._sums(x, NUMBERS, is_exact(x.dtype), stream, narrow=narrow, into=into)

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
        self, x: Array, read: int, exact: bool, stream: Stream, weights: Array | None = None, *,
        narrow: bool = False, write: int = 8, into: Sums | None = None,
    ) -> Sums:  # fmt: skip
        (rows, cols), (order, ld) = x.shape, stored(x)
        made = into or Sums(*(self._room(rows, exact, write) for _ in "12"))
        narrow = narrow and x.dtype.name in _NARROW
        if not rows:
            return made
        dtype = _OF_KERNELS.get(x.dtype.name, x.dtype.name)
        function, variant = self._kernel("check_sums", read, dtype, order, narrow, WRITE=write)
        if weights is None:
            weights = self.weights.of(cols, exact, narrow=narrow)
        sizes = np.int32(rows), np.int32(cols), np.int32(width(cols))
        args = [*sizes, x, np.int64(ld), weights, *made]
        self.device.launch(function, variant.launch(rows, cols, 0, dtype), args, stream)
        return made

    def product(self, a: Array, b: Array, stream: Stream, *, narrow: bool = False) -> Sums:
        if is_exact(a.dtype):
            rows = self.sums(b, stream)
            one, other = (self._product(a, x, x, stream, narrow).of.sum(axis=0) for x in rows)
            return Sums(one, other)
        rows = self.of_rows(b, stream, narrow=narrow)
        return self._product(a, *rows, stream, narrow)

    def of_rows(
        self, b: Array, stream: Stream, *, narrow: bool, into: Sums | None = None
    ) -> Sums:  # fmt: skip
        """The sums of B's rows, of floating point, as `of_products` takes them: of `bytes_of_rows`
        each."""
        write = self.bytes_of_rows(b, narrow)
        return self._sums(b, NUMBERS, False, stream, narrow=narrow, write=write, into=into)

    def bytes_of_rows(self, b: Array, narrow: bool) -> int:
        """4 or 8."""
        return 4 if narrow and b.dtype.name in _NARROW else 8

    def of_products(
        self, a: Array, rows: Sums, stream: Stream, *, narrow: bool, into: Sums | None = None
    ) -> Sums:
        """The sums that A times B should have, by those of B's rows, in shares."""
        return self._product(a, *rows, stream, narrow, into)

    def shares(self, a: Array, narrow: bool) -> int:
        """Those of `of_products`."""
        (rows, k), dtype = a.shape, a.dtype.name
        _, variant = self._kernel("check_product", NUMBERS, dtype, stored(a)[0], narrow)
        return variant.launch(rows, k, k, dtype).grid[1]

    def _product(
        self, a: Array, sums: Array, squares: Array, stream: Stream, narrow: bool,
        into: Sums | None = None,
    ) -> Sums:  # fmt: skip
        (rows, k), (order, ld) = a.shape, stored(a)
        exact = is_exact(a.dtype)
        function, variant = self._kernel("check_product", NUMBERS, a.dtype.name, order, narrow)
        launch = variant.launch(rows, k, k, a.dtype.name)
        shares = launch.grid[1]
        if into is None:
            flat = self._room(-(-shares * rows // GROUPS), exact).reshape(-1)[: shares * rows]
            into = Sums(self._room(shares * rows, exact), flat)
        args = [np.int32(rows), np.int32(k), a, np.int64(ld), sums, squares, *into]
        self.device.launch(function, launch, args, stream)
        made, flat = into
        return Sums(made.reshape(shares, rows, GROUPS), flat.reshape(shares, rows, 1))

    def _room(self, rows: int, exact: bool, size: int = 8) -> Array:
        return self.device.empty(rows, GROUPS, "uint64" if exact else f"float{8 * size}")

    def _kernel(
        self, role: str, read: int, dtype: str, order: str, narrow: bool, **more: int
    ) -> tuple[Any, Variant]:
        narrow = narrow and dtype in _NARROW
        params = {"GROUPS": GROUPS, "READ": read, "PART": 4 if narrow else 8, **more}
        key = role, *params.values()
        if key not in self._variants:
            self._variants[key] = catalog.helper(role).kernel.variant(params)
        variant = self._variants[key]
        return self.device.function(variant, dtype, order + "n"), variant


_NARROW = ("float16",)  # whose sums may be float32 in part
_OF_KERNELS = {"uint16": "float16", "uint32": "int32", "uint64": "int64"}  # read as bits


def words(x: Array, y: Array) -> tuple[Array, Array] | None:
    """Two matrices of one shape and dtype as unsigned words, row by row as both are stored: of 4
    bytes where rows are made of these, which are summed fastest, and otherwise of their elements'
    size. None where the matrices have no storage order in common."""
    for order in "nt":
        if leading(x, order) and leading(y, order):
            lines = [v if order == "n" else v.T for v in (x, y)]
            size = x.dtype.itemsize
            bytes_of = lines[0].shape[1] * size, *(v.strides[0] for v in lines)
            fours = not any(v % 4 for v in (*bytes_of, *map(address, lines)))
            # CuPy makes words of another size of whole matrices only.
            fours &= all(isinstance(v, np.ndarray) or v.flags.c_contiguous for v in lines)
            kind = "u4" if fours else f"u{size}"
            return lines[0].view(kind), lines[1].view(kind)
    return None
