"""A matrix in a file that all ranks write, panel by panel, and a later job takes up again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ..arrays import file_bytes
from ..arrays.unfinished import Unfinished, panels_of, part_of
from .launch import together


class UnfinishedOverRanks:
    """`arrays.unfinished.Unfinished`, whose file and journal rank 0 has; `make` makes it there.

    The methods that write are collective, and what fails on one rank raises on all of them. So
    ranks that go on agree on what is finished.
    """

    array = None  # each rank fills a strip of its own

    def __init__(self, comm: Any, shape: tuple[int, int], side: int, make: Callable) -> None:
        self.comm, self.columns = comm, shape[1]
        self.panels = together(comm, lambda: panels_of(*shape, side))
        first: Unfinished | None = together(comm, lambda: make() if comm.rank == 0 else None)
        self.first = first  # None on the other ranks
        self.temporary, self.offset, self.finished = comm.bcast(
            first and (first.temporary, first.offset, first.finished)
        )
        self.found = len(self.finished)

    def check_shared(self) -> None:
        """Raises `UsageError` where a rank does not see the file."""
        together(self.comm, lambda: file_bytes.check_shared(self.temporary))

    def finish(self, panel: int, how: str, strip: np.ndarray, row: int, col: int) -> None:
        """Returns when a panel is on the disk and in the journal. Each rank gives its strip of it,
        whose first element is that of (`row`, `col`) of the matrix."""
        comm = self.comm

        def write() -> tuple:
            file_bytes.write_part(self.temporary, self.offset, self.columns, strip, row, col)
            return part_of(strip, row, col)

        parts = comm.gather(together(comm, write))
        self._on_first(lambda first: first.finish(panel, how, [x for x in parts if x[2]]))
        self.finished.add(panel)

    def read(self, strip: np.ndarray, row: int, col: int) -> np.ndarray:
        """Fills a rank's strip from the file."""
        together(self.comm, lambda: file_bytes.read_part(
            self.temporary, self.offset, self.columns, strip, row, col
        ))  # fmt: skip
        return strip

    def commit(self) -> None:
        """Puts the whole file in its place, and removes the journal."""
        self._on_first(lambda first: first.commit())

    def _on_first(self, call: Callable[[Unfinished], None]) -> None:
        """Calls it on rank 0; what it raises there raises on all."""
        first = self.first
        together(self.comm, lambda: None if first is None else call(first))

    def discard(self) -> None:
        """Removes what was made."""
        if self.first:
            self.first.discard()
