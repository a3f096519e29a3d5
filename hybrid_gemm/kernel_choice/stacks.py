"""When a stack of matrices is multiplied by our own kernel, and by which variant. Pure."""

from __future__ import annotations

from .. import catalog
from ..catalog import ITEM_SIZE, Variant
from ..planning.plan import LINE_BYTES
from ..problem import NARROW
from . import choices
from .tables import Machine

LEAST = 256  # matrices: fewer were not measured


def own(sides: tuple[int, int, int], dtype: str) -> Variant | None:
    """Our variant for products of m x n x k; None for a dtype that no kernel has a form for."""
    halves = catalog.helper("stack_mma").kernel
    m, n, _k = sides
    if dtype in halves.dtypes:
        small, large = sorted(halves.variants(), key=lambda v: v.tile)
        return small if max(m, n) <= small.tile[0] else large
    kernel = catalog.helper("stack").kernel
    if dtype not in kernel.dtypes:
        return None
    small, middle, large = sorted(kernel.variants(), key=lambda v: v.tile)
    if max(m, n) <= small.tile[0]:
        return small
    return large if m > large.tile[0] and n >= large.tile[1] else middle


def faster(count: int, sides: tuple[int, int, int], layout: str, dtype: str) -> Variant | None:
    """Our variant where it was faster than cuBLAS's batched product on an H200, for matrices whose
    rows begin on 16 bytes: of float32 up to 32 x 32, and up to 64 x 64 unless only B lies along k
    (docs/results/stack_tiles_h200.json); of 16 bits with all sides from 8 to 32, and of larger
    squares up to 64 where cuBLAS takes a slower kernel (docs/results/stack_narrow_h200.json)."""
    m, n, k = sides
    variant = own(sides, dtype)
    if variant is None or count < LEAST:
        return None
    read = m if layout[0] == "t" else k, k if layout[1] == "t" else n
    if any(x * ITEM_SIZE[dtype] % LINE_BYTES for x in read):
        return None
    if dtype in NARROW:
        square = m == n == k <= 64 and 512 <= count <= (4096 if m == 64 else 1000)
        return variant if min(sides) >= 8 and (max(sides) <= 32 or square) else None
    if max(m, n) <= 32:
        return variant if min(m, n) >= 8 and k <= 64 else None
    return variant if min(m, n) >= 48 and max(m, n) <= 64 and layout in ("nn", "tn") else None


def strict_is_faster(machine: Machine, count: int, sides: tuple[int, int, int]) -> bool:
    """Whether so many products of m x n x k should take no longer in strict fp32 at once than one
    after the other in fp32x3. At once they are expected to take as long as one product of as many
    rows. False without a model of such a GPU."""
    m, n, k = sides
    one = choices.fastest(machine, "fp32x3", sides, "nn", own=True)
    all_rows = choices.fastest(machine, "float32", (count * m, n, k), "nn", own=False)
    return one is not None and all_rows is not None and all_rows.us <= count * one.us
