"""A Slurm of emulated nodes on this host, and what befalls jobs there."""

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from hybrid_gemm.ranks import slurm

from .campaign import ROOT, environment_for, kill, run_words, wait_until
from .fault import Fault, Process
from .local import CODES, MPI, SIGNALS

SCRIPT = str(ROOT / "scripts" / "slurm-cluster")
# Slurm looks for jobs past their time limit every 30 s, and kills 2 s after it terminates.
LIMIT_FOUND_S = 40
KNOWN_S = 60  # until Slurm has cleared up
NODE_KNOWN_S = 5  # until it knows what became of a job whose node is back; not always, of one node
RUNS = ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING")
STATES = {"scancel": "CANCELLED", "limit": "TIMEOUT"}
CAUSES = {"scancel": "CANCELLED", "limit": "DUE TO TIME LIMIT"}
SAID = {"term": ("terminated",), "stop": ("stopped", "MPI has not started on all ranks")}


class SlurmJob:
    """A `campaign.Job`: a batch script that `hybrid-gemm slurm` prints."""

    def __init__(self, site: "Slurm", number: str) -> None:
        self.site, self.number = site, number

    def state(self) -> str:
        return self.facts()["JobState"]

    def facts(self) -> dict[str, str]:
        said = self.site.call("scontrol", "--oneliner", "show", "job", self.number)
        return dict(x.split("=", 1) for x in said.split() if "=" in x)

    def exit_code(self) -> int | None:
        facts = self.facts()
        if facts["JobState"] in RUNS:
            return None
        code, number = map(int, facts["ExitCode"].split(":"))
        failed = facts["JobState"] != "COMPLETED"
        return -number if number else code or int(failed)

    def end(self) -> None:
        if self.state() in RUNS:
            self.site.call("scancel", self.number)
            wait_until(lambda: self.state() not in RUNS, KNOWN_S)


class Slurm:
    """A `campaign.Site`: jobs of ranks, one a node, and of a process with --resume."""

    targets = {"job": 3, "resume": 2}  # noqa: RUF012
    events = {  # noqa: RUF012
        "job": ("scancel", "limit", "slurmd", "node", "kill", "term", "stop"),
        "resume": ("scancel", "limit", "slurmd", "node", "kill"),
    }

    def __init__(self, given: argparse.Namespace, environment: dict[str, str]) -> None:
        self.given, self.environment = given, environment
        self.folder = Path(environment["HYBRID_GEMM_SLURM"])

    def call(self, *command: str, **environment: str) -> str:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=120,
            env={**self.environment, **environment},
        )  # fmt: skip
        if done.returncode:
            raise SystemExit(f"faults: {' '.join(command)}: {done.stderr}")
        return done.stdout

    def start(self, folder: Path, fault: Fault | None, target: str) -> SlurmJob:
        ranks = self.given.ranks if target == "job" else 1
        options = slurm.Options(
            nodes=ranks, ranks_per_node=1, cpus_per_rank=1, time="00:05:00",
            run=run_words(self.given, target, fault),
        )  # fmt: skip
        script = folder / "job.sbatch"
        script.write_text(slurm.script(options))
        number = self.call(
            "sbatch", "--parsable", "--no-requeue", f"--chdir={folder}", f"--output={folder}/out",
            str(script), **environment_for(folder, fault),
        )  # fmt: skip
        return SlurmJob(self, number.strip())

    def strike(self, fault: Fault, job: SlurmJob, process: Process) -> float:
        more_s = 2.0  # from the batch system's first signal to its last
        if fault.event == "scancel":
            self.call("scancel", job.number)
        elif fault.event == "limit":
            self.call("scontrol", "update", f"JobId={job.number}", "EndTime=now+1")
            more_s += LIMIT_FOUND_S
        elif fault.event == "slurmd":
            kill([Process.of(self.daemon(fault))])
            more_s += 20  # the job goes on to its end
        elif fault.event == "node":
            kill(map(Process.of, of_node(self.daemon(fault))))
            more_s += self.given.rank_timeout
        else:
            kill([process], SIGNALS[fault.event])
            more_s += self.given.rank_timeout if fault.event == "stop" else 0
        return more_s

    def daemon(self, fault: Fault) -> int:
        return int((self.folder / f"slurmd.{node(fault)}.pid").read_text())

    def ended(self, fault: Fault, job: SlurmJob) -> bool:
        state = job.state()
        if fault.event == "node":  # Slurm hears of it when the node is back
            return True
        return state not in (RUNS[:-1] if fault.event == "slurmd" else RUNS)

    def repair(self, fault: Fault, job: SlurmJob) -> None:
        if fault.event in ("slurmd", "node"):
            subprocess.run([SCRIPT, "node", node(fault)], check=True, env=self.environment)
        known_s = NODE_KNOWN_S if fault.event == "node" else KNOWN_S
        if not wait_until(lambda: job.exit_code() is not None, known_s):
            self.call("scancel", job.number)
            wait_until(lambda: job.exit_code() is not None, KNOWN_S)
        wait_until(lambda: self.call("sinfo", "-h", "-o", "%T%D").strip() == "idle4", KNOWN_S)
        fault.state = job.state()

    def judge(self, fault: Fault, text: str) -> None:
        if fault.event in STATES and fault.file == "right":
            return  # C was there when the job was ended
        wanted = STATES.get(fault.event, "FAILED")
        if fault.event == "slurmd":
            # MPI's start needs the daemon, by which ranks of several nodes find each other.
            unstarted = fault.phase == "starting" and "MPI has not started" in fault.message
            if not unstarted:
                fault.wrong.append("did not go on without the daemon")
        elif fault.event != "node" and fault.state != wanted:
            fault.wrong.append(f"is {fault.state}, not {wanted}")
        if CAUSES.get(fault.event, "") not in text:
            fault.wrong.append("output without the cause")
        early = fault.phase == "starting" and not fault.message.startswith("hybrid-gemm: ")
        if not early and not any(x in fault.message for x in SAID.get(fault.event, ("",))):
            fault.wrong.append("message without the cause")
        # srun's is the highest of all ranks', and it ends one that is stopped by signals.
        if fault.event in SIGNALS and fault.exit_code not in (CODES[fault.event], 137, 143):
            fault.wrong.append(f"exit code is not {CODES[fault.event]}")


