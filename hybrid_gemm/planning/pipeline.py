"""When each piece of a plan should be where: uploads, relays, products, sums and downloads of a run
from host arrays, in the order in which one thread starts them. Pure; times are in ms, rates in
GB/s."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from .partition import Box
from .plan import Block, Panel, Plan, Strip

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
    start a product and a sum of a strip. `product(unit, panel, box)` is the ms of a product;
    `split(unit, bytes)` and `add(unit, bytes)` are those of splitting operands that came, and of
    adding partials, or products to what is there of C.
    """

    up: Callable[[Runs], float]
    down: Callable[[Runs], float]
    beside: tuple[float, float]
    peer: float
    start: float
    start_sum: float
    product: Callable[[int, Panel, Box], float]
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
        self.plan, self.pace = plan, pace
        self.size = plan.problem.operand_size
        self.units = [spec.unit for spec in plan.devices]
        self.host = defaultdict[int, _HostLink](lambda: _HostLink(pace.beside))
        self.peer: dict[int, float] = defaultdict(float)  # what comes from other GPUs
        self.sent: dict[int, float] = defaultdict(float)  # and goes to them
        self.busy: dict[int, float] = defaultdict(float)
        self.started: dict[int, float] = defaultdict(float)  # by worker
        self.there: dict[tuple[object, ...], float] = {}  # when a part is on a device
        self.split: set[tuple[object, ...]] = set()
        self.needed: dict[tuple[int, int], list[_Needed]] = defaultdict(list)
        numbers: dict[tuple[object, ...], int] = {}
        for block in plan.blocks:
            piece = block.operand, block.rows, block.cols, block.turn
            number = numbers.setdefault(piece, len(numbers))
            ends = [x.start for x in block.parts], [x.stop for x in block.parts]
            for worker in block.workers:
                self.needed[worker, block.turn].append(_Needed(block, number, *ends))

    def run(self) -> float:
        """When the last download is over."""
        left = {panel: len(panel.workers) for panel in self.plan.panels}
        made: dict[Panel, float] = defaultdict(float)
        for worker, turn, panel, last in self._steps():
            self.started[worker] += self.pace.start
            end = self._product(worker, turn, panel)
            if last:
                made[panel] = max(made[panel], end)
                left[panel] -= 1
                if not left[panel]:
                    after = self._add_up(panel, made[panel])
                    for strip in panel.strips:
                        self._finish(strip, after[strip])
        over = [link.over() for link in self.host.values()]
        return max([0.0, *self.started.values(), *over])

    def _steps(self) -> Iterator[tuple[int, int, Panel, bool]]:
        """(worker, turn, panel, whether it is the panel's last) as they are started."""
        panels: dict[int, list[Panel]] = defaultdict(list)
        for panel in self.plan.panels:
            for w in panel.workers:
                panels[w].append(panel)
        each = [
            [
                (w.index, turn, panel, turn == len(w.boxes) - 1)
                for turn in range(len(w.boxes))
                for panel in panels[w.index]
            ]
            for w in self.plan.workers
        ]
        for number in range(max(map(len, each), default=0)):
            yield from (steps[number] for steps in each if number < len(steps))

    def _product(self, worker: int, turn: int, panel: Panel) -> float:
        """When a worker's product of a panel is over."""
        planned = self.plan.workers[worker]
        unit = self.units[planned.device]
        ready, new = self.started[worker], 0
        for block, number, starts, stops in self.needed[worker, turn]:
            side = panel.rows if block.operand == "A" else panel.cols
            for part in range(bisect_right(stops, side.start), bisect_left(starts, side.stop)):
                ready = max(ready, self._arrival(block, number, part))
                key = number, part, block.device
                if key not in self.split:
                    self.split.add(key)
                    new += self._bytes(block, part)
        for strip in panel.strips if self.plan.problem.beta else ():
            if strip.owner == worker:
                added = self._added(strip)
                ready = ready if self.plan.summed else max(ready, added)
        begin = max(ready, self.busy[unit])
        taken = self.pace.product(unit, panel, planned.boxes[turn])
        if self.plan.problem.compute == "fp32x3":
            taken += self.pace.split(unit, new)
        if turn:
            size = len(panel.rows) * len(panel.cols) * self.plan.problem.itemsize
            taken += self.pace.add(unit, 2 * size)  # C is read and written
        self.busy[unit] = begin + taken
        return self.busy[unit]

    def _bytes(self, block: Block, part: int) -> int:
        across = block.cols if block.operand == "A" else block.rows
        return len(block.parts[part]) * len(across) * self.size

    def _runs(self, block: Block, part: int) -> Runs:
        """Of a part in a row-major matrix. GPUs that have parts of K read all rows of B."""
        side, problem = len(block.parts[part]), self.plan.problem
        if block.operand == "A":
            pitch, rows = problem.k * self.size, len(block.rows)
            return Runs(len(block.cols) * self.size, pitch, rows * pitch)
        pitch = problem.n * self.size
        return Runs(side * self.size, pitch, problem.k * pitch)

    def _arrival(self, block: Block, number: int, part: int) -> float:
        """When a part is on a block's device; `number` is that of `_Needed`."""
        key = number, part, block.device
        if key in self.there:
            return self.there[key]
        source, size = block.source(part), self._bytes(block, part)
        brought = number, part, source
        if brought not in self.there:
            alone = size * _MS / self.pace.up(self._runs(block, part))
            self.there[brought] = self.host[self.units[source]].upload(alone)
        if source != block.device:
            unit, sender = self.units[block.device], self.units[source]
            begin = max(self.peer[unit], self.sent[sender], self.there[brought])
            over = begin + size * _MS / self.pace.peer
            self.peer[unit] = self.sent[sender] = self.there[key] = over
        return self.there[key]

    def _added(self, strip: Strip) -> float:
        """When the C that a strip adds to is where it is finished."""
        if (key := ("C", strip)) not in self.there:
            unit = self.units[self.plan.workers[strip.owner].device]
            size, runs = self._whole(strip)
            self.there[key] = self.host[unit].upload(size * _MS / self.pace.up(runs))
        return self.there[key]

    def _whole(self, strip: Strip) -> tuple[int, Runs]:
        """The bytes of a strip of C, and how they lie in a row-major matrix."""
        each = self.plan.result_size
        pitch = self.plan.problem.n * each
        runs = Runs(len(strip.cols) * each, pitch, len(strip.rows) * pitch)
        return strip.elements * each, runs

    def _add_up(self, panel: Panel, made: float) -> dict[Strip, float]:
        """When the partials of each strip of a panel are there, and their subtotals."""
        after = dict.fromkeys(panel.strips, made)
        for strip, group in panel.subtotals:
            unit = self.units[self.plan.workers[group[0]].device]
            self.started[group[0]] += self.pace.start_sum
            adding = self.pace.add(unit, (len(group) + 1) * self._partial_bytes(strip))
            self.busy[unit] += adding  # products wait meanwhile
            after[strip] = max(after[strip], max(made, self.started[group[0]]) + adding)
        return after

    def _partial_bytes(self, strip: Strip) -> int:
        return strip.elements * self.plan.problem.itemsize

    def _finish(self, strip: Strip, made: float) -> None:
        """Sums and downloads a strip."""
        unit = self.units[self.plan.workers[strip.owner].device]
        if self.plan.summed:
            size = self._partial_bytes(strip)
            self.started[strip.owner] += self.pace.start_sum
            begin = max(self.peer[unit], made, self.started[strip.owner])
            if self.plan.problem.beta:
                begin = max(begin, self._added(strip))
            self.peer[unit] = begin + self.plan.fetched(strip) * size * _MS / self.pace.peer
            adding = self.pace.add(unit, (len(strip.summands) + 1) * size)
            self.busy[unit] += adding  # products wait meanwhile
            made = self.peer[unit] + adding
        size, runs = self._whole(strip)
        self.host[unit].download(made, size * _MS / self.pace.down(runs))
