"""Two results of `bench` or `run`, row by row: faster, slower, or within noise?

The noise of a median is its standard error, from the quartiles of the samples (of fewer than five,
half their range). A row has changed where its medians differ by more than three times the error of
their difference, and by more than a fraction that counts at all.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import UsageError, counted
from .study import FAILED, Row, Table, parameters, sizes, table_of

FASTER, SLOWER, WITHIN, ONE_SAMPLE = "faster", "slower", "within noise", "one sample"
GIVE = "give files of bench --json or run --json"
LEAST_CHANGE = 0.02  # of the time: less does not count
ERRORS = 3.0  # by which medians have to differ
QUARTILES_FROM = 5  # samples
# What tells a row from the others, as far as the result has it.
_KEYS = ("kernel", "way", "params", "settings", "memory", "c", "gpus", "m", "n", "k", "dtype",
         "out_dtype", "layout", "data", "l2", "split")  # fmt: skip


def rows_of(data: Mapping[str, Any], name: str) -> list[Row]:
    """The timed rows of a result of `bench` or `run`, with their samples. Raises `UsageError`
    where there are none; `name` is the file's."""
    rows = [_row_of_run(data)] if "totals_ms" in data and "problem" in data else data.get("rows")
    timed: list[Row] = []
    if isinstance(rows, list) and rows and "time_ms" in rows[0] and "m" in rows[0]:
        # An empty product takes no time.
        timed = [{"samples_ms": [r["time_ms"]], **r} for r in rows if r["time_ms"]]
    if not timed:
        raise UsageError(f"{name} has no times to compare; {GIVE}")
    return timed


def _row_of_run(data: Mapping[str, Any]) -> Row:
    verdict = data.get("verify")
    return {
        **{x: data["problem"][x] for x in ("m", "n", "k", "dtype", "out_dtype")},
        "kernel": data["kernel"], "params": data["params"], "split": data["plan"]["split"],
        "samples_ms": data["totals_ms"], "time_ms": statistics.median(data["totals_ms"]),
        "verdict": verdict and ("passed" if verdict["passed"] else "FAILED"),
    }  # fmt: skip


def compare(
    old: Mapping[str, Any], new: Mapping[str, Any], *, names: tuple[str, str],
    least: float = LEAST_CHANGE,
) -> dict[str, Any]:  # fmt: skip
    """What changed between two results, as plain data: a row for each that both have.

    `names` are the files'. Raises `UsageError` where there is nothing to compare.
    """
    before, after = _by_key(rows_of(old, names[0])), _by_key(rows_of(new, names[1]))
    both = [key for key in after if key in before]
    if not both:
        raise UsageError(
            f"{names[0]} and {names[1]} have no row in common; compare results of the same "
            "kernels and shapes"
        )
    rows = []
    for key in both:
        was, now = before[key], after[key]
        verdict = judge(was["samples_ms"], now["samples_ms"], least)
        rows.append({
            **{x: now[x] for x in _KEYS if x in now},
            "old_ms": was["time_ms"], "new_ms": now["time_ms"],
            "samples": len(now["samples_ms"]), "change": now["time_ms"] / was["time_ms"] - 1,
            "change_verdict": verdict, "verdict": now.get("verdict"),
        })  # fmt: skip
    ratios = [row["new_ms"] / row["old_ms"] for row in rows]
    return {
        "old": names[0], "new": names[1], "rows": rows,
        "only_old": len(before) - len(both), "only_new": len(after) - len(both),
        "devices": [_device(old), _device(new)],
        "mean_ratio": math.exp(statistics.fmean(map(math.log, ratios))),
        "counts": {x: sum(r["change_verdict"] == x for r in rows)
                   for x in (FASTER, SLOWER, WITHIN, ONE_SAMPLE)},
    }  # fmt: skip


def _key(row: Row) -> tuple:
    return tuple((x, str(row[x])) for x in _KEYS if row.get(x) is not None)


def _by_key(rows: Sequence[Row]) -> dict[tuple, Row]:
    """The rows by what they measure; samples of what was measured twice are put together."""
    found: dict[tuple, Row] = {}
    for row in rows:
        known = found.get(key := _key(row))
        samples = [*(known["samples_ms"] if known else []), *row["samples_ms"]]
        found[key] = row | {"samples_ms": samples, "time_ms": statistics.median(samples)}
        if known and known.get("verdict") == FAILED:
            found[key]["verdict"] = FAILED
    return found


def _device(data: Mapping[str, Any]) -> str:
    device = data.get("device") or {}
    return str(device.get("name") or device.get("kind") or "")


def judge(old: Sequence[float], new: Sequence[float], least: float = LEAST_CHANGE) -> str:
    """Whether samples in ms became faster, slower, or neither."""
    if min(len(old), len(new)) < 2:
        return ONE_SAMPLE
    was, now = statistics.median(old), statistics.median(new)
    if abs(now - was) <= max(least * was, ERRORS * math.hypot(_error(old), _error(new))):
        return WITHIN
    return SLOWER if now > was else FASTER


def _error(samples: Sequence[float]) -> float:
    """The standard error of a median in ms."""
    if len(samples) < QUARTILES_FROM:
        return (max(samples) - min(samples)) / 2
    low, _median, high = statistics.quantiles(samples, n=4)
    return 0.93 * (high - low) / math.sqrt(len(samples))


def table(data: Mapping[str, Any]) -> Table:
    """What `compare` found, as a table for people: a line a row."""

    def settings(row: Row) -> str | None:
        return parameters(row) if "params" in row else row.get("settings")

    return table_of(
        data["rows"], f"{data['old']} and {data['new']}",
        ("<kernel", lambda row: row.get("kernel") or row.get("way")), ("<parameters", settings),
        sizes(data["rows"]), ("<memory", "memory"), ("<C", "c"), ("<dtype", "dtype"),
        ("<layout", "layout"), ("<split", "split"), ("old ms", "old_ms", ".4g"),
        ("new ms", "new_ms", ".4g"), ("change %", lambda row: f"{100 * row['change']:+.1f}"),
        ("<verdict", "change_verdict"),
    )  # fmt: skip


def words(data: Mapping[str, Any]) -> str:
    """The verdict on all rows in a sentence."""
    counts = [f"{n} {what}" for what, n in data["counts"].items() if n]
    only = [
        f"; {counted(data[key], 'row')} only in {data[name]}"
        for key, name in (("only_old", "old"), ("only_new", "new"))
        if data[key]
    ]
    return (
        f"{', '.join(counts)}; the new times are {data['mean_ratio']:.3f} of the old ones in "
        f"geometric mean{''.join(only)}"
    )
