"""Cutting the m x n x k cuboid: spans, boxes and grids."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import UsageError
from ..problem import Problem


@dataclass(frozen=True)
class Span:
    """Indices start <= i < stop."""

    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    def __str__(self) -> str:
        return f"{self.start}:{self.stop}"

    @property
    def slice(self) -> slice:
        return slice(self.start, self.stop)

    def meets(self, other: Span) -> bool:
        return self.start < other.stop and other.start < self.stop

    def within(self, whole: Span) -> slice:
        """These indices counted from the start of `whole`."""
        return slice(self.start - whole.start, self.stop - whole.start)


@dataclass(frozen=True)
class Box:
    """Some rows of A, some columns of B, some of K."""

    rows: Span
    cols: Span
    ks: Span

    @property
    def flops(self) -> int:
        return 2 * len(self.rows) * len(self.cols) * len(self.ks)


def cut(size: int, parts: int, align: int = 1) -> list[Span]:
    """`size` in `parts` spans whose lengths differ by at most one unit of `align`.

    Falls back to single indices when a part would get fewer than four units.
    """
    if size < 4 * align * parts:
        align = 1
    units = -(-size // align)
    edges = [min(size, i * units // parts * align) for i in range(parts)] + [size]
    return [Span(a, b) for a, b in itertools.pairwise(edges)]


def cut_span(span: Span, parts: int, align: int = 1) -> list[Span]:
    """As `cut`, for the indices of a span."""
    return [
        Span(span.start + s.start, span.start + s.stop) for s in cut(len(span), parts, align)
    ]  # fmt: skip


def grids(workers: int) -> list[tuple[int, int, int]]:
    """All grids pm x pn x pk of so many workers; rows first, then cols."""
    sides = [d for d in range(1, workers + 1) if workers % d == 0]
    found = [(a, b, workers // a // b) for a in sides for b in sides if workers // a % b == 0]
    return sorted(found, key=lambda g: (g[0] != workers, g[2] != workers))


def _checked(grid: Sequence[int], workers: int, split: str) -> tuple[int, int, int]:
    grid = tuple(grid)
    if len(grid) != 3 or min(grid) < 1 or math.prod(grid) != workers:
        text = " x ".join(map(str, grid))
        raise UsageError(
            f"the grid {text} is not {workers} workers; it takes pm x pn x pk = workers"
        )
    if split != "auto":
        raise UsageError(f"a grid was given beside the split {split}; give one of them")
    return grid


def _sides(problem: Problem, grid) -> list[int]:
    sizes = problem.m, problem.n, problem.k
    return [-(-size // parts) for size, parts in zip(sizes, grid, strict=True)]


def strips_along_rows(rows: Span, cols: Span, parts: int) -> bool:
    return len(rows) >= parts or len(rows) >= len(cols)
