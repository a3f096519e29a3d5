"""Which variant of the tensor-core kernels for which product; pure."""

from __future__ import annotations

import functools
import math

from . import catalog
from .catalog import Variant

# Share of the tensor cores' rate that a tile's main loop reaches, on an H200, by (BM, BN).
_SHARE = {(128, 256): 1.0, (128, 192): 0.97, (128, 128): 0.93, (64, 128): 0.6}
_TILE_STEPS = 8  # steps of 64 k that beginning and storing a tile take


@functools.lru_cache(maxsize=4096)
def choose(
    m: int, n: int, k: int, *, terms: int, dtype: str, out_bytes: int = 4, processors: int
) -> Variant:
    """The variant expected to be fastest for C of m x n on so many multiprocessors.

    `terms` is 1, or 3 for split operands; `dtype` what operands hold (`catalog.TENSOR_TYPES`);
    `out_bytes` the size of C's elements.
    """
    fitting = [
        variant
        for variant in catalog.get("wgmma").variants()
        if variant.params["TERMS"] == terms and variant.params["OUT"] == out_bytes
    ]

    def cost(variant: Variant) -> float:
        p = variant.params
        tiles = math.ceil(m / (p["CLUSTER"] * p["BM"])) * math.ceil(n / p["BN"])
        rounds = math.ceil(tiles / (processors // p["CLUSTER"]))
        steps = terms * max(1, k / 64)
        area = p["BM"] * p["BN"]
        return rounds * (steps * area / _SHARE[p["BM"], p["BN"]] + _TILE_STEPS * area)

    return min(fitting, key=cost)
