"""Pictures of benchmark results: which a result has is seen from the keys of its rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..reporting.pictures import Line, Panel, Picture, machine, machines

Row = Mapping[str, Any]
WAYS = {"ours": "hybrid-gemm", "cublasxt": "cuBLASXt, best settings", "cupy": "CuPy",
        "torch": "PyTorch", "numpy": "NumPy"}  # fmt: skip
MEMORIES = {"pageable": "pageable arrays", "pinned": "page-locked arrays"}


def pictures(data: Mapping[str, Any]) -> dict[str, Picture]:
    """The pictures of a study's result (as `study.run` returns it, or from a file), by name.

    Empty for data of another kind.
    """
    first = data["rows"][0] if data.get("rows") else {}
    if first.keys() >= {"way", "memory"}:
        return {"libraries": _libraries(data), **_library_times(data)}
    if "frobenius" in first:
        return _accuracy(data)
    if "study" in first:
        return _scaling(data)
    if "gflops" in first:
        return {"bench": _kernels(data)}
    return {}


def _accuracy(data: Mapping[str, Any]) -> dict[str, Picture]:
    """Frobenius errors over K: three kinds of data a picture, a line for each way."""
    kinds = list(dict.fromkeys(r["data"] for r in data["rows"]))
    names = list(dict.fromkeys(r["way"] for r in data["rows"]))
    groups = [kinds[i : i + 3] for i in range(0, len(kinds), 3)]
    found = {}
    for group in groups:
        panels = []
        for kind in group:
            lines = []
            for style, name in enumerate(names):
                rows = [r for r in data["rows"] if (r["data"], r["way"]) == (kind, name)]
                errors = {r["k"]: r["frobenius"] for r in rows if r["frobenius"]}
                lines.append(Line(name, sorted(errors), [errors[k] for k in sorted(errors)],
                                  style=style))  # fmt: skip
            panels.append(Panel(lines, kind))
        name = "accuracy" if len(groups) == 1 else "accuracy-" + "-".join(group)
        title = f"relative error (Frobenius), {machine(data['device']['name'])}"
        found[name] = Picture(panels, "k", title, log_x=True, log_y=True)
    return found


def _libraries(data: Mapping[str, Any]) -> Picture:
    """Times of the other libraries over ours: a panel for each kind of memory."""
    panels = []
    for memory in dict.fromkeys(r["memory"] for r in data["rows"]):
        rows = [r for r in data["rows"] if r["memory"] == memory]
        sizes = list(dict.fromkeys(_shape(r) for r in rows))
        ways = dict.fromkeys((r["way"], r["c"]) for r in rows if r["way"] != "ours")
        lines = []
        for style, (way, c) in enumerate(ways):
            mine = [r for r in rows if (r["way"], r["c"]) == (way, c)]
            label = f"{way} ({mine[0]['gpus']} GPU)" if mine[0]["gpus"] else way
            label += ", fresh C" if c == "fresh" and (way, "given") in ways else ""
            lines.append(Line(label, sizes, [r["ratio_to_ours"] for r in mine], style=style))
        panels.append(Panel(lines, f"{memory} memory", bars=True))
    where = machine(data["device"]["name"])
    return Picture(panels, "", f"times as long as hybrid-gemm ({where})")


def _library_times(data: Mapping[str, Any]) -> dict[str, Picture]:
    """Times of each way at the largest product, in a given C where it takes one: a panel for each
    kind of memory, ours solid and theirs hatched."""
    where = machine(data["device"]["name"])
    gpus = max(r["gpus"] or 0 for r in data["rows"])
    on = machines(gpus, where) if gpus else where
    shape = _shape(max(data["rows"], key=lambda r: r["m"] * r["n"] * r["k"]))
    cube = f"m = n = k = {shape}" if shape.isdigit() else shape
    panels = []
    for memory in dict.fromkeys(r["memory"] for r in data["rows"]):
        rows = [r for r in data["rows"] if (r["memory"], _shape(r)) == (memory, shape)]
        given = {r["way"] for r in rows if r["c"] == "given"}
        times = {r["way"]: r["time_ms"] for r in rows if r["c"] == "given" or r["way"] not in given}
        lines = []
        for theirs in (False, True):
            bars = [None if (way == "ours") == theirs else ms for way, ms in times.items()]
            names = [WAYS.get(way, way) for way in times]
            lines.append(Line("theirs" if theirs else "ours", names, bars, theirs))
        title = f"{MEMORIES.get(memory, memory)}, {on}\n{cube}"
        panels.append(Panel(lines, title, bars=True))
    return {"times": Picture(panels, "", "time (ms)")}


def _shape(row: Row) -> str:
    """A row's sizes: one number for a cube."""
    sides = dict.fromkeys((row["m"], row["n"], row["k"]))
    return str(row["m"]) if len(sides) == 1 else f"{row['m']} x {row['n']} x {row['k']}"


def _kernels(data: Mapping[str, Any]) -> Picture:
    """A panel for each K of several sizes, and one for squares; a line for each variant."""
    rows = [r for r in data["rows"] if r["gflops"]]
    square = [r for r in rows if r["m"] == r["n"] == r["k"]]
    found = {f"K = {k}": [r for r in rows if r["k"] == k] for k in sorted({r["k"] for r in rows})}
    found["m = n = k"] = square
    found = {x: part for x, part in found.items() if len({r["m"] for r in part}) > 1}
    found = dict(sorted(found.items(), key=lambda item: -len(item[1]))[:3]) or {"": rows}
    names = list(dict.fromkeys(_name(r, rows) for r in rows))
    panels = []
    for title, part in found.items():
        lines = []
        for style, name in enumerate(names):
            rates = {r["m"]: r["gflops"] / 1e3 for r in part if _name(r, rows) == name}
            if rates:
                lines.append(Line(name, sorted(rates), [rates[m] for m in sorted(rates)],
                                  style=style))  # fmt: skip
        panels.append(Panel(lines, title))
    x = "m = n" if all(r["m"] == r["n"] for r in rows) else "m"
    return Picture(panels, x, f"TFLOP/s ({machine(data['device']['name'])})", log_x=True)


def _name(row: Row, rows: Sequence[Row]) -> str:
    """What tells a row's variant from the others: its kernel, and what else differs."""
    alike = [r for r in rows if r["kernel"] == row["kernel"]]
    several = {x for x in ("params", "dtype", "layout") if len({str(r.get(x)) for r in alike}) > 1}
    words = [row["kernel"]]
    if "params" in several:
        words += [f"{k}={v}" for k, v in row["params"].items()]
    return " ".join(words + [row[x] for x in ("dtype", "layout") if x in several])


# --- scaling ------------------------------------------------------------------------------


def _scaling(data: Mapping[str, Any]) -> dict[str, Picture]:
    """Of ranks (`scripts/scaling`) and of GPUs (`scripts/measure-gpus`); empty for studies of
    others."""
    gpus = data.get("environment", {}).get("cuda", {}).get("gpus", [])
    where = machine(f"cuda {gpus[0]['name']}") if gpus else "cpu"
    found = {}
    if over_ranks := [r for r in data["rows"] if r["study"] in ("strong", "weak")]:
        found["ranks"] = _over_ranks(over_ranks, where)
    if over_gpus := [r for r in data["rows"] if r["study"] == "resident"]:
        found["gpus"] = _over_gpus(over_gpus, where)
    return found


def _over_ranks(rows: Sequence[Row], where: str) -> Picture:
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


def _over_gpus(rows: Sequence[Row], where: str) -> Picture:
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
