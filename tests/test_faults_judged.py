"""What heartbeats judge: which rank is silent, or keeps the others, and what is no fault."""

import json
import os
import sys
import threading
import time
import types
from pathlib import Path

import pytest

from hybrid_gemm.ranks import ending, heartbeat
from hybrid_gemm.ranks.heartbeat import FAILED, LEFT, LOCAL, MOVING, MULTIPLYING, OUTSIDE, WAITING

TOKEN = b"t" * heartbeat.TOKEN_BYTES
LIMIT = 10.0


def beat(*states: str, rank: int = 0) -> heartbeat.Heartbeat:
    """A heartbeat that has heard of ranks in these states at time 0."""
    made = heartbeat.Heartbeat()
    made.limit, made.tick, made.rank, made.size = LIMIT, 1.0, rank, len(states)
    made.hosts, made.pids = ("elsewhere",) * rank + ("here",) + ("elsewhere",) * 9, (1,) * 10
    made.places = [f"rank {r}" for r in range(len(states))]
    made.seen = {r: heartbeat.Seen(0, state) for r, state in enumerate(states)}
    made.state, made.last, made.idle_since = states[rank], [], 0
    return made


def judged(made: heartbeat.Heartbeat, until: float, each=lambda seen, now: None) -> str:
    """What rank 0 says in so many seconds in which all ranks but those in `silent` are heard."""
    for now in range(1, int(until)):
        for rank, seen in made.seen.items():
            if rank not in getattr(made, "silent", ()):
                seen.heard = now
        each(made.seen, now)
        if said := made._judge(now):
            return said
    return ""


def test_a_silent_rank_is_named():
    made = beat(WAITING, LOCAL, MULTIPLYING)
    made.silent = {2}
    assert judged(made, 30).startswith("rank 2 is stopped, or its host or link is down: no sign")


@pytest.mark.parametrize("states", [(WAITING, WAITING), (WAITING, MULTIPLYING)])
def test_no_progress_is_found(states):
    assert "no rank has made progress for 10 s (--rank-timeout)" in judged(beat(*states), 30)


@pytest.mark.parametrize("state", [LOCAL, OUTSIDE, MOVING])
def test_a_rank_that_works_by_itself_may_take_its_time(state):
    assert judged(beat(WAITING, state), 1000) == ""


def test_a_rank_that_makes_progress_keeps_all_alive():
    def each(seen, now):
        seen[1].count = now // 5

    assert judged(beat(WAITING, MULTIPLYING, WAITING), 1000, each) == ""


def test_an_error_of_one_rank_is_the_cause_once_others_waited():
    made = beat(MOVING, FAILED, MOVING)
    made.seen[1].why = "KernelError: broken"
    said = judged(made, 30)
    assert said == "rank 1: KernelError: broken; the others waited 10 s (--rank-timeout) for it"
    assert judged(beat(OUTSIDE, FAILED, LEFT), 1000) == ""  # nobody waits


def test_a_rank_of_the_command_that_failed_and_does_not_end_is_the_cause(monkeypatch):
    """Whatever the others do: they may wait for it in what is not known as waiting."""
    assert judged(beat(LOCAL, FAILED, LOCAL), 1000) == ""
    monkeypatch.setattr(ending, "_in_charge", True)
    assert "; the others waited 10 s" in judged(beat(LOCAL, FAILED, LOCAL), 30)


def test_nothing_is_judged_while_a_debugger_is_attached():
    made = beat(WAITING, WAITING)
    made.seen[1].debugged = True
    made.silent = {1}
    assert judged(made, 1000) == ""


def test_a_debugger_that_monitors_is_one(monkeypatch):
    """As Python has them from 3.12 on."""
    tools = {0: "some debugger"}
    monitoring = types.SimpleNamespace(DEBUGGER_ID=0, get_tool=tools.get)
    monkeypatch.setattr(sys, "monitoring", monitoring, raising=False)
    made = heartbeat.Heartbeat()
    made.rank, made.watched = 0, ()
    with made.call():
        assert made._status()["debugged"]
    tools.clear()
    assert heartbeat.traced() == (sys.gettrace() is not None)


def test_rank_0_is_watched_by_the_others():
    made = beat(WAITING, WAITING, rank=1)
    assert made._judge_first(LIMIT) == ""
    assert made._judge_first(LIMIT + 1).startswith("rank 0 is stopped")
    made.seen[0].state = LEFT
    assert made._judge_first(2 * LIMIT) == ""


def test_a_call_that_rank_0_has_not_begun_and_will_not_begin_ends_the_job():
    made = beat(LEFT, OUTSIDE, rank=1)
    made.seen[0].calls = made.calls = 1
    assert made._judge_first(LIMIT) == ""
    with made.call():
        assert made.calls == 2
        with made.call():  # a part of it
            assert made.calls == 2
        assert made._judge_first(2 * LIMIT) == ""
        said = made._judge_first(2 * LIMIT + 1)
        assert said == "rank 0 has ended, and the others waited 10 s (--rank-timeout) for it"
        made.seen[0].calls = 2  # it took part in this one
        assert made._judge_first(9 * LIMIT) == ""


def test_ranks_that_have_ended_are_named_where_others_wait_for_them():
    said = judged(beat(WAITING, LEFT, WAITING), 30)
    assert said.endswith("for 10 s (--rank-timeout): rank 1 has ended, and the others wait")


