"""Executes a plan with threads and streams: all that workers share, and how a run ends."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future

import numpy as np

from ..catalog import Variant
from ..devices.base import Device
from ..devices.matrix import Matrix
from ..planning.plan import Panel, Plan, Strip
from . import single_thread_schedule, staging
from .critical_reduction import Critical
from .device_memory import Layout, Slab, order_of
from .nccl_reduction import PanelSum
from .staging import Stopped, Transfer, settle
from .timeline import Timeline, activities
from .worker import Pipeline

__all__ = ["Common", "Matrix", "Stopped", "ThreadRun"]


class Common:
    """Blocks of one operand that several runs need, brought to their devices once."""

    def __init__(self, operand: str):
        self.operand = operand
        self.lock = threading.Lock()
        self.slabs: dict = {}


class ThreadRun:
    """One execution of a plan. `c` is read where beta != 0; `out` receives the result.

    `progress(flops)` is called, from any worker's thread, as pieces of work are started. With
    `resident` the clock runs only from when every block is on its device until every strip is
    finished there. `total_ms` is the host's time for what the clock covers. `fresh` says that
    nothing was written to `out` yet, so that its pages have to be made.

    A run among several is given what they have in `common`; they share a clock, and sessions,
    that somebody else has started.
    """

    def __init__(
        self,
        plan: Plan,
        devices: Sequence[Device],
        variant: Variant,
        a: Matrix,
        b: Matrix,
        c: Matrix | None,
        out: Matrix,
        progress: Callable[[int], None] | None = None,
        *,
        resident: bool = False,
        fresh: bool = False,
        common: Common | None = None,
    ):
        self.plan, self.devices, self.variant = plan, devices, variant
        self.a, self.b, self.c, self.out = a, b, c, out
        self.dtype = np.dtype(plan.problem.dtype)
        self.made = self._made()
        self.progress = progress or (lambda flops: None)
        self.resident, self.fresh, self.common = resident, fresh, common
        self.failure: BaseException | None = None
        self.stopped = ctypes.c_int()  # the same, for threads that need no Python
        self.wrote = False  # whether `out` is no longer what it was
        self.lock = threading.Lock()
        self.futures: list[Future] = []
        self.transfers: list[tuple[int, str, int, Transfer]] = []
        self.marks: list[tuple] = []
        self.clocked = common is not None

        self.partials: dict = {}  # (panel, worker) -> matrix
        self.panel_sums: dict[Panel, PanelSum] = {}  # by NCCL
        self.multiplied = {(p, w): self.future() for p in plan.panels for w in p.workers}
        self.c_ready: dict[Strip, Future] = {s: self.future() for s in plan.strips}
        self.finished: dict[Strip, Future] = {s: self.future() for s in plan.strips}
        self.critical = Critical(self) if plan.reduce == "critical" else None
        self.pipelines = [Pipeline(self, w) for w in plan.workers if w.boxes]
        self.gates = [
            threading.Barrier(max(1, len(self.pipelines)), self.start_clock),
            threading.Barrier(max(1, len(self.pipelines)), self.stop_clock),
        ]
        try:
            self._lay_out()
        except MemoryError:
            self._let_go()
            raise

    def _made(self) -> np.dtype:
        """The dtype of finished strips: of 16 bits where tensor cores make C of such operands,
        and each element is written once, so that it is rounded once."""
        plan, narrow = self.plan, np.dtype(self.plan.problem.operands)
        once = not plan.summed and all(len(tile) == 1 for w in plan.workers for tile in w.tiles)
        given = [x.array.dtype for x in (self.c, self.out) if x is not None]
        return narrow if once and all(dtype == narrow for dtype in given) else self.dtype

    # --- memory ---------------------------------------------------------------------------

    def _lay_out(self) -> None:
        """Takes all the memory of the run. Raises `MemoryError` before anything was done."""
        layouts = [Layout(device, self.dtype) for device in self.devices]
        self.needs: dict[tuple[int, int, str], Slab] = {}
        self.slabs: dict = {}
        with self.common.lock if self.common else contextlib.nullcontext():
            for block in self.plan.blocks:
                self._add_slab(block, layouts[block.device])
            for pipeline in self.pipelines:
                pipeline.wish(layouts[pipeline.worker.device])
            for each in layouts:
                each.take()

    def _add_slab(self, block, memory: Layout) -> None:
        shared = self.common is not None and block.operand == self.common.operand
        known = self.common.slabs if shared else self.slabs
        slab = known.get(block)
        if slab is None:
            slab = known[block] = Slab(block)
            self._place(slab, memory)
        self.slabs[block] = slab
        self.futures += [*slab.ready, slab.read]
        for w in block.workers:
            self.needs[w, block.turn, block.operand] = slab

    def _place(self, slab: Slab, memory: Layout) -> None:
        """Where a block will be: in the caller's matrix if the device multiplies that."""
        block, device = slab.block, self.devices[slab.block.device]
        matrix = self.operand(block.operand)
        view = matrix.part(block.rows, block.cols)
        dtype = np.dtype(self.plan.problem.operands)
        if matrix.serves(device, dtype):
            slab.buffer = view
            for part, future in enumerate(slab.ready):
                slab.claim(part)
                settle(future)
            return
        space = block.operand, id(slab)
        if count := self.plan.turns_in_memory:
            (worker,) = block.workers
            space = block.operand, worker, block.turn % count
            slab.before = self.needs.get((worker, block.turn - count, block.operand))
        memory.wish(
            space, block.turn, view.shape, lambda m: setattr(slab, "buffer", m), order_of(view),
            dtype,
        )  # fmt: skip

    def operand(self, name: str) -> Matrix:
        return self.a if name == "A" else self.b

    def device_of(self, worker: int) -> Device:
        return self.devices[self.plan.workers[worker].device]

    def partial(self, panel: Panel, strip: Strip, worker: int):
        """A worker's partial of a strip, where it was made."""
        where = strip.rows.within(panel.rows), strip.cols.within(panel.cols)
        return self.partials[panel, worker][where]

    def panel_sum(self, panel: Panel) -> PanelSum:
        if panel not in self.panel_sums:
            self.panel_sums[panel] = PanelSum(self, panel)
        return self.panel_sums[panel]

    def pipeline_of(self, worker: int) -> Pipeline:
        return next(p for p in self.pipelines if p.index == worker)

    def relays(self, slab: Slab, part: int) -> bool:
        """Whether a device has a part from another device, and not from where the matrix is."""
        from_host = self.operand(slab.block.operand).home is None
        return from_host and slab.block.source(part) != slab.block.device

    def slab_at(self, slab: Slab, part: int) -> Slab:
        """The slab of the same block on the device that has a part from the host."""
        block = slab.block
        return next(
            s for b, s in self.slabs.items()
            if b.device == block.source(part)
            and (b.operand, b.rows, b.cols, b.turn)
            == (block.operand, block.rows, block.cols, block.turn)
        )  # fmt: skip

    # --- the run as a whole ---------------------------------------------------------------

    def run(self) -> Timeline:
        """Executes the plan; returns when every stream is idle. Raises a worker's error, with a
        note if `out` is incomplete then."""
        with contextlib.ExitStack() as stack:
            if self.common is None:
                for device in self.devices:
                    stack.enter_context(device.session())
            for pipeline in self.pipelines:
                stack.enter_context(pipeline.working())
            if self.critical:
                self.critical.start()
            if not self.resident and self.common is None:
                self.start_clock()
            try:
                self._touch()
                self._execute()
                self._land()
            except BaseException as error:
                self.stop(error)
                for each in self.panel_sums.values():  # nothing may still be at work in memory
                    each.synchronize()
                if self.wrote and not self.fresh:
                    error.add_note("out is incomplete: some of it was written before this error")
                raise
            finally:
                for *_, transfer in self.transfers:
                    transfer.over.wait()
            if not self.resident and self.common is None:
                self.stop_clock()
            if self.critical:
                self.critical.end()
        clocks = {w.index: self.devices[w.device].clock() for w in self.plan.workers}
        timeline = Timeline(functools.partial(activities, self.marks, clocks))
        self._let_go()
        return timeline

    def _let_go(self) -> None:
        """Gives the devices' memory back now, and not when Python finds what refers to what."""
        for held in (self.pipelines, self.transfers, self.gates, self.slabs, self.needs,
                     self.partials, self.panel_sums, self.futures):  # fmt: skip
            held.clear()
        self.critical = None

    def _execute(self) -> None:
        if (
            not self.plan.turns_in_memory
            and not self.critical
            and all(d.queues for d in self.devices)
        ):
            single_thread_schedule.execute(self)
            return
        jobs = [job for pipeline in self.pipelines for job in self._jobs(pipeline)]
        if len(jobs) == 1:
            jobs[0]()
            return
        threads = [threading.Thread(target=self._guarded, args=(job,)) for job in jobs]
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                thread.join()
        except BaseException as error:  # Ctrl-C: stop at the next piece of work
            self.stop(error)
            for thread in threads:
                thread.join()
            raise
        if self.failure is not None:
            raise self.failure

    @staticmethod
    def _jobs(pipeline: Pipeline) -> list[Callable[[], None]]:
        stages = pipeline.feed, pipeline.multiply, pipeline.finish
        if not pipeline.simple:
            return list(stages)

        def all_stages():
            for stage in stages:
                stage()

        return [all_stages]

    def _guarded(self, job: Callable[[], None]) -> None:
        try:
            job()
        except (Stopped, threading.BrokenBarrierError):
            pass
        except BaseException as error:
            self.stop(error)

    def stop(self, error: BaseException) -> None:
        """Lets every stage leave at its next step; the first error is the one to report."""
        with self.lock:
            self.failure = self.failure or error
            self.stopped.value = 1
        for gate in self.gates:
            gate.abort()
        for future in self.futures:
            settle(future, error=Stopped())

    def check(self) -> None:
        if self.failure is not None:
            raise Stopped

    def future(self) -> Future:
        """A future that a failure settles."""
        self.futures.append(Future())
        return self.futures[-1]

    def transfer(self, worker: int, phase: str, size: int, done: Future) -> Transfer:
        """A copy that the run waits for; its bytes count if the clock runs."""
        transfer = Transfer(done, self.stopped)
        with self.lock:
            self.transfers.append((worker, phase if self.clocked else "", size, transfer))
        return transfer

    def _land(self) -> None:
        """Waits for all copies. Raises the error of one that failed."""
        for worker, phase, size, transfer in self.transfers:
            transfer.done.result()
            transfer.stop.synchronize()
            if phase:
                self.marks.append((worker, phase, transfer.start, transfer.stop, size, 0))

    def _touch(self) -> None:
        """Has the pages of a fresh `out` made by the threads that will write it."""
        ports = {p.device.port: p.device for p in self.pipelines if not p.device.host_memory}
        if not self.fresh or not ports or self.out.home is not None or self.critical:
            return
        array = self.out.array
        for i, device in enumerate(ports.values()):
            share = slice(i * len(array) // len(ports), (i + 1) * len(array) // len(ports))
            staging.link(device).touch(array[share])

    # --- the clock ------------------------------------------------------------------------

    def start_clock(self) -> None:
        for device in self.devices:
            device.start_clock()
        self.clocked, self._started = True, time.perf_counter()

    def stop_clock(self) -> None:
        self.clocked = False
        self.total_ms = (time.perf_counter() - self._started) * 1e3

    def gate(self, number: int) -> None:
        """In a resident run: all workers' streams are idle, and the clock starts or stops."""
        self.gates[number].wait()

    def mark(self, worker: int, phase: str, start, stream, bytes=0, flops=0):
        event = stream.record()
        if self.clocked:
            with self.lock:
                self.marks.append((worker, phase, start, event, bytes, flops))
        return event
