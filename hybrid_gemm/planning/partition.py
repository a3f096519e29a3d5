"""Cutting the m x n x k cuboid: spans, boxes and grids, for workers and for ranks. Pure."""

from __future__ import annotations

import builtins
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import UsageError
from ..problem import Problem

Shape = tuple[int, int, int]  # pm, pn, pk: into how many parts a grid cuts m, n and k


@dataclass(frozen=True, slots=True)
class Span:
    """Indices start <= i < stop."""

    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    def __str__(self) -> str:
        return f"{self.start}:{self.stop}"

    @property
    def slice(self) -> builtins.slice:
        """For indexing an array."""
        return slice(self.start, self.stop)

    def by(self, other: Span) -> int:
        """The elements of these rows and the other's columns: quicker than by `len`, of which plans
        in many turns need millions."""
        return (self.stop - self.start) * (other.stop - other.start)

    def __add__(self, offset: int) -> Span:
        return Span(self.start + offset, self.stop + offset)

    def meets(self, other: Span) -> bool:
        """Whether they have an index in common."""
        return self.start < other.stop and other.start < self.stop

    def within(self, whole: Span) -> builtins.slice:
        """These indices counted from the start of `whole`."""
        return slice(self.start - whole.start, self.stop - whole.start)


@dataclass(frozen=True, slots=True)
class Box:
    """Some rows of A, some columns of B, some of K."""

    rows: Span
    cols: Span
    ks: Span

    @property
    def flops(self) -> int:
        """Operations: two a multiply-add."""
        return 2 * len(self.rows) * len(self.cols) * len(self.ks)


def cut(size: int, parts: int, align: int = 1) -> list[Span]:
    """As `cut_span`, for `size` indices from 0 on."""
    return cut_span(Span(0, size), parts, align)


def cut_span(span: Span, parts: int, align: int = 1) -> list[Span]:
    """A span in `parts` spans whose lengths differ by at most one unit of `align`, on whose
    multiples after its start they begin.

    Falls back to single indices when a part would get fewer than four units.
    """
    return [span] if parts == 1 else cut_in(span, (1,) * parts, align)  # most often one


def cut_in(span: Span, shares: Sequence[int], align: int = 1) -> list[Span]:
    """As `cut_span`, into parts whose lengths are as these numbers; none where there are none."""
    size, parts = len(span), sum(shares)
    if not parts:
        return []
    if size < 4 * align * parts:
        align = 1
    units = -(-size // align)
    before = itertools.accumulate(shares[:-1], initial=0)
    edges = [span.start + min(size, i * units // parts * align) for i in before] + [span.stop]
    return [Span(a, b) for a, b in itertools.pairwise(edges)]


def grids(workers: int) -> list[Shape]:
    """All grids pm x pn x pk of so many workers."""
    sides = [d for d in range(1, workers + 1) if workers % d == 0]
    return [(a, b, workers // a // b) for a in sides for b in sides if workers // a % b == 0]


def candidates(
    counts: Sequence[int], split: str, grid: Sequence[int] | None, who: str = "workers"
) -> list[Shape]:
    """The grids that a plan may have: the one given, that of a split, or all of so many workers
    (`who` is what messages call them: workers or ranks), where `counts` has the largest first.

    `rows` is the grid (workers, 1, 1), `cols` (1, 1, workers). Raises `UsageError` for a grid of
    another count; all else `Options` has checked.
    """
    most = counts[0]
    named = {"rows": (most, 1, 1), "cols": (1, 1, most)}
    if grid is not None:
        if math.prod(grid) != most:
            text = " x ".join(map(str, grid))
            raise UsageError(f"the grid {text} is not {most} {who}; it takes pm x pn x pk = {who}")
        pm, pn, pk = grid
        return [(pm, pn, pk)]
    if split != "auto":
        return [named[split]]
    return [shape for count in counts for shape in grids(count)]


def sides(problem: Problem, shape: Shape) -> tuple[int, int, int]:
    """m, n and k of a worker's share on a grid, rounded up."""
    m, n, k = (
        -(-size // parts)
        for size, parts in zip((problem.m, problem.n, problem.k), shape, strict=True)
    )
    return m, n, k


@dataclass(frozen=True)
class Grid:
    """The cuboid cut into pm x pn x pk boxes: `rows`, `cols` and `ks` are the spans of m, n and k.
    Workers are numbered along k first, then along n."""

    rows: tuple[Span, ...]
    cols: tuple[Span, ...]
    ks: tuple[Span, ...]

    @classmethod
    def even(cls, problem: Problem, shape: Shape, align: int = 1) -> Grid:
        """Cut into parts as equal as multiples of `align` elements allow."""
        sizes = problem.m, problem.n, problem.k
        return cls(*(tuple(cut(x, parts, align)) for x, parts in zip(sizes, shape, strict=True)))

    @property
    def shape(self) -> Shape:
        """pm, pn, pk."""
        return len(self.rows), len(self.cols), len(self.ks)

    @property
    def split(self) -> str:
        """What users call it: rows, cols, or grid for any other."""
        return split_of(self.shape)


def split_of(shape: Shape) -> str:
    """What users call a grid: rows (as of one worker), cols, or grid for any other."""
    workers = math.prod(shape)
    if shape[0] == workers:
        return "rows"
    return "cols" if shape[2] == workers else "grid"


def strips_along_rows(rows: Span, cols: Span, parts: int) -> bool:
    """Whether a block of C is cut into `parts` strips along its rows; along its columns
    otherwise."""
    return len(rows) >= parts or len(rows) >= len(cols)
