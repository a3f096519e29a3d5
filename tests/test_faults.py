"""How jobs over ranks end: signalled, stopped, failed or hanging ranks, and what is no fault."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from support.command import environment, python
from support.ranks import MPI_ENVIRONMENT, MPIRUN, mpirun, needs_mpirun, patience

from hybrid_gemm import gemm
from hybrid_gemm.arrays import output_files
from hybrid_gemm.errors import UsageError
from hybrid_gemm.options import Options
from hybrid_gemm.ranks import ending, heartbeat

FAULTS = Path(__file__).resolve().parents[1] / "scripts" / "faults"
sys.path.insert(0, str(FAULTS.parent))
from campaign import campaign as faults  # noqa: E402
from campaign.fault import Process  # noqa: E402


def test_a_rank_timeout_is_seconds():
    assert Options(rank_timeout=3).rank_timeout == 3.0
    for wrong in (-1, float("inf"), float("nan")):
        with pytest.raises(UsageError, match=r"rank_timeout is .* a finite number of seconds"):
            Options(rank_timeout=wrong)
    for wrong in ("3", None, True):
        with pytest.raises(TypeError, match="rank_timeout"):
            Options(rank_timeout=wrong)
    with pytest.raises(TypeError, match="comm"):
        gemm([[1.0]], [[1.0]], rank_timeout=3)


def test_a_stopped_process_and_a_debugged_one_are_seen():
    child = subprocess.Popen(["sleep", "60"])
    try:
        os.kill(child.pid, signal.SIGSTOP)
        os.waitpid(child.pid, os.WUNTRACED)
        assert heartbeat.process_state(child.pid) == "T"
        assert f"(process {child.pid})" in beside(child.pid)
        assert not heartbeat.debugged(child.pid)
    finally:
        child.kill()
        child.wait()
    assert heartbeat.process_state(child.pid) == ""


def beside(pid: int) -> str:
    """What a sibling of that process would find."""
    code = "from hybrid_gemm.ranks import ending; print(ending.stopped_beside())"
    return python("-c", code).stdout


def test_a_temporary_is_removed_when_a_thread_ends_the_process(tmp_path):
    code = (
        "import sys, threading\nfrom hybrid_gemm.arrays import output_files\n"
        "from hybrid_gemm.ranks import ending\noutput_files.remember(sys.argv[1])\n"
        "threading.Thread(target=ending.end_job, args=('enough', 7)).start()\n"
        "threading.Event().wait()\n"
    )
    (tmp_path / "temporary").touch()
    done = python("-c", code, tmp_path / "temporary", timeout=60)
    assert (done.returncode, done.stderr) == (7, "hybrid-gemm: enough\n")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("held", [0.7, 60])
def test_the_end_waits_for_mpi_to_start_but_not_for_ever(held):
    """Open MPI's mpirun may wait for a rank that ends within. A process that waits for ever is
    ended by SIGALRM."""
    code = (
        "import threading, time\nfrom hybrid_gemm.ranks import ending\n"
        "ending._starting.acquire()\nstart = time.monotonic()\n"
        f"threading.Timer({held}, ending._starting.release).start()\n"
        "ending.os._exit = lambda code, end=ending.os._exit: end(\n"
        "    code if time.monotonic() - start > 0.6 else 99)\n"
        "ending.end_job('enough', 7)\n"
    )
    done = python("-c", code, timeout=120)
    assert (done.returncode, done.stderr) == (7, "hybrid-gemm: enough\n")


def test_the_end_waits_for_a_file_that_is_being_made(tmp_path):
    path = tmp_path / "temporary"

    def make():
        with ending.naming():
            made.set()
            time.sleep(0.3)
            path.touch()
            output_files.remember(str(path))

    made = threading.Event()
    maker = threading.Thread(target=make)
    maker.start()
    made.wait()
    ending._remove_all()
    maker.join()
    assert not path.exists()


def test_the_end_waits_until_the_launcher_has_read_the_message():
    code = """if True:
        import os, threading, time
        from hybrid_gemm.ranks import ending
        reader, writer = os.pipe()
        os.dup2(writer, 2)
        os.write(2, b"the cause")
        started = time.monotonic()
        threading.Timer(0.4, os.read, [reader, 100]).start()
        ending._until_read()
        print(time.monotonic() - started)
    """
    assert 0.3 < float(python("-c", code, timeout=60).stdout) < 30


# --- a process alone ----------------------------------------------------------------------

LONG_CALL = """
import ctypes
from hybrid_gemm.ranks import ending
ending.GRACE_S = 1
ending.watch_signals(as_rank=False)
libc, lock = ctypes.CDLL(None), ctypes.create_string_buffer(64)
libc.pthread_mutex_init(lock, None)
libc.pthread_mutex_lock(lock)
print("ready", flush=True)
libc.pthread_mutex_lock(lock)  # waits for itself, and takes up again after a signal
"""


def test_a_long_call_outside_python_does_not_keep_a_signal():
    child = subprocess.Popen(
        [sys.executable, "-c", LONG_CALL], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, env=environment(),
    )  # fmt: skip
    assert child.stdout.readline() == "ready\n"
    time.sleep(2)  # until it is in the call
    child.send_signal(signal.SIGTERM)
    code = child.wait(timeout=60)
    assert (code, child.stderr.read()) == (143, "hybrid-gemm: terminated\n")


# --- the command over ranks ---------------------------------------------------------------


@needs_mpirun
@pytest.mark.slow
@pytest.mark.parametrize("number", [pytest.param("usr1", marks=pytest.mark.campaign), "stop"])
def test_one_rank_ends_all(number, tmp_path):
    """While it waits inside MPI for the others, or sums: its own cause is said. Other signals end a
    rank as this one does: test_ending.py, and the random faults of .ci/run."""
    done = campaign("--only", f"{number}:rank:reducing", tmp_path=tmp_path)
    (fault,) = done["faults"]
    assert not fault["wrong"] and fault["exit_code"] and fault["temporaries"] == 0, fault


@needs_mpirun
@pytest.mark.slow
def test_the_campaign_finds_what_is_wrong(tmp_path):
    """A rank that nothing watches (--rank-timeout 0) hangs when it is stopped."""
    only = "--only", "stop:rank:multiplying", "--rank-timeout", 0, "--limit", 5
    (fault,) = campaign(*only, tmp_path=tmp_path)["faults"]
    assert fault["wrong"] == ["hangs"]
    # What hangs is told: the launcher, and the rank that is stopped.
    assert any("mpirun" in x or "prterun" in x for x in fault["running"]), fault
    assert any("hybrid_gemm" in x and "State: T" in x for x in fault["running"]), fault
    assert "generating A and B" in fault["message"]


def campaign(*arguments, tmp_path) -> dict:
    """Beside other tests a job takes longer to end than the 10 s of an idle machine: a rank that is
    stopped while it starts is missed only when the others have started. And ranks may start seconds
    after each other, for which more than 3 s of --rank-timeout are needed."""
    result = tmp_path / "faults.json"
    env = {**patience(), "OMPI_MCA_btl": MPI_ENVIRONMENT["OMPI_MCA_btl"]}
    done = python(
        FAULTS, "--ranks", 2, "--limit", 40, "--rank-timeout", 10, *arguments, "--json", result,
        timeout=280, env=env,
    )  # fmt: skip
    assert result.exists(), done.stderr
    return json.loads(result.read_text())


@needs_mpirun
def test_the_campaign_does_not_count_time_in_which_it_could_not_look(monkeypatch):
    """As with a host that is suspended for an hour, the job and the campaign alike."""
    clock, looked = [0.0], []

    def sleep(seconds):
        clock[0] += 3600 if len(looked) == 5 else seconds

    monkeypatch.setattr(faults.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(faults.time, "sleep", sleep)
    assert faults.wait_until(lambda: looked.append(1) or len(looked) == 10, 10)
    looked.clear()
    clock[0] = 0.0
    assert not faults.wait_until(lambda: looked.append(1), 10)
    assert 3609 < clock[0] < 3611


@needs_mpirun
@pytest.mark.parametrize(("options", "says"), [
    (["--splt", "rows"], "No such option"), (["--check"], "--check runs in one process"),
])  # fmt: skip
def test_an_option_that_one_rank_alone_has_wrong_is_told_by_it(options, says):
    command = [sys.executable, "-m", "hybrid_gemm", "run", "--size", "8"]
    done = subprocess.run(
        [MPIRUN, "-n", "1", *command, "--device", "cpu", ":", "-n", "1", *command, *options],
        capture_output=True, text=True, timeout=60, env=environment(**MPI_ENVIRONMENT),
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert done.stderr.count(says) == 1


@needs_mpirun
@pytest.mark.parametrize(("seconds", "code"), [("inf", 2), ("1e10", 0)])
def test_a_rank_timeout_of_any_length_is_taken_or_refused_in_one_line(seconds, code):
    options = "--size", 8, "--device", "cpu", "--rank-timeout", seconds
    done = mpirun(2, "-m", "hybrid_gemm", "run", *options, timeout=60, check=code)
    assert "Traceback" not in done.stderr
    assert done.stderr.count("hybrid-gemm: --rank-timeout is inf; it takes a finite number") == (
        code == 2
    )


SLEEPS = """
import sys, time
import numpy as np
from mpi4py import MPI
from hybrid_gemm import gemm
from hybrid_gemm.devices import cpu

