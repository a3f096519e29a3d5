"""Heartbeats of ranks: what they tell each other, and when one of them ends the job. Most ranks are
threads of this process, and time passes as fast as the tests say."""

import contextlib
import itertools
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
from support.ranks import mpirun, needs_mpirun

from hybrid_gemm.ranks import ending, heartbeat
from hybrid_gemm.ranks.heartbeat import FAILED, LEFT, LOCAL, MULTIPLYING, OUTSIDE, WAITING

LIMIT = 100.0
NOBODY = 2**22  # no system has processes of this number, and of later ones


class Comm:
    """What heartbeats ask of a communicator; ranks say that they are these processes."""

    def __init__(self, rank: int, hosts, board: dict, barrier: threading.Barrier) -> None:
        self.rank, self.size = rank, len(hosts)
        self.hosts, self.board, self.barrier, self.port = hosts, board, barrier, 0

    def allgather(self, mine):
        if isinstance(mine, tuple) and len(mine) == 2:
            mine = self.hosts[self.rank], NOBODY + self.rank
        self.board[self.rank] = mine
        self.barrier.wait(100)
        found = [self.board[rank] for rank in range(self.size)]
        self.barrier.wait(100)
        return found

    def bcast(self, mine):
        token, (addresses, port) = self.allgather(list(mine))[0]
        return token, (addresses, self.port or port)


class Job:
    """Ranks whose heartbeats beat 50 times a second, and the clock that they look at."""

    def __init__(self, monkeypatch) -> None:
        self.offset, self.said, self.beats = 0.0, [], []
        clock = SimpleNamespace(**vars(time))
        clock.monotonic = lambda: time.monotonic() + self.offset
        monkeypatch.setattr(heartbeat, "time", clock)
        monkeypatch.setattr(heartbeat, "MOST_TICK_S", 0.02)
        monkeypatch.setattr(heartbeat, "FOUND_S", 100)
        monkeypatch.setattr(ending, "end_job", self.end)

    def open(
        self, *hosts: str, unheard: int | None = None, limit: float = LIMIT
    ) -> list[heartbeat.Heartbeat]:
        """Nothing that rank `unheard` sends arrives."""
        board, barrier = {}, threading.Barrier(len(hosts))
        comms = [Comm(rank, hosts, board, barrier) for rank in range(len(hosts))]
        if unheard is not None:
            comms[unheard].port = 9  # where nobody listens
        with ThreadPoolExecutor(len(hosts)) as threads:
            opened = list(threads.map(lambda x: heartbeat.Heartbeat(x, limit), comms))
        self.beats += opened
        return opened

    def end(self, message: str, code: int) -> None:
        self.said.append((message, code))
        for beat in self.beats:
            beat.ended = True

    def until(self, true) -> None:
        """Waits for what threads do soon."""
        for _ in range(3000):
            if true():
                return
            time.sleep(0.01)
        raise AssertionError("it has not come")

    def pass_time(self, seconds: float, silent: int | None = None) -> list[tuple[str, int]]:
        """Lets time pass, 20 s at once, in which all beat, and hear each other but for the rank
        that is `silent`; what the job ends by meanwhile."""
        zero, there = self.beats[0], [x for x in self.beats if x.state != LEFT]
        pairs = [(beat, beat.rank) for beat in there]
        pairs += [(zero, beat.rank) for beat in there if beat.rank != silent]
        pairs += [(beat, 0) for beat in there if silent not in (0, beat.rank)]
        for _ in range(int(seconds / 20)):
            self.jump(20, pairs)
        return self.said

    def jump(self, seconds: float, pairs) -> None:
        """Lets time pass at once, and waits until the first of each pair has then heard the
        second."""
        self.offset += seconds
        now = heartbeat.time.monotonic()
        self.until(lambda: self.said or all(beat.seen[rank].heard > now for beat, rank in pairs))


@pytest.fixture
def job(monkeypatch):
    made = Job(monkeypatch)
    yield made
    for beat in made.beats:
        beat.close()
        beat.thread.join(100)
        assert not beat.thread.is_alive()
        assert beat.socket.fileno() == -1 or beat.ended
        beat.socket.close()


@pytest.mark.parametrize("hosts", [("a", "a", "a"), ("a", "b", "b"), ("a", "b", "a")])
def test_ranks_know_what_the_others_do(job, hosts):
    zero, one, two = job.open(*hosts)
    assert [beat.limit for beat in job.beats] == [LIMIT] * 3
    with one.call(MULTIPLYING), zero.call(WAITING):
        one.progress()
        job.until(lambda: zero.seen[1].state == MULTIPLYING and zero.seen[1].count == 2)
        assert zero.seen[1].calls == 1 and zero.seen[2].state == OUTSIDE
        job.until(lambda: one.seen[0].state == two.seen[0].state == WAITING)
        assert not zero.seen[0].debugged
    job.until(lambda: zero.seen[1].state == one.seen[0].state == OUTSIDE)
    two.leave()
    job.until(lambda: zero.seen[2].state == LEFT and not two.thread.is_alive())
    assert not job.said


