"""Executes a plan by one thread, for devices that queue what they are told.

Nothing waits for what comes later in the order, so nobody has to wait in a thread of his own.
Threads would rather wait for each other: Python does one thing at a time, for all GPUs.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

from ..planning.plan import Panel
from ..planning.steps import Step
from .run import Run
from .worker import Worker

AHEAD = 8  # steps: what they read is on its way while others are multiplied


def execute(run: Run, workers: list[Worker]) -> None:
    """All of a run whose plan holds everything at once."""
    if run.resident:
        _resident(run, workers)
    else:
        with uncollected():
            _streamed(run, workers)
    for worker in workers:
        worker.synchronize()


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Without Python's collection of garbage, which may take 30 ms of the one thread that starts
    everything (docs/notes/several-gpus.md)."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _resident(run: Run, workers: list[Worker]) -> None:
    """Everything is brought first; the clock runs while it is multiplied and summed."""
    by_index = {worker.index: worker for worker in workers}
    for worker, step in _in_turn(workers):
        _bring(run, by_index, worker, step)
    for worker, step in _in_turn(workers):
        _relay(run, worker, step)
    for worker in workers:
        worker.prepare()
        worker.wait_for_everything()
    run.clock.start()
    for worker, step in _in_turn(workers):
        worker.start_product(step)
    strips = []
    for panels in _panels_in_turn(workers):
        for worker, panel in panels:
            worker.start_subtotals(panel)
        for worker, panel in panels:
            for strip in worker.own_strips(panel):
                strips.append((worker, strip, worker.start_sum(panel, strip)))
    for worker in workers:
        worker.synchronize()
    run.clock.stop()
    for worker, strip, event in strips:
        worker.give_back(strip, event)


def _streamed(run: Run, workers: list[Worker]) -> None:
    """Uploads some steps ahead, then what is relayed, products, sums and downloads."""
    by_index = {worker.index: worker for worker in workers}
    ahead = _in_turn(workers)
    unmultiplied = {panel: len(panel.workers) for panel in run.plan.panels}

    def bring_next() -> None:
        for worker, step in ahead:
            _bring(run, by_index, worker, step)
            return

    for _ in range(AHEAD * len(workers)):
        bring_next()
    for worker, step in _in_turn(workers):
        bring_next()
        _relay(run, worker, step)
        worker.start_product(step)
        if step.last:
            unmultiplied[step.panel] -= 1
            if not unmultiplied[step.panel]:
                _finish([by_index[index] for index in step.panel.workers], step.panel)


def _in_turn(workers: list[Worker]) -> Iterator[tuple[Worker, Step]]:
    """The first step of each worker, then the second of each, and so on."""
    for number in range(max((len(w.steps) for w in workers), default=0)):
        yield from ((w, w.steps[number]) for w in workers if number < len(w.steps))


def _panels_in_turn(workers: list[Worker]) -> Iterator[list[tuple[Worker, Panel]]]:
    """The first panels of all workers, then the second ones. Sums are started in this order, and
    one that waits holds up those behind it."""
    for number in range(max((len(w.panels) for w in workers), default=0)):
        yield [(w, w.panels[number]) for w in workers if number < len(w.panels)]


def _bring(run: Run, by_index: dict[int, Worker], worker: Worker, step: Step) -> None:
    """Has all that a step reads on its way from where the matrices are."""
    run.stop.check()
    blocks = run.blocks
    for slab, part in worker.parts(step):
        source = blocks.at_source(slab, part) if blocks.relays(slab, part) else slab
        if source.claim(part):
            by_index[source.block.bringer(part)].bring(source, part)
    worker.bring_c(step)


def _relay(run: Run, worker: Worker, step: Step) -> None:
    """Has what a step reads, and another device has from the host, on its way from there."""
    for slab, part in worker.parts(step):
        if run.blocks.relays(slab, part) and slab.claim(part):
            worker.relay(slab, part)


def _finish(workers: list[Worker], panel: Panel) -> None:
    """Starts the sums and downloads of a panel's strips: all its products are started."""
    for worker in workers:
        worker.start_subtotals(panel)
    for worker in workers:
        for strip in worker.own_strips(panel):
            worker.give_back(strip, worker.start_sum(panel, strip))
