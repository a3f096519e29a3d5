"""Pictures as plain data: panels, and lines in them. `plots.draw` draws one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Line:
    """A line of a panel: numbers `x` (of bars: names) and `y`, of equal length.

    None in `y` was not measured. `theirs` marks published figures; lines of equal `style` have
    the same colour.
    """

    label: str
    x: Sequence[Any]
    y: Sequence[Any]
    theirs: bool = False
    style: int = 0


@dataclass(frozen=True)
class Panel:
    """One pair of axes: lines, or with `bars` groups of bars over the names in their `x`.

    The labels `x` and `y`, where given, replace the picture's; with a `y` of its own the panel
    has a vertical axis of its own too.
    """

    lines: Sequence[Line]
    title: str = ""
    bars: bool = False
    x: str = ""
    y: str = ""
    log_y: bool | None = None


@dataclass(frozen=True)
class Picture:
    """Panels side by side, at most three. The labels `x` and `y` say the units; at the height
    `reference` a thin line is drawn. With `ends`, lines have their last value beside it."""

    panels: Sequence[Panel]
    x: str
    y: str
    log_x: bool = False
    log_y: bool = False
    reference: float | None = None
    ends: bool = False

    @property
    def empty(self) -> bool:
        """Whether nothing was measured."""
        lines = (line for panel in self.panels for line in panel.lines)
        return all(y is None for line in lines for y in line.y)


def machine(device: str) -> str:
    """A device's description as a picture names it: "cuda:0 NVIDIA H200" is "H200"."""
    name = device.partition(" ")[2] if device.startswith("cuda") else device
    return name.removeprefix("NVIDIA ")


def machines(count: int, name: str) -> str:
    """So many machines of a name: "1 H200", "2 H200s"."""
    return f"{count} {name}{'s' if count > 1 else ''}"
