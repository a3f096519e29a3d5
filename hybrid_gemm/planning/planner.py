"""Who does what: a problem and devices in, a plan out. Pure.

`rows` cuts the cuboid m x n x k along m, `cols` along k, and both are the grid pm x pn x pk
with one long side. Workers of one (pm, pn) cell make partials of the same block of C. Within
its share a worker goes panel by panel, so that copies and sums overlap with multiplying, and
where memory is short in turns, so that its device has only what the next turns need.

From host arrays K may be cut even where all fits, into chunks that grow: each is multiplied as
soon as it has come, and C leaves during the last.

What cuts do to results. Turns that cut C alone change no sum. Where K is cut as well, each
chunk's product is added to C's elements, which rounds differently from one product over all of K.
K is cut at one of three fixed sets of boundaries (`_k_cuts`). The first is that of the plan without
turns, which depends on the problem, the grid, the devices' rates and links, and on whether arrays
are page-locked; the others depend on the problem and the grid alone. The memory decides only which
of the three is taken, and the finest are for devices with less than about 200 MB. So a product over
the same grid of the same devices, by the same kernel, has at most three results, whatever memory
is free, and `Plan.turns_in_memory` = 0 always means the first (but for the nccl reduction, which
has no turns: where chunks do not fit, K stays whole). A kernel chosen by `kernel="auto"`, and a
library's own choice of algorithm, may depend on the shape of a tile, and so on the memory: name a
kernel where bits matter.
"""

from __future__ import annotations

import math
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..errors import OutOfMemoryError, UsageError, in_words
from ..problem import Problem
from .cost_model import QUICKER, is_hosted, least_ms, phases, predict_ms
from .hardware import DeviceSpec
from .on_grid import (
    LARGEST_PART_BYTES,
    PART_SIDE,
    PIECES,
    WHOLE,
    Cuts,
    Pieces,
    Task,
    distinct,
    on_grid,
)
from .partition import Shape, candidates, sides
from .plan import NOWHERE, Homes, Plan

# What a worker more has to save where data is on the devices: docs/results/small2_h200.json has
# where two GPUs pass one. The time that is predicted of a run from host arrays has what starting
# takes; there it is a share of that, so that of plans that take as long the smaller one is taken.
# Plans that sum partials have to be faster by more: of what is predicted they took 1 to 8 % more
# than others did (docs/notes/several-gpus.md).
START_MS = 2.0
START_SHARE, SUM_SHARE = 0.02, 0.05
GRIDS = 2  # so many that seem fastest are planned with operands in other parts, too
# Chunks of K (`Cuts.ks`). Products of the first begin when it has come, the next comes meanwhile,
# and most of C leaves during the last. Each has to save CHUNK_SHARE of the time; where the longest
# phase of a plan is at least NEARLY_ALL of it, there is nothing to save. Products of less than
# EARLY_CHUNK of K take longer than the cost model says.
# Chunks come in so many kinds of parts, the best of K whole: docs/notes/several-gpus.md.
CHUNKS = (1,), (1, 3), (1, 1), (1, 1, 2)
EARLY_CHUNK = 4096
CHUNK_PIECES = 4
CHUNK_SHARE, NEARLY_ALL = 0.025, 0.92

# Turns, where memory is short. A tile's larger side is at least about half of WHOLE_SIDE with K
# whole (times QUICK_TURNS for quicker arithmetic), or of CHUNK_SIDE with K in chunks whose operands
# take CHUNK_BYTES: with smaller ones the link to the host would decide. Where that does not fit,
# chunks of at most LEAST_CHUNK of K are multiplied in tiles down to LEAST_TILE.
TURNS_IN_MEMORY = 2  # one is brought while another is multiplied
MOST_TURNS = 2**20  # of a worker: a plan of more takes minutes, and gigabytes, to make
WHOLE_SIDE, QUICK_TURNS, CHUNK_SIDE, CHUNK_BYTES = 16384, 4, 4096, 256 << 20
LEAST_CHUNK, LEAST_TILE = 512, 256


