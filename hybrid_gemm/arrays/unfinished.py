"""An .npy file that is made panel by panel, and taken up again by a later process.

Until it is whole it is NAME.unfinished, beside a journal of the panels that are finished. Both stay
however the process ends.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from ..errors import HybridGemmError, UsageError
from ..host.resources import cores
from ..planning.partition import Span, cut
from .journal import Journal
from .npy_files import NpyWriter, Path, check_output
from .output_files import UNFINISHED

JOURNAL = ".journal"
SIDE = 8192  # rows and columns of a panel, at most, where the caller gives no other number
ALIGN = 256  # panels begin where the tiles of kernels do
HASH_BYTES = 4 << 20  # of a panel, made contiguous at once


def names_beside(path: Path) -> list[str]:
    """The files that lie beside an unfinished matrix at `path`: its bytes and its journal."""
    kept = check_output(path) + UNFINISHED
    return [kept, kept + JOURNAL]


def panels_of(m: int, n: int, side: int) -> list[tuple[Span, Span]]:
    """Rows and columns of the panels of an m x n matrix, which depend on nothing else."""
    rows, cols = (cut(size, -(-size // side), ALIGN) for size in (m, n))
    return [(r, c) for r in rows for c in cols]


class Unfinished:
    """The m x n matrix of a .npy file, with the panels that are finished already.

    `panels` are all of them, `finished` the numbers of those that need not be made; fill the
    others' parts of `array`, each followed by `finish`, then `commit`. `facts` are whatever decides
    the bits of the matrix: `UsageError` if the journal was begun with others. `found` counts the
    panels that were finished at the start, `damaged` those whose bytes are other ones than the
    journal says.
    """

    def __init__(
        self, path: Path, shape: tuple[int, int], dtype: DTypeLike, side: int,
        facts: Callable[[], dict[str, Any]], *, inputs: Iterable[Path] = (),
    ) -> None:  # fmt: skip
        self.panels = panels_of(*shape, side)
        kept, journal = names_beside(path)
        if os.path.lexists(kept) and not os.path.lexists(journal):  # which is made first
            raise UsageError(f"{kept} is there without its journal; remove it to begin again")
        try:
            self.journal = Journal(journal)
        except OSError as error:
            raise UsageError(f"cannot write {journal}: {error.strerror}") from None
        new = self.journal.facts is None
        try:
            now = json.loads(json.dumps(facts()))
            if not new:
                self._check_facts(self.journal.facts or {}, now)
            self._writer = NpyWriter(path, shape, dtype, inputs=inputs, kept=True)
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
        *most, last = [f"{x} was {then.get(x)} and is {now.get(x)}" for x in differing[:3]]
        words = f"{', '.join(most)} and {last}" if most else last
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
            right = pool.map(lambda i: self._digest(i) == said[i].get("sha256"), known)
            self.finished = {i for i, is_right in zip(known, right, strict=True) if is_right}
        self.found, self.damaged = len(self.finished), len(known) - len(self.finished)
        self._how = {self._shape(i): said[i].get("how") for i in self.finished}

    def _shape(self, panel: int) -> tuple[int, int]:
        rows, cols = self.panels[panel]
        return len(rows), len(cols)

    def _digest(self, panel: int) -> str:
        rows, cols = self.panels[panel]
        return digest(self.array[rows.slice, cols.slice])

    def finish(self, panel: int, how: str) -> None:
        """Returns when a panel that was filled is on the disk and in the journal. `how` says how it
        was made, as far as that decides its bits.

        Raises `HybridGemmError` if panels of this shape were made in another way.
        """
        before = self._how.setdefault(self._shape(panel), how)
        if before != how:
            raise HybridGemmError(
                f"this panel of C was multiplied in another way ({how}) than the panels before "
                f"({before}), and has other bits; was other memory free? The finished panels are "
                "kept: run it again as it was begun"
            )
        entry = {"panel": panel, "sha256": self._digest(panel), "how": how}
        self._writing(self._writer.sync)
        self._writing(lambda: self.journal.add(entry))
        self.finished.add(panel)

    def _writing(self, write: Callable[[], None]) -> None:
        try:
            write()
        except OSError as error:
            raise HybridGemmError(
                f"could not write {self._writer.temporary} and its journal: {error.strerror}; "
                "the panels that were finished are kept"
            ) from None

    def commit(self) -> None:
        """Puts the whole file in its place, as `NpyWriter.commit`, and removes the journal."""
        assert len(self.finished) == len(self.panels)
        self._writer.commit()
        self.journal.remove()

    def discard(self) -> None:
        """Removes what was made: it is wrong, or nothing."""
        os.unlink(self._writer.temporary)
        self.journal.remove()
        self.close()

    def close(self) -> None:
        """Keeps what was made for a later process; does nothing after `commit`."""
        if hasattr(self, "_writer"):
            self._writer.abort()
        self.journal.close()


def digest(part: np.ndarray) -> str:
    """The SHA-256 of a part of a matrix, row by row."""
    found = hashlib.sha256()
    step = max(1, HASH_BYTES // max(1, part.shape[1] * part.itemsize))
    for i in range(0, part.shape[0], step):
        found.update(np.ascontiguousarray(part[i : i + step]).reshape(-1).view(np.uint8).data)
    return found.hexdigest()
