"""Executes one rank's part of a plan over ranks.

Inside a rank its box is a problem of its own for the thread runtime. Where ranks share a block
of C, the rank multiplies it piece by piece: on one or two *lanes* (host threads, so that a
device has its next piece when one ends), or, where A and B lie on the rank's one GPU, straight
on a stream. Pieces travel meanwhile, and a thread of its own sums the rank's strip as its parts
arrive. The calling thread alone talks to MPI and NCCL.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

import numpy as np

from ..arrays.strides import leading
from ..catalog import Variant
from ..devices.base import Device
from ..execution.plan_run import Common, Matrix, Stopped, ThreadRun
from ..execution.timeline import Timeline, activities
from ..planning.partition import Span
from ..planning.plan import Plan
from .rank_plan import Piece, RankPlan
from .transports import Transport

LANES = {"cuda": 2}
POLL_S = {"cuda": 5e-5}
POLL_S_ELSEWHERE = 5e-4
POLL_S_WORKING = 2e-3  # while cores multiply: every look takes time from them


@dataclasses.dataclass(eq=False)
class Launched:
    """Work on a stream, asked as a `Future` is."""

    device: Device
    phase: str
    start: object
    stop: object
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
    """One rank's part of a run, ready to start.

    `a` and `b` are this rank's blocks of op(A) and op(B) alone, `c` (read where beta != 0)
    and `out` its strip of C; None on a rank with nothing to do. `inner` plans a problem for
    this rank's threads, and `choose` takes the kernel for such a plan. `transport` is None
    where no sum is needed.
    """

    def __init__(
        self,
        plan: RankPlan,
        rank: int,
        devices: list[Device],
        inner: Callable[..., Plan],
        choose: Callable[[Plan], Variant],
        a: Matrix | None,
        b: Matrix | None,
        c: Matrix | None,
        out: Matrix | None,
        transport: Transport | None,
        progress: Callable[[int], None] | None = None,
    ):
        self.plan, self.rank, self.devices = plan, rank, devices
        self.inner, self.choose = inner, choose
        self.a, self.b, self.c, self.out = a, b, c, out
        self.transport, self.progress = transport, progress
        self.dtype = np.dtype(plan.problem.dtype)
        self.timelines: list[Timeline] = []
        self.products: dict[tuple, tuple[Plan, Variant]] = {}
        kind = devices[0].kind
        self.lanes, self.poll_s = LANES.get(kind, 1), POLL_S.get(kind, POLL_S_ELSEWHERE)
        self.working_s = self.poll_s if kind in POLL_S else POLL_S_WORKING
        if plan.box(rank) is None:
            return
        self.todo, self.own = (deque(p) for p in (plan.pieces(rank), plan.owned(rank)))
        if transport and self._there:
            for piece in self.todo:
                self._operands(piece)
        for device in devices:
            device.start_clock()

    def run(self) -> Timeline:
        """Returns when this rank's strip is finished and nobody waits for it any more."""
        if self.plan.box(self.rank) is None:
            return Timeline()
        with contextlib.ExitStack() as stack:
            for device in self.devices:
                stack.enter_context(device.session())
            if self.transport is None:
                self._whole()
            else:
                self._pieces(*stack.enter_context(self.devices[0].streams(2)))
        return _joined(self.timelines)

    # --- multiplying ----------------------------------------------------------------------

    def _product(self, rows: int, cols: int, k: int, alpha, beta) -> tuple[Plan, Variant]:
        sides = {"m": rows, "n": cols, "k": k}
        key = tuple(sides.values())
        if key not in self.products:  # pieces have few shapes
            problem = dataclasses.replace(self.plan.problem, **sides, alpha=alpha, beta=beta)
            plan = self.inner(problem)
            variant = self.choose(plan)
            for device in self.devices:
                device.prepare(variant, self.a.array, self.b.array, problem.operands)
            self.products[key] = plan, variant
        return self.products[key]

    def _whole(self) -> None:
        """A block of C that is this rank's own: the thread runtime does all of it."""
        p, box = self.plan.problem, self.plan.box(self.rank)
        sides = len(box.rows), len(box.cols), len(box.ks)
        plan, variant = self._product(*sides, p.alpha, p.beta)
        run = ThreadRun(
            plan, self.devices, variant, self.a, self.b, self.c, self.out, self.progress,
            common=Common(""),
        )  # fmt: skip
        self.timelines.append(run.run())

    def _operands(self, piece: Piece) -> tuple:
        """(plan, variant, op(A), op(B)) of a piece"""
        box = self.plan.box(self.rank)
        rows, cols = _from(box.rows, piece.rows), _from(box.cols, piece.cols)
        product = self._product(*piece.shape, len(box.ks), 1, 0)
        return *product, self.a.array[rows.slice], self.b.array[:, cols.slice]

    def _multiply(self, piece: Piece, buffer: Matrix, common: Common) -> Timeline:
        plan, variant, a, b = self._operands(piece)
        a, b = Matrix(a, self.a.home), Matrix(b, self.b.home)
        arguments = plan, self.devices, variant, a, b, None, buffer, self.progress
        return ThreadRun(*arguments, common=common).run()

    def _launch(self, piece: Piece, buffer: Matrix, stream) -> Launched:
        """The same where A and B are: nothing has to be brought, and nobody waits for it."""
        _plan, variant, a, b = self._operands(piece)
        device, flops = self.devices[0], 2 * a.shape[1] * buffer.array.size
        with device.using(stream):
            start = stream.record()
            device.gemm(variant, a, b, buffer.array, alpha=1, beta=0, stream=stream)
            launched = Launched(device, "multiply", start, stream.record(), flops=flops)
        if self.progress:
            self.progress(flops)
        return launched

    @property
    def _there(self) -> bool:
        """Whether A and B lie on this rank's one device, in memory of its own."""
        device = self.devices[0]
        own = self.plan.threads == 1 and not device.host_memory
        return own and self.a.lies(device) and self.b.lies(device)

    # --- multiplying, sending and summing -------------------------------------------------

    def _pieces(self, stream, sum_stream) -> None:
        todo, own = self.todo, self.own
        common = Common("B" if self.plan.by_rows(self.rank) else "A")
        multiplying: dict[Future | Launched, tuple[Piece, Matrix]] = {}
        summing: dict[Future | Launched, Piece] = {}
        lanes = ThreadPoolExecutor(self.lanes, "lane")
        sums = ThreadPoolExecutor(1, "sum")
        transport, device, there = self.transport, self.devices[0], self._there
        most = len(todo) if there else self.lanes
        try:
            while todo or own or multiplying or summing:
                while todo and len(multiplying) < most:
                    buffer = transport.room(todo[0])
                    if buffer is None:
                        break
                    piece = todo.popleft()
                    if there and buffer.home is device:
                        future = self._launch(piece, buffer, stream)
                    else:
                        future = lanes.submit(self._multiply, piece, buffer, common)
                    multiplying[future] = piece, buffer
                transport.poll()
                if own and not summing and (parts := transport.parts(own[0].round)):
                    piece = own.popleft()
                    if there and transport.near and self._in_place:
                        future = self._launch_sum(piece, parts, self._here(piece), sum_stream)
                    else:
                        future = sums.submit(self._sum, piece, parts, sum_stream)
                    summing[future] = piece
                    del parts
                waiting = [f for f in (*multiplying, *summing) if isinstance(f, Future)]
                if waiting:
                    wait(waiting, self.working_s, FIRST_COMPLETED)
                else:
                    time.sleep(self.poll_s)
                for future in _finished(multiplying):
                    piece, buffer = multiplying.pop(future)
                    self.timelines.append(future.result())
                    transport.done(piece, buffer)
                for future in _finished(summing):
                    self.timelines.append(future.result())
                    transport.summed(summing.pop(future).round)
            transport.finish()
            relays = [("relay", *relayed, 0) for relayed in transport.relayed]
            self.timelines.append(_timeline(device, relays))
        finally:
            for pool in (lanes, sums):
                pool.shutdown(wait=False, cancel_futures=True)

    @property
    def _in_place(self) -> bool:
        """Whether pieces of C can be made where they lie."""
        device, out = self.devices[0], self.out.array
        return self.out.lies(device) and out.dtype == self.dtype and leading(out, "n") is not None

    def _here(self, piece: Piece, matrix: Matrix | None = None):
        """The piece's place in this rank's strip of C, or of another matrix like it."""
        strip = self.plan.strip(self.rank)
        rows, cols = _from(strip.rows, piece.rows), _from(strip.cols, piece.cols)
        return (matrix or self.out).array[rows.slice, cols.slice]

    def _launch_sum(self, piece: Piece, parts: list, target, stream) -> Launched:
        """The piece of C from its partials in rank order, alpha and beta applied once."""
        device, problem = self.devices[0], self.plan.problem
        with device.using(stream):
            if problem.beta and not (self._in_place and self.c.array is self.out.array):
                device.copy(
                    target, self._here(piece, self.c).astype(self.dtype, copy=False), stream
                )
            start = stream.record()
            for i, part in enumerate(parts):
                if not self.transport.near and i != self.transport.me:
                    parts[i] = device.empty(*piece.shape, self.dtype.name)
                    device.copy(parts[i], part, stream)
            device.sum(parts, target, alpha=problem.alpha, beta=problem.beta, stream=stream)
            moved = sum(part.nbytes for part in parts[1:])
            return Launched(device, "reduce", start, stream.record(), moved)

    def _sum(self, piece: Piece, parts: list, stream) -> Timeline:
        """The same, and where it is not made in place it is brought there."""
        device, view = self.devices[0], self._here(piece)
        with device.using(stream):
            target = view if self._in_place else device.empty(*piece.shape, self.dtype.name)
            done = [self._launch_sum(piece, parts, target, stream)]
            if not self._in_place:
                start = stream.record()
                self._store(view, target, stream)
                done.append(Launched(device, "download", start, stream.record(), view.nbytes))
            stream.synchronize()
        return _joined([each.result() for each in done])

    def _store(self, view, target, stream) -> None:
        """view[...] = target, in whatever dtype and place `out` is."""
        device = self.devices[0]
        if view.dtype == self.dtype:
            device.copy(view, target, stream)
        elif self.out.home is None and not device.host_memory:
            host = np.empty(view.shape, self.dtype)
            device.copy(host, target, stream)
            stream.synchronize()
            view[...] = host.astype(view.dtype)
        else:
            view[...] = target.astype(view.dtype)


def _timeline(device: Device, marks: Iterable[tuple]) -> Timeline:
    """Of this rank's own (phase, event before, event after, bytes, flops)."""
    mine = [(0, *mark) for mark in marks]
    return Timeline(functools.partial(activities, mine, {0: device.clock()}))


def _joined(timelines: list[Timeline]) -> Timeline:
    return Timeline(lambda: itertools.chain.from_iterable(timelines))


def _from(whole: Span, part: Span) -> Span:
    """A part counted from the start of the whole."""
    return Span(part.start - whole.start, part.stop - whole.start)


def _finished(futures) -> list[Future]:
    """Those that are done; of failed ones first that which failed by itself."""
    done = [future for future in futures if future.done()]
    return sorted(done, key=lambda future: isinstance(future.exception(), Stopped))
