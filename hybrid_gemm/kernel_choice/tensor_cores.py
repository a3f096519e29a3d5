"""Which variant of a kernel on tensor cores is expected to be fastest, and how it cuts k. Pure."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np

from ..catalog import ITEM_SIZE, Kernel, Variant
from .side_by_side import SideBySide, alone, ceil_of

# Fitted to `wgmma` on an H200: operations a microsecond on a multiprocessor with 16-bit operands,
# the share of it that tiles of so many rows and columns reach, and microseconds that a launch, one
# of clusters, and a tile take besides.
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
# Parts of each of the last tiles that are looked at, and rounds of shares: with more of them, whole
# tiles fill the rounds well. A line for each, since an array has an element for each variant.
_PARTS = np.array([2, 3, 4, 6, 8, 12, 16, 24, 32], float)[:, None]
_ROUNDS = np.arange(9.0)[:, None]


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
    fitting = _fitting(kernel, terms, out_bytes)
    found = best(fitting, m, n, k, dtype, processors)
    return fitting.variants[int(found.us.argmin())]


@functools.cache
def _fitting(kernel: Kernel, terms: int, out_bytes: int) -> SideBySide:
    """The listed variants for such operands and C."""
    return SideBySide([
        variant
        for variant in kernel.variants()
        if variant.params["TERMS"] == terms and variant.params["OUT"] == out_bytes
    ])  # fmt: skip


class Cut(NamedTuple):
    """How k is cut: that of each tile into so many shares of so many steps, the last of which may
    be shorter; and the steps of the last `tiles`, which are a line, into equal `runs`. At most one
    of both: shares are 1 or tiles are 0. Of several variants or ways, arrays of these."""

    shares: Any
    steps: Any
    tiles: Any = 0
    runs: Any = 1

    @property
    def cuts_last(self) -> bool:
        """Whether the last tiles are cut; of arrays, where that is so of all, or tiles are 0."""
        return not isinstance(self.tiles, int) or self.tiles > 0


class Busiest(NamedTuple):
    """What the cluster with most to do does: steps of k, and how often it stores sums."""

    steps: Any
    stored: Any


def busiest(cut: Cut, tiles: Any, clusters: Any) -> Busiest:
    """Of so many clusters that make so many tiles."""
    if not cut.cuts_last:
        rounds = ceil_of(tiles * cut.shares, clusters)
        return Busiest(rounds * cut.steps, rounds)
    whole = (tiles - cut.tiles) // clusters
    run, own = ceil_of(cut.tiles * cut.steps, cut.runs), 1 + (cut.runs % cut.tiles > 0)
    return Busiest(whole * cut.steps + run, whole + own)


def summed_bytes(cut: Cut, variants: Variant | SideBySide, m: float, n: float) -> Any:
    """Of the sums that are left for a launch of their own to add up, of C with m x n elements."""
    if not cut.cuts_last:
        return (cut.shares > 1) * cut.shares * (4 * m * n)
    (rows, columns), parts = variants.tile, cut.tiles + cut.runs
    return parts * (4 * rows * columns * variants.cluster)


@functools.lru_cache(maxsize=4096)
def cut(variant: Variant, m: int, n: int, k: int, dtype: str, processors: int) -> Cut:
    """The cut that is expected to be fastest on so many multiprocessors, of at most as many shares
    as the variant's SHARES. C is m x n; `dtype` is what operands hold."""
    return Cut(*(int(x[0]) for x in best(alone(variant), m, n, k, dtype, processors).cut))


def slots(variant: Variant, processors: int) -> int:
    """Tiles, or clusters of them, that so many multiprocessors make at a time."""
    return max(1, processors * (2 if variant.kernel.in_place else 1) // variant.cluster)


class Best(NamedTuple):
    """Of each of several variants the least time over all cuts in microseconds, that cut, what the
    busiest cluster does, and the bytes of the sums that are left for another launch."""

    us: np.ndarray
    cut: Cut
    busiest: Busiest
    summed_bytes: np.ndarray


def best(
    variants: SideBySide, m: float, n: float, k: float, dtype: str, processors: int
) -> Best:  # fmt: skip
    """The cuts that are expected to be fastest, as `cut`."""
    bm, bn = variants.tile
    clusters = variants.of(("slots", processors), lambda v: slots(v, processors))
    steps = np.maximum(1, variants.steps(k, dtype))
    tiles = np.maximum(1, ceil_of(m, variants.cluster * bm) * ceil_of(n, bn))
    a_step_us = variants.of(("k", dtype), lambda v: _a_k_us(v, dtype)) * (k / steps)
    fixed = variants.of("launch", lambda v: _LAUNCH_US + _CLUSTER_US * (v.cluster > 1))

    def ways(cut: Cut, once_us: float, a_us: float) -> np.ndarray:
        """What `Best` has: lines of an array each, with a line for each way."""
        made, summed = busiest(cut, tiles, clusters), summed_bytes(cut, variants, m, n)
        us = fixed + made.steps * a_step_us + made.stored * _TILE_US
        us += (summed > 0) * (once_us + 2 * summed / a_us)
        found = np.empty((8, *us.shape))
        for lines, x in zip(found, (us, *cut, *made, summed), strict=True):
            lines[:] = x
        return found

    # Of all that take so many rounds, the one with the most shares has the shortest.
    most = np.minimum(variants.of("shares", lambda v: v.most_shares), steps)
    each = ceil_of(steps, np.maximum(1, np.minimum(most, _ROUNDS * clusters // tiles)))
    found = ways(Cut(ceil_of(steps, each), each), _SUM_US, _SUM_RATE)
    # The last round, not the only one: SHARES are for few tiles. Into equal parts, or as many runs
    # as there are clusters.
    rest = tiles % clusters
    parted = (rest > 0) & (rest < tiles) & (variants.of("cuts", lambda v: v.cuts_last) > 0)
    if parted.any():
        last = np.maximum(1, rest)
        runs = np.append(_PARTS * last, clusters[None], 0)
        of_parts = ways(Cut(1, steps, last, runs), _PARTS_US, _PARTS_RATE)
        of_parts[0][(runs > clusters) | ~parted] = np.inf
        found = np.append(found, of_parts, 1)
    fastest = found[0].argmin(0)
    us, shares, steps, tiles, runs, busy, stored, summed = found[
        :, fastest, np.arange(len(fastest))
    ]
    return Best(us, Cut(shares, steps, tiles, runs), Busiest(busy, stored), summed)


def _a_k_us(variant: Variant, dtype: str) -> float:
    """Microseconds that a block takes for one k."""
    (bm, bn), rate = variant.tile, _RATE * 2 / ITEM_SIZE[dtype]
    if variant.kernel.in_place:
        copied = _IN_PLACE_BYTES / ((bm + bn) * ITEM_SIZE[dtype])  # k a microsecond
        rate = min(rate * _IN_PLACE_SHARE, 2 * bm * bn * copied)
    else:
        rate *= _SHARE[bm, bn] * (1 if variant.cluster > 1 else _ALONE)
    return 2 * bm * bn * variant.params.get("TERMS", 1) / rate
