"""Ranks: who started them, where they run, and what they do together. Imports MPI only when asked
to."""

from __future__ import annotations

import os
import pickle
import socket
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

from .. import errors
from ..errors import HybridGemmError, OptionTypeError, UnavailableError, UsageError, shown
from ..host import forks
from ..host.installing import pip_install
from ..option_checks import check_seconds, check_whole
from . import heartbeat, pmix
from .ending import agreed, rank_here, start_mpi

# Variables that tell a rank of how many it is one; srun tells only that there are ranks.
LAUNCHERS = {
    "OMPI_COMM_WORLD_SIZE": "mpirun (Open MPI)",
    "PMI_SIZE": "mpiexec or srun (PMI)",
    "PMIX_RANK": "srun --mpi=pmix or prterun",
}
LAST_S = 2  # for rank 0 to speak
LENGTH, SHORT = 8, 1016  # bytes of a text's length, and of a short text that ranks tell
HOW = "start ranks with `srun --mpi=pmix hybrid-gemm ...` or `mpirun hybrid-gemm ...`"

Own = TypeVar("Own")


def launcher(variables: Mapping[str, str] = os.environ) -> str | None:
    """The launcher that started this process as a rank, in words; None if none did."""
    return next((words for name, words in LAUNCHERS.items() if name in variables), None)


def expected(variables: Mapping[str, str] = os.environ) -> int:
    """How many ranks the launcher says there are, or tasks srun: not those of an allocation in
    which nobody has called srun."""
    tasks = "SLURM_NTASKS" if launcher(variables) else "SLURM_STEP_NUM_TASKS"
    for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", tasks):
        if variables.get(name, "").isdigit():
            return int(variables[name])
    return 1


def is_started() -> bool:
    """Whether a launcher or srun started this process, be it as the only one."""
    return launcher() is not None or "SLURM_STEP_NUM_TASKS" in os.environ


def is_rank() -> bool:
    """Whether a launcher started this process as one of several ranks, or of an unknown number:
    prterun does not tell how many there are."""
    several = expected() > 1 or ("PMIX_RANK" in os.environ and not pmix.of_srun(os.environ))
    return launcher() is not None and several


def world(command: str, limit: float = 0):
    """`MPI.COMM_WORLD` if a launcher started several ranks, else None.

    All ranks run the same `command`. With a `limit` in seconds, ranks that do not come in that
    time end the job, and then those that a heartbeat no longer finds.

    Raises `UsageError` where ranks do not give the same, where Slurm gave several tasks that do not
    find each other and for a `limit` that is no finite number from 0 on, and `UnavailableError`
    where mpi4py is missing or the system is not Linux.
    """
    limit = check_seconds("rank_timeout", limit)
    found, count = launcher(), expected()
    if found is None:
        if count > 1:
            raise agreed(
                UsageError(
                    f"srun started {count} tasks (SLURM_STEP_NUM_TASKS) and none of them as a "
                    f"rank of MPI; {HOW}"
                )
            )
        return None
    if not is_rank():
        return None
    _check_system()
    with heartbeat.deadline(limit, "MPI has not started on all ranks"):
        comm = _world(found, count)
        if comm is not None:
            agree(comm, {"the command": command, "rank_timeout": limit})
            if limit:
                heartbeat.of(comm, limit)
    return comm


def alone(command: str) -> None:
    """Raises `UsageError` where a launcher started several ranks for a command of one process."""
    if (count := expected()) > 1:
        # Not agreed: other ranks may have been started with another command.
        raise UsageError(
            f"{command} runs in one process, and {launcher() or 'srun'} started {count}; "
            "start it without"
        )


def _check_system() -> None:
    """Raises `UnavailableError` where ranks find neither the cores nor the state of others."""
    if sys.platform != "linux":
        raise agreed(
            UnavailableError(
                "ranks of MPI need Linux, be it in a container or a virtual machine; one process "
                "multiplies here too: start it without mpirun, or leave comm out"
            )
        )


