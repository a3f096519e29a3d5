"""What a run holds on its devices: blocks of A and B that arrive in parts, and room for C."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..arrays.operand import Operand, Operands
from ..arrays.strides import address
from ..catalog import Variant
from ..devices.base import Device, Stream
from ..devices.split_operands import SplitBlock
from ..planning.partition import Span
from ..planning.plan import LINE_BYTES, Block, Panel, Plan
from .transfers import Later, Stop

_ALIGN = 256  # bytes: rows that begin on whole cache lines let kernels read vectors


class Slab:
    """A block of A or B on its device.

    `ready` has for each part a future of the event after which it is there (None: it always
    was). `read` gets the events after which nothing reads the block any more, and `before` is
    the slab whose memory it takes over then.

    Where products read the block split (`split`), each part is split when it is there, and `halves`
    has the events after which it is.
    """

    def __init__(self, block: Block) -> None:
        self.block = block
        self.split: SplitBlock | None = None
        self.buffer: Any = None
        self.before: Slab | None = None
        self.lock = threading.Lock()
        self.await_parts()

    def await_parts(self, there: bool = False) -> None:
        """None has been brought; or all were always `there`, where the caller has the matrix."""
        self.there, parts = there, range(len(self.block.parts))
        self.ready: list[Later] = [Later() for _ in parts]
        self.halves: list[Later] = [Later() for _ in parts]
        self.read = Later()
        self.claimed: set[int] = set(parts) if there else set()
        self.claimed_to_split: set[int] = set()
        for future in self.ready if there else ():
            future.settle()

    def claim(self, part: int) -> bool:
        """Whether a part is still to be brought; who asks brings it."""
        return self._claim(part, self.claimed)

    def claim_to_split(self, part: int) -> bool:
        """Whether a part is still to be split; who asks splits it."""
        return self.split is not None and self._claim(part, self.claimed_to_split)

    def _claim(self, part: int, claimed: set[int]) -> bool:
        with self.lock:
            if part in claimed:
                return False
            claimed.add(part)
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

    def view(self, rows: Span, cols: Span, *, split: bool = False) -> Any:
        """What of the block some rows and columns of C need: a matrix, or a `SplitView` of one."""
        block = self.block
        if block.operand == "A":
            which = rows.within(block.rows)
            array = self.buffer[which]
        else:
            which = cols.within(block.cols)
            array = self.buffer[:, which]
        if not split or self.split is None:
            return array
        parts = self.meeting(rows, cols)
        return self.split.view(array, which, slice(parts[0], parts[-1] + 1))

    def split_part(self, part: int, layouts: str, stream: Stream) -> None:
        """Splits a part, which is there, once it was claimed; `layouts` as in `Splitter`."""
        assert self.split is not None
        self.split.splitter.split_part(self.block.operand, layouts, self._view_of(part), stream)

    def _view_of(self, part: int) -> Any:
        """As `view`, of one part."""
        rows, cols = self.block.rows, self.block.cols
        if self.block.operand == "A":
            return self.view(self.block.parts[part], cols, split=True)
        return self.view(rows, self.block.parts[part], split=True)


class _Request(NamedTuple):
    """A matrix that memory is wanted for, and who is told where it is."""

    rows: int
    cols: int
    order: str
    dtype: np.dtype
    on_allocated: Callable[[Any], None]

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

    def place(self, piece: Any, at: int = 0) -> None:
        """Puts it into a piece of memory, from byte `at` on."""
        self._give(piece[at : at + self.bytes].view(self.dtype).reshape(self.lines))

    def place_apart(self, piece: np.ndarray, gap: int) -> None:
        """Puts it at the begin of a piece of the host's memory, `gap` bytes between its lines."""
        count, length = self.lines
        size = self.dtype.itemsize
        strides = length * size + gap, size
        self._give(np.ndarray((count, length), self.dtype, piece, strides=strides))

    def _give(self, lines: Any) -> None:
        self.on_allocated(lines if self.order == "n" else lines.T)


