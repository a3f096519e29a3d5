"""What workers multiply, in order: what runs carry out, and predictions play. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from .partition import Box
from .plan import Panel, Plan, Worker


@dataclass(frozen=True, eq=False)
class Step:
    """A panel of a worker's turn: whether its box begins the panel's tile, and whether it completes
    it."""

    worker: int
    turn: int
    box: Box
    panel: Panel
    number: int  # of the panel in its tile
    first: bool
    last: bool


def tiles_of(plan: Plan, worker: Worker) -> Sequence[Sequence[Panel]]:
    """A worker's panels of C, tile by tile."""
    return plan.tiles.get(worker.index, [])


def steps(worker: Worker, tiles: Sequence[Sequence[Panel]]) -> list[Step]:
    """The steps of a worker; `tiles` as `tiles_of` gives them."""
    chunks = len(worker.chunks)
    return [
        Step(worker.index, turn, box, panel, number, chunk == 0, chunk == chunks - 1)
        for turn, box in enumerate(worker.boxes)
        for tile, chunk in [divmod(turn, chunks)]
        for number, panel in enumerate(tiles[tile])
    ]


def as_started(plan: Plan) -> Iterator[Step]:
    """The steps of all workers as one thread starts them: the first of each, then the second."""
    each = (steps(worker, tiles_of(plan, worker)) for worker in plan.workers)
    for row in itertools.zip_longest(*each):
        yield from filter(None, row)
