"""Executes one rank's part of a plan over ranks.

Inside a rank its box is a problem of its own for the thread runtime. Where ranks share a block
of C, the rank multiplies it piece by piece: on one or two *lanes* (host threads, so that a
device has its next piece when one ends), or, where A and B lie on the rank's one GPU, straight
on a stream. Pieces travel meanwhile, and a thread of its own sums the rank's strip as its parts
arrive. The calling thread alone talks to MPI and NCCL; on the host it makes and sums small pieces
itself.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ThreadPoolExecutor, wait
from typing import Any

import numpy as np

from ..arrays.operand import Operand, Operands
from ..catalog import Variant
from ..devices.base import Device, Stream
from ..execution import staging
from ..execution.device_memory import SharedBlocks
from ..execution.kept_products import KeptProducts
from ..execution.read_ahead import ReadAhead
from ..execution.streamed import Execution, StreamedExecutor
from ..execution.timeline import Timeline, activities
from ..execution.transfers import Stopped
from ..planning.partition import Box, Span
from ..planning.plan import Plan, Strip
from ..planning.reading_order import Need, reading_order
from ..problem import Problem
from .heartbeat import MULTIPLYING, WAITING, Heartbeat
from .own_communicator import staying_if_it_fails
from .rank_plan import LOOK_MS, Piece, RankPlan
from .transports import Transport

# How long a rank looks again and again before it sleeps: what the shortest sleep takes, so that no
# wait takes more than twice its time for that, and none keeps a core busy for long.
LOOK_S = 1e-4
POLL_S = 5e-5  # where devices queue their work
POLL_S_ELSEWHERE = 5e-4
POLL_S_WORKING = LOOK_MS / 1e3  # while cores multiply: every look takes time from them


class _AtOnce(Executor):
    """Calls in the thread that submits them, which then does not ask MPI again and again."""

    def __init__(self, beat: Heartbeat) -> None:
        self.beat = beat

    def submit(self, call: Callable[..., Any], /, *args: Any, **keywords: Any) -> Future:
        future: Future = Future()
        beat = self.beat
        before = beat.polls, beat.computes
        beat.polls, beat.computes = None, True
        try:
            future.set_result(call(*args, **keywords))
        except Exception as error:
            future.set_exception(error)
        finally:
            beat.polls, beat.computes = before
        return future


@dataclasses.dataclass(eq=False)
class Launched:
    """Work on a stream, asked as a `Future` is."""

    device: Device
    phase: str
    start: Any
    stop: Any
    bytes: int = 0
    flops: int = 0

    def done(self) -> bool:
        return self.stop.done

    def exception(self) -> None:
        return None

    def result(self) -> Timeline:
        mark = self.phase, self.start, self.stop, self.bytes, self.flops
        return _timeline(self.device, [mark])


class RankRun:
    """One rank's part of a plan over ranks, which may be carried out again and again.

    `inner(problem)` gives a problem's plan for this rank's threads, and its kernel. A and B lie
    where its first device reads them as they are, if they are `there`. `ranks_here` are those of
    this host.
    """

    def __init__(
        self, plan: RankPlan, rank: int, devices: Sequence[Device],
        inner: Callable[[Problem], tuple[Plan, Variant]], *, there: bool, ranks_here: int = 1,
    ) -> None:  # fmt: skip
        self.plan, self.rank, self.devices = plan, rank, devices
        self.inner, self.ranks_here = inner, ranks_here
        self.dtype, self.bound = np.dtype(plan.problem.dtype), KeptProducts()
        self.streamed = StreamedExecutor(devices, products=self.bound)
        self.products: dict[tuple, tuple[Plan, Variant]] = {}
        self.mine: Operands | None = None
        self.made: np.ndarray | None = None  # all of the box, where it is made at once
        self.in_place = False  # whether pieces of C are made where they lie
        device, p, box = devices[0], plan.problem, plan.box(rank)
        self.variant = inner(plan.product_of(rank))[1] if p.m and p.n else None
        self.lanes = 2 if device.queues else 1
        self.poll_s = POLL_S if device.queues else POLL_S_ELSEWHERE
        self.working_s = self.poll_s if device.queues else POLL_S_WORKING
        # Whether its one worker reads A and B in the host's memory, or on a device with its own.
        one = there and plan.threads == 1
        self.on_host, self.there = one and device.host_memory, one and not device.host_memory
        if box is None:
            return
        self.flops, self.pieces = plan.flops(rank), plan.pieces(rank)
        self.owned = plan.owned(rank)
        # Rows and columns of pieces, counted from those of the box, and of owned ones in the strip.
        self.within = {piece: _within(box, piece) for piece in self.pieces}
        strip = plan.strip(rank)
        self.in_strip = {piece: _within(strip, piece) for piece in self.owned if strip}
        self.whole = Span(0, len(box.rows)), Span(0, len(box.cols))
        self.shape = len(box.rows), len(box.cols)
        self.ks = Span(0, len(box.ks))
        self.brief = all(plan.brief(rank, *x.shape) for x in self.pieces)
        self.at_once = device.host_memory and plan.brief(rank, *self.shape)
        self.ahead = there and plan.adds(rank) and not self.at_once
        self.shares = "B" if plan.by_rows(rank) else "A"  # what pieces have in common

    def prepare(self, operands: Operands) -> None:
        """Has kernels loaded for operands like these."""
        arrays = operands.a.array, operands.b.array
        if self.variant:
            for each in self.devices:
                each.prepare(self.variant, *arrays, self.plan.problem.operands)
        if self.ahead:
            for rows, cols in self.within.values():
                self._product(rows, cols, arrays)

    def execute(
        self, operands: Operands | None, transport: Transport | None, beat: Heartbeat | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> Execution:  # fmt: skip
        """Returns when this rank's strip is finished and nobody waits for it any more. Called once
        all ranks are ready: their clocks, whose times are looked at together, start here.

        `operands` are this rank's blocks of op(A) and op(B) alone, and its strips of C; None on a
        rank that has nothing to do. `transport` brings partials to where they are summed; None
        where no sum is needed.
        """
        self.transport, self.beat = transport, beat or Heartbeat()
        self.progress, self.timelines = self.beat.counting(progress), list[Timeline]()
        started = time.perf_counter()
        with staying_if_it_fails(transport, lambda: transport.messages() if transport else None):
            try:
                if operands is not None:
                    self.mine = operands
                    self.in_place = operands.out.written_in_place(self.devices[0], self.dtype)
                    for device in self.devices:
                        device.start_clock()
                if transport:
                    transport.start()
                if operands is not None:
                    self._multiply_all()
            finally:
                self.mine, self.made = None, None
        return Execution(_joined(self.timelines), (time.perf_counter() - started) * 1e3)

    def _multiply_all(self) -> None:
        with self.beat.during(MULTIPLYING), contextlib.ExitStack() as stack:
            for device in self.devices:
                stack.enter_context(device.session())
            if self.transport is None:
                self._whole()
            else:
                ahead = stack.enter_context(self._reading_ahead(self._reads))
                self.progress = ahead.counting(self.progress)
                self._pieces(*stack.enter_context(self.devices[0].streams(2)))

    # --- multiplying ----------------------------------------------------------------------

    @property
    def _mine(self) -> Operands:
        assert self.mine is not None  # only ranks with a box come here
        return self.mine

    def _product(
        self, rows: Span, cols: Span, arrays: tuple[Any, Any] | None = None,
        alpha: float = 1, beta: float = 0,
    ) -> tuple[Plan, Variant]:  # fmt: skip
        """The plan and the kernel of a part of the box, loaded for operands like these, or its
        own."""
        key = len(rows), len(cols)
        if key not in self.products:  # pieces have few shapes
            problem = dataclasses.replace(
                self.plan.problem, m=key[0], n=key[1], k=len(self.ks), alpha=alpha, beta=beta
            )
            plan, variant = self.inner(problem)
            a, b = arrays or (self._mine.a.array, self._mine.b.array)
            for device in self.devices:
                device.prepare(variant, a, b, problem.operands, summed=plan.summed)
            self.products[key] = plan, variant
        return self.products[key]

    def _whole(self) -> None:
        """A block of C that is this rank's own: the thread executor does all of it."""
        p = self.plan.problem
        plan, variant = self._product(*self.whole, alpha=p.alpha, beta=p.beta)
        with self._reading_ahead(functools.partial(reading_order, plan)) as ahead:
            self.beat.computes = not self.devices[0].queues
            done = self.streamed.play(
                plan, variant, self._mine, progress=ahead.counting(self.progress),
                shared=SharedBlocks(""),
            )  # fmt: skip
            self.timelines.append(done.timeline)

    def _reading_ahead(self, needs: Callable[[], Iterable[Need]]) -> ReadAhead:
        return ReadAhead(needs, self._mine, self.flops, sharers=self.ranks_here)

    def _reads(self) -> Iterable[Need]:
        """What of this rank's blocks it reads, piece by piece."""
        for i, (rows, cols) in enumerate(self.within.values()):
            share = i / len(self.within), (i + 1) / len(self.within)
            yield Need("A", rows, self.ks, *share)
            yield Need("B", self.ks, cols, *share)

    def _operands(self, rows: Span, cols: Span) -> tuple[Plan, Variant, Operand, Operand]:
        """The plan and kernel of a part of this rank's box, and what of op(A) and op(B) it
        reads."""
        mine, ks = self._mine, self.ks
        return *self._product(rows, cols), mine.a.part(rows, ks), mine.b.part(ks, cols)

    def _multiply(
        self, piece: Piece, buffer: Operand, shared: SharedBlocks, stream: Stream
    ) -> Timeline:
        rows, cols = self.within[piece]
        if not self.at_once:
            return self._make(rows, cols, buffer, shared, stream)
        timeline = Timeline()
        if self.made is None:
            self.made = np.empty(self.shape, self.dtype)
            timeline = self._make(*self.whole, Operand.of(self.made), shared, stream)
        buffer.array[...] = self.made[rows.slice, cols.slice]
        return timeline

    def _make(
        self, rows: Span, cols: Span, buffer: Operand, shared: SharedBlocks, stream: Stream
    ) -> Timeline:
        """A part of this rank's box, in its buffer."""
        plan, variant, a, b = self._operands(rows, cols)
        if self.on_host:
            return self._launch(rows, cols, buffer, stream).result()
        operands = Operands(plan.problem, a, b, None, buffer)
        return self.streamed.play(
            plan, variant, operands, progress=self.progress, shared=shared
        ).timeline  # fmt: skip

    def _launch(self, rows: Span, cols: Span, buffer: Operand, stream: Stream) -> Launched:
        """The same where A and B are: nothing has to be brought, and nobody waits for it."""
        _plan, variant, a, b = self._operands(rows, cols)
        device, flops = self.devices[0], 2 * a.shape[1] * buffer.array.size
        with device.using(stream):
            start = stream.record()
            product = self.bound.of(device, variant).bound
            product(a.array, b.array, buffer.array, alpha=1, beta=0)(stream)
            launched = Launched(device, "multiply", start, stream.record(), flops=flops)
        if self.progress:
            self.progress(flops)
        return launched

    # --- multiplying, sending and summing -------------------------------------------------

    def _pieces(self, stream: Stream, sum_stream: Stream) -> None:
        todo, own = deque(self.pieces), deque(self.owned)
        shared = SharedBlocks(self.shares)
        # Pieces with the buffers into which they are multiplied, or without where they are summed.
        running: dict[Future | Launched, tuple[Piece, Operand | None]] = {}
        lanes, sums = self._threads()
        transport, device, there = self.transport, self.devices[0], self.there
        assert transport is not None
        most = len(todo) if there else self.lanes
        self.beat.polls = threading.get_ident()
        found = time.perf_counter()
        try:
            while todo or own or running:
                adding = any(buffer is None for _piece, buffer in running.values())
                while todo and len(running) - adding < most:
                    buffer = transport.room(todo[0])
                    if buffer is None:
                        break
                    piece = todo.popleft()
                    future: Future | Launched
                    if there and buffer.home is device:
                        future = self._launch(*self.within[piece], buffer, stream)
                    else:
                        future = lanes.submit(self._multiply, piece, buffer, shared, stream)
                    running[future] = piece, buffer
                transport.poll()
                if own and not adding and (parts := transport.parts(own[0].round)):
                    piece = own.popleft()
                    if there and transport.near and self.in_place:
                        future = self._launch_sum(piece, parts, self._here(piece), sum_stream)
                    else:
                        future = sums.submit(self._sum, piece, parts, sum_stream)
                    running[future] = piece, None
                    del parts
                if self._collect(running, transport):
                    found = time.perf_counter()
                else:
                    self._wait([*running], time.perf_counter() - found)
            with self.beat.during(WAITING):
                transport.finish()
            relays = [("relay", *relayed, 0) for relayed in transport.relayed]
            self.timelines.append(_timeline(device, relays))
        finally:
            self.beat.polls = None
            for pool in (lanes, sums):
                pool.shutdown(wait=False, cancel_futures=True)

    def _collect(
        self, running: dict[Future | Launched, tuple[Piece, Operand | None]], transport: Transport
    ) -> bool:
        """Takes what is finished, if anything is: pieces travel, and strips are let go."""
        done = _finished(running)
        for future in done:
            piece, buffer = running.pop(future)
            self.beat.progress()
            self.timelines.append(future.result())
            if buffer is None:
                transport.summed(piece.round)
            else:
                transport.done(piece, buffer)
        return bool(done)

    def _wait(self, running: Sequence[Future | Launched], idle_s: float) -> None:
        """Until it is time to look again, where nothing was found for so long."""
        waiting = [x for x in running if isinstance(x, Future)]
        self.beat.computes = bool(waiting) and not self.devices[0].queues
        self.beat.state = MULTIPLYING if running else WAITING
        if waiting:
            wait(waiting, self.working_s, FIRST_COMPLETED)
        elif idle_s > LOOK_S:
            time.sleep(min(idle_s, self.poll_s))

    def _threads(self) -> tuple[Executor, Executor]:
        """What multiplies pieces, and what sums them, beside the thread that talks to MPI; that
        thread itself where cores make a piece in less time than it leaves MPI alone."""
        if self.brief:
            return _AtOnce(self.beat), _AtOnce(self.beat)
        return ThreadPoolExecutor(self.lanes, "lane"), ThreadPoolExecutor(1, "sum")

    def _here(self, piece: Piece, matrix: Operand | None = None) -> Any:
        """The piece's place in this rank's strip of C, or of another matrix like it."""
        return (matrix or self._mine.out).part(*self.in_strip[piece]).array

    def _launch_sum(self, piece: Piece, parts: list, target, stream) -> Launched:
        """The piece of C from its partials in rank order, alpha and beta applied once."""
        device, problem, mine = self.devices[0], self.plan.problem, self._mine
        transport = self.transport
        assert transport is not None
        with device.using(stream):
            if mine.c is not None and not (self.in_place and mine.c is mine.out):
                before = self._here(piece, mine.c)
                before = staging.cast(device, before, mine.c.home, self.dtype, stream)
                device.copy(target, before, stream)
            start = stream.record()
            for i, part in enumerate(parts):
                if not transport.near and i != transport.me:
                    parts[i] = device.empty(*piece.shape, self.dtype.name)
                    device.copy(parts[i], part, stream)
            device.sum(parts, target, alpha=problem.alpha, beta=problem.beta, stream=stream)
            moved = sum(part.nbytes for part in parts[1:])
            return Launched(device, "reduce", start, stream.record(), moved)

    def _sum(self, piece: Piece, parts: list, stream) -> Timeline:
        """The same, and where it is not made in place it is brought there."""
        device, view = self.devices[0], self._here(piece)
        with device.using(stream):
            target = view if self.in_place else device.empty(*piece.shape, self.dtype.name)
            done = [self._launch_sum(piece, parts, target, stream)]
            if not self.in_place:
                start = stream.record()
                on_host = self._mine.out.home is None
                staging.store(device, view, target, stream, on_host=on_host)
                done.append(Launched(device, "download", start, stream.record(), view.nbytes))
            stream.synchronize()
        return _joined([each.result() for each in done])


def _timeline(device: Device, marks: Iterable[tuple]) -> Timeline:
    """Of this rank's own (phase, event before, event after, bytes, flops)."""
    mine = [(0, *mark) for mark in marks]
    return Timeline(functools.partial(activities, mine, {0: device.clock()}))


def _joined(timelines: list[Timeline]) -> Timeline:
    return Timeline(lambda: itertools.chain.from_iterable(timelines))


def _within(whole: Box | Strip, piece: Piece) -> tuple[Span, Span]:
    """A piece's rows and columns, counted from those of the whole."""
    return piece.rows + -whole.rows.start, piece.cols + -whole.cols.start


def _finished(futures) -> list[Future]:
    """Those that are done; of failed ones first that which failed by itself."""
    done = [future for future in futures if future.done()]
    return sorted(done, key=lambda future: isinstance(future.exception(), Stopped))
