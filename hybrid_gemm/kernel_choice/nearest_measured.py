"""Which kernel for which shape on a GPU: the one that was fastest at the nearest shape that was
measured (`tables`), or by a model of times where nothing was. Pure.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from ..catalog import Variant
from ..problem import Problem
from . import tables
from .tables import Machine, Row
from .time_model import _tile, candidates, listed, predict_us, runs

CLEAR_LEAD = 1.03  # times as fast as the library: then a kernel is taken where it was not measured
# Rounds of tiles over the multiprocessors, and k, from which `tuned` led wherever it was measured.
MANY_ROUNDS, MANY_K = 3.5, 1024
DEEP_SHARES = 16  # `deep` cuts k into so many shares a tile at least,
DEEP_USED = 1.45  # and into more where C fills little of its tiles
# What is added to a time from another shape for each factor of two between them, as its share.
FURTHER = 0.1


def forget() -> None:
    """Has tables read again from now on, because one was written."""
    tables.table.cache_clear()
    tables.best_tflops.cache_clear()
    _cases.cache_clear()
    fastest.cache_clear()


# --- choosing -----------------------------------------------------------------------------


@functools.lru_cache(maxsize=4096)
def fastest(
    machine: Machine, problem: Problem, layout: str = "nn", *, own: bool = False
) -> tuple[Variant, str]:
    """The variant to run on a GPU, and why it is this one, in a few words.

    `layout` are the storage orders of op(A) and op(B), such as "nt"; `own` leaves libraries out.
    """
    cases = _cases(machine, problem.dtype, own)
    libraries = (v for v in listed(machine, own) if v.kernel.library and runs(v, problem))
    library = next(libraries, None)
    distances = [_distance(problem, layout, case) for case in cases]
    known = [
        (distance, [(row, variant) for row, variant in case.rows if runs(variant, problem)])
        for case, distance in zip(cases, distances, strict=True)
    ]
    nearest = min((distance for distance, rows in known if rows), default=None)
    if nearest is None:
        possible = candidates(machine, problem, own)
        return (
            min(possible, key=lambda v: (predict_us(v, machine, problem), -v.kernel.rung)),
            "by the cost model",
        )
    there = [found for distance, rows in known if distance == nearest for found in rows]
    if library or not any(nearest):
        best, variant = min(there, key=lambda found: found[0]["time_ms"])
    else:
        best, variant = _carried_over(machine, problem, known)
    shape = f"{best['m']} x {best['n']} x {best['k']} {best['layout']}"
    if "lent" in best:
        shape += f" on {best['lent']}"
    near = [
        case.rows
        for case, (other_layout, apart) in zip(cases, distances, strict=True)
        if not other_layout and apart < 4.1 and _thin(case.problem) == _thin(problem)
    ]
    if library and not _trusted(variant, machine, problem, there, best, nearest, near):
        return library, f"our kernels are not measured near; at {shape} {variant.name} leads"
    return variant, f"fastest measured at {shape}"


def _carried_over(
    machine: Machine, problem: Problem, known: Sequence[tuple[tuple[bool, float], Timed]]
) -> tuple[Row, Variant]:
    """The fastest by all measured times, each multiplied by what the time model says that the
    shapes differ; `known` has what was measured at each distance."""

    def estimate_ms(found: tuple[Row, Variant, float]) -> float:
        row, variant, apart = found
        us, us_there = (predict_us(variant, machine, p) for p in (problem, _posed(row)))
        time_ms: float = row["time_ms"] * us / us_there * (1 + FURTHER * apart)
        return time_ms

    rows = ((row, variant, sum(distance)) for distance, rows in known for row, variant in rows)
    best, variant, _ = min(rows, key=estimate_ms)
    return best, variant


Timed = Sequence[tuple[Row, Variant]]  # what was measured at a shape


@dataclass(frozen=True)
class _Case:
    """A shape and layout of a table, with what was measured there."""

    problem: Problem
    layout: str
    vectors: bool
    rows: Timed


@functools.cache
def _cases(machine: Machine, dtype: str, own: bool) -> tuple[_Case, ...]:
    variants = {(v.name, tuple(v.params.items())): v for v in listed(machine, own)}
    found: dict[tuple[Problem, str], list[tuple[Row, Variant]]] = {}
    for row in tables.table(machine):
        variant = variants.get((row["kernel"], tuple(row["params"].items())))
        if row["dtype"] == dtype and variant:
            found.setdefault((_posed(row), row["layout"]), []).append((row, variant))
    return tuple(
        _Case(problem, layout, _vectors(problem, layout), tuple(rows))
        for (problem, layout), rows in found.items()
    )


def _trusted(
    variant: Variant, machine: Machine, problem: Problem, there: Timed, best: Row,
    nearest: tuple[bool, float], near: Sequence[Timed],
) -> bool:  # fmt: skip
    """Whether measurements at one shape speak for this one: where they were taken, for our lead
    there is known; elsewhere, or here of another GPU, where the lead is clear and nothing that
    may cost it differs. `there` has what was measured at the nearest shape, `near` at each as thin.
    `docs/performance.md` has what this gave at shapes drawn at random."""
    other_layout, apart = nearest
    if variant.kernel.library or not (other_layout or apart or "lent" in best):
        return True
    measured = _posed(best)
    if other_layout or _vectors(problem, best["layout"]) != _vectors(measured, best["layout"]):
        return False
    bm, bn, _threads = _tile(variant, problem.dtype)
    if min(bm, bn) <= 16 and 1 < _thin(problem) == _thin(measured) <= 8:
        # The longer operand is read once, however long: the library's time varies more.
        return apart < 4.1 and all(map(_clear_lead, near))
    tiles, tiles_there = (-(-p.m // bm) * -(-p.n // bn) for p in (problem, measured))
    many = tiles >= MANY_ROUNDS * machine.multiprocessors and problem.k >= MANY_K
    if many and apart < 4.1 and variant.name == "tuned":
        return True  # as it did wherever such were timed beside the library
    if not _clear_lead(there):
        return False
    rounds, rounds_there = (-(-x // machine.multiprocessors) for x in (tiles, tiles_there))
    if apart < 0.1 and rounds == rounds_there:
        return True
    if variant.name == "deep":  # its shares of a long k fill the GPU, whatever C is
        used = problem.m * problem.n / (tiles * bm * bn)
        return tiles * DEEP_SHARES <= machine.multiprocessors * min(1, DEEP_USED * used)
    # so many tiles that how they fill the multiprocessors matters little
    return apart < 2.1 and tiles >= 1.5 * machine.multiprocessors


def _clear_lead(rows: Timed) -> bool:
    """Whether the fastest of our kernels is clearly faster than the library."""
    ours, library = (
        min(
            (row["time_ms"] for row, v in rows if bool(v.kernel.library) == which), default=math.inf
        )
        for which in (False, True)
    )
    return library >= CLEAR_LEAD * ours


def _thin(problem: Problem) -> int:
    return min(problem.m, problem.n)


def _distance(problem: Problem, layout: str, case: _Case) -> tuple[bool, float]:
    """Shapes by their logarithms, layouts first; sizes off 16 bytes have cases of their own."""
    there = case.problem
    sides = (problem.m, there.m), (problem.n, there.n), (problem.k, there.k)
    apart = sum(abs(math.log2(max(1, x) / max(1, y))) for x, y in sides)
    return layout != case.layout, apart + (_vectors(problem, layout) != case.vectors)


def _posed(row: Row) -> Problem:
    return Problem(row["m"], row["n"], row["k"], row["dtype"])


def _vectors(problem: Problem, layout: str) -> bool:
    """Whether both operands' rows in memory begin on 16 bytes, if they are stored whole."""
    a = problem.m if layout[0] == "t" else problem.k
    b = problem.k if layout[1] == "t" else problem.n
    return a % 4 == 0 and b % 4 == 0