def _world(found: str, count: int):
    try:
        MPI = start_mpi()
    except (ImportError, RuntimeError) as error:
        raise UnavailableError(
            f"started by {found}, and mpi4py does not load: {error} ({pip_install('mpi')})"
        ) from None
    comm = MPI.COMM_WORLD
    if comm.size == 1 and count > 1:
        raise agreed(
            UsageError(
                f"{found} started {count} ranks and MPI finds only 1: this MPI "
                f"({MPI.Get_library_version().split(',')[0].strip()}) is not the one that the "
                f"launcher serves; {HOW}, with the mpirun or --mpi of that MPI"
            )
        )
    return comm if comm.size > 1 else None


def first_of_job(variables: Mapping[str, str] = os.environ) -> bool:
    """Whether this process speaks for its job before MPI can tell."""
    return rank_here(variables) == "0"


def speaks_last() -> bool:
    """Leaves rank 0, and the launcher, which ends every rank as soon as one has failed, a moment.
    Returns whether this rank is still there: then it alone has failed."""
    time.sleep(LAST_S)
    return launcher() is not None


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


def on_same_cores(comm, where: Place) -> list[int]:
    """The ranks of this node that were left on the same cores as this one, itself among them.
    Collective."""
    mine = where.node, sorted(os.sched_getaffinity(0))
    return [rank for rank, found in enumerate(comm.allgather(mine)) if found == mine]