class MemoryRequests:
    """Takes a device's memory for matrices of `dtype`, if nothing else is asked for. Matrices of
    one space are there together; those of another turn of the same space lie where these did."""

    def __init__(self, device: Device, dtype: np.dtype) -> None:
        self.device, self.dtype = device, dtype
        self.spaces: dict[Hashable, dict[int, list[_Request]]] = defaultdict(
            lambda: defaultdict(list)
        )
        self.taken = range(0)  # addresses, once it is

    def request(
        self, space: Hashable, turn: int, shape: tuple[int, int],
        on_allocated: Callable[[Any], None], order: str = "n", dtype: np.dtype | None = None,
    ) -> None:  # fmt: skip
        """`on_allocated` will be called with a matrix of this shape, storage order and dtype."""
        made = _Request(*shape, order, dtype or self.dtype, on_allocated)
        self.spaces[space][turn].append(made)

    def allocate(self) -> None:
        """Takes all of it. Raises `MemoryError` if the device has not so much.

        On a GPU in one piece, so that runs alike get the same addresses again. Elsewhere each
        matrix has a piece of its size, for the emulator finds only what is beyond a piece; and
        rows apart, if the device wants them so.
        """
        with self.device.using(self.device.allocation_stream):
            if self.device.calls() is None:
                self._allocate_apart()
            else:
                self._allocate_together()
        self.spaces.clear()

    def _allocate_apart(self) -> None:
        gap = self.device.row_gap
        for turns in self.spaces.values():
            for in_turns in itertools.zip_longest(*turns.values()):
                requests = [x for x in in_turns if x is not None]
                piece = self._piece(max(x.bytes_apart(gap) for x in requests))
                for each in requests:
                    if gap:
                        each.place_apart(piece, gap)
                    else:
                        each.place(piece)

    def _allocate_together(self) -> None:
        sizes = [max(sum(x.room for x in w) for w in turns.values())
                 for turns in self.spaces.values()]  # fmt: skip
        piece = self._piece(sum(sizes))
        self.taken = range(address(piece), address(piece) + piece.nbytes)
        begin = 0
        for size, turns in zip(sizes, self.spaces.values(), strict=True):
            for requests in turns.values():
                at = begin
                for each in requests:
                    each.place(piece, at)
                    at += each.room
            begin += size

    def _piece(self, size: int) -> Any:
        return self.device.empty(1, max(1, size), "uint8")[0]


class SharedBlocks:
    """Blocks of one operand ("A" or "B") that several runs need, brought to their devices once."""

    def __init__(self, operand: str) -> None:
        self.operand = operand
        self.lock = threading.Lock()
        self.slabs: dict[Block, Slab] = {}


