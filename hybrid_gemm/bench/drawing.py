"""Shapes that nobody chose: drawn at random from a seed, in classes, in all four layouts. Pure.

Models of times (`kernel_choice/fitted.py`) are fitted to shapes of seeds below 1000; what is
reported of the choice among kernels is of later seeds, each looked at once.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from ..catalog import LAYOUTS
from ..kernel_choice.costs import Sides

CLASSES = ("any", "thin m or n", "short k", "long k", "multiples of 16")
FEW = "few rows or columns"  # 1, or 2 to 8, which kernels and libraries treat apart
FITTED = (*CLASSES, FEW)  # models are fitted to these
LINE, LONG, TINY, LARGE = "one row or column", "one long side", "k of a few", "all sides large"
ROUND = "round numbers"  # which people choose, and whose powers of 2 caches and memory may dislike
# And to these, of seeds of their own. FEW is drawn alone for shapes that are held out.
ALONE = {"few": FEW, "lines": LINE, "long": LONG, "tiny": TINY, "large": LARGE, "round": ROUND}
LEAST, MOST = 3e7, 2e12  # mnk of the shapes that are kept,
KEPT = {
    LINE: (2**18, 2**29), LONG: (2**20, 2**36), TINY: (2**18, 2**33), LARGE: (2**38, 2**42),
    ROUND: (2**20, 2**39),
}  # and of these classes  # fmt: skip
MOST_ELEMENTS = {LONG: 2**28, TINY: 2**28, LARGE: 2**31, ROUND: 2**28}  # of A, B and C


@dataclass(frozen=True)
class Drawn:
    """A shape (m, n, k) of one of `CLASSES`, and the storage orders of op(A) and op(B)."""

    shape: Sides
    layout: str
    kind: str


def draw(seed: int, count: int, classes: Sequence[str] = CLASSES) -> list[Drawn]:
    """`count` shapes drawn from a seed, of the classes in turn.

    Sides are log-uniform: 16 to 16384; one of m and n 1 to 64; k 8 to 360; k 8192 to 2^20 with m
    and n 16 to 1024; or rounded up to multiples of 16. Of `FEW`, one of m and n is 1
    in every second shape, else 2 to 8. Of `LINE` one of m and n is 1, the other and k are 16 to
    2^17, in every second shape multiples of 16. Of `LONG` one side is 2^14 to 2^23, the others 1 to
    1024. Of `TINY` k is 1 to 16, and m and n are 32 to 32768. Of `LARGE` all are 4096 to 49152. Of
    `ROUND` each is a power of 2 or three times one, 16 to 24576, or a multiple of 1000 up to
    20000, and of about a tenth one of m and n is 1.

        draw(1, 5)[3].kind == "long k"
    """
    rng = random.Random(seed)
    found: list[Drawn] = []
    while len(found) < count:
        kind = classes[len(found) % len(classes)]
        shape = _shape(rng, kind)
        if _is_kept(shape, kind):
            found.append(Drawn(shape, rng.choice(LAYOUTS), kind))
    return found


def _is_kept(shape: Sides, kind: str) -> bool:
    m, n, k = shape
    least, most = KEPT.get(kind, (LEAST, MOST))
    few = m * k + k * n + m * n <= MOST_ELEMENTS.get(kind, math.inf)
    return few and least <= m * n * k <= most


def _shape(rng: random.Random, kind: str) -> Sides:
    def side(low: int, high: int) -> int:
        return round(math.exp(rng.uniform(math.log(low), math.log(high))))

    if kind == "long k":
        return side(16, 1024), side(16, 1024), side(8192, 2**20)
    if kind == LONG:
        long, *others = side(2**14, 2**23), side(1, 1024), side(1, 1024)
        others.insert(rng.randrange(3), long)
        return others[0], others[1], others[2]
    if kind == LARGE:
        return side(4096, 49152), side(4096, 49152), side(4096, 49152)
    if kind == TINY:
        return side(32, 2**15), side(32, 2**15), side(1, 16)
    if kind == ROUND:
        m, n, k = (_round_number(rng) for _ in range(3))
        lines = ((1, n, k), (m, 1, k), *[(m, n, k)] * 10)
        return rng.choice(lines)
    if kind == LINE:
        n, k = side(16, 2**17), side(16, 2**17)
        if rng.random() < 0.5:
            n, k = (-(-x // 16) * 16 for x in (n, k))
        return (1, n, k) if rng.random() < 0.5 else (n, 1, k)
    m, n, k = (side(16, 16384) for _ in range(3))
    if kind in ("thin m or n", FEW):
        thin = side(1, 64) if kind != FEW else rng.choice((1, rng.randint(2, 8)))
        return (thin, n, k) if rng.random() < 0.5 else (m, thin, k)
    if kind == "short k":
        return m, n, side(8, 360)
    if kind == "multiples of 16":
        m, n, k = (-(-x // 16) * 16 for x in (m, n, k))
    return m, n, k


def _round_number(rng: random.Random) -> int:
    power = 2 ** rng.randint(4, 14)
    return rng.choice((power, power, power * 3 // 2, 1000 * rng.randint(1, 20)))
