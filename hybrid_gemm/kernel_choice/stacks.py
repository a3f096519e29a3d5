"""Which variant multiplies a stack of matrices by our own kernel. Pure."""

from __future__ import annotations

import functools
import math

from .. import catalog
from ..catalog import Variant

START = 32  # of k: what a tile takes besides its steps
EDGE = 4.0  # bringing operands costs a thread this much for each side of its sums


@functools.lru_cache(maxsize=4096)
def variant_for(
    count: int, m: int, n: int, k: int, dtype: str, multiprocessors: int
) -> Variant | None:
    """The variant that should be fastest for `count` products of m x n x k; None for a dtype that
    the kernel has no form for."""
    kernel = catalog.helper("stack").kernel
    if dtype not in kernel.dtypes:
        return None
    return min(kernel.variants(), key=lambda v: _cost(v, count, m, n, k, multiprocessors))


def _cost(v: Variant, count: int, m: int, n: int, k: int, multiprocessors: int) -> float:
    """Rounds of tiles on the busiest multiprocessor, each with what its threads multiply and what
    they bring for it."""
    (bm, bn), sums = v.tile, v.params["TM"] * v.params["TN"]
    tiles = count * math.ceil(m / bm) * math.ceil(n / bn)
    each = bm * bn * (k + START) * (1 + EDGE / math.sqrt(sums))
    return math.ceil(tiles / multiprocessors) * each