# Many parameters: they are the caller's options, each with its default.
def make_plan(
    problem: Problem,
    devices: Sequence[DeviceSpec],
    workers: int | Sequence[int],
    *,
    split: str = "auto",
    grid: Sequence[int] | None = None,
    kernel: str = "",
    reduce: str = "ordered",
    resident: bool = False,
    homes: Homes = NOWHERE,
    page_locked: bool = False,
) -> Plan:
    """The plan for `workers` workers over `devices` (worker i on device i mod their number,
    counted from where C lies, or B or A, if one of them lies on a device).

    `rows` is the grid (workers, 1, 1), `cols` (1, 1, workers); `auto` takes the grid that the
    cost model finds fastest of those that fit and that `reduce` can sum, and of several numbers
    of `workers` as many as are worth starting. What does not fit whole is done in turns, unless
    it is `resident` or summed in another way than "ordered". Raises `UsageError` for a grid or a
    reduction that is not possible, `OutOfMemoryError` if a device is too small for any turn.
    """
    counts = [workers] if isinstance(workers, int) else sorted(workers, reverse=True)
    shapes = candidates(counts, split, grid)
    # Rows first, then cols: of equals the first is taken.
    shapes.sort(key=lambda shape: (-math.prod(shape), *_plainness(shape)))
    task = Task(problem, tuple(devices), kernel, reduce, resident, homes, page_locked)
    return _best(task, shapes)


def _best(task: Task, shapes: Sequence[Shape]) -> Plan:
    """The plan expected to be fastest on one of these grids; raises as `make_plan`.

    Grids that may be fast come first: a plan has 100 grids for 1000 workers, and those whose
    products and sums alone take longer than a whole plan are passed over.
    """
    least = {shape: _least(task, shape) if len(shapes) > 1 else 0.0 for shape in shapes}
    plans: dict[Shape, Plan] = {}
    refusals: dict[Shape, str] = {}
    shortfalls: dict[Shape, str] = {}

    def is_late(shape: Shape, in_turns: bool) -> bool:
        """Whether a plan that was made seems faster than any on this grid."""
        return any(_seems(plan) < (in_turns, least[shape]) for plan in plans.values())

    for shape in sorted(shapes, key=lambda shape: least[shape]):
        if is_late(shape, in_turns=False):
            break
        whole = _whole(task, shape)
        if refusal := _no_nccl(whole):
            refusals[shape] = refusal
        elif shortfall := memory_shortfall(whole):
            shortfalls[shape] = shortfall
        else:
            plans[shape] = _predicted(whole)
    # The last, for they may be millions, and no turns are better than any.
    for shape in shortfalls if not task.resident else ():
        if is_late(shape, in_turns=True):
            break
        if not _may_take_turns(task, shape):
            shortfalls[shape] += ", and the ordered reduction goes in turns"
            continue
        plan, least_bytes = _in_turns(task, shape)
        if plan is None:
            shortfalls[shape] += f"; in turns it needs {in_words(least_bytes)}"
        else:
            plans[shape] = _predicted(plan)
    # Of those that are alike, the one that `shapes` has first.
    if not plans and shortfalls:
        raise OutOfMemoryError(shortfalls[min(shortfalls, key=shapes.index)])
    if not plans:
        raise UsageError(refusals[min(refusals, key=shapes.index)])

    def order(plan: Plan) -> tuple[object, ...]:
        return _seems(plan), shapes.index(plan.grid)

    return _refined(task, sorted(plans.values(), key=order)[:GRIDS], order)


def _refined(task: Task, plans: Sequence[Plan], order: Callable[[Plan], Any]) -> Plan:
    """The first of these plans by an order, with operands in other parts and K in other chunks."""
    best = plans[0]
    if best.turns_in_memory:
        return _cut_as_whole(task, best)
    if not _has_pieces(best):
        return best
    in_pieces = sorted((each for plan in plans for each in _in_pieces(task, plan)[1]), key=order)
    fitting = next((plan for plan in in_pieces if not memory_shortfall(plan)), None)
    if fitting is None and _may_take_turns(
        task, best.grid
    ):  # chunks are padded, and take a little more
        return _cut_as_whole(task, best)
    return fitting or best


def _may_take_turns(task: Task, shape: Shape) -> bool:
    """Whether what workers of a grid sum, if anything, may be summed in turns."""
    return task.reduce == "ordered" or (task.reduce == "nccl" and shape[2] == 1)


def _has_pieces(plan: Plan) -> bool:
    """Whether a plan's operands come to GPUs from the host in parts, and all stay there."""
    on_gpu = plan.devices[0].on_gpu
    return on_gpu and not (plan.resident or plan.turns_in_memory or is_hosted(plan))


