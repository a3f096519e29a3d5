"""Tables of README and docs, each made from result files by a function of its own."""

import gzip
import json
import re
from collections.abc import Sequence
from pathlib import Path

from hybrid_gemm import __version__
from hybrid_gemm.reporting import markdown

ROOT = Path(__file__).resolve().parent.parent.parent


def grid(columns: Sequence[str], rows) -> str:
    """A table; a column whose name begins with < is aligned to the left."""
    return markdown.table(columns, list(rows))


def paragraphs(*parts: str) -> str:
    """What there is of these, with an empty line between them."""
    return "\n\n".join(filter(None, parts))


def result(name: str, card: str = "h200") -> dict:
    """A result file of docs/results, by its name without `_h200.json`."""
    return json.loads((ROOT / f"docs/results/{name}_{card}.json").read_text())


def fitted_times() -> dict[str, dict]:
    """The times to which the H200's models are fitted, by mode: `variants`, and `rows` of m, n, k,
    layout, class and a time of each variant or None."""
    file = ROOT / "docs/results/fitted_times_h200.json.gz"
    return json.loads(gzip.decompress(file.read_bytes()))["modes"]


LATER = {"fp32x3": "named_fp32x3", "tf32": "named_tf32", "narrow": "named_narrow"}  # on the H200


def kernel_rows(name: str, card: str = "h200") -> list[dict]:
    """The rows of a result of `bench`; those of a later run at the same case stand for them."""
    names = [name, LATER[name]] if card == "h200" and name in LATER else [name]
    found = {}
    for row in (row for x in names for row in result(x, card)["rows"]):
        of_library = row["kernel"].startswith("cublas")
        found[*(row[x] for x in ("dtype", "layout", "m", "n", "k", "data")), of_library] = row
    return list(found.values())


def linked(text: str) -> list[str]:
    """The result files to which a table links."""
    return re.findall(r"\]\((?:\.\./|docs/)*([\w/]+\.json)\)", text)


def earlier(files: list[str]) -> str:
    """Which of these files were measured with an earlier version, if any."""
    versions: dict[str, list[str]] = {}
    for path in dict.fromkeys(files):
        file = ROOT / ("docs" if path.startswith("results/") else ".") / path
        whole = json.loads(file.read_text())
        environments = [
            part["environment"]
            for part in (whole, *whole.values())
            if isinstance(part, dict) and "environment" in part
        ]
        if "_before_" not in path and environments:
            versions.setdefault(environments[0]["hybrid_gemm"], []).append(file.stem)
    if len(versions) == 1 and __version__ not in versions:
        return f"Measured with hybrid-gemm {min(versions)}."
    return " ".join(
        f"Measured with hybrid-gemm {version}: {', '.join(f'`{name}`' for name in names)}."
        for version, names in sorted(versions.items())
        if version != __version__
    )


def asked(compute: str) -> str:
    """What was computed, beginning with what was asked for."""
    return compute.replace(
        "strict float64, expected to be faster here than fp64x",
        "fp64x (native float64, expected to be faster)",
    )


def samples(rows) -> str:
    """Of how many samples the times of rows are medians."""
    kinds = ("samples_ms", "totals_ms", "native_samples_ms")
    counts = {len(row[kind]) for row in rows for kind in kinds if kind in row}
    return " to ".join(map(str, sorted({min(counts), max(counts)})))
