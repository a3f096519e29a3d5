"""Pictures of scaling studies: of ranks (`scripts/scaling`), of GPUs (`scripts/measure-gpus`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..reporting.pictures import Line, Panel, Picture, machine, machines

Row = Mapping[str, Any]


def pictures(data: Mapping[str, Any]) -> dict[str, Picture]:
    """The pictures of a study's result file, by name; empty for studies that have none."""
    gpus = data.get("environment", {}).get("cuda", {}).get("gpus", [])
    where = machine(f"cuda {gpus[0]['name']}") if gpus else "cpu"
    found = {}
    if over_ranks := [r for r in data["rows"] if r["study"] in ("strong", "weak")]:
        found["ranks"] = _ranks(over_ranks, where)
    if over_gpus := [r for r in data["rows"] if r["study"] == "resident"]:
        found["gpus"] = _gpus(over_gpus, where)
    return found


def _ranks(rows: Sequence[Row], where: str) -> Picture:
    """The rate over the number of ranks, of one problem and of one that grows with them."""
    panels = []
    for study in ("strong", "weak"):
        mine = [row for row in rows if row["study"] == study]
        if not mine:
            continue
        ranks, side = [row["ranks"] for row in mine], mine[0]["m"]
        first = mine[0]["gflops"] / 1e3 / ranks[0]
        title = f"m = n = k = {side}" if study == "strong" else f"m = n = {side}, k = {side} a rank"
        panels.append(Panel([
            Line("measured", ranks, [row["gflops"] / 1e3 for row in mine], style=0),
            Line("ideal", ranks, [first * r for r in ranks], style=1, theirs=True),
        ], title))  # fmt: skip
    return Picture(
        panels, f"ranks ({where} each)", "TFLOP/s", log_x=True, log_y=True, ends=True
    )  # fmt: skip


def _gpus(rows: Sequence[Row], where: str) -> Picture:
    """The share of the ideal speed by the number of GPUs, a panel for each split."""
    counts = sorted({r["gpus"] for r in rows} - {1})
    panels = []
    for split in ("cols", "rows"):
        lines = []
        for style, n in enumerate(sorted({r["size"] for r in rows})):
            mine = [r for r in rows if r["size"] == n and (r["split"] == split or r["gpus"] == 1)]
            ms = {r["gpus"]: r["total_ms"] for r in mine}
            shares = [100 * ms[1] / ms[g] / g if g in ms else None for g in counts]
            names = [machines(g, where) for g in counts]
            lines.append(Line(f"m = n = k = {n}", names, shares, style=style))
        panels.append(Panel(lines, f"split by {split}", bars=True))
    return Picture(panels, "", "share of ideal speed (%)")