def node(fault: Fault) -> str:
    """The node of a rank: they are dealt out in order, one each."""
    return f"n{fault.rank + 1}"


def of_node(daemon: int) -> list[int]:
    """The processes of an emulated node: those of its host name's namespace."""
    mine = os.readlink(f"/proc/{daemon}/ns/uts")
    if mine == os.readlink("/proc/self/ns/uts"):
        raise SystemExit(f"faults: process {daemon} has no namespace of its own")
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if os.readlink(path / "ns" / "uts") == mine:
                found.append(int(path.name))
    return found


@contextlib.contextmanager
def cluster(given: argparse.Namespace) -> Iterator[Slurm]:
    """A Slurm of four nodes, as long as it lasts."""
    if given.at_once != 1:
        raise SystemExit("faults: with --slurm one at a time: nodes end, and are the whole host's")
    for number in signal.SIGINT, signal.SIGTERM, signal.SIGHUP:  # ends the cluster too
        signal.signal(number, lambda number, frame: sys.exit(128 + number))
    binaries = Path(sys.executable).parent
    # Paths of sockets are short, and $TMPDIR may be long.
    with tempfile.TemporaryDirectory(prefix="faults-slurm-", dir="/tmp") as folder:
        known = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "OMPI_MCA"))}
        prefix = dict.fromkeys(("OPAL_PREFIX", "PMIX_PREFIX", "PRTE_PREFIX"), str(binaries.parent))
        environment = {
            **known, **{name: MPI[name] for name in MPI if "rmaps" not in name},
            "PATH": f"{binaries}:{known['PATH']}", "HYBRID_GEMM_SLURM": f"{folder}/cluster",
        }  # fmt: skip
        if (binaries / "mpirun").exists():  # the Open MPI of PyPI, which Slurm does not know of
            environment |= {**prefix, "PMIX_MCA_psec": "native"}
        try:
            up = subprocess.run(
                [SCRIPT, "up"], check=True, stdout=subprocess.PIPE, text=True, env=environment
            )
            environment["SLURM_CONF"] = up.stdout.strip().partition("SLURM_CONF=")[2]
            yield Slurm(given, environment)
        finally:
            subprocess.run([SCRIPT, "down"], check=True, env=environment)
