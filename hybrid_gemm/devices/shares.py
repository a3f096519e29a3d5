"""Products on tensor cores whose k is cut, so that they occupy the whole device: that of every tile
of a small C into shares, or that of the last tiles alone into parts (`kernels/cut_tiles.cuh`). The
kernel leaves the sums of each in the stream's workspace, and a second launch adds them to C
(`kernels/sum_shares.cu`, `sum_parts.cu`), in an order that depends on shape and device alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from .. import catalog
from ..arrays.strides import stored
from ..catalog import Launch, Variant
from ..kernel_choice import tensor_cores
from .base import Array, Stream
from .kernel_launcher import KernelLauncher

_LINE = 4  # rows of a share's sums are whole multiples of it, in elements: 16 bytes
_ONE, _ZERO = np.float32(1), np.float32(0)  # alpha and beta of shares' sums


class Shares:
    """How k is cut in a product C = alpha A B + beta C by a variant whose operands hold `dtype`.

    `uncut` says that tiles are not cut into shares, which takes the variant's form with SHARES = 1;
    the last ones may be cut even so. `cut` is None where nothing is cut. `sides` are m, n and k as
    the kernel sees them: of C^T, where it makes that (`turned`).
    """

    # Many parameters: a product has so many, as in BLAS.
    def __init__(
        self, device: KernelLauncher, variant: Variant, dtype: str, c: Array,
        sides: tuple[int, int, int], *, alpha: float, beta: float, turned: bool = False,
    ):  # fmt: skip
        cut = tensor_cores.cut(variant, *sides, dtype, device.processors)
        nothing = not c.size or not sides[2]
        self.uncut = cut.shares == 1 or nothing
        self.variant = variant.uncut if self.uncut else variant
        self.launch = self.variant.launch(*sides, dtype)
        self.cut = None if nothing or not (cut.tiles or cut.shares > 1) else cut
        self.device, self.alpha, self.beta = device, np.float32(alpha), np.float32(beta)
        self.none_cut: list[Any] = []
        if self.variant.cuts_last:
            self.none_cut = [np.int32(0), np.int32(1), np.uint64(0)]
        if self.cut is None:
            return
        (rows, cols), self.ldc = c.shape, np.int64(stored(c)[1])
        self.steps = np.int32(cut.steps)
        self.pitch = np.int64(-(-cols // _LINE) * _LINE)  # of a row of a share's sums
        if self.uncut:
            blocks = max(self.launch.grid[0], variant.cluster * cut.runs)
            self.launch = dataclasses.replace(self.launch, grid=(blocks, 1, 1))
            tile = {x: self.variant.params[x] for x in ("BM", "BN", "CLUSTER")}
            adding, params = catalog.helper("parts").kernel, {**tile, "TURN": 1 + turned}
            added = *sides[:2], cut.tiles
            sizes = [*sides[:2], cut.steps, cut.tiles, cut.runs]
            left = int(tensor_cores.summed_bytes(cut, self.variant, *sides[:2]))
        else:
            self.launch = self.launch.cut(cut.shares)
            adding, params = catalog.helper("shares").kernel, {}
            added = rows, cols, cut.shares
            sizes = [*added]
            left = cut.shares * rows * int(self.pitch) * 4
        by = adding.variant({**params, "OUT": c.dtype.itemsize})
        self.function, self.adding = device.function(by, dtype), by.launch(*added, dtype)
        self.room: Launch = dataclasses.replace(self.launch, workspace_bytes=left, flag_bytes=4)
        self.sizes = [np.int32(x) for x in sizes]

    # Many parameters: a product has so many, as in BLAS.
    def start(
        self, function: Any, operands: Sequence[Any], c: Array, ldc: np.int64, stream: Stream, *,
        scales: Sequence[Any] = (), decided: Sequence[Any] = (), exponents: Sequence[Any] = (),
        verdict: Array = None, wanted: int = -1,
    ) -> None:  # fmt: skip
        """Launches the kernel, and what adds up sums, if any. The kernel takes its `operands`,
        alpha, `scales`, beta, C, what was `decided`, and what is cut. It makes `c`, or the sums of
        shares, in the stream's workspace: m x n of float32 for each, in rows that begin `pitch`
        elements apart, one below the other. The last three are for `add`."""
        if self.cut is None:
            args = [*operands, self.alpha, *scales, self.beta, c, ldc, *decided, *self.none_cut]
            self.device.launch(function, self.launch, args, stream)
            return
        sums = self.device.scratch(self.room, "float32", stream)  # and an element that is not used
        if self.uncut:  # how many of the last tiles, into how many runs, and where their sums go
            made = self.alpha, *scales, self.beta, c, ldc, *decided, *self.sizes[3:], sums[0]
        else:
            made = _ONE, *scales, _ZERO, sums[0], self.pitch, *decided, self.steps
        self.device.launch(function, self.launch, [*operands, *made], stream)
        self.add(sums, c, stream, exponents, verdict, wanted)

    def add(
        self, sums: list[Array], c: Array, stream: Stream, exponents: Sequence[Array | None] = (),
        verdict: Array = None, wanted: int = -1,
    ) -> None:  # fmt: skip
        """C = alpha 2^exponents (the `sums`, added up) + beta C, where k is cut, if a `verdict` on
        the device is `wanted`, or there is none."""
        nothing = sums[1].view("int32")  # not looked at
        scales = len(exponents) > 0 and exponents[0] is not None
        of_rows_and_cols = exponents if scales else (nothing, nothing)
        if verdict is None:
            verdict, wanted = nothing, -1
        pitch = [] if self.uncut else [self.pitch]
        args = [
            *self.sizes, sums[0], *pitch, self.alpha, *of_rows_and_cols, np.int32(scales),
            self.beta, c, self.ldc, verdict, np.int32(wanted),
        ]  # fmt: skip
        self.device.launch(self.function, self.adding, args, stream)
