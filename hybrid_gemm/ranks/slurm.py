"""Batch scripts for Slurm, from options to text. Pure."""

from __future__ import annotations

import dataclasses
import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import UsageError, counted

ENDED = "HYBRID_GEMM_ENDED"  # names the file in which rank 0 says that all is done
LAUNCHERS = ("srun", "mpirun")
_WORD = re.compile(r"[^\s;'\"\\$`#]*")  # of a directive; # begins a comment there

_MEM = re.compile(r"\d+([KMGT]B?)?", re.IGNORECASE)
_TASKS = re.compile(r"(\d+)(-(\d+)(:\d*[1-9]\d*)?)?(%\d+)?")  # of an array, between commas
# Of generic resources, between commas: a name, a type, and how many.
_MANY = r"(?P<count>\d+)[KMGTP]?"
_GRES = re.compile(rf"(?P<name>\w[\w.-]*)(:(?!\d+[KMGTP]?$)\w[\w.-]*)?(:{_MANY})?", re.IGNORECASE)
_TIME = re.compile(r"(\d+-)?\d+(:\d+){0,2}|UNLIMITED|INFINITE", re.IGNORECASE)

# A function, so that a study may start ranks several times.
_MPIRUN = f"""\
# Open MPI's mpirun ends with 0 where it loses a node, as by `sbatch --signal`, which comes to its
# daemons: rank 0, on this node, writes into this file once all is done.
ended=$(mktemp)
trap 'rm -f "$ended"' EXIT
start() {{
    : >"$ended"
    {ENDED}=$ended mpirun "$@"
    [ -s "$ended" ] || {{ echo "mpirun ended with 0, and the ranks were not done" >&2; exit 1; }}
}}"""


def _asked(default: Any, help: str, metavar: str | None = None) -> Any:
    return dataclasses.field(default=default, metadata={"help": help, "metavar": metavar})


