"""How long a plan should take, and the least that any plan takes on the same links. Pure; times
are in ms, rates in GB/s (10^9 bytes) and TFLOP/s (10^12 operations)."""

from __future__ import annotations

import functools
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from ..problem import Problem
from .hardware import DeviceSpec, Disk, Links, Rates
from .partition import Grid
from .pipeline import Pace, Runs, finished_ms
from .plan import Plan
from .repeated import kinds

# Where a run overlaps its phases, those that are not the longest add about one piece of so many.
PIECES = 8
# How many times as fast as strict ones of the dtype products on tensor cores are, where their
# rates are not known: 8192 on an H200, docs/tensor-cores.md.
QUICKER = {"fp32x3": 3.9, "tf32": 7.0, "fp64x": 1.5, "narrow": 13.9}
# Of calls that come again: what a call takes besides the run's clock; by where the arrays lie, what
# a run takes besides its copies and products, and a worker's thread to start a panel; and to start
# a strip's sum. Fitted to docs/results/pieces1_h200.json and host4_before_h200.json, sums to
# host2_before_h100.json: docs/notes/several-gpus.md.
CALL_MS = 0.2
RUN_MS = {"pinned": 0.17, "pageable": 1.2}
START_PANEL_MS = {"pinned": 0.07, "pageable": 0.04}
START_SUM_MS = 0.06
# The same through slots where there is next to nothing to copy, and from how many bytes on, in all,
# a run takes what it says above. Fitted to docs/results/host4_h200.json, 1024 and 2048.
SHORT_RUN_MS, FILLING_BYTES = 0.5, 50_000_000
SHARE_OF_RATE = 0.95  # of the best rate known, that products of panels reach
PRODUCT_MS = 0.014  # what passes between two products
# What each run in page-locked memory takes besides that does not end where the next begins, and
# where they lie over more than `FAR_BYTES`. Both were read off
# docs/results/chunks2_before_h200.json.
APART_NS, FAR_BYTES, FAR_APART_NS = 12.0, 512 << 20, 120.0
TIMED_BYTES = 512 << 20  # that `tune --links` copies to each GPU, and from it: bench/links.py
# What copies through slots reach at most of that of so many threads within host memory, and of a
# link's rate where they were not measured.
COPYING_SHARE, COPYING_THREADS, STAGED_SHARE = 0.9, 16, 0.65
SPLIT_BYTES = 3  # bytes that splitting moves in a GPU's memory, for each byte of an operand
# Of A, B and C, by where they lie: one GPU takes small arrays of the host whole, without a plan
# (docs/notes/several-gpus.md).
HOSTED_BYTES = {"pinned": 32 << 20, "pageable": 8 << 20}
HOSTED_MS = 0.12
# Where links were not measured: that of a GPU that does not tell its own; what so many threads
# reach within host memory, and the driver from and to ordinary memory, medians of five runs of
# `tune --links`: docs/results/links8_h200.json.
ASSUMED_LINK_GBPS = 20.0
ASSUMED_MEMCPY = ((COPYING_THREADS, 68.0),)
ASSUMED_ORDINARY_GBPS = 7.5, 13.3
Sides = tuple[int, int, int]  # m, n and k


def rate(rates: Rates, count: int) -> float:
    """What `count` GPUs (or threads) reach together, in GB/s: the figure for the largest number
    measured that is not above `count`."""
    fewer = [pair for pair in rates if pair[0] <= count]
    return max(fewer)[1] if fewer else min(rates)[1]


def _most(rates: Rates, count: int) -> float:
    """What no `count` GPUs were seen to exceed together, in GB/s; of numbers that were not
    measured, what the next larger one did not."""
    measured = min((number for number, _ in rates if number >= count), default=count)
    return max(gbps for number, gbps in rates if number <= measured)


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
    up, down = (min(gbps, alone) for gbps in ASSUMED_ORDINARY_GBPS)
    return Links(host, host, host, ring, ASSUMED_MEMCPY, ordinary=(up, down))


def mode(problem: Problem) -> str:
    """What goes to tensor cores, and how: fp32x3, tf32, or narrow for operands of 16 bits; fp32
    otherwise."""
    return "narrow" if problem.operands != problem.dtype else problem.compute


def best_tflops(spec: DeviceSpec, problem: Problem) -> float | None:
    """What no product in a problem's arithmetic is known to exceed, in TFLOP/s; None where nothing
    is known."""
    kind = mode(problem)
    return spec.best_tflops if kind == "fp32" else dict(spec.mode_tflops).get(kind)


