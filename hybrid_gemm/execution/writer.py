"""Writes streamed programs: a plan becomes commands, in an order in which none waits for a later
one.

Parts of A and B are brought some steps ahead of the products that read them; a panel's strips are
summed and given back as soon as all its products are started. What a program depends on is the
plan, the devices, the kernel, and how the matrices lie; not where.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from ..arrays.operand import Operand, Operands
from ..catalog import Variant
from ..devices.base import Device
from ..host.kept import cached_property
from ..planning.partition import Box, Span, cut
from ..planning.plan import LINE_BYTES, PRODUCTS_AT_ONCE, TILES_IN_MEMORY, Block, Panel, Plan, Strip
from ..planning.plan import Worker as PlannedWorker
from ..planning.steps import Step, steps, tiles_of
from . import staging
from .commands import (
    FEED,
    FINISH,
    MULTIPLY,
    OUT,
    A,
    B,
    C,
    Call,
    Collective,
    Command,
    Copy,
    Gate,
    Mark,
    Move,
    Multiply,
    Record,
    Ref,
    Split,
    SplitRef,
    Stream,
    Sum,
    Wait,
)
from .critical_reduction import CriticalReduction
from .device_memory import Layout, MemoryRequests, SharedBlocks

AHEAD = 8  # steps: what they read is on its way while others are multiplied
CHUNK_ROWS = 128  # pieces of a panel are whole block tiles


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


class _Worker:
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


class Writer:
    """The program of one plan, `operands` of which lie so. `resident` has all brought before the
    clock runs. A program among several shares the blocks of one operand with them."""

    def __init__(
        self, plan: Plan, devices: Sequence[Device], variant: Variant, operands: Operands, *,
        resident: bool = False, shared: SharedBlocks | None = None,
    ) -> None:  # fmt: skip
        self.plan, self.devices, self.variant, self.operands = plan, devices, variant, operands
        self.problem, self.resident, self.shared = plan.problem, resident, shared
        self.dtype, self.operand_dtype = np.dtype(plan.problem.dtype), plan.problem.operands
        self.result_dtype = _result_dtype(plan, operands)
        self.summed = plan.summed
        self.reduce = plan.reduce if plan.summed else "ordered"
        self.on_device = self.reduce != "critical"
        self.commands: list[Command] = []
        self.marks: list[Mark] = []
        self.counted = not resident  # whether what is written now is in the timeline
        self.events = 0  # how many there are so far
        self._slots = itertools.count(4)
        self._memory = MemoryRequests(self._slots)
        self.common: list[tuple[Any, Layout, list[int], int]] = []
        self.common_events: dict[int, tuple[int, str, int]] = {}  # events of shared blocks' parts
        self.workers = {
            w.index: _Worker(plan, w, devices[w.device], variant) for w in plan.workers if w.boxes
        }
        self._waited: set[tuple[Stream, int]] = set()
        self._needs: dict[tuple[int, int, str], Slab] = {}
        self._by_place: dict[tuple, Slab] = {}
        self._parts: dict[Step, list[tuple[Slab, int]]] = {}
        self.partials: dict[tuple[Panel, int], Ref] = {}
        self.subtotals: dict[tuple[Strip, int], Ref] = {}
        self._empty: dict[tuple[Panel, int], tuple[Ref, Ref]] = {}
        self.multiplied: dict[tuple[Panel, int], int] = {}
        self.added: dict[tuple[Strip, int], int] = {}
        self.c_ready: dict[Strip, int | None] = {}
        self.finished: dict[Strip, int] = {}
        self.collected: dict[Panel, dict[int, int]] = {}  # NCCL's sums of a panel, by worker
        self._unmultiplied = {panel: len(panel.workers) for panel in plan.panels}
        self._request_blocks()
        for worker in self.workers.values():
            self._request_results(worker)
        self.layout, self.slots = self._memory.layout(), next(self._slots)
        self.remote = [
            w.device for w in self.workers.values() if self.on_device and not w.device.host_memory
        ]
        # Whether one thread starts everything. Threads would rather wait for each other: Python
        # does one thing at a time, for all devices.
        at_once = not plan.turns_in_memory and self.on_device
        self.queued = at_once and all(w.device.queues for w in self.workers.values())
        # Of turns there may be millions of commands: they are written while others are played.
        self._unwritten = self._write_resident() if resident else self._write_streamed()
        self.whole, self._steps = False, 0
        if not plan.turns_in_memory:
            self.write_more(None)
            del self.operands  # the caller's arrays

    def write_more(self, steps: int | None) -> list[Command]:
        """The commands of so many steps more, or of all that are left; none at the end."""
        written, begun = len(self.commands), self._steps
        for _step in itertools.islice(self._unwritten, steps):
            self._steps += 1
        self.whole = steps is None or self._steps < begun + steps
        return self.commands[written:]

    @cached_property
    def gates(self) -> list[Gate]:
        """Where all lanes meet."""
        return [command for command in self.commands if isinstance(command, Gate)]

    @cached_property
    def lanes(self) -> dict[tuple[int, str], list[Command]]:
        """Each lane's commands, of those that are written; all have the gates."""
        lanes: dict[tuple[int, str], list[Command]] = {
            (w, worker.lane(lane)): []
            for w, worker in self.workers.items()
            for lane in (FEED, MULTIPLY, FINISH)
        }
        for command in self.commands:
            if isinstance(command, Gate):
                for each in lanes.values():
                    each.append(command)
            else:
                lanes[command.worker, command.lane].append(command)
        return lanes

    # --- memory ---------------------------------------------------------------------------

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
        common = self.shared is not None and block.operand == self.shared.operand
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
        splitter = device.splitter(self.variant, self.operand_dtype) if self._splits else None
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

    @property
    def _splits(self) -> bool:
        return self.plan.split_once

    def _buffer(self, memory: MemoryRequests, block: Block, order: str, space: Any) -> Ref:
        rows, cols = len(block.rows), len(block.cols)
        step = LINE_BYTES // np.dtype(self.operand_dtype).itemsize if self.plan.padded else 1
        shape = (rows, -(-cols // step) * step) if order == "n" else (-(-rows // step) * step, cols)
        device = self.devices[block.device]
        slot = memory.request(device, space, block.turn, shape, self.operand_dtype, order)
        return Ref(slot, Span(0, rows), Span(0, cols))

    def _operand(self, block: Block) -> Operand:
        return self.operands.a if block.operand == "A" else self.operands.b

    def _request_results(self, worker: _Worker) -> None:
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

    def _in_place(self, worker: _Worker) -> bool:
        """Whether a worker makes its strips where `out` lies."""
        return self.operands.out.written_in_place(worker.device, self.result_dtype)

    def _subtotals(self, worker: _Worker, panel: Panel) -> list[tuple[Strip, tuple[int, ...]]]:
        """A panel's strips, with the workers whose partials this one adds for another device."""
        return [(strip, group) for strip, group in panel.subtotals if group[0] == worker.index]

    def _summands(self, strip: Strip) -> Sequence[tuple[int, ...]]:
        """What a strip's owner adds; NCCL leaves the sum of all in its own."""
        return [(strip.owner,)] if self.reduce == "nccl" else strip.summands

    def _fetched(self, worker: _Worker, strip: Strip) -> list[int]:
        """The first workers of what has to be copied to the device of a strip's owner."""
        if not self.summed:
            return []
        firsts = [first for first, *_ in self._summands(strip)]
        return [w for w in firsts if self.workers[w].device is not worker.device]

    # --- events and streams ---------------------------------------------------------------

    def _event(self) -> int:
        """The number of a new event."""
        self.events += 1
        return self.events - 1

    def _record(self, worker: _Worker, lane: str, stream: Stream) -> int:
        event = self._event()
        self.commands.append(Record(worker.index, worker.lane(lane), stream, event))
        return event

    def _wait(
        self, worker: _Worker, lane: str, stream: Stream, events: Iterable[int | None]
    ) -> None:
        """Lets a stream wait for events, each once."""
        for event in events:
            if event is not None and (stream, event) not in self._waited:
                self.commands.append(Wait(worker.index, worker.lane(lane), stream, event))
                self._waited.add((stream, event))

    def _mark(self, *mark: Any) -> None:
        if self.counted:
            self.marks.append(Mark(*mark))

    # --- the order ------------------------------------------------------------------------

    def _write_resident(self) -> Iterator[None]:
        """Everything is brought first; the clock runs while it is multiplied and summed."""
        for worker, step in self._in_turn():
            self._bring(worker, step)
        for worker, step in self._in_turn():
            self._relay(worker, step)
        there = [e for slab in self._by_place.values() for e in slab.ready.values()]
        self._gate(True, [*there, *self.c_ready.values()])
        self.counted = True
        for worker, step in self._in_turn():
            self._multiply(worker, step, there=True)
        events: dict[Strip, int] = {}
        for panels in self._panels_in_turn():
            for worker, panel in panels:
                self._add_subtotals(worker, panel)
            for worker, panel in panels:
                for strip in worker.own_strips(panel) if self.on_device else ():
                    events[strip] = self._finish_strip(worker, panel, strip)
        self._write_critical()
        self._gate(False, ())
        self.counted = False
        for strip, event in events.items():
            self._give_back(self.workers[strip.owner], strip, event)
        yield

    def _gate(self, starts: bool, events: Iterable[int | None]) -> None:
        self.commands.append(Gate(-1, "", starts, tuple(e for e in events if e is not None)))

    def _write_streamed(self) -> Iterator[None]:
        """Uploads some steps ahead, then what is relayed, products, sums and downloads."""
        order = [*self._in_turn()]
        ahead = deque(order)
        left = {w: deque(worker.steps) for w, worker in self.workers.items()}

        def bring(upto: int) -> None:
            while ahead and len(order) - len(ahead) < upto and self._may_bring(*ahead[0]):
                self._bring(*ahead.popleft())

        done = 0
        while any(left.values()):
            before = done
            for w, worker in self.workers.items():
                if left[w] and self._may_start(worker, left[w][0]):
                    step = left[w].popleft()
                    done += 1
                    bring(AHEAD * len(self.workers) + done)
                    self._bring(worker, step)  # if those ahead of it had to wait
                    self._relay(worker, step)
                    self._multiply(worker, step)
                    yield
            assert done > before  # the last tile but one of some worker is always finished
        self._write_critical()
        yield

    def _in_turn(self) -> Iterator[tuple[_Worker, Step]]:
        """The first step of each worker, then the second of each, and so on."""
        workers = self.workers.values()
        for number in range(max((len(w.steps) for w in workers), default=0)):
            yield from ((w, w.steps[number]) for w in workers if number < len(w.steps))

    def _panels_in_turn(self) -> Iterator[list[tuple[_Worker, Panel]]]:
        """The first panels of all workers, then the second ones. Sums are started in this order,
        and one that waits holds up those behind it."""
        workers = self.workers.values()
        for number in range(max((len(w.panels) for w in workers), default=0)):
            yield [(w, w.panels[number]) for w in workers if number < len(w.panels)]

    # --- bring ----------------------------------------------------------------------------

    def _of(self, worker: _Worker, turn: int) -> list[Slab]:
        """The blocks that a turn needs: of A, then of B; none if K is empty."""
        found = (self._needs.get((worker.index, turn, operand)) for operand in "AB")
        return [slab for slab in found if slab is not None]

    def _parts_of(self, worker: _Worker, step: Step) -> list[tuple[Slab, int]]:
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

    def _may_bring(self, worker: _Worker, step: Step) -> bool:
        """Whether what has the memory of a step's blocks, and of its strips, is read by commands
        that are written."""
        blocks = all(
            slab.before is None or slab.before.read is not None
            for slab in self._of(worker, step.turn)
        )
        return blocks and (self.operands.c is None or self._may_start(worker, step))

    def _may_start(self, worker: _Worker, step: Step) -> bool:
        """Whether the strips whose memory a step's panel takes are given back by commands that are
        written."""
        return not step.first or all(s in self.finished for s in self._former(worker, step.panel))

    def _former(self, worker: _Worker, panel: Panel) -> list[Strip]:
        """The strips of the tile that had the memory of this panel's."""
        before = panel.tile - TILES_IN_MEMORY
        earlier = worker.tiles[before] if before >= 0 else []
        return [strip for panel in earlier for strip in panel.strips]

    def _emptied(self, worker: _Worker, panel: Panel) -> list[int]:
        """Events after which these are given back."""
        return [self.finished[strip] for strip in self._former(worker, panel)]

    def _bring(self, worker: _Worker, step: Step) -> None:
        """All that a step reads, from where the matrices are."""
        for slab, part in self._parts_of(worker, step):
            source = self._at_source(slab, part) if self._relays(slab, part) else slab
            if part not in source.ready:
                by = self.workers[source.block.bringer(part)]
                self._bring_part(by, source, part)
        self._bring_c(worker, step)

    def _relays(self, slab: Slab, part: int) -> bool:
        """Whether a device has a part from another device, and not from where the matrix is."""
        block = slab.block
        return self._operand(block).home is None and block.source(part) != block.device

    def _at_source(self, slab: Slab, part: int) -> Slab:
        """The slab of the same block on the device that has a part from the host."""
        return self._by_place[_place(slab.block, slab.block.source(part))]

    def _bring_part(self, worker: _Worker, slab: Slab, part: int) -> None:
        block, operand = slab.block, self._operand(slab.block)
        rows, cols = block.rows, block.cols
        if block.operand == "A":
            source = Ref(A, block.parts[part], cols)
        else:
            source = Ref(B, rows, block.parts[part])
        after = (slab.before.read or ()) if slab.before else ()
        key = None if slab.common is None else (slab.common, part)
        slab.ready[part] = event = self._copy_in(
            worker, slab.where(part), source, operand.home, after, self.operand_dtype, key
        )
        if slab.common is not None:
            self.common_events[event] = slab.common, "ready", part

    def _bring_c(self, worker: _Worker, step: Step) -> None:
        """Strips of beta's C, where they are finished."""
        c = self.operands.c
        if c is None or not (step.first and self.problem.beta and self.on_device):
            return
        for strip in worker.own_strips(step.panel):
            if strip in self.c_ready:
                continue
            if c is self.operands.out and self._in_place(worker):
                self.c_ready[strip] = None
                continue
            slot = OUT if c is self.operands.out else C
            self.c_ready[strip] = self._copy_in(
                worker, worker.targets[strip], Ref(slot, strip.rows, strip.cols), c.home,
                tuple(self._emptied(worker, step.panel)), self.result_dtype,
            )  # fmt: skip

    def _copy_in(
        self, worker: _Worker, target: Ref, source: Ref, home: Any, after: tuple[int, ...],
        dtype: Any, shared: tuple[Any, int] | None = None,
    ) -> int:  # fmt: skip
        """The event after which a copy to a worker's device is there."""
        size = target.elements * np.dtype(dtype).itemsize
        lane = worker.lane(FEED)
        if home is None and worker.staged:
            start, stop = self._event(), self._event()
            self.commands.append(
                Move(worker.index, lane, target, source, True, after, start, stop, shared)
            )
        else:
            stream = worker.stream("copy")
            self._wait(worker, FEED, stream, after)
            start = self._record(worker, FEED, stream)
            call = partial(_copy_cast, home=home)
            why = "a matrix is read from where no link goes"
            self.commands.append(
                Call(worker.index, lane, stream, call, (target, source), why, shared=shared)
            )
            stop = self._record(worker, FEED, stream)
        self._mark(worker.index, "upload", start, stop, size)
        return stop

    def _relay(self, worker: _Worker, step: Step) -> None:
        """What a step reads, and another device has from the host, from there."""
        for slab, part in self._parts_of(worker, step):
            if part in slab.ready or not self._relays(slab, part):
                continue
            there, by = self._at_source(slab, part), self.workers[slab.block.bringer(part)]
            stream, target = by.stream("copy"), slab.where(part)
            before = slab.before.read or () if slab.before else ()
            self._wait(by, FEED, stream, (there.ready[part], *before))
            start = self._record(by, FEED, stream)
            self.commands.append(
                Copy(by.index, by.lane(FEED), stream, target, there.where(part))
            )  # fmt: skip
            slab.ready[part] = stop = self._record(by, FEED, stream)
            size = target.elements * np.dtype(self.operand_dtype).itemsize
            self._mark(by.index, "relay", start, stop, size)

    # --- multiply -------------------------------------------------------------------------

    def _multiply(self, worker: _Worker, step: Step, there: bool = False) -> None:
        """A step's product, where all that it reads is on its way, or `there`."""
        panel = step.panel
        stream = worker.streams[1 + step.number % worker.products_at_once]
        events: list[int | None] = []
        if step.first:
            if self.problem.beta and not self.summed and not there:
                events += [self.c_ready[strip] for strip in panel.strips]
            events += self._emptied(worker, panel)
        if not there:
            events += [slab.ready[part] for slab, part in self._parts_of(worker, step)]
        self._wait(worker, MULTIPLY, stream, events)
        self._split(worker, step, stream)
        start, flops = self._record(worker, MULTIPLY, stream), 0
        for product in self._products(worker, step, stream):
            self.commands.append(product)
            flops += product.flops
        stop = self._record(worker, MULTIPLY, stream)
        self._mark(worker.index, "multiply", start, stop, 0, flops)
        if self.plan.turns_in_memory and step.number + 1 == len(worker.tiles[panel.tile]):
            # Nothing reads the blocks any more.
            read = tuple(self._record(worker, MULTIPLY, each) for each in worker.streams[1:-1])
            for slab in self._of(worker, step.turn):
                slab.read = read
        if step.last:
            self.multiplied[panel, worker.index] = stop
            self._unmultiplied[panel] -= 1
            if not self._unmultiplied[panel] and not self.resident and self.on_device:
                self._finish(panel)

    def _splits_turn(self, worker: _Worker, turn: int) -> bool:
        """Whether products of a turn read its blocks split."""
        return all(slab.split is not None for slab in self._of(worker, turn))

    def _split(self, worker: _Worker, step: Step, stream: Stream) -> None:
        """Has what a product reads split on its stream, or lets that wait where another splits
        it."""
        if not self._splits_turn(worker, step.turn):
            return
        for slab, part in self._parts_of(worker, step):
            if part not in slab.halves:
                if slab.before is not None:  # whose halves were there
                    self._wait(worker, MULTIPLY, stream, slab.before.read or ())
                event, block = self._event(), slab.block
                whole = block.parts[part], block.cols
                if block.operand == "B":
                    whole = block.rows, block.parts[part]
                view = slab.view(*whole, split=True)
                assert isinstance(view, SplitRef)
                key = None if slab.common is None else (slab.common, part)
                layouts = self.operands.layouts
                self.commands.append(
                    Split(worker.index, worker.lane(MULTIPLY), stream, block.operand, layouts, view,
                          event, key)
                )  # fmt: skip
                slab.halves[part] = event
                if slab.common is not None:
                    self.common_events[event] = slab.common, "halves", part
                else:
                    self._waited.add((stream, event))
            self._wait(worker, MULTIPLY, stream, (slab.halves[part],))

    def _products(self, worker: _Worker, step: Step, stream: Stream) -> Iterator[Multiply]:
        """The pieces of a panel's product."""
        problem, panel, device = self.problem, step.panel, worker.device
        if self.summed:
            target, alpha, beta = self.partials[panel, worker.index], 1, 0  # the sum has them
        else:
            (target,) = (worker.targets[strip] for strip in panel.strips)
            alpha, beta = problem.alpha, problem.beta
        if not step.first:
            beta = 1
        slabs = self._of(worker, step.turn)
        a: Ref | SplitRef
        b: Ref | SplitRef
        if slabs:
            split = self._splits_turn(worker, step.turn)
            a, b = (slab.view(panel.rows, panel.cols, split) for slab in slabs)
        else:
            a, b = self._empty[panel, worker.index]
        flops = Box(panel.rows, panel.cols, step.box.ks).flops
        pieces = -(-flops // device.chunk_flops) if device.chunk_flops else 1
        for rows in filter(len, cut(len(panel.rows), max(1, pieces), CHUNK_ROWS)):
            yield Multiply(
                worker.index, worker.lane(MULTIPLY), stream, a.part(rows), b, target.part(rows),
                alpha, beta, flops * len(rows) // len(panel.rows), step.last and not self.summed,
            )  # fmt: skip

    # --- finish ---------------------------------------------------------------------------

    def _finish(self, panel: Panel) -> None:
        """The sums and downloads of a panel's strips: all its products are started."""
        workers = [self.workers[w] for w in panel.workers]
        for worker in workers:
            self._add_subtotals(worker, panel)
        for worker in workers:
            for strip in worker.own_strips(panel):
                event = self._finish_strip(worker, panel, strip)
                self._give_back(worker, strip, event)

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

    def _add_subtotals(self, worker: _Worker, panel: Panel) -> None:
        """Partials of this device that go to another one are added."""
        for strip, group in self._subtotals(worker, panel):
            waits = [self.multiplied[panel, w] for w in group]
            partials = tuple(self._partial(panel, strip, w) for w in group)
            self.added[strip, worker.index] = self._add_up(
                worker, [*waits, *self._emptied(worker, panel)], [], partials,
                self._summand(panel, strip, group), 1, 0, 0,
            )  # fmt: skip

    def _finish_strip(self, worker: _Worker, panel: Panel, strip: Strip) -> int:
        """The event after which a strip of this worker's is finished."""
        if not self.summed:
            return self.multiplied[panel, worker.index]
        problem, fetches, partials = self.problem, dict[int, tuple[Ref, Ref]](), list[Ref]()
        waits: list[int | None] = []
        firsts = []
        for group in self._summands(strip):
            view, room = self._summand(panel, strip, group), worker.rooms[strip].get(group[0])
            if room is not None:
                room = Ref(room.slot, room.rows, Span(0, len(view.cols)))
                fetches[group[0]] = room, view
            partials.append(view if room is None else room)
            firsts.append(group[0])
            several = len(group) > 1
            waits.append((self.added if several else self.multiplied)[
                (strip if several else panel, group[0])  # type: ignore[index]
            ])  # fmt: skip
        # Each owner begins with the worker after it, or all would read from the first at once.
        turn = firsts.index(strip.owner) if strip.owner in firsts else 0
        order = [fetches[w] for w in (*firsts[turn:], *firsts[:turn]) if w in fetches]
        moved = sum(view.elements for _room, view in order)
        if self.reduce == "nccl" and (others := len(strip.partials) - 1):
            waits.append(self._collect(panel, worker))
            moved = others * strip.elements
        if problem.beta:
            waits += [self.c_ready[strip]] if not self.resident else []
        else:
            waits += self._emptied(worker, panel)
        return self._add_up(
            worker, waits, order, tuple(partials), worker.targets[strip], problem.alpha,
            problem.beta, moved * self.dtype.itemsize,
        )  # fmt: skip

    def _add_up(
        self, worker: _Worker, waits: Iterable[int | None], fetches: Iterable[tuple[Ref, Ref]],
        partials: tuple[Ref, ...], out: Ref, alpha: Any, beta: Any, moved: int,
    ) -> int:  # fmt: skip
        """What is here and what comes from other devices, added."""
        stream, lane = worker.stream("sum"), worker.lane(FINISH)
        self._wait(worker, FINISH, stream, waits)
        start = self._record(worker, FINISH, stream)
        for room, view in fetches:
            self.commands.append(Copy(worker.index, lane, stream, room, view))
        self.commands.append(Sum(worker.index, lane, stream, partials, out, alpha, beta))
        stop = self._record(worker, FINISH, stream)
        self._mark(worker.index, "reduce", start, stop, moved)
        return stop

    def _collect(self, panel: Panel, owner: _Worker) -> int:
        """The event after which NCCL has summed a panel on an owner's GPU. All GPUs take part at
        once."""
        if panel not in self.collected:
            workers = sorted(panel.workers, key=lambda w: self.workers[w].device.ordinal or 0)
            done = {w: self._event() for w in workers}
            strips = tuple(
                (workers.index(strip.owner),
                 tuple(self._partial(panel, strip, w) for w in workers))
                for strip in panel.strips
            )  # fmt: skip
            after = tuple(self.multiplied[panel, w] for w in workers)
            self.commands.append(
                Collective(owner.index, owner.lane(FINISH), tuple(workers), strips, after,
                           tuple(done.values()))
            )  # fmt: skip
            self.collected[panel] = done
        return self.collected[panel][owner.index]

    def _give_back(self, worker: _Worker, strip: Strip, event: int) -> None:
        """A finished strip, into `out`."""
        if self._in_place(worker):
            self.finished[strip] = event
            return
        place, target = Ref(OUT, strip.rows, strip.cols), worker.targets[strip]
        size = strip.elements * self.operands.out.dtype.itemsize
        lane, home = worker.lane(FINISH), self.operands.out.home
        if home is None and worker.staged:
            start, stop = self._event(), self._event()
            self.commands.append(
                Move(worker.index, lane, place, target, False, (event,), start, stop)
            )
        else:
            stream = worker.stream("copy")
            self._wait(worker, FINISH, stream, (event,))
            start = self._record(worker, FINISH, stream)
            call = partial(_store, on_host=home is None)
            why = "a matrix is written where no link goes"
            self.commands.append(
                Call(worker.index, lane, stream, call, (place, target), why, writes_out=True)
            )
            stop = self._record(worker, FINISH, stream)
        self._mark(worker.index, "download", start, stop, size)
        self.finished[strip] = stop

    def _write_critical(self) -> None:
        """The lab's reduction: one worker at a time adds its partial to C in host memory."""
        if self.on_device:
            return
        turn: int | None = None
        for worker in self.workers.values():
            (panel,) = worker.panels
            stream, lane = worker.stream("sum"), worker.lane(FINISH)
            self._wait(worker, FINISH, stream, (self.multiplied[panel, worker.index], turn))
            start = self._record(worker, FINISH, stream)
            place = Ref(OUT, panel.rows, panel.cols)
            made = self.partials[panel, worker.index]
            self.commands.append(
                Call(worker.index, lane, stream, CriticalReduction.add, (place, made),
                     "the critical reduction sums on the host")
            )  # fmt: skip
            turn = self._record(worker, FINISH, stream)
            size = 2 * len(panel.rows) * len(panel.cols) * self.dtype.itemsize
            self._mark(worker.index, "reduce", start, turn, size)


def _copy_cast(device: Device, stream: Any, target: Any, source: Any, *, home: Any) -> None:
    """target[...] = source, which lies on `home`."""
    if home is not None or device.checks:
        source = staging.cast(device, source, home, target.dtype, stream)
    device.copy(target, source, stream)


def _store(device: Device, stream: Any, place: Any, made: Any, *, on_host: bool) -> None:
    """place[...] = made."""
    staging.store(device, place, made, stream, on_host=on_host)


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
