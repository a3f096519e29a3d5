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
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

import numpy as np

from ..catalog import Variant
from ..devices.base import Device, leading
from ..planner import Plan, Span
from ..rankplan import Piece, RankPlan
from .threads import Common, Matrix, Stopped, ThreadRun
from .timeline import Activity, Timeline
from .transports import Transport

LANES = {"cuda": 2}
POLL_S = {"cuda": 5e-5}
POLL_S_ELSEWHERE = 5e-4


@dataclasses.dataclass(eq=False)
class Launched:
    """A product on a stream, asked as a `Future` is."""

    device: Device
    start: object
    stop: object
    flops: int

    def done(self) -> bool:
        return self.stop.done

    def exception(self) -> None:
        return None

    def result(self) -> list[Activity]:
        start, stop = self.device.time_ms(self.start), self.device.time_ms(self.stop)
        return [Activity(0, "multiply", start, stop, 0, self.flops)]


class RankRun:
    """One rank's part of a run.

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
        self.activities: list[Activity] = []
        self.products: dict[tuple, tuple[Plan, Variant]] = {}
        kind = devices[0].kind
        self.lanes, self.poll_s = LANES.get(kind, 1), POLL_S.get(kind, POLL_S_ELSEWHERE)

    def run(self) -> Timeline:
        """Returns when this rank's strip is finished and nobody waits for it any more."""
        if self.plan.box(self.rank) is None:
            return Timeline()
        for device in self.devices:
            device.start_clock()
        with contextlib.ExitStack() as stack:
            for device in self.devices:
                stack.enter_context(device.session())
            if self.transport is None:
                self._whole()
            else:
                self._pieces(*stack.enter_context(self.devices[0].streams(2)))
        return Timeline(self.activities)

    # --- multiplying ----------------------------------------------------------------------

    def _product(self, rows: int, cols: int, k: int, alpha, beta) -> tuple[Plan, Variant]:
        sides = {"m": rows, "n": cols, "k": k}
        key = tuple(sides.values())
        if key not in self.products:  # pieces have few shapes
            problem = dataclasses.replace(self.plan.problem, **sides, alpha=alpha, beta=beta)
            plan = self.inner(problem)
            self.products[key] = plan, self.choose(plan)
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
        self.activities += run.run()

    def _multiply(self, piece: Piece, buffer: Matrix, common: Common) -> Timeline:
        box = self.plan.box(self.rank)
        rows, cols = _from(box.rows, piece.rows), _from(box.cols, piece.cols)
        plan, variant = self._product(*piece.shape, len(box.ks), 1, 0)
        a = Matrix(self.a.array[rows.slice], self.a.home)
        b = Matrix(self.b.array[:, cols.slice], self.b.home)
        arguments = plan, self.devices, variant, a, b, None, buffer, self.progress
        return ThreadRun(*arguments, common=common).run()

    def _launch(self, piece: Piece, buffer: Matrix, stream) -> Launched:
        """The same where A and B are: nothing has to be brought, and nobody waits for it."""
        box, device = self.plan.box(self.rank), self.devices[0]
        rows, cols = _from(box.rows, piece.rows), _from(box.cols, piece.cols)
        _plan, variant = self._product(*piece.shape, len(box.ks), 1, 0)
        a, b = self.a.array[rows.slice], self.b.array[:, cols.slice]
        with device.using(stream):
            device.prepare(variant, a, b, self.plan.problem.operands)
            start = stream.record()
            device.gemm(variant, a, b, buffer.array, alpha=1, beta=0, stream=stream)
            flops = 2 * len(box.ks) * piece.shape[0] * piece.shape[1]
            if self.progress:
                self.progress(flops)
            return Launched(device, start, stream.record(), flops)

    @property
    def _there(self) -> bool:
        """Whether A and B lie on this rank's one device, in memory of its own."""
        device = self.devices[0]
        own = self.plan.threads == 1 and not device.host_memory
        return own and self.a.lies(device) and self.b.lies(device)

    # --- multiplying, sending and summing -------------------------------------------------

    def _pieces(self, stream, sum_stream) -> None:
        strip = self.plan.strip(self.rank)
        todo = deque(self.plan.pieces(self.rank))
        own = deque(self.plan.owned(self.rank))
        common = Common("B" if self.plan.by_rows(self.rank) else "A")
        multiplying: dict[Future | Launched, tuple[Piece, Matrix]] = {}
        summing: dict[Future, Piece] = {}
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
                    summing[sums.submit(self._sum, piece, strip, parts, sum_stream)] = piece
                    del parts
                waiting = [f for f in (*multiplying, *summing) if isinstance(f, Future)]
                if waiting:
                    wait(waiting, self.poll_s, FIRST_COMPLETED)
                else:
                    time.sleep(self.poll_s)
                for future in _finished(multiplying):
                    piece, buffer = multiplying.pop(future)
                    self.activities += future.result()
                    transport.done(piece, buffer)
                for future in _finished(summing):
                    self.activities += future.result()
                    transport.summed(summing.pop(future).round)
            transport.finish()
            self.activities += [
                Activity(0, "relay", device.time_ms(start), device.time_ms(stop), bytes)
                for start, stop, bytes in transport.relayed
            ]
        finally:
            for pool in (lanes, sums):
                pool.shutdown(wait=False, cancel_futures=True)

    def _sum(self, piece: Piece, strip, parts: list, stream) -> list[Activity]:
        """The piece of C from its partials in rank order, alpha and beta applied once."""
        device, problem = self.devices[0], self.plan.problem
        where = _from(strip.rows, piece.rows).slice, _from(strip.cols, piece.cols).slice
        view = self.out.array[where]
        here = self.out.home is device or (self.out.home is None and device.host_memory)
        in_place = here and view.dtype == self.dtype and leading(view, "n") is not None
        marks = []

        def mark(phase: str, start, bytes: int):
            marks.append((phase, start, stream.record(), bytes))

        with device.using(stream):
            target = view if in_place else device.empty(*piece.shape, self.dtype.name)
            if problem.beta and not (in_place and self.c.array is self.out.array):
                source = self.c.array[where].astype(self.dtype, copy=False)
                device.copy(target, source, stream)
            start, moved = stream.record(), 0
            for i, part in enumerate(parts):
                if not self.transport.near and i != self.transport.me:
                    parts[i] = device.empty(*piece.shape, self.dtype.name)
                    device.copy(parts[i], part, stream)
                moved += parts[i].nbytes
            device.sum(parts, target, alpha=problem.alpha, beta=problem.beta, stream=stream)
            mark("reduce", start, moved - moved // len(parts))
            if not in_place:
                start = stream.record()
                self._store(view, target, stream)
                mark("download", start, view.nbytes)
            stream.synchronize()
        return [
            Activity(0, phase, device.time_ms(start), device.time_ms(stop), bytes)
            for phase, start, stop, bytes in marks
        ]

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


def _from(whole: Span, part: Span) -> Span:
    """A part counted from the start of the whole."""
    return Span(part.start - whole.start, part.stop - whole.start)


def _finished(futures) -> list[Future]:
    """Those that are done; of failed ones first that which failed by itself."""
    done = [future for future in futures if future.done()]
    return sorted(done, key=lambda future: isinstance(future.exception(), Stopped))
