"""How jobs over ranks end that a fault befalls while MPI starts or ends."""

import signal
import subprocess
import sys
import time

import pytest
from support.command import environment
from support.ranks import mpirun, needs_mpirun

RUN = "run", "--size", "8", "--device", "cpu", "--rank-timeout", "4"

# As Open MPI's start does: it connects to mpirun, and then sends who it is. Then the command.
STOPPED_BETWEEN = """
import os, signal, socket
if os.environ["OMPI_COMM_WORLD_RANK"] == os.environ["STOPS"]:
    found = [value for name, value in os.environ.items() if name.startswith("PMIX_SERVER_URI")]
    host, port = found[0].rpartition("//")[2].split(":")
    with socket.create_connection((host, int(port))):
        os.kill(os.getpid(), signal.SIGSTOP)
from hybrid_gemm.cli import main
main()
"""


@needs_mpirun
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_stopped_while_it_introduces_itself_does_not_keep_the_launcher(
    rank, tmp_path
):
    """mpirun reads its words without a limit of time, and does nothing else meanwhile."""
    path = tmp_path / "stopped_between.py"
    path.write_text(STOPPED_BETWEEN)
    done = mpirun(3, path, *RUN, timeout=100, STOPS=str(rank))
    assert done.returncode == 1, done.stderr
    first = next(x for x in done.stderr.splitlines() if x.startswith("hybrid-gemm: "))
    assert "MPI has not started on all ranks for 4 s (--rank-timeout): " in first
    assert f": rank {rank} (process " in first and first.endswith(" is stopped")


DEADLINE = """
import sys, time
from hybrid_gemm.ranks import heartbeat
with heartbeat.deadline(float(sys.argv[1]), "nothing has come"):
    print("begun", flush=True)
    for _ in range(int(4 * float(sys.argv[2]))):
        time.sleep(0.25)
"""


def suspended(command, seconds):
    """Exit code and messages of a process that is stopped for so long once it has begun."""
    child = subprocess.Popen(
        command, text=True, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert child.stdout.readline() == "begun\n"
    child.send_signal(signal.SIGSTOP)
    time.sleep(seconds)
    child.send_signal(signal.SIGCONT)
    _out, err = child.communicate(timeout=100)
    return child.returncode, err


@pytest.mark.parametrize(("lasts", "code"), [(1.5, 0), (9, 1)])
def test_the_time_for_mpis_start_does_not_run_while_the_job_is_suspended(lasts, code):
    said = "hybrid-gemm: rank 0: nothing has come for 3 s (--rank-timeout)\n" * code
    assert suspended([sys.executable, "-c", DEADLINE, "3", str(lasts)], 4) == (code, said)


def test_the_time_for_mpis_start_does_not_run_while_the_launcher_is_stopped():
    launcher = "import subprocess, sys\nsys.exit(subprocess.run(sys.argv[1:]).returncode)"
    started = [sys.executable, "-c", DEADLINE, "2", "4"]
    assert suspended([sys.executable, "-c", launcher, *started], 6) == (0, "")


STOPPED_BEFORE = """
import os, signal
from hybrid_gemm.ranks import ending

work = getattr(ending, os.environ["BEFORE"])

def stop_and_work(*arguments):
    if os.environ["OMPI_COMM_WORLD_RANK"] == os.environ["STOPS"]:
        os.kill(os.getpid(), signal.SIGSTOP)
    return work(*arguments)

setattr(ending, os.environ["BEFORE"], stop_and_work)
from hybrid_gemm.cli import main
main()
"""


@needs_mpirun
@pytest.mark.parametrize(
    ("before", "cause", "rank"),
    [
        ("start_mpi", "MPI has not started on", 0),
        ("finish_mpi", "no sign of it", 1),
        ("_finalize", "MPI has not ended on", 0),
    ],
)
def test_a_rank_that_is_stopped_before_mpi_starts_or_while_it_ends_is_missed(
    before, cause, rank, tmp_path
):
    path = tmp_path / "stopped_before.py"
    path.write_text(STOPPED_BEFORE)
    done = mpirun(2, path, *RUN, timeout=100, STOPS=str(rank), BEFORE=before)
    assert done.returncode == 1, done.stderr
    first = next(x for x in done.stderr.splitlines() if x.startswith("hybrid-gemm: "))
    assert cause in first and f"rank {rank} " in first and " is stopped" in first
