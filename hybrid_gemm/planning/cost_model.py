"""How long a plan should take, and the least that any plan takes on the same links. Pure; times
are in ms, rates in GB/s (10^9 bytes) and TFLOP/s (10^12 operations)."""

from __future__ import annotations

import math
from collections import Counter, defaultdict

from ..problem import Problem
from .hardware import DeviceSpec, Links, Rates
from .plan import Plan

# Where a run overlaps its phases, those that are not the longest add about one piece of so many.
PIECES = 8
# How many times as fast as strict ones of the dtype products on tensor cores are: 8192 on an H200,
# docs/tensor-cores.md.
QUICKER = {"fp32x3": 3.9, "tf32": 7.0, "fp64x": 1.5, "narrow": 13.9}
# What one thread takes to start a panel of one worker, by where the arrays lie, and a strip's sum
# besides: eight H200s, docs/results/starting8_h200.json.
START_PANEL_MS = {"pinned": 0.35, "pageable": 0.65}
START_SUM_MS = 0.12
# What the threads that copy within host memory reach: docs/results/carried2_h200.json.
ASSUMED_MEMCPY_GBPS = 40.0


def rate(rates: Rates, count: int) -> float:
    """What `count` GPUs (or threads) reach together, in GB/s: the figure for the largest number
    measured that is not above `count`."""
    fewer = [pair for pair in rates if pair[0] <= count]
    return max(fewer)[1] if fewer else min(rates)[1]


def each(rates: Rates, count: int) -> float:
    """What each of `count` GPUs has when all copy at once, in GB/s."""
    return rate(rates, count) / count


def links(plan: Plan) -> Links | None:
    """The links of a plan's host, assumed where they were not measured; None if it has none."""
    spec = next((s for s in plan.devices if not s.host_memory), None)
    return None if spec is None else spec.links or assumed(spec, _count(plan))


def assumed(spec: DeviceSpec, count: int) -> Links:
    """The links of `count` devices that share none, by one device's own figures."""
    alone, peer = spec.link_gbps, spec.peer_gbps
    host, ring = ((1, alone), (count, count * alone)), ((1, peer), (count, count * peer))
    return Links(host, host, host, ring, ((1, ASSUMED_MEMCPY_GBPS),))


def tflops(spec: DeviceSpec, problem: Problem) -> float:
    """What a device is assumed to reach in a problem's arithmetic, in TFLOP/s."""
    kind = "narrow" if problem.operands != problem.dtype else problem.compute
    return spec.tflops * (QUICKER.get(kind, 1) if spec.on_gpu else 1)


def bound(plan: Plan, *, pinned: bool = False) -> dict[str, float]:
    """The least time in ms that this product takes on these devices, by what sets it.

    `compute`: 2mnk at the best rate known on every GPU. Unless it is resident, `h2d` and `d2h`:
    A, B (C with beta) in and C out once, over all links; and `staging`: the same bytes copied on
    the host, where arrays are not `pinned`; these where the links were measured. Empty where the
    devices' best rate is not known, as it is for strict products alone.
    """
    p = plan.problem
    best = {s.unit: s.best_tflops for s in plan.devices if s.best_tflops is not None}
    unknown = len(best) < len({s.unit for s in plan.devices})
    if unknown or p.compute != "fp32" or p.operands != p.dtype:
        return {}
    found = links(plan)
    terms = {"compute": p.flops / (sum(best.values()) * 1e9)}
    if plan.resident or found is None or not found.measured:
        return terms
    inward = (p.m * p.k + p.k * p.n + bool(p.beta) * p.m * p.n) * p.itemsize
    outward = p.m * p.n * p.itemsize
    terms["h2d"] = _ms(inward, rate(found.h2d, len(best)))
    terms["d2h"] = _ms(outward, rate(found.d2h, len(best)))
    if not pinned:
        terms["staging"] = _ms(inward + outward, found.memcpy_gbps)
    return terms


def phases(plan: Plan, *, pinned: bool = False) -> dict[str, float]:
    """The ms that each phase of a plan should take alone: multiply, links, staging, peers, sum;
    and start, which is what one thread takes to start all of it on GPUs.

    A box costs the larger of its flops and of its bytes of A, B and C at its device's rates;
    tiles of 16 round its sides up, which is what makes thin row boxes dear.
    """
    size, found, count = plan.problem.itemsize, links(plan), _count(plan)
    multiply: dict[int, float] = defaultdict(float)
    summing: dict[int, float] = defaultdict(float)
    for worker in plan.workers:
        spec = plan.devices[worker.device]
        shapes = Counter((len(b.rows), len(b.cols), len(b.ks)) for b in worker.boxes)
        for (m, n, k), times in shapes.items():
            flops = 2 * (-(-m // 16) * 16) * (-(-n // 16) * 16) * k
            moved = size * (m * k + k * n + m * n)
            multiply[spec.unit] += times * max(
                flops / (tflops(spec, plan.problem) * 1e9), _ms(moved, spec.memory_gbps)
            )  # fmt: skip
    for panel in plan.panels:
        if len(panel.workers) > 1:
            for strip in panel.strips:
                spec = plan.devices[plan.workers[strip.owner].device]
                moved = strip.elements * size * (len(panel.workers) + 1)
                summing[spec.unit] += _ms(moved, spec.memory_gbps)
    terms = {
        "multiply": max(multiply.values(), default=0.0),
        "sum": max(summing.values(), default=0.0),
    }
    if found is not None:
        terms["peers"] = _ms(plan.bytes_peer + plan.bytes_relayed, rate(found.peers, count))
        inward, outward = plan.bytes_h2d, plan.bytes_d2h
        terms["links"] = max(
            _ms(inward, rate(found.h2d, count)), _ms(outward, rate(found.d2h, count)),
            _ms(inward + outward, rate(found.both, count)),
        )  # fmt: skip
        if not pinned:
            terms["staging"] = _ms(inward + outward, found.memcpy_gbps)
    if plan.devices[0].on_gpu and not plan.resident:
        terms["start"] = _start_ms(plan, pinned)
    return terms


def _start_ms(plan: Plan, pinned: bool) -> float:
    """What the thread that starts all GPUs takes. Nothing else of it goes on at once, so it is a
    bound of its own on a plan of many small panels."""
    started = sum(len(panel.workers) for panel in plan.panels)
    summed = sum(len(panel.strips) for panel in plan.panels if len(panel.workers) > 1)
    each_ms = START_PANEL_MS["pinned" if pinned else "pageable"]
    return started * each_ms + summed * START_SUM_MS


def predict_ms(plan: Plan, *, pinned: bool = False) -> float:
    """About how many ms a plan takes: its longest phase, and one piece of what overlaps with
    it."""
    terms = phases(plan, pinned=pinned)
    if links(plan) is None:  # on the host nothing overlaps
        return sum(terms.values())
    longest = max(terms.values())
    return longest + (sum(terms.values()) - longest) / PIECES


def _count(plan: Plan) -> int:
    """GPUs that have something to do."""
    return max(1, len({plan.devices[w.device].unit for w in plan.workers if w.boxes}))


def _ms(count: int, gbps: float) -> float:
    """The ms that so many bytes take at a rate."""
    return count / (gbps * 1e6) if count and math.isfinite(gbps) else 0.0
