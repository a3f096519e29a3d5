"""Which rank does what: the cuboid cut over ranks on a grid pm x pn x pk. Pure.

Ranks are the workers of a plan like any other. New is only what lies between them: where K
is cut, a rank multiplies its block of C in *pieces*, each meant for the rank that owns that
strip, so that pieces travel and are summed while the next ones are multiplied.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

from ..errors import OutOfMemoryError, counted, in_words
from ..host.kept import cached_property
from ..planning.cost_model import tflops
from ..planning.hardware import DeviceSpec
from ..planning.on_grid import Task, on_grid
from ..planning.partition import Box, Grid, Span, candidates, cut_span, sides, strips_along_rows
from ..planning.plan import CHECKING_BYTES, Plan, Strip
from ..problem import Problem

IN_FLIGHT = 2  # rounds whose pieces a rank holds at once
PIECE_ROWS = 512  # on GPUs: a piece is at least so high, to keep its kernel busy
PIECE_ROWS_THERE = 4096  # of data on GPUs: only the last sum shows, and large pieces are faster
MOST_ROUNDS = 8
LOOK_MS = 2  # how long a rank whose cores multiply leaves MPI alone
HOST_GBPS = 5  # assumed between ranks, and from a file or the generator, when not known


@dataclass(frozen=True)
class Piece:
    """A part of `owner`'s strip of C, which every rank of its cell makes a partial of."""

    rows: Span
    cols: Span
    owner: int
    round: int

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.rows), len(self.cols)