comm, seconds, (how, *again) = MPI.COMM_WORLD, float(sys.argv[1]), sys.argv[2].split("-")
product = cpu.CpuDevice.gemm

def multiply():
    return gemm(np.ones((64, 64)), np.ones((64, 64)), comm=comm, device="cpu", split="cols",
                rank_timeout=1.5)

def slow(*arguments, **options):
    cpu.CpuDevice.gemm = product  # once is enough
    if how == "raise":
        raise RuntimeError("broken on purpose")
    print("multiplies", flush=True)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if how == "sleep":
            time.sleep(seconds)
    return product(*arguments, **options)

for _ in range(2 * len(again)):
    multiply()
if how == "outside":
    time.sleep(comm.rank * seconds)
elif comm.rank == 1:
    cpu.CpuDevice.gemm = slow
if how == "sleep" and len(sys.argv) > 3:
    sys.settrace(lambda *_: None)
try:
    c = multiply()
except RuntimeError as error:
    print("caught", error, flush=True)
    comm.Recv(bytearray(1))  # for ever
assert (c == 64).all()
print("right", flush=True)
"""


@pytest.fixture
def sleeps(tmp_path):
    path = tmp_path / "sleeps.py"
    path.write_text(SLEEPS)
    return path


@needs_mpirun
@pytest.mark.parametrize("again", ["", "-again"])  # of one for which ranks need not agree
def test_a_product_that_hangs_ends_the_job(sleeps, again):
    done = mpirun(2, sleeps, 300, f"sleep{again}")
    assert done.returncode == 1
    assert "no rank has made progress for 1.5 s (--rank-timeout): rank 1 on" in done.stderr


GOES_ON = """
import numpy as np
from mpi4py import MPI
from hybrid_gemm import gemm
from hybrid_gemm.ranks import distributed_operands

