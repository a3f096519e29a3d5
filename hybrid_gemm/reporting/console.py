"""Tables on stdout, and results as JSON."""

from __future__ import annotations

import io
import json
import sys
import textwrap
from collections.abc import Sequence
from typing import Any

import numpy as np
from rich.console import Console

from ..arrays import output_files
from ..host import notes, terminal
from ..ranks import launch
from .table_layout import GAP, Column, Part, fit

# A file's name may have letters that the stream's encoding lacks.
if isinstance(sys.stdout, io.TextIOWrapper):
    sys.stdout.reconfigure(errors="backslashreplace")

# A pipe or a file gets whole lines; a terminal gets its own width, and lines that wrap at spaces.
# Ranks write no colours: what they write to is mpirun's, which may write to a file.
_alone = sys.stdout.isatty() and launch.launcher() is None
_width = terminal.width(sys.stdout)
console = Console(
    highlight=False, markup=False, soft_wrap=not _width, force_terminal=_alone,
    width=_width or 200,
)  # fmt: skip


def as_json(data: dict[str, Any]) -> str:
    """Strict JSON with an indent of 1: not-a-number and infinities become null."""
    return json.dumps(_finite(data), indent=1)


def write(path: str, text: str) -> None:
    """Writes a text file, whole or not at all. Raises `UsageError` where it cannot be, and
    `HybridGemmError` where the disk is full, say."""
    output_files.write_file(output_files.check_output(path), text.encode())


def _finite(x: object) -> object:
    if isinstance(x, dict):
        return {k: _finite(v) for k, v in x.items()}
    if isinstance(x, list | tuple):
        return [_finite(v) for v in x]
    return None if isinstance(x, float) and x - x != 0 else x


def table(columns: Sequence[str], rows: Sequence[Sequence[object]], title: str = "") -> None:
    """Prints a table on stdout; columns named with a leading `<` are text, others numbers.

    A cell is shown as `str` gives it, None as empty; columns that are empty throughout are left
    out. `table_layout` says what happens in a narrow terminal.
    """
    cells = [["" if cell is None else str(cell) for cell in row] for row in rows]
    found = [
        Column(heading.removeprefix("<"), tuple(row[i] for row in cells), heading.startswith("<"))
        for i, heading in enumerate(columns)
    ]
    if title:
        line(title, style="italic")
    if not (shown := [column for column in found if any(column.cells)]):
        return
    layout = fit(shown, console.width)
    if layout.above:
        line(layout.above, indent=2, first=0)
    for i, part in enumerate(layout.parts):
        if i:
            line("")
        _print_row([column.heading for column, _width in part], part, heading=True)
        for row in zip(*(column.cells for column, _width in part), strict=True):
            _print_row(row, part)
    for text in layout.below:
        line(text, indent=4, first=0)


def _print_row(texts: Sequence[str], part: Part, *, heading: bool = False) -> None:
    """Prints texts in the columns of a part, folded to their widths: wider than the terminal only
    where a single number is. Headings stand on their last line."""
    cells = [
        textwrap.wrap(notes.printable(text), width, break_on_hyphens=False)
        for text, (_column, width) in zip(texts, part, strict=True)
    ]
    height = max(1, *map(len, cells))
    for i in range(height):
        line = []
        for cell, (column, width) in zip(cells, part, strict=True):
            at = i - (height - len(cell)) if heading else i
            found = cell[at] if 0 <= at < len(cell) else ""
            line.append(found.ljust(width) if column.text else found.rjust(width))
        console.print(
            (" " * GAP).join(line).rstrip(), style="bold" if heading else None, soft_wrap=True
        )


def line(text: str, indent: int = 0, *, first: int | None = None, style: str | None = None) -> None:
    """Prints a line on stdout, indented. A terminal gets it wrapped at spaces; its first line is
    indented by `first` where that differs."""
    text = notes.printable(text)
    margins = " " * (indent if first is None else first), " " * indent
    if not console.soft_wrap:
        text = textwrap.fill(
            text, console.width, initial_indent=margins[0], subsequent_indent=margins[1],
            break_on_hyphens=False,
        )  # fmt: skip
    else:
        text = margins[0] + text
    console.print(text, style=style, soft_wrap=True)


def facts(*texts: str) -> None:
    """Prints facts beside each other; in a terminal each stays on one line where it fits."""
    rows: list[str] = []
    for text in texts:
        beside = f"{rows[-1]}   {text}" if rows else ""
        if rows and (console.soft_wrap or len(beside) <= console.width):
            rows[-1] = beside
        else:
            rows.append(text)
    for row in rows:
        line(row)


def milliseconds(value: float) -> str:
    """A time as a cell of a table: two decimals, and empty for 0."""
    return f"{value:.2f}" if value else ""


def print_matrix(name: str, matrix: np.ndarray) -> None:
    """Prints a small matrix of the host in full, with 4 digits."""
    console.print(f"{name} =")
    with np.printoptions(precision=4, suppress=True, linewidth=console.width, threshold=2**20):
        console.print(str(matrix))
