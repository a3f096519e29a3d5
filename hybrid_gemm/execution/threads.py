"""Executes plans with threads and streams, over one device or several."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
import threading
from _thread import start_new_thread
from collections.abc import Callable, Sequence

from ..arrays.operand import Operands
from ..catalog import Variant
from ..devices.base import Device
from ..errors import UsageError
from ..host import forks
from ..planning.plan import Plan
from ..planning.reading_order import reading_order
from . import staging
from .critical_reduction import CriticalReduction
from .device_memory import SharedBlocks
from .executor import Execution
from .kept_programs import KeptPrograms, python
from .native_executor import Program
from .nccl_reduction import NcclReduction
from .read_ahead import ReadAhead
from .reduction import Reduction
from .run import Run
from .transfers import Later, Stopped
from .worker import Worker

REDUCTIONS: dict[str, type[Reduction]] = {
    each.name: each for each in (Reduction, NcclReduction, CriticalReduction)
}

_waiting: set[int] = set()  # the threads that start those of a run, or wait for them
forks.forget_in_child(_waiting.clear)  # new threads there get the numbers of these


def reduction_words(plan: Plan, devices: Sequence[Device]) -> str:
    """How a plan's partials are summed, for people."""
    return REDUCTIONS[plan.reduce].words(plan, devices) if plan.summed else "none"


class ThreadExecutor:
    """Executes plans over these devices. `smaller(plan)` makes a plan that takes less memory, for
    when another program has taken what a device said it had."""

    def __init__(self, devices: Sequence[Device], smaller: Callable[[Plan], Plan]) -> None:
        self.devices, self.smaller = devices, smaller
        self.kept = KeptPrograms()

    def again(
        self, plan: Plan, variant: Variant, operands: Operands,
        progress: Callable[[int], None] | None = None,
    ) -> Execution | None:  # fmt: skip
        """See `KeptPrograms.again`."""
        return self.kept.again(plan, self.devices, variant, operands, progress)

    def execute(
        self, plan: Plan, variant: Variant, operands: Operands, *, resident: bool = False,
        progress: Callable[[int], None] | None = None, timed: bool = True,
    ) -> Execution:  # fmt: skip
        """See `Executor`. With `resident` the clock runs only from when every block is on its
        device until every strip is finished there."""
        needs = functools.partial(reading_order, plan)
        with ReadAhead(needs, operands, plan.problem.flops) as ahead:
            progress = ahead.counting(progress)
            self._prepare(plan, variant, operands, timed=timed)
            run = self._run(plan, variant, operands, progress, resident=resident)
            done = run.execute()
        return dataclasses.replace(done, reading=ahead.reading) if ahead.reading else done

    def _prepare(self, plan: Plan, variant: Variant, operands: Operands, *, timed: bool) -> None:
        """Has kernels compiled."""
        for device in self.devices:
            prepare = device.prepare if timed else device.prepare_ahead
            prepare(
                variant, operands.a.array, operands.b.array, plan.problem.operands,
                summed=plan.summed,
            )  # fmt: skip

    def _run(
        self, plan: Plan, variant: Variant, operands: Operands,
        progress: Callable[[int], None] | None, *, resident: bool,
    ) -> ThreadRun:  # fmt: skip
        """A run that has its memory, by a smaller plan where there is not enough."""
        while True:
            with contextlib.suppress(MemoryError):
                return ThreadRun(
                    plan, self.devices, variant, operands, progress, resident=resident,
                    kept=self.kept,
                )  # fmt: skip
            for device in self.devices:
                device.free_unused()
            # Raises OutOfMemoryError when not even the smallest turns would fit.
            plan = self.smaller(plan)


