"""What a checked kernel has to leave as it is: A and B, and what lies between the rows of C."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import numpy as np

from ...catalog import Variant
from ...errors import KernelError
from ..base import Array


@contextlib.contextmanager
def kept(variant: Variant, a: Array, b: Array, c: Array, gap: int) -> Iterator[None]:
    """Raises `KernelError` where what is done meanwhile changes an element of A or B, or one of the
    `gap` bytes between two rows of a matrix."""
    named = (("A", a), ("B", b), ("C", c))
    before = [(name, x, _bytes(x.copy()), _between(x, gap).copy()) for name, x in named]
    yield
    for name, x, elements, between in before:
        if name != "C" and (changed := np.argwhere(_bytes(x) != elements)).size:
            row, byte = changed[0]
            raise KernelError(
                f"kernel {variant} writes to {name}, at row {row}, column {byte // x.itemsize}; "
                "it may write to C alone"
            )
        if (changed := np.argwhere(_between(x, gap) != between)).size:
            lines = "rows" if x.strides[1] == x.itemsize else "columns"
            raise KernelError(
                f"kernel {variant} writes behind the end of one of the {lines} of {name}, number "
                f"{changed[0][0]}: others may have data there, up to the leading dimension"
            )


def _bytes(x: Array) -> np.ndarray:
    """A matrix's elements, as rows of bytes."""
    return np.ascontiguousarray(x).view(np.uint8)


def _between(x: Array, gap: int) -> np.ndarray:
    """The bytes between the lines of a matrix that lies alone, with `gap` bytes after each; none of
    one that is part of a larger one, to whose other parts others may write."""
    lines = x if x.strides[1] == x.itemsize else x.T
    count, length = lines.shape
    if count < 2 or not length or lines.strides != (length * x.itemsize + gap, x.itemsize):
        return np.empty((0, 0), np.uint8)
    last = lines[:1, -1:].view(np.uint8)  # the last element of the first line
    whole = np.lib.stride_tricks.as_strided(
        last, (count - 1, x.itemsize + gap), (lines.strides[0], 1)
    )
    return whole[:, x.itemsize :]
