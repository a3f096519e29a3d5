"""Which variant of wgmma is expected to be fastest for a product on tensor cores. Pure."""

from __future__ import annotations

import functools
import math

from ..catalog import ITEM_SIZE, Kernel, Variant

# Fitted to `wgmma` on an H200 (docs/tensor-cores.md): operations a microsecond on a multiprocessor
# with 16-bit operands, the share of it that tiles of so many rows and columns reach, and
# microseconds that a launch, one of clusters, and a tile take besides.
_RATE = 5.2e6
_SHARE = {(128, 256): 1.0, (128, 192): 0.96, (128, 128): 0.98, (128, 64): 0.8, (64, 128): 0.72}
_ALONE = 0.99  # of that, where blocks do not share what they load
_LAUNCH_US, _CLUSTER_US, _TILE_US = 2.0, 2.5, 0.8


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
    return min(fitting, key=lambda variant: _cost_us(variant, m, n, k, dtype, processors))


def _cost_us(variant: Variant, m: int, n: int, k: int, dtype: str, processors: int) -> float:
    cluster, (bm, bn) = variant.cluster, variant.tile
    rounds = math.ceil(math.ceil(m / (cluster * bm)) * math.ceil(n / bn) / (processors // cluster))
    rate = _RATE * _SHARE[bm, bn] * 2 / ITEM_SIZE[dtype] * (1 if cluster > 1 else _ALONE)
    tile = 2 * bm * bn * k * variant.params["TERMS"] / rate + _TILE_US
    return _LAUNCH_US + _CLUSTER_US * (cluster > 1) + rounds * tile