comm = MPI.COMM_WORLD
move = distributed_operands.move


def short(*arguments):
    distributed_operands.move = move
    raise MemoryError("short of memory")


def product(i):
    a = np.full((4, 4), i) if comm.rank == 0 else None
    return gemm(a, a, comm=comm, distribution="root", result="rows", rank_timeout=1.5)


product(1)
if comm.rank == 1:
    distributed_operands.move = short
for i in 2, 3, 4:
    try:
        c = product(i)
        print("right" if (c == 4 * i * i).all() else f"rank {comm.rank}: wrong", flush=True)
    except Exception as error:
        print(f"rank {comm.rank}: {error}", flush=True)
"""


@needs_mpirun
def test_a_rank_that_failed_alone_does_not_take_messages_of_that_call(tmp_path):
    """The others have sent them, and go on to their next product."""
    program = tmp_path / "goes_on.py"
    program.write_text(GOES_ON)
    done = mpirun(2, program)
    assert "wrong" not in done.stdout and "rank 1: short of memory" in done.stdout
    assert "failed on this rank alone (MemoryError: short of memory)" in done.stdout
    assert "rank 1: MemoryError: short of memory; the others waited 1.5 s" in done.stderr
    assert done.returncode == 1


@needs_mpirun
@pytest.mark.parametrize("again", ["", "-again"])
def test_an_error_of_one_rank_in_a_users_program_ends_the_job(sleeps, again):
    done = mpirun(2, sleeps, 0, f"raise{again}")
    assert done.returncode == 1 and "caught broken on purpose" in done.stdout
    assert "rank 1: RuntimeError: broken on purpose; the others waited 1.5 s" in done.stderr


ENDS = """
import sys, time
import numpy as np
from mpi4py import MPI
from hybrid_gemm import gemm

