"""Which kernel for which shape: by the tables of measured times (`tuned/`), or a cost model where
there is none. A problem takes the kernel that was fastest at the measured shape nearest to its own.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

from ..catalog import Variant
from ..problem import Problem
from . import tables
from .tables import Machine
from .time_model import _can, _listed, _tile, candidates, predict_us

CLEAR_LEAD = 1.03  # over the library, for a kernel to be taken where it was not measured
MANY_ROUNDS, MANY_K = 3.5, 1024  # of tiles, and k past which `tuned` leads wherever measured
DEEP_SHARES = 16  # of k, at least, a tile,
DEEP_USED = 1.45  # and more where little of the tiles is used
FURTHER = 0.1  # of a time carried over from another shape, for each factor of two between them


def forget() -> None:
    """Reads tables afresh from now on: one was written."""
    tables.table.cache_clear()
    tables.best_tflops.cache_clear()
    _cases.cache_clear()
    choose.cache_clear()


# --- choosing -----------------------------------------------------------------------------


@functools.lru_cache(maxsize=4096)
def choose(
    machine: Machine, problem: Problem, layout: str = "nn", *, own: bool = False
) -> tuple[Variant, str]:
    """The variant to run and why: from the table, or by the cost model."""
    cases = _cases(machine, problem.dtype, own)
    libraries = (v for v in _listed(machine, own) if v.kernel.library and _can(v, problem))
    library = next(libraries, None)
    distances = [_distance(problem, layout, case) for case in cases]
    for nearest in sorted(set(distances)):
        there = [
            (row, variant)
            for case, distance in zip(cases, distances, strict=True)
            if distance == nearest
            for row, variant in case.rows
            if _can(variant, problem)
        ]
        if there:
            break
    else:
        possible = candidates(machine, problem, own)
        return (
            min(possible, key=lambda v: (predict_us(v, machine, problem), -v.kernel.rung)),
            "by the cost model",
        )
    if library or not any(nearest):
        best, variant = min(there, key=lambda found: found[0]["time_ms"])
    else:

        def estimate(found) -> float:
            row, variant, apart = found
            us, us_there = (predict_us(variant, machine, p) for p in (problem, _posed(row)))
            return row["time_ms"] * us / us_there * (1 + FURTHER * apart)

        known = (
            (row, variant, sum(distance))
            for case, distance in zip(cases, distances, strict=True)
            for row, variant in case.rows
            if _can(variant, problem)
        )
        best, variant, _ = min(known, key=estimate)
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


@dataclass(frozen=True)
class _Case:
    """A shape and layout of a table, with what was timed there."""

    problem: Problem
    layout: str
    vectors: bool
    rows: tuple[tuple[dict, Variant], ...]


@functools.cache
def _cases(machine: Machine, dtype: str, own: bool) -> tuple[_Case, ...]:
    listed = {(v.name, tuple(v.params.items())): v for v in _listed(machine, own)}
    found: dict[tuple, list] = {}
    for row in tables.table(machine):
        variant = listed.get((row["kernel"], tuple(row["params"].items())))
        if row["dtype"] == dtype and variant:
            found.setdefault((_posed(row), row["layout"]), []).append((row, variant))
    return tuple(
        _Case(problem, layout, _vectors(problem, layout), tuple(rows))
        for (problem, layout), rows in found.items()
    )


def _trusted(variant, machine, problem: Problem, there, best: dict, nearest, near) -> bool:
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


def _clear_lead(rows) -> bool:
    """Whether the fastest of ours is clearly faster than the library."""
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


def _posed(row: dict) -> Problem:
    return Problem(row["m"], row["n"], row["k"], row["dtype"])


def _vectors(problem: Problem, layout: str) -> bool:
    """Whether both operands' rows in memory begin on 16 bytes, if they are stored whole."""
    a = problem.m if layout[0] == "t" else problem.k
    b = problem.k if layout[1] == "t" else problem.n
    return a % 4 == 0 and b % 4 == 0


# --- the cost model -----------------------------------------------------------------------
