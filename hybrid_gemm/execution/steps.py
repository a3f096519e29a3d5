"""What a worker multiplies, in order: as plain data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..planning.partition import Box
from ..planning.plan import Panel, Worker


@dataclass(frozen=True, eq=False)
class Step:
    """A panel of a turn: whether its box begins the panel's tile, and whether it completes it."""

    turn: int
    box: Box
    panel: Panel
    number: int  # of the panel in its tile
    first: bool
    last: bool


def steps(planned: Worker, tiles: Sequence[Sequence[Panel]]) -> list[Step]:
    """The steps of a worker; `tiles` are its panels of C, tile by tile."""
    boxes = [(n, box) for n, boxes in enumerate(planned.tiles) for box in boxes]
    return [
        Step(turn, box, panel, number, box is tile[0], box is tile[-1])
        for turn, (n, box) in enumerate(boxes)
        for tile in [planned.tiles[n]]
        for number, panel in enumerate(tiles[n])
    ]
