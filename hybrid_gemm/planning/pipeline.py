"""When each piece of a plan should be where: uploads, relays, products, sums and downloads of a run
from host arrays, in the order in which one thread starts them. Pure; times are in ms, rates in
GB/s."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from .plan import Block, Panel, Plan, Strip
from .steps import Step, as_started

_MS = 1e-6  # ms a byte at 1 GB/s


class Runs(NamedTuple):
    """Bytes that lie one after the other in host memory, from the beginning of one run to that of
    the next, and over how many bytes all such runs lie that are copied meanwhile."""

    size: int
    apart: int
    over: int


@dataclass(frozen=True)
class Pace:
    """How fast each GPU works while all do.

    `up(runs)` and `down` are the rates of its link to the host for copies of such runs; `beside`
    are the shares of these rates that uploads and downloads have while the others go on. `peer` is
    the rate of its links to other GPUs. `start` and `start_sum` are what a worker's thread takes to
    start a product and a sum of a strip. `product(unit, sides)` is the ms of a product of m, n, k;
    `split(unit, bytes)` and `add(unit, bytes)` are those of splitting operands that came, and of
    adding partials, or products to what is there of C.
    """

    up: Callable[[Runs], float]
    down: Callable[[Runs], float]
    beside: tuple[float, float]
    peer: float
    start: float
    start_sum: float
    product: Callable[[int, tuple[int, int, int]], float]
    split: Callable[[int, int], float]
    add: Callable[[int, int], float]


def finished_ms(plan: Plan, pace: Pace) -> float:
    """When the last strip should be in host memory, if everything is on the devices at once."""
    return _Pipeline(plan, pace).run()


class _HostLink:
    """The uploads and the downloads of one GPU, each in turn. Their ms are those that they take
    alone."""

    def __init__(self, beside: tuple[float, float]) -> None:
        self.up = self.down = 0.0  # when the last ones so far are over
        self.beside_up, self.beside_down = beside
        self.waiting: deque[tuple[float, float]] = deque()  # downloads: from when on, and their ms

    def upload(self, ms: float) -> float:
        """When an upload is over that comes next."""
        while self._waits():
            begin, left = self.waiting[0]
            if begin >= self.up + ms:
                break
            ms -= begin - self.up  # what came before it began
            self.up = begin
            if left * self.beside_up > ms * self.beside_down:  # it ends after the upload
                both, ms = ms / self.beside_up, 0.0
                self.waiting[0] = begin + both, left - both * self.beside_down
            else:
                both = left / self.beside_down
                ms -= both * self.beside_up
                self.down = begin + both
                self.waiting.popleft()
            self.up += both
        self.up += ms
        return self.up

    def download(self, begin: float, ms: float) -> None:
        """Takes a download that may begin then, after those before it."""
        self.waiting.append((begin, ms))

    def over(self) -> float:
        """When all is over, if nothing more is uploaded."""
        while self._waits():
            begin, left = self.waiting.popleft()
            self.down = begin + left
        return self.down

    def _waits(self) -> bool:
        """Whether a download is not over when the last upload is; what it had until then is
        done."""
        while self.waiting:
            begin, left = self.waiting[0]
            begin = max(begin, self.down)
            done = max(0.0, self.up - begin) * self.beside_down
            if done < left:
                self.waiting[0] = max(begin, self.up), left - done
                return True
            self.down = begin + left / self.beside_down
            self.waiting.popleft()
        return False


class _Needed(NamedTuple):
    """A block that a worker needs in a turn, the number of its piece of A or B, which other devices
    may have as well, and where its parts begin and end. Hashing a number is quick."""

    block: Block
    number: int
    starts: list[int]
    stops: list[int]


class _Pipeline:
    """When each GPU's links and multiprocessors are free again, by its unit."""

    def __init__(self, plan: Plan, pace: Pace) -> None:
        self.plan, self.pace, self.problem = plan, pace, plan.problem
        self.size, self.partial_size = plan.problem.operand_size, plan.problem.itemsize
        self.unit = [plan.devices[w.device].unit for w in plan.workers]  # of each worker
        self.host = defaultdict[int, _HostLink](lambda: _HostLink(pace.beside))
        self.peer: dict[int, float] = defaultdict(float)  # what comes from other GPUs
        self.sent: dict[int, float] = defaultdict(float)  # and goes to them
        self.busy: dict[int, float] = defaultdict(float)
        self.started: dict[int, float] = defaultdict(float)  # by worker
        self.there: dict[object, float] = {}  # when a part, or the C of a strip, is on a device
        self.read: set[tuple[int, int, int]] = set()  # parts, by a device's products
        self.needed: dict[tuple[int, int], list[_Needed]] = defaultdict(list)
        numbers: dict[object, int] = {}
        for block in plan.blocks:
            piece = block.operand, block.rows, block.cols, block.turn
            number = numbers.setdefault(piece, len(numbers))
            ends = [x.start for x in block.parts], [x.stop for x in block.parts]
            for worker in block.workers:
                self.needed[worker, block.turn].append(_Needed(block, number, *ends))

    def run(self) -> float:
        """When the last download is over."""
        made: dict[Panel, list[float]] = defaultdict(list)  # when each worker's partial is
        for step in as_started(self.plan):
            end, panel = self._product(step), step.panel
            if step.last:
                made[panel].append(end)
                if len(made[panel]) == len(panel.workers):
                    self._finish(panel, max(made[panel]))
        over = [link.over() for link in self.host.values()]
        return max([0.0, *self.started.values(), *over])

    def _product(self, step: Step) -> float:
        """When a product is over."""
        self.started[step.worker] += self.pace.start
        panel, unit = step.panel, self.unit[step.worker]
        ready, new = self.started[step.worker], 0
        for block, number, starts, stops in self.needed[step.worker, step.turn]:
            side = panel.rows if block.operand == "A" else panel.cols
            for part in range(bisect_right(stops, side.start), bisect_left(starts, side.stop)):
                # The GPU has been busy since a part was there that it read before.
                if (key := (number, part, block.device)) not in self.read:
                    self.read.add(key)
                    ready = max(ready, self._arrival(block, number, part))
                    new += self._bytes(block, part)
        for strip in panel.strips if self.problem.beta else ():
            if strip.owner == step.worker:
                added = self._added(strip)
                ready = ready if self.plan.summed else max(ready, added)
        sides = len(panel.rows), len(panel.cols), len(step.box.ks)
        taken = self.pace.product(unit, sides)
        if self.problem.compute == "fp32x3":
            taken += self.pace.split(unit, new)
        if step.turn:
            size = panel.rows.by(panel.cols) * self.partial_size
            taken += self.pace.add(unit, 2 * size)  # C is read and written
        self.busy[unit] = max(ready, self.busy[unit]) + taken
        return self.busy[unit]

    def _bytes(self, block: Block, part: int) -> int:
        across = block.cols if block.operand == "A" else block.rows
        return block.parts[part].by(across) * self.size

    def _arrival(self, block: Block, number: int, part: int) -> float:
        """When a part is on a block's device; `number` is that of `_Needed`."""
        key = number, part, block.device
        if key in self.there:
            return self.there[key]
        source, size = block.source(part), self._bytes(block, part)
        unit, sender = (self.plan.devices[x].unit for x in (block.device, source))
        if (brought := (number, part, source)) not in self.there:
            p = self.problem  # GPUs that have parts of K read all rows of B
            sides = len(block.parts[part]), p.n, p.k
            if block.operand == "A":
                sides = len(block.cols), p.k, len(block.rows)
            self.there[brought] = self._upload(sender, size, _runs(*sides, self.size))
        if source != block.device:
            begin = max(self.peer[unit], self.sent[sender], self.there[brought])
            over = begin + size * _MS / self.pace.peer
            self.peer[unit] = self.sent[sender] = self.there[key] = over
        return self.there[key]

    def _upload(self, unit: int, size: int, runs: Runs) -> float:
        return self.host[unit].upload(size * _MS / self.pace.up(runs))

    def _added(self, strip: Strip) -> float:
        """When the C that a strip adds to is where it is finished."""
        if strip not in self.there:
            self.there[strip] = self._upload(self.unit[strip.owner], *self._of_c(strip))
        return self.there[strip]

    def _of_c(self, strip: Strip) -> tuple[int, Runs]:
        """The bytes of a strip of C, and how they lie in a row-major matrix."""
        each = self.plan.result_size
        runs = _runs(len(strip.cols), self.problem.n, len(strip.rows), each)
        return strip.elements * each, runs

    def _sum(self, worker: int, strip: Strip, addends: int) -> float:
        """Has a worker start a sum over a strip; the ms of the sum, in which products wait."""
        self.started[worker] += self.pace.start_sum
        size = strip.elements * self.partial_size
        adding = self.pace.add(self.unit[worker], (addends + 1) * size)
        self.busy[self.unit[worker]] += adding
        return adding

    def _finish(self, panel: Panel, made: float) -> None:
        """Sums the partials of a panel, and downloads its strips."""
        after = dict.fromkeys(panel.strips, made)  # when partials and subtotals are there
        for strip, group in panel.subtotals:
            adding = self._sum(group[0], strip, len(group))
            after[strip] = max(after[strip], max(made, self.started[group[0]]) + adding)
        for strip, begin in after.items():
            unit = self.unit[strip.owner]
            if self.plan.summed:
                adding = self._sum(strip.owner, strip, len(strip.summands))
                begin = max(self.peer[unit], begin, self.started[strip.owner])
                if self.problem.beta:
                    begin = max(begin, self._added(strip))
                fetched = self.plan.fetched(strip) * strip.elements * self.partial_size
                self.peer[unit] = begin + fetched * _MS / self.pace.peer
                begin = self.peer[unit] + adding
            size, runs = self._of_c(strip)
            self.host[unit].download(begin, size * _MS / self.pace.down(runs))


def _runs(cols: int, width: int, rows: int, size: int) -> Runs:
    """Some columns and rows of a row-major matrix so wide, of elements of `size` bytes."""
    return Runs(cols * size, width * size, rows * width * size)
