"""The lab's reduction, for comparison: one worker at a time adds its partial to C in host memory
(lab report, task 2, columns)."""

from __future__ import annotations

from concurrent.futures import Future

import numpy as np

from ..errors import UsageError
from .staging import settle


class Critical:
    """The turns of a run's workers. `run` is the `ThreadRun`."""

    def __init__(self, run):
        if run.out.home is not None:
            raise UsageError(
                "the critical reduction sums through host memory; give host arrays, "
                "or use the ordered one"
            )
        self.run = run
        self.order = [w.index for w in run.plan.workers if w.boxes]
        self.turns: dict[int, Future] = {w: run.future() for w in self.order}

    def start(self) -> None:
        out, problem = self.run.out.array, self.run.plan.problem
        fits = out.dtype == self.run.dtype and out.flags.c_contiguous
        self.c = out if fits else np.empty(out.shape, self.run.dtype)
        self.run.wrote = fits
        if problem.beta:
            self.c[...] = self.run.c.array
            self.c *= self.run.dtype.type(problem.beta)
        else:
            self.c[...] = 0
        if self.order:
            settle(self.turns[self.order[0]])

    def add(self, pipeline) -> None:
        """In this worker's turn: C up, add, C down."""
        (panel,), device, stream = pipeline.panels, pipeline.device, pipeline.summing
        partial = self.run.partials[panel, pipeline.index]
        event = self.run.multiplied[panel, pipeline.index].result()
        self.turns[pipeline.index].result()
        view = self.c[panel.rows.slice, panel.cols.slice]
        with device.using(stream):
            stream.wait(event)
            start = stream.record()
            if device.host_memory:
                device.add(view, partial, stream)
            else:
                total = device.empty(*view.shape, self.run.dtype.name)
                device.copy(total, view, stream)
                device.add(total, partial, stream)
                device.copy(view, total, stream)
            self.run.mark(pipeline.index, "reduce", start, stream, 2 * view.nbytes)
            stream.synchronize()
        position = self.order.index(pipeline.index)
        if position + 1 < len(self.order):
            settle(self.turns[self.order[position + 1]])
        if self.run.resident:
            self.run.gate(1)

    def end(self) -> None:
        if self.c is not self.run.out.array:
            self.run.wrote = True
            self.run.out.array[...] = self.c
