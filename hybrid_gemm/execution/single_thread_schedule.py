"""Executes a plan by one thread, for devices that queue what they are told.

Nothing waits for what comes later in the order, so nobody has to wait in a thread of his own.
Threads would rather wait for each other: Python does one thing at a time, for all GPUs.
"""

from __future__ import annotations

from .worker import Pipeline, Step

AHEAD = 8  # steps: what they read is on its way while others are multiplied


def execute(run) -> None:
    """All of a `ThreadRun` whose plan holds everything at once."""
    each = run.pipelines
    if run.resident:
        for pipeline, step in _in_turn(each):
            _bring(run, pipeline, step)
        for pipeline, step in _in_turn(each):
            _relay(run, pipeline, step)
        for pipeline in each:
            pipeline.prepare()
            pipeline.wait_for_everything()
        run.start_clock()
        for pipeline, step in _in_turn(each):
            pipeline.start_product(step)
        strips = [(p, strip, p.start_sum(panel, strip)) for p, panel, strip in _owned(each)]
        for pipeline in each:
            pipeline.synchronize()
        run.stop_clock()
        for pipeline, strip, event in strips:
            pipeline.give_back(strip, event)
    else:
        strips = _owned(each)
        ahead, steps = _in_turn(each), _in_turn(each)
        for _ in range(AHEAD * len(each)):
            _bring_next(run, ahead)
        for pipeline, step in steps:
            _bring_next(run, ahead)
            _relay(run, pipeline, step)
            pipeline.start_product(step)
            strips = _finish(run, strips)
    for pipeline in each:
        pipeline.synchronize()


def _in_turn(pipelines: list[Pipeline]):
    """(pipeline, step): the first step of each, then the second of each, and so on."""
    for number in range(max((len(p.steps) for p in pipelines), default=0)):
        yield from ((p, p.steps[number]) for p in pipelines if number < len(p.steps))


def _owned(pipelines: list[Pipeline]) -> list[tuple]:
    """(pipeline, panel, strip of it): the strips of all first panels first. Copies between GPUs
    are started in this order, and one that waits holds up those behind it."""
    most = max((len(p.own) for p in pipelines), default=0)
    return [(p, *p.own[i]) for i in range(most) for p in pipelines if i < len(p.own)]


def _bring_next(run, ahead) -> None:
    for pipeline, step in ahead:
        _bring(run, pipeline, step)
        return


def _bring(run, pipeline: Pipeline, step: Step) -> None:
    """Has all that a step reads on its way from where the matrices are."""
    run.check()
    for slab, part in pipeline.parts(step):
        source = run.slab_at(slab, part) if run.relays(slab, part) else slab
        if source.claim(part):
            run.pipeline_of(source.block.bringer(part)).bring(source, part)
    pipeline.bring_c(step)


def _relay(run, pipeline: Pipeline, step: Step) -> None:
    """Has what a step reads, and another device has from the host, on its way from there."""
    for slab, part in pipeline.parts(step):
        if run.relays(slab, part) and slab.claim(part):
            pipeline.relay(slab, part)


def _finish(run, strips: list[tuple]) -> list[tuple]:
    """Starts the sums and downloads of strips whose products are started; the other strips."""
    later = []
    for pipeline, panel, strip in strips:
        if all(run.multiplied[panel, w].done() for w in panel.workers):
            pipeline.give_back(strip, pipeline.start_sum(panel, strip))
        else:
            later.append((pipeline, panel, strip))
    return later
