"""Which kernel for which shape: by the tables of measured times (`tuned/`), or a cost model where
there is none. A problem takes the kernel that was fastest at the measured shape nearest to its own.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass

from . import catalog, tuned
from .catalog import ITEM_SIZE, Variant
from .problem import Problem
from .tuned import Machine

# What the cost model grants a library: what cuBLAS reaches of an H200's peak (0.77).
LIBRARY_EFFICIENCY = 0.75
LAUNCH_US = 4.0
SPLIT_US = 3.0
PART_BYTES_A_US = 60e3  # of one multiprocessor
FLOP_A_BYTE = 16  # of the peak, for each byte a second from memory; an H200's
PRUNE = 1.25  # variants predicted to take longer than this times the best are not timed,
SLACK_US = 8.0  # and where that is not much longer they are
CLEAR_LEAD = 1.03  # over the library, for a kernel to be taken where it was not measured
MANY_ROUNDS, MANY_K = 3.5, 1024  # of tiles, and k past which `tuned` leads wherever measured
DEEP_SHARES = 16  # of k, at least, a tile,
DEEP_USED = 1.45  # and more where little of the tiles is used
FURTHER = 0.1  # of a time carried over from another shape, for each factor of two between them


def forget() -> None:
    """Reads tables afresh from now on: one was written."""
    tuned.table.cache_clear()
    tuned.best_tflops.cache_clear()
    _cases.cache_clear()
    choose.cache_clear()


# --- choosing -----------------------------------------------------------------------------


def _listed(machine: Machine, own: bool) -> Iterator[Variant]:
    """Every listed variant that such a GPU runs; without libraries if `own`."""
    for kernel in catalog.gemm_kernels():
        if kernel.min_arch() <= machine.arch and not (own and kernel.library):
            for variant in kernel.variants():
                yield scaled(variant, machine.multiprocessors)


def _can(variant: Variant, problem: Problem) -> bool:
    p = problem
    return variant.refusal(device="cuda", dtype=p.dtype, m=p.m, n=p.n, k=p.k) is None


def candidates(machine: Machine, problem: Problem, own: bool = False) -> list[Variant]:
    """Those that can run the problem."""
    return [variant for variant in _listed(machine, own) if _can(variant, problem)]


def scaled(variant: Variant, multiprocessors: int) -> Variant:
    """A persistent kernel's variant for a GPU with so many multiprocessors.

    Its blocks and splits are listed for the 132 of an H200.
    """
    params = {
        name: -(-value * multiprocessors // 132) if _counts_blocks(name, value) else value
        for name, value in variant.params.items()
    }
    return Variant(variant.kernel, params)


def _counts_blocks(name: str, value: int) -> bool:
    return name == "BLOCKS" or (name == "SPLIT" and value >= 132)


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
    for row in tuned.table(machine):
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


def predict_us(variant: Variant, machine: Machine, problem: Problem) -> float:
    """A rough time in microseconds, to rank variants and to skip hopeless ones.

    A thread that owns a tile of s x s elements spends s^2 of its issue slots on multiply-adds
    and about 4s on bringing operands; what does not fit in registers is spilled. Blocks run in
    rounds, up to 512 threads of them together on a multiprocessor. No product is faster than
    its matrices come from memory.
    """
    peak = machine.peak_tflops or 1.0
    m, n, k = problem.m, problem.n, problem.k
    moved = (m * k + k * n + m * n) * ITEM_SIZE[problem.dtype]
    memory = LAUNCH_US + moved * FLOP_A_BYTE / (peak * 1e6)
    if variant.kernel.library:
        return max(memory, LAUNCH_US + problem.flops / (peak * LIBRARY_EFFICIENCY * 1e6))
    bm, bn, threads = _tile(variant, problem.dtype)
    owned = bm * bn / threads
    efficiency = owned / (owned + 4 * math.sqrt(owned))
    if owned * ITEM_SIZE[problem.dtype] > 4 * 200:
        efficiency = 0.02
    launch = variant.launch(problem.m, problem.n, problem.k, problem.dtype)
    blocks = math.prod(launch.grid)
    tiles = -(-problem.m // bm) * -(-problem.n // bn)
    together = max(1, min(512 // threads, -(-blocks // machine.multiprocessors)))
    rounds = -(-blocks // (machine.multiprocessors * together))
    lane_rate = peak / machine.multiprocessors * efficiency
    lane_rate *= min(1, threads * together / 256)
    work = 2 * bm * bn * problem.k * tiles / blocks  # of one block
    split = 0.0
    if blocks > tiles:  # parts of a tile go through memory to be added up
        split = SPLIT_US + 2 * bm * bn * ITEM_SIZE[problem.dtype] / PART_BYTES_A_US
    return max(memory, LAUNCH_US + split + rounds * together * work / (lane_rate * 1e6))


@functools.cache
def _tile(variant: Variant, dtype: str) -> tuple[int, int, int]:
    """Rows and columns of C a block makes, and its threads."""
    p = variant.params
    launch = variant.launch(*((1, 1) if variant.kernel.limits else (8192, 8192)), 1024, dtype)
    threads = math.prod(launch.block)
    if "BM" in p and "BN" in p:
        return p["BM"], p["BN"], threads
    if variant.kernel.limits:
        return 32, 32, 1024
    # Otherwise the grid of a large square tells.
    columns, rows = (launch.grid[0], launch.grid[1]) if launch.grid[1] > 1 else (1, launch.grid[0])
    return max(1, 8192 // rows), max(1, 8192 // columns), threads


def worth_timing(machine: Machine, problem: Problem) -> list[Variant]:
    """The candidates that the cost model does not rule out; libraries always, and for a few rows
    or columns, where memory decides, tiles as thin as they.

    Of rungs that it cannot tell apart, the highest.
    """
    possible = candidates(machine, problem)
    best: dict[object, Variant] = {}
    for variant in sorted(possible, key=lambda v: v.kernel.rung):
        us = predict_us(variant, machine, problem)
        persistent = variant.kernel.workspace != "0"
        best[variant if persistent or variant.kernel.library else us] = variant
    kept = list(best.values())
    own = [predict_us(v, machine, problem) for v in kept if not v.kernel.library]
    limit = max(PRUNE * min(own, default=math.inf), min(own, default=math.inf) + SLACK_US)
    return [
        v
        for v in kept
        if v.kernel.library or _as_thin(v, problem) or predict_us(v, machine, problem) <= limit
    ]


def _as_thin(variant: Variant, problem: Problem) -> bool:
    bm, bn, _threads = _tile(variant, problem.dtype)
    thin, short = min(problem.m, problem.n), min(bm, bn)
    return short // 2 < thin <= short <= 8 and (bm < bn) == (problem.m < problem.n)
