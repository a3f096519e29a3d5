"""Blocks of float32 that several products on tensor cores read, split in halves once, part by part,
as they come: `kernels/split_halves.cu`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from ..arrays.strides import Array
from ..planning.plan import SPLIT_STEP
from .streams import Stream

STATE_WORDS = 17  # of the kernels' State, of 4 bytes (kernels/verdict.cuh)
OF_ROWS = 4  # from which word on it says what rows allow

Take = Callable[[Array], None]


@dataclass(frozen=True, eq=False)
class SplitView:
    """Rows of op(A), or columns of op(B), of k elements each ("rows" below): as they are, and
    split. What one product reads of a block.

    `array` has the numbers; `parts` is (2, rows, k rounded up), hi and lo of 16 bits, by
    2^`exponent[0]` of each row; `exponent[1]` is what the TF32 split takes instead, and `states`
    have what each of the parts allows in which these rows came.
    """

    array: Array
    parts: Array
    exponent: Array
    states: Array

    @property
    def shape(self) -> tuple[int, int]:
        """Of the matrix."""
        return self.array.shape

    @property
    def dtype(self) -> np.dtype:
        """Of the matrix."""
        return self.array.dtype

    @property
    def arrays(self) -> tuple[Array, ...]:
        """All that has memory."""
        return self.array, self.parts, self.exponent, self.states

    def __getitem__(self, rows: slice) -> SplitView:
        """Some rows of op(A)."""
        return SplitView(self.array[rows], self.parts[:, rows], self.exponent[:, rows], self.states)


class Splitter(Protocol):
    """What splits operands: a device that runs kernels."""

    def split_part(self, operand: str, layouts: str, part: SplitView, stream: Stream) -> None:
        """Splits a part of a block of A or B (`operand`), which is there. `layouts` are the storage
        orders of A and B."""


class SplitBlock:
    """What a block of A or B takes besides its numbers, on one device: `count` parts of `rows`
    rows of op(A), or columns of op(B), in all, of `k` elements each. `splitter` splits them."""

    def __init__(self, operand: str, rows: int, k: int, count: int, splitter: Splitter) -> None:
        self.operand, self.rows, self.count, self.splitter = operand, rows, count, splitter
        self.pitch = -(-k // SPLIT_STEP) * SPLIT_STEP
        self._parts: Array = None
        self._exponent: Array = None
        self._states: Array = None

    def request(self, take: Callable[[tuple[int, int], str, Take], None]) -> None:
        """Asks for memory: `take(shape, dtype, on_allocated)`."""
        rows, count = self.rows, self.count
        take((rows, 2 * self.pitch), "uint16", functools.partial(setattr, self, "_parts"))
        take((2, rows), "int32", functools.partial(setattr, self, "_exponent"))
        take((count, STATE_WORDS), "int32", functools.partial(setattr, self, "_states"))

    def view(self, array: Array, rows: slice, parts: slice) -> SplitView:
        """These rows of the block, that came in these parts; `array` has their numbers."""
        halves = self._parts[rows].reshape(-1, 2, self.pitch).transpose(1, 0, 2)
        return SplitView(array, halves, self._exponent[:, rows], self._states[parts])
