"""Who does what: a problem and a machine in, a plan out. Pure data, no device.

`rows` cuts the cuboid m x n x k along m, `cols` along k, and both are the grid pm x pn x pk
with one long side. Workers of one (pm, pn) cell hold partials of the same block of C. Within
its share a worker goes panel by panel, so that copies and sums overlap with multiplying, and
where memory is short in turns, so that only what the next ones need is on its device.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..errors import OutOfMemoryError, UsageError, in_words
from ..problem import Problem
from .cost_model import predict_ms, tflops
from .hardware import DeviceSpec
from .partition import Box, Span, _checked, _sides, cut, cut_span, grids, strips_along_rows
from .plan import NOWHERE, Block, Homes, Panel, Plan, Strip, Worker

__all__ = [
    "NOWHERE", "Block", "Box", "DeviceSpec", "Homes", "Panel", "Plan", "Span", "Strip", "Worker",
    "cut", "cut_span", "grids", "make_plan", "memory_needs", "memory_shortfall", "on_grid",
    "strips_along_rows",
]  # fmt: skip

# A part of A or B: so large that a copy and a product are worth starting, and so small that
# the first product starts early.
PART_BYTES, MOST_PARTS = 16 << 20, 16
PART_SIDE = {"A": 1024, "B": 2048}  # columns of a row-major B are short runs of bytes
# Of B where it is multiplied in less time than it travels, for longer runs travel faster from
# page-locked arrays; strict fp32 would wait longer for its first operands. Two at least.
QUICK_SIDE = 8192
PANEL_ELEMENTS, PANEL_ROWS = 16 << 20, 512  # of partials that are summed while others multiply
# What one thread takes to start a panel for each two workers that make it, of which one reads from
# the other: a copy, a wait, and a share of the rest (docs/results/starting4_h200.json).
PAIR_START_MS = 0.015
LARGEST_PART_BYTES = 256 << 20  # where neither side can be cut, K is
LEAST_CHUNK, LEAST_TILE = 512, 256  # of K, and a tile's sides, where memory is short
TURNS_IN_MEMORY = 2  # turns: one is brought while another is multiplied
# What a worker more has to save: docs/results/small2_h200.json has where two GPUs pass one.
START_MS = 2.0
REDUCTIONS = ("ordered", "critical", "nccl")


@dataclass(frozen=True)
class Cuts:
    """How the workers' shares are cut in time: a block of C into rows x cols tiles, K into
    chunks. `turns_in_memory` is the plan's; `panels` is whether tiles go panel by panel."""

    rows: int = 1
    cols: int = 1
    ks: int = 1
    turns_in_memory: int = 0
    panels: bool = True


WHOLE = Cuts(panels=False)


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
) -> Plan:
    """The plan for `workers` workers over `devices` (worker i on device i mod their number,
    counted from where C lies, or A or B, if one of them lies on a device).

    `rows` is the grid (workers, 1, 1), `cols` (1, 1, workers); `auto` takes the grid that the
    cost model finds fastest of those that fit and that `reduce` can sum, and of several numbers
    of `workers` as many as are worth starting. What does not fit whole is done in turns, unless
    it is `resident` or summed in another way than "ordered". Raises `UsageError` for a split,
    grid or reduction that is not possible or a worker count below 1, `OutOfMemoryError` if a
    device is too small for any turn.
    """
    counts = [workers] if isinstance(workers, int) else sorted(workers, reverse=True)
    if counts[-1] < 1:
        raise UsageError(f"{counts[-1]} workers asked for; it takes at least 1")
    most = counts[0]
    named = {"rows": (most, 1, 1), "cols": (1, 1, most)}
    if split != "auto" and split not in named:
        raise UsageError(f"no split is called {split!r}; there are rows, cols and auto")
    if reduce not in REDUCTIONS:
        raise UsageError(f"no reduction is called {reduce!r}; there are {', '.join(REDUCTIONS)}")
    if reduce == "critical" and (split != "cols" or grid):
        raise UsageError(f"the critical reduction sums a split by cols; the split is {split}")
    if grid is not None:
        candidates = [_checked(grid, most, split)]
    elif split != "auto":
        candidates = [named[split]]
    else:
        candidates = [shape for count in counts for shape in grids(count)]
    plans, shortfalls, refusals = [], [], []
    for shape in candidates:
        name = {shape[2]: "cols", shape[0]: "rows"}.get(math.prod(shape), "grid")
        whole = _plan(problem, devices, shape, name, kernel, reduce, resident, homes)
        plan = whole
        if refusal := _no_nccl(whole):
            refusals.append(refusal)
            continue
        if shortfall := memory_shortfall(whole):
            turns = not resident and (reduce == "ordered" or not whole.summed)
            if not (turns or resident):
                shortfall += ", and the ordered reduction goes in turns"
            shortfalls.append(shortfall)
            plan = _in_turns(whole) if turns else None
        if plan:
            plans.append(replace(plan, predicted_ms=predict_ms(plan)))
    if not plans and shortfalls:
        raise OutOfMemoryError(shortfalls[0])
    if not plans:
        raise UsageError(refusals[0])
    return min(
        plans,
        key=lambda plan: (
            plan.turns_in_memory > 0,
            plan.predicted_ms + START_MS * len(plan.workers),
        ),
    )


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


