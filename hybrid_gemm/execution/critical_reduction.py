"""The lab's reduction, for comparison: one worker at a time adds its partial to C in host memory
(lab report, task 2, columns)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..arrays.caller_arrays import by_rows, cast_into
from ..arrays.on_gpus import copy_into
from ..devices.base import Device, Stream
from ..devices.cpu import combine, scale
from ..errors import UsageError
from ..planning.plan import Panel, Plan
from .reduction import HostReduction
from .run import Run
from .transfers import Later


class CriticalReduction(HostReduction):
    """The workers of a run in turn, each as a critical section."""

    name = "critical"

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        if run.operands.out.home is not None:
            raise UsageError(
                "the critical reduction sums through host memory; give host arrays, "
                "or use the ordered one"
            )
        self.order = [w.index for w in run.plan.workers if w.boxes]
        self.turns: dict[int, Later] = {w: run.stop.future() for w in self.order}

    @classmethod
    def words(cls, plan: Plan, devices: Sequence[Device]) -> str:
        return "critical (one worker at a time, through host memory)"

    def begin(self) -> None:
        run, out = self.run, self.run.operands.out.array
        self.in_place = out.dtype == run.dtype and out.flags.c_contiguous
        # The partials' alone, until it is whole: parts times alpha may be Inf of both signs.
        run.wrote = self.in_place and not run.plan.problem.beta
        self.sum = out if run.wrote else np.empty(out.shape, run.dtype)
        self.sum[...] = 0
        if self.order:
            self.turns[self.order[0]].settle()

    def add(self, worker: int, panel: Panel, device: Device, stream: Stream) -> None:
        """In this worker's turn: C up, add, C down."""
        run = self.run
        partial = run.partials[panel, worker]
        event = run.multiplied[panel, worker].result()
        self.turns[worker].result()
        view = self.sum[panel.rows.slice, panel.cols.slice]
        with device.using(stream):
            stream.wait(event)
            start = stream.record()
            if device.host_memory:
                device.add(view, partial, stream)
            else:
                rows, cols = view.shape
                total = device.empty(rows, cols, run.dtype.name)
                device.copy(total, view, stream)
                device.add(total, partial, stream)
                device.copy(view, total, stream)
            run.clock.mark(worker, "reduce", start, stream.record(), 2 * view.nbytes)
            stream.synchronize()
        position = self.order.index(worker)
        if position + 1 < len(self.order):
            self.turns[self.order[position + 1]].settle()

    def end(self) -> None:
        run, problem = self.run, self.run.plan.problem
        out, made = run.operands.out.array, self.sum
        if problem.beta and run.operands.c is not None:
            made = out if self.in_place else np.empty_like(self.sum)
            run.wrote = self.in_place
            copy_into(made, run.operands.c.array)
            self._add_to(made, problem.alpha, problem.beta)
        else:
            scale(made, problem.alpha)
        if made is not out:
            run.wrote = True
            cast_into(out, made)

    def _add_to(self, c: np.ndarray, alpha: float, beta: float) -> None:
        """c = alpha * sum + beta * c."""
        by_rows(c, lambda x: combine(alpha, self.sum[x], beta, c[x], c[x]))
