"""How far the sums of a right product may be from those of its operands, and what checks came to.

The row of a group of columns (`devices/checksums.py`) has two bounds. Beyond the first, which is
statistical, the product is made again: a product that changes was damaged, and the new one is
taken if it is within the bound. One that comes out the same, bit by bit, is taken as long as it is
within the second bound, of the worst case. docs/notes/verification.md has both as inequalities.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from ..catalog import Variant
from ..devices.base import Array
from ..devices.checksums import GROUPS, ExactLimits, Limits, Sums, width
from ..errors import counted
from ..host.kept import cached_property
from ..problem import NARROW, Problem
from ..verify import rounding

MOST_FAULTS = 64  # that checks list: a device that is always wrong makes more and more
_SMALL = 1e-280  # squares of float64 below it may be zero
_LEAST = 2.0**-1074  # of float64


@dataclasses.dataclass(frozen=True)
class Fault:
    """A tile that was wrong and came out otherwise when it was made again: where, what kind of
    work ("product", "sum", "copy" or "partial", one that travelled between ranks), and by how much
    its weighted sum was off (0 for copies and partials that travelled)."""

    device: str
    what: str
    rows: tuple[int, int]
    cols: tuple[int, int]
    magnitude: float
    limit: float

    def __str__(self) -> str:
        (r, rows), (c, cols) = self.rows, self.cols
        off = "with other bits"
        if self.what not in ("copy", "partial"):
            off = f"off by {self.magnitude:.3g} (limit {self.limit:.3g})"
        if not math.isfinite(self.magnitude):
            off = "with Inf or NaN"
        return (
            f"{self.what} on {self.device}: rows {r} to {rows - 1}, columns {c} to {cols - 1} "
            f"of its block, {off}"
        )


@dataclasses.dataclass(frozen=True)
class Checks:
    """What was checked: blocks that were multiplied, sums of partials, copies, of which partials
    that travelled between ranks are some. `repeated` counts
    those that were wrong and were made again, `confirmed` those that looked wrong and came out
    the same; `faults` lists the last of the wrong ones, `MOST_FAULTS` at most."""

    products: int = 0
    sums: int = 0
    copies: int = 0
    repeated: int = 0
    confirmed: int = 0
    faults: tuple[Fault, ...] = ()

    def __add__(self, other: Checks) -> Checks:
        return self._with(other, 1, (self.faults + other.faults)[-MOST_FAULTS:])

    def since(self, before: Checks) -> Checks:
        """What came after `before`, on the same device."""
        known = before.faults[-1] if before.faults else None  # itself: another may be equal
        newer = list(itertools.takewhile(lambda fault: fault is not known, reversed(self.faults)))
        return self._with(before, -1, tuple(reversed(newer)))

    def _with(self, other: Checks, sign: int, faults: tuple[Fault, ...]) -> Checks:
        counts = {x: getattr(self, x) + sign * getattr(other, x) for x in COUNTS}
        return dataclasses.replace(Checks(faults=faults), **counts)

    def as_data(self) -> dict[str, Any]:
        """For JSON."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        copies = f"{self.copies} cop{'y' if self.copies == 1 else 'ies'}"
        confirmed = f", {self.confirmed} confirmed by a second" if self.confirmed else ""
        return (
            f"{counted(self.products, 'product')}, {counted(self.sums, 'sum')}, {copies} checked, "
            f"{self.repeated} wrong and made again{confirmed}"
        )


COUNTS = ("products", "sums", "copies", "repeated", "confirmed")


def compute_of(variant: Variant, operands: str) -> str:
    """The arithmetic of a kernel, with operands of this dtype."""
    if variant.kernel.role == "tensor" and operands == "float32":
        return "fp32x3" if variant.params.get("TERMS") == 3 else "tf32"
    return "fp32"


@functools.lru_cache(maxsize=4096)
def problem_of(
    compute: str, m: int, n: int, k: int, operands: str, out: str, alpha: float, beta: float
) -> Problem:
    """The problem that is multiplied in an arithmetic, of operands and C of these dtypes."""
    dtype = "float32" if operands in NARROW else operands
    return Problem(m, n, k, dtype, alpha, beta, out, compute, operands)


class Expected(NamedTuple):
    """The sums that rows of C should have: `product` of op(A) op(B), `before` of C before."""

    product: Sums
    before: Sums | None


class Judgement(NamedTuple):
    """For each row and group: whether the sum of C is beyond its bound, its error, that bound,
    and whether it is beyond what the worst case, or the range of the dtype, explains."""

    bad: Array
    error: Array
    bound: Array
    impossible: Array

    def worst(self) -> tuple[int, int]:
        """Of the bad sums that are furthest off: row and group. In host memory only."""
        with np.errstate(all="ignore"):
            ratio = np.where(self.bad, self.error.astype("f8") / self.bound, -1.0)
        flat = int(np.argmax(np.nan_to_num(ratio, nan=np.inf, posinf=np.inf)))
        row, group = divmod(flat, GROUPS)
        return row, group


