"""The lab's reduction, for comparison: one worker at a time adds its partial to C in host memory
(lab report, task 2, columns)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..arrays.caller_arrays import cast_into
from ..arrays.on_gpus import copy_into
from ..devices.base import Device, Stream
from ..devices.cpu import scale
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

    def product_alpha(self) -> float:
        return self.run.plan.problem.alpha

    def begin(self) -> None:
        run, out = self.run, self.run.operands.out.array
        in_place = out.dtype == run.dtype and out.flags.c_contiguous
        self.c = out if in_place else np.empty(out.shape, run.dtype)
        run.wrote = in_place
        if (beta := run.plan.problem.beta) and run.operands.c is not None:
            copy_into(self.c, run.operands.c.array)
            scale(self.c, beta)
        else:
            self.c[...] = 0
        if self.order:
            self.turns[self.order[0]].settle()

    def add(self, worker: int, panel: Panel, device: Device, stream: Stream) -> None:
        """In this worker's turn: C up, add, C down."""
        run = self.run
        partial = run.partials[panel, worker]
        event = run.multiplied[panel, worker].result()
        self.turns[worker].result()
        view = self.c[panel.rows.slice, panel.cols.slice]
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
        out = self.run.operands.out.array
        if self.c is not out:
            self.run.wrote = True
            cast_into(out, self.c)
