"""Products of sides that no launch takes (`problem.MAX_SIDE`), made piece by piece."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

from .. import problem
from .base import Array, Stream
from .roles import BoundProduct

Bind = Callable[[Array, Array, Array, float], BoundProduct]


def bound_in_pieces(bind: Bind, a: Array, b: Array, c: Array, beta: float) -> BoundProduct:
    """A call that multiplies matrices laid out as these. `bind(a, b, c, beta)` binds each piece;
    those of later k are added to C, which is rounded to its dtype in between: plans give none of 16
    bits (`Plan.writes_once`)."""
    (m, n), k = c.shape, a.shape[1]
    bound = [
        (rows, cols, ks, bind(a[rows, ks], b[ks, cols], c[rows, cols], 1 if ks.start else beta))
        for rows, cols, ks in itertools.product(pieces(m), pieces(n), pieces(k))
    ]

    def call(a: Array, b: Array, c: Array, stream: Stream) -> None:
        for rows, cols, ks, product in bound:
            product(a[rows, ks], b[ks, cols], c[rows, cols], stream)

    return call


def pieces(side: int) -> Iterator[slice]:
    """A side in as long pieces as may be; one without elements, too."""
    for start in range(0, max(1, side), problem.MAX_SIDE):
        yield slice(start, min(side, start + problem.MAX_SIDE))
