"""What a picture is made of: panels of lines. Plain data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Line:
    """A line of a panel. `theirs` marks published figures; equal `style` means equal colour."""

    label: str
    x: list
    y: list
    theirs: bool = False
    style: int = 0


@dataclass(frozen=True)
class Panel:
    """One set of axes: lines, or with `bars` groups of bars over the names in their `x`.

    Labels that are not the picture's own put the panel on a vertical axis of its own.
    """

    lines: list[Line]
    title: str = ""
    bars: bool = False
    x: str = ""
    y: str = ""
    log_y: bool | None = None


@dataclass(frozen=True)
class Picture:
    """Panels side by side; labels carry units. `reference` is a value to draw a thin line at."""

    panels: list[Panel]
    x: str
    y: str
    log_x: bool = False
    log_y: bool = False
    reference: float | None = None
