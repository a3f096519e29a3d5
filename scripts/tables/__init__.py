"""Tables of README and docs, each made from result files by a function of its own."""

import json
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent


def result(name: str) -> dict:
    """A result file of docs/results, by its name without `_h200.json`."""
    return json.loads((ROOT / f"docs/results/{name}_h200.json").read_text())
