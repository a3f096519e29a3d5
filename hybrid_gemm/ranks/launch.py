"""Ranks: who started them, where they run, and how they end. Imports MPI only when asked to."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

from .. import errors
from ..errors import HybridGemmError, UnavailableError, UsageError

# Variables that tell a rank of how many it is one; srun tells only that there are ranks.
LAUNCHERS = {
    "OMPI_COMM_WORLD_SIZE": "mpirun (Open MPI)",
    "PMI_SIZE": "mpiexec or srun (PMI)",
    "PMIX_RANK": "srun --mpi=pmix or prterun",
}
HELD_S = 5  # a failed rank's connections
HOW = "start ranks with `srun --mpi=pmix hybrid-gemm ...` or `mpirun hybrid-gemm ...`"


def launcher(variables: Mapping[str, str] = os.environ) -> str | None:
    """The launcher that started this process as a rank, in words; None if none did."""
    return next((words for name, words in LAUNCHERS.items() if name in variables), None)


def expected(variables: Mapping[str, str] = os.environ) -> int:
    """How many ranks the launcher, or Slurm, says there are."""
    for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_NTASKS"):
        if variables.get(name, "").isdigit():
            return int(variables[name])
    return 1


def world():
    """`MPI.COMM_WORLD` if a launcher started several ranks, else None.

    Raises `UsageError` where Slurm gave several tasks that do not find each other, and
    `UnavailableError` where mpi4py is missing.
    """
    found, count = launcher(), expected()
    if found is None:
        if count > 1:
            raise UsageError(
                f"Slurm gave {count} tasks (SLURM_NTASKS) and this process was not started as "
                f"one of them by an MPI launcher; {HOW}"
            )
        return None
    if count == 1 and "PMIX_RANK" not in os.environ:
        return None
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise UnavailableError(
            f"started by {found}, and mpi4py does not load: {error} "
            "(pip install 'hybrid-gemm[mpi]')"
        ) from None
    comm = MPI.COMM_WORLD
    if comm.size == 1 and count > 1:
        raise UsageError(
            f"{found} started {count} ranks and MPI finds only 1: this MPI "
            f"({MPI.Get_library_version().split(',')[0].strip()}) is not the one that the "
            f"launcher serves; {HOW}, with the mpirun or --mpi of that MPI"
        )
    return comm if comm.size > 1 else None


def first_of_job(variables: Mapping[str, str] = os.environ) -> bool:
    """Whether this process speaks for its job before MPI can tell."""
    ranks = (variables.get(x) for x in ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "SLURM_PROCID"))
    return next(filter(None, ranks), "0") == "0"


# --- where ranks run ----------------------------------------------------------------------


@dataclass(frozen=True)
class Place:
    """Where a rank runs; `node` is the lowest rank of its node."""

    rank: int
    node: int
    local_rank: int
    local_size: int
    host: str


def place(comm) -> Place:
    from mpi4py import MPI

    local = comm.Split_type(MPI.COMM_TYPE_SHARED, key=comm.rank)
    found = Place(
        comm.rank, local.bcast(comm.rank), local.rank, local.size, socket.gethostname()
    )  # fmt: skip
    local.Free()
    return found


def gpus_of(place: Place, visible: Sequence[int], threads: int | None) -> list[int]:
    """The ordinals of a rank: dealt round among the ranks of a node, one a thread at most.

    A rank that sees one GPU (--gpus-per-task=1) takes it, whatever its local number.
    """
    if place.local_size >= len(visible):
        return [visible[place.local_rank % len(visible)]]
    return list(visible[place.local_rank :: place.local_size])[: threads or 1]


def bind_cores(comm, where: Place) -> None:
    """Gives each rank a share of the cores, where ranks of a node were left on the same ones."""
    mine = sorted(os.sched_getaffinity(0))
    everyone = comm.allgather((where.node, mine))
    sharing = [r for r, found in enumerate(everyone) if found == (where.node, mine)]
    turn, count = sharing.index(comm.rank), len(sharing)
    if count > 1:
        share = mine[turn * len(mine) // count : (turn + 1) * len(mine) // count]
        os.sched_setaffinity(0, share or [mine[turn % len(mine)]])


# --- how ranks fail -----------------------------------------------------------------------


def together(comm, call: Callable):
    """`call()` on every rank; where it fails on any, the first one's error on all of them.

    So errors in what was asked end every rank in order, with nobody left waiting.
    """
    if comm is None:
        return call()
    value = failure = None
    try:
        value = call()
    except (HybridGemmError, OSError, MemoryError) as error:
        failure = type(error).__name__, str(error)
    failures = comm.allgather(failure)
    failed = [rank for rank, found in enumerate(failures) if found]
    if not failed:
        return value
    name, message = failures[failed[0]]
    if len(set(failures)) > 1:
        message = f"rank {failed[0]}: {message}"
    kind = getattr(errors, name, MemoryError if name == "MemoryError" else HybridGemmError)
    raise agreed(kind(message))


def agree(comm, choices: Mapping[str, object]) -> None:
    """Raises `UsageError` on all ranks where they differ in one of these choices. Collective."""
    everyone = comm.allgather(dict(choices))
    for rank, theirs in enumerate(everyone):
        for name, value in everyone[0].items():
            if theirs.get(name) != value:
                raise agreed(
                    UsageError(
                        f"ranks do not agree on {name}: rank 0 has {value!r}, rank {rank} has "
                        f"{theirs.get(name)!r}; start all ranks with the same options and files"
                    )
                )


def agreed(error: BaseException) -> BaseException:
    """Marks an error that all ranks raise: rank 0 alone speaks of it."""
    error.agreed = True  # type: ignore[attr-defined]  # a mark that `ending` looks for
    return error


@contextlib.contextmanager
def ending(comm):
    """Around a rank's work: an error that this rank alone has ends all ranks at once, with
    this rank's message and exit code; one that all have is raised on rank 0, and ends the
    others in silence. So does the launcher's SIGTERM, for which another rank spoke."""
    if comm is not None:
        signal.signal(signal.SIGTERM, lambda number, frame: os._exit(128 + number))
    try:
        yield
    except BaseException as error:
        if comm is None:
            raise
        if not getattr(error, "agreed", False):
            _abort(comm, error)
        if comm.rank == 0:
            raise
        leave_last()
        raise SystemExit(exit_code(error)) from None


def leave_last() -> None:
    """A moment for rank 0 to speak: a launcher ends every rank as soon as one has failed."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    time.sleep(2)


def exit_code(error: BaseException) -> int:
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else 1
    return 130 if isinstance(error, KeyboardInterrupt) else getattr(error, "exit_code", 1)


def _abort(comm, error: BaseException) -> NoReturn:
    known = isinstance(error, HybridGemmError | OSError | MemoryError)
    if not known and not isinstance(error, KeyboardInterrupt | SystemExit):
        traceback.print_exception(error)
    text = str(error) or type(error).__name__
    sys.stdout.flush()
    print(f"hybrid-gemm: rank {comm.rank}: {text}", file=sys.stderr, flush=True)
    _stay_connected()
    comm.Abort(exit_code(error))
    os._exit(exit_code(error))


def _stay_connected() -> None:
    """Leaves a process behind that does nothing but hold this rank's connections for a while.

    Ranks that see one closed end the job as a failure of their own, with MPI's message and code,
    if they are faster than the launcher is told.
    """
    if not hasattr(os, "fork") or os.fork():
        return
    os.setsid()  # not killed with the rank
    for number in range(3):  # whose output the launcher reads to its end
        os.close(number)
    time.sleep(HELD_S)
    os._exit(0)