@dataclasses.dataclass(frozen=True)
class Options:
    """What a job asks for, each with its help, of which the command's options are made. `run` are
    options of `hybrid-gemm run`; the script's own arguments come after them. `setup` are shell
    lines that put hybrid-gemm on the PATH (`environment`)."""

    nodes: int = _asked(1, "Nodes of the job.")
    ranks_per_node: int | None = _asked(
        None, "Ranks on each node. Without it, one for each GPU, or one."
    )
    gpus_per_node: int = _asked(0, "GPUs of each node.")
    cpus_per_rank: int = _asked(8, "Cores of each rank.")
    threads: int | None = _asked(None, "Worker threads in each rank.")
    launcher: str = _asked("srun", "What starts the ranks: srun or mpirun.")
    mpi: str = _asked(
        "pmix", "What srun --mpi is: one of those that `srun --mpi=list` names.", "NAME"
    )
    scaling: bool = _asked(False, "Run on 1, 2, 4, ... ranks: strong and weak scaling.")
    time: str = _asked("00:30:00", "The job's time limit.", "TIME")
    partition: str = _asked("", "The partition to run in.", "NAME")
    account: str = _asked("", "The account that is charged.", "NAME")
    qos: str = _asked("", "The quality of service.", "NAME")
    constraint: str = _asked("", "Features that nodes must have, as a100&ib.", "FEATURES")
    gres: str = _asked("", "Generic resources of each node, such as gpu:h100:8.", "LIST")
    mem: str = _asked("", "Host memory of each node, such as 200G.", "SIZE")
    array: str = _asked("", "Repeat the job as an array, such as 0-3 or 0-9%2.", "LIST")
    job_name: str = _asked("hybrid-gemm", "The job's name.", "NAME")
    setup: Sequence[str] = _asked(
        (), "A shell line that puts hybrid-gemm on the PATH, such as 'module load openmpi'; give "
        "it as often as needed. Without it, the lines that activate what is active here.", "LINE",
    )  # fmt: skip
    run: Sequence[str] = ()

    def __post_init__(self):
        if self.launcher not in LAUNCHERS:
            raise UsageError(f"no launcher is called {self.launcher!r}; there are srun and mpirun")
        for name, least in (("nodes", 1), ("gpus_per_node", 0), ("cpus_per_rank", 1),
                            ("ranks_per_node", 1), ("threads", 1)):  # fmt: skip
            given = getattr(self, name)
            if given is not None and given < least:
                raise UsageError(f"{name}={given}: it takes at least {least}")
        for name in ("time", "partition", "account", "job_name", "mpi", "qos", "constraint", "gres",
                     "mem", "array"):  # fmt: skip
            if not _WORD.fullmatch(getattr(self, name)):
                raise UsageError(
                    f"{name}={getattr(self, name)!r} is not one word that sbatch takes as it is: "
                    "leave out spaces, quotes and ; \\ $ ` #"
                )
        if "/" in self.job_name:
            raise UsageError(
                f"job_name={self.job_name!r}: the job's output has its name, so no / may be in it"
            )
        if not _TIME.fullmatch(self.time):
            raise UsageError(
                f"time={self.time!r}: it takes minutes, HH:MM:SS or D-HH:MM:SS, as sbatch does"
            )
        for name, is_right, such in (
            ("mem", _MEM.fullmatch, "200G"), ("array", _are_tasks, "0-3, 0-9%2 or 1,4-8:2"),
            ("gres", _are_resources, "gpu:2 or gpu:h100:8"),
        ):  # fmt: skip
            given = getattr(self, name)
            if given and not is_right(given):
                raise UsageError(f"{name}={given!r}: sbatch takes it as {such}")
        if self.gpus_per_node not in (0, self.gpus):
            raise UsageError(
                f"gres={self.gres!r} asks for {counted(self.gpus, 'GPU')} of each node, and "
                f"gpus_per_node={self.gpus_per_node}: Slurm gives what gres says. Leave out one"
            )
        if self.launcher == "mpirun" and self.mpi != Options.mpi:
            raise UsageError(f"mpi={self.mpi!r} is for srun: leave it out with the launcher mpirun")
        for line in (*self.setup, *self.run):
            if "\n" in line:
                raise UsageError(f"{line!r} is more than one line")

    @property
    def gpus(self) -> int:
        """GPUs of each node, which `gres` may ask for."""
        asked = [match for x in self.gres.split(",") if (match := _GRES.fullmatch(x))]
        of_gres = [int(x["count"] or 1) for x in asked if x["name"] == "gpu"]
        return sum(of_gres) if of_gres else self.gpus_per_node

    @property
    def tasks(self) -> int:
        return self.ranks_per_node or max(1, self.gpus)

    @property
    def ranks(self) -> int:
        return self.nodes * self.tasks


def _are_tasks(array: str) -> bool:
    """Whether these are tasks of a job array, as sbatch takes them."""
    found = [_TASKS.fullmatch(x) for x in array.split(",")]
    return all(x and int(x[1]) <= int(x[3] or x[1]) for x in found)


def _are_resources(gres: str) -> bool:
    """Whether these are generic resources, as sbatch takes them; which there are, a site says."""
    return all(_GRES.fullmatch(x) for x in gres.split(","))


def environment(variables: Mapping[str, str]) -> tuple[str, ...]:
    """The shell lines that activate what is active by these variables: modules, then a conda or a
    virtual environment; empty where nothing is."""
    lines = []
    if modules := variables.get("LOADEDMODULES", "").replace(":", " ").strip():
        lines.append(f"module load {modules}")
    if folder := variables.get("VIRTUAL_ENV"):
        lines.append(f". {shlex.quote(folder + '/bin/activate')}")
    elif folder := variables.get("CONDA_PREFIX"):
        conda = shlex.quote(variables.get("CONDA_EXE", "conda"))
        lines.append(f'eval "$({conda} shell.bash hook)"')
        lines.append(f"conda activate {shlex.quote(folder)}")
    return tuple(lines)


def command(options: Options) -> str:
    """The command line that prints this script."""
    words = ["hybrid-gemm", "slurm"]
    for field in dataclasses.fields(Options):
        value = getattr(options, field.name)
        name = "--" + field.name.replace("_", "-")
        if value == field.default or field.name == "run":
            continue
        if value is True:
            words.append(name)
        else:
            for each in value if isinstance(value, tuple | list) else [value]:
                words += [name, str(each)]
    if options.run:
        words += ["--", *options.run]
    return shlex.join(words)


