"""An .npy file that is made panel by panel, and taken up again by a later process.

Until it is whole it is NAME.unfinished, beside a journal of the panels that are finished. Both stay
however the process ends. A line of the journal lists the parts of a panel: where each lies, and its
SHA-256. There is one part, or one of each process that wrote some of it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from ..errors import HybridGemmError, UsageError, listed
from ..host.resources import cores
from ..planning.partition import Span, cut
from .file_bytes import read_part
from .journal import Journal
from .npy_files import NpyWriter
from .output_files import UNFINISHED, Path, check_output

JOURNAL = ".journal"
ALIGN = 256  # panels of 1024 or more begin on multiples of it, as the tiles of kernels do
MOST_PANELS = 10**6
HASH_BYTES = 4 << 20  # of a panel, made contiguous at once

Panel = tuple[Span, Span]  # rows and columns
Part = tuple[int, int, int, int, str]  # row, column, rows, columns, SHA-256


def names_beside(path: Path) -> list[str]:
    """The files that lie beside an unfinished matrix at `path`: its bytes and its journal."""
    kept = check_output(path) + UNFINISHED
    return [kept, kept + JOURNAL]


def panels_of(m: int, n: int, side: int) -> list[Panel]:
    """Rows and columns of the panels of an m x n matrix, which depend on nothing else. Raises
    `UsageError` for more than `MOST_PANELS`."""
    down, across = (-(-size // side) for size in (m, n))
    if down * across > MOST_PANELS:
        raise UsageError(
            f"{down * across} panels of {side} x {side} make {m} x {n}; at most {MOST_PANELS} "
            "work: give a larger --panel"
        )
    rows, cols = cut(m, down, ALIGN), cut(n, across, ALIGN)
    return [(r, c) for r in rows for c in cols]


class Unfinished:
    """The m x n matrix of a .npy file, with the panels that are finished already.

    `panels` are all of them, `finished` the numbers of those that need not be made; fill the
    others' parts of `array`, each followed by `finish`, then `commit`. With `shared`, `array` is
    empty, and processes fill their parts of `temporary` with `write_part`. `facts` are whatever
    decides the bits of the matrix: `UsageError` if panels were finished with others. `found` counts
    the panels that were finished at the start, `damaged` those whose bytes are other ones than the
    journal says.
    """

    def __init__(
        self, path: Path, shape: tuple[int, int], dtype: DTypeLike, side: int,
        facts: Callable[[], dict[str, Any]], *, inputs: Iterable[Path] = (), shared: bool = False,
    ) -> None:  # fmt: skip
        self.panels = panels_of(*shape, side)
        kept, journal = names_beside(path)
        if os.path.lexists(kept) and not os.path.lexists(journal):  # which is made first
            raise UsageError(f"{kept} is there without its journal; remove it to begin again")
        try:
            self.journal = Journal(journal)
        except OSError as error:
            raise UsageError(f"cannot write {journal}: {error.strerror}") from None
        new = not any("panel" in line for line in self.journal.done)
        self.temporary, self.finished = kept, set[int]()
        try:
            if new:  # nothing is finished, whatever it was begun with
                self._writing(self.journal.clear)
            now = json.loads(json.dumps(facts()))
            if not new:
                self._check_facts(self.journal.facts or {}, now)
            self._writer = NpyWriter(path, shape, dtype, inputs=inputs, shared=shared, kept=True)
            self.offset = self._writer.offset
            self.array, self.locked = self._writer.array, self.journal.locked
            if new:
                self._writing(lambda: self.journal.begin(now))
            self._writing(self.journal.add_process)
            self._take_up()
        except BaseException:
            if new:  # nothing is worth keeping
                with contextlib.suppress(OSError):
                    os.unlink(kept)
                with contextlib.suppress(OSError):
                    self.journal.remove()
            self.close()
            raise

    def _check_facts(self, then: dict[str, Any], now: dict[str, Any]) -> None:
        differing = [x for x in {**then, **now} if then.get(x) != now.get(x)]
        if not differing:
            return
        words = listed(f"{x} was {then.get(x)} and is {now.get(x)}" for x in differing[:3])
        more = f", and {len(differing) - 3} more differ" if len(differing) > 3 else ""
        journal = self.journal.path
        raise UsageError(
            f"{journal} is of another product: {words}{more}. Give what it was begun with, or "
            f"remove it and {journal.removesuffix(JOURNAL)} to begin again"
        )

    def _take_up(self) -> None:
        """Finds the panels whose bytes are those that the journal says."""
        said = {x["panel"]: x for x in self.journal.done if "panel" in x}
        known = [i for i in said if isinstance(i, int) and 0 <= i < len(self.panels)]
        with ThreadPoolExecutor(min(8, cores()), "checksum") as pool:
            right = pool.map(lambda i: self._is_right(said[i].get("parts", [])), known)
            self.finished = {i for i, is_right in zip(known, right, strict=True) if is_right}
        self.found, self.damaged = len(self.finished), len(known) - len(self.finished)
        self._how = {self._shape(i): said[i].get("how") for i in self.finished}

    def _is_right(self, parts: list[Part]) -> bool:
        """Whether the file has these parts, of which there is at least one."""
        return bool(parts) and all(self._digest_in_file(*x) == sha256 for *x, sha256 in parts)

    def _digest_in_file(self, row: int, col: int, rows: int, cols: int) -> str:
        found, dtype, columns = hashlib.sha256(), self.array.dtype, self.panels[-1][1].stop
        for i, height in _slabs(rows, cols, dtype.itemsize):
            slab = np.empty((height, cols), dtype)
            read_part(self.temporary, self.offset, columns, slab, row + i, col)
            found.update(_bytes(slab))
        return found.hexdigest()

    def _shape(self, panel: int) -> tuple[int, int]:
        rows, cols = self.panels[panel]
        return len(rows), len(cols)

    def finish(self, panel: int, how: str, parts: Iterable[Part] | None = None) -> None:
        """Returns when a panel that was filled is on the disk and in the journal. `how` says how it
        was made, as far as that decides its bits; `parts` are those that processes wrote and
        synced, where `array` is not what was filled.

        Raises `HybridGemmError` if panels of this shape were made in another way.
        """
        before = self._how.setdefault(self._shape(panel), how)
        if before != how:
            raise HybridGemmError(
                f"this panel of C was multiplied in another way ({how}) than the panels before "
                f"({before}), and has other bits; was more or less memory free? The finished "
                "panels are kept: run it again as it was begun"
            )
        if parts is None:
            rows, cols = self.panels[panel]
            parts = [part_of(self.array[rows.slice, cols.slice], rows.start, cols.start)]
            self._writing(self._writer.sync)
        self._writing(lambda: self.journal.add({"panel": panel, "parts": [*parts], "how": how}))
        self.finished.add(panel)

    def _writing(self, write: Callable[[], None]) -> None:
        try:
            write()
        except OSError as error:
            finished = self.finished or any("panel" in line for line in self.journal.done)
            kept = "; the panels that were finished are kept" if finished else ""
            raise HybridGemmError(
                f"could not write {self.temporary} and its journal: {error.strerror}{kept}"
            ) from None

    @property
    def open(self) -> bool:
        """Whether it was neither committed nor discarded, nor closed."""
        return self.journal.descriptor >= 0

    @property
    def is_there(self) -> bool:
        """Whether its files are where they were made; a run on another host, whose lock this one
        does not see, puts C in place and removes the journal."""
        return os.path.lexists(self.temporary) and os.path.lexists(self.journal.path)

    def commit(self) -> None:
        """Puts the whole file in its place, as `NpyWriter.commit`, and removes the journal."""
        assert len(self.finished) == len(self.panels)
        self._writer.commit()
        self.journal.remove()

    def discard(self) -> None:
        """Removes what was made: it is wrong, or nothing."""
        for path in self.temporary, self.journal.path:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
        self.close()

    def close(self) -> None:
        """Keeps what was made for a later process; does nothing after `commit`."""
        if hasattr(self, "_writer"):
            self._writer.abort()
        self.journal.close()


def part_of(array: np.ndarray, row: int, col: int) -> Part:
    """What a journal says of a part of a matrix whose first element is that of (`row`, `col`)."""
    found, (rows, cols) = hashlib.sha256(), array.shape
    for i, height in _slabs(rows, cols, array.itemsize):
        found.update(_bytes(array[i : i + height]))
    return row, col, rows, cols, found.hexdigest()


def _slabs(rows: int, cols: int, itemsize: int) -> Iterator[tuple[int, int]]:
    """First row and height of what is hashed at once."""
    step = max(1, HASH_BYTES // max(1, cols * itemsize))
    return ((i, min(step, rows - i)) for i in range(0, rows, step))


def _bytes(array: np.ndarray) -> memoryview:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
