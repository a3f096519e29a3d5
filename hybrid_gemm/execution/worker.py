"""One worker's side of a run: brings parts of A and B, multiplies panels of C, sums and gives
back the strips that this worker owns.

`feed`, `multiply` and `finish` are these three as stages that go on at once in threads;
`single_thread_schedule` calls the same steps from one thread. They meet through futures that
carry stream events, so a device does not wait for Python.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

from ..arrays import npy_files
from ..arrays.operand import Operand
from ..host.kept import cached_property
from ..planning.partition import Box, cut
from ..planning.plan import PRODUCTS_AT_ONCE, TILES_IN_MEMORY, Panel, Strip
from ..planning.plan import Worker as PlannedWorker
from ..planning.steps import Step, steps, tiles_of
from . import staging
from .device_memory import MemoryRequests, Slab
from .reduction import HostReduction, Reduction, StripSum
from .run import Run
from .timeline import marked
from .transfers import Later

CHUNK_ROWS = 128  # pieces of a panel are whole block tiles


class Worker:
    """A worker's stages, and its room for C. Raises `MemoryError` if its device has not so much."""

    def __init__(self, run: Run, reduction: Reduction, planned: PlannedWorker) -> None:
        self.run, self.reduction, self.planned = run, reduction, planned
        self.index, self.commands = planned.index, run.commands
        self.device, self.dtype = run.devices[planned.device], run.dtype
        self.bound = run.products.of(self.device, run.variant).bound
        self.tiles = tiles_of(run.plan, planned)
        self.panels = [panel for tile in self.tiles for panel in tile]
        self.own = [(panel, strip) for panel in self.panels for strip in self.own_strips(panel)]
        self.summed = run.plan.summed
        self.targets: dict[Strip, Any] = {}  # where strips of this worker's are made
        self.rooms: dict[Strip, dict[int, Any]] = {}  # where others' partials are fetched to
        self.sums: dict[Strip, StripSum] = {}
        self.products: dict[Step, list[tuple[Callable, int, Any]]] = {}
        self.waited: set = set()
        self._parts: dict[Step, list[tuple[Slab, int]]] = {}
        self.everything = False  # on the device that products read
        memory = MemoryRequests(self.device, self.dtype)
        self._request_memory(memory)
        memory.allocate()
        self.taken = memory.taken

    @cached_property
    def simple(self) -> bool:
        """Whether one thread does: there is nothing to overlap."""
        return len(self.planned.boxes) == len(self.panels) == 1

    def own_strips(self, panel: Panel) -> list[Strip]:
        """Those of a panel that this worker finishes."""
        return [strip for strip in panel.strips if strip.owner == self.index]

    def subtotals(self, panel: Panel) -> list[tuple[Strip, tuple[int, ...]]]:
        """A panel's strips, with the workers whose partials this one adds for another device."""
        return [(strip, group) for strip, group in panel.subtotals if group[0] == self.index]

    # --- memory ---------------------------------------------------------------------------

    def _request_memory(self, memory: MemoryRequests) -> None:
        """Asks for this worker's room for C."""
        run = self.run
        for panel in self.panels:
            if self.summed:
                space = "C", self.index, panel.tile % TILES_IN_MEMORY
                shape = len(panel.rows), len(panel.cols)
                put = partial(run.partials.__setitem__, (panel, self.index))
                memory.request(space, panel.tile, shape, put)
            for strip, _group in self.subtotals(panel):
                put = partial(run.subtotals.__setitem__, (strip, self.index))
                memory.request(space, panel.tile, (len(strip.rows), len(panel.cols)), put)
        for panel, strip in self.own if self.reduction.on_device else ():
            space = "C", self.index, panel.tile % TILES_IN_MEMORY
            place = run.operands.part(strip.rows, strip.cols)
            if self._in_place(place):
                self.targets[strip] = place.array
            else:
                on_allocated = partial(self.targets.__setitem__, strip)
                memory.request(space, panel.tile, place.shape, on_allocated, dtype=run.result_dtype)
            rooms = self.rooms.setdefault(strip, {})
            for w in self.reduction.fetched(strip, self.device) if self.summed else ():
                # With the partial's own leading dimension, which the kernel takes for all.
                shape = len(strip.rows), len(panel.cols)
                memory.request(space, panel.tile, shape, partial(rooms.__setitem__, w))

    def prepare(self) -> None:
        """Works out, before a clock runs, what is otherwise worked out when it is due."""
        if self.summed and self.reduction.on_device:
            for panel, strip in self.own:
                self.sums[strip] = self._strip_sum(panel, strip)
            for panel in self.panels:
                for strip, group in self.subtotals(panel):
                    self.sums[strip] = self._subtotal(panel, strip, group)
        self.products = {step: self._bound_products(step) for step in self.steps}

    def _strip_sum(self, panel: Panel, strip: Strip) -> StripSum:
        where = self.rooms[strip], self.targets[strip]
        return self.reduction.strip_sum(panel, strip, self.device, *where)

    def _subtotal(self, panel: Panel, strip: Strip, group: tuple[int, ...]) -> StripSum:
        return self.reduction.subtotal(panel, strip, group, self.device)

    def _bound_products(self, step: Step) -> list[tuple[Callable, int, Any]]:
        """(a product, its flops, what it makes) for each piece of a panel."""
        run, problem, panel = self.run, self.run.plan.problem, step.panel
        if self.summed:
            target = run.partials[panel, self.index]
        else:
            (target,) = (self.targets[strip] for strip in panel.strips)
        alpha, beta = (1, 0) if self.summed else (problem.alpha, problem.beta)  # else the sum's
        if not step.first:
            beta = 1
        a, b = run.blocks.read_by(self.index, step.turn, panel)
        flops = Box(panel.rows, panel.cols, step.box.ks).flops
        pieces = -(-flops // self.device.chunk_flops) if self.device.chunk_flops else 1
        found = []
        for rows in filter(len, cut(len(panel.rows), max(1, pieces), CHUNK_ROWS)):
            made, share = target[rows.slice], flops * len(rows) // len(panel.rows)
            product = self.bound(a[rows.slice], b, made, alpha=alpha, beta=beta)
            found.append((product, share, made))
        return found

    def _in_place(self, place: Operand) -> bool:
        """Whether a part of `out` can be made where it lies."""
        return place.written_in_place(self.device, self.run.result_dtype)

    def _begin_to_write(self, strips: Iterable[Strip]) -> None:
        """From now on an error leaves `out` incomplete, if strips are made in place."""
        if any(self._in_place(self.run.operands.part(s.rows, s.cols)) for s in strips):
            self.run.wrote = True

    # --- streams --------------------------------------------------------------------------

    @contextlib.contextmanager
    def working(self) -> Iterator[None]:
        """Streams for the stages. Kernels whose blocks wait for each other must have the
        device for themselves, and a library's may take another path when they do not."""
        kernel = self.run.variant.kernel
        count = 1 if kernel.library or kernel.flags else PRODUCTS_AT_ONCE
        count = min(count, max(map(len, self.tiles)))
        with self.device.streams(1 + count) as plain, self.device.streams(1, True) as urgent:
            self.copying, *self.multiplying = plain
            (self.summing,) = urgent
            try:
                self._make_room()
                yield
            except BaseException:  # memory goes back: nothing may still be at work in it
                with contextlib.suppress(Exception):
                    self.synchronize()
                raise

    def _make_room(self) -> None:
        """Has what products and copies need besides matrices made while no clock runs."""
        run, longest = self.run, max(len(box.ks) for box in self.planned.boxes)
        shapes = {(len(p.rows), len(p.cols)) for p in self.panels}
        for stream in self.multiplying:
            with self.device.using(stream):
                for m, n in sorted(shapes, key=sum, reverse=True):  # the most room first
                    self.device.make_room(run.variant, m, n, longest, self.dtype.name, stream)
        if not self.device.host_memory:
            staging.make_rings(self.device, run.operands)

    def synchronize(self) -> None:
        for stream in (self.copying, *self.multiplying, self.summing):
            stream.synchronize()

    # --- feed -----------------------------------------------------------------------------

    @cached_property
    def steps(self) -> list[Step]:
        """All that this worker multiplies, in order."""
        return steps(self.planned, self.tiles)

    def feed(self) -> None:
        """Brings what is this worker's to bring, in the order in which panels need it."""
        relayed = []
        for step in self.steps:
            self.run.stop.check()
            for slab, part in self.parts(step):
                if slab.block.bringer(part) != self.index or not slab.claim(part):
                    continue
                if self.run.blocks.relays(slab, part):
                    relayed.append((slab, part))
                else:
                    self.bring(slab, part)
            self.bring_c(step)
        for slab, part in relayed:
            self.relay(slab, part)

    def parts(self, step: Step) -> list[tuple[Slab, int]]:
        """What a step's product reads."""
        found = self._parts.get(step)
        if found is None:
            panel = step.panel
            found = self._parts[step] = [
                (slab, part)
                for slab in self.run.blocks.of(self.index, step.turn)
                for part in slab.meeting(panel.rows, panel.cols)
            ]
        return found

    @marked("upload")
    def bring(self, slab: Slab, part: int) -> None:
        """Has a part of a block on its way from where the matrix is."""
        if slab.before is not None:
            for event in slab.before.read.result():
                event.synchronize()
        source, where = self.run.blocks.source(slab.block), slab.where(part)
        self._copy_in(slab.buffer[where], source.array[where], source.home, slab.ready[part])

    def bring_c(self, step: Step) -> None:
        """Strips of beta's C, where they are finished."""
        run, c = self.run, self.run.operands.c
        if c is None or not (step.first and run.plan.problem.beta and self.reduction.on_device):
            return
        for strip in step.panel.strips:
            if strip.owner != self.index:
                continue
            target, source = self.targets[strip], c.part(strip.rows, strip.cols)
            if c is run.operands.out and self._in_place(source):
                run.c_ready[strip].settle()
                continue
            for event in self._emptied(step.panel):
                event.synchronize()
            self._copy_in(target, source.array, c.home, run.c_ready[strip])

    def _copy_in(self, target: Any, source: Any, home: Any, done: Later) -> None:
        transfer = self.run.transfer(self.index, "upload", target.nbytes, done)
        if home is None and self._staged:
            staging.link(self.device).upload(target, source, transfer)
            return
        self.commands.refuse("a matrix is read from where no link goes")
        with self.device.using(self.copying), transfer.pieces[0].copying(self.copying):
            transfer.begin(self.copying)
            if home is not None or self.device.checks:
                source = staging.cast(self.device, source, home, target.dtype, self.copying)
            self.device.copy(target, source, self.copying)

    @marked("relay")
    def relay(self, slab: Slab, part: int) -> None:
        """Has a part from the device that has it from the host."""
        there = self.run.blocks.at_source(slab, part)
        event = there.ready[part].result()
        target, source = slab.buffer[slab.where(part)], there.buffer[slab.where(part)]
        transfer = self.run.transfer(self.index, "relay", target.nbytes, slab.ready[part])
        with self.device.using(self.copying), transfer.pieces[0].copying(self.copying):
            self.commands.wait(self.index, self.copying, event)
            transfer.begin(self.copying)
            copy = self.device.bound_copy(target, source)
            self.commands.copy(self.index, target, source, self.copying, copy)

    # --- multiply -------------------------------------------------------------------------

    def multiply(self) -> None:
        if self.run.resident:
            self.prepare()
            self.wait_for_everything()
            self.run.gates[0].wait()
        for step in self.steps:
            self.start_product(step)

    def start_product(self, step: Step) -> None:
        run, panel = self.run, step.panel
        run.stop.check()
        stream = self.multiplying[step.number % len(self.multiplying)]
        products = self.products.get(step) or self._bound_products(step)
        self._await(step, stream)
        self._split(step, stream)
        if not self.summed:
            self._begin_to_write(panel.strips)
        with self.device.using(stream):
            event = self._gemm(products, stream, final=step.last and not self.summed)
        if step.last:
            run.multiplied[panel, self.index].settle(event)
        if step.number + 1 == len(self.tiles[panel.tile]):  # nothing reads the blocks any more
            with self.device.using(self.device.allocation_stream):
                events = [stream.record() for stream in self.multiplying]
            for slab in run.blocks.of(self.index, step.turn):
                slab.read.settle(events)

    def wait_for_everything(self) -> None:
        """Until all that the products need is on the device."""
        futures = [f for slab in self.run.blocks.of(self.index, 0) for f in slab.ready]
        if self.run.plan.problem.beta and self.reduction.on_device:
            futures += [self.run.c_ready[strip] for _panel, strip in self.own]
        for future in futures:
            if (event := future.result()) is not None:
                event.synchronize()
        self.everything = True

    def _await(self, step: Step, stream) -> None:
        """Lets a stream go on when all that a product needs is there, and room for it."""
        futures = []
        if not self.everything:
            futures += [slab.ready[part] for slab, part in self.parts(step)]
        if step.first:
            if self.run.plan.problem.beta and not self.summed:
                futures += [self.run.c_ready[strip] for strip in step.panel.strips]
            for event in self._emptied(step.panel):
                self.commands.wait(self.index, stream, event)
        for future in futures:
            event = future.result()
            if event is not None and (stream, future) not in self.waited:
                self.commands.wait(self.index, stream, event)
                self.waited.add((stream, future))

    def _split(self, step: Step, stream) -> None:
        """Has what a product reads split on its stream, or lets that wait where another splits it:
        what the product reads is there."""
        if not self.run.blocks.split(self.index, step.turn):
            return
        for slab, part in self.parts(step):
            if slab.claim_to_split(part):
                if slab.before is not None:  # whose halves were there
                    for event in slab.before.read.result():
                        stream.wait(event)
                split = partial(slab.split_part, part, self.run.operands.layouts)
                with self.device.using(stream):
                    self.commands.start(self.index, stream, split)
                    slab.halves[part].settle(self.commands.record(self.index, stream))
                self.waited.add((stream, slab.halves[part]))
            elif (stream, slab.halves[part]) not in self.waited:
                self.commands.wait(self.index, stream, slab.halves[part].result())
                self.waited.add((stream, slab.halves[part]))

    def _emptied(self, panel: Panel) -> list:
        """Events after which the tile that had this panel's room is finished."""
        before = panel.tile - TILES_IN_MEMORY
        earlier = self.tiles[before] if before >= 0 else []
        return [self.run.finished[strip].result() for p in earlier for strip in p.strips]

    @marked("multiply")
    def _gemm(self, products: list[tuple], stream, *, final: bool):
        start, flops = self.commands.record(self.index, stream), 0
        for product, count, made in products:
            self.run.stop.check()
            self.commands.start(self.index, stream, product, count)
            self.run.progress(count)
            if final and not self.device.queues:
                npy_files.finished(made)
            flops += count
        stop = self.commands.record(self.index, stream)
        self.run.clock.mark(self.index, "multiply", start, stop, flops=flops)
        return stop

    # --- finish ---------------------------------------------------------------------------

    def finish(self) -> None:
        run, later = self.run, []
        if isinstance(self.reduction, HostReduction):
            (panel,) = self.panels
            self.reduction.add(self.index, panel, self.device, self.summing)
            if run.resident:
                run.gates[1].wait()
            return
        for panel in self.panels:
            self.start_subtotals(panel)
            for strip in self.own_strips(panel):
                event = self.start_sum(panel, strip)
                if run.resident:
                    later.append((strip, event))
                else:
                    self.give_back(strip, event)
        if run.resident:
            self.synchronize()
            run.gates[1].wait()
        for strip, event in later:
            self.give_back(strip, event)
        self.synchronize()

    def start_subtotals(self, panel: Panel) -> None:
        """Has partials of this device added that go to another one."""
        for strip, group in self.subtotals(panel):
            with self.device.using(self.summing):
                planned = self.sums.get(strip) or self._subtotal(panel, strip, group)
                event = self._add_up(planned, self._emptied(panel))
            self.run.added[strip, self.index].settle(event)

    def start_sum(self, panel: Panel, strip: Strip) -> Any:
        """The event after which a strip of this worker's is finished."""
        run, event = self.run, self.run.multiplied[panel, self.index].result()
        if not self.summed:
            return event
        with self.device.using(self.summing):
            planned = self.sums.get(strip) or self._strip_sum(panel, strip)
            beta = run.plan.problem.beta
            waits = [run.c_ready[strip].result()] if beta else self._emptied(panel)
            return self._add_up(planned, waits, (strip,))

    @marked("reduce")
    def _add_up(self, planned: StripSum, waits: Iterable, written: Sequence[Strip] = ()) -> Any:
        """Has what is here and what comes from other devices added, into these strips."""
        run, stream = self.run, self.summing
        run.stop.check()
        for event in (*(made.result() for made in planned.made), *waits):
            if event is not None:
                self.commands.wait(self.index, stream, event)
        start = self.commands.record(self.index, stream)
        self._begin_to_write(written)
        for room, view, fetch in planned.fetches:
            self.commands.copy(self.index, room, view, stream, fetch)
        if planned.wait:
            planned.wait(stream)
        self.commands.start(self.index, stream, planned.total)
        stop = self.commands.record(self.index, stream)
        run.clock.mark(self.index, "reduce", start, stop, planned.bytes_fetched)
        return stop

    @marked("download")
    def give_back(self, strip: Strip, event: Any) -> None:
        """A finished strip, into `out`."""
        run, target = self.run, self.targets[strip]
        place = run.operands.part(strip.rows, strip.cols)
        view, done = place.array, run.finished[strip]
        if self._in_place(place):
            done.settle(event)
            if self.summed:
                npy_files.finished(view)
            return
        run.stop.check()
        run.wrote = True
        transfer = run.transfer(self.index, "download", view.nbytes, done)
        transfer.landed = partial(npy_files.finished, view)
        if place.home is None and self._staged:
            staging.link(self.device).download(view, target, transfer, event)
            return
        self.commands.refuse("a matrix is written where no link goes")
        with self.device.using(self.copying), transfer.pieces[0].copying(self.copying):
            self.copying.wait(event)
            transfer.begin(self.copying)
            on_host = place.home is None
            staging.store(self.device, view, target, self.copying, on_host=on_host)

    @property
    def _staged(self) -> bool:
        """Whether copies from and to the host go through the link as they are; a device that
        checks copies takes them itself."""
        return not (self.device.host_memory or self.device.checks)
