"""The plan of one task on one grid: blocks of C, panels, strips and parts of A and B. Pure."""

from __future__ import annotations

import functools
import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from ..problem import Problem
from .cost_model import tflops
from .hardware import DeviceSpec
from .partition import Grid, Shape, Span, cut_in, cut_span, strips_along_rows
from .plan import NOWHERE, Block, Homes, Panel, Plan, Strip, Summands, Worker
from .repeated import Boxes, Repeated, Spans

# A part of A or B: so large that a copy and a product are worth starting, and so small that
# the first product starts early.
PART_BYTES, MOST_PARTS = 16 << 20, 16
PART_SIDE = {"A": 1024, "B": 2048}  # columns of a row-major B are short runs of bytes
# Columns of B in a part where multiplying takes less time than B's way to the device, since longer
# runs travel faster from page-locked arrays; strict fp32 would wait longer for its first operands.
# Two parts at least.
QUICK_SIDE, ALL_COLUMNS = 8192, 1 << 40
PANEL_ELEMENTS, PANEL_ROWS = 16 << 20, 512  # of partials that are summed while others multiply
# What one thread takes to start a panel for each two workers that make it, of which one reads from
# the other: a copy, a wait, and a share of the rest (docs/results/starting4_h200.json and
# starting8_h200.json). All is to be started in half of the time that products take.
PAIR_START_MS = 0.02
LARGEST_PART_BYTES = 256 << 20  # a block of A or B whose sides are short is cut along K into such


@dataclass(frozen=True)
class Task:
    """What is planned for: all but how the cuboid is cut. The fields are `Plan`'s."""

    problem: Problem
    devices: tuple[DeviceSpec, ...]
    kernel: str = ""
    reduce: str = "ordered"
    resident: bool = False
    homes: Homes = NOWHERE
    page_locked: bool = False

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
class Pieces:
    """In which parts operands come from the host. A part of B has about `columns` columns (0: as
    many as the arithmetic is known to want; `ALL_COLUMNS`: its rows are whole, which is one run of
    bytes); all of B has come with one `lead`th of A. Parts may be `finer` times as fine as others,
    in rows, columns and bytes."""

    columns: int = 0
    lead: int = 1
    finer: int = 1


# Small parts of both in turn let products start early, and keep them busy where they take longest.
# Where copies do, B comes first: then each part of A makes whole rows of C, which leave in one run.
PIECES = (
    Pieces(), Pieces(2048, 4), Pieces(4096, 4), Pieces(8192, 4), Pieces(8192, 16),
    Pieces(finer=2), Pieces(lead=4, finer=2), Pieces(ALL_COLUMNS, 16),
)  # fmt: skip


@dataclass(frozen=True)
class Cuts:
    """How the workers' shares are cut in time: a block of C into rows x cols tiles, K into chunks
    whose lengths are as the numbers `ks`. `turns_in_memory` is the plan's; `panels` says whether
    tiles go panel by panel, and `pieces` how their operands come."""

    rows: int = 1
    cols: int = 1
    ks: tuple[int, ...] = (1,)
    turns_in_memory: int = 0
    panels: bool = True
    pieces: Pieces = PIECES[0]


WHOLE = Cuts(panels=False)


def on_grid(task: Task, grid: Grid, cuts: Cuts = WHOLE) -> Plan:
    """The plan on a grid."""
    return _OnGrid(task, grid, cuts).plan()


def distinct(task: Task, grid: Grid, cuts: Cuts, pieces: Sequence[Pieces]) -> list[Pieces]:
    """Of these pieces those that differ on a grid, where matrices come panel by panel."""
    # Spans of one length are cut alike.
    rows, cols = ({len(x): x for x in spans}.values() for spans in (grid.rows, grid.cols))
    found: dict[object, Pieces] = {}
    for each in pieces:
        made = _OnGrid(task, grid, replace(cuts, pieces=each))
        found.setdefault(tuple(tuple(made.arms(r, c)) for r in rows for c in cols), each)
    return [*found.values()]


# Workers that finish strips, each with its strips' summands.
_Owners = list[tuple[int, Summands]]


@dataclass(frozen=True)
class _Cell:
    """The workers that share a block of C, one for each part of K, and the block's tiles. `members`
    are those that have something to multiply."""

    tiles: Boxes
    workers: tuple[Worker, ...]
    members: tuple[int, ...]