def unknown(plan: Plan) -> str:
    """Why a plan's predicted time is not known to hold: what of it is assumed, in words; "" where
    all was measured."""
    for spec in plan.devices:
        kind = mode(plan.problem)
        if not (spec.rated if kind == "fp32" else kind in dict(spec.mode_tflops)):
            return f"no rate of such products is known on {spec.name}"
    found = links(plan)
    if found is not None and not (plan.resident or found.measured):
        return "the links of this host were not measured (hybrid-gemm tune --links does that)"
    return ""


def tflops(spec: DeviceSpec, problem: Problem) -> float:
    """What a device is assumed to reach in a problem's arithmetic, in TFLOP/s."""
    kind = mode(problem)
    known = dict(spec.mode_tflops).get(kind)
    if known is not None:
        return SHARE_OF_RATE * known
    return spec.tflops * (QUICKER.get(kind, 1) if spec.on_gpu else 1)


def bound(plan: Plan) -> dict[str, float]:
    """The least time in ms that this product takes on these devices, by what sets it.

    `compute`: 2mnk at the best rate known on every GPU; and unless it is resident, `links_bound`.
    Empty where the devices' best rate in this arithmetic is not known.
    """
    p = plan.problem
    rates = {s.unit: best_tflops(s, p) for s in plan.devices}
    best = {unit: found for unit, found in rates.items() if found is not None}
    if len(best) < len(rates):
        return {}
    found = links(plan)
    terms = {"compute": p.flops / (sum(best.values()) * 1e9)}
    if plan.resident or found is None or not found.measured:
        return terms
    return terms | links_bound(p, found, len(best), page_locked=plan.page_locked)


def links_bound(p: Problem, found: Links, count: int, *, page_locked: bool) -> dict[str, float]:
    """The least ms that a product's bytes take over the measured links of `count` GPUs.

    `h2d` and `d2h`: A, B (C with beta) in and C out once; `h2d+d2h`: both together, which may share
    what carries them; `staging`: the same bytes copied on the host, where arrays are not
    page-locked, at the highest rate that copies there or through slots reach.
    """
    of_c = p.operand_size if p.out_dtype == p.operands else p.itemsize
    inward = (p.m * p.k + p.k * p.n) * p.operand_size + bool(p.beta) * p.m * p.n * of_c
    outward = p.m * p.n * of_c
    # Of all ways to carry them: one after the other may be faster.
    most = max(_most(rates, count) for rates in (found.both, found.h2d, found.d2h))
    terms = {
        "h2d": _ms(inward, rate(found.h2d, count)), "d2h": _ms(outward, rate(found.d2h, count)),
        "h2d+d2h": _ms(inward + outward, most),
    }  # fmt: skip
    if not page_locked:  # by what is fastest of all that was measured
        copying = itertools.chain(found.memcpy, *_under_way(found))
        terms["staging"] = _ms(inward + outward, max(gbps for _count, gbps in copying))
    return terms


def disk_bound(bytes_in: int, source: Disk, bytes_out: int, target: Disk) -> dict[str, float]:
    """The least ms that bytes of files take from a disk, and to one, as terms of `bound`; those
    alone whose rate is known."""
    terms = {
        "disk in": source.read_gbps and _ms(bytes_in, source.read_gbps),
        "disk out": target.write_gbps and _ms(bytes_out, target.write_gbps),
    }
    return {name: ms for name, ms in terms.items() if ms}


def with_disk_ms(predicted_ms: float, bounds: Mapping[str, float]) -> float:
    """About how long a plan takes that reads files: they come while it multiplies."""
    return _overlapped([predicted_ms, bounds.get("disk in", 0.0)])


