"""What an experiment is: a declaration that the engine runs. Pure.

Each file of `declared/` holds one `EXPERIMENT`. Its points say what varies and what is held,
its table what was published, its claims how our rows decide them.
"""

from __future__ import annotations

import csv
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

from ..reporting.pictures import Picture

SCALES = ("small", "full")
CONFIRMED, REFUTED, NOT_TESTABLE = "confirmed", "refuted", "not testable here"
Row = dict[str, Any]  # one line of a table, by column; None was not measured


class NotTestable(Exception):
    """The rows do not decide a claim; the message says what is missing."""


class Rows(list[Row]):
    """The rows of an experiment, and questions about them.

    rows.value("time_ms", kernel="naive", n=1024)
    """

    def where(self, **wanted: Any) -> Rows:
        """The rows that have these values in these columns."""
        return Rows(r for r in self if all(r.get(k) == v for k, v in wanted.items()))

    def value(self, figure: str, **wanted: Any) -> float:
        """The figure in column `figure` of the row that has these values.

        Raises `NotTestable` if there is no such row, or the figure was not measured.
        """
        found = self.where(**wanted)
        words = ", ".join(f"{k} {v}" for k, v in wanted.items())
        if not found:
            raise NotTestable(f"no row has {words} at this scale")
        value = found[0].get(figure)
        if value is None:
            why = found[0].get("note") or f"its {figure} was not measured"
            raise NotTestable(f"{words}: {why}" if words else why)
        return value

    def values(self, name: str, **wanted: Any) -> list[Any]:
        """The different values of a column, in order of appearance, without None."""
        return list(dict.fromkeys(r[name] for r in self.where(**wanted) if r.get(name) is not None))

    def measured(self, figure: str, **wanted: Any) -> Rows:
        """The rows that have this figure. Raises `NotTestable` if there is none."""
        found = Rows(r for r in self.where(**wanted) if r.get(figure) is not None)
        if not found:
            self.value(figure, **wanted)
        return found

    def line(self, x: str, y: str, **wanted: Any) -> tuple[list[Any], list[Any]]:
        """The points of a line for a plot, as two lists; rows without either are left out."""
        found = [r for r in self.where(**wanted) if None not in (r.get(x), r.get(y))]
        return [r[x] for r in found], [r[y] for r in found]

    def by(self, x: str, y: str, **wanted: Any) -> dict[Any, Any]:
        """The same as a dictionary."""
        return dict(zip(*self.line(x, y, **wanted), strict=True))


@dataclass(frozen=True)
class Verdict:
    """`status` is `CONFIRMED`, `REFUTED` or `NOT_TESTABLE`; `because` has the figures."""

    status: str
    because: str


def verdict(holds: bool, because: str) -> Verdict:
    """Confirmed if it holds, refuted otherwise; `because` has the figures that decide it."""
    return Verdict(CONFIRMED if holds else REFUTED, because)


@dataclass(frozen=True)
class Claim:
    """A published claim and how rows decide it.

    `decide(rows)` returns a `Verdict` or raises `NotTestable`. `devices` are those whose
    figures mean something for it: times of the emulator say nothing about a GPU. Of rows of
    other devices `elsewhere(rows)` says what a GPU would show.
    """

    text: str
    decide: Callable[[Rows], Verdict]
    devices: tuple[str, ...] = ("cuda",)
    elsewhere: Callable[[Rows], str] | None = None

    def judge(self, rows: Rows, device: str) -> Verdict:
        """The verdict on rows taken on this kind of device."""
        because = ""
        try:
            if device in self.devices:
                return self.decide(rows)
            here = " or ".join(self.devices)
            because = f"it is about {here}; these rows were measured on the {device}"
            if self.elsewhere:
                because += f". {self.elsewhere(rows)}"
        except NotTestable as missing:
            because = because or str(missing)
        return Verdict(NOT_TESTABLE, because)


ANYWHERE = ("cuda", "cpu", "emulator")


@dataclass(frozen=True)
class Point:
    """A row to be measured: its key columns (`row`), and the measurement with its arguments.

    `measure(lab, **given)` returns the row's other columns.
    """

    measure: Callable[..., Row]
    row: Mapping[str, Any]
    given: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Published:
    """A printed table: a CSV file of `published/`, where it was taken, which columns are keys.

    `figures` maps our column to theirs; `scale` turns their unit into ours, `names` their words
    into ours. `where` selects their rows; `held` is what they held and our rows must have too.
    """

    file: str
    device: str
    keys: tuple[str, ...]
    figures: Mapping[str, str]
    scale: float = 1.0
    names: Mapping[str, str] = field(default_factory=dict)
    where: Mapping[str, Any] = field(default_factory=dict)
    held: Mapping[str, Any] = field(default_factory=dict)

    def rows(self) -> list[Row]:
        """Their rows, with keys as in ours, and `published_FIGURE` for each figure."""
        out = []
        for row in read_published(self.file):
            if not self.where.items() <= row.items():
                continue
            found: Row = {key: self.names.get(row[key], row[key]) for key in self.keys}
            found |= self.held
            for ours, theirs in self.figures.items():
                value = row[theirs]
                found[f"published_{ours}"] = None if value is None else value * self.scale
            out.append(found)
        return out


@functools.cache
def read_published(file: str) -> tuple[Row, ...]:
    """A published table as rows; numbers are numbers, and cells that were unreadable None."""
    text = (resources.files(__package__) / "published" / file).read_text()
    rows = csv.DictReader(text.splitlines())
    return tuple({k: _number(v) for k, v in row.items()} for row in rows)


def _number(text: str) -> int | float | str | None:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text or None


# --- experiments --------------------------------------------------------------------------


@dataclass(frozen=True)
class Experiment:
    """A published table or claim, and how it is reproduced. Its file's name is its own.

    `points(scale, device)` are the rows to measure on a kind of device, at a scale of `SCALES`;
    `columns` are those to show, in order. `picture(rows, theirs, machine)` is what to draw of
    `beside`'s rows, which were taken on that machine, and of the published ones; None where the
    table says it all. A claim's `decide(rows)` sees the same rows. `cap_s` is the time in seconds
    that it may take: past it rows get one sample each, then none.
    """

    title: str
    source: str
    question: str
    points: Callable[[str, str], Iterable[Point]]
    columns: Sequence[str]
    claims: Sequence[Claim]
    picture: Callable[[Rows, Rows, str], Picture] | None
    exercise: str
    published: tuple[Published, ...] = ()
    cap_s: float = 30.0
    name: str = ""

    def beside(self, rows: Iterable[Mapping[str, Any]]) -> Rows:
        """These rows with `published_FIGURE` and `ratio_FIGURE` (ours / published) in each."""
        out = Rows(dict(row) for row in rows)
        for table in self.published:
            printed_rows = table.rows()
            for row in out:
                keys = {key: row.get(key) for key in (*table.keys, *table.held)}
                theirs = next((t for t in printed_rows if keys.items() <= t.items()), None)
                if theirs is None:
                    continue
                for figure in table.figures:
                    printed, ours = theirs[f"published_{figure}"], row.get(figure)
                    row[f"published_{figure}"] = printed
                    if printed and ours is not None:
                        row[f"ratio_{figure}"] = ours / printed
        return out

    def theirs(self) -> Rows:
        """All published rows, for pictures and for claims about them."""
        return Rows(row for table in self.published for row in table.rows())
