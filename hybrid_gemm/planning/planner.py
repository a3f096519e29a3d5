"""Who does what: a problem and devices in, a plan out. Pure.

`rows` cuts the cuboid m x n x k along m, `cols` along k, and both are the grid pm x pn x pk
with one long side. Workers of one (pm, pn) cell make partials of the same block of C. Within
its share a worker goes panel by panel, so that copies and sums overlap with multiplying, and
where memory is short in turns, so that its device has only what the next turns need.

What turns do to results. Turns that cut C alone change no sum. Where K is cut as well, each
chunk's product is added to C's elements, which rounds differently from one product over all of K.
K is cut at one of three fixed sets of boundaries (`_k_cuts`), which depend on the problem and the
grid alone; the memory decides only which of the three is taken, and the finest are for devices
with less than about 200 MB. So a product over the same grid, by the same kernel, has at most three
results, whatever memory is free, and `Plan.turns_in_memory` = 0 always means the first. A kernel
chosen by `kernel="auto"`, and a library's own choice of algorithm, may depend on the shape of a
tile, and so on the memory: name a kernel where bits matter.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from ..errors import OutOfMemoryError, UsageError, in_words
from ..problem import Problem
from .cost_model import QUICKER, predict_ms, tflops
from .hardware import DeviceSpec
from .partition import (
    Box,
    Grid,
    Shape,
    Span,
    candidates,
    cut_span,
    sides,
    strips_along_rows,
)
from .plan import NOWHERE, Block, Homes, Panel, Plan, Strip, Worker

# A part of A or B: so large that a copy and a product are worth starting, and so small that
# the first product starts early.
PART_BYTES, MOST_PARTS = 16 << 20, 16
PART_SIDE = {"A": 1024, "B": 2048}  # columns of a row-major B are short runs of bytes
# Columns of B in a part where multiplying takes less time than B's way to the device, since longer
# runs travel faster from page-locked arrays; strict fp32 would wait longer for its first operands.
# Two parts at least.
QUICK_SIDE = 8192
PANEL_ELEMENTS, PANEL_ROWS = 16 << 20, 512  # of partials that are summed while others multiply
# What one thread takes to start a panel for each two workers that make it, of which one reads from
# the other: a copy, a wait, and a share of the rest (docs/results/starting4_h200.json).
PAIR_START_MS = 0.015
LARGEST_PART_BYTES = 256 << 20  # a block of A or B whose sides are short is cut along K into such
# What a worker more has to save: docs/results/small2_h200.json has where two GPUs pass one.
START_MS = 2.0
REDUCTIONS = ("ordered", "critical", "nccl")

# Turns, where memory is short. A tile's larger side is at least about half of WHOLE_SIDE with K
# whole (times QUICK_TURNS for quicker arithmetic), or of CHUNK_SIDE with K in chunks whose operands
# take CHUNK_BYTES: with smaller ones the link to the host would decide. Where that does not fit,
# chunks of at most LEAST_CHUNK of K are multiplied in tiles down to LEAST_TILE.
TURNS_IN_MEMORY = 2  # one is brought while another is multiplied
WHOLE_SIDE, QUICK_TURNS, CHUNK_SIDE, CHUNK_BYTES = 16384, 4, 4096, 256 << 20
LEAST_CHUNK, LEAST_TILE = 512, 256


@dataclass(frozen=True)
class Task:
    """What is planned for: all but how the cuboid is cut. The fields are `Plan`'s."""

    problem: Problem
    devices: tuple[DeviceSpec, ...]
    kernel: str = ""
    reduce: str = "ordered"
    resident: bool = False
    homes: Homes = NOWHERE

    @property
    def align(self) -> int:
        """Elements on whose multiples cuts fall where that costs nothing."""
        return self.devices[0].alignment

    @property
    def first_device(self) -> int:
        """The device of worker 0: where C lies, or B or A, if one of them lies on a device."""
        return next((home for home in reversed(self.homes) if home is not None), 0)

    def grid(self, shape: Shape) -> Grid:
        """The cuboid cut evenly."""
        return Grid.even(self.problem, shape, self.align)


@dataclass(frozen=True)
class Cuts:
    """How the workers' shares are cut in time: a block of C into rows x cols tiles, K into `ks`
    chunks. `turns_in_memory` is the plan's; `panels` says whether tiles go panel by panel."""

    rows: int = 1
    cols: int = 1
    ks: int = 1
    turns_in_memory: int = 0
    panels: bool = True


