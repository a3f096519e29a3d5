"""Executes a plan with one thread and one stream a worker.

Host threads meet only through futures that carry stream events, so a device never waits
for Python: `_Shared` blocks of A and B, partials of C, and (for the lab's way) turns.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..catalog import Variant
from ..devices.base import Device, layout, leading
from ..errors import UsageError
from ..planner import Block, Plan, Span, Strip, Worker, cut
from .timeline import Activity, Timeline

CHUNK_ROWS = 128  # pieces of a box are whole block tiles


@dataclass(frozen=True)
class Matrix:
    """A 2-D view and the device it lives on; None is host memory."""

    array: Any
    home: Device | None = None

    def part(self, rows: Span, cols: Span):
        return self.array[rows.slice, cols.slice]


@dataclass
class _Shared:
    """A block of A or B on a device; `ready` has one event for each worker's part of it."""

    block: Block
    lock: threading.Lock = field(default_factory=threading.Lock)
    buffer: Any = None
    ready: dict[int, Future] = field(default_factory=dict)

    def __post_init__(self):
        self.ready = {w: Future() for w in self.block.workers}


class _Stopped(Exception):
    """Another worker failed; its error is the one to report."""


class ThreadRun:
    """One execution of a plan. `c` is read where beta != 0; `out` receives the result.

    `progress(flops)` is called, from any worker's thread, as pieces of work complete. With
    `resident` the clock runs only from when every block is on its device until every strip is
    finished there. `total_ms` is the host's time for what the clock covers.
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
    ):
        if plan.reduce == "critical" and out.home is not None:
            raise UsageError(
                "the critical reduction sums through host memory; give host arrays, "
                "or use the ordered one"
            )
        self.plan, self.devices, self.variant = plan, devices, variant
        self.a, self.b, self.c, self.out = a, b, c, out
        self.dtype = np.dtype(plan.problem.dtype)
        self.progress = progress or (lambda flops: None)
        self.shared = {(x.operand, x.rows, x.cols, x.device): _Shared(x) for x in plan.blocks}
        busy = [w.index for w in plan.workers if w.boxes]
        self.partials = {w: Future() for w in busy}  # the matrix, before it is multiplied
        self.multiplied = {w: Future() for w in busy}  # the event after
        self.turns = {w: Future() for w in busy}
        self.order = busy
        self.critical = plan.reduce == "critical"
        self.kept: list = []
        self.failure: BaseException | None = None
        self.lock = threading.Lock()
        self.resident = resident
        workers = max(1, len(busy))
        self.gates = [
            threading.Barrier(workers, self._start_clock),
            threading.Barrier(workers, self._stop_clock),
        ]
        self.clocked = False
        self.marks: list[tuple] = []

    # --- the run as a whole ---------------------------------------------------------------

    def run(self) -> Timeline:
        """Executes the plan; returns when every stream is idle. Raises a worker's error."""
        with contextlib.ExitStack() as stack:
            for device in self.devices:
                stack.enter_context(device.session())
            if self.critical:
                self._start_critical()
            workers = [w for w in self.plan.workers if w.boxes]
            if not self.resident:
                self._start_clock()
            if len(workers) == 1:
                self._work(workers[0])
            else:
                self._run_threads(workers)
            if not self.resident:
                self._stop_clock()
            if self.critical and self.host_c is not self.out.array:
                self.out.array[...] = self.host_c
        return Timeline(self._activity(*mark) for mark in self.marks)

    def _start_clock(self) -> None:
        for device in self.devices:
            device.start_clock()
        self.clocked, self._started = True, time.perf_counter()

    def _stop_clock(self) -> None:
        self.clocked = False
        self.total_ms = (time.perf_counter() - self._started) * 1e3

    def _gate(self, number: int, stream) -> None:
        """In a resident run: all workers' streams are idle, and the clock starts or stops."""
        if self.resident:
            stream.synchronize()
            self.gates[number].wait()

    def _run_threads(self, workers: list[Worker]) -> None:
        threads = [
            threading.Thread(target=self._guarded, args=(w,), name=f"worker-{w.index}")
            for w in workers
        ]
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                thread.join()
        except BaseException as error:  # Ctrl-C: stop at the next piece of work
            self._stop(error)
            for thread in threads:
                thread.join()
            raise
        if self.failure is not None:
            raise self.failure

    def _guarded(self, worker: Worker) -> None:
        try:
            self._work(worker)
        except (_Stopped, threading.BrokenBarrierError):
            pass
        except BaseException as error:
            self._stop(error)

    def _stop(self, error: BaseException) -> None:
        with self.lock:
            self.failure = self.failure or error
        waiting = [*self.partials.values(), *self.multiplied.values(), *self.turns.values()]
        for shared in self.shared.values():
            waiting += shared.ready.values()
        for gate in self.gates:
            gate.abort()
        for future in waiting:
            _settle(future, error=_Stopped())

    def _check(self) -> None:
        if self.failure is not None:
            raise _Stopped

    # --- one worker -----------------------------------------------------------------------

    def _work(self, worker: Worker) -> None:
        device = self.devices[worker.device]
        with device.working() as stream:
            self._upload(worker, device, stream)
            strips = [
                (strip, self._target(strip, device, stream))
                for strip in self.plan.strips
                if strip.owner == worker.index and not self.critical
            ]
            problem = self.plan.problem
            if not self.plan.summed:
                self._gate(0, stream)
                ((_strip, target),) = strips
                self._gemm(worker, target, problem.alpha, problem.beta, device, stream)
            else:
                (box,) = worker.boxes
                partial = device.empty(len(box.rows), len(box.cols), self.dtype.name)
                _settle(self.partials[worker.index], partial)
                gathered = [self._gather(strip, device, stream) for strip, _target in strips]
                self._gate(0, stream)
                alpha = problem.alpha if self.critical else 1
                event = self._gemm(worker, partial, alpha, 0, device, stream)
                _settle(self.multiplied[worker.index], event)
                if self.critical:
                    self._reduce_critical(worker, partial, device, stream)
                for (strip, target), parts in zip(strips, gathered, strict=True):
                    self._reduce(strip, target, parts, device, stream)
            self._gate(1, stream)
            for strip, target in strips:
                self._download(strip, target, device, stream)
            stream.synchronize()

    def _mark(self, worker: int, phase: str, start, stream, bytes=0, flops=0):
        event = stream.record()
        if self.clocked:
            with self.lock:
                self.marks.append((worker, phase, start, event, bytes, flops))
        return event

    def _activity(self, worker, phase, start, stop, bytes, flops) -> Activity:
        device = self.devices[self.plan.workers[worker].device]
        return Activity(worker, phase, device.time_ms(start), device.time_ms(stop), bytes, flops)

    def _local(self, matrix: Matrix, device: Device) -> bool:
        return matrix.home is device or (matrix.home is None and device.host_memory)

    def _upload(self, worker: Worker, device: Device, stream) -> None:
        mine = [x for x in self.shared.values() if worker.index in x.block.workers]
        start, moved = stream.record(), 0
        for shared in mine:
            self._check()
            moved += self._bring(shared, worker, device, stream)
        if moved:
            self._mark(worker.index, "upload", start, stream, moved)
        for shared in mine:
            for future in shared.ready.values():
                if event := future.result():
                    stream.wait(event)

    def _bring(self, shared: _Shared, worker: Worker, device: Device, stream) -> int:
        """This worker's part of a block, brought to the device; returns the bytes moved."""
        block = shared.block
        matrix = self.a if block.operand == "A" else self.b
        view = matrix.part(block.rows, block.cols)
        ready = shared.ready[worker.index]
        fits = view.dtype == self.dtype and (device.host_memory or layout(view))
        if fits and self._local(matrix, device):
            shared.buffer = view
            _settle(ready, None)
            return 0
        with shared.lock:
            if shared.buffer is None:
                shared.buffer = device.empty_like(view, self.dtype.name)
        along_rows = leading(shared.buffer, "n") is not None
        parts = cut(view.shape[0 if along_rows else 1], len(block.workers))
        part = parts[block.workers.index(worker.index)].slice
        where = (part, slice(None)) if along_rows else (slice(None), part)
        source = view[where]
        if source.dtype != self.dtype:
            source = source.astype(self.dtype)
        device.copy(shared.buffer[where], source, stream)
        _settle(ready, stream.record())
        return source.size * self.dtype.itemsize

    def _operands(self, worker: Worker, device: Device):
        (box,) = worker.boxes
        if not len(box.ks):
            name = self.dtype.name
            return device.empty(len(box.rows), 0, name), device.empty(0, len(box.cols), name)
        return (
            self.shared["A", box.rows, box.ks, worker.device].buffer,
            self.shared["B", box.ks, box.cols, worker.device].buffer,
        )

    def _gemm(self, worker: Worker, target, alpha, beta, device: Device, stream):
        a, b = self._operands(worker, device)
        (box,) = worker.boxes
        start = stream.record()
        pieces = -(-box.flops // device.chunk_flops) if device.chunk_flops else 1
        for rows in cut(len(box.rows), max(1, pieces), CHUNK_ROWS):
            self._check()
            if not len(rows):
                continue
            device.gemm(
                self.variant, a[rows.slice], b, target[rows.slice],
                alpha=alpha, beta=beta, stream=stream,
            )  # fmt: skip
            self.progress(box.flops * len(rows) // len(box.rows))
        return self._mark(worker.index, "multiply", start, stream, flops=box.flops)

    def _in_place(self, view, device: Device) -> bool:
        """Whether a part of `out` can be made where it lies."""
        here = self._local(self.out, device) and view.dtype == self.dtype
        return here and leading(view, "n") is not None

    def _target(self, strip: Strip, device: Device, stream):
        """Where a strip of C is made: in `out` itself if it lies here as kernels want it.

        Holds beta's C; with beta = 0 whatever was there, which is overwritten.
        """
        view = self.out.part(strip.rows, strip.cols)
        in_place = self._in_place(view, device)
        target = view if in_place else device.empty(*view.shape, self.dtype.name)
        if self.plan.problem.beta and not (in_place and self.c.array is self.out.array):
            source = self.c.part(strip.rows, strip.cols)
            start = stream.record()
            device.copy(target, source.astype(self.dtype, copy=False), stream)
            self._mark(strip.owner, "upload", start, stream, target.size * self.dtype.itemsize)
        return target

    def _gather(self, strip: Strip, device: Device, stream) -> list[tuple[Any, Any]]:
        """The strip of each partial, in worker order: where it will be read, and where it lies
        if that is another device. Nothing is multiplied yet: what the sum needs is made ready."""
        parts = []
        for w in strip.partials:
            box = self.plan.workers[w].boxes[0]
            view = self.partials[w].result()[
                strip.rows.start - box.rows.start : strip.rows.stop - box.rows.start,
                strip.cols.start - box.cols.start : strip.cols.stop - box.cols.start,
            ]
            if self.devices[self.plan.workers[w].device] is device:
                parts.append((view, None))
            else:
                # With the partials' own leading dimension, which the kernel takes for all.
                room = device.empty(view.shape[0], len(box.cols), self.dtype.name)
                parts.append((room[:, : view.shape[1]], view))
        device.prepare_sum([view for view, _source in parts], stream)
        with self.lock:
            self.kept.append(parts)  # until the run is over: the stream may still read them
        return parts

    def _reduce(self, strip: Strip, target, parts, device: Device, stream) -> None:
        """Sums the strip's partials in worker order; those of other devices are fetched."""
        for w in strip.partials:
            stream.wait(self.multiplied[w].result())
        start, moved = stream.record(), 0
        for view, source in parts:
            if source is not None:
                device.copy(view, source, stream)
                moved += source.nbytes
        problem = self.plan.problem
        views = [view for view, _source in parts]
        device.sum(views, target, alpha=problem.alpha, beta=problem.beta, stream=stream)
        self._mark(strip.owner, "reduce", start, stream, moved)

    def _download(self, strip: Strip, target, device: Device, stream) -> None:
        view = self.out.part(strip.rows, strip.cols)
        if self._in_place(view, device):
            return
        self._check()
        start = stream.record()
        if view.dtype == self.dtype:
            device.copy(view, target, stream)
        elif self.out.home is None and not device.host_memory:
            host = np.empty(view.shape, self.dtype)
            device.copy(host, target, stream)
            stream.synchronize()
            view[...] = host.astype(view.dtype)
        else:
            view[...] = target.astype(view.dtype)
        self._mark(strip.owner, "download", start, stream, view.nbytes)

    # --- the lab's reduction, for comparison ------------------------------------------------

    def _start_critical(self) -> None:
        fits = self.out.array.dtype == self.dtype and self.out.array.flags.c_contiguous
        self.host_c = self.out.array if fits else np.empty(self.out.array.shape, self.dtype)
        if self.plan.problem.beta:
            self.host_c[...] = self.c.array
            self.host_c *= self.dtype.type(self.plan.problem.beta)
        else:
            self.host_c[...] = 0
        if self.order:
            self.turns[self.order[0]].set_result(None)

    def _reduce_critical(self, worker: Worker, partial, device: Device, stream) -> None:
        """One worker at a time: C up, add, C down (lab report, task 2, columns)."""
        self.turns[worker.index].result()
        (box,) = worker.boxes
        view = self.host_c[box.rows.slice, box.cols.slice]
        start = stream.record()
        if device.host_memory:
            device.add(view, partial, stream)
        else:
            total = device.empty(*view.shape, self.dtype.name)
            device.copy(total, view, stream)
            device.add(total, partial, stream)
            device.copy(view, total, stream)
        self._mark(worker.index, "reduce", start, stream, 2 * view.nbytes)
        stream.synchronize()
        position = self.order.index(worker.index)
        if position + 1 < len(self.order):
            _settle(self.turns[self.order[position + 1]], None)


def _settle(future: Future, value=None, error: BaseException | None = None) -> None:
    """Sets a future that another thread may have settled already when a run stops."""
    with contextlib.suppress(InvalidStateError):
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(value)
