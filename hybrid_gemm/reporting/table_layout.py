"""How a table fits a width: what goes above it, below it and into parts. Pure text.

Numbers and short words are never cut. Where the columns are too wide together, in this order until
they fit: notes go below the table and leave a number; columns that say the same in every row go
above it; long texts that repeat go below too; texts fold at spaces; and the table is cut into
parts, each of which begins with the columns that tell its rows apart.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

GAP = 2  # spaces between columns
SHORT = 14  # a text column is never narrower where its cells are as long
LONGEST_WORD = 24  # of a folded text; longer words are cut


@dataclass(frozen=True)
class Column:
    """A heading and its cells. `text` is left-aligned and may fold, numbers stay whole."""

    heading: str
    cells: tuple[str, ...]
    text: bool

    @cached_property
    def longest(self) -> int:
        """Characters of the longest cell."""
        return max(map(len, self.cells), default=0)

    @cached_property
    def natural(self) -> int:
        """The width at which nothing wraps."""
        return max(self.longest, len(self.heading))

    @cached_property
    def whole(self) -> int:
        """The width at which only the heading wraps."""
        return max(self.longest, _word(self.heading))

    @cached_property
    def least(self) -> int:
        """The width below which a number or a short word would be cut."""
        if not self.text:
            return self.whole
        folded = (min(len(x), max(SHORT, _word(x)), LONGEST_WORD) for x in self.cells)
        return max(_word(self.heading), max(folded, default=0))

    @cached_property
    def constant(self) -> bool:
        """Whether all of several rows say the same here."""
        return len(self.cells) > 1 and len(set(self.cells)) == 1

    @cached_property
    def repeats(self) -> bool:
        """Whether this is long text that several rows have in common."""
        distinct = len(set(filter(None, self.cells)))
        return self.text and self.longest > SHORT and 2 * distinct <= len(self.cells)


Part = tuple[tuple[Column, int], ...]  # columns with their widths


@dataclass(frozen=True)
class Layout:
    """A table for a width: a line `above` it (or ""), its `parts`, and lines `below` it."""

    above: str
    parts: tuple[Part, ...]
    below: tuple[str, ...]


def fit(columns: Sequence[Column], width: int) -> Layout:
    """The layout of these columns (at least one) in so many characters."""
    kept = list(columns)
    above: list[str] = []
    below: list[str] = []

    def fits() -> bool:
        return _total(kept, lambda c: c.whole) <= width

    for column in [c for c in kept if c.heading == "note"]:
        if not fits():
            kept[kept.index(column)] = _numbered(column, below)
    for column in [c for c in kept if c.constant]:
        if not fits() and len(kept) > 1:
            kept.remove(column)
            above.append(f"{column.heading} = {column.cells[0]}")
    for column in sorted((c for c in kept if c.repeats), key=lambda c: -c.longest):
        if not fits():
            kept[kept.index(column)] = _numbered(column, below)
    parts = tuple(tuple(zip(part, _widths(part, width), strict=True)) for part in _cut(kept, width))
    return Layout(f"in every row: {'; '.join(above)}" if above else "", parts, tuple(below))


def _numbered(column: Column, below: list[str]) -> Column:
    """The column with a number for each text, which goes below once."""
    marks = {"": ""}
    for cell in column.cells:
        if cell not in marks:
            marks[cell] = f"[{len(below) + 1}]"
            below.append(f"{marks[cell]} {cell}")
    return dataclasses.replace(column, cells=tuple(marks[cell] for cell in column.cells))


def _cut(columns: list[Column], width: int) -> list[list[Column]]:
    """The columns in as many parts as a width needs."""
    if _total(columns, lambda c: c.least) <= width:
        return [columns]
    keys = _keys(columns, width)
    parts = [list(columns[:keys])]
    for column in columns[keys:]:
        if len(parts[-1]) > keys and _total([*parts[-1], column], lambda c: c.least) > width:
            parts.append(list(columns[:keys]))
        parts[-1].append(column)
    return parts


def _keys(columns: Sequence[Column], width: int) -> int:
    """How many columns at the left tell the rows apart, if they leave a third of the width."""
    for count in range(1, len(columns)):
        rows = list(zip(*(c.cells for c in columns[:count]), strict=True))
        if 3 * _total(columns[:count], lambda c: c.least) > 2 * width:
            return max(1, count - 1)
        if len(set(rows)) == len(rows):
            return count
    return 1


def _widths(columns: Sequence[Column], width: int) -> list[int]:
    """Each column's width: headings wrap before texts fold, the widest first."""
    found = [c.natural for c in columns]
    for least in ([c.whole for c in columns], [c.least for c in columns]):
        while sum(found) + GAP * (len(found) - 1) > width:
            spare = [i for i, column in enumerate(found) if column > least[i]]
            if not spare:
                break
            found[max(spare, key=found.__getitem__)] -= 1
    return found


def _total(columns: Sequence[Column], of: Callable[[Column], int]) -> int:
    return sum(map(of, columns)) + GAP * (len(columns) - 1)


def _word(text: str) -> int:
    """Characters of the longest word."""
    return max(map(len, text.split()), default=0)
