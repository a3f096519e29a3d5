"""Who does what: a problem and a machine in, a plan out. Pure data, no device.

The product is a cuboid m x n x k of multiply-adds. A *box* is a block of it; `rows` cuts
the cuboid along m, `cols` along k, and both are the grid pm x pn x pk with one long side.
Workers of one (pm, pn) cell hold partials of the same block of C; the block is cut into
*strips*, one a worker, and a strip's owner sums its partials in worker order.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from .cost import Links, predict_ms
from .errors import OutOfMemoryError, UsageError
from .problem import Problem

ALIGN = 32  # elements: cuts fall on whole 128-byte lines of fp32 where that costs nothing


@dataclass(frozen=True)
class Span:
    """Indices start <= i < stop."""

    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    def __str__(self) -> str:
        return f"{self.start}:{self.stop}"

    @property
    def slice(self) -> slice:
        return slice(self.start, self.stop)


@dataclass(frozen=True)
class Box:
    """Some rows of A, some columns of B, some of K."""

    rows: Span
    cols: Span
    ks: Span

    @property
    def flops(self) -> int:
        return 2 * len(self.rows) * len(self.cols) * len(self.ks)


@dataclass(frozen=True)
class Worker:
    """A thread with a device; a worker with no boxes has nothing to multiply."""

    index: int
    device: int
    boxes: tuple[Box, ...]


@dataclass(frozen=True)
class Block:
    """A block of A or B that a device needs; its workers bring equal parts of it."""

    operand: str
    rows: Span
    cols: Span
    device: int
    workers: tuple[int, ...]

    @property
    def elements(self) -> int:
        return len(self.rows) * len(self.cols)


@dataclass(frozen=True)
class Strip:
    """Rows and columns of C, the worker that finishes them, the workers whose partials
    make them in the order in which they are summed."""

    rows: Span
    cols: Span
    owner: int
    partials: tuple[int, ...]


@dataclass(frozen=True)
class DeviceSpec:
    """What the planner knows of a device.

    `unit` tells which devices share one piece of hardware (one GPU that plays several).
    Rates are what the cost model assumes, not promises; `best_tflops` is what no kernel known
    passes, None where that is not known. `links` are the host's, where they were measured.
    """

    name: str
    kind: str
    unit: int
    memory_bytes: int
    tflops: float
    memory_gbps: float
    link_gbps: float = math.inf
    peer_gbps: float = math.inf
    host_memory: bool = False
    best_tflops: float | None = None
    links: Links | None = None


@dataclass(frozen=True)
class Plan:
    problem: Problem
    split: str
    grid: tuple[int, int, int]
    devices: tuple[DeviceSpec, ...]
    workers: tuple[Worker, ...]
    blocks: tuple[Block, ...]
    strips: tuple[Strip, ...]
    kernel: str
    reduce: str
    resident: bool
    predicted_ms: float = 0.0

    @property
    def summed(self) -> bool:
        """Whether workers make partials of C that are summed afterwards."""
        return self.grid[2] > 1 or self.reduce == "critical"

    @property
    def bytes_h2d(self) -> int:
        """Bytes from host memory to devices."""
        if self.resident:
            return 0
        brought = sum(b.elements for b in self.blocks if self._remote(b.device))
        if self.problem.beta:
            brought += sum(self._elements(s) for s in self.strips if self._on_remote(s.owner))
        if self.reduce == "critical":
            brought += self.problem.m * self.problem.n * len(self._busy_remote())
        return brought * self.problem.itemsize

    @property
    def bytes_d2h(self) -> int:
        if self.resident:
            return 0
        taken = sum(self._elements(s) for s in self.strips if self._on_remote(s.owner))
        if self.reduce == "critical":
            taken = self.problem.m * self.problem.n * len(self._busy_remote())
        return taken * self.problem.itemsize

    @property
    def bytes_peer(self) -> int:
        """Bytes of partials that a strip's owner fetches from other devices."""
        if self.reduce == "critical":
            return 0
        device = [w.device for w in self.workers]
        return self.problem.itemsize * sum(
            self._elements(s) * sum(device[p] != device[s.owner] for p in s.partials)
            for s in self.strips
        )

    def memory_bytes(self, device: int) -> int:
        """Bytes that this plan allocates on a device (beside what the caller holds there)."""
        size = self.problem.itemsize
        spec = self.devices[device]
        total = 0
        if not spec.host_memory:
            total += sum(b.elements for b in self.blocks if b.device == device) * size
            total += size * sum(
                self._elements(s) for s in self.strips if self.workers[s.owner].device == device
            )
        if self.summed:
            mine = [w for w in self.workers if w.device == device]
            total += size * sum(len(b.rows) * len(b.cols) for w in mine for b in w.boxes)
            if not spec.host_memory:  # strips of other devices' partials, fetched to be summed
                on = [w.device for w in self.workers]
                total += size * sum(
                    self._elements(s) * sum(on[p] != device for p in s.partials)
                    for s in self.strips
                    if on[s.owner] == device
                )
        return total

    def _remote(self, device: int) -> bool:
        return not self.devices[device].host_memory

    def _on_remote(self, worker: int) -> bool:
        return self._remote(self.workers[worker].device)

    def _busy_remote(self) -> list[Worker]:
        return [w for w in self.workers if w.boxes and self._remote(w.device)]

    @staticmethod
    def _elements(strip: Strip) -> int:
        return len(strip.rows) * len(strip.cols)