class Blocks:
    """The blocks of A and B of one run: where each is, and who has it from where. Takes their
    memory. Raises `MemoryError` if a device has not so much."""

    def __init__(
        self, plan: Plan, devices: Sequence[Device], variant: Variant, operands: Operands,
        stop: Stop, shared: SharedBlocks | None,
    ) -> None:  # fmt: skip
        self.plan, self.devices, self.operands, self.stop = plan, devices, operands, stop
        self.variant, self.shared = variant, shared
        self.slabs: dict[Block, Slab] = {}
        self._needs: dict[tuple[int, int, str], Slab] = {}
        self._by_place: dict[tuple, Slab] = {}
        dtype = np.dtype(plan.problem.operands)
        memory = [MemoryRequests(device, dtype) for device in devices]
        with shared.lock if shared else contextlib.nullcontext():
            self._request_memory(memory)
            for each in memory:
                each.allocate()
        self.taken = [each.taken for each in memory]

    def _request_memory(self, memory: Sequence[MemoryRequests]) -> None:
        """Asks for room for every block that is not used where the caller has it."""
        for block in self.plan.blocks:
            common = self.shared is not None and block.operand == self.shared.operand
            known = self.shared.slabs if self.shared and common else self.slabs
            slab = known.get(block)
            if slab is None:
                slab = known[block] = Slab(block)
                self._place(slab, memory[block.device])
            if slab.split is None:
                self._place_split(slab, memory[block.device])
            self.slabs[block] = self._by_place[_place(block, block.device)] = slab
            self._let_stop(slab)
            for worker in block.workers:
                self._needs[worker, block.turn, block.operand] = slab

    def _let_stop(self, slab: Slab) -> None:
        self.stop.futures += [*slab.ready, *slab.halves, slab.read]

    def await_parts(self) -> None:
        """Nothing has been brought or split yet."""
        for slab in self.slabs.values():
            slab.await_parts(slab.there)
            self._let_stop(slab)

    def _place(self, slab: Slab, memory: MemoryRequests) -> None:
        """Where a block will be: in the caller's matrix if the device multiplies that."""
        block, device = slab.block, self.devices[slab.block.device]
        source = self.source(block)
        if held := self.plan.turns_in_memory:
            (worker,) = block.workers
            slab.before = self._needs.get((worker, block.turn - held, block.operand))
        if source.usable_in_place(device, memory.dtype):
            slab.buffer = source.array
            slab.await_parts(there=True)
            return
        (rows, cols), order = source.shape, source.order or "n"
        step = LINE_BYTES // memory.dtype.itemsize if self.plan.padded else 1
        shape = (rows, -(-cols // step) * step) if order == "n" else (-(-rows // step) * step, cols)
        memory.request(
            self._space(slab),
            block.turn,
            shape,
            lambda m: setattr(slab, "buffer", m[:rows, :cols]),
            order,
        )

    def _space(self, slab: Slab) -> tuple[Hashable, ...]:
        """Where a block's memory is: its own, or that of the turns that come and go."""
        block = slab.block
        if held := self.plan.turns_in_memory:
            return block.operand, block.workers[0], block.turn % held
        return block.operand, id(slab)

    def _place_split(self, slab: Slab, memory: MemoryRequests) -> None:
        """Asks for room for a block's halves, where products read those."""
        block, device = slab.block, self.devices[slab.block.device]
        if not self.plan.split_once:
            return
        splitter = device.splitter(self.variant, memory.dtype.name)
        if splitter is None:
            return
        of_a = block.operand == "A"
        rows, k = (block.rows, block.cols) if of_a else (block.cols, block.rows)
        slab.split = SplitBlock(block.operand, len(rows), len(k), len(block.parts), splitter)
        space = self._space(slab)

        def take(shape: tuple[int, int], dtype: str, on_allocated: Callable[[Any], None]) -> None:
            memory.request(space, block.turn, shape, on_allocated, dtype=np.dtype(dtype))

        slab.split.request(take)

    def source(self, block: Block) -> Operand:
        """A block, where the caller has it."""
        whole = self.operands.a if block.operand == "A" else self.operands.b
        return whole.part(block.rows, block.cols)

    def of(self, worker: int, turn: int) -> list[Slab]:
        """The blocks that a turn needs: of A, then of B; none if K is empty."""
        found = (self._needs.get((worker, turn, operand)) for operand in "AB")
        return [slab for slab in found if slab is not None]

    def read_by(self, worker: int, turn: int, panel: Panel) -> tuple[Any, Any]:
        """The parts of A and B that a worker's product of a panel reads."""
        if slabs := self.of(worker, turn):
            split = self.split(worker, turn)
            a, b = (slab.view(panel.rows, panel.cols, split=split) for slab in slabs)
            return a, b
        device, dtype = self.devices[self.plan.workers[worker].device], self.plan.problem.operands
        empty = device.empty
        return empty(len(panel.rows), 0, dtype), empty(0, len(panel.cols), dtype)

    def split(self, worker: int, turn: int) -> bool:
        """Whether products of a turn read its blocks split."""
        return all(slab.split for slab in self.of(worker, turn))

    def relays(self, slab: Slab, part: int) -> bool:
        """Whether a device has a part from another device, and not from where the matrix is."""
        whole = self.operands.a if slab.block.operand == "A" else self.operands.b
        return whole.home is None and slab.block.source(part) != slab.block.device

    def at_source(self, slab: Slab, part: int) -> Slab:
        """The slab of the same block on the device that has a part from the host."""
        return self._by_place[_place(slab.block, slab.block.source(part))]

    def clear(self) -> None:
        for each in (self.slabs, self._needs, self._by_place):
            each.clear()


def _place(block: Block, device: int) -> tuple:
    """What tells a block on a device from all others of its plan."""
    return block.operand, block.rows, block.cols, block.turn, device
