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
from functools import partial
from typing import Any

import numpy as np

from ..arrays.operand import Operands
from ..catalog import Variant
from ..devices.base import Device
from ..host.kept import cached_property
from ..planning.partition import Box, Span, cut
from ..planning.plan import TILES_IN_MEMORY, Panel, Plan, Strip
from ..planning.steps import Step
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
from .device_memory import SharedBlocks
from .program_matrices import ProgramMatrices, Slab, Worker

AHEAD = 8  # steps: what they read is on its way while others are multiplied
CHUNK_ROWS = 128  # pieces of a panel are whole block tiles


class Writer(ProgramMatrices):
    """The program of one plan, `operands` of which lie so. `resident` has all brought before the
    clock runs. A program among several shares the blocks of one operand with them."""

    def __init__(
        self, plan: Plan, devices: Sequence[Device], variant: Variant, operands: Operands, *,
        resident: bool = False, shared: SharedBlocks | None = None,
    ) -> None:  # fmt: skip
        super().__init__(plan, devices, variant, operands, shared)
        self.resident = resident
        self.commands: list[Command] = []
        self.marks: list[Mark] = []
        self.counted = not resident  # whether what is written now is in the timeline
        self.events = 0  # how many there are so far
        self.common_events: dict[int, tuple[int, str, int]] = {}  # events of shared blocks' parts
        self._waited: set[tuple[Stream, int]] = set()
        self.multiplied: dict[tuple[Panel, int], int] = {}
        self.added: dict[tuple[Strip, int], int] = {}
        self.c_ready: dict[Strip, int | None] = {}
        self.finished: dict[Strip, int] = {}
        self.collected: dict[Panel, dict[int, int]] = {}  # NCCL's sums of a panel, by worker
        self._unmultiplied = {panel: len(panel.workers) for panel in plan.panels}
        self.remote = [
            w.device for w in self.workers.values() if self.on_device and not w.device.host_memory
        ]
        # Whether one thread starts everything. Threads would rather wait for each other: Python
        # does one thing at a time, for all devices.
        at_once = not plan.turns_in_memory and self.on_device
        self.queued = at_once and all(w.device.queues for w in self.workers.values())
        # Of turns there may be millions of commands: they are written while others are played.
        self._unwritten = self._write_resident() if resident else self._write_streamed()
        self.whole = False
        if not plan.turns_in_memory:
            self.write_more(None)
            del self.operands  # the caller's arrays

    def write_more(self, steps: int | None) -> list[Command]:
        """The commands of so many steps more, which it does not keep; or of all that there are,
        which it does."""
        if steps is not None:
            self.commands = []
        written = sum(1 for _step in itertools.islice(self._unwritten, steps))
        self.whole = steps is None or written < steps
        return self.commands

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

    # --- events and streams ---------------------------------------------------------------

    def _event(self) -> int:
        """The number of a new event."""
        self.events += 1
        return self.events - 1

    def _record(self, worker: Worker, lane: str, stream: Stream) -> int:
        event = self._event()
        self.commands.append(Record(worker.index, worker.lane(lane), stream, event))
        return event

    def _wait(
        self, worker: Worker, lane: str, stream: Stream, events: Iterable[int | None]
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

    def _in_turn(self) -> Iterator[tuple[Worker, Step]]:
        """The first step of each worker, then the second of each, and so on."""
        workers = self.workers.values()
        for number in range(max((len(w.steps) for w in workers), default=0)):
            yield from ((w, w.steps[number]) for w in workers if number < len(w.steps))

    def _panels_in_turn(self) -> Iterator[list[tuple[Worker, Panel]]]:
        """The first panels of all workers, then the second ones. Sums are started in this order,
        and one that waits holds up those behind it."""
        workers = self.workers.values()
        for number in range(max((len(w.panels) for w in workers), default=0)):
            yield [(w, w.panels[number]) for w in workers if number < len(w.panels)]

    # --- bring ----------------------------------------------------------------------------

    def _may_bring(self, worker: Worker, step: Step) -> bool:
        """Whether what has the memory of a step's blocks, and of its strips, is read by commands
        that are written."""
        blocks = all(
            slab.before is None or slab.before.read is not None
            for slab in self._of(worker, step.turn)
        )
        return blocks and (self.operands.c is None or self._may_start(worker, step))

    def _may_start(self, worker: Worker, step: Step) -> bool:
        """Whether the strips whose memory a step's panel takes are given back by commands that are
        written."""
        return not step.first or all(s in self.finished for s in self._former(worker, step.panel))

    def _former(self, worker: Worker, panel: Panel) -> list[Strip]:
        """The strips of the tile that had the memory of this panel's."""
        before = panel.tile - TILES_IN_MEMORY
        earlier = worker.tiles[before] if before >= 0 else []
        return [strip for panel in earlier for strip in panel.strips]

    def _emptied(self, worker: Worker, panel: Panel) -> list[int]:
        """Events after which these are given back."""
        return [self.finished[strip] for strip in self._former(worker, panel)]

    def _bring(self, worker: Worker, step: Step) -> None:
        """All that a step reads, from where the matrices are."""
        for slab, part in self._parts_of(worker, step):
            source = self._at_source(slab, part) if self._relays(slab, part) else slab
            if part not in source.ready:
                by = self.workers[source.block.bringer(part)]
                self._bring_part(by, source, part)
        self._bring_c(worker, step)

    def _bring_part(self, worker: Worker, slab: Slab, part: int) -> None:
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

    def _bring_c(self, worker: Worker, step: Step) -> None:
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
        self, worker: Worker, target: Ref, source: Ref, home: Any, after: tuple[int, ...],
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
            call = partial(_copy_cast, home=home)
            why = "a matrix is read from where no link goes"
            start, stop = self._event(), self._event()
            self.commands.append(
                Call(worker.index, lane, stream, call, (target, source), why, start, stop,
                     shared=shared)
            )  # fmt: skip
        self._mark(worker.index, "upload", start, stop, size)
        return stop

    def _relay(self, worker: Worker, step: Step) -> None:
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

    def _multiply(self, worker: Worker, step: Step, there: bool = False) -> None:
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

    def _split(self, worker: Worker, step: Step, stream: Stream) -> None:
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

    def _products(self, worker: Worker, step: Step, stream: Stream) -> Iterator[Multiply]:
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

    def _add_subtotals(self, worker: Worker, panel: Panel) -> None:
        """Partials of this device that go to another one are added."""
        for strip, group in self._subtotals(worker, panel):
            waits = [self.multiplied[panel, w] for w in group]
            partials = tuple(self._partial(panel, strip, w) for w in group)
            self.added[strip, worker.index] = self._add_up(
                worker, [*waits, *self._emptied(worker, panel)], [], partials,
                self._summand(panel, strip, group), 1, 0, 0,
            )  # fmt: skip

    def _finish_strip(self, worker: Worker, panel: Panel, strip: Strip) -> int:
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
        self, worker: Worker, waits: Iterable[int | None], fetches: Iterable[tuple[Ref, Ref]],
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

    def _collect(self, panel: Panel, owner: Worker) -> int:
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

    def _give_back(self, worker: Worker, strip: Strip, event: int) -> None:
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
            start, stop = self._event(), self._event()
            call = partial(_store, on_host=home is None)
            why = "a matrix is written where no link goes"
            self.commands.append(
                Call(worker.index, lane, stream, call, (place, target), why, start, stop, True)
            )
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
            start, turn = self._event(), self._event()
            args = Ref(OUT, panel.rows, panel.cols), self.partials[panel, worker.index]
            why = "the critical reduction sums on the host"
            self.commands.append(
                Call(worker.index, lane, stream, CriticalReduction.add, args, why, start, turn)
            )
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