def test_ranks_of_rank_0s_host_need_no_address_of_it(job, monkeypatch):
    """Nor a network; others take each of its addresses."""
    monkeypatch.setattr(heartbeat, "FOUND_S", 20)
    monkeypatch.setattr(heartbeat, "own_addresses", list)
    assert [beat.limit for beat in job.open("a", "a")] == [LIMIT] * 2
    addresses = ["192.0.2.1", "127.0.0.1"]  # nobody has the first one
    monkeypatch.setattr(heartbeat, "own_addresses", lambda: addresses)
    assert [beat.limit for beat in job.open("a", "b")] == [LIMIT] * 2


def test_a_debugger_holds_its_host(job, monkeypatch):
    """The first rank of a host looks for one at the others, and the second at the first."""
    beats = job.open("a", "b", "a", "a", "b")
    assert [[pid - NOBODY for pid in beat.watched] for beat in beats] == [
        [2, 3, 0], [4, 1], [0, 2], [3], [1, 4]
    ]  # fmt: skip
    monkeypatch.setattr(heartbeat, "debugged", lambda pid: pid == NOBODY + 3)
    job.until(lambda: beats[0].seen[3].debugged and beats[4].seen[0].debugged)


def all_in(beats, state: str) -> contextlib.ExitStack:
    calls = contextlib.ExitStack()
    for beat in beats:
        calls.enter_context(beat.call(state))
    return calls


@pytest.mark.parametrize(("hosts", "silent", "said"), [
    ("aa", 0, "rank 0 on a (process 4194304) is gone"),
    ("ab", 0, "rank 0 on a (process 4194304) is stopped, or its host or link is down"),
    ("aab", 1, "rank 1 on a (process 4194305) is gone"),
    ("aab", 2, "rank 2 on b (process 4194306) is stopped, or its host or link is down"),
])  # fmt: skip
def test_a_rank_that_is_not_heard_ends_the_job(job, hosts, silent, said):
    with all_in(job.open(*hosts), LOCAL):
        assert not job.pass_time(600)
        job.beats[silent]._packet = lambda: b"?"
        job.beats[silent]._judge_first = lambda now: ""
        assert not job.pass_time(80, silent)
        job.pass_time(80, silent)
        text = f"{said}: no sign of it for 100 s (--rank-timeout)"
        job.until(lambda: job.said)
        assert job.said[0] == (text, 1)


def test_time_in_which_the_whole_job_is_suspended_does_not_count(job):
    beats = job.open("a", "b")
    with all_in(beats, WAITING):
        for _ in range(5):
            job.jump(1000, [(beats[0], 1), (beats[1], 0)])
        assert not job.pass_time(80)
        job.pass_time(80)
        job.until(lambda: job.said)
        assert job.said[0] == (
            "no rank has made progress for 100 s (--rank-timeout): all ranks wait", 1
        )  # fmt: skip


def test_what_a_rank_counts_is_progress(job):
    zero, one = job.open("a", "b")
    assert one.counting(None) is not None
    amounts = []
    count = one.counting(amounts.append)
    with zero.call(WAITING), one.call(MULTIPLYING):
        for _ in range(5):
            assert not job.pass_time(60)
            count(3)
            job.until(lambda: zero.seen[1].count == one.count)
    assert amounts == [3] * 5


def test_what_a_rank_reads_from_disk_is_told_as_progress(job):
    zero, one = job.open("a", "b")
    reads = itertools.count()
    one._used = lambda: (next(reads), 0.0)
    with one.call(MULTIPLYING):
        job.until(lambda: zero.seen[1].count > 10)


def test_an_error_of_one_rank_is_told_to_rank_0_and_ends_the_job(job):
    zero, one, two = job.open("a", "a", "b")
    with pytest.raises(ValueError, match="agreed"), one.call():
        raise ending.agreed(ValueError("agreed"))
    assert one.state == OUTSIDE
    with pytest.raises(ValueError, match="broken"), one.call():
        raise ValueError("broken")
    one.leave()
    job.until(lambda: zero.seen[1].state == FAILED)
    with zero.call(WAITING), two.call(WAITING):
        assert not job.pass_time(80)
        job.pass_time(80)
        job.until(lambda: job.said)
    text = "rank 1: ValueError: broken; the others waited 100 s (--rank-timeout) for it"
    assert job.said[0] == (text, 1)


def test_an_error_and_an_end_are_told_at_once(job):
    """The process, and the thread that tells what it does, may be gone before the next tick."""
    zero, one, two = job.open("a", "a", "b")
    one.ended = two.ended = True
    job.until(lambda: not one.thread.is_alive() and not two.thread.is_alive())
    for beat in (one, two):
        beat.socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    with pytest.raises(ValueError, match="broken"), one.call():
        raise ValueError("broken")
    two.leave()
    job.until(lambda: (zero.seen[1].state, zero.seen[2].state) == (FAILED, LEFT))


