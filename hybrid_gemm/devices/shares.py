"""Products on tensor cores whose k is cut into shares, so that a C of few tiles occupies the whole
device: the kernel leaves each share's sums in the stream's workspace, and a second launch adds them
to C (`kernels/sum_shares.cu`), in an order that depends on the shape alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from .. import catalog
from ..arrays.strides import stored
from ..catalog import Launch, Variant
from ..kernel_choice import tensor_cores
from .base import Array, Stream
from .kernel_launcher import KernelLauncher

_LINE = 4  # rows of a share's sums are whole multiples of it, in elements: 16 bytes


class Shares:
    """The shares of a product C = alpha A B + beta C by a variant whose operands hold `dtype`.

    `uncut` says that there is one alone, which takes the variant's form with SHARES = 1. `sides`
    are m, n and k as the kernel sees them: of C^T, where it makes that.
    """

    def __init__(
        self, device: KernelLauncher, variant: Variant, dtype: str, c: Array,
        sides: tuple[int, int, int], *, alpha: float, beta: float,
    ):  # fmt: skip
        count, steps = tensor_cores.cut(variant, *sides, dtype, device.processors)
        self.uncut = count == 1 or not c.size or not sides[2]
        self.variant = variant.uncut if self.uncut else variant
        self.launch = self.variant.launch(*sides, dtype)
        if self.uncut:
            return
        self.device, self.count, self.steps = device, count, np.int32(steps)
        (rows, cols), self.ldc = c.shape, np.int64(stored(c)[1])
        self.pitch = np.int64(-(-cols // _LINE) * _LINE)  # of a row of a share's sums
        self.launch = self.launch.cut(count)
        kernel = catalog.helper("shares").kernel
        adding = kernel.variant({"OUT": c.dtype.itemsize})
        self.function = device.function(adding, dtype)
        self.adding = adding.launch(rows, cols, count, dtype)
        self.room: Launch = dataclasses.replace(
            self.launch, workspace_bytes=count * rows * int(self.pitch) * 4, flag_bytes=4
        )
        self.sizes = [np.int32(x) for x in (rows, cols, count)]
        self.alpha, self.beta = np.float32(alpha), np.float32(beta)

    def sums(self, stream: Stream) -> Array:
        """Where the kernel leaves the sums: for each share m x n of float32, in rows that begin
        `pitch` elements apart, one matrix below the other."""
        return self.device.scratch(self.room, "float32", stream)[0]

    def add(
        self, c: Array, stream: Stream, exponents: Sequence[Array | None] = (),
        verdict: Array = None, wanted: int = -1,
    ) -> None:  # fmt: skip
        """C = alpha 2^exponents (the shares' sums, added up) + beta C, if a `verdict` on the device
        is `wanted`, or there is none."""
        sums, flags = self.device.scratch(self.room, "float32", stream)
        nothing = flags.view("int32")  # not looked at
        scales = len(exponents) > 0 and exponents[0] is not None
        of_rows_and_cols = exponents if scales else (nothing, nothing)
        if verdict is None:
            verdict, wanted = nothing, -1
        args = [
            *self.sizes, sums, self.pitch, self.alpha, *of_rows_and_cols, np.int32(scales),
            self.beta, c, self.ldc, verdict, np.int32(wanted),
        ]  # fmt: skip
        self.device.launch(self.function, self.adding, args, stream)
