"""The memory that a streamed program takes of its devices: laid out once, taken at each play.

Matrices of one space are there together. Those of another turn of the same space lie where these
did. On a GPU all is one piece, so that plays alike get the same addresses again. Elsewhere each
matrix has a piece of its size, since the emulator finds only what is beyond a piece; its rows lie
apart if the device wants them so.
"""

from __future__ import annotations

import functools
import itertools
import threading
from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from ..arrays.strides import address
from ..devices.base import Device
from ..devices.split_operands import SplitBlock, Splitter
from .transfers import Later

_ALIGN = 256  # bytes: rows that begin on whole cache lines let kernels read vectors


class _Matrix(NamedTuple):
    """A matrix that memory is wanted for, and the slot that it gets."""

    slot: int
    rows: int
    cols: int
    order: str
    dtype: np.dtype

    @property
    def lines(self) -> tuple[int, int]:
        """How many rows, or columns in order "t", lie one after the other, and their length."""
        return (self.rows, self.cols) if self.order == "n" else (self.cols, self.rows)

    @property
    def bytes(self) -> int:
        return self.rows * self.cols * self.dtype.itemsize

    @property
    def room(self) -> int:
        """Its bytes, where another matrix lies behind it."""
        return -(-self.bytes // _ALIGN) * _ALIGN

    def bytes_apart(self, gap: int) -> int:
        """Its bytes with `gap` bytes between its lines."""
        return self.bytes + gap * (self.lines[0] - 1) if self.bytes else 0

    def of(self, piece: Any, at: int, gap: int) -> Any:
        """The matrix in a piece of memory, from byte `at` on."""
        if gap:
            size = self.dtype.itemsize
            strides = self.lines[1] * size + gap, size
            lines = np.ndarray(self.lines, self.dtype, piece, at, strides)
        else:
            lines = piece[at : at + self.bytes].view(self.dtype).reshape(self.lines)
        return lines if self.order == "n" else lines.T


@dataclass
class Layout:
    """Pieces of devices' memory, as (device, bytes), and which matrices lie where in them. `splits`
    are blocks to be split, each with its slot and those of its arrays."""

    pieces: list[tuple[Device, int]] = field(default_factory=list)
    places: list[tuple[_Matrix, int, int, int]] = field(default_factory=list)  # piece, byte, gap
    splits: list[tuple[int, Any, list[int]]] = field(default_factory=list)

    def take(self) -> list[Any]:
        """The pieces. Raises `MemoryError` if a device has not so much."""
        taken = []
        try:
            for device, size in self.pieces:
                with device.using(device.allocation_stream):
                    taken.append(device.empty(1, max(1, size), "uint8")[0])
        except BaseException:  # an error's traceback would keep them
            taken.clear()
            raise
        return taken

    def fill(self, pieces: Sequence[Any], slots: list[Any]) -> None:
        """Puts the matrices in these pieces into their slots."""
        for matrix, piece, at, gap in self.places:
            slots[matrix.slot] = matrix.of(pieces[piece], at, gap)
        for slot, make, arrays in self.splits:
            slots[slot] = block = make()
            given = iter(arrays)
            block.request(lambda _shape, _dtype, give, given=given: give(slots[next(given)]))

    def spans(self, pieces: Sequence[Any]) -> list[range]:
        """The addresses of each piece."""
        return [range(address(x), address(x) + x.nbytes) for x in pieces]


class MemoryRequests:
    """What a program wants of some devices; `slots` counts the slots that are taken."""

    def __init__(self, slots: itertools.count) -> None:
        self._slots = slots
        self._spaces: dict[Device, dict[Hashable, dict[int, list[_Matrix]]]] = defaultdict(
            lambda: defaultdict(lambda: defaultdict(list))
        )
        self._splits: list[tuple[int, Any, list[int]]] = []

    def request(
        self, device: Device, space: Hashable, turn: int, shape: tuple[int, int], dtype: Any,
        order: str = "n",
    ) -> int:  # fmt: skip
        """The slot that a matrix of this shape, dtype and storage order will have."""
        slot = next(self._slots)
        self._spaces[device][space][turn].append(_Matrix(slot, *shape, order, np.dtype(dtype)))
        return slot

    def request_split(
        self, device: Device, space: Hashable, turn: int, operand: str, rows: int, k: int,
        count: int, splitter: Splitter,
    ) -> int:  # fmt: skip
        """The slot of a `SplitBlock`."""
        slot, arrays = next(self._slots), list[int]()
        make = functools.partial(SplitBlock, operand, rows, k, count, splitter)
        make().request(
            lambda shape, dtype, _give: arrays.append(
                self.request(device, space, turn, shape, dtype)
            )
        )
        self._splits.append((slot, make, arrays))
        return slot

    def layout(self) -> Layout:
        """Where all of it lies."""
        made = Layout(splits=self._splits)
        for device, spaces in self._spaces.items():
            if device.calls() is None:
                self._lay_apart(made, device, spaces)
            else:
                self._lay_together(made, device, spaces)
        return made

    def _lay_apart(self, made: Layout, device: Device, spaces: Any) -> None:
        gap = device.row_gap
        for turns in spaces.values():
            for in_turns in itertools.zip_longest(*turns.values()):
                matrices = [x for x in in_turns if x is not None]
                made.places += [(x, len(made.pieces), 0, gap) for x in matrices]
                made.pieces.append((device, max(x.bytes_apart(gap) for x in matrices)))

    def _lay_together(self, made: Layout, device: Device, spaces: Any) -> None:
        begin = 0
        for turns in spaces.values():
            ends = [begin]
            for matrices in turns.values():
                at = begin
                for x in matrices:
                    made.places.append((x, len(made.pieces), at, 0))
                    at += x.room
                ends.append(at)
            begin = max(ends)
        made.pieces.append((device, begin))


class SharedBlock:
    """A block that several programs read: its arrays, and the events after which its parts are
    there, and split. Who claims a part brings, or splits, it."""

    def __init__(self, arrays: list[Any], parts: int) -> None:
        self.arrays = arrays
        self.ready, self.halves = ([Later() for _ in range(parts)] for _ in "rh")
        self._free = {(kind, part) for kind in ("ready", "halves") for part in range(parts)}
        self._lock = threading.Lock()

    def claim(self, kind: str, part: int) -> bool:
        """Whether a part is still to be brought ("ready") or split ("halves")."""
        with self._lock:
            free = (kind, part) in self._free
            self._free.discard((kind, part))
            return free


class SharedBlocks:
    """Blocks of one operand ("A" or "B") that several programs need, brought to their devices
    once."""

    def __init__(self, operand: str) -> None:
        self.operand = operand
        self._lock = threading.Lock()
        self._blocks: dict[Hashable, SharedBlock] = {}

    def block(
        self, key: Hashable, layout: Layout, wanted: Sequence[int], parts: int
    ) -> SharedBlock:
        """The block of this key, whose memory is taken for the first that asks. `wanted` are the
        slots that `layout` fills."""
        with self._lock:
            held = self._blocks.get(key)
            if held is None:
                slots: list[Any] = [None] * (1 + max(wanted, default=0))
                layout.fill(layout.take(), slots)
                held = SharedBlock([slots[i] for i in wanted], parts)
                self._blocks[key] = held
            return held