def bind_cores(comm, where: Place) -> None:
    """Gives each rank a share of the cores, where ranks of a node were left on the same ones."""
    mine, sharing = sorted(os.sched_getaffinity(0)), on_same_cores(comm, where)
    turn, count = sharing.index(comm.rank), len(sharing)
    if count > 1:
        share = mine[turn * len(mine) // count : (turn + 1) * len(mine) // count]
        os.sched_setaffinity(0, share or [mine[turn % len(mine)]])


# --- what ranks do together ---------------------------------------------------------------

_KINDS: dict[str, Callable[[str], Exception]] = {
    **{name: kind for name, kind in vars(errors).items() if isinstance(kind, type)},
    **{kind.__name__: kind for kind in (MemoryError, TypeError, ValueError)},
    "OSError": HybridGemmError,
}


def _told(error: Exception) -> tuple[str, str]:
    """The name of the class that all ranks raise for it, and what it says."""
    for kind in type(error).__mro__:
        if kind.__name__ in _KINDS:
            return kind.__name__, errors.said(error)
    return HybridGemmError.__name__, errors.named(error)


def tell(comm: Any, what: str, call: Callable[[], tuple[Own, Any]]) -> tuple[Own, list[Any]]:
    """What this rank keeps of its `call()`, and what every rank tells the others.

    `call` gives both. `what` names the caller's own call, which has to be the same on all ranks:
    otherwise all raise `UsageError`. Where `call` raises on any rank, all raise the first one's
    error, and `HybridGemmError` for one of a kind that other ranks may not know. So errors end
    every rank in order, with nobody left waiting. Collective.
    """
    beat = heartbeat.known(comm)
    kept: Any = None
    cause: Exception | None = None
    with beat.call(heartbeat.LOCAL):
        try:
            kept, told = call()
            sent = pickle.dumps((what, told, None))  # what cannot be sent is this rank's error
        except Exception as error:
            cause, sent = error, pickle.dumps((what, None, _told(error)))
    with beat.call(heartbeat.WAITING):
        everyone = _allgather(comm, sent)
    calls, all_told, failures = zip(*map(pickle.loads, everyone), strict=True)
    if first := next(filter(None, failures), None):
        name, message = first
        if len(set(failures)) > 1:
            message = f"rank {failures.index(first)}: {message}"
        try:
            raise agreed(_KINDS[name](message)) from cause
        finally:
            del cause  # whose traceback leads here, and to arrays
    for rank, other in enumerate(calls):
        if other != calls[0]:
            raise agreed(
                UsageError(
                    f"ranks do not make the same call: rank 0 makes {calls[0]}, rank {rank} {other}"
                )
            )
    return kept, list(all_told)


def together(comm: Any, call: Callable[[], Own]) -> Own:
    """`call()` on every rank; where it fails on any, an error on all of them, as by `tell`."""
    return call() if comm is None else tell(comm, "", lambda: (call(), None))[0]


def refuse(comm: Any, error: Exception) -> NoReturn:
    """Raises this rank's `error` on all ranks, while others are in `tell`."""

    def fail() -> NoReturn:
        raise error

    together(comm, fail)
    raise error  # which `tell` has done


def _allgather(comm: Any, text: bytes) -> list[bytes]:
    """Every rank's text: by one call of MPI where all are short, as they are but for long options;
    mpi4py's own takes two."""
    from mpi4py import MPI

    sent = len(text).to_bytes(LENGTH) + text[:SHORT]
    everyone = bytearray(comm.size * (LENGTH + SHORT))
    comm.Allgather([sent.ljust(LENGTH + SHORT), MPI.BYTE], [everyone, MPI.BYTE])
    texts = []
    for at in range(LENGTH, len(everyone), LENGTH + SHORT):
        size = int.from_bytes(everyone[at - LENGTH : at])
        if size > SHORT:
            return comm.allgather(text)
        texts.append(bytes(everyone[at : at + size]))
    return texts


def check_communicator(comm: Any) -> None:
    """Raises `OptionTypeError` for what is no communicator of mpi4py's whose ranks can multiply
    together, `UsageError` where MPI does not run, and `UnavailableError` where the system is not
    Linux. Not collective."""
    _check_system()
    mpi = sys.modules.get("mpi4py.MPI")  # which whoever has a communicator has imported
    kind: Any = getattr(mpi, "Comm", ())
    takes = "comm takes an mpi4py communicator, such as MPI.COMM_WORLD"
    if not isinstance(comm, kind):
        raise OptionTypeError(f"{takes}; {shown(comm)} was given")
    check_runs()
    if not comm:
        raise OptionTypeError(
            f"{takes}; this one is MPI.COMM_NULL: it has been freed, or this process is not in it"
        )
    if comm.Is_inter():
        raise OptionTypeError(
            f"{takes}; this one is an intercommunicator, between two groups of processes: "
            "its Merge() makes one of all of them"
        )


def check_runs() -> None:
    """Raises `UsageError` before MPI_Init and after MPI_Finalize, where MPI would end the process
    without a word of Python's, and in a child that a rank has forked, which is no rank."""
    from mpi4py import MPI

    if MPI.Is_finalized():
        raise UsageError("MPI has been finalized; ranks work together before MPI.Finalize()")
    if forks.mpi_is_of_parent():
        raise UsageError(
            "this process was forked by one in which MPI runs, and is no rank; multiply without "
            "comm here, or over ranks in the parent"
        )
    if not MPI.Is_initialized():
        raise UsageError("MPI has not been initialized; MPI.Init_thread() starts it")


def is_same(x: object, y: object) -> bool:
    """Whether two ranks gave the same; a NaN is the same as another, though not equal."""
    if repr(x) == repr(y):
        return True
    try:
        return bool(x == y)
    except (TypeError, ValueError):  # of an array there is no one answer
        return False


def check_root(comm, root: object) -> int:
    """Raises `OptionTypeError` for a `root` that is no whole number, `UsageError` for one that is
    no rank."""
    rank = check_whole("root", root)
    if not 0 <= rank < comm.size:
        raise UsageError(f"root={rank}; there are ranks 0 to {comm.size - 1}")
    return rank


def check_alike(everyone: Sequence[Mapping], names: Iterable[str], more: str = "") -> None:
    """Raises `UsageError` where ranks told different things by one of these names."""
    for rank, theirs in enumerate(everyone):
        for name in names:
            if not is_same(other := theirs.get(name), value := everyone[0][name]):
                raise UsageError(
                    f"ranks do not agree on {name}: rank 0 has {value!r}, rank {rank} has "
                    f"{other!r}{more}"
                )


def agree(comm: Any, choices: Mapping[str, object]) -> None:
    """Raises `UsageError` on all ranks where they differ in one of these choices. Collective."""
    _, everyone = tell(comm, "", lambda: (None, dict(choices)))
    try:
        check_alike(everyone, choices, "; start all ranks alike")
    except UsageError as error:
        raise agreed(error) from None