class ThreadRun:
    """A run and its workers, that have their memory. `operands.c` is read where beta != 0, and
    `operands.out` receives the result.

    `progress(flops)` is called, from any worker's thread, as pieces of work are started. A run
    among several is given the blocks that they have in common, `shared`; they share a clock, and
    sessions, that somebody else has started. Raises `MemoryError` before anything was done.
    """

    def __init__(
        self, plan: Plan, devices: Sequence[Device], variant: Variant, operands: Operands,
        progress: Callable[[int], None] | None = None, *, resident: bool = False,
        shared: SharedBlocks | None = None, kept: KeptPrograms | None = None,
    ) -> None:  # fmt: skip
        self.programs = kept or KeptPrograms()
        self.run = run = Run(
            plan, devices, variant, operands, progress=progress, resident=resident, shared=shared,
            products=self.programs.products,
        )  # fmt: skip
        self.executor = python("workers have threads of their own")
        self.reduction = REDUCTIONS[plan.reduce if plan.summed else "ordered"](run)
        self.workers = [Worker(run, self.reduction, w) for w in plan.workers if w.boxes]

    def execute(self) -> Execution:
        """Returns when every stream is idle. Raises a worker's error, with a note if `out` is
        incomplete then."""
        try:
            self._execute()
            return self.run.done(self.executor)
        finally:
            self.workers.clear()
            self.run.let_go()

    def _execute(self) -> None:
        run, alone = self.run, self.run.shared is None
        with contextlib.ExitStack() as stack:
            for device in run.devices if alone else ():
                stack.enter_context(device.session())
            for worker in self.workers:
                stack.enter_context(worker.working())
            self.reduction.begin()
            program = self.programs.prepare(run, self.workers) if self._queued else None
            if alone and not run.resident:
                run.clock.start()
            try:
                self._multiply(program)
                run.land()
            except BaseException as error:
                run.fail(error)
                self.reduction.synchronize()  # nothing may still be at work in memory
                run.note_incomplete(error)
                if run.failure(error) is error:
                    raise
                raise run.failure(error) from None  # no name here holds it, for it holds this frame
            finally:
                run.wait_for_transfers()
            if alone and not run.resident:
                run.clock.stop()
            self.reduction.end()

    def _multiply(self, program: Program | str | None) -> None:
        run, workers = self.run, self.workers
        out = run.operands.out
        if run.operands.fresh and out.home is None and self.reduction.on_device:
            staging.make_pages([w.device for w in workers], out.array)
        if program is not None:
            self.executor = self.programs.execute(run, workers, program)
            return
        jobs = [job for worker in workers for job in _stages(worker)]
        if len(jobs) == 1:
            jobs[0]()
            return
        me = _not_waiting()
        try:  # and no context manager: see `Stream.start`
            _waiting.add(me)
            self._in_threads(jobs)
        finally:
            _waiting.discard(me)
        if run.stop.error is not None:
            raise run.stop.error

    def _in_threads(self, jobs: list[Callable[[], None]]) -> None:
        overs, begun = [Later() for _ in jobs], list[Later]()
        try:
            for job, over in zip(jobs, overs, strict=True):
                # Not Python's `Thread`: where a signal's handler raises within its `start`, it
                # raises a KeyError instead, or keeps a lock for which the thread waits for ever.
                given: list[Callable[[], None]] = [functools.partial(self._guarded, job)]
                start_new_thread(_work, (given, over, begun))
            for over in overs:
                over.result()
        except BaseException as error:  # Ctrl-C, or no more threads: stop at the next step
            self.run.fail(error)
            # A thread that has not begun yet finds that the run has stopped.
            for over in begun:
                over.result()
            raise

    @property
    def _queued(self) -> bool:
        """Whether one thread starts everything."""
        at_once = not self.run.plan.turns_in_memory and self.reduction.on_device
        return at_once and all(device.queues for device in self.run.devices)

    def _guarded(self, job: Callable[[], None]) -> None:
        try:
            self.run.stop.check()
            job()
        except (Stopped, threading.BrokenBarrierError):
            pass
        except BaseException as error:
            self.run.fail(error)


def _work(given: list[Callable[[], None]], over: Later, begun: list[Later]) -> None:
    """What a thread does. It refers to nothing of its run any more when that goes on: what is
    dropped then is given back at once."""
    begun.append(over)
    try:
        given.pop()()
    finally:
        over.settle()


def _not_waiting() -> int:
    """This thread's number. Refuses a run within another one's wait, as of a signal's handler: what
    it interrupted may hold a lock that new threads need. Refuses one while Python ends: threads
    begin no more then, and would be waited for for ever."""
    if sys.is_finalizing():
        raise UsageError(
            "a product by several threads was asked for while Python ends, as in the __del__ of an "
            "object that is freed last: no thread begins then. Multiply by threads=1 there, or "
            "before the end of the main program"
        )
    me = threading.get_ident()
    if me in _waiting:
        raise UsageError(
            "a product by several threads was asked for while this thread waits for the threads "
            "of another one, as in a signal's handler: Python could wait for ever for a lock. "
            "Multiply by threads=1 there, or once the other product has ended"
        )
    return me


def _stages(worker: Worker) -> list[Callable[[], None]]:
    stages = worker.feed, worker.multiply, worker.finish
    if not worker.simple:
        return list(stages)

    def all_stages() -> None:
        for stage in stages:
            stage()

    return [all_stages]