WHOLE = Cuts(panels=False)


# --- choosing a grid ------------------------------------------------------------------------


def make_plan(  # the parameters are the caller's options, each with its default
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
    counted from where C lies, or B or A, if one of them lies on a device).

    `rows` is the grid (workers, 1, 1), `cols` (1, 1, workers); `auto` takes the grid that the
    cost model finds fastest of those that fit and that `reduce` can sum, and of several numbers
    of `workers` as many as are worth starting. What does not fit whole is done in turns, unless
    it is `resident` or summed in another way than "ordered". Raises `UsageError` for a split,
    grid or reduction that is not possible or a worker count below 1, `OutOfMemoryError` if a
    device is too small for any turn.
    """
    counts = [workers] if isinstance(workers, int) else sorted(workers, reverse=True)
    shapes = candidates(counts, split, grid)
    if reduce not in REDUCTIONS:
        raise UsageError(f"no reduction is called {reduce!r}; there are {', '.join(REDUCTIONS)}")
    if reduce == "critical" and (split != "cols" or grid):
        raise UsageError(f"the critical reduction sums a split by cols; the split is {split}")
    # Rows first, then cols: of equals the first is taken.
    shapes.sort(key=lambda shape: (-math.prod(shape), *_plainness(shape)))
    task = Task(problem, tuple(devices), kernel, reduce, resident, homes)
    plans, shortfalls, refusals = [], [], []
    for shape in shapes:
        whole = _whole(task, shape)
        if refusal := _no_nccl(whole):
            refusals.append(refusal)
            continue
        plan: Plan | None = whole
        if shortfall := memory_shortfall(whole):
            turns = not resident and (reduce == "ordered" or not whole.summed)
            if not (turns or resident):
                shortfall += ", and the ordered reduction goes in turns"
            shortfalls.append(shortfall)
            plan = _in_turns(task, shape) if turns else None
        if plan:
            plans.append(replace(plan, predicted_ms=predict_ms(plan)))
    if not plans and shortfalls:
        raise OutOfMemoryError(shortfalls[0])
    if not plans:
        raise UsageError(refusals[0])
    return min(plans, key=_seems)


def _plainness(shape: Shape) -> tuple[bool, bool]:
    workers = math.prod(shape)
    return shape[0] != workers, shape[2] != workers


def _seems(plan: Plan) -> tuple[bool, float]:
    """Plans without turns first, then by the time that they should take."""
    return plan.turns_in_memory > 0, plan.predicted_ms + START_MS * len(plan.workers)


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
    cuts = WHOLE
    if task.reduce != "critical" and not task.devices[0].host_memory:
        cuts = Cuts(ks=_whole_chunks(task, shape))
    return on_grid(task, task.grid(shape), cuts)


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


def _k_cuts(task: Task, shape: Shape) -> list[tuple[int, int]]:
    """Into how many chunks turns may cut K, each with the side below which tiles of C are not cut
    for its sake: as the whole plan does, in chunks worth a turn, and in the least. These depend on
    the problem and the grid alone."""
    p = task.problem
    m, n, k = sides(p, shape)
    whole = _whole_chunks(task, shape)
    quick = p.operands != p.dtype or p.compute in QUICKER
    whole_side = WHOLE_SIDE * (QUICK_TURNS if quick else 1)
    tile = min(m, CHUNK_SIDE * 2) + min(n, CHUNK_SIDE * 2)
    length = max(LEAST_CHUNK, CHUNK_BYTES // max(1, tile * p.operand_size))
    chunks = max(whole, -(-k // length))
    least = max(chunks, 1 << math.ceil(math.log2(max(1, k / LEAST_CHUNK))))
    return [(whole, whole_side), (chunks, CHUNK_SIDE), (least, LEAST_TILE)]


def _in_turns(task: Task, shape: Shape) -> Plan | None:
    """The work in turns that fit the devices' memory: C in as large tiles as may be, and K in as
    few chunks; None if nothing fits."""
    grid = task.grid(shape)
    m, n, _k = sides(task.problem, shape)
    for ks, least_side in _k_cuts(task, shape):
        rows = cols = 1
        while True:
            cuts = Cuts(rows, cols, ks, TURNS_IN_MEMORY)
            if not memory_shortfall(on_grid(task, grid, cuts, sample=True)):
                return on_grid(task, grid, cuts)
            if max(m // rows, n // cols) <= least_side:
                break
            if m // rows >= n // cols:
                rows *= 2
            else:
                cols *= 2
    return None


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


# --- one grid -------------------------------------------------------------------------------


def on_grid(task: Task, grid: Grid, cuts: Cuts = WHOLE, *, sample: bool = False) -> Plan:
    """The plan on a grid. A `sample` has of tiles and chunks of each size only two: it takes the
    same memory, for no more than two turns and two tiles are in memory together."""
    return _OnGrid(task, grid, cuts, sample).plan()


class _OnGrid:
    """Makes the plan of one task on one grid with these cuts."""

    def __init__(self, task: Task, grid: Grid, cuts: Cuts, sample: bool):
        self.task, self.grid, self.cuts, self.sample = task, grid, cuts, sample
        self.align = task.align
        self.depth = max(map(len, grid.ks), default=0) // cuts.ks  # of a turn, along K
        self.most_panels = self._panels_in_time()
        self.workers: list[Worker] = []
        self.panels: list[Panel] = []
        self.blocks: list[Block] = []  # of turns

    def plan(self) -> Plan:
        """The plan; called once."""
        for rows in self.grid.rows:
            for cols in self.grid.cols:
                self._add_cell(self._tiles(rows, cols))
        task = self.task
        blocks = self.blocks if self.cuts.turns_in_memory else self._shared_blocks()
        return Plan(
            task.problem, self.grid.split, self.grid.shape, task.devices, tuple(self.workers),
            tuple(blocks), tuple(self.panels), task.kernel, task.reduce, task.resident,
            self.cuts.turns_in_memory, task.homes,
        )  # fmt: skip

    # --- boxes ----------------------------------------------------------------------------

    def _tiles(self, rows: Span, cols: Span) -> list[tuple[Span, Span]]:
        """Rows and columns of the tiles of a block of C."""
        return [
            (r, c)
            for r in self._sampled(cut_span(rows, self.cuts.rows, self.align))
            for c in self._sampled(cut_span(cols, self.cuts.cols, self.align))
            if len(r) and len(c)
        ]

    def _sampled(self, spans: list[Span]) -> list[Span]:
        if not self.sample:
            return spans
        seen: dict[int, int] = defaultdict(int)
        kept = []
        for span in spans:
            seen[len(span)] += 1
            if seen[len(span)] <= 2:
                kept.append(span)
        return kept

    def _add_cell(self, tiles: list[tuple[Span, Span]]) -> None:
        """The workers that share a block of C, one for each part of K, and its panels."""
        cell = []
        for q, ks in enumerate(self.grid.ks):
            index = len(self.workers)
            boxes: tuple[Box, ...] = ()
            # With K empty the first worker still owes beta * C.
            if len(ks) or (q == 0 and not self.task.problem.k):
                count = min(self.cuts.ks, max(1, len(ks)))
                chunks = self._sampled(cut_span(ks, count, self.align))
                boxes = tuple(Box(rows, cols, chunk) for rows, cols in tiles for chunk in chunks)
            device = (self.task.first_device + index) % len(self.task.devices)
            self.workers.append(Worker(index, device, boxes))
            if boxes:
                cell.append(index)
        members = tuple(cell)  # one tuple, which all strips of the cell share
        for number, (rows, cols) in enumerate(tiles):
            self.panels += self._panels(rows, cols, members, number)
        if self.cuts.turns_in_memory:
            self._add_own_blocks(tiles, self.workers[-len(self.grid.ks) :])

    # --- panels and strips ----------------------------------------------------------------

    def _panels_in_time(self) -> int:
        """How many panels one thread starts while they are multiplied."""
        shape, problem = self.grid.shape, self.task.problem
        workers = math.prod(shape)
        rates = {spec.unit: tflops(spec, problem) for spec in self.task.devices[:workers]}
        ms = problem.flops / (sum(rates.values()) * 1e9)
        return int(ms / (PAIR_START_MS * workers * shape[2]))

    def _panels(
        self, rows: Span, cols: Span, cell: tuple[int, ...], number: int
    ) -> Iterator[Panel]:  # fmt: skip
        """The panels of tile `number`, in the order in which they become possible."""
        if not self.cuts.panels:
            shapes = [(rows, cols)]
        elif self.task.resident:
            shapes = self._resident_panels(rows, cols, len(cell))
        else:
            shapes = _arms(self._cut("A", rows), self._cut("B", cols))
        for r, c in shapes:
            yield Panel(r, c, cell, tuple(self._strips(r, c, cell)), number)

    def _resident_panels(self, rows: Span, cols: Span, workers: int) -> list[tuple[Span, Span]]:
        """Panels where A and B are on the devices: several if they are summed meanwhile."""
        count = 1
        if workers > 1:
            count = min(
                MOST_PARTS, len(rows) // PANEL_ROWS, len(rows) * len(cols) // PANEL_ELEMENTS
            )  # fmt: skip
        *parts, last = cut_span(rows, max(1, min(count, self.most_panels - 1)), self.align)
        # The sum of the last panel is what all wait for.
        ends = cut_span(last, 2 if count > 1 else 1, self.align)
        return [(part, cols) for part in (*parts, *ends)]

    def _strips(self, rows: Span, cols: Span, cell: tuple[int, ...]) -> Iterator[Strip]:
        """The strips of a panel of C: along its rows, or its columns if rows are too few."""
        if not cell:
            return
        along_rows = strips_along_rows(rows, cols, len(cell))
        spans = cut_span(rows if along_rows else cols, len(cell), self.align)
        for owner, span in zip(cell, spans, strict=True):
            if len(span):
                r, c = (span, cols) if along_rows else (rows, span)
                yield Strip(r, c, owner, cell)

    # --- blocks of A and B ----------------------------------------------------------------

    def _cut(self, operand: str, span: Span) -> tuple[Span, ...]:
        """The parts in which a turn's block of A (`span` are its rows) or B (its columns)
        comes."""
        problem = self.task.problem
        most = len(span) // PART_SIDE[operand]
        if operand == "B" and (problem.compute == "tf32" or problem.operands != problem.dtype):
            most = min(most // 2, max(2, len(span) // QUICK_SIDE))
        size = len(span) * self.depth * problem.operand_size
        return tuple(
            cut_span(span, max(1, min(MOST_PARTS, most, size // PART_BYTES)), self.align)
        )  # fmt: skip

    def _arriving(self, operand: str, side: Span) -> tuple[Span, ...]:
        whole = not self.cuts.panels or self.task.resident
        return (side,) if whole else self._cut(operand, side)

    def _add_own_blocks(
        self, tiles: list[tuple[Span, Span]], workers: Sequence[Worker]
    ) -> None:  # fmt: skip
        """What the workers of a cell need in turns: each has blocks of its own."""
        parts = [(self._arriving("A", rows), self._arriving("B", cols)) for rows, cols in tiles]
        for worker in workers:
            device, index = worker.device, worker.index
            each, on = (index,), (device,)
            chunks = len(worker.boxes) // max(1, len(tiles))
            for turn, box in enumerate(worker.boxes):
                if not len(box.ks):
                    continue
                a, b = parts[turn // chunks]
                self.blocks += (
                    Block("A", box.rows, box.ks, device, each, a, on, turn),
                    Block("B", box.ks, box.cols, device, each, b, on, turn),
                )

    def _shared_blocks(self) -> Iterator[Block]:
        """What devices need all at once: workers and devices share blocks."""
        needed: dict[tuple[str, Span, Span, int], dict[int, list[int]]] = {}
        for worker in self.workers:
            for turn, box in enumerate(worker.boxes):
                for key in (("A", box.rows, box.ks, turn), ("B", box.ks, box.cols, turn)):
                    needed.setdefault(key, {}).setdefault(worker.device, []).append(worker.index)
        for (operand, rows, cols, turn), holders in needed.items():
            if not (len(rows) and len(cols)):
                continue
            parts, sharers = self._arriving(operand, rows if operand == "A" else cols), (*holders,)
            for device, workers in holders.items():
                yield Block(operand, rows, cols, device, (*workers,), parts, sharers, turn)


def _arms(rows: Sequence[Span], cols: Sequence[Span]) -> list[tuple[Span, Span]]:
    """What parts of A and B that come in turn make possible: each, with all that has come of
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