def script(options: Options) -> str:
    """The text of an sbatch script."""
    directives = {
        "job-name": options.job_name,
        "partition": options.partition,
        "account": options.account,
        "qos": options.qos,
        "constraint": options.constraint,
        "nodes": options.nodes,
        "ntasks-per-node": options.tasks,
        "cpus-per-task": options.cpus_per_rank,
        "gpus-per-node": options.gpus_per_node or "",
        "gres": options.gres,
        "mem": options.mem,
        "time": options.time,
        "array": options.array,
        "output": "%x-%A-%a.out" if options.array else "%x-%j.out",
    }
    lines = ["#!/bin/bash", f"# Printed by: {command(options)}"]
    sized = not options.run or any(word.startswith("--size") for word in options.run)
    # Beside files and other sides, --size is refused.
    such = f"sbatch FILE {'--size 4096' if sized else '--json result.json'}"
    if options.scaling:
        such = "SIZE=4096 sbatch FILE --dtype float64 (SIZE is m and n; k grows in the weak study)"
    lines += [f"# Arguments go to `hybrid-gemm run`: {such}"]
    lines += [f"#SBATCH --{name}={value}" for name, value in directives.items() if value != ""]
    lines += ["", "set -eo pipefail"]
    lines += options.setup or ["# hybrid-gemm must be on the PATH: activate its environment here."]
    lines += ["set -u # not before: scripts of modules read variables that are not set"]
    lines += ["# Ranks get this script's environment, also after `sbatch --export=NONE`."]
    lines += ["export SLURM_EXPORT_ENV=ALL"]
    if options.launcher == "srun":
        lines += ["# srun does not take it over from sbatch (since Slurm 22.05)."]
        lines += ["export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK"]
    else:
        lines += [_MPIRUN]
    lines += ["", *(_scaling(options) if options.scaling else [_start(options, "", [])])]
    return "\n".join(lines) + "\n"


def _start(options: Options, count: str, extra: list[str]) -> str:
    """The line that starts ranks: all of the job's, or `count` of them."""
    threads = ["--threads", str(options.threads)] if options.threads else []
    run = shlex.join(["hybrid-gemm", "run", *threads, *options.run])
    words = [run, *extra, '"$@"']
    if options.launcher == "mpirun":
        # Ranks share their node's cores out themselves.
        return " ".join([f"start -n {count or '$SLURM_NTASKS'} --bind-to none", *words])
    # No --gpus-per-task: every rank sees all GPUs of the job on its node, as reading a peer's
    # memory needs, and takes its own. (--gpu-bind=none would show it other jobs' too.)
    start = ["srun"]
    if options.ranks > 1:
        # One rank that dies ends all; srun alone lets the others wait for it.
        start += [shlex.quote(f"--mpi={options.mpi}"), "--kill-on-bad-exit=1"]
    if count:
        start += ["--nodes=$nodes", f"--ntasks={count}"]
    return " ".join([*start, *words])


def _scaling(options: Options) -> list[str]:
    """1, 2, 4, ... ranks on one problem, and on a problem that grows with them along K."""
    result = ["--json", "scaling-$SLURM_JOB_ID-{}-$ranks.json"]
    strong = ["--size", "$size", *result]
    weak = ["-m", "$size", "-n", "$size", "-k", "$((size * ranks))", *result]

    def start(name: str, extra: list[str]) -> str:
        return "    " + _start(options, "$ranks", [x.format(name) for x in extra])

    return [
        "size=${SIZE:-16384} # of the strong study, and of the weak one on one rank",
        "for ((ranks = 1; ranks <= SLURM_NTASKS; ranks *= 2)); do",
        "    nodes=$(((ranks + SLURM_NTASKS_PER_NODE - 1) / SLURM_NTASKS_PER_NODE))",
        start("strong", strong),
        start("weak", weak),
        "done",
    ]
