"""How a process ends where even the ending fails, and what is refused where MPI does not run."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
from support.command import environment, python
from support.ranks import mpirun, needs_mpirun

from hybrid_gemm.errors import HybridGemmError, OutOfMemoryError
from hybrid_gemm.ranks import ending, heartbeat

ENDS = """import threading, time
from hybrid_gemm.ranks import ending
{}
ending.end_job('enough', 7)
"""
NO_THREADS = "def none(*_): raise RuntimeError('no more threads')\nending.start_new_thread = none"


@pytest.mark.parametrize("lacks", [
    "threading.Thread.start = lambda self: threading.Event().wait()", NO_THREADS,
])  # fmt: skip
def test_a_process_ends_where_no_thread_can_be_started(lacks):
    """As where memory is short: Python then waits for ever for a thread that never begins."""
    done = python("-c", ENDS.format(lacks), timeout=100)
    assert (done.returncode, done.stderr) == (7, "hybrid-gemm: enough\n")


def test_the_system_ends_a_process_that_does_not_come_to_its_end():
    code = ENDS.format("ending.LAST_S = 1\nending._say = lambda line: time.sleep(60)")
    assert python("-c", code, timeout=100).returncode == -14


def test_a_message_of_any_length_is_said():
    code = "from hybrid_gemm.ranks import ending\nending.end_job('x' * 30000, 7)\n"
    done = python("-c", code, timeout=100)
    assert (done.returncode, len(done.stderr)) == (7, 30000 + len("hybrid-gemm: \n"))


def test_a_pipe_that_nobody_empties_does_not_keep_a_process():
    code = "import os\nos.set_blocking(2, False)\ntry:\n    while True: os.write(2, b'x' * 4096)\n"
    code += "except BlockingIOError: os.set_blocking(2, True)\n"
    child = subprocess.Popen(
        [sys.executable, "-c", code + ENDS.format("")], stderr=subprocess.PIPE, env=environment()
    )
    assert child.wait(timeout=100) == 7
    child.stderr.close()


SLEEPS = """import os, time
from hybrid_gemm.ranks import ending
ending.watch_signals(as_rank=True)
from hybrid_gemm.arrays.output_files import OutputFile
file = OutputFile(os.path.realpath("C.npy"), named=True)
print("computing", flush=True)
time.sleep(100)
"""


@pytest.mark.parametrize(("by", "launcher", "code", "says"), [
    ("the launcher", {"PMIX_RANK": "3"}, 143, ""),
    ("the launcher", {"OMPI_COMM_WORLD_RANK": "3", "SLURM_PROCID": "0"}, 143, ""),
    ("the launcher", {"SLURM_PROCID": "3"}, 1, ""),  # srun gives the highest code of all
    ("kill", {"PMIX_RANK": "3"}, 143, "hybrid-gemm: rank 3: terminated (SIGTERM)\n"),
    ("kill", {"SLURM_PROCID": "3"}, 143, "hybrid-gemm: rank 3: terminated (SIGTERM)\n"),
    ("kill -INT", {"PMIX_RANK": "3"}, 130, "hybrid-gemm: rank 3: interrupted (SIGINT)\n"),
])  # fmt: skip
def test_a_rank_speaks_of_a_signal_unless_its_launcher_ends_it(by, launcher, code, says, tmp_path):
    """As it does where another rank has failed, and spoken."""
    variables = {k: v for k, v in environment().items() if k not in ending.RANK_VARIABLES}
    child = subprocess.Popen(
        [sys.executable, "-c", SLEEPS], cwd=tmp_path, env={**variables, **launcher}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert child.stdout.readline() == "computing\n" and len(os.listdir(tmp_path)) == 1
    if by == "the launcher":
        child.terminate()
    else:
        subprocess.run(["sh", "-c", f"{by} {child.pid}"], check=True)
    _out, err = child.communicate(timeout=100)
    assert (child.returncode, err, os.listdir(tmp_path)) == (code, says, [])


@pytest.mark.parametrize(("error", "words"), [
    (MemoryError(), "out of host memory"), (MemoryError("12 TB"), "out of host memory: 12 TB"),
    (OutOfMemoryError("12 TB"), "12 TB"), (KeyboardInterrupt(), "KeyboardInterrupt"),
    (OSError(28, "No space left on device"), "cannot write or read: No space left on device"),
    (OSError(28, "No space left", "C.npy"), "[Errno 28] No space left: 'C.npy'"),
    (RuntimeError("can't start new thread"), "the system starts no more threads: fewer --threads "
     "take fewer, or raise the limit (ulimit -u or -v, or the container's limit of processes)"),
])  # fmt: skip
def test_a_rank_says_its_cause_plainly(error, words, monkeypatch, capsys):
    said = []
    monkeypatch.setattr(ending, "end_job", lambda message, code: said.append(message))
    ending.fail(error)
    assert said == [f"rank 0: {words}"] and not capsys.readouterr().err


@pytest.mark.parametrize("cause", [KeyError("x"), OutOfMemoryError("12 TB")])
def test_the_rank_that_failed_shows_where_once_all_ranks_raise_its_error(cause, capsys):
    """`KeyError: 'x'` alone says little of a programming error."""
    with pytest.raises(SystemExit), ending.ends_all(SimpleNamespace(rank=1)):
        raise ending.agreed(HybridGemmError("rank 1: of another kind")) from cause
    said = capsys.readouterr().err
    assert said == ("" if isinstance(cause, OutOfMemoryError) else "KeyError: 'x'\n")


def test_states_are_of_processes_of_any_name(named_by_half_a_letter):
    assert heartbeat.process_state(os.getpid()) in "RSD"
    assert not heartbeat.debugged(os.getpid())
    assert ending.stopped_beside() == {}


# --- programs over ranks --------------------------------------------------------------------------

ENDS_MPI = """
import threading
import numpy as np
from mpi4py import MPI
from hybrid_gemm import free_memory, gemm
a = np.ones((8, 8))
for comm in MPI.COMM_WORLD, MPI.COMM_WORLD.Dup(), MPI.COMM_SELF:
    gemm(a, a, comm=comm, device="cpu", split="cols")