def _in_pieces(task: Task, whole: Plan) -> tuple[tuple[int, ...], list[Plan]]:
    """The chunks of K in which a plan without turns should be fastest (`Cuts.ks`), and the plan in
    these with operands that come in each kind of parts; whatever memory is free."""
    cuts = _whole_cuts(task, whole.grid)
    if not _has_pieces(whole):
        return cuts.ks, [whole]

    def least(plans: Mapping[Pieces, Plan]) -> float:
        return min(plan.predicted_ms for plan in plans.values())

    uncut = in_all_pieces(task, whole.grid, cuts)
    found = {cuts.ks: uncut}
    narrow = whole.result_size < task.problem.itemsize  # C would leave as float32
    added_to = cuts.panels and not any(spec.checked for spec in task.devices)
    if cuts.ks == (1,) and added_to and not narrow:
        depth = sides(task.problem, whole.grid)[2]
        if max(phases(whole).values()) < NEARLY_ALL * least(uncut):
            pieces = sorted(uncut, key=lambda x: uncut[x].predicted_ms)[:CHUNK_PIECES]
            for ks in CHUNKS[1:]:
                if depth >= sum(ks) * EARLY_CHUNK:
                    found[ks] = in_all_pieces(task, whole.grid, replace(cuts, ks=ks), pieces)
    best = min(found, key=lambda ks: least(found[ks]) * (1 + CHUNK_SHARE * len(ks)))
    return best, [*found[best].values()]


def in_all_pieces(
    task: Task, shape: Shape, cuts: Cuts, kinds: Sequence[Pieces] = PIECES
) -> dict[Pieces, Plan]:
    """The plan on a grid with operands that come in each of these kinds of parts, of kinds that
    are the same for it the first alone."""
    grid, plans = task.grid(shape), {}
    for pieces in distinct(task, grid, cuts, kinds):
        plans[pieces] = _predicted(on_grid(task, grid, replace(cuts, pieces=pieces)))
    return plans


def _cut_as_whole(task: Task, uncut: Plan) -> Plan:
    """A plan in turns on the same grid, with K cut as it is without turns, so that the memory does
    not decide that, unless more cuts are needed."""
    shape = uncut.grid
    ks, _ = _in_pieces(task, _whole(task, shape))
    if uncut.turns_in_memory and ks == _k_cuts(task, shape, None)[0][0]:  # tried first anyway
        return uncut
    plan, _ = _in_turns(task, shape, ks)
    return _predicted(plan) if plan else uncut


def _predicted(plan: Plan) -> Plan:
    return replace(plan, predicted_ms=predict_ms(plan))


def _plainness(shape: Shape) -> tuple[bool, bool]:
    workers = math.prod(shape)
    return shape[0] != workers, shape[2] != workers


def _seems(plan: Plan) -> tuple[bool, float]:
    """Plans without turns first, then by the time that they should take."""
    workers, on_gpu = len(plan.workers), plan.devices[0].on_gpu
    ms = _with_start(plan.predicted_ms, workers, plan.summed, on_gpu and not plan.resident)
    return plan.turns_in_memory > 0, ms


def _least(task: Task, shape: Shape) -> float:
    """What plans on this grid seem to take at least."""
    ms = least_ms(
        task.problem, task.devices, task.grid(shape), first_device=task.first_device,
        resident=task.resident,
    )  # fmt: skip
    from_host = task.devices[0].on_gpu and not task.resident
    summed = shape[2] > 1 or task.reduce == "critical"
    return _with_start(ms, math.prod(shape), summed, from_host)


def _with_start(ms: float, workers: int, summed: bool, from_host: bool) -> float:
    """A predicted time and what workers and sums have to save; `from_host` is of GPUs alone."""
    if not from_host:
        return ms + START_MS * workers
    return ms + (START_SHARE * workers + SUM_SHARE * summed) * ms


def _no_nccl(plan: Plan) -> str | None:
    """Why NCCL cannot sum what it is to sum; None if it can, or there is nothing."""
    if plan.reduce != "nccl" or not plan.summed:
        return None
    other = "the ordered reduction works there"
    if not plan.devices[0].on_gpu:
        kind = plan.devices[0].kind
        return f"the nccl reduction sums between GPUs, and the device is {kind}; {other}"
    for workers in dict.fromkeys(panel.workers for panel in plan.panels):
        units = {plan.devices[plan.workers[w].device].unit for w in workers}
        if len(units) < len(workers):
            return (
                f"the nccl reduction takes a GPU for each worker of a sum; {len(workers)} workers "
                f"of the grid {' x '.join(map(str, plan.grid))} sum on {len(units)} GPU"
                f"{'s' * (len(units) > 1)}; {other}, as do no more workers than GPUs"
            )
    return None


# --- everything at once, or in turns --------------------------------------------------------


