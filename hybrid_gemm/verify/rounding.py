"""How far a right product may be from the exact one: docs/notes/verification.md derives it."""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from ..kernel_choice import compute_modes
from ..problem import NARROW, Problem, finfo

ALARMS = 1e-6  # how likely all the tests of a verdict together are to fail a right product
_TF32_LIMIT = (2 - 2.0**-11) * 2.0**127  # halfway from its largest number to 2^128
_TF32_BELOW = 2.0**-137  # half of its smallest number
PARTIAL_SUMS = 16  # places along k where the sums so far are looked at


@dataclasses.dataclass(frozen=True)
class Rounding:
    """Relative errors: `unit` of an addition, `operands` of a product whose operands are rounded
    first (of this, `alike` may be the same in all of them), `cut` of the sum for each element of k
    that a tensor core adds, `out` of C's own dtype, `last` of what alpha and beta do. Below `tiny`
    numbers may become zero; sums beyond `limit` are Inf, and C beyond `out_limit`. Operands from
    `operand_limit` on are rounded to Inf, and below the normal numbers lose up to `below` each."""

    unit: float
    operands: float
    alike: float
    cut: float
    out: float
    last: float
    tiny: float
    limit: float
    out_limit: float
    growth: float
    operand_limit: float = math.inf
    below: float = 0.0

    def sums(self, walk, squares, count: float):
        """Bound on the sums' random errors: `count` standard deviations, from the sum of the
        squares of all partial sums, and of all products."""
        return count * ((self.growth * self.unit) ** 2 * walk + self.operands**2 * squares) ** 0.5

    def variances(self, k: int, width: int) -> tuple[float, float, float, float]:
        """Three times the variance of an element's error, per square of: a product of elements,
        the sum of products, C, beta C before. The sums that it is compared with have `width`
        elements, and additions in float64."""
        unit, cut = (self.growth * self.unit) ** 2, 3 * (self.cut * k) ** 2
        reference = 2.0**-106 * width
        return (
            unit * k / 2 + cut / 2 + self.operands**2 + reference,
            unit * k / 3 + cut / 3 + 2 * self.last**2 + reference,
            self.out**2 + self.last**2,
            2 * self.last**2,
        )

    def worst(self, size, k: int):
        """Bound on the error of sums of `k` products in any order, whose magnitudes add up to
        `size`."""
        random = 2 * (k + 3) * self.unit * self.growth + self.operands
        return random * size + self.lost(k * size**2, k)

    def lost(self, walk, k: int):
        """What tensor cores cut off, always towards zero."""
        return self.cut * (walk * k) ** 0.5 if self.cut else 0.0


def of(problem: Problem, out_dtype, growth: float = 1.0, alpha_rounds: float = 0.0) -> Rounding:
    compute, out = finfo(problem.dtype), finfo(out_dtype)
    unit = float(compute.eps) / 2
    own = float(out.eps) / 2 if out.eps > compute.eps else 0.0
    operands, tensor = compute_modes.rounding(problem), problem.compute == "tf32"
    if problem.dtype == "float32" and problem.compute in ("fp32x3", "auto"):
        operands = 3 * 2.0**-22  # the product that three leave out, and the rests of both parts
    operands += alpha_rounds
    # An addition of 8 products or more loses up to a unit in the last place, half on average.
    cut = 2.0**-23 / 4 if tensor or problem.operands in NARROW else 0.0
    scaled = problem.alpha != 1 or problem.beta != 0
    by_alpha = max(1.0, abs(problem.alpha)) if math.isfinite(problem.alpha) else 1.0
    smallest = out.smallest_subnormal if own and np.dtype(out_dtype) == np.float16 else out.tiny
    return Rounding(
        math.hypot(unit, 2.0**-53), operands, alpha_rounds, cut, own, unit if scaled else 0.0,
        (problem.k + 3) * float(compute.tiny) * by_alpha + float(smallest),
        float(compute.max), float(out.max) * (1 + float(out.eps) / 2), growth,
        *((_TF32_LIMIT, _TF32_BELOW) if tensor else ()),
    )  # fmt: skip


