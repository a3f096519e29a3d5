"""How a process of the command ends: by a signal or an error of its own, and all ranks with it.

A rank's signals are taken by a thread of their own, so that they end the job at once, whatever the
main thread waits for; and no rank that failed is left in MPI_Finalize, where it would wait for
ranks that wait for it. Imports MPI only where a launcher started ranks.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import fcntl
import os
import select
import signal
import socket
import stat
import sys
import termios
import threading
import time
from _thread import start_new_thread
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NoReturn

from ..arrays import output_files
from ..errors import HybridGemmError, is_of_threads
from ..host.libraries import Library
from . import pmix
from .slurm import ENDED

WARNINGS = signal.SIGUSR1, signal.SIGUSR2  # of a limit, by batch systems, to all ranks
SIGNALS = {
    signal.SIGTERM: "terminated", signal.SIGINT: "interrupted", signal.SIGHUP: "hung up",
    signal.SIGQUIT: "quit", signal.SIGXCPU: "out of processor time",
    **{n: f"ended by signal {n:d}" for n in WARNINGS},
}  # fmt: skip
GRACE_S = 5  # to end in order after a signal
SPOKEN_S = 1  # for rank 0 to say why all ranks end
HELD_S = 5  # a failed rank's connections
LAST_S = 25  # until the system ends a process that is ending, more than all its steps may take
STARTING_S = 3  # for MPI's start, which a rank does not leave half way
_OPEN_FILES = "/proc/self/fd"  # one entry for each open file, on Linux
RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "SLURM_PROCID")
_NOTHING = contextlib.nullcontext()

_naming = threading.RLock()  # held while a file is made whose name is not known yet
_ended = threading.Lock()  # taken once, by the thread that ends the process
_starting = threading.Lock()  # held while MPI starts
_mpi_library: Any = None  # where this module started MPI, and so has to finish it
_in_charge = False
# Also where other code has dropped it, or made another exception of it.
arrived: Signalled | None = None


class Signalled(BaseException):
    """A signal arrived in a process that runs alone."""

    def __init__(self, number: int) -> None:
        super().__init__(SIGNALS[signal.Signals(number)])
        self.exit_code = 128 + number


def in_charge() -> bool:
    """Whether this process is the command, which ends by its first error."""
    return _in_charge


def rank_here(variables: Mapping[str, str] = os.environ) -> str:
    """This process's rank, as the launcher says; "0" where none started it."""
    return next(filter(None, map(variables.get, RANK_VARIABLES)), "0")


# --- signals ------------------------------------------------------------------------------


def watch_signals(*, as_rank: bool) -> None:
    """Takes the `SIGNALS`, as far as they are not ignored (nohup).

    Called before anything starts threads, MPI and BLAS included, which inherit what is blocked.
    """
    global _in_charge
    _in_charge = True
    watched = [n for n in SIGNALS if signal.getsignal(n) is not signal.SIG_IGN]
    if as_rank and hasattr(signal, "sigwaitinfo"):  # else ranks are refused
        signal.pthread_sigmask(signal.SIG_BLOCK, watched)
        _thread(lambda: _take(watched))
        return
    for number in watched:
        signal.signal(number, _raise)
    sys.unraisablehook = _end_if_signalled
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    signal.set_wakeup_fd(writer.detach(), warn_on_full_buffer=False)
    _thread(lambda: _insist(reader))


def _take(watched: Iterable[signal.Signals]) -> None:
    """Ends the job at a rank's first signal."""
    info = signal.sigwaitinfo(watched)
    number = signal.Signals(info.si_signo)
    warned = number in WARNINGS
    if info.si_pid == os.getppid() and not (warned and rank_here() == "0"):
        # From the launcher: another rank has failed, and spoken, or the launcher was told to end.
        # A warning that it passes on comes to all ranks, of which rank 0 speaks.
        if warned:
            time.sleep(SPOKEN_S)
        _within(GRACE_S + 1, _remove_all)
        if _world() is not None:
            _within(1, _stay_connected)
        _exit(1 if _started_by_srun() and not warned else 128 + number)
    end_job(f"rank {rank_here()}: {SIGNALS[number]} ({number.name})", 128 + number)


