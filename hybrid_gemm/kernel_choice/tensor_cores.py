"""Which variant of a kernel on tensor cores is expected to be fastest, and into how many shares it
cuts k. Pure."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

from ..catalog import ITEM_SIZE, Kernel, Variant

# Fitted to `wgmma` on an H200 (docs/tensor-cores.md): operations a microsecond on a multiprocessor
# with 16-bit operands, the share of it that tiles of so many rows and columns reach, and
# microseconds that a launch, one of clusters, and a tile take besides.
_RATE = 5.2e6
_SHARE = {
    (128, 256): 1.0, (128, 192): 0.96, (128, 128): 0.98, (128, 64): 0.8, (64, 128): 0.72,
    (64, 64): 0.5,
}  # fmt: skip
# Of kernels that read operands in place: bytes a microsecond that one block copies, of two on a
# multiprocessor, and the most of _RATE that it reaches.
_IN_PLACE_BYTES, _IN_PLACE_SHARE = 18e3, 0.15
_ALONE = 0.99  # of that, where blocks do not share what they load
_LAUNCH_US, _CLUSTER_US, _TILE_US = 2.0, 2.5, 0.8
# Not measured: what adding shares costs besides, and bytes a microsecond of their sums, which are
# written and read once.
_SUM_US, _SUM_RATE = 2.0, 3e6
_MOST_ROUNDS = 8  # of shares that are looked at; with more, whole tiles fill the rounds well


@functools.lru_cache(maxsize=4096)
def fastest(
    kernel: Kernel, m: int, n: int, k: int, *, terms: int, dtype: str, out_bytes: int = 4,
    processors: int,
) -> Variant:  # fmt: skip
    """The listed variant of a kernel on tensor cores that is expected to be fastest for C of
    m x n on so many multiprocessors.

    `terms` is 1, or 3 for split operands; `dtype` what operands hold (`catalog.TENSOR_TYPES`);
    `out_bytes` the size of C's elements.
    """
    fitting = [
        variant
        for variant in kernel.variants()
        if variant.params["TERMS"] == terms and variant.params["OUT"] == out_bytes
    ]
    return min(fitting, key=lambda variant: _best(variant, m, n, k, dtype, processors)[0])


class Cut(NamedTuple):
    """How the k of each tile is cut: into so many shares of so many steps, the last of which may be
    shorter."""

    shares: int
    steps: int


def cut(variant: Variant, m: int, n: int, k: int, dtype: str, processors: int) -> Cut:
    """The cut that is expected to be fastest on so many multiprocessors, of at most as many shares
    as the variant's SHARES. C is m x n; `dtype` is what operands hold."""
    return _best(variant, m, n, k, dtype, processors)[1]


def slots(variant: Variant, processors: int) -> int:
    """Tiles, or clusters of them, that so many multiprocessors make at a time."""
    return max(1, processors * (2 if variant.kernel.in_place else 1) // variant.cluster)


@functools.lru_cache(maxsize=4096)
def _best(
    variant: Variant, m: int, n: int, k: int, dtype: str, processors: int
) -> tuple[float, Cut]:
    """The least time over all cuts, in microseconds, and the cut."""
    (bm, bn), clusters = variant.tile, slots(variant, processors)
    steps = max(1, variant.steps(k, dtype))
    tiles = max(1, math.ceil(m / (variant.cluster * bm)) * math.ceil(n / bn))
    found = []
    # Of all that take so many rounds, the one with the most shares has the shortest.
    for rounds in range(_MOST_ROUNDS + 1):
        shares = max(1, min(variant.most_shares, steps, rounds * clusters // tiles))
        each = math.ceil(steps / shares)
        found.append(Cut(math.ceil(steps / each), each))
    costs = [
        _cost_us(variant, (m, n, k / steps * x.steps), tiles * x.shares, x.shares, dtype, clusters)
        for x in found
    ]
    least = min(range(len(found)), key=costs.__getitem__)
    return costs[least], found[least]


def _cost_us(
    variant: Variant, sides: tuple[int, int, float], parts: int, shares: int, dtype: str,
    clusters: int,
) -> float:  # fmt: skip
    """Microseconds for `parts` tiles of C, or shares of tiles, over k = sides[2] each."""
    (m, n, k), cluster, (bm, bn) = sides, variant.cluster, variant.tile
    rate = _RATE * 2 / ITEM_SIZE[dtype]
    if variant.kernel.in_place:
        copied = _IN_PLACE_BYTES / ((bm + bn) * ITEM_SIZE[dtype])  # k a microsecond
        rate = min(rate * _IN_PLACE_SHARE, 2 * bm * bn * copied)
    else:
        rate *= _SHARE[bm, bn] * (1 if cluster > 1 else _ALONE)
    tile = 2 * bm * bn * k * variant.params.get("TERMS", 1) / rate + _TILE_US
    made = _LAUNCH_US + _CLUSTER_US * (cluster > 1) + math.ceil(parts / clusters) * tile
    return made + (shares > 1) * (_SUM_US + shares * m * n * 8 / _SUM_RATE)
