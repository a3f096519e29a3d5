"""A plan as plain data: who multiplies what, in which order, and who finishes it. No device.

The product is a cuboid m x n x k of multiply-adds, and a *box* is a block of it. A worker has
one box, or several that it takes in *turns*: where memory is short, the block of C in *tiles*
and K in chunks. A box needs a *block* of A and one of B, which come in *parts*. With each part
that comes a *panel* of C can be multiplied; it is cut into *strips*, and a strip's owner sums
the workers' partials of it.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ..errors import counted, in_words, time_in_words
from ..host.kept import cached_property
from ..problem import Problem, is_long
from .hardware import DeviceSpec
from .partition import Box, Span
from .repeated import Boxes, Spans, kinds

SHOWN = 8  # workers in a summary
LINE_BYTES = 16  # on which lines begin that kernels read as vectors, and that TMA copies
SPLIT_STEP = 64  # rows packed in two parts are whole multiples of it, in elements
PRODUCTS_AT_ONCE = 2  # of a worker: the end of one leaves multiprocessors to the next
TILES_IN_MEMORY = 2  # one tile is finished while the next is multiplied
CHECKING_BYTES = 2304  # for each row of C and of op(B): the sums by which products are checked
# Of fp64x: the most moduli of a product; what rows of residues are whole multiples of, in elements;
# and columns of B that lie together (COLUMNS of kernels/residues.cuh).
MODULI, RESIDUE_STEP, RESIDUE_COLUMNS = 16, 128, 64
# For each row of op(A) and column of op(B) there: what k is rounded up by, and what is found: a
# norm, the largest element, the spread, and that of up to 32 parts.
RESIDUE_ROW_BYTES = MODULI * (RESIDUE_STEP - 1) + 4 + 8 + 80 + 8 * 32


@dataclass(frozen=True)
class Worker:
    """A thread with a device and its boxes, in order; without any it has nothing to multiply."""

    index: int
    device: int
    boxes: Sequence[Box]

    @cached_property
    def chunks(self) -> Spans:
        """The parts of K in which it multiplies each tile of C, one box after another."""
        if isinstance(self.boxes, Boxes):
            return self.boxes.ks if self.boxes else Spans()
        tiles = itertools.groupby(self.boxes, lambda box: (box.rows, box.cols))
        return Spans(box.ks for _, boxes in itertools.islice(tiles, 1) for box in boxes)

    @property
    def flops(self) -> int:
        """Operations of all its boxes."""
        return sum(times * box.flops for box, times in kinds(self.boxes))

    @cached_property
    def depth(self) -> int:
        """The most of K that it multiplies at once."""
        return max(map(len, self.chunks), default=0)


@dataclass(frozen=True, slots=True)
class Block:
    """A block of A or B that workers of a device need in one of their turns.

    It comes in `parts` (spans of rows of A, of columns of B). `sharers` are all devices that
    need it: each brings some parts from the host and relays them to the others.
    """

    operand: str
    rows: Span
    cols: Span
    device: int
    workers: tuple[int, ...]
    parts: tuple[Span, ...]
    sharers: tuple[int, ...]
    turn: int = 0

    @property
    def elements(self) -> int:
        """Of the whole block."""
        return self.rows.by(self.cols)

    def source(self, part: int) -> int:
        """The device that has a part from the host."""
        return self.sharers[part % len(self.sharers)]

    def bringer(self, part: int) -> int:
        """The worker that brings a part to this device."""
        return self.workers[part // len(self.sharers) % len(self.workers)]


class Summands(tuple[tuple[int, ...], ...]):
    """What is added, in this order: each is of these workers' partials. Those of several workers
    are on another device, where the first of them makes their subtotal."""

    @cached_property
    def several(self) -> list[tuple[int, ...]]:
        """Those of several workers."""
        return [workers for workers in self if len(workers) > 1]


@dataclass(frozen=True, slots=True)
class Strip:
    """Rows and columns of C, the worker that finishes them (`owner`), and what it adds."""

    rows: Span
    cols: Span
    owner: int
    summands: Summands

    @property
    def partials(self) -> tuple[int, ...]:
        """The workers whose partials it is the sum of."""
        return tuple(itertools.chain.from_iterable(self.summands))

    def __hash__(self) -> int:  # quick: runs look strips up while GPUs wait
        return hash((self.rows.start, self.cols.start, self.owner))

    @property
    def elements(self) -> int:
        """Of C."""
        return self.rows.by(self.cols)


@dataclass(frozen=True)
class Panel:
    """Rows and columns of C that `workers` multiply at once, each over its own part of K.

    Its strips' partials are those of all its workers. `tile` counts the tiles that these workers
    make one after another.
    """

    rows: Span
    cols: Span
    workers: tuple[int, ...]
    strips: tuple[Strip, ...]
    tile: int = 0

    @property
    def subtotals(self) -> Iterator[tuple[Strip, tuple[int, ...]]]:
        """Strips, each with workers whose partials are added before they go to its owner."""
        return ((strip, x) for strip in self.strips for x in strip.summands.several)

    @property
    def sums(self) -> Iterator[tuple[int, Strip, int]]:
        """Workers that add up partials, each with the strip and how many it adds."""
        if len(self.workers) > 1:
            yield from ((group[0], strip, len(group)) for strip, group in self.subtotals)
            yield from ((strip.owner, strip, len(strip.summands)) for strip in self.strips)

    def __hash__(self) -> int:
        return hash((self.rows.start, self.cols.start, self.tile))


# What turns or tiles need, by the number of the first and how many need the same.
_Needs = dict[tuple[int, int], int]
# Where A, B and C lie: a device's index, or None for the host.
Homes = tuple[int | None, int | None, int | None]
NOWHERE: Homes = (None, None, None)


@dataclass(frozen=True)
class Plan:
    """Who multiplies what on which device, in which order, and who sums it.

    `split` and `grid` (pm, pn, pk) say how the cuboid is cut among `workers`; `blocks` are the
    parts of A and B that devices need, `panels` the parts of C in the order in which they are
    multiplied. `kernel` and `reduce` are what was asked for, but that one worker's partial is no
    sum of several for NCCL. `resident` says that A, B and C are on the devices when the clock
    starts. `turns_in_memory` is of how many turns a worker's blocks are on its device at once; 0 is
    all. `homes` are the devices on which A, B and C lie, where what they multiply is not copied.
    `page_locked` says that matrices of the host lie in page-locked memory, which GPUs copy without
    another copy on the host. `predicted_ms` is the cost model's time.
    """

    problem: Problem
    split: str
    grid: tuple[int, int, int]
    devices: tuple[DeviceSpec, ...]
    workers: tuple[Worker, ...]
    blocks: Sequence[Block]
    panels: Sequence[Panel]
    kernel: str
    reduce: str
    resident: bool
    turns_in_memory: int = 0
    homes: Homes = NOWHERE
    page_locked: bool = False
    predicted_ms: float = 0.0

    def __repr__(self) -> str:
        return (
            f"<Plan: {self.problem}, split by {self.split}, {counted(len(self.workers), 'worker')} "
            f"on {counted(len(self.devices), 'device')}{self._expectation(', about ')}>"
        )

    def summary(self) -> str:
        """Who multiplies what, the memory and the bytes moved, as a few lines for people."""
        lines = [f"{self.problem}, split by {self.split}, grid {' x '.join(map(str, self.grid))}"]
        for w in self.workers[:SHOWN]:
            words = "nothing to do"
            if w.boxes:
                first, last = w.boxes[0], w.boxes[-1]
                words = f"rows {first.rows.start}:{last.rows.stop}, columns "
                words += f"{first.cols.start}:{last.cols.stop}, K {first.ks.start}:{last.ks.stop}"
                words += f" in {len(w.boxes)} turns" if len(w.boxes) > 1 else ""
            lines.append(f"worker {w.index} on {self.devices[w.device].name}: {words}")
        if len(self.workers) > SHOWN:
            lines.append(f"... and {len(self.workers) - SHOWN} workers more")
        lines += [
            f"{spec.name}: {in_words(self.memory_bytes(i))} of {in_words(spec.memory_bytes)} free"
            for i, spec in enumerate(self.devices)
        ]
        moved = f"{in_words(self.bytes_h2d)} to devices, {in_words(self.bytes_d2h)} back"
        between = self.bytes_peer + self.bytes_relayed
        lines.append(f"{moved}, {in_words(between)} between devices")
        return "\n".join([*lines, *filter(None, [self._expectation("expected time: ")])])

    def _expectation(self, words: str) -> str:
        """The predicted time after some words; "" without GPUs, whose rates alone are known."""
        return words + time_in_words(self.predicted_ms) if self.devices[0].on_gpu else ""

    @cached_property
    def strips(self) -> tuple[Strip, ...]:
        """Those of all panels, in their order."""
        return tuple(strip for panel in self.panels for strip in panel.strips)

    @cached_property
    def tiles(self) -> Mapping[int, list[list[Panel]]]:
        """The panels of each worker, tile by tile."""
        found: dict[int, list[list[Panel]]] = defaultdict(list)
        for (workers, _), panels in itertools.groupby(self.panels, lambda x: (x.workers, x.tile)):
            tile = [*panels]
            for worker in workers:
                found[worker].append(tile)
        return found

    @property
    def kinds_of_strips(self) -> Iterator[tuple[Strip, int]]:
        """One strip of each kind, in their order, with how many there are."""
        return ((x, times) for panel, times in kinds(self.panels) for x in panel.strips)

    @cached_property
    def summed(self) -> bool:
        """Whether workers make partials of C that are summed afterwards. One worker's is then all
        of the sum, where alpha has to scale that and no part of it."""
        return self.grid[2] > 1 or self.reduce == "critical" or self._scaled_at_last

    @cached_property
    def _scaled_at_last(self) -> bool:
        """Whether alpha has to scale sums over several chunks of K, or over pieces of one that is
        too long for a launch (`devices/long_sides.py`)."""
        return self.problem.scaled_at_last and not self._in_one_piece

    @cached_property
    def _in_one_piece(self) -> bool:
        """Whether each worker multiplies its part of K at once, in one launch."""
        return not any(len(w.chunks) > 1 or is_long(w.depth) for w in self.workers)

    def fetched(self, strip: Strip) -> int:
        """How many partials and subtotals of a strip its owner has from other devices."""
        own = self.workers[strip.owner].device
        return sum(self.workers[first].device != own for first, *_ in strip.summands)

    @property
    def turns(self) -> int:
        """The most boxes that a worker has."""
        return max(len(w.boxes) for w in self.workers)

    @cached_property
    def products(self) -> tuple[tuple[int, int, int], ...]:
        """m, n, k of the largest box, as which its panels are multiplied, then of all panels,
        each once."""
        boxes = [box for w in self.workers for box, _ in kinds(w.boxes)]
        if not boxes:
            return ()
        # Without k all have as few operations, and not the same sides.
        largest = max(boxes, key=lambda b: (b.flops, len(b.rows) * len(b.cols)))
        whole = len(largest.rows), len(largest.cols), len(largest.ks)
        return (whole, *sorted(self.multiplied.keys() - {whole}, reverse=True))

    @cached_property
    def multiplied(self) -> Mapping[tuple[int, int, int], int]:
        """How many products of each m, n, k all workers together start: one for each panel and
        chunk of K."""
        found: Counter[tuple[int, int, int]] = Counter()
        for panel, times in kinds(self.panels):
            for worker in panel.workers:
                for chunk in self.workers[worker].chunks:
                    found[len(panel.rows), len(panel.cols), len(chunk)] += times
        return found

    @cached_property
    def split_once(self) -> bool:
        """Whether parts of A and B, which several products read, are split for tensor cores when
        they come, and not by each product: in fp32x3, with several panels a turn, of sides
        that a launch takes."""
        p, panels = self.problem, kinds(self.panels)
        tiles = {(panel.workers, panel.tile) for panel, _ in panels}
        several = len(tiles) < len(panels)
        return p.compute == "fp32x3" and several and not is_long(p.m, p.n, p.k)

    @property
    def padded(self) -> bool:
        """Whether lines of blocks of A and B begin on 16 bytes: in TF32 and 16 bits, where products
        would pack operands that do not."""
        problem = self.problem
        return problem.compute == "tf32" or problem.operands != problem.dtype

    @cached_property
    def bytes_h2d(self) -> int:
        """Bytes from host memory to devices."""
        if self.resident:
            return 0
        brought = sum(
            times * b.elements for b, times in kinds(self.blocks)
            if self._remote(b.device) and b.device == b.sharers[0]
        )  # fmt: skip
        added = self._finished_remote if self.problem.beta else 0
        if self.reduce == "critical":
            added += self.problem.m * self.problem.n * len(self._busy_remote)
        return brought * self.problem.operand_size + added * self.problem.itemsize

    @cached_property
    def bytes_d2h(self) -> int:
        """Bytes from devices to host memory."""
        if self.resident:
            return 0
        taken = self._finished_remote
        if self.reduce == "critical":
            taken = self.problem.m * self.problem.n * len(self._busy_remote)
        return taken * self.result_size

    @property
    def writes_once(self) -> bool:
        """Whether each element of C is written once, so that it is rounded once: k is in one piece,
        and that is not too long for a launch (`devices/long_sides.py`)."""
        return self._in_one_piece and not self.summed and not is_long(self.problem.k)

    @cached_property
    def result_size(self) -> int:
        """Bytes of an element of a finished strip: of C of 16 bits where each is written once."""
        problem = self.problem
        narrow = self.writes_once and problem.out_dtype == problem.operands
        return problem.operand_size if narrow else problem.itemsize

    @cached_property
    def bytes_peer(self) -> int:
        """Bytes of partials, or of their subtotals, that strips' owners have from other devices."""
        if self.reduce == "critical" or len(self.devices) == 1:
            return 0
        return self.problem.itemsize * sum(
            times * strip.elements * self.fetched(strip) for strip, times in self.kinds_of_strips
        )

    @property
    def bytes_relayed(self) -> int:
        """Bytes of A and B that a device has from another one and not from the host."""
        if self.resident:
            return 0
        return self.problem.operand_size * sum(
            times * b.elements for b, times in kinds(self.blocks) if b.device != b.sharers[0]
        )

    def memory_bytes(self, device: int) -> int:
        """Bytes that this plan allocates on a device (beside what the caller has there)."""
        return self._memory[device]

    @cached_property
    def _memory(self) -> list[int]:
        """`memory_bytes` of each device, in one pass over the plan."""
        turns, tiles = self._turn_bytes(), self._tile_elements()
        beside = self._panel_bytes()
        needs = [0] * len(self.devices)
        for w in self.workers:
            results = _most(tiles[w.index], TILES_IN_MEMORY) * self.problem.itemsize
            needs[w.device] += _most(turns[w.index], self.turns_in_memory) + results
            needs[w.device] += beside[w.index]
        return needs

    def _turn_bytes(self) -> list[_Needs]:
        """For each worker, by turn, the bytes of A and B, and of what they are split into, that its
        device needs memory for. A block that workers share counts for the first of them."""
        of: list[_Needs] = [defaultdict(int) for _ in self.workers]
        if not any(map(self._remote, range(len(self.devices)))):
            return of
        home = dict(zip("AB", self.homes[:2], strict=True))
        size, padded, split_once = self.problem.operand_size, self.padded, self.split_once
        for block, times in kinds(self.blocks):
            if self._remote(block.device):
                need, turn = of[block.workers[0]], (block.turn, times)
                if home[block.operand] != block.device:
                    need[turn] += block.elements * size
                    if padded:
                        need[turn] += max(len(block.rows), len(block.cols)) * LINE_BYTES
                if split_once:
                    need[turn] += split_bytes(block)
        return of

    def _tile_elements(self) -> list[_Needs]:
        """For each worker, by tile, the elements of C that its device needs memory for: its
        partials, the strips that it finishes, what is fetched from other devices for them, and
        the subtotals that it makes."""
        of: list[_Needs] = [defaultdict(int) for _ in self.workers]
        for panel, times in kinds(self.panels):
            tile = panel.tile, times
            for strip in panel.strips:
                device = self.workers[strip.owner].device
                if self._remote(device):
                    fetched = self.fetched(strip) if self.summed and self.reduce != "nccl" else 0
                    copies = (self.homes[2] != device) + fetched
                    of[strip.owner][tile] += strip.elements * copies
            if self.summed:
                for w in panel.workers:
                    of[w][tile] += panel.rows.by(panel.cols)
            for strip, (first, *_) in panel.subtotals:
                of[first][tile] += strip.elements
        return of

    def _panel_bytes(self) -> list[int]:
        """For each worker the bytes that its largest panel takes beside A, B and C.

        A product that splits its operands has both in two parts of 4 bytes, or where they are split
        once, what only the TF32 split takes; they stay with each of a worker's streams that
        multiply. fp64x has a byte for each of all moduli, and as many of each element of C. Checks
        have sums of rows, and a copy of the panel that its product, or the sum of its strips, adds
        to.
        """
        problem, most = self.problem, [0] * len(self.workers)
        checked = any(spec.checked and not spec.host_memory for spec in self.devices)
        at_once = PRODUCTS_AT_ONCE if self.split_once else 1
        packed = [0] * len(self.workers)
        if problem.compute == "fp64x":
            packed = [max((_residue_bytes(b) for b, _ in kinds(w.boxes)), default=0)
                      for w in self.workers]  # fmt: skip
        if problem.compute != "fp32x3" and not checked:
            return packed
        for panel, _ in kinds(self.panels):
            rows, cols = len(panel.rows), len(panel.cols)
            for worker in map(self.workers.__getitem__, panel.workers):
                w, depth = worker.index, worker.depth
                if problem.compute == "fp32x3":
                    padded = -(-depth // SPLIT_STEP) * SPLIT_STEP
                    packed[w] = max(packed[w], 8 * at_once * (rows + cols) * padded)
                if checked and self._remote(worker.device):
                    added = rows * cols if problem.beta or len(worker.chunks) > 1 else 0
                    need = CHECKING_BYTES * (rows + depth) + added * problem.itemsize
                    most[w] = max(most[w], need)
        return [a + b for a, b in zip(packed, most, strict=True)]

    def _remote(self, device: int) -> bool:
        return not self.devices[device].host_memory

    def _on_remote(self, worker: int) -> bool:
        return self._remote(self.workers[worker].device)

    @cached_property
    def _finished_remote(self) -> int:
        """The elements of C that are finished on devices with memory of their own."""
        return sum(
            times * x.elements for x, times in self.kinds_of_strips if self._on_remote(x.owner)
        )

    @cached_property
    def _busy_remote(self) -> list[Worker]:
        return [w for w in self.workers if w.boxes and self._on_remote(w.index)]


def _residue_bytes(box: Box) -> int:
    m, n, k = len(box.rows), len(box.cols), len(box.ks)
    made = MODULI * m * (n + RESIDUE_COLUMNS - 1)
    return (m + n) * (MODULI * k + RESIDUE_ROW_BYTES) + made


def split_bytes(block: Block) -> int:
    """Bytes of a block split in two parts of 2 bytes, of its rows' exponents in both splits, and of
    what its parts allow."""
    of_a = block.operand == "A"
    rows, k = (block.rows, block.cols) if of_a else (block.cols, block.rows)
    padded = -(-len(k) // SPLIT_STEP) * SPLIT_STEP
    return len(rows) * (4 * padded + 8) + 64 * len(block.parts)


def _most(needs: _Needs, in_memory: int) -> int:
    """What the largest turns need that may be in memory together; of all turns if `in_memory`
    is 0."""
    of_each = ((need, times) for (_, times), need in needs.items())
    sorted_needs = sorted(of_each, reverse=True)
    each = itertools.chain.from_iterable(
        itertools.repeat(need, min(times, in_memory or times)) for need, times in sorted_needs
    )
    return sum(itertools.islice(each, in_memory or None))
