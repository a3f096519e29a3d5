"""Long sequences of which most items differ only in where they begin. Pure.

A plan in turns has millions of boxes, blocks and panels of C, and few kinds of them, since a span
is cut into parts of two lengths. What they cost follows from one of each kind and their number;
the items themselves are made for those who multiply them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from ..host.kept import cached_property
from .partition import Box, Span

T = TypeVar("T")


def kinds(items: Sequence[T]) -> Sequence[tuple[T, int]]:
    """The first item of each kind, in their order, with how many there are; where kinds are not
    known, each item."""
    found: Sequence[tuple[T, int]] | None = getattr(items, "kinds", None)
    return [(item, 1) for item in items] if found is None else found


class Repeated(Sequence[T]):
    """Items that are all made when one is asked for. `make(True)` gives the first of each kind with
    how many there are, `make(False)` each item with 1."""

    def __init__(self, make: Callable[[bool], Iterable[tuple[T, int]]]) -> None:
        self._make = make

    @cached_property
    def kinds(self) -> tuple[tuple[T, int], ...]:
        """As the function `kinds`."""
        return tuple(self._make(True))

    @cached_property
    def _items(self) -> tuple[T, ...]:
        all_differ = all(times == 1 for _, times in self.kinds)
        return tuple(item for item, _ in (self.kinds if all_differ else self._make(False)))

    def __len__(self) -> int:
        return sum(times for _, times in self.kinds)

    def __getitem__(self, index: Any) -> Any:
        return self._items[index]

    def __iter__(self) -> Iterator[T]:
        return iter(self._items)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and self._items == tuple(other)

    def __hash__(self) -> int:
        return hash(self._items)


class Spans(tuple[Span, ...]):
    """The spans that a side is cut into, of few lengths."""

    @cached_property
    def firsts(self) -> list[tuple[int, Span, int]]:
        """The first span of each length, with its number, and how many there are."""
        found: dict[int, tuple[int, Span, int]] = {}
        for i, span in enumerate(self):
            first, kept, times = found.get(len(span), (i, span, 0))
            found[len(span)] = first, kept, times + 1
        return [*found.values()]


@dataclass(frozen=True)
class Boxes(Sequence[Box]):
    """All boxes of some rows, columns and parts of K, along K first and then along the columns."""

    rows: Spans
    cols: Spans
    ks: Spans

    def numbered(self, firsts: bool) -> Iterator[tuple[int, Box, int]]:
        """Each box with its number and 1; or the `firsts` of each kind, with how many there are."""
        cuts = [x.firsts if firsts else [(i, span, 1) for i, span in enumerate(x)]
                for x in (self.rows, self.cols, self.ks)]  # fmt: skip
        for (i, rows, x), (j, cols, y), (q, ks, z) in itertools.product(*cuts):
            number = (i * len(self.cols) + j) * len(self.ks) + q
            yield number, Box(rows, cols, ks), x * y * z

    @cached_property
    def kinds(self) -> tuple[tuple[Box, int], ...]:
        """As the function `kinds`."""
        return tuple((box, times) for _, box, times in self.numbered(firsts=True))

    def __len__(self) -> int:
        return len(self.rows) * len(self.cols) * len(self.ks)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return tuple(self)[index]
        tile, q = divmod(range(len(self))[index], len(self.ks))
        i, j = divmod(tile, len(self.cols))
        return Box(self.rows[i], self.cols[j], self.ks[q])

    def __iter__(self) -> Iterator[Box]:
        return itertools.starmap(Box, itertools.product(self.rows, self.cols, self.ks))
