"""Where a streamed program has its matrices: blocks of A and B, which come in parts, and C in
panels. What a device reads, or makes, where the caller has it takes no memory.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from ..arrays.operand import Operand, Operands
from ..catalog import Variant
from ..devices.base import Device
from ..planning.partition import Span
from ..planning.plan import LINE_BYTES, PRODUCTS_AT_ONCE, TILES_IN_MEMORY, Block, Panel, Plan, Strip
from ..planning.plan import Worker as PlannedWorker
from ..planning.steps import Step, steps, tiles_of
from .commands import MULTIPLY, OUT, A, B, Ref, SplitRef, Stream
from .device_memory import Layout, MemoryRequests, SharedBlocks


@dataclass(eq=False)
class Slab:
    """A block of A or B on its device: what of which slot it is, the slot of what it is split into,
    the events after which each part is there (None: it always was), and split; those after which
    nothing reads it any more, and the slab whose memory it takes over then."""

    block: Block
    base: Ref
    split: int | None = None
    before: Slab | None = None
    ready: dict[int, int | None] = field(default_factory=dict)
    halves: dict[int, int] = field(default_factory=dict)
    read: tuple[int, ...] | None = None
    common: int | None = None  # which of the blocks that several programs share

    def where(self, part: int) -> Ref:
        """A part of it."""
        block, base = self.block, self.base
        if block.operand == "A":
            rows = block.parts[part] + (base.rows.start - block.rows.start)
            return Ref(base.slot, rows, base.cols)
        cols = block.parts[part] + (base.cols.start - block.cols.start)
        return Ref(base.slot, base.rows, cols)

    def meeting(self, rows: Span, cols: Span) -> list[int]:
        """The parts that some rows and columns of C need."""
        side = rows if self.block.operand == "A" else cols
        return [i for i, part in enumerate(self.block.parts) if part.meets(side)]

    def view(self, rows: Span, cols: Span, split: bool) -> Ref | SplitRef:
        """What of it some rows and columns of C need."""
        block, base = self.block, self.base
        if block.operand == "A":
            which = rows + -block.rows.start
            numbers = Ref(base.slot, which + base.rows.start, base.cols)
        else:
            which = cols + -block.cols.start
            numbers = Ref(base.slot, base.rows, which + base.cols.start)
        if not split or self.split is None:
            return numbers
        parts = self.meeting(rows, cols)
        return SplitRef(numbers, self.split, which, slice(parts[0], parts[-1] + 1))


class Worker:
    """A worker, its steps, and where its strips are made."""

    def __init__(self, plan: Plan, planned: PlannedWorker, device: Device, variant: Variant):
        self.planned, self.index, self.device = planned, planned.index, device
        self.tiles = tiles_of(plan, planned)
        self.panels = [panel for tile in self.tiles for panel in tile]
        self.steps = steps(planned, self.tiles)
        # Kernels whose blocks wait for each other must have the device for themselves, and a
        # library's may take another path when they do not.
        kernel = variant.kernel
        count = 1 if kernel.library or kernel.flags else PRODUCTS_AT_ONCE
        self.products_at_once = min(count, max(map(len, self.tiles)))
        multiplying = (f"multiply {i}" for i in range(self.products_at_once))
        self.streams = [*map(self.stream, ("copy", *multiplying, "sum"))]  # the last is urgent
        self.longest = max(len(box.ks) for box in planned.boxes)
        # One lane does where there is nothing to overlap.
        self.simple = len(planned.boxes) == len(self.panels) == 1
        self.staged = not (device.host_memory or device.checks)
        self.targets: dict[Strip, Ref] = {}
        self.rooms: dict[Strip, dict[int, Ref]] = {}  # where others' partials are fetched to

    def lane(self, name: str) -> str:
        return MULTIPLY if self.simple else name

    def stream(self, use: str) -> Stream:
        return Stream(self.index, use)

    def own_strips(self, panel: Panel) -> list[Strip]:
        """Those of a panel that this worker finishes."""
        return [strip for strip in panel.strips if strip.owner == self.index]


class ProgramMatrices:
    """The matrices of a program, `operands` of which lie so, and which slots they get. A program
    among several shares the blocks of one operand with them."""

    def __init__(
        self, plan: Plan, devices: Sequence[Device], variant: Variant, operands: Operands,
        shared: SharedBlocks | None,
    ) -> None:  # fmt: skip
        self.plan, self.devices, self.variant, self.operands = plan, devices, variant, operands
        self.problem, self.shared = plan.problem, shared
        self.dtype, self.operand_dtype = np.dtype(plan.problem.dtype), plan.problem.operands
        self.result_dtype = _result_dtype(plan, operands)
        self.summed = plan.summed
        self.reduce = plan.reduce if plan.summed else "ordered"
        self.on_device = self.reduce != "critical"
        self.workers = {
            w.index: Worker(plan, w, devices[w.device], variant) for w in plan.workers if w.boxes
        }
        self._slots = itertools.count(OUT + 1)
        self._memory = MemoryRequests(self._slots)
        self.common: list[tuple[Any, Layout, list[int], int]] = []
        self._needs: dict[tuple[int, int, str], Slab] = {}
        self._by_place: dict[tuple, Slab] = {}
        self._parts: dict[Step, list[tuple[Slab, int]]] = {}
        self.partials: dict[tuple[Panel, int], Ref] = {}
        self.subtotals: dict[tuple[Strip, int], Ref] = {}
        self._empty: dict[tuple[Panel, int], tuple[Ref, Ref]] = {}
        self._request_blocks()
        for worker in self.workers.values():
            self._request_results(worker)
        self.layout, self.slots = self._memory.layout(), next(self._slots)

    def _request_blocks(self) -> None:
        """Places for every block that is not used where the caller has it."""
        for block in self.plan.blocks:
            slab = self._slab(block)
            self._by_place[_place(block, block.device)] = slab
            for worker in block.workers:
                self._needs[worker, block.turn, block.operand] = slab

    def _slab(self, block: Block) -> Slab:
        device, source = self.devices[block.device], self._operand(block)
        where = Ref(A if block.operand == "A" else B, block.rows, block.cols)
        # Blocks of turns take each other's memory, which other programs still read.
        shared = None if self.plan.turns_in_memory else self.shared
        common = shared is not None and block.operand == shared.operand
        memory = MemoryRequests(self._slots) if common else self._memory
        slab = Slab(block, where)
        held = self.plan.turns_in_memory
        space: tuple[Any, ...] = (block.operand, _place(block, block.device))
        if held:
            (worker,) = block.workers
            slab.before = self._needs.get((worker, block.turn - held, block.operand))
            space = block.operand, worker, block.turn % held
        wanted = []
        if source.usable_in_place(device, self.operand_dtype):
            slab.ready = dict.fromkeys(range(len(block.parts)))
        else:
            slab.base = self._buffer(memory, block, source.order or "n", space)
            wanted.append(slab.base.slot)
        split = self.plan.split_once
        splitter = device.splitter(self.variant, self.operand_dtype) if split else None
        if splitter is not None:
            of_a = block.operand == "A"
            rows, k = (block.rows, block.cols) if of_a else (block.cols, block.rows)
            slab.split = memory.request_split(
                device, space, block.turn, block.operand, len(rows), len(k), len(block.parts),
                splitter,
            )  # fmt: skip
            wanted.append(slab.split)
        if common and wanted:
            slab.common = len(self.common)
            key = block, slab.split is not None
            self.common.append((key, memory.layout(), wanted, len(block.parts)))
        return slab

    def _buffer(self, memory: MemoryRequests, block: Block, order: str, space: Any) -> Ref:
        rows, cols = len(block.rows), len(block.cols)
        step = LINE_BYTES // np.dtype(self.operand_dtype).itemsize if self.plan.padded else 1
        shape = (rows, -(-cols // step) * step) if order == "n" else (-(-rows // step) * step, cols)
        device = self.devices[block.device]
        slot = memory.request(device, space, block.turn, shape, self.operand_dtype, order)
        return Ref(slot, Span(0, rows), Span(0, cols))

    def _operand(self, block: Block) -> Operand:
        return self.operands.a if block.operand == "A" else self.operands.b

    def _request_results(self, worker: Worker) -> None:
        """A worker's room for C."""
        for panel in worker.panels:
            space = "C", worker.index, panel.tile % TILES_IN_MEMORY
            request = partial(self._matrix, worker.device, space, panel.tile)
            rows, cols = len(panel.rows), len(panel.cols)
            if self.summed:
                self.partials[panel, worker.index] = request(rows, cols)
            if not self._of(worker, 0):  # K is empty
                empty = partial(request, dtype=self.operand_dtype)
                self._empty[panel, worker.index] = empty(rows, 0), empty(0, cols)
            for strip, _group in self._subtotals(worker, panel):
                self.subtotals[strip, worker.index] = request(len(strip.rows), cols)
            for strip in worker.own_strips(panel) if self.on_device else ():
                if self._in_place(worker):
                    worker.targets[strip] = Ref(OUT, strip.rows, strip.cols)
                else:
                    size = len(strip.rows), len(strip.cols)
                    worker.targets[strip] = request(*size, dtype=self.result_dtype)
                # With the partial's own leading dimension, which the kernel takes for all.
                worker.rooms[strip] = {
                    w: request(len(strip.rows), cols) for w in self._fetched(worker, strip)
                }

    def _matrix(
        self, device: Device, space: Any, turn: int, rows: int, cols: int, dtype: Any = None
    ) -> Ref:
        asked = dtype or self.dtype
        slot = self._memory.request(device, space, turn, (rows, cols), asked)
        return Ref(slot, Span(0, rows), Span(0, cols))

    def _in_place(self, worker: Worker) -> bool:
        """Whether a worker makes its strips where `out` lies."""
        return self.operands.out.written_in_place(worker.device, self.result_dtype)

    def _subtotals(self, worker: Worker, panel: Panel) -> list[tuple[Strip, tuple[int, ...]]]:
        """A panel's strips, with the workers whose partials this one adds for another device."""
        return [(strip, group) for strip, group in panel.subtotals if group[0] == worker.index]

    def _summands(self, strip: Strip) -> Sequence[tuple[int, ...]]:
        """What a strip's owner adds; NCCL leaves the sum of all in its own."""
        return [(strip.owner,)] if self.reduce == "nccl" else strip.summands

    def _fetched(self, worker: Worker, strip: Strip) -> list[int]:
        """The first workers of what has to be copied to the device of a strip's owner."""
        if not self.summed:
            return []
        firsts = [first for first, *_ in self._summands(strip)]
        return [w for w in firsts if self.workers[w].device is not worker.device]

    def _of(self, worker: Worker, turn: int) -> list[Slab]:
        """The blocks that a turn needs: of A, then of B; none if K is empty."""
        found = (self._needs.get((worker.index, turn, operand)) for operand in "AB")
        return [slab for slab in found if slab is not None]

    def _parts_of(self, worker: Worker, step: Step) -> list[tuple[Slab, int]]:
        """What a step's product reads."""
        found = self._parts.get(step)
        if found is None:
            rows, cols = step.panel.rows, step.panel.cols
            found = self._parts[step] = [
                (slab, part)
                for slab in self._of(worker, step.turn)
                for part in slab.meeting(rows, cols)
            ]
        return found

    def _relays(self, slab: Slab, part: int) -> bool:
        """Whether a device has a part from another device, and not from where the matrix is."""
        block = slab.block
        return self._operand(block).home is None and block.source(part) != block.device

    def _at_source(self, slab: Slab, part: int) -> Slab:
        """The slab of the same block on the device that has a part from the host."""
        return self._by_place[_place(slab.block, slab.block.source(part))]

    def _splits_turn(self, worker: Worker, turn: int) -> bool:
        """Whether products of a turn read its blocks split."""
        return all(slab.split is not None for slab in self._of(worker, turn))

    def _partial(self, panel: Panel, strip: Strip, w: int) -> Ref:
        """A worker's partial of a strip, where it was made."""
        whole = self.partials[panel, w]
        rows, cols = strip.rows + -panel.rows.start, strip.cols + -panel.cols.start
        return Ref(whole.slot, rows, cols)

    def _summand(self, panel: Panel, strip: Strip, group: tuple[int, ...]) -> Ref:
        """What these workers of one device give to a strip's sum, where it is made."""
        if len(group) == 1:
            return self._partial(panel, strip, group[0])
        whole = self.subtotals[strip, group[0]]
        return Ref(whole.slot, whole.rows, Span(0, len(strip.cols)))


def _place(block: Block, device: int) -> tuple:
    """What tells a block on a device from all others of its plan."""
    return block.operand, block.rows, block.cols, block.turn, device


def _result_dtype(plan: Plan, operands: Operands) -> np.dtype:
    """The dtype of finished strips: of 16 bits where tensor cores make C of such operands,
    and each element is written once."""
    narrow = np.dtype(plan.problem.operands)
    given = [x.dtype for x in (operands.c, operands.out) if x is not None]
    fits = plan.writes_once and all(dtype == narrow for dtype in given)
    return narrow if fits else np.dtype(plan.problem.dtype)