MPI.Finalize()
assert not [x for x in threading.enumerate() if x.name == "heartbeat"]
free_memory()
print("right", flush=True)
"""


@needs_mpirun
@pytest.mark.parametrize("program", [ENDS_MPI, ENDS_MPI[: ENDS_MPI.index("MPI.Finalize")]])
def test_mpi_ends_before_a_program_or_with_it(program):
    """What is kept with communicators that nobody freed calls MPI no more."""
    done = mpirun(2, "-c", program, timeout=60, check=0)
    assert "Traceback" not in done.stderr
    assert done.stdout.count("right") == program.count("right") * 2


MPI_DOES_NOT_RUN = """
import mpi4py
mpi4py.rc.initialize = False
import numpy as np
import os
from mpi4py import MPI
from hybrid_gemm import RankRunner, free_memory, gemm
from hybrid_gemm.errors import UsageError

def refused(says, *calls):
    for call in calls:
        try:
            call()
        except UsageError as error:
            assert says in str(error), error
        else:
            raise AssertionError(call)

a, world = np.ones((8, 8)), MPI.COMM_WORLD
starts = lambda: RankRunner(world, device="cpu"), lambda: gemm(a, a, comm=world, device="cpu")
refused("has not been initialized; MPI.Init_thread() starts it", *starts)
MPI.Init()
runner = RankRunner(world, device="cpu", split="cols")
assert (runner.gemm(a, a) == 8).all()
ends = lambda: runner.gemm(a, a), runner.spec, runner.close
if child := os.fork():
    assert os.waitpid(child, 0)[1] == 0
else:  # whose messages the other rank would take for its parent's
    refused("forked by one in which MPI runs", *starts, *ends)
    free_memory()
    assert (gemm(a, a, device="cpu") == 8).all()
    os._exit(0)
assert (runner.gemm(a, a) == 8).all()
free_memory()
MPI.Finalize()
refused("has been finalized", *starts, *ends)
print(runner, flush=True)
"""


@needs_mpirun
def test_before_and_after_mpi_and_in_a_forked_child_a_product_is_refused():
    """Where a call of MPI ends the process, or speaks in its parent's place."""
    assert mpirun(2, "-c", MPI_DOES_NOT_RUN, timeout=60, check=0).stdout.count("<RankRunner") == 2


def test_a_child_that_is_forked_before_the_first_use_is_no_rank():
    program = """
import os, sys, types
import hybrid_gemm
sys.modules["mpi4py.MPI"] = types.SimpleNamespace(Is_initialized=lambda: True)
if child := os.fork():
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
from hybrid_gemm.host import forks
os._exit(not forks.mpi_is_of_parent())
"""
    assert python("-c", program).returncode == 0
