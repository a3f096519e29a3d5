"""The plan of one task on one grid: blocks of C, panels, strips and parts of A and B. Pure."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from ..problem import Problem
from .cost_model import tflops
from .hardware import DeviceSpec
from .partition import (
    Box,
    Grid,
    Shape,
    Span,
    cut_in,
    cut_span,
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


def on_grid(task: Task, grid: Grid, cuts: Cuts = WHOLE, *, sample: bool = False) -> Plan:
    """The plan on a grid. A `sample` has of tiles and chunks of each size only two: it takes the
    same memory, for no more than two turns and two tiles are in memory together."""
    return _OnGrid(task, grid, cuts, sample).plan()


def distinct(task: Task, grid: Grid, cuts: Cuts, kinds: Sequence[Pieces]) -> list[Pieces]:
    """Of these kinds of parts those that differ on a grid, where matrices come panel by panel."""
    # Spans of one length are cut alike.
    rows, cols = ({len(x): x for x in spans}.values() for spans in (grid.rows, grid.cols))
    found: dict[object, Pieces] = {}
    for pieces in kinds:
        made = _OnGrid(task, grid, replace(cuts, pieces=pieces), sample=False)
        panels = tuple(tuple(made.arms(r, c)) for r in rows for c in cols)
        found.setdefault(panels, pieces)
    return [*found.values()]


class _OnGrid:
    """Makes the plan of one task on one grid with these cuts."""

    def __init__(self, task: Task, grid: Grid, cuts: Cuts, sample: bool):
        self.task, self.grid, self.cuts, self.sample = task, grid, cuts, sample
        self.align = task.align
        longest = max(map(len, grid.ks))
        self.depth = longest * max(cuts.ks) // sum(cuts.ks)  # of a turn, along K
        self.most_panels = self._panels_in_time()
        self.workers: list[Worker] = []
        self.panels: list[Panel] = []
        self.blocks: list[Block] = []  # of turns

    def plan(self) -> Plan:
        """The plan; called once."""
        for rows in self.grid.rows:
            for cols in self.grid.cols:
                self._add_cell(self._tiles(rows, cols))
        task, reduce = self.task, self.task.reduce
        if reduce == "nccl" and len(self.grid.ks) == 1:  # which would sum nothing
            reduce = "ordered"
        blocks = self.blocks if self.cuts.turns_in_memory else self._shared_blocks()
        return Plan(
            task.problem, self.grid.split, self.grid.shape, task.devices, tuple(self.workers),
            tuple(blocks), tuple(self.panels), task.kernel, reduce, task.resident,
            self.cuts.turns_in_memory, task.homes, task.page_locked,
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
                shares = self.cuts.ks[: max(1, len(ks))]
                chunks = self._sampled(cut_in(ks, shares, self.align))
                boxes = tuple(Box(rows, cols, chunk) for rows, cols in tiles for chunk in chunks)
            device = (self.task.first_device + index) % len(self.task.devices)
            self.workers.append(Worker(index, device, boxes))
            if boxes:
                cell.append(index)
        members, owners = tuple(cell), self._owners(cell)  # which all panels of the cell share
        for number, (rows, cols) in enumerate(tiles):
            for r, c in self._panels(rows, cols, len(cell)):
                strips = tuple(self._strips(r, c, owners))
                self.panels.append(Panel(r, c, members, strips, number))
        if self.cuts.turns_in_memory:
            self._add_own_blocks(tiles, self.workers[-len(self.grid.ks) :])

    # --- panels and strips ----------------------------------------------------------------

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

    def _owners(self, cell: Sequence[int]) -> list[tuple[int, tuple[tuple[int, ...], ...]]]:
        """The workers of a cell that finish strips, each with its strips' summands. One of each
        GPU does, by one kernel; on the CPU every worker's thread."""
        device = {w: self.workers[w].device for w in cell}
        on: dict[int, tuple[int, ...]] = defaultdict(tuple)
        for w in cell:
            on[device[w]] += (w,)
        host = any(self.task.devices[x].host_memory for x in on)
        apart = host or self.task.reduce != "ordered"

        # Shared by all owners that add up the same: of thousands of ranks each has all others.
        alone = tuple((w,) for w in cell)
        by_device = tuple(on[device[w]] for w in cell if w == on[device[w]][0])

        def summands(owner: int) -> tuple[tuple[int, ...], ...]:
            own = on[device[owner]]
            if apart:
                return alone
            if len(own) == 1:
                return by_device
            first = (on[device[w]] for w in cell)  # of each worker, all of its device
            return tuple(
                (w,) if of == own else of
                for w, of in zip(cell, first, strict=True)
                if of == own or w == of[0]
            )

        return [(w, summands(w)) for w in cell if host or w == on[device[w]][0]]

    def _strips(
        self, rows: Span, cols: Span, owners: Sequence[tuple[int, tuple[tuple[int, ...], ...]]]
    ) -> Iterator[Strip]:
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
