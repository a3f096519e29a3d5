"""Tables on stdout, and results as JSON."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from ..arrays import npy_files, output_files
from ..ranks import launch

# A file's name may have letters that the stream's encoding lacks.
if isinstance(sys.stdout, io.TextIOWrapper):
    sys.stdout.reconfigure(errors="backslashreplace")

# A pipe or a file gets whole lines; a terminal gets its own width. mpirun gives rank 0 a
# terminal of 80 columns even where its own output goes to a file.
_terminal = sys.stdout.isatty() and launch.launcher() is None
console = Console(
    highlight=False, markup=False, soft_wrap=True, force_terminal=_terminal,
    width=None if _terminal else 200,
)  # fmt: skip


def as_json(data: dict[str, Any]) -> str:
    """Strict JSON with an indent of 1: not-a-number and infinities become null."""
    return json.dumps(_finite(data), indent=1)


def write(path: str, text: str) -> None:
    """Writes a text file, whole or not at all. Raises `UsageError` where it cannot be."""
    output_files.write_file(npy_files.check_output(path), text.encode())


def _finite(x: object) -> object:
    if isinstance(x, dict):
        return {k: _finite(v) for k, v in x.items()}
    if isinstance(x, list | tuple):
        return [_finite(v) for v in x]
    return None if isinstance(x, float) and x - x != 0 else x


def table(columns: Sequence[str], rows: Sequence[Sequence[object]], title: str = "") -> None:
    """Prints a table on stdout; columns named with a leading `<` are text, others numbers.

    A cell is shown as `str` gives it, None as empty; columns that are empty throughout are left
    out. In a narrow terminal headers wrap and text folds; numbers stay whole.
    """
    cells = [["" if cell is None else str(cell) for cell in row] for row in rows]
    kept = [i for i in range(len(columns)) if any(row[i] for row in cells)]
    out = Table(title=title or None, title_justify="left", box=None, pad_edge=False)
    for i in kept:
        text = columns[i].startswith("<")
        out.add_column(
            columns[i].removeprefix("<"), justify="left" if text else "right", overflow="fold",
            min_width=None if text else max(len(row[i]) for row in cells),
        )  # fmt: skip
    for row in cells:
        out.add_row(*(row[i] for i in kept))
    least = console.measure(out).minimum
    console.print(out, width=max(console.width, least), crop=False, no_wrap=True)


def milliseconds(value: float) -> str:
    """A time as a cell of a table: two decimals, and empty for 0."""
    return f"{value:.2f}" if value else ""


_ms = milliseconds  # as the reports of threads and ranks call it


def print_matrix(name: str, matrix: np.ndarray) -> None:
    """Prints a small matrix of the host in full, with 4 digits."""
    console.print(f"{name} =")
    with np.printoptions(precision=4, suppress=True, linewidth=console.width, threshold=2**20):
        console.print(str(matrix))
