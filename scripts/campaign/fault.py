"""One fault: what is drawn of it, and what came of it."""

import contextlib
import os
import random
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

PHASES = ("starting", "generating", "multiplying", "reducing", "panels", "writing")
# Targets: a rank of a job, one of a job with --resume, the launcher, and a Slurm job.
RANKS = ("rank", "resumed")
OF_RANKS = (*RANKS, "launcher", "job")
RESUMING = ("resume", "resumed")


@dataclass
class Fault:
    """An event that befalls a target, and what came of it. `seconds` are from the event to the
    end, `state` is Slurm's word for it; `found` are the panels that the next run took up, of a
    target in `RESUMING`, `restarts` the times that the launcher failed by itself, `first` what was
    wrong the first time, if it was tried again, and `running` what still ran of a job that hangs.
    `message` is the first, or all that was said where something is wrong.
    """

    number: int
    event: str
    target: str
    phase: str
    rank: int
    delay_s: float
    seconds: float = 0.0
    exit_code: int | None = None
    state: str = ""
    message: str = ""
    file: str = ""
    temporaries: int = 0
    found: int | None = None
    restarts: int = 0
    wrong: list[str] = field(default_factory=list)
    first: list[str] = field(default_factory=list)
    running: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        found = "" if self.found is None else f"  {self.found} panels found"
        return (
            f"{self.number:4} {self.event:8} {self.target:8} rank {self.rank} {self.phase:11} "
            f"{self.seconds:6.2f} s  exit {self.exit_code} {self.state}  C {self.file:5}{found}  "
            f"{', '.join(self.wrong) or 'ok'}  {self.message}"
        )


def drawn(
    number: int,
    rng: random.Random,
    targets: Mapping[str, int],
    events: Mapping[str, Sequence[str]],
    ranks: int,
) -> Fault:
    """A random fault; `targets` have weights, `events` are those of each."""
    target = rng.choices(list(targets), list(targets.values()))[0]
    event = rng.choice(events[target])
    phases = [x for x in PHASES if comes(x, target)]
    if event == "limit":
        phases.remove("starting")  # which cannot be made to last until then
    phase = rng.choice(phases)
    if target in RESUMING and rng.random() < 0.5:
        phase = "panels"
    rank = rng.randrange(ranks) if target in OF_RANKS else 0
    return Fault(number, event, target, phase, rank, round(rng.uniform(0, 0.4), 3))


def comes(phase: str, target: str) -> bool:
    """Whether a run of this target has the phase: one process sums only partials of its threads,
    and panels are those of --resume."""
    if phase == "reducing":
        return target not in ("single", "resume")
    return phase != "panels" or target in RESUMING


def first_message(text: str) -> str:
    """The first line that hybrid-gemm said of its end, or else the launcher's first words."""
    lines = text.splitlines()
    words = [x for x in lines if x.startswith("hybrid-gemm: ")]
    notes = ("generating ", "reading ", "device: ")
    others = [x for x in lines if x.strip(" -") and not x.startswith(notes) and "panels" not in x]
    return next(iter(words + others), "")


@dataclass(frozen=True)
class Process:
    """A process, known by its number and its start: numbers are given again, to threads too, and a
    signal to a thread's number ends its process."""

    pid: int
    started: str

    @classmethod
    def of(cls, pid: int) -> "Process":
        return cls(pid, _stat(pid)[1])

    @classmethod
    def marked(cls, mark: Path) -> "Process":
        pid, started = mark.read_text().split()
        return cls(int(pid), started)

    def runs(self) -> bool:
        state, started = _stat(self.pid)
        return started == self.started and state not in "ZX"

    def signal(self, number: int) -> None:
        """Does nothing if it has ended."""
        with contextlib.suppress(OSError):
            descriptor = os.pidfd_open(self.pid)  # of no thread
            try:
                if self.runs():
                    signal.pidfd_send_signal(descriptor, number)
            finally:
                os.close(descriptor)


def _stat(pid: int) -> tuple[str, str]:
    """The state of a process, and when it started; X of one that has ended."""
    try:
        found = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "X", ""
    return found[0], found[19]


def started(folder: Path) -> list[Process]:
    """The processes of a run that came to their first phase."""
    return [Process.marked(x) for x in (folder / "marks").glob("starting.*")]


def alive(folder: Path) -> list[Process]:
    """Those that still run."""
    return [process for process in started(folder) if process.runs()]


def running(folder: Path) -> list[str]:
    """What runs for a job, its launcher too: command, state, signals, and where threads wait."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if str(folder / "marks").encode() in (place / "environ").read_bytes():
                found.append(_described(place))
    return found


def _described(place: Path) -> str:
    """One process, by its folder in /proc."""
    command = " ".join((place / "cmdline").read_text().split("\0")[:8])
    named = ("State", "SigBlk", "SigIgn", "SigCgt", "SigPnd", "ShdPnd")
    lines = (line.split(maxsplit=1) for line in (place / "status").read_text().splitlines())
    status = ", ".join(f"{x[0]} {x[1]}" for x in lines if x[0].rstrip(":") in named)
    waits = [(thread / "wchan").read_text() for thread in (place / "task").iterdir()]
    return f"{place.name} {command}: {status}; threads wait in {', '.join(waits)}"
