"""Products of stacks of matrices by one launch of our own kernels (`kernels/stack_tile.cu`, and
`kernels/stack_mma.cu` for 16 bits)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..arrays.strides import stored
from ..catalog import MAX_GRID, Variant
from .base import Array, Stream
from .kernel_launcher import KernelLauncher
from .roles import BoundProduct

MOST = MAX_GRID[2]  # matrices of a stack


def bind_stack(  # a product of stacks has so many parameters
    device: KernelLauncher, variant: Variant, a: Array, b: Array, c: Array, count: int,
    steps: Sequence[int],
) -> BoundProduct:  # fmt: skip
    """A call that multiplies `count` pairs of matrices, `MOST` at most: C = A B, with contiguous
    rows of C. The first of them lie as `a`, `b` and `c`; `steps` are the bytes from one A, B and C
    to the next. `variant` is one of the kernels with role `stack` or `stack_mma`, for the dtype of
    all three."""
    (m, n), k, dtype = c.shape, a.shape[1], c.dtype.name
    (la, lda), (lb, ldb), (_lc, ldc) = stored(a), stored(b), stored(c)
    function = device.function(variant, dtype, la + lb)
    launch = variant.launch(m, n, k, dtype).cut(count)
    sizes = [np.int32(x) for x in (m, n, k)]
    pitches = [(np.int64(ld), np.int64(step // c.itemsize)) for ld, step in
               zip((lda, ldb, ldc), steps, strict=True)]  # fmt: skip

    def call(a: Array, b: Array, c: Array, stream: Stream) -> None:
        args: list[Any] = [*sizes]
        for matrix, pitch in zip((a, b, c), pitches, strict=True):
            args += [matrix, *pitch]
        device.launch(function, launch, args, stream)

    return call