class _OnGrid:
    """Makes the plan of one task on one grid with these cuts."""

    def __init__(self, task: Task, grid: Grid, cuts: Cuts):
        self.task, self.grid, self.cuts = task, grid, cuts
        self.align = task.align
        longest = max(map(len, grid.ks))
        self.depth = longest * max(cuts.ks) // sum(cuts.ks)  # of a turn, along K
        self.most_panels = self._panels_in_time()

    def plan(self) -> Plan:
        """The plan."""
        cells = self._cells()
        task, reduce, turns = self.task, self.task.reduce, self.cuts.turns_in_memory
        if reduce == "nccl" and len(self.grid.ks) == 1:  # which would sum nothing
            reduce = "ordered"
        workers = tuple(worker for cell in cells for worker in cell.workers)
        blocks = Repeated(functools.partial(self._own_blocks if turns else self._shared, cells))
        panels = Repeated(functools.partial(self._all_panels, cells))
        return Plan(
            task.problem, self.grid.split, self.grid.shape, task.devices, workers, blocks, panels,
            task.kernel, reduce, task.resident, turns, task.homes, task.page_locked,
        )  # fmt: skip

    def _cells(self) -> list[_Cell]:
        """The workers of each block of C."""
        grid, cuts, problem, devices = self.grid, self.cuts, self.task.problem, self.task.devices
        sides = [
            [Spans(filter(len, cut_span(span, parts, self.align))) for span in spans]
            for spans, parts in ((grid.rows, cuts.rows), (grid.cols, cuts.cols))
        ]
        chunks = [
            Spans(cut_in(ks, cuts.ks[: max(1, len(ks))], self.align))
            # With K empty the first worker still owes beta * C.
            if len(ks) or (q == 0 and not problem.k) else Spans()
            for q, ks in enumerate(grid.ks)
        ]  # fmt: skip
        depth, first, cells = Spans([Span(0, problem.k)]), self.task.first_device, []
        for number, (rows, cols) in enumerate(itertools.product(*sides)):
            workers = [
                Worker(i, (first + i) % len(devices), Boxes(rows, cols, ks))
                for i, ks in enumerate(chunks, number * len(chunks))
            ]
            members = tuple(worker.index for worker in workers if worker.boxes)
            cells.append(_Cell(Boxes(rows, cols, depth), (*workers,), members))
        return cells

    # --- panels and strips ----------------------------------------------------------------

    def _all_panels(self, cells: Sequence[_Cell], firsts: bool) -> Iterator[tuple[Panel, int]]:
        """Each panel, or the `firsts` of each kind, with how many there are."""
        for cell in cells:
            owners = self._owners(cell)  # which all panels of the cell share
            for number, tile, times in cell.tiles.numbered(firsts):
                for rows, cols in self._panels(tile.rows, tile.cols, len(cell.members)):
                    strips = tuple(self._strips(rows, cols, owners))
                    yield Panel(rows, cols, cell.members, strips, number), times

    def _panels_in_time(self) -> int:
        """How many panels one thread starts while they are multiplied."""
        shape, problem = self.grid.shape, self.task.problem
        workers = math.prod(shape)
        rates = {spec.unit: tflops(spec, problem) for spec in self.task.devices[:workers]}
        ms = problem.flops / (sum(rates.values()) * 1e9)
        return int(0.5 * ms / (PAIR_START_MS * workers * shape[2]))

    def _panels(self, rows: Span, cols: Span, workers: int) -> list[tuple[Span, Span]]:
        """The panels of a tile, in the order in which they become possible."""
        if not self.cuts.panels:
            return [(rows, cols)]
        if self.task.resident:
            return self._resident_panels(rows, cols, workers)
        return self.arms(rows, cols)

    def arms(self, rows: Span, cols: Span) -> list[tuple[Span, Span]]:
        """Panels of a block of C whose operands come from the host."""
        return _arms(self._cut("A", rows), self._cut("B", cols), self.cuts.pieces.lead)

    def _resident_panels(self, rows: Span, cols: Span, workers: int) -> list[tuple[Span, Span]]:
        """Panels where A and B are on the devices: several if they are summed meanwhile."""
        count = 1
        if workers > 1:
            count = min(
                MOST_PARTS, len(rows) // PANEL_ROWS, len(rows) * len(cols) // PANEL_ELEMENTS
            )
        *parts, last = cut_span(rows, max(1, min(count, self.most_panels - 1)), self.align)
        # The sum of the last panel is what all wait for.
        ends = cut_span(last, 2 if count > 1 else 1, self.align)
        return [(part, cols) for part in (*parts, *ends)]

    def _owners(self, cell: _Cell) -> _Owners:
        """The workers of a cell that finish strips, each with its strips' summands. One of each
        GPU does, by one kernel; on the CPU every worker's thread."""
        members, device = cell.members, {w.index: w.device for w in cell.workers}
        on: dict[int, tuple[int, ...]] = defaultdict(tuple)
        for w in members:
            on[device[w]] += (w,)
        host = any(self.task.devices[x].host_memory for x in on)
        apart = host or self.task.reduce != "ordered"

        def summands(own: tuple[int, ...] = ()) -> Summands:
            groups = (
                (w, (w,) if apart or on[device[w]] == own else on[device[w]]) for w in members
            )
            return Summands(group for w, group in groups if w == group[0])

        common = summands()  # of all whose device has no other: thousands of ranks share it
        several = {x: summands(on[x]) for x in on if len(on[x]) > 1 and not apart}
        owners = members if host else (workers[0] for workers in on.values())
        return [(w, several.get(device[w], common)) for w in owners]

    def _strips(self, rows: Span, cols: Span, owners: _Owners) -> Iterator[Strip]:
        """The strips of a panel of C: along its rows, or its columns if rows are too few."""
        if not owners:
            return
        along_rows = strips_along_rows(rows, cols, len(owners))
        spans = cut_span(rows if along_rows else cols, len(owners), self.align)
        for (owner, summands), span in zip(owners, spans, strict=True):
            if len(span):
                r, c = (span, cols) if along_rows else (rows, span)
                yield Strip(r, c, owner, summands)

    # --- blocks of A and B ----------------------------------------------------------------

    def _cut(self, operand: str, span: Span) -> tuple[Span, ...]:
        """The parts in which a turn's block of A (`span` are its rows) or B (its columns)
        comes."""
        problem, pieces = self.task.problem, self.cuts.pieces
        most = len(span) * pieces.finer // PART_SIDE[operand]
        if operand == "B" and pieces.columns:
            most = len(span) // pieces.columns
        elif operand == "B" and (problem.compute == "tf32" or problem.operands != problem.dtype):
            most = min(most // 2, max(2, len(span) // QUICK_SIDE))
        size = len(span) * self.depth * problem.operand_size * pieces.finer
        return tuple(
            cut_span(span, max(1, min(MOST_PARTS, most, size // PART_BYTES)), self.align)
        )  # fmt: skip

    def _arriving(self, operand: str, side: Span) -> tuple[Span, ...]:
        whole = not self.cuts.panels or self.task.resident
        return (side,) if whole else self._cut(operand, side)

    def _own_blocks(self, cells: Sequence[_Cell], firsts: bool) -> Iterator[tuple[Block, int]]:
        """What workers need in turns: each has blocks of its own. The `firsts` are as those of
        `_all_panels`."""
        arriving = functools.cache(self._arriving)
        for cell in cells:
            for worker in cell.workers:
                device, each, on = worker.device, (worker.index,), (worker.device,)
                boxes = Boxes(cell.tiles.rows, cell.tiles.cols, worker.chunks)
                for turn, box, times in boxes.numbered(firsts):
                    if len(box.ks):
                        a, b = arriving("A", box.rows), arriving("B", box.cols)
                        yield Block("A", box.rows, box.ks, device, each, a, on, turn), times
                        yield Block("B", box.ks, box.cols, device, each, b, on, turn), times

    def _shared(self, cells: Sequence[_Cell], firsts: bool) -> Iterator[tuple[Block, int]]:
        """What devices need all at once: workers and devices share blocks. Each is of a kind of its
        own."""
        needed: dict[tuple[str, Span, Span, int], dict[int, list[int]]] = {}
        for worker in (worker for cell in cells for worker in cell.workers):
            for turn, box in enumerate(worker.boxes):
                for key in (("A", box.rows, box.ks, turn), ("B", box.ks, box.cols, turn)):
                    needed.setdefault(key, {}).setdefault(worker.device, []).append(worker.index)
        for (operand, rows, cols, turn), holders in needed.items():
            if not (len(rows) and len(cols)):
                continue
            parts, sharers = self._arriving(operand, rows if operand == "A" else cols), (*holders,)
            for device, workers in holders.items():
                yield Block(operand, rows, cols, device, (*workers,), parts, sharers, turn), 1


def _arms(
    rows: Sequence[Span], cols: Sequence[Span], lead: int = 1
) -> list[tuple[Span, Span]]:  # fmt: skip
    """What parts of A and B that come in turn make possible: each, with all that has come of
    the other. So what can be multiplied grows as fast as it may. `lead` is `Pieces`'."""
    i = j = 1
    shapes = [(rows[0], cols[0])]
    while i < len(rows) or j < len(cols):
        if j >= len(cols) or (i < len(rows) and i * len(cols) * lead <= j * len(rows)):
            shapes.append((rows[i], Span(cols[0].start, cols[j - 1].stop)))
            i += 1
        else:
            shapes.append((Span(rows[0].start, rows[i - 1].stop), cols[j]))
            j += 1
    return shapes