@dataclass(frozen=True, repr=False)
class RankPlan(Plan):
    """A plan whose workers are ranks, each with `threads` of its own and a device that stands for
    all that it has; strips are made in `rounds` pieces. `parts` columns stand for one of C's: 2 in
    the plan of the real product that a complex one is multiplied as. With `mapped` blocks of A and
    B are pages of files, which take no memory: the system gives them back."""

    threads: int = 1
    rounds: int = 1
    parts: int = 1
    needs: int = 0  # bytes of the rank that needs most
    mapped: bool = False

    def __repr__(self) -> str:
        return f"<RankPlan: {self.problem}, split by {self.split}, {self.who}>"

    @property
    def who(self) -> str:
        """Who multiplies, in words."""
        return f"{counted(self.ranks, 'rank')} x {counted(self.threads, 'thread')}"

    @cached_property
    def as_real(self) -> RankPlan:
        """The plan of the real product that a complex one is multiplied as: twice the columns and
        k, each cut where this one is, so that each rank has the same rows and columns. Otherwise
        this plan."""
        if not self.problem.is_complex:
            return self

        def twice(span: Span) -> Span:
            return Span(2 * span.start, 2 * span.stop)

        workers = [
            replace(w, boxes=tuple(Box(b.rows, twice(b.cols), twice(b.ks)) for b in w.boxes))
            for w in self.workers
        ]
        panels = [
            replace(
                panel, cols=twice(panel.cols),
                strips=tuple(replace(s, cols=twice(s.cols)) for s in panel.strips),
            )
            for panel in self.panels
        ]  # fmt: skip
        return replace(
            self, problem=self.problem.as_real(), workers=tuple(workers), panels=tuple(panels),
            blocks=(), parts=2,
        )  # fmt: skip

    @cached_property
    def as_third(self) -> RankPlan:
        """The plan of one of the three real products that a complex one can be multiplied as."""
        return replace(self, problem=self.problem.as_third(), blocks=())

    @property
    def ranks(self) -> int:
        return len(self.workers)

    def flops(self, rank: int) -> int:
        """Operations of what a rank multiplies."""
        box = self.box(rank)
        return box.flops // 2 * self.problem.step_flops if box else 0

    def box_of(self, rank: int) -> Box:
        """The box of a rank that has one."""
        return self.workers[rank].boxes[0]

    def box(self, rank: int) -> Box | None:
        """What a rank multiplies; None where it has nothing to do."""
        boxes = self.workers[rank].boxes
        return boxes[0] if boxes else None

    def product_of(self, rank: int) -> Problem:
        """The product of a rank's box, or of the first where it has none."""
        boxes = [self.box(rank), *(self.box(other) for other in range(self.ranks))]
        box, p = next(filter(None, boxes), None), self.problem
        m, n, k = (len(box.rows), len(box.cols), len(box.ks)) if box else (p.m, p.n, p.k)
        return replace(p, m=m, n=n, k=k)

    @cached_property
    def _strips(self) -> dict[int, Strip]:
        return {s.owner: s for s in self.strips}

    def strip(self, rank: int) -> Strip | None:
        """What of C this rank finishes."""
        return self._strips.get(rank)

    def members(self, rank: int) -> list[int]:
        """The ranks with partials of this rank's block of C, in the order of the sum."""
        return self._cells[rank // self.grid[2]]

    @cached_property
    def _cells(self) -> list[list[int]]:
        depth = self.grid[2]
        return [
            [r for r in range(first, first + depth) if self.workers[r].boxes]
            for first in range(0, self.ranks, depth)
        ]

    def adds(self, rank: int) -> bool:
        """Whether this rank's block of C is a sum over ranks."""
        return self.box(rank) is not None and len(self.members(rank)) > 1

    def brief(self, rank: int, rows: int, cols: int) -> bool:
        """Whether a rank whose cores multiply makes so many rows and columns of its block of C
        before it would look at MPI."""
        spec, k = self.devices[rank], len(self.box_of(rank).ks)
        return not spec.on_gpu and _multiply_ms(self.problem, spec, rows, cols, k) <= LOOK_MS

    @cached_property
    def sums(self) -> bool:
        """Whether any block of C is a sum over ranks."""
        return any(len(cell) > 1 for cell in self._cells)

    def by_rows(self, rank: int) -> bool:
        """Whether strips of this rank's block of C, and their pieces, are some of its rows."""
        box = self.box_of(rank)
        cols = Span(0, len(box.cols) // self.parts)
        return strips_along_rows(box.rows, cols, len(self.members(rank)))

    def owned(self, owner: int) -> list[Piece]:
        """The pieces of a rank's strip, one a round from 0 on; none is empty."""
        strip = self.strip(owner)
        if strip is None:
            return []
        if self.by_rows(owner):
            parts = [(s, strip.cols) for s in cut_span(strip.rows, self.rounds)]
        else:
            parts = [(strip.rows, s) for s in cut_span(strip.cols, self.rounds)]
        parts = [(rows, cols) for rows, cols in parts if len(rows) and len(cols)]
        return [Piece(rows, cols, owner, i) for i, (rows, cols) in enumerate(parts)]

    def pieces(self, rank: int) -> list[Piece]:
        """All that a rank multiplies, in its order: round by round, first for the rank after
        it and last for itself, so that no owner is sent everything at once."""
        members = self.members(rank)
        turn = members.index(rank) + 1
        order = members[turn:] + members[:turn]
        place = {owner: i for i, owner in enumerate(order)}
        pieces = [piece for owner in order for piece in self.owned(owner)]
        return sorted(pieces, key=lambda p: (p.round, place[p.owner]))

    # --- what it costs ------------------------------------------------------------------

    def bytes_sent(self, rank: int) -> int:
        """Bytes of partials that this rank sends to other ranks."""
        if not self.adds(rank):
            return 0
        box = self.box_of(rank)
        return (len(box.rows) * len(box.cols) - self._own(rank)) * self.problem.itemsize

    def bytes_received(self, rank: int) -> int:
        if not self.adds(rank):
            return 0
        return self._own(rank) * (len(self.members(rank)) - 1) * self.problem.itemsize

    def bytes_input(self, rank: int) -> int:
        """Bytes of A, B and (with beta) C that this rank needs: its parts of files."""
        box = self.box(rank)
        if box is None:
            return 0
        slabs = len(box.rows) * len(box.ks) + len(box.ks) * len(box.cols)
        return (slabs + bool(self.problem.beta) * self._own(rank)) * self.problem.itemsize

    def memory_bytes(self, rank: int) -> int:
        """Bytes that this rank holds at most: its slabs, its strip, and pieces in flight; without
        slabs that are mapped."""
        box = self.box(rank)
        if box is None:
            return 0
        slabs, pieces = 0, 0
        if not self.mapped:
            b = _expansion(self.problem) * len(box.ks) * len(box.cols)
            slabs = len(box.rows) * len(box.ks) + b
        if self.adds(rank):
            # Of each round one piece a member goes out, and as many of the own strip come in.
            at_once = min(IN_FLIGHT, self.rounds)
            pieces = at_once * -(-len(box.rows) * len(box.cols) // self.rounds)
            pieces += at_once * -(-self._own(rank) // self.rounds) * (len(self.members(rank)) - 1)
        return (slabs + self._own(rank) + pieces) * self.problem.itemsize

    def _own(self, rank: int) -> int:
        strip = self.strip(rank)
        return strip.elements if strip else 0


def _expansion(problem: Problem) -> int:
    """How many times as large B is where it is multiplied."""
    return 2 if problem.is_complex else 1


# Many parameters: they are the caller's options, each with its default.
def make_rank_plan(
    problem: Problem,
    spec: DeviceSpec,
    ranks: int,
    *,
    threads: int = 1,
    split: str = "auto",
    grid: Sequence[int] | None = None,
    rounds: int | None = None,
    spans: Sequence[Sequence[Span]] | None = None,
    kernel: str = "",
    resident: bool = False,
    there: bool = False,
    mapped: bool = False,
) -> RankPlan:
    """The plan for `ranks` ranks that each have what `spec` says; `there` if each has its blocks
    of A and B where its device reads them, so that they take no time and no memory beside what is
    free; `mapped` if A and B are mapped files, which take no memory where a rank multiplies their
    pages as they lie: real ones on the host.

    `rows` is the grid (ranks, 1, 1), `cols` (1, 1, ranks); `auto` takes the grid that the
    cost model finds fastest of those that fit. `spans` are cuts along m, n and k where data
    lies cut already. More `rounds` than a strip has lines are as many as it has. Raises
    `UsageError` for a grid of another number of ranks, `OutOfMemoryError` if no rank could hold
    its part.
    """
    # Spans say how data lies; only a user's own grid contradicts a split.
    shapes = candidates([ranks], "auto" if spans else split, grid, "ranks")
    mapped = mapped and spec.host_memory and not problem.is_complex
    held, read = not (there or mapped), not (resident or there)
    costs = {}
    for shape in shapes:
        made = min(rounds, _most_rounds(problem, shape)) if rounds else 0
        made, need, ms = _paced(problem, spec, shape, made, resident, held=held, read=read)
        costs[shape] = (need > spec.memory_bytes, ms, sum(sides(problem, shape)), need, made)
    # Of those as fast, that with the fewest cuts along n: whole rows travel as they lie.
    best = min(costs, key=lambda shape: (*costs[shape][:3], shape[1]))
    too_big, ms, _read, need, made = costs[best]
    if too_big:
        free = split == "auto" and not grid and not spans
        more = "ranks on more hosts" if spec.host_memory else "more ranks"
        raise OutOfMemoryError(
            f"{problem} on {ranks} ranks as {' x '.join(map(str, best))} needs "
            f"{in_words(need)} a rank, and {spec.name} has {in_words(spec.memory_bytes)} "
            f"for it; {more}{'' if free else ', or --split auto,'} need less"
        )
    devices = tuple(replace(spec, name=f"rank {i}", unit=i) for i in range(ranks))
    task = Task(problem, devices, kernel, resident=resident)
    plan = on_grid(task, Grid(*map(tuple, spans)) if spans else task.grid(best))
    cut = {x.name: getattr(plan, x.name) for x in fields(plan)} | {"predicted_ms": ms}
    return RankPlan(**cut, threads=threads, rounds=made, needs=need, mapped=mapped)


def _paced(
    problem: Problem, spec: DeviceSpec, grid, rounds: int, resident: bool, *, held: bool, read: bool
) -> tuple[int, int, float]:  # fmt: skip
    """In how many rounds a grid's strips are made, `rounds` if they are not 0, and what `_cost`
    says of so many."""
    made = rounds or _rounds(problem, grid, spec, resident)
    need, ms = _cost(problem, spec, grid, made, held, read)
    while not rounds and need > spec.memory_bytes and made < _strip_rows(problem, grid):
        made *= 2  # smaller pieces are slower, and hold less
        need, ms = _cost(problem, spec, grid, made, held, read)
    return made, need, ms


def _rounds(problem: Problem, grid, spec: DeviceSpec, resident: bool) -> int:
    """As many rounds as leave pieces high enough: more rounds overlap more, and hold less. Cores
    make large pieces faster, and what a rank sends in one round travels while it makes its own
    piece, the last."""
    if grid[2] == 1 or not spec.on_gpu:
        return 1
    lowest = PIECE_ROWS_THERE if resident else PIECE_ROWS
    return max(1, min(MOST_ROUNDS, _strip_rows(problem, grid) // lowest))


def _multiply_ms(problem: Problem, spec: DeviceSpec, m: int, n: int, k: int) -> float:
    """About how long one rank takes for m x n x k of a problem."""
    tile = 16 if spec.on_gpu else 1
    flops = problem.step_flops * (-(-m // tile) * tile) * (-(-n // tile) * tile) * k
    moved = problem.itemsize * (m * k + k * n + m * n)
    return max(flops / (tflops(spec, problem) * 1e9), moved / (spec.memory_gbps * 1e6))


def _most_rounds(problem: Problem, grid) -> int:
    """As many as a strip has lines to cut: each round has at least one."""
    m, n, _k = sides(problem, grid)
    along = m if strips_along_rows(Span(0, m), Span(0, n), grid[2]) else n
    return max(1, -(-along // grid[2]))


def _strip_rows(problem: Problem, grid) -> int:
    return sides(problem, grid)[0] // grid[2] if grid[2] > 1 else 1


def _cost(problem: Problem, spec: DeviceSpec, grid, rounds: int, held: bool, read: bool):
    """Bytes that the largest rank keeps, with its blocks of A and B if they are `held`, and about
    how many ms the slowest takes, with the time to `read` them or without."""
    m, n, k = sides(problem, grid)
    size, depth = problem.itemsize, grid[2]
    partial = m * n
    in_flight = min(IN_FLIGHT, rounds) * partial // rounds * (2 - 1 / depth) if depth > 1 else 0
    operands = m * k + _expansion(problem) * k * n if held else 0
    keeps = size * int(operands + partial / depth + in_flight)
    if spec.checked and not spec.host_memory:
        keeps += CHECKING_BYTES * (m + k) + (size * partial // depth if problem.beta else 0)
    multiply = _multiply_ms(problem, spec, m, n, k)
    link = spec.link_gbps if math.isfinite(spec.link_gbps) else HOST_GBPS
    peer = spec.peer_gbps if math.isfinite(spec.peer_gbps) else HOST_GBPS
    reading = size * (m * k + k * n) / (link * 1e6) if read else 0
    travel = size * partial * (depth - 1) / depth / (peer * 1e6)
    summing = size * partial * (depth + 1) / depth / (spec.memory_gbps * 1e6) if depth > 1 else 0
    # What travels hides behind multiplying, but for the last round; so do sums that no core makes.
    last = travel + (rounds if spec.host_memory else 1) * summing
    return keeps, reading + max(multiply, travel) + last / rounds