def _started_by_srun() -> bool:
    """srun gives the highest exit code of all ranks, which must be that of the one that failed."""
    return "SLURM_PROCID" in os.environ and "OMPI_COMM_WORLD_RANK" not in os.environ


def _raise(number: int, _frame: Any) -> None:
    global arrived
    if arrived is None:  # a second one would stop what the first has made clean up
        arrived = Signalled(number)
        _stop_tools()  # threads wait for them, and the main thread for these
        raise arrived


def _end_if_signalled(dropped: sys.UnraisableHookArgs) -> None:
    """Ends a process whose signal came in a callback, of which Python drops what is raised."""
    if isinstance(dropped.exc_value, Signalled):
        end_job(str(dropped.exc_value), dropped.exc_value.exit_code)
    sys.__unraisablehook__(dropped)


def _insist(reader: socket.socket) -> None:
    """Ends a process that a signal has not ended in time: its main thread may be in a long
    product, and never come to Python's handler."""
    while True:
        (number,) = reader.recv(1)
        if number in SIGNALS:
            time.sleep(GRACE_S)
            end_job(SIGNALS[signal.Signals(number)], 128 + number)


# --- temporaries --------------------------------------------------------------------------


@contextlib.contextmanager
def naming() -> Iterator[None]:
    """Around the making of a temporary file and `output_files.remember`: no signal between."""
    with _naming:
        yield


def _stop_tools() -> None:
    compiler = sys.modules.get("hybrid_gemm.host.compiler")
    if stop := getattr(compiler, "stop_tools", None):  # it may be being imported
        stop()


def _remove_all() -> None:
    if _naming.acquire(timeout=GRACE_S):
        _naming.release()
    output_files.remove_all()
    if cache := sys.modules.get("hybrid_gemm.host.cache"):
        cache.remove_temporary_folders()


# --- the end ------------------------------------------------------------------------------


def end_job(message: str, code: int) -> NoReturn:
    """Ends this process, and all ranks with it, at once and from any thread, with this message
    as the job's. Nothing that hangs, a full pipe or MPI itself, keeps it."""
    if not _ended.acquire(blocking=False):
        threading.Event().wait()  # another thread ends the process
    try:
        signal.alarm(LAST_S)
        _say(f"hybrid-gemm: {message}\n".encode(errors="backslashreplace"))  # a file's name, say
        _within(0.5, _until_read)
        # A rank that ends while it introduces itself may keep Open MPI's mpirun (5.0.11) for ever:
        # so all go through MPI's start first, also those that are stopped.
        if not _starting.acquire(timeout=STARTING_S):
            _within(1, _continue_stopped)
            _within(0.5, _until_read)
            _starting.acquire(timeout=STARTING_S)
        world = _world()
        _within(GRACE_S + 1, _remove_all)
        if world is not None:
            _within(1, _stay_connected)
            _within(3, lambda: world.Abort(code))
    finally:  # also where there is no memory left for any of it
        _exit(code)


def _exit(code: int) -> NoReturn:
    try:
        _stop_tools()  # last: who waits for one would go on, to an end of its own
    finally:
        os._exit(code)


def _say(line: bytes) -> None:
    """Writes to standard error, unless that is a pipe which nobody empties."""
    with contextlib.suppress(OSError):
        while line and select.select([], [2], [], 3)[1]:
            line = line[os.write(2, line[: select.PIPE_BUF]) :]


def _world() -> Any:
    """MPI.COMM_WORLD between MPI's start and its end, else None."""
    mpi: Any = sys.modules.get("mpi4py.MPI")
    if not hasattr(mpi, "COMM_WORLD") or not mpi.Is_initialized() or mpi.Is_finalized():
        return None
    return mpi.COMM_WORLD if mpi.COMM_WORLD.size > 1 else None