rank, (ends, seconds) = MPI.COMM_WORLD.rank, map(int, sys.argv[1:])
for number in range(3):
    if rank == ends and number == 1:
        time.sleep(seconds)
        raise RuntimeError("broken on purpose")
    gemm(np.ones((8, 8)), np.ones((8, 8)), comm=MPI.COMM_WORLD, device="cpu", rank_timeout=3.5)
"""


@needs_mpirun
# Seconds before the others make their next call, and after.
@pytest.mark.parametrize(("ends", "seconds"), [(0, 1), (1, 0)])
def test_a_rank_that_ends_by_an_error_between_calls_ends_the_job(ends, seconds, tmp_path):
    program = tmp_path / "ends.py"
    program.write_text(ENDS)
    done = mpirun(3, program, ends, seconds)
    assert done.returncode == 1 and "RuntimeError: broken on purpose" in done.stderr
    assert f"rank {ends} on " in done.stderr and "has ended, and the others wait" in done.stderr


@needs_mpirun
@pytest.mark.parametrize("arguments", [("compute",), ("outside",), ("sleep", "debugger")])
def test_what_lasts_is_no_fault(sleeps, arguments):
    done = mpirun(2, sleeps, 3, *arguments, timeout=60, check=0)
    assert done.stdout.count("right") == 2


@needs_mpirun
def test_a_job_that_was_suspended_as_a_whole_goes_on(sleeps):
    job = subprocess.Popen(
        [MPIRUN, "-n", "2", sys.executable, str(sleeps), "8", "compute"], text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment(**MPI_ENVIRONMENT),
    )  # fmt: skip
    assert job.stdout.readline() == "multiplies\n"
    ranks = Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()
    known = [Process.of(int(pid)) for pid in ranks]  # for the numbers are given again
    for number in signal.SIGSTOP, signal.SIGCONT:
        for rank in known:
            rank.signal(number)
        time.sleep(3)
    out, err = job.communicate(timeout=60)
    assert len(ranks) == 2 and job.returncode == 0, err
    assert out.count("right") == 2


@pytest.mark.parametrize("where", ["ranks.ending.watch_signals", "ranks.ending.finish_mpi"])
def test_a_signal_before_and_after_the_command_ends_it_in_order(where, monkeypatch, capsys):
    """Also while signals begin to be watched, and when all is done."""
    from hybrid_gemm import cli

    def arrives(*_args, **_keywords):
        raise ending.Signalled(signal.SIGHUP)

    def ended(message, code):
        raise SystemExit(f"{message}: {code}")

    monkeypatch.setattr(f"hybrid_gemm.{where}", arrives)
    if not where.endswith("watch_signals"):
        monkeypatch.setattr(ending, "watch_signals", lambda **_: None)
    monkeypatch.setattr(ending, "end_job", ended)
    monkeypatch.setattr(sys, "argv", ["hybrid-gemm", "--version"])
    with pytest.raises(SystemExit, match="hung up: 129"):
        cli.main()
