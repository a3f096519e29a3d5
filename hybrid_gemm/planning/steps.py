"""What a worker multiplies, in order. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from .partition import Box
from .plan import Panel, Plan, Worker


@dataclass(frozen=True, eq=False)
class Step:
    """A panel of a turn: whether its box begins the panel's tile, and whether it completes it."""

    turn: int
    box: Box
    panel: Panel
    number: int  # of the panel in its tile
    first: bool
    last: bool


def tiles_of(plan: Plan, worker: Worker) -> list[list[Panel]]:
    """A worker's panels of C, tile by tile."""
    panels = (panel for panel in plan.panels if worker.index in panel.workers)
    return [list(tile) for _, tile in itertools.groupby(panels, lambda panel: panel.tile)]


def steps(worker: Worker, tiles: Sequence[Sequence[Panel]]) -> list[Step]:
    """The steps of a worker; `tiles` as `tiles_of` gives them."""
    chunks = len(worker.chunks)
    return [
        Step(turn, box, panel, number, chunk == 0, chunk == chunks - 1)
        for turn, box in enumerate(worker.boxes)
        for tile, chunk in [divmod(turn, chunks)]
        for number, panel in enumerate(tiles[tile])
    ]