def _whole(task: Task, shape: Shape) -> Plan:
    """The plan that has everything on the devices at once."""
    return on_grid(task, task.grid(shape), _whole_cuts(task, shape))


def _whole_cuts(task: Task, shape: Shape) -> Cuts:
    if task.reduce != "critical" and not task.devices[0].host_memory:
        return Cuts(ks=(1,) * _whole_chunks(task, shape))
    return WHOLE


def _whole_chunks(task: Task, shape: Shape) -> int:
    """Chunks of K where memory suffices: several for blocks that would come in too large parts,
    being short and long."""
    if task.resident or task.devices[0].host_memory:
        return 1
    m, n, k = sides(task.problem, shape)
    uncut = (
        side * k * task.problem.operand_size
        for side, operand in ((m, "A"), (n, "B"))
        if side < 2 * PART_SIDE[operand]
    )
    return max(1, min(max(uncut, default=0) // LARGEST_PART_BYTES, k // LEAST_CHUNK))


def _k_cuts(
    task: Task, shape: Shape, as_whole: tuple[int, ...] | None
) -> list[tuple[tuple[int, ...], int]]:
    """Into what chunks turns may cut K (`Cuts.ks`), each with the side below which tiles of C are
    not cut for its sake: `as_whole`, or as few as may be, in chunks worth a turn, and in the least.
    All but `as_whole` depend on the problem and the grid alone."""
    p = task.problem
    m, n, k = sides(p, shape)
    whole = _whole_chunks(task, shape)
    quick = p.operands != p.dtype or p.compute in QUICKER
    whole_side = WHOLE_SIDE * (QUICK_TURNS if quick else 1)
    tile = min(m, CHUNK_SIDE * 2) + min(n, CHUNK_SIDE * 2)
    length = max(LEAST_CHUNK, CHUNK_BYTES // max(1, tile * p.operand_size))
    chunks = max(whole, -(-k // length))
    least = max(chunks, 1 << math.ceil(math.log2(max(1, k / LEAST_CHUNK))))
    equal = [(1,) * count for count in (whole, chunks, least)]
    return [(as_whole or equal[0], whole_side), (equal[1], CHUNK_SIDE), (equal[2], LEAST_TILE)]


def _in_turns(
    task: Task, shape: Shape, as_whole: tuple[int, ...] | None = None
) -> tuple[Plan | None, int]:
    """The work in turns that fit the devices' memory, C in as large tiles as may be and K in as few
    chunks, or at first in those of `as_whole`; None if nothing fits. And the least bytes that turns
    take where most are taken."""
    grid, least = task.grid(shape), sys.maxsize
    m, n, _k = sides(task.problem, shape)
    for ks, least_side in _k_cuts(task, shape, as_whole):
        rows = cols = 1
        while True:
            cuts = Cuts(rows, cols, ks, TURNS_IN_MEMORY)
            plan = on_grid(task, grid, cuts)
            least = min(least, max(memory_needs(plan)))
            if not memory_shortfall(plan):
                if plan.turns > MOST_TURNS:
                    raise OutOfMemoryError(
                        f"{task.problem} needs {plan.turns} turns of a worker in the memory of "
                        f"{task.devices[0].name}, and {MOST_TURNS} are the most; more memory or "
                        "devices, or smaller products, take fewer"
                    )
                return plan, least
            if max(m // rows, n // cols) <= least_side:
                break
            if m // rows >= n // cols:
                rows *= 2
            else:
                cols *= 2
    return None, least


def memory_needs(plan: Plan) -> list[int]:
    """For each device the bytes that the plan takes of the hardware behind it."""
    needs: dict[int, int] = defaultdict(int)
    for index, spec in enumerate(plan.devices):
        needs[spec.unit] += plan.memory_bytes(index)
    return [needs[spec.unit] for spec in plan.devices]


def memory_shortfall(plan: Plan) -> str | None:
    """What does not fit, with both figures; None if everything does."""
    count = len(plan.workers)
    ways = ["fewer threads"] * (count > 1) + ["--split rows"] * (plan.grid[2] > 1)
    for spec, need in zip(plan.devices, memory_needs(plan), strict=True):
        if need > spec.memory_bytes:
            return (
                f"{plan.problem} by {plan.split} over {count} worker{'s' * (count > 1)} needs "
                f"{in_words(need)} on {spec.name}, which has {in_words(spec.memory_bytes)} free; "
                f"{' or '.join([*ways, 'more devices'])} would need less there"
            )
    return None
