"""Tables of measured times by GPU model, as `hybrid-gemm tune --shapes` makes them. Pure.

A row is a dict: `m`, `n`, `k`, `dtype`, `layout`, `kernel`, `params` and `time_ms`. A shape that
the user's own table (in the cache) has comes from there, others from the table shipped here.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import catalog
from ..errors import UnavailableError, UsageError
from ..host import cache
from ..host.notes import note
from ..problem import INT_LIMIT

HERE = Path(__file__).resolve().parent / "tuned"
Row = dict[str, Any]
Case = tuple[Any, ...]  # m, n, k, dtype, layout


@dataclass(frozen=True)
class Machine:
    """What choosing needs to know of a GPU: `arch` is 90 for compute capability 9.0;
    `peak_tflops` (of one dtype), `shared_bytes`, the most that a block has, and `memory_gbps`, the
    most that its memory reaches, are None where they are not known."""

    model: str
    multiprocessors: int
    arch: int
    peak_tflops: float | None = None
    shared_bytes: int | None = None
    memory_gbps: float | None = None


def file_name(model: str) -> str:
    """A GPU model's table: `nvidia_h200.json`."""
    return re.sub(r"[^a-z0-9]+", "_", model.lower()).strip("_") + ".json"


def user_table(model: str) -> Path:
    """Where the user's own table for a GPU model is.

    Raises `UnavailableError` where there is no cache that outlives this process.
    """
    return cache.directory("tuned", lasting=True) / file_name(model)


def read_rows(path: Path) -> list[Row]:
    """The rows of a table; none where there is no file. Raises `UsageError` for another file."""
    if not path.is_file():
        return []
    try:
        rows: list[Row] = json.loads(path.read_text())["rows"]
        if all(map(_is_row, rows)):
            return rows
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        pass
    raise UsageError(f"{path} is no table of `hybrid-gemm tune`: remove it, or name another file")


def _is_row(row: Row) -> bool:
    m, n, k, dtype, layout = case(row)
    params, time_ms = row["params"], row["time_ms"]
    return (
        all(type(x) is int and 0 <= x <= INT_LIMIT for x in (m, n, k, *params.values()))
        and all(isinstance(x, str) for x in (dtype, layout, row["kernel"], *params))
        and cache.is_figure(time_ms)
    )


def _users_rows(model: str) -> list[Row]:
    """The rows of the user's own table; none, and a note, where it cannot be used."""
    try:
        return read_rows(user_table(model))
    except (UnavailableError, UsageError) as error:
        note(f"the user's table of measured times is left out: {error}")
        return []


def forget() -> None:
    """Has tables read again from now on, because one was written."""
    table.cache_clear()
    best_tflops.cache_clear()


@functools.cache
def table(machine: Machine) -> tuple[Row, ...]:
    """What was measured on such a GPU."""
    cases: dict[Case, list[Row]] = {}
    for rows in (read_rows(HERE / file_name(machine.model)), _users_rows(machine.model)):
        measured: dict[Case, list[Row]] = {}
        for row in rows:
            measured.setdefault(case(row), []).append(row)
        cases |= measured
    return tuple(row for rows in cases.values() for row in rows)


def case(row: Row) -> Case:
    """What rows that compete have in common."""
    return tuple(row[x] for x in ("m", "n", "k", "dtype", "layout"))


@functools.cache
def best_tflops(machine: Machine, dtype: str) -> float | None:
    """The highest rate (10^12 operations a second) measured on a GPU model; None if none was
    measured there in this dtype."""
    rates = [
        2 * row["m"] * row["n"] * row["k"] / row["time_ms"] / 1e9
        for row in table(machine)
        if row["dtype"] == dtype
    ]
    return max(rates, default=None)


def compact(rows: Sequence[Row]) -> list[Row]:
    """What a table keeps of the bench's rows: of each case the fastest library, and our fastest
    kernel."""
    kept = ("m", "n", "k", "dtype", "layout", "kernel", "params", "time_ms")
    best: dict[tuple[Any, ...], Row] = {}
    for row in rows:
        side = (*case(row), bool(catalog.get(row["kernel"]).library))
        if row["time_ms"] and (side not in best or row["time_ms"] < best[side]["time_ms"]):
            best[side] = {x: row[x] for x in kept}
    return list(best.values())


def as_text(table: dict[str, Any]) -> str:
    """A table as JSON, one row a line."""
    head = "".join(f"{json.dumps(k)}: {json.dumps(v)},\n" for k, v in table.items() if k != "rows")
    rows = ",\n".join(map(json.dumps, table["rows"]))
    return f'{{\n{head}"rows": [\n{rows}\n]}}\n'