def phases(plan: Plan) -> dict[str, float]:
    """The ms that each phase of a plan should take alone: multiply, links, staging, peers, sum;
    and start, which is what the thread of a worker takes to start its share on GPUs: nothing else
    of that goes on at once.

    A worker's box counts as one product.
    """
    size, found, count = plan.problem.itemsize, links(plan), _count(plan)
    boxes = ((w.device, *box_times) for w in plan.workers for box_times in kinds(w.boxes))
    multiply = _multiply_ms(
        plan.problem, plan.devices,
        ((x, (len(b.rows), len(b.cols), len(b.ks)), times) for x, b, times in boxes),
    )  # fmt: skip
    summing: dict[int, float] = defaultdict(float)
    starting: dict[int, float] = defaultdict(float)
    for panel, times in kinds(plan.panels):
        for worker in panel.workers:
            starting[worker] += times * START_PANEL_MS[_memory(plan)]
        for worker, strip, addends in panel.sums:
            spec = plan.devices[plan.workers[worker].device]
            moved = strip.elements * size * (addends + 1)
            summing[spec.unit] += times * _ms(moved, spec.memory_gbps)
            starting[worker] += times * START_SUM_MS
    terms = {
        "multiply": max(multiply.values(), default=0.0),
        "sum": max(summing.values(), default=0.0),
    }
    if found is not None:
        terms["peers"] = _ms(plan.bytes_peer + plan.bytes_relayed, rate(found.peers, count))
        inward, outward = plan.bytes_h2d, plan.bytes_d2h
        both = inward + outward
        rates = (rate(x, count) for x in (found.h2d, found.d2h, found.both))
        terms["links"] = max(map(_ms, (inward, outward, both), rates))
        if not plan.page_locked:
            terms["staging"] = max(map(_ms, (inward, outward, both), _staged(found, count)))
    if plan.devices[0].on_gpu and not plan.resident:
        terms["start"] = max(starting.values(), default=0.0)
    return terms


def predict_ms(plan: Plan) -> float:
    """About how many ms a plan takes. From host arrays it is worked out piece by piece
    (`pipeline`). In turns, and where data is on the devices, it is the longest phase, and one piece
    of what overlaps with it."""
    found = links(plan)
    if found is None:  # on the host nothing overlaps
        return sum(phases(plan).values())
    if plan.resident or plan.turns_in_memory or not plan.devices[0].on_gpu:
        return _overlapped(phases(plan).values())
    if is_hosted(plan):
        return HOSTED_MS + phases(plan)["multiply"] + _whole_ms(plan, found)
    return CALL_MS + _run_ms(plan) + finished_ms(plan, _pace(plan, found))


def _run_ms(plan: Plan) -> float:
    """What a run takes besides its copies and products."""
    whole = RUN_MS[_memory(plan)]
    if plan.page_locked:
        return whole
    filled = min(1.0, (plan.bytes_h2d + plan.bytes_d2h) / FILLING_BYTES)
    return SHORT_RUN_MS + filled * (whole - SHORT_RUN_MS)


def is_hosted(plan: Plan) -> bool:
    """Whether one GPU takes a plan's small host arrays whole."""
    p, size = plan.problem, plan.bytes_h2d + plan.bytes_d2h
    if p.beta and plan.bytes_d2h:  # C, which comes and goes, counts once
        size -= p.m * p.n * p.itemsize
    return len(plan.workers) == 1 and size <= HOSTED_BYTES[_memory(plan)]


def _overlapped(terms: Collection[float]) -> float:
    """The longest of these phases, and one piece of each other."""
    longest = max(terms)
    return longest + (sum(terms) - longest) / PIECES


def least_ms(
    problem: Problem, devices: Sequence[DeviceSpec], grid: Grid, *, first_device: int = 0,
    resident: bool = False,
) -> float:  # fmt: skip
    """No more than what `predict_ms` says of any plan on this grid, whose worker 0 is on the device
    `first_device`: what its products and sums alone take. Found without making the plan."""

    ks = [len(span) for span in grid.ks]
    shares = itertools.product(map(len, grid.rows), map(len, grid.cols), ks)
    numbered = ((i % len(devices), share, 1) for i, share in enumerate(shares, first_device))
    multiply = _multiply_ms(problem, devices, (x for x in numbered if all(x[1])))
    partials, summing = sum(map(bool, ks)), 0.0
    if partials > 1:  # by the owners of strips, at best alike on all units
        moved = problem.m * problem.n * problem.itemsize * (partials + 1)
        summing = _ms(moved, max(spec.memory_gbps for spec in devices)) / max(1, len(multiply))
    terms = max(multiply.values(), default=0.0), summing
    if all(spec.host_memory for spec in devices):
        least = sum(terms)
    elif resident or not devices[0].on_gpu:
        least = _overlapped(terms)
    else:
        least = max(terms)
    return least * (1 - 1e-9)  # floats are added in another order


def _multiply_ms(
    problem: Problem, devices: Sequence[DeviceSpec], products: Iterable[tuple[int, Sides, int]]
) -> dict[int, float]:
    """The ms in which each unit multiplies: `products` are devices with m, n and k, and how many
    such products there are."""

    @functools.cache
    def product_ms(device: int, sides: Sides) -> float:
        return _product_ms(problem, devices[device], *sides)

    found: dict[int, float] = defaultdict(float)
    for device, sides, times in products:
        found[devices[device].unit] += times * product_ms(device, sides)
    return found


