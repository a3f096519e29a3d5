"""Which variant of a kernel on tensor cores is expected to be fastest, and how it cuts k. Pure."""

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
# What adding shares costs besides, and bytes of their sums a microsecond, written and read once:
# not measured. The same of parts of the last tiles: read off ten products of one H100.
_SUM_US, _SUM_RATE = 2.0, 3e6
_PARTS_US, _PARTS_RATE = 5.0, 2e6
_PARTS = 2, 3, 4, 6, 8, 12, 16, 24, 32  # of each of the last tiles, that are looked at
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
    """How k is cut: that of each tile into so many shares of so many steps, the last of which may
    be shorter; and the steps of the last `tiles`, which are a line, into equal `runs`. At most one
    of both: shares are 1 or tiles are 0."""

    shares: int
    steps: int
    tiles: int = 0
    runs: int = 1

    @property
    def parts(self) -> int:
        """Of all the last tiles, at most."""
        return self.tiles + self.runs if self.tiles else 0


class Busiest(NamedTuple):
    """What the cluster with most to do does: steps of k, and how often it stores sums."""

    steps: int
    stored: int


def busiest(cut: Cut, tiles: int, clusters: int) -> Busiest:
    """Of so many clusters that make so many tiles."""
    if not cut.tiles:
        rounds = math.ceil(tiles * cut.shares / clusters)
        return Busiest(rounds * cut.steps, rounds)
    whole = (tiles - cut.tiles) // clusters
    run, own = math.ceil(cut.tiles * cut.steps / cut.runs), 1 + (cut.runs % cut.tiles > 0)
    return Busiest(whole * cut.steps + run, whole + own)


def summed_bytes(cut: Cut, variant: Variant, m: int, n: int) -> int:
    """Of the sums that are left for a launch of their own to add up, of C with m x n elements."""
    return _summed(cut, math.prod(variant.tile) * variant.cluster, m * n)


def _summed(cut: Cut, of_tile: int, of_c: int) -> int:
    """As `summed_bytes`, by the elements of a cluster's tile, and of C."""
    if cut.tiles:
        return cut.parts * of_tile * 4
    return cut.shares * of_c * 4 if cut.shares > 1 else 0


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
    most = min(variant.most_shares, steps)
    # Of all that take so many rounds, the one with the most shares has the shortest.
    rounds = range(_MOST_ROUNDS + 1) if most > 1 else (0,)
    shortest = {math.ceil(steps / max(1, min(most, x * clusters // tiles))) for x in rounds}
    found = [Cut(math.ceil(steps / each), each) for each in sorted(shortest, reverse=True)]
    rest = tiles % clusters
    # The last round, not the only one: SHARES are for few tiles. Into as many runs as there are
    # clusters, or in equal parts.
    if variant.cuts_last and rest < tiles and rest:
        runs = {clusters, *(rest * parts for parts in _PARTS if rest * parts <= clusters)}
        found += [Cut(1, steps, rest, x) for x in sorted(runs)]
    a_step_us = _step_us(variant, k / steps, dtype)
    fixed = _LAUNCH_US + _CLUSTER_US * (variant.cluster > 1)

    def cost_us(cut: Cut) -> float:
        steps, stored = busiest(cut, tiles, clusters)
        made = fixed + steps * a_step_us + stored * _TILE_US
        if not (summed := _summed(cut, variant.cluster * bm * bn, m * n)):
            return made
        once_us, a_us = (_PARTS_US, _PARTS_RATE) if cut.tiles else (_SUM_US, _SUM_RATE)
        return made + once_us + 2 * summed / a_us

    costs = list(map(cost_us, found))
    least = min(range(len(found)), key=costs.__getitem__)
    return costs[least], found[least]


def _step_us(variant: Variant, k: float, dtype: str) -> float:
    """Microseconds that a block takes for a step of so many k."""
    (bm, bn), rate = variant.tile, _RATE * 2 / ITEM_SIZE[dtype]
    if variant.kernel.in_place:
        copied = _IN_PLACE_BYTES / ((bm + bn) * ITEM_SIZE[dtype])  # k a microsecond
        rate = min(rate * _IN_PLACE_SHARE, 2 * bm * bn * copied)
    else:
        rate *= _SHARE[bm, bn] * (1 if variant.cluster > 1 else _ALONE)
    return 2 * bm * bn * k * variant.params.get("TERMS", 1) / rate