class IntegerBounds:
    """Sums of integers are right or wrong."""

    def __init__(self, alpha: float, beta: float, itemsize: int) -> None:
        alpha, beta = (int(x) % 2**64 for x in (alpha, beta))
        self.limits = ExactLimits(alpha, beta, 2 ** (8 * itemsize) - 1)

    def judge(self, expected: Expected, got: Sums) -> Judgement:
        alpha, beta, mask = map(np.uint64, self.limits)
        product, off = expected.product.whole(), []
        for i in range(2):
            wrong = product[i] * alpha - got[i]
            if expected.before is not None:
                wrong += expected.before[i] * beta
            off.append(wrong & mask)
        bad = (off[0] | off[1]) != 0
        return Judgement(bad, off[0], bad * 0.0, bad)


class FloatBounds:
    """Bounds from magnitudes that were measured: the squares of products, and of C.

    `parts` is for sums of so many partials; None for products, of the problem's k.
    """

    def __init__(self, problem: Problem, out: np.dtype, parts: int | None = None) -> None:
        scalar = np.dtype(problem.dtype).type
        self.alpha, self.beta = float(scalar(problem.alpha)), float(scalar(problem.beta))
        self.rounding = r = rounding.of(problem, out)
        self.width = width(problem.n)
        self.k = problem.k if parts is None else parts
        self.variances = r.variances(self.k, self.width + self.k)
        if parts is not None:
            self.variances = (r.unit**2 * parts**2, *self.variances[1:])
        tests = max(1, problem.m * GROUPS)
        self.count = rounding.deviations(tests) * rounding.of_block(self.width)
        self.wide = problem.dtype == "float64"
        lost = abs(self.beta) * _LEAST if self.wide else 0.0  # where sums of C before have no bits
        self.tiny = 4 * self.width * (r.tiny + lost)

    def judge(self, expected: Expected, got: Sums) -> Judgement:
        """Works where the sums are."""
        product, before = expected.product.whole(), expected.before
        of_products, of_sums, of_c, of_before = self.variances
        wanted, squares, twice = self.alpha * product.of, got.second, 1
        error = got.of - wanted
        # From the right: factors whose squares are Inf leave sums of nothing 0.
        variance = self.alpha * (self.alpha * (of_products * product.second)) + of_c * squares
        if before is not None:
            error -= self.beta * before.of
            added = self.beta * (self.beta * before.second)
            variance += of_before * added
            squares, twice = squares + added, 2
        variance += twice * of_sums * squares
        error = abs(error)
        bound = self.count * (variance / 3) ** 0.5 + self.tiny
        bad = ~(error <= bound) | (bound == math.inf)
        return Judgement(bad, error, bound, bad)

    @cached_property
    def limits(self) -> Limits:
        """The same, as devices take it."""
        factor = self.count**2 / 3
        of_products, of_sums, of_c, of_before = (x * factor for x in self.variances)
        of_products *= self.alpha * self.alpha  # inf where that is too large; ** would raise
        return Limits(self.alpha, self.beta, of_products, of_sums, of_c, of_before, self.tiny)

    def explained(
        self, found: Judgement, expected: Expected, got: Sums,
        tops: tuple[np.ndarray, np.ndarray] | None = None,
    ) -> Judgement:  # fmt: skip
        """What the worst case does not explain; sums in host memory. `tops` are the largest
        magnitudes of each row of A, and of the columns of each group of B, where operands are
        rounded, or their squares may vanish from among those that were added up."""
        r, (product, before) = self.rounding, expected
        unscaled = np.sqrt(self.k * product.second)  # of any element, before alpha
        magnitude = unscaled * abs(self.alpha)
        sums, squares = magnitude * math.sqrt(self.width), np.sqrt(got.second)
        unjudged = ~np.isfinite(product.of) | ~np.isfinite(magnitude)
        if before is not None:
            unjudged = unjudged | ~np.isfinite(before.of)
            added = abs(self.beta) * np.sqrt(before.second)
            magnitude, squares = magnitude + added, squares + added
        if not math.isfinite(self.beta):
            unjudged = np.ones_like(unjudged)
        overflows = (magnitude > min(r.limit, r.out_limit) / 4) | (unscaled > r.limit / 4)
        unjudged = unjudged | (~np.isfinite(got.of) & overflows)
        if self.wide:
            for of in (product, got):  # of zeros nothing is lost
                unjudged = unjudged | ((of.second < _SMALL) & (of.of != 0))
            lost = abs(product.of) > 2 * unscaled * math.sqrt(self.width)  # by Cauchy and Schwarz
            unjudged = unjudged | lost | ~np.isfinite(squares)
        relative = 2 * (self.k + 3) * r.unit + r.operands + r.cut * self.k
        bound = found.bound + relative * sums
        bound = bound + (r.unit + r.out + 3 * r.last) * math.sqrt(self.width) * squares
        if tops is not None:
            unjudged |= ~np.isfinite(got.of) & (np.maximum(*tops) >= r.operand_limit)
            partners = self.k * 2 * self.width * sum(tops)  # of operands below the normal numbers
            below = r.below + (relative * math.sqrt(_SMALL) if self.wide else 0.0)
            bound = bound + abs(self.alpha) * below * partners
        impossible = found.bad & ~(found.error <= bound) & ~unjudged
        return found._replace(bound=bound, impossible=impossible)


def total(tallies: Iterable[Checks]) -> Checks:
    """All together."""
    return functools.reduce(lambda x, y: x + y, tallies, Checks())