def _until_read() -> None:
    """Waits until the launcher has read what was said: of ranks that MPI aborts, Open MPI may drop
    what is left in the pipe."""
    left = array.array("i", [1])
    while left[0] and stat.S_ISFIFO(os.fstat(2).st_mode):
        fcntl.ioctl(2, termios.FIONREAD, left)
        time.sleep(0.002)


def stopped_beside() -> dict[int, str]:
    """The processes that the same launcher started here and that are stopped, each in words."""
    found, job = {}, os.environ.get("PMIX_NAMESPACE")
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            state, parent = (
                (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()[:2]
            )
            if state != "T" or not (job or int(parent) == os.getppid()):
                continue
            pairs = (folder / "environ").read_bytes().split(b"\0")
            variables = dict(x.decode(errors="replace").partition("=")[::2] for x in pairs)
            if variables.get("PMIX_NAMESPACE") == job:  # also where a script is in between
                pid = int(folder.name)
                found[pid] = f"rank {rank_here(variables)} (process {pid})"
    return found


def _continue_stopped() -> None:
    """Lets stopped ranks of a job that ends come to MPI's start.

    Open MPI's mpirun (5.0.11) reads the first words of a rank, once that has connected, without a
    limit of time. A rank that is stopped before it sends them keeps mpirun from all else: it
    forwards no message, and does not see that ranks have ended. And mpirun lets stopped ranks go on
    when it ends them: where one introduces itself then and is gone before it is answered, mpirun
    may wait for ever in its own end, for the lock of what it knew of that rank.
    """
    for pid in stopped_beside():
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGCONT)


def _stay_connected() -> None:
    """Leaves a process behind that does nothing but hold this rank's connections for a while.

    Ranks that see one closed end the job as a failure of their own, with MPI's message and code,
    if they are faster than the launcher is told. On Linux alone, where open files are listed. Not
    by a fork, for which OpenBLAS waits, and with it all of Python, for a product that may never
    come to its end.
    """
    if not os.path.isdir(_OPEN_FILES):
        return
    actions: list[tuple[int, ...]] = []
    for number in map(int, os.listdir(_OPEN_FILES)):
        with contextlib.suppress(OSError):  # that of the listing
            # The launcher reads the output to its end, and the locks on files are for a later job.
            kept = number > 2 and stat.S_ISSOCK(os.fstat(number).st_mode)
            kind = (os.POSIX_SPAWN_DUP2, number) if kept else (os.POSIX_SPAWN_CLOSE,)
            actions.append((*kind, number))  # also one that would be closed by exec
    # In a session of its own, not to be killed with the rank.
    os.posix_spawnp("sleep", ["sleep", str(HELD_S)], {}, file_actions=actions, setsid=True)


def _within(seconds: float, call: Callable[[], object]) -> None:
    """`call()`, but waited for at most so long.

    `threading.Thread` would wait for ever for a thread that ends before it has begun, as happens
    where memory is short.
    """
    done = threading.Lock()

    def run() -> None:
        with contextlib.suppress(Exception):
            call()
        done.release()

    done.acquire()
    with contextlib.suppress(RuntimeError):  # no thread can be started
        start_new_thread(run, ())
        done.acquire(timeout=seconds)


def _thread(call: Callable[[], object]) -> None:
    threading.Thread(target=call, name="signals", daemon=True).start()


# --- errors -------------------------------------------------------------------------------


def agreed(error: BaseException) -> BaseException:
    """Marks an error that all ranks raise: rank 0 alone speaks of it."""
    error.agreed = True  # type: ignore[attr-defined]  # a mark that `ends_all` looks for
    return error


def is_agreed(error: BaseException) -> bool:
    return getattr(error, "agreed", False)


@contextlib.contextmanager
def ends_all(comm: Any) -> Iterator[None]:
    """Around a rank's work: an error that this rank alone has ends all ranks at once, with
    this rank's message and exit code; one that all have is raised on rank 0, and ends the
    others in silence."""
    try:
        yield
    except BaseException as error:
        if comm is None:
            raise
        if not is_agreed(error):
            fail(error)
        cause = error.__cause__  # this rank's own, where all raise what it could not send
        if isinstance(error, HybridGemmError) and cause is not None and words(cause) is None:
            _print_traceback(cause)
        if comm.rank == 0:
            raise
        raise SystemExit(exit_code(error)) from None


