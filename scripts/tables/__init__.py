"""Tables of README and docs, each made from result files by a function of its own."""

import json
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent


def grid(columns: list[str], rows) -> list[str]:
    """A table's lines; a column whose name begins with < is aligned to the left."""
    names = [name.removeprefix("<") for name in columns]
    sides = ["---" if name.startswith("<") else "---:" for name in columns]
    lines = [f"| {' | '.join(map(str, row))} |" for row in rows]
    return [f"| {' | '.join(names)} |", f"|{'|'.join(sides)}|", *lines]


def result(name: str, card: str = "h200") -> dict:
    """A result file of docs/results, by its name without `_h200.json`."""
    return json.loads((ROOT / f"docs/results/{name}_{card}.json").read_text())
