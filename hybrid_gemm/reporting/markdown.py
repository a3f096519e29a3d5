"""Tables in Markdown, and as CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from typing import Any


def table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A table as `console.table` takes it (a leading `<` is text), with all its rows and columns
    but those that are empty throughout."""
    cells = [["" if cell is None else str(cell) for cell in row] for row in rows]
    kept = [i for i in range(len(columns)) if any(row[i] for row in cells)]

    def line(texts: Sequence[str]) -> str:
        return "| " + " | ".join(x.replace("|", "\\|") for x in texts) + " |"

    rule = "".join("---|" if columns[i].startswith("<") else "---:|" for i in kept)
    return "\n".join([
        line([columns[i].removeprefix("<") for i in kept]), f"|{rule}",
        *(line([row[i] for i in kept]) for row in cells),
    ])  # fmt: skip


def csv_of(columns: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> str:
    """These columns of rows, with a line of their names."""
    out = io.StringIO()
    writer = csv.DictWriter(out, columns, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()