def cut(size: int, parts: int, align: int = 1) -> list[Span]:
    """`size` in `parts` spans whose lengths differ by at most one unit of `align`.

    Falls back to single indices when a part would get fewer than four units.
    """
    if size < 4 * align * parts:
        align = 1
    units = -(-size // align)
    edges = [min(size, i * units // parts * align) for i in range(parts)] + [size]
    return [Span(a, b) for a, b in itertools.pairwise(edges)]


def make_plan(
    problem: Problem,
    devices: Sequence[DeviceSpec],
    workers: int,
    *,
    split: str = "auto",
    kernel: str = "",
    reduce: str = "ordered",
    resident: bool = False,
) -> Plan:
    """The plan for `workers` workers over `devices` (worker i on device i mod their number).

    Raises `UsageError` for an unknown split or a worker count below 1, `OutOfMemoryError`
    if a device cannot hold its part.
    """
    if workers < 1:
        raise UsageError(f"{workers} workers asked for; it takes at least 1")
    grids = {"rows": (workers, 1, 1), "cols": (1, 1, workers)}
    if split != "auto" and split not in grids:
        raise UsageError(f"no split is called {split!r}; there are rows, cols and auto")
    if reduce not in ("ordered", "critical"):
        raise UsageError(f"no reduction is called {reduce!r}; there are ordered and critical")
    if reduce == "critical" and split != "cols":
        raise UsageError(f"the critical reduction sums a split by cols; the split is {split}")
    names = [split] if split != "auto" else ["rows", "cols"]
    plans = []
    for name in names:
        plan = on_grid(problem, tuple(devices), grids[name], name, kernel, reduce, resident)
        plans.append(replace(plan, predicted_ms=predict_ms(plan)))
    fitting = [plan for plan in plans if not memory_shortfall(plan)]
    if not fitting:
        raise OutOfMemoryError(memory_shortfall(plans[0]))
    return min(fitting, key=lambda plan: plan.predicted_ms)


def on_grid(problem, devices, grid, split, kernel, reduce, resident, spans=None) -> Plan:
    """The plan on a grid pm x pn x pk; `spans` are its cuts along m, n and k (default: even)."""
    align = 1 if devices[0].kind == "cpu" else ALIGN
    sizes = (problem.m, problem.n, problem.k)
    spans = spans or [cut(size, parts, align) for size, parts in zip(sizes, grid, strict=True)]
    pm, pn, pk = grid
    workers, strips = [], []
    for i in range(pm):
        for j in range(pn):
            rows, cols = spans[0][i], spans[1][j]
            cell = []
            for q in range(pk):
                box = Box(rows, cols, spans[2][q])
                index = len(workers)
                # With K empty the first worker still owes beta * C.
                alive = len(rows) and len(cols) and (len(box.ks) or (q == 0 and not problem.k))
                workers.append(Worker(index, index % len(devices), (box,) if alive else ()))
                if alive:
                    cell.append(index)
            strips += _strips(rows, cols, cell, align)
    return Plan(
        problem, split, grid, devices, tuple(workers), _blocks(workers), tuple(strips),
        kernel, reduce, resident,
    )  # fmt: skip


def _strips(rows: Span, cols: Span, cell: list[int], align: int) -> list[Strip]:
    """The strips of one block of C: along its rows, or its columns if rows are too few."""
    if not cell:
        return []
    along_rows = strips_along_rows(rows, cols, len(cell))
    whole = rows if along_rows else cols
    out, partials = [], tuple(cell)
    for owner, part in zip(cell, cut(len(whole), len(cell), align), strict=True):
        if not len(part):
            continue
        span = Span(whole.start + part.start, whole.start + part.stop)
        r, c = (span, cols) if along_rows else (rows, span)
        out.append(Strip(r, c, owner, partials))
    return out


def strips_along_rows(rows: Span, cols: Span, parts: int) -> bool:
    return len(rows) >= parts or len(rows) >= len(cols)


def _blocks(workers: list[Worker]) -> tuple[Block, ...]:
    needed = defaultdict(list)
    for worker in workers:
        for box in worker.boxes:
            needed["A", box.rows, box.ks, worker.device].append(worker.index)
            needed["B", box.ks, box.cols, worker.device].append(worker.index)
    return tuple(
        Block(operand, rows, cols, device, tuple(who))
        for (operand, rows, cols, device), who in needed.items()
        if len(rows) and len(cols)
    )


def memory_shortfall(plan: Plan) -> str | None:
    """What does not fit, with both figures; None if everything does."""
    needs = defaultdict(int)
    for index, spec in enumerate(plan.devices):
        needs[spec.unit] += plan.memory_bytes(index)
    for spec in plan.devices:
        if needs[spec.unit] > spec.memory_bytes:
            return (
                f"{plan.problem} by {plan.split} over {len(plan.workers)} workers needs "
                f"{needs[spec.unit] / 2**30:.2f} GiB on {spec.name}, which has "
                f"{spec.memory_bytes / 2**30:.2f} GiB free; fewer threads, more devices or "
                "--split rows need less"
            )
    return None
