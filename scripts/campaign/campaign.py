"""Carries out faults, several at once, and judges what became of C."""

import argparse
import dataclasses
import hashlib
import os
import random
import re
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

from .fault import (
    OF_RANKS,
    RESUMING,
    Fault,
    Process,
    alive,
    drawn,
    first_message,
    running,
    started,
)

ROOT = Path(__file__).resolve().parent.parent.parent
WHOLE_S = 240  # for a run without a fault, beside others
LOOK_S = 1.0  # at most, of the time that passes between two looks, counts as waiting
SIZE = "600"
RESTARTS = 2


class Job(Protocol):
    """A run that was started."""

    def exit_code(self) -> int | None:
        """None as long as it lasts; a signal's number is negative."""

    def end(self) -> None:
        """Ends what is left of it."""


class Site(Protocol):
    """Where runs are started, and what befalls them there."""

    targets: dict[str, int]
    events: dict[str, tuple[str, ...]]

    def start(self, folder: Path, fault: Fault | None, target: str) -> Job: ...

    def strike(self, fault: Fault, job: Job, process: Process) -> float:
        """Lets it happen to the process of the fault's rank; the seconds in which the job must
        end, beside the limit."""

    def ended(self, fault: Fault, job: Job) -> bool: ...

    def repair(self, fault: Fault, job: Job) -> None:
        """Makes the site as it was."""

    def judge(self, fault: Fault, text: str) -> None:
        """Adds what is wrong with a job that ended, by its exit code and its words."""


class Campaign:
    def __init__(self, given: argparse.Namespace, site: Site) -> None:
        self.given, self.site = given, site
        self.expected: dict[str, str] = {}

    def all(self) -> list[Fault]:
        rng, site = random.Random(self.given.seed), self.site
        weights = {x: n for x, n in site.targets.items() if self.given.target in (None, x)}
        chosen = [
            drawn(number, rng, weights, site.events, self.given.ranks)
            for number in range(self.given.count)
        ]
        if self.given.only:
            chosen = [
                Fault(i, *only.split(":"), self.given.rank, 0.1)
                for i, only in enumerate(self.given.only)
            ]
            for fault in chosen:
                fault.rank *= fault.target in OF_RANKS
        for target in sorted({fault.target for fault in chosen}):
            self.expected[target] = self.undisturbed(target)
        speaks = threading.Lock()

        def carried_out(fault: Fault) -> Fault:
            again = dataclasses.replace(fault, wrong=[])
            self.run(fault)
            with speaks:
                print(fault, *fault.running, sep="\n     ", flush=True)
            if not (fault.wrong and self.given.again):
                return fault
            again.first, again.running = fault.wrong, fault.running
            self.run(again)
            with speaks:
                print(again, " (tried again)", flush=True)
            return again

        with ThreadPoolExecutor(self.given.at_once) as pool:
            return list(pool.map(carried_out, chosen))

    def undisturbed(self, target: str) -> str:
        """What C.npy must be."""
        with made_folder() as name:
            folder = Path(name)
            if self.finished(folder, target):
                raise SystemExit(f"faults: a run without one fails: {words(folder)}")
            return digest(folder / "C.npy")

    def finished(self, folder: Path, target: str) -> int | None:
        """The exit code of a run that nothing befalls."""
        job = self.site.start(folder, None, target)
        try:
            wait_until(lambda: job.exit_code() is not None, WHOLE_S)
            return job.exit_code()
        finally:
            job.end()

    def run(self, fault: Fault) -> None:
        with made_folder() as name:
            folder = Path(name)
            while True:
                job = self.site.start(folder, fault, fault.target)
                try:
                    struck = self.strike(fault, job, folder)
                finally:
                    job.end()
                if struck or started(folder) or fault.restarts == RESTARTS:
                    break
                fault.restarts += 1  # the launcher itself failed, before it started a rank
            if not struck:
                fault.wrong.append(f"did not come to {fault.phase}")
            if fault.target in RESUMING and fault.file != "right":
                self.resume(fault, folder)
            if fault.wrong:
                fault.message = words(folder)

    def strike(self, fault: Fault, job: Job, folder: Path) -> bool:
        """Whether the run came to the fault's phase; judges what became of it."""
        mark = folder / "marks" / f"{fault.phase}.{fault.rank}"
        wait_until(lambda: mark.exists() or job.exit_code() is not None, WHOLE_S)
        if not mark.exists():
            fault.running = running(folder)
            return False
        time.sleep(fault.delay_s)
        more_s = self.site.strike(fault, job, Process.marked(mark))
        struck = time.monotonic()
        ended = wait_until(
            lambda: self.site.ended(fault, job) and not alive(folder), self.given.limit + more_s
        )
        fault.seconds = round(time.monotonic() - struck, 2)
        self.site.repair(fault, job)
        fault.exit_code = job.exit_code()
        self.judge(fault, folder, ended)
        return True

    def judge(self, fault: Fault, folder: Path, ended: bool) -> None:
        text, found, wrong = words(folder), folder / "C.npy", fault.wrong
        fault.message = first_message(text) if fault.exit_code else ""
        fault.file = "none"
        if found.exists():
            fault.file = "right" if digest(found) == self.expected[fault.target] else "wrong"
        fault.temporaries = len(list(folder.glob(".hybrid-gemm*")))
        if not ended:
            wrong.append("hangs")
            fault.running = running(folder)
            return
        if fault.file == "wrong":
            wrong.append("wrong file")
        if fault.temporaries and fault.event not in ("kill", "node"):
            wrong.append("temporary left")
        if fault.exit_code == 0 and fault.file != "right":
            wrong.append("exit code 0 and no file")
        if fault.exit_code != 0:  # otherwise in time to finish, or not to be ended by this
            self.site.judge(fault, text)

    def resume(self, fault: Fault, folder: Path) -> None:
        """The same command again, with what the fault left: C must have the same bits."""
        code = self.finished(folder, fault.target)
        said = re.search(r"(\d+) found, (\d+) multiplied", words(folder))
        fault.found = int(said[1]) if said else None
        if code != 0 or said is None:
            fault.wrong.append(f"not resumed: {first_message(words(folder))}")
        elif digest(folder / "C.npy") != self.expected[fault.target]:
            fault.wrong.append("other bits after resuming")
        elif left := list(folder.glob("C.npy.*")):
            fault.wrong.append(f"left after resuming: {left}")