def test_closing_waits_for_no_tick(job, monkeypatch):
    monkeypatch.setattr(heartbeat, "MOST_TICK_S", 20)
    zero, one, two = job.open("a", "b", "a")
    with pytest.raises(ValueError, match="broken"), one.call():
        raise ValueError("broken")
    began = time.monotonic()
    for beat in (one, two):
        beat.close()
        assert not beat.thread.is_alive() and beat.socket.fileno() == -1
    job.until(lambda: (zero.seen[1].state, zero.seen[2].state) == (FAILED, LEFT))
    zero.close()
    assert not zero.thread.is_alive()
    assert time.monotonic() - began < 15


def test_one_that_does_nothing_changes_no_error():
    beat, progress = heartbeat.Heartbeat(), [].append
    with pytest.raises(ValueError, match="broken"), beat.call():
        raise ValueError("broken")
    assert beat.state == OUTSIDE
    assert beat.counting(progress) is progress and beat.counting(None) is None
    beat.leave()
    assert beat.state == OUTSIDE


def test_a_step_that_ends_is_progress():
    beat = heartbeat.Heartbeat()
    with beat.during(MULTIPLYING):
        begun = beat.count
    assert begun == 1 and beat.count == 2


@pytest.mark.parametrize(("patience", "limit"), [(0.3, LIMIT), (10, 0.6)])
def test_ranks_that_rank_0_does_not_hear_are_named_and_nothing_is_judged(
    job, monkeypatch, capsys, patience, limit
):
    """In time where the limit is short: the job ended, "MPI has not started on all ranks"."""
    monkeypatch.setattr(heartbeat, "FOUND_S", patience)
    begun = time.monotonic()
    beats = job.open("a", "b", "b", unheard=2, limit=limit)
    assert time.monotonic() - begun < 5
    assert [beat.limit for beat in beats] == [0] * 3
    assert capsys.readouterr().err == (
        "ranks that stop are not noticed: rank 2: UDP does not reach rank 0\n"
    )
    job.until(lambda: not any(beat.thread.is_alive() for beat in beats))


@pytest.mark.parametrize(("state", "computes", "used", "counted"), [
    (MULTIPLYING, True, (0, 0.06), 1), (MULTIPLYING, True, (0, 0.04), 0),
    (MULTIPLYING, False, (0, 9.0), 0), (MULTIPLYING, False, (1, 0.0), 1),
    (WAITING, True, (1, 9.0), 0),
])  # fmt: skip
def test_computing_on_the_host_and_reading_from_disk_are_progress(state, computes, used, counted):
    beat = heartbeat.Heartbeat()
    beat.tick, beat.state, beat.computes, beat.used = 1.0, state, computes, (5, 7.0)
    beat._used = lambda: (5 + used[0], 7.0 + used[1])
    beat._count_use()
    assert beat.count == counted
    beat._count_use()  # of what has come since
    assert beat.count == counted


def test_the_time_of_a_thread_that_asks_mpi_again_and_again_does_not_count():
    beat = heartbeat.Heartbeat()

    def spin(seconds: float) -> None:
        begin = time.thread_time()
        while time.thread_time() < begin + seconds:
            pass

    beat.polls = threading.get_ident()
    before = beat._used()
    spin(0.2)
    assert beat._used()[1] - before[1] < 0.1
    beat.polls = None
    before = beat._used()
    spin(0.2)
    assert beat._used()[1] - before[1] > 0.1


def test_a_socket_that_cannot_be_used_is_closed(job, monkeypatch, capsys):
    """As where no file is left to ask for the host's addresses with."""

    def no_more():
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(heartbeat, "own_addresses", no_more)
    beats = job.open("a", "a")
    job.beats.clear()  # there is nothing to close
    assert [beat.socket.fileno() for beat in beats] == [-1, -1]
    assert "rank 0: no socket (Too many open files); rank 1: no" in capsys.readouterr().err


LACKS = """
import os, resource, sys, threading
import numpy as np
from mpi4py import MPI
from hybrid_gemm import gemm

def none(_thread):
    raise RuntimeError("can't start new thread")

comm, a = MPI.COMM_WORLD, np.ones((8, 8))
gemm(a, a, comm=MPI.COMM_SELF, device="cpu")  # loads what is needed
comm.allgather(1)
if comm.rank == int(sys.argv[1]) and sys.argv[2] == "files":
    highest = max(map(int, os.listdir("/proc/self/fd")))
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1, highest + 1))
    for _ in range(highest):
        try:
            os.open("/dev/null", os.O_RDONLY)
        except OSError:
            break
elif comm.rank == int(sys.argv[1]):
    threading.Thread.start = none
for _ in range(2):
    assert (gemm(a, a, comm=comm, device="cpu", split="cols", rank_timeout=3) == 8).all()
print("right", flush=True)
"""


@needs_mpirun
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(("lacks", "why"), [
    ("files", "no socket (Too many open files)"), ("threads", "can't start new thread"),
])  # fmt: skip
def test_ranks_go_on_where_one_has_no_heartbeat(lacks, why, rank, tmp_path):
    """The others waited for ever for that rank, which had raised."""
    program = tmp_path / "lacks.py"
    program.write_text(LACKS)
    done = mpirun(2, program, rank, lacks, timeout=30, check=0)
    assert done.stdout.count("right") == 2
    assert f"ranks that stop are not noticed: rank {rank}: {why}" in done.stderr
