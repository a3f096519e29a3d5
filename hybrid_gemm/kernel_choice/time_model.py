"""How long a variant should take on a GPU, and which variants are worth timing. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator

from .. import catalog
from ..catalog import ITEM_SIZE, Variant
from ..problem import Problem
from .tables import Machine

# What the cost model grants a library: what cuBLAS reaches of an H200's peak (0.77).
LIBRARY_EFFICIENCY = 0.75
LAUNCH_US = 4.0
SPLIT_US = 3.0
PART_BYTES_A_US = 60e3  # of one multiprocessor
FLOP_A_BYTE = 16  # of the peak, for each byte a second from memory; an H200's
PRUNE = 1.25  # variants predicted to take longer than this times the best are not timed,
SLACK_US = 8.0  # and where that is not much longer they are


def listed(machine: Machine, own: bool) -> Iterator[Variant]:
    """Every listed variant that such a GPU runs; without libraries if `own`."""
    for kernel in catalog.gemm_kernels():
        if kernel.runs_at(machine.arch) and not (own and kernel.library):
            for variant in kernel.variants():
                yield variant.for_multiprocessors(machine.multiprocessors)


def runs(variant: Variant, problem: Problem) -> bool:
    """Whether a variant can multiply the problem on a GPU."""
    p = problem
    return variant.refusal(device="cuda", dtype=p.operands, m=p.m, n=p.n, k=p.k) is None


def candidates(machine: Machine, problem: Problem, own: bool = False) -> list[Variant]:
    """The listed variants that can multiply the problem; without libraries if `own`."""
    return [
        variant
        for variant in listed(machine, own)
        if runs(variant, problem) and has_room(variant, machine, problem)
    ]


def has_room(variant: Variant, machine: Machine, problem: Problem) -> bool:
    """Whether a block has the shared memory that it asks for, as far as is known."""
    if variant.kernel.library or machine.shared_bytes is None:
        return True
    p = problem
    return variant.launch(p.m, p.n, p.k, p.operands).shared_bytes <= machine.shared_bytes


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
    (bm, bn), threads = variant.tile_of(m, n), variant.threads(problem.dtype)
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


def worth_timing(machine: Machine, problem: Problem) -> list[Variant]:
    """The candidates that the cost model does not rule out; libraries always, and for a few rows
    or columns, where memory decides, tiles as thin as they.

    Of rungs that it cannot tell apart, the highest; of kernels that share k, which it knows less
    well, every variant.
    """
    possible = candidates(machine, problem)
    best: dict[object, Variant] = {}
    for variant in sorted(possible, key=lambda v: v.kernel.rung):
        us = predict_us(variant, machine, problem)
        apart = variant.kernel.shares_k or variant.kernel.library
        best[variant if apart else us] = variant
    kept = list(best.values())
    own = [predict_us(v, machine, problem) for v in kept if not v.kernel.library]
    limit = max(PRUNE * min(own, default=math.inf), min(own, default=math.inf) + SLACK_US)
    return [
        v
        for v in kept
        if v.kernel.library or _as_thin(v, problem) or predict_us(v, machine, problem) <= limit
    ]


def _as_thin(variant: Variant, problem: Problem) -> bool:
    bm, bn = variant.tile_of(problem.m, problem.n)
    thin, short = min(problem.m, problem.n), min(bm, bn)
    return short // 2 < thin <= short <= 8 and (bm < bn) == (problem.m < problem.n)