def _whole_ms(plan: Plan, found: Links) -> float:
    """Copies of small arrays, whole, by the driver."""
    up, down = rate(found.h2d, 1), rate(found.d2h, 1)
    if not plan.page_locked:
        up, down = found.ordinary or (found.memcpy[0][1], found.memcpy[0][1])
    return _ms(plan.bytes_h2d, up) + _ms(plan.bytes_d2h, down)


def _staged(found: Links, count: int) -> tuple[float, float, float]:
    """GB/s that `count` GPUs reach in all through slots: up, down, and both ways at once."""
    copied = COPYING_SHARE * rate(found.memcpy, COPYING_THREADS)
    if all(measured := _under_way(found)):
        up, down, both = (rate(rates, count) for rates in measured)
    else:
        up, down = (STAGED_SHARE * rate(rates, count) for rates in (found.h2d, found.d2h))
        both = copied
    return min(up, copied), min(down, copied), both


def _under_way(found: Links) -> list[Rates]:
    """Rates of copies through slots that are under way, up, down and both ways: those that were
    measured, without the time in which they began and ended. Each run takes that besides."""

    def under_way(gbps: float, size: int) -> float:
        ms = _ms(size, gbps)
        return size * 1e-6 / max(ms - RUN_MS["pageable"], ms / 2)

    tables = (found.staged_h2d, 1), (found.staged_d2h, 1), (found.staged_both, 2)
    return [
        tuple((gpus, under_way(gbps, gpus * ways * TIMED_BYTES)) for gpus, gbps in rates)
        for rates, ways in tables
    ]


def _pace(plan: Plan, found: Links) -> Pace:
    """How fast each GPU works while all do."""
    count = _count(plan)
    specs = {spec.unit: spec for spec in plan.devices}

    def link(alone: float) -> Callable[[Runs], float]:
        if not plan.page_locked:
            return lambda runs: alone
        return functools.partial(_straight_gbps, alone)

    if plan.page_locked:  # copies both ways share their links alike
        up, down, both = (each(x, count) for x in (found.h2d, found.d2h, found.both))
        beside = (min(1.0, both / (up + down)),) * 2
    else:  # threads copy what was asked for first, so downloads have what uploads leave
        up, down, both = (x / count for x in _staged(found, count))
        beside = 1.0, min(1.0, max(0.0, both - up) / down)

    @functools.cache
    def product(unit: int, sides: Sides) -> float:
        return PRODUCT_MS + _product_ms(plan.problem, specs[unit], *sides)

    def split(unit: int, size: int) -> float:
        return add(unit, SPLIT_BYTES * size)

    def add(unit: int, size: int) -> float:
        return _ms(size, specs[unit].memory_gbps)

    return Pace(
        link(up), link(down), beside, each(found.peers, count),
        START_PANEL_MS[_memory(plan)], START_SUM_MS, product, split, add,
    )  # fmt: skip


def _straight_gbps(alone: float, runs: Runs) -> float:
    """What copies of such runs from page-locked memory reach of a link's rate."""
    if runs.size >= runs.apart:
        return alone
    ns = FAR_APART_NS if runs.over > FAR_BYTES else APART_NS
    return runs.size / (runs.size / alone + ns)


def _product_ms(problem: Problem, spec: DeviceSpec, m: int, n: int, k: int) -> float:
    """The ms of one product on a device: the larger of its flops and its bytes of A, B and C.
    Tiles of 16 round its sides up, which is what makes thin row boxes dear."""
    flops = 2 * (-(-m // 16) * 16) * (-(-n // 16) * 16) * k
    moved = problem.operand_size * (m * k + k * n) + problem.itemsize * m * n
    return max(flops / (tflops(spec, problem) * 1e9), _ms(moved, spec.memory_gbps))


def _memory(plan: Plan) -> str:
    return "pinned" if plan.page_locked else "pageable"


def _count(plan: Plan) -> int:
    """GPUs that have something to do."""
    return max(1, len({plan.devices[w.device].unit for w in plan.workers if w.boxes}))


def _ms(count: int, gbps: float) -> float:
    """The ms that so many bytes take at a rate."""
    return count / (gbps * 1e6) if count and math.isfinite(gbps) else 0.0