def deviations(tests: float) -> float:
    """So many standard deviations that one of `tests` sums of bounded random errors goes beyond
    with probability below ALARMS / 4 (Hoeffding; Azuma for partial sums)."""
    return math.sqrt(2 * math.log(2 * tests / (ALARMS / 4)))


def of_block(width: int) -> float:
    """A block's largest root mean square of errors, of uniform ones: sqrt(3) times the expected
    one at most, and near it in wide blocks."""
    return min(math.sqrt(3), 1 + 4 / math.sqrt(width))


def own_bound(rounding: Rounding, problem: Problem, a, b, added: float) -> tuple[float, float]:
    """The exact value of one element, and its bound from its own products in every order that
    kernels sum in; also from what these orders lose when they are computed, for roundings are
    not random where all products are alike. Never beyond the worst case."""
    products, power = _products(a, b)
    with np.errstate(all="ignore"):
        exact = float(np.sum(products.astype(np.longdouble)))
        size = float(np.abs(products).sum())
        walk, lost, hostile = 0.0, 0.0, False
        count = deviations(1)
        narrow = products.astype(problem.dtype)
        for lanes in _orders(len(products)):
            true, computed = (_partial_sums(x, *lanes) for x in (products, narrow))
            squares = sum(float(np.square(x).sum()) for x in true)
            error = abs(float(computed[-1][-1]) - exact)
            walk, lost = max(walk, squares), max(lost, error)
            hostile |= error > count * rounding.unit * math.sqrt(squares)
        squares = float(np.square(products).sum())
        random = rounding.sums(walk + squares, squares, deviations(64))
        if rounding.operands > 2.0**-20:
            rounded = float(np.ldexp(np.sum(_to_tf32(a) * _to_tf32(b)), -power)) - exact
            hostile |= abs(rounded) > count * rounding.operands * math.sqrt(squares)
            lost += abs(rounded)
        if hostile:
            random = max(random, 4 * lost)
    random += rounding.alike * size
    worst = rounding.worst(size, len(a))
    random += rounding.lost(walk, len(a))
    below = math.ldexp(rounding.below * _beside_subnormal(a, b), -power) if rounding.below else 0.0
    factor, more = np.frexp(problem.alpha)
    with np.errstate(all="ignore"):
        exact, total = (
            float(np.ldexp(factor * x, power + more)) for x in (exact, min(random, worst) + below)
        )
    reference = exact + added
    bound = abs(total) + rounding.out * abs(reference) + rounding.tiny
    # Each by itself: their sum may be beyond float64.
    bound += sum(rounding.last * abs(x) for x in (reference, reference, added, exact))
    return reference, bound


def _products(a, b):
    """a b = products 2^power, the largest near 1: where a and b are largest need not meet."""
    (a, up), (b, more) = np.frexp(a), np.frexp(b)
    products, exponents = a * b, up + more
    power = int(exponents[products != 0].max(initial=-5000))  # below any product
    return np.ldexp(products, exponents - power), power


def _beside_subnormal(a, b) -> float:
    """What the partners of float32's subnormal numbers add up to."""
    normal = float(finfo("float32").tiny)
    return sum(float(abs(y[(x != 0) & (abs(x) < normal)]).sum()) for x, y in ((a, b), (b, a)))


def _orders(k: int):
    """(lanes, interleaved): one after the other; in runs; every 2nd, 3rd, ... together, as three
    products (3m) are."""
    yield 1, False
    for lanes in (2, 3, 4, 8, 32):
        if lanes <= k:
            yield lanes, False
            yield lanes, True


def _partial_sums(x, lanes: int, interleaved: bool):
    length = -(-len(x) // lanes)
    padded = np.zeros(lanes * length, x.dtype)
    padded[: len(x)] = x
    rows = padded.reshape(length, lanes).T if interleaved else padded.reshape(lanes, length)
    sums = np.cumsum(rows, axis=1, dtype=x.dtype)
    return sums, np.cumsum(sums[:, -1], dtype=x.dtype)


def _to_tf32(x):
    """Rounded to 11 bits."""
    fraction, exponent = np.frexp(x)
    return np.ldexp(np.rint(fraction * 2.0**11), exponent - 11)
