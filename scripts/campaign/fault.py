"""One fault: what is drawn of it, and what came of it."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

PHASES = ("starting", "generating", "multiplying", "reducing", "panels", "writing")
OF_RANKS = ("rank", "launcher", "job")  # targets


@dataclass
class Fault:
    """An event that befalls a target, and what came of it. `seconds` are from the event to the
    end, `state` is Slurm's word for it; `found` are the panels that the next run took up
    (`resume`), `restarts` the times that the launcher failed by itself, and `first` what was wrong
    the first time, if it was tried again."""

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
    if target == "resume" and rng.random() < 0.5:
        phase = "panels"
    rank = rng.randrange(ranks) if target in OF_RANKS else 0
    return Fault(number, event, target, phase, rank, round(rng.uniform(0, 0.4), 3))


def comes(phase: str, target: str) -> bool:
    """Whether a run of this target has the phase: one process sums only partials of its threads,
    and panels are those of --resume."""
    if phase == "reducing":
        return target not in ("single", "resume")
    return phase != "panels" or target == "resume"


def first_message(text: str) -> str:
    """The first line that hybrid-gemm said of its end, or else the launcher's first words."""
    lines = text.splitlines()
    words = [x for x in lines if x.startswith("hybrid-gemm: ")]
    notes = ("generating ", "reading ", "device: ")
    others = [x for x in lines if x.strip(" -") and not x.startswith(notes) and "panels" not in x]
    return next(iter(words + others), "")


def pids(folder: Path) -> set[int]:
    """The processes of a run that came to their first phase."""
    return {int(x.read_text()) for x in (folder / "marks").glob("starting.*")}


def alive(folder: Path) -> list[int]:
    """Those that still run."""
    found = []
    for pid in pids(folder):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if state not in "ZX":
            found.append(pid)
    return found
