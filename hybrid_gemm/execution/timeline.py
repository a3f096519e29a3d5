"""What every worker did and when."""

from __future__ import annotations

import dataclasses
import functools
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..host.kept import cached_property

try:
    import nvtx
except ImportError:  # the extra [profile]; without it nothing is marked
    nvtx = None

PHASES = ("upload", "relay", "multiply", "reduce", "download")


def marked(phase: str) -> Callable[[Callable], Callable]:
    """A decorator: while the function runs, a profiler sees an NVTX range of that name."""
    if nvtx is None:
        return lambda function: function
    return nvtx.annotate(phase, domain="hybrid-gemm")


@dataclass(frozen=True)
class Activity:
    """One phase of one worker; times in ms from the start of the run, on its device's clock."""

    worker: int
    phase: str
    start_ms: float
    stop_ms: float
    bytes: int = 0
    flops: int = 0

    @property
    def ms(self) -> float:
        return self.stop_ms - self.start_ms


def activities(
    marks: Iterable[tuple], clocks: Mapping[int, Callable[[Any], float]]
) -> Iterator[Activity]:
    """Of (worker, phase, event before, event after, bytes, flops), by the workers' clocks."""
    for worker, phase, start, stop, bytes, flops in marks:
        time_ms = clocks[worker]
        yield Activity(worker, phase, time_ms(start), time_ms(stop), bytes, flops)


class Timeline(Sequence[Activity]):
    """The activities of a run, which `source` works out when they are first looked at: asking for
    the times of a GPU's events takes milliseconds."""

    def __init__(self, source: Callable[[], Iterable[Activity]] = tuple):
        self._source = source

    @cached_property
    def _all(self) -> tuple[Activity, ...]:
        return tuple(self._source())

    @classmethod
    def after_each_other(cls, parts: Sequence[Timeline], ms: Sequence[float]) -> Timeline:
        """The activities of runs that took so many milliseconds, one run after the other."""

        def shifted() -> Iterator[Activity]:
            for i, part in enumerate(parts):
                before = sum(ms[:i])
                for x in part:
                    yield dataclasses.replace(
                        x, start_ms=x.start_ms + before, stop_ms=x.stop_ms + before
                    )

        return cls(shifted)

    def __getitem__(self, which):
        return self._all[which]

    def __len__(self) -> int:
        return len(self._all)

    def __repr__(self) -> str:
        workers = len({a.worker for a in self})
        return f"<Timeline: {len(self)} activities, {workers} workers, {_span(self):.4g} ms>"

    def __reduce__(self) -> tuple:  # without the devices whose clocks `source` asks
        return Timeline, (functools.partial(tuple, self._all),)

    def of(self, phase: str, worker: int | None = None) -> list[Activity]:
        return [a for a in self if a.phase == phase and worker in (None, a.worker)]

    def span_ms(self, *phases: str) -> float:
        """From the first start to the last stop of these phases, over all workers."""
        return _span(a for a in self if a.phase in phases)

    def worker_ms(self, worker: int, phase: str) -> float:
        """How long a worker was in a phase; what goes on at once counts once."""
        total, until = 0.0, -math.inf
        for a in sorted(self.of(phase, worker), key=lambda a: a.start_ms):
            total += max(0.0, a.stop_ms - max(a.start_ms, until))
            until = max(until, a.stop_ms)
        return total

    @property
    def multiply_ms(self) -> float:
        return self.span_ms("multiply")

    @property
    def multiply_and_sum_ms(self) -> float:
        """What the lab calls compute + sum: first product started to last strip summed."""
        return self.span_ms("multiply", "reduce")


class Clock:
    """Times one run: the host's clock for its whole, each device's own for its activities.

    `devices` are the devices by worker. Where several runs share a clock (`shared`), somebody
    else has started it.
    """

    def __init__(self, devices: Mapping[int, Any], *, shared: bool = False) -> None:
        self._devices = devices
        self.running = shared
        self.total_ms = 0.0
        self._made: list[tuple] = []
        self.marks: Iterable[tuple] = self._made
        self._lock = threading.Lock()

    def start(self) -> None:
        for device in dict.fromkeys(self._devices.values()):
            device.start_clock()
        self.running, self._started = True, time.perf_counter()

    def stop(self) -> None:
        self.running = False
        self.total_ms = (time.perf_counter() - self._started) * 1e3

    def mark(
        self, worker: int, phase: str, start: Any, stop: Any, bytes: int = 0, flops: int = 0
    ) -> None:
        """Counts a worker's activity between two events, while the clock runs."""
        if self.running:
            self.add(worker, phase, start, stop, bytes, flops)

    def add(
        self, worker: int, phase: str, start: Any, stop: Any, bytes: int = 0, flops: int = 0
    ) -> None:
        """As `mark`, also when the clock no longer runs."""
        with self._lock:
            self._made.append((worker, phase, start, stop, bytes, flops))

    def clear(self) -> None:
        """Forgets what was marked."""
        self.marks = self._made = []

    def timeline(self) -> Timeline:
        """What was marked; times are asked for when somebody looks."""
        clocks = {worker: device.clock() for worker, device in self._devices.items()}
        return Timeline(functools.partial(activities, self.marks, clocks))


def _span(activities: Iterable[Activity]) -> float:
    activities = list(activities)
    if not activities:
        return 0.0
    return max(a.stop_ms for a in activities) - min(a.start_ms for a in activities)