def _plan(problem, devices, grid, split, kernel, reduce, resident, homes) -> Plan:
    """The plan that has everything on the devices at once."""
    cuts = WHOLE
    if reduce != "critical" and not devices[0].host_memory:
        cuts = Cuts(ks=_chunks(problem, grid) if not resident else 1)
    return on_grid(
        problem, tuple(devices), grid, split, kernel, reduce, resident, cuts=cuts, homes=homes
    )


def _chunks(problem: Problem, grid) -> int:
    """Chunks of K for blocks that would come in too large parts, being short and long."""
    m, n, k = _sides(problem, grid)
    uncut = (
        side * k * problem.operand_size
        for side, operand in ((m, "A"), (n, "B"))
        if side < 2 * PART_SIDE[operand]
    )
    return max(1, min(max(uncut, default=0) // LARGEST_PART_BYTES, k // LEAST_CHUNK))


def _in_turns(whole: Plan) -> Plan | None:
    """The same work in turns that fit the devices' memory: tiles of C as large as may be, and
    K in as few chunks; None if nothing fits."""
    m, n, k = _sides(whole.problem, whole.grid)
    rows = cols = 1
    while True:
        ks = 1
        while True:
            plan = on_grid(
                whole.problem, whole.devices, whole.grid, whole.split, whole.kernel, whole.reduce,
                whole.resident, cuts=Cuts(rows, cols, ks, TURNS_IN_MEMORY), homes=whole.homes,
            )  # fmt: skip
            if not memory_shortfall(plan):
                return plan
            if k // ks <= LEAST_CHUNK:
                break
            ks *= 2
        if max(m // rows, n // cols) <= LEAST_TILE:
            return None
        if m // rows >= n // cols:
            rows *= 2
        else:
            cols *= 2


def on_grid(
    problem, devices, grid, split, kernel, reduce, resident, spans=None, cuts: Cuts = WHOLE,
    homes: Homes = NOWHERE,
) -> Plan:  # fmt: skip
    """The plan on a grid pm x pn x pk; `spans` are its cuts along m, n and k (default: even)."""
    first = next((home for home in reversed(homes) if home is not None), 0)
    align = devices[0].alignment
    sizes = (problem.m, problem.n, problem.k)
    spans = spans or [cut(size, parts, align) for size, parts in zip(sizes, grid, strict=True)]
    pm, pn, pk = grid
    workers, panels = [], []
    depth = max(map(len, spans[2]), default=0) // cuts.ks
    most = _panels_in_time(problem, devices, grid)
    for i in range(pm):
        for j in range(pn):
            tiles = [
                (rows, cols)
                for rows in cut_span(spans[0][i], cuts.rows, align)
                for cols in cut_span(spans[1][j], cuts.cols, align)
                if len(rows) and len(cols)
            ]
            cell = []
            for q in range(pk):
                index, ks = len(workers), spans[2][q]
                # With K empty the first worker still owes beta * C.
                alive = len(ks) or (q == 0 and not problem.k)
                boxes = tuple(
                    Box(rows, cols, chunk)
                    for rows, cols in tiles
                    for chunk in cut_span(ks, min(cuts.ks, max(1, len(ks))), align)
                    if alive
                )
                workers.append(Worker(index, (first + index) % len(devices), boxes))
                if boxes:
                    cell.append(index)
            for number, tile in enumerate(tiles):
                panels += _panels(
                    *tile, tuple(cell), number, depth, problem, align, cuts, resident, most
                )
    return Plan(
        problem, split, grid, devices, tuple(workers),
        _blocks(workers, cuts, depth, problem, align, resident), tuple(panels),
        kernel, reduce, resident, cuts.turns_in_memory, homes,
    )  # fmt: skip


def _panels_in_time(problem: Problem, devices: Sequence[DeviceSpec], grid) -> int:
    """How many panels one thread starts while they are multiplied."""
    workers = math.prod(grid)
    rates = {spec.unit: tflops(spec, problem) for spec in devices[:workers]}
    ms = problem.flops / (sum(rates.values()) * 1e9)
    return int(ms / (PAIR_START_MS * workers * grid[2]))


def _panels(
    rows, cols, cell, number, depth, problem, align, cuts, resident, most
) -> list[Panel]:  # fmt: skip
    """The panels of a tile in the order in which they become possible; where data is on the
    devices, `most` of them."""
    if not cuts.panels:
        shapes = [(rows, cols)]
    elif resident:
        count = 1
        if len(cell) > 1:
            count = min(
                MOST_PARTS, len(rows) // PANEL_ROWS, len(rows) * len(cols) // PANEL_ELEMENTS
            )
        *parts, last = cut_span(rows, max(1, min(count, most - 1)), align)
        # The sum of the last one is what all wait for.
        shapes = [(part, cols) for part in (*parts, *cut_span(last, 2 if count > 1 else 1, align))]
    else:
        parts = (_cut(x, span, depth, problem, align) for x, span in (("A", rows), ("B", cols)))
        shapes = _arms(*parts)
    return [Panel(r, c, cell, tuple(_strips(r, c, cell, align)), number) for r, c in shapes]


def _arms(rows: list[Span], cols: list[Span]):
    """What parts of A and B that come in turn make possible: each, with all that is there of
    the other. So what can be multiplied grows as fast as it may."""
    i = j = 1
    shapes = [(rows[0], cols[0])]
    while i < len(rows) or j < len(cols):
        if j >= len(cols) or (i < len(rows) and i * len(cols) <= j * len(rows)):
            shapes.append((rows[i], Span(cols[0].start, cols[j - 1].stop)))
            i += 1
        else:
            shapes.append((Span(rows[0].start, rows[i - 1].stop), cols[j]))
            j += 1
    return shapes


def _cut(operand: str, span: Span, depth: int, problem: Problem, align: int) -> list[Span]:
    """The parts of a block that is `depth` long along K."""
    most = len(span) // PART_SIDE[operand]
    if operand == "B" and (problem.compute == "tf32" or problem.operands != problem.dtype):
        most = min(most // 2, max(2, len(span) // QUICK_SIDE))
    size = len(span) * depth * problem.operand_size
    return cut_span(span, max(1, min(MOST_PARTS, most, size // PART_BYTES)), align)


def _strips(rows: Span, cols: Span, cell: Sequence[int], align: int) -> list[Strip]:
    """The strips of one panel of C: along its rows, or its columns if rows are too few."""
    if not cell:
        return []
    along_rows = strips_along_rows(rows, cols, len(cell))
    whole = rows if along_rows else cols
    out = []
    for owner, span in zip(cell, cut_span(whole, len(cell), align), strict=True):
        if not len(span):
            continue
        r, c = (span, cols) if along_rows else (rows, span)
        out.append(Strip(r, c, owner, tuple(cell)))
    return out


def _blocks(workers, cuts: Cuts, depth, problem, align, resident) -> tuple[Block, ...]:
    """What each device needs. Workers and devices share blocks, unless only a few turns' are
    held: then each worker has its own."""
    needed: dict[tuple, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for worker in workers:
        for turn, box in enumerate(worker.boxes):
            own = (turn, worker.index) if cuts.turns_in_memory else (turn,)
            needed["A", box.rows, box.ks, *own][worker.device].append(worker.index)
            needed["B", box.ks, box.cols, *own][worker.device].append(worker.index)
    blocks = []
    for (operand, rows, cols, turn, *_), holders in needed.items():
        if not (len(rows) and len(cols)):
            continue
        side = rows if operand == "A" else cols
        parts = [side]
        if cuts.panels and not resident:
            parts = _cut(operand, side, depth, problem, align)
        for device, who in holders.items():
            blocks.append(
                Block(operand, rows, cols, device, tuple(who), tuple(parts), tuple(holders), turn)
            )
    return tuple(blocks)


def memory_needs(plan: Plan) -> list[int]:
    """For each device the bytes that the plan takes of the hardware behind it."""
    needs = defaultdict(int)
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
