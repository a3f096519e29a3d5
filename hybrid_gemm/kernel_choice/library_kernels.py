"""What a library launches for a product, from which its time can be told better. Pure.

cuBLAS has hundreds of kernels and chooses among them by rules of its own: at neighbouring shapes
its times differ by as much as those of two kernels do. Which one it takes, and in how many blocks,
can be recorded without running anything (`devices/cuda/library_launches.py`). The names say the
tiles.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .costs import Sides

# Kernels that come before or after the one that multiplies.
_BESIDE = ("splitKreduce", "scal_kernel")
_TILE = (
    re.compile(r"tilesize(\d+)x(\d+)x"),  # sm80_xmma_gemm_..._tilesize128x64x8_stage3_...
    re.compile(r"nvjet_\w+?_(\d+)x(\d+)_"),  # nvjet_sm90_hsh_128x64_64x5_1x2_h_bz_NNT
    re.compile(r"gemm_(?:b?f16_)?(\d+)x(\d+)_"),  # cutlass_80_tensorop_s1688gemm_128x64_32x3_tn_...
)
_CUTLASS = re.compile(r"cutlass_\w+?_align\d+")
_LAYOUT = re.compile(r"_(nn|nt|tn|tt|[NT]{3})(?=_|$)")


@dataclass(frozen=True)
class Launched:
    """What a library launches for a product: its kernel, but for layouts and dtypes of 16 bits; the
    rows and columns of column-major C^T in one of that kernel's tiles, 1 where its name has none;
    how many blocks of it, and how many launches in all."""

    kernel: str
    rows: int
    cols: int
    blocks: int
    launches: int


def read(found: Sequence[tuple[str, int]]) -> Launched | None:
    """What launches with these names and so many blocks are, in their order; None of no kernel. One
    that is no kernel has no name."""
    kernels = [x for x in found if x[0]]
    multiplying = [x for x in kernels if not any(name in x[0] for name in _BESIDE)]
    if not kernels:
        return None
    name, blocks = (multiplying or kernels)[0]
    tile = next((x.groups() for pattern in _TILE if (x := pattern.search(name))), (1, 1))
    return Launched(_kind(name), int(tile[0]), int(tile[1]), blocks, len(found))


def _kind(name: str) -> str:
    if found := _CUTLASS.search(name):
        name = found[0]
    name = _LAYOUT.sub("", name.split("_execute")[0])
    return name.replace("bf16", "f16").replace("_tst_", "_hsh_")[:80]


def coordinates(
    launched: Sequence[Launched], sides: Sequence[Sides], multiprocessors: int
) -> np.ndarray:
    """Launches as points, each coordinate by how much its difference tells of times: the tile, the
    blocks, what tiles have beyond C, what the last round of blocks lacks, and the launches."""
    found = [
        (*each, x.rows, x.cols, max(1, x.blocks), x.launches)
        for each, x in zip(sides, launched, strict=True)
    ]
    m, n, _k, rows, cols, blocks, launches = np.array(found, float).reshape(-1, 7).T
    covered = rows * cols * np.ceil(n / rows) * np.ceil(m / cols)
    rounds = np.ceil(blocks / multiprocessors)
    values = np.array([rows, cols, blocks, covered / (m * n), rounds * multiprocessors / blocks])
    made = np.empty((len(found), len(_SCALES)))
    made[:, :-1], made[:, -1] = np.log2(values).T, launches
    return made * _SCALES


# By cross-validation over three modes (docs/notes/choosing.md).
_SCALES = np.array([0.06, 0.06, 0.07, 0.1, 0.23, 0.16])
