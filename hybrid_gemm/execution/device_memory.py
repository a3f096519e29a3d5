"""What a run holds on its devices: blocks of A and B that arrive in parts, and room for C."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import Future

import numpy as np

from ..arrays.strides import layout
from ..devices.base import Device
from ..planning.partition import Span
from ..planning.plan import Block

_ALIGN = 256  # bytes: rows that begin on whole cache lines let kernels read vectors


class Slab:
    """A block of A or B on its device.

    `ready` has for each part a future of the event after which it is there (None: it always
    was). `read` gets the events after which nothing reads the block any more, and `before` is
    the slab whose memory it takes over then.
    """

    def __init__(self, block: Block):
        self.block = block
        self.buffer = None
        self.before: Slab | None = None
        self.ready = [Future() for _ in block.parts]
        self.read: Future = Future()
        self.lock = threading.Lock()
        self.claimed: set[int] = set()

    def claim(self, part: int) -> bool:
        """Whether a part is still to be brought; who asks brings it."""
        with self.lock:
            if part in self.claimed:
                return False
            self.claimed.add(part)
            return True

    def where(self, part: int) -> tuple[slice, slice]:
        """A part as rows and columns of the buffer."""
        block = self.block
        if block.operand == "A":
            return block.parts[part].within(block.rows), slice(None)
        return slice(None), block.parts[part].within(block.cols)

    def meeting(self, rows: Span, cols: Span) -> list[int]:
        """The parts that some rows and columns of C need."""
        side = rows if self.block.operand == "A" else cols
        return [i for i, part in enumerate(self.block.parts) if part.meets(side)]

    def view(self, rows: Span, cols: Span):
        """What of the block some rows and columns of C need."""
        if self.block.operand == "A":
            return self.buffer[rows.within(self.block.rows)]
        return self.buffer[:, cols.within(self.block.cols)]


class Layout:
    """Takes a device's memory for a run. Matrices of one space are there together; those of
    another turn of the same space lie where these did."""

    def __init__(self, device: Device, dtype: np.dtype):
        self.device, self.dtype = device, dtype
        self.spaces = defaultdict(lambda: defaultdict(list))

    def wish(
        self, space, turn: int, shape, give: Callable, order: str = "n", dtype=None
    ) -> None:  # fmt: skip
        """`give` will be called with a matrix of this shape, storage order and dtype (default the
        layout's)."""
        self.spaces[space][turn].append((shape, order, give, dtype or self.dtype))

    def take(self) -> None:
        """Takes all of it. Raises `MemoryError` if the device has not so much."""
        with self.device.using(self.device.allocation_stream):
            for turns in self.spaces.values():
                sizes = (sum(_size(shape, dtype) for shape, *_, dtype in w) for w in turns.values())
                flat = self.device.empty(1, max(1, *sizes), "uint8")[0]
                for wishes in turns.values():
                    at = 0
                    for (rows, cols), order, give, dtype in wishes:
                        part = flat[at : at + rows * cols * dtype.itemsize].view(dtype)
                        give(
                            part.reshape(rows, cols) if order == "n" else part.reshape(cols, rows).T
                        )
                        at += _size((rows, cols), dtype)
        self.spaces.clear()


def _size(shape, dtype: np.dtype) -> int:
    rows, cols = shape
    return -(-rows * cols * dtype.itemsize // _ALIGN) * _ALIGN


def order_of(view) -> str:
    """The storage order in which a copy of a view is straight."""
    found = layout(view)
    return found[0] if found else "n"