def made_folder() -> tempfile.TemporaryDirectory:
    """A folder for one run. A rank that its launcher left behind may still write to it."""
    return tempfile.TemporaryDirectory(prefix="faults-", ignore_cleanup_errors=True)


def run_words(given: argparse.Namespace, target: str, fault: Fault | None) -> list[str]:
    """The words after `hybrid-gemm run`. Whole numbers, so that all splits have the same bits;
    not so with --resume, which promises the bits whatever is multiplied."""
    fill = "normal" if target in RESUMING else "integers"
    made = ["--device", given.device, "--size", SIZE, "--fill", fill, "-o", "C.npy"]
    if target in RESUMING:
        made += ["--resume", "--panel", "100" if target == "resume" else "200"]
    if target == "resume":
        return made
    made += ["--split", "cols", "--threads", "3" if target == "threads" else "1"]
    if target in ("single", "threads"):
        return made
    # Where a phase is made to last until the time limit, that is no lack of progress; and where
    # there is no fault, ranks that start late on a busy machine are to be waited for.
    patient = fault is None or fault.event == "limit"
    timeout = 120 if patient else given.rank_timeout
    return [*made, "--transport", given.transport, "--rank-timeout", f"{timeout:g}"]


def environment_for(folder: Path, fault: Fault | None) -> dict[str, str]:
    """Variables by which a run tells its phases, in an empty folder."""
    marks = folder / "marks"
    marks.mkdir(exist_ok=True)
    for old in marks.iterdir():
        old.unlink()
    path = [str(ROOT / "scripts" / "fault_marks"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    made = {"PYTHONPATH": os.pathsep.join(filter(None, path)), "FAULT_MARKS": str(marks)}
    if fault is None:
        return made
    last_s, panel_s = (60, 2) if fault.event == "limit" else (0.4, 0.02)
    panel_s *= fault.phase == "panels"
    return {
        **made, "FAULT_PHASE": fault.phase, "FAULT_LAST_S": str(last_s),
        "FAULT_PANEL_S": str(panel_s),
    }  # fmt: skip


def words(folder: Path) -> str:
    """What a run said, the errors first."""
    files = [folder / name for name in ("err", "out")]
    return "\n".join(x.read_text(errors="replace") for x in files if x.exists())


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def wait_until(what: Callable[[], Any], seconds: float) -> bool:
    """Whether it came true in time. Time in which nobody could look is not counted: with the host
    suspended, what is waited for stands still as well."""
    before = time.monotonic()
    while not what():
        if seconds <= 0:
            return False
        time.sleep(0.02)
        now = time.monotonic()
        seconds -= min(now - before, LOOK_S)
        before = now
    return True


def kill(processes: Iterable[Process], number: int = signal.SIGKILL) -> None:
    """Sends a signal to processes, of which some may have ended."""
    for process in processes:
        process.signal(number)