def fail(error: BaseException) -> NoReturn:
    """Ends all ranks by an error of this one."""
    known = words(error)
    with contextlib.suppress(Exception):  # where memory is short
        if known is None and not isinstance(error, KeyboardInterrupt | SystemExit):
            _print_traceback(error)
        _within(1, sys.stdout.flush)
    said = known or str(error) or type(error).__name__
    end_job(f"rank {rank_here()}: {said}", exit_code(error))


def _print_traceback(error: BaseException) -> None:
    import traceback

    traceback.print_exception(error)


def words(error: BaseException) -> str | None:
    """What the command says of an error that can come where nothing is wrong with it; None of any
    other, whose traceback is needed."""
    if is_of_threads(error):
        return (
            "the system starts no more threads: fewer --threads take fewer, or raise the limit "
            "(ulimit -u or -v, or the container's limit of processes)"
        )
    if isinstance(error, MemoryError) and not isinstance(error, HybridGemmError):
        return f"out of host memory: {error}".removesuffix(": ")
    if isinstance(error, OSError) and error.filename is None and error.strerror:
        return f"cannot write or read: {error.strerror}"  # standard output, mostly
    return str(error) if isinstance(error, HybridGemmError | OSError) else None


def exit_code(error: BaseException) -> int:
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else 1
    return 130 if isinstance(error, KeyboardInterrupt) else getattr(error, "exit_code", 1)


# --- MPI's start and end ------------------------------------------------------------------


def start_mpi() -> Any:
    """mpi4py's MPI, started.

    Where this process is the command, by ctypes: mpi4py holds Python's lock while MPI starts and
    ends, so that no thread could take a signal, or see that another rank does not come.
    """
    global _mpi_library
    import mpi4py

    if _in_charge and "mpi4py.MPI" not in sys.modules:
        mpi4py.rc.initialize = False
    from mpi4py import MPI

    if MPI.Is_initialized():
        return MPI
    try:
        library = Library(MPI.__file__)
        start, _finish = library.MPI_Init_thread, library.MPI_Finalize
    except (OSError, AttributeError):  # this mpi4py is linked in another way
        MPI.Init_thread(MPI.THREAD_MULTIPLE)
        _mpi_library = MPI
    else:
        with _starting:
            start(None, None, MPI.THREAD_MULTIPLE, ctypes.byref(ctypes.c_int()))
        _mpi_library = library
    pmix.until_all_have_started()
    for comm in MPI.COMM_WORLD, MPI.COMM_SELF:
        comm.Set_errhandler(MPI.ERRORS_RETURN)  # as mpi4py does: they become exceptions
    return MPI


def mpi_runs() -> bool:
    """Whether this module started MPI, so that other ranks may wait for this one."""
    return _mpi_library is not None and _world() is not None


def finish_mpi(
    waiting: AbstractContextManager = _NOTHING, finishing: AbstractContextManager = _NOTHING
) -> None:
    """Ends MPI if this module started it, with these around the last wait for all ranks and around
    MPI's end. Collective."""
    if _mpi_library is None or (world := _world()) is None:
        if _mpi_library is not None and not sys.modules["mpi4py.MPI"].Is_finalized():
            _finalize()
        return
    with waiting:
        world.Barrier()
    with finishing:
        _finalize()


def tell_script() -> str:
    """Tells the script that started this job, if it asks, that all ranks are done, and well: from
    its mpirun it may get 0 where they are not. Gives why it cannot, or ""."""
    if (file := os.environ.get(ENDED)) and rank_here() == "0":
        try:
            Path(file).write_text("done\n")
        except OSError as error:
            return f"cannot write {file}, which {ENDED} names: {error.strerror}"
    return ""


def _finalize() -> None:
    finish = getattr(_mpi_library, "MPI_Finalize", None) or _mpi_library.Finalize
    finish()