def test_messages_of_strangers_are_ignored():
    import socket

    made = beat(WAITING, WAITING)
    made.socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    made.token, made.peers = TOKEN, {}
    made.socket.bind(("127.0.0.1", 0))
    told = {"rank": 1, "state": FAILED, "count": 0, "calls": 0, "why": "", "debugged": False}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
        text = json.dumps(told).encode()
        # The longest one is nested more deeply than Python's JSON reads.
        for each in (b"?", b"[]", b"{}", text, b"x" * len(TOKEN) + text, TOKEN[:-1], b"[" * 2800):
            stranger.sendto(each, made.socket.getsockname())
        made._listen(time.monotonic() + 0.2)
    made.socket.close()
    assert made.seen[1].state == WAITING and not made.peers


class Many:
    """A communicator of rank `rank` of many, of which the others are not there."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def bcast(self, told):
        return told

    def allgather(self, told):
        return [told] * self.size


def test_rank_0_has_room_for_what_many_ranks_tell_at_once(monkeypatch):
    """It had for about 280, and said of the others that UDP does not reach it."""
    import socket

    most = int(Path("/proc/sys/net/core/rmem_max").read_text())
    ranks = min(2000, most // heartbeat.ROOM_BYTES)
    monkeypatch.setattr(heartbeat.Heartbeat, "_beat", lambda made: None)  # busy elsewhere
    made = heartbeat.Heartbeat(Many(0, ranks), LIMIT)
    told = {**made._status(), "state": WAITING}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as others:
        for rank in range(1, ranks):
            text = json.dumps({**told, "rank": rank}).encode()
            others.sendto(made.token + text, ("127.0.0.1", made.socket.getsockname()[1]))
        made._listen(time.monotonic() + 2)
    made.socket.close()
    assert [made.seen[rank].state for rank in range(1, ranks)] == [WAITING] * (ranks - 1)


def test_ranks_tell_one_after_the_other(monkeypatch):
    """After their first word, for whose answer all wait."""
    spans = {}

    def listen(made, until):
        spans.setdefault(made.rank, []).append(until - time.monotonic())
        if len(spans[made.rank]) == 2:
            made.ended = True
            made.found.set()  # no earlier: a rank that is not found stops its heartbeat

    monkeypatch.setattr(heartbeat.Heartbeat, "_listen", listen)
    monkeypatch.setattr(heartbeat.Heartbeat, "_judge", lambda *_: "")
    monkeypatch.setattr(heartbeat.Heartbeat, "_judge_first", lambda *_: "")
    for rank in range(4):
        made = heartbeat.Heartbeat(Many(rank, 4), LIMIT)
        made.thread.join()
        first, then = spans[rank]
        assert made.tick - 0.5 < then <= made.tick
        assert (rank or 4) / 4 * made.tick - 0.2 < first <= (rank or 4) / 4 * made.tick


@pytest.mark.parametrize("why", ["x" * 9000, "ü" * 900, "\0" * 900, "bad \udcff name" * 90, "a\nb"])
def test_a_cause_of_any_length_and_letters_is_told(why):
    told = beat(FAILED, WAITING)
    told.token, told.traced, told.watched, told.why = TOKEN, False, [os.getpid()], why
    packet = told._packet()
    assert len(packet) <= heartbeat.MOST_BYTES
    assert packet.startswith(TOKEN)
    heard = json.loads(packet.removeprefix(TOKEN))
    assert heard["state"] == FAILED
    assert why.startswith(heard["why"]) and len(heard["why"]) > min(len(why), 150) - 1


@pytest.fixture
def said(monkeypatch):
    """What jobs end by, in this process, where no rank is stopped."""
    said = []
    monkeypatch.setattr(ending, "end_job", lambda *ended: said.append(ended))
    monkeypatch.setattr(ending, "stopped_beside", dict)
    monkeypatch.setattr(ending, "rank_here", lambda: "3")
    return said


def wait_for(true) -> None:
    for _ in range(3000):
        if true():
            return
        time.sleep(0.01)
    raise AssertionError("it has not come")


@pytest.mark.parametrize("stopped", [{}, {17: "rank 1 (process 17)", 18: "rank 2 (process 18)"}])
def test_a_deadline_ends_the_job_and_names_the_first_rank_that_is_stopped(
    stopped, said, monkeypatch
):
    monkeypatch.setattr(ending, "stopped_beside", lambda: stopped)
    with heartbeat.deadline(0.2, "MPI has not started"):
        wait_for(lambda: said)
    cause = ": rank 1 (process 17) is stopped" if stopped else ""
    assert said == [(f"rank 3: MPI has not started for 0.2 s (--rank-timeout){cause}", 1)]


def test_time_in_which_the_launcher_is_stopped_does_not_count_for_a_deadline(said, monkeypatch):
    launcher, asked = "T", []

    def state(pid):
        asked.append(pid)
        return launcher

    monkeypatch.setattr(heartbeat, "process_state", state)
    with heartbeat.deadline(0.06, "MPI has not started"):
        wait_for(lambda: len(asked) > 20)
        assert not said and set(asked) == {os.getppid()}
        launcher = "S"
        wait_for(lambda: said)


@pytest.mark.parametrize("limit", [0, 0.05])
def test_a_deadline_ends_nothing_that_was_in_time_or_is_debugged(limit, said, monkeypatch):
    debugged = []
    monkeypatch.setattr(heartbeat, "debugged", lambda pid: debugged.append(pid) or True)
    with heartbeat.deadline(100, "MPI has not started"):
        pass
    with heartbeat.deadline(limit, "MPI has not started"):
        if limit:
            wait_for(lambda: debugged)
    monkeypatch.setattr(heartbeat, "traced", lambda: True)
    monkeypatch.setattr(heartbeat, "debugged", lambda pid: False)
    with heartbeat.deadline(0.05, "MPI has not started"):
        time.sleep(0.2)
    wait_for(lambda: not [x for x in threading.enumerate() if x.name == "deadline"])
    assert not said and debugged == [os.getpid()] * bool(limit)
