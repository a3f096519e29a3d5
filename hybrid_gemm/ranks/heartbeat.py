"""Heartbeats: how ranks find that one of them is stopped, or that all wait for ever.

A thread of each rank tells rank 0, by UDP, that it is alive, what it does, and how far it has
come; rank 0 answers. MPI is not used, since it may be what hangs. Nothing is sent by the threads
that multiply: they set an attribute, or count. Two things end the job after `limit` seconds:

- a rank is silent (it is stopped, or its host or link is down), or rank 0 does not answer;
- nobody makes progress: all ranks wait for each other, or for products that do not end. Finished
  pieces are progress, and those that come from other ranks; on the host, where a product may be one
  long call, so is the time that its threads compute, and everywhere so is reading from disk. What a
  rank does by itself outside of products, and a program between its calls, is never judged.

Where a debugger is attached to any rank nothing is judged.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import hmac
import json
import os
import resource
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ..errors import named
from . import ending, own_communicator
from .addresses import own_addresses

MOST_TICK_S = 1.0
TICKS = 6  # in a limit, at least
FOUND_S, RANK_S = 2.0, 1e-3  # for rank 0's first answer, and more for each rank
LEAST_SHARE = 0.05  # of a processor, that a product takes on the host
MOST_BYTES = 1400  # of a message, which is one packet
ROOM_BYTES = 1024  # of a socket's buffer for each rank; the system makes it twice as much
TOKEN_BYTES = 16  # at its beginning: what these ranks alone know

# What a rank does.
OUTSIDE = "outside"  # the program's own work, between calls
LOCAL = "local"  # in a call, what needs no other rank: files, compiling, checks
MOVING = "moving"  # in a call, what comes before and after messages, such as copies
WAITING = "waiting"  # for other ranks
MULTIPLYING = "multiplying"
FAILED = "failed"  # its call raised
LEFT = "left"
IDLE = {OUTSIDE, FAILED, LEFT}


@dataclasses.dataclass
class Seen:
    """What is known of a rank. `heard` is a time of the monotonic clock; `calls` are those that it
    has begun, which all ranks make together."""

    heard: float
    state: str = OUTSIDE
    count: int = 0
    calls: int = 0
    why: str = ""
    debugged: bool = False


class Heartbeat:
    """One rank's. `limit` 0 makes one that does nothing."""

    def __init__(self, comm: Any = None, limit: float = 0) -> None:
        self.comm, self.limit = comm, limit
        self.state, self.count, self.calls, self.why = OUTSIDE, 0, 0, ""
        self.computes = False  # on the host, so that its processor time is progress
        self.polls: int | None = None  # the thread whose time is not: it asks MPI again and again
        self.traced = self.held = self.ended = False
        if limit:
            self.tick = min(MOST_TICK_S, limit / TICKS)
            self._open()

    # --- what a rank tells ----------------------------------------------------------------

    @contextlib.contextmanager
    def during(self, state: str) -> Iterator[None]:
        """Around what the rank does now."""
        before, self.state = self.state, state
        self.count += 1
        try:
            yield
        finally:
            self.state = before
            self.count += 1

    @contextlib.contextmanager
    def call(self, state: str = MOVING) -> Iterator[None]:
        """Around a call that all ranks make. Where it raises on this rank alone, the others may
        wait for it: the cause is kept for when they have waited too long."""
        self.traced = traced()
        self.calls += self.state in IDLE  # and not within another
        try:
            with self.during(state):
                yield
        except BaseException as error:
            if self.limit and not ending.is_agreed(error):
                self.why = named(error)
                self.state = FAILED
                self._tell()
            raise

    def progress(self) -> None:
        self.count += 1

    def counting(self, progress: Callable[[int], None] | None) -> Callable[[int], None] | None:
        """`progress`, counted here as well."""
        if not self.limit:
            return progress

        def call(amount: int) -> None:
            self.count += 1
            if progress:
                progress(amount)

        return call

    def leave(self) -> None:
        """This rank will take part in nothing more."""
        if self.limit and self.state not in (FAILED, LEFT):
            self.state = LEFT
            self._tell()

    def close(self) -> None:
        """Ends the thread, and with it the socket."""
        self.leave()
        self.ended = True
        if not self.limit:  # it ends by itself, or has not begun
            return
        with contextlib.suppress(OSError):  # it has ended by itself
            self.socket.sendto(b"", ("127.0.0.1", self.socket.getsockname()[1]))  # wakes it
        self.thread.join(MOST_TICK_S)

    # --- opening --------------------------------------------------------------------------

    def _open(self) -> None:
        comm = self.comm
        self.rank, self.size = comm.rank, comm.size
        why = self._listens()
        self.token, (addresses, port) = comm.bcast((os.urandom(TOKEN_BYTES), self.home))
        everyone = comm.allgather((socket.gethostname(), os.getpid()))
        self.places = [f"rank {r} on {h} (process {p})" for r, (h, p) in enumerate(everyone)]
        self.hosts, self.pids = zip(*everyone, strict=True)
        mates = [r for r in range(self.size) if self.hosts[r] == self.hosts[self.rank]]
        # The first rank of a host looks whether a debugger holds the others, and the second
        # whether one holds the first.
        watched = mates[1:] if self.rank == mates[0] else mates[: self.rank == mates[1]]
        self.watched = [self.pids[r] for r in (*watched, self.rank)]
        self.homes = [(a, port) for a in (["127.0.0.1"] if 0 in mates else addresses)]
        self.peers: dict[int, tuple] = {}  # rank 0's: where the others are
        self.found = threading.Event()  # rank 0 has answered this one
        self.seen = {r: Seen(time.monotonic()) for r in range(self.size)}
        self.last: list = []
        self.used: tuple = self._used()
        if not why:
            try:
                self.thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
                self.thread.start()
            except RuntimeError as error:  # the system starts no more
                why = str(error)
        if why and self.socket:
            self.socket.close()
        patience = min(FOUND_S + self.size * RANK_S, self.limit / 2)  # within `deadline`
        if self.rank and not why and not self.found.wait(patience):
            why = "UDP does not reach rank 0"
        if lost := [f"rank {rank}: {x}" for rank, x in enumerate(comm.allgather(why)) if x]:
            self.limit = 0
            if self.rank == 0:
                print(f"ranks that stop are not noticed: {'; '.join(lost)}", file=sys.stderr)

    def _listens(self) -> str:
        """Opens this rank's socket; why it has none, or ""."""
        room = ROOM_BYTES * max(256, self.size)  # for all ranks, which may tell at once
        self.home: tuple = [], 0
        self.socket: Any = None
        try:
            self.socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, room)
            self.socket.bind(("", 0))
            self.home = own_addresses(), self.socket.getsockname()[1]
        except OSError as error:
            return f"no socket ({error.strerror})"
        return ""

    # --- the thread -----------------------------------------------------------------------

    def _beat(self) -> None:
        with self.socket:
            self._beat_until_the_end()

    def _beat_until_the_end(self) -> None:
        before = time.monotonic()
        share = self.rank / self.size or 1  # of a tick, at first: then ranks tell one by one
        while self.limit and self.state != LEFT:
            now = time.monotonic()
            if now - before > max(3 * self.tick, self.limit / 2):
                self._forget(now)  # this process was stopped itself: it has heard nobody
            before = now
            self._count_use()
            self.held = any(map(debugged, self.watched))  # once, for all that is told in this tick
            self._note(self.rank, self._status())
            if self.rank:
                self._tell()
            self._listen(now + share * self.tick)
            share = 1
            if not self.limit or self.ended:
                return
            now = time.monotonic()
            complaint = self._judge(now) if self.rank == 0 else self._judge_first(now)
            if complaint and now - before < max(3 * self.tick, self.limit / 2):
                ending.end_job(complaint, 1)

    def _status(self) -> dict:
        return {
            "rank": self.rank, "state": self.state, "count": self.count, "calls": self.calls,
            "why": self.why[:MOST_BYTES], "debugged": self.traced or self.held,
        }  # fmt: skip

    def _packet(self) -> bytes:
        """This rank's status as it is sent, with as much of the cause as one packet holds."""
        told = self._status()
        while True:
            text = json.dumps(told, ensure_ascii=False).encode(errors="surrogatepass")
            if len(self.token + text) <= MOST_BYTES:
                return self.token + text
            told["why"] = told["why"][: len(told["why"]) * 7 // 8]

    def _tell(self) -> None:
        """Sends this rank's status: to rank 0, and rank 0's to those that it knows."""
        text = self._packet()
        for address in list(self.peers.values()) if self.rank == 0 else self.homes:
            with contextlib.suppress(OSError):
                self.socket.sendto(text, address)

    def _listen(self, until: float) -> None:
        """Takes messages until then; rank 0 answers each."""
        while (left := until - time.monotonic()) > 0 and not self.ended:
            self.socket.settimeout(left)
            try:
                text, sender = self.socket.recvfrom(2 * MOST_BYTES)
                # Before it is read: anyone may send something, and JSON can be nested too deeply.
                if not hmac.compare_digest(text[:TOKEN_BYTES], self.token):
                    continue
                told = json.loads(text[TOKEN_BYTES:])
                rank = told["rank"]
                self._note(rank, told)
            except (OSError, ValueError, KeyError, TypeError, AttributeError):
                continue  # nothing came, or it is not a message of these ranks
            if self.rank == 0:
                self.peers[rank] = sender
                with contextlib.suppress(OSError):
                    self.socket.sendto(self._packet(), sender)
            elif not self.found.is_set():
                self.homes = [sender]
                self.found.set()

    def _note(self, rank: int, told: dict) -> None:
        self.seen[rank] = Seen(
            time.monotonic(), told["state"], told["count"], told["calls"], told["why"],
            told["debugged"],
        )  # fmt: skip

    def _count_use(self) -> None:
        """Takes reading from disk, and computing on the host, for progress."""
        used = self._used()
        computed = self.computes and used[1] - self.used[1] > LEAST_SHARE * self.tick
        if self.state == MULTIPLYING and (used[0] > self.used[0] or computed):
            self.count += 1
        self.used = used

    def _used(self) -> tuple[int, float]:
        """Reads from disk, and seconds of processor time."""
        use = resource.getrusage(resource.RUSAGE_SELF)
        polled, polls = 0.0, self.polls
        if polls is not None:
            with contextlib.suppress(OSError):
                polled = time.clock_gettime(time.pthread_getcpuclockid(polls))
        return use.ru_majflt + use.ru_inblock, use.ru_utime + use.ru_stime - polled

    # --- judging --------------------------------------------------------------------------

    def _forget(self, now: float) -> None:
        for seen in self.seen.values():
            seen.heard = now
        self.idle_since = now

    def _judge(self, now: float) -> str:
        """Rank 0's: why the job must end, or ""."""
        seen = self.seen
        states = [s.state for s in seen.values()]
        if any(s.debugged for s in seen.values()) or set(states) <= IDLE:
            self._forget(now)
            return ""
        for rank, each in seen.items():
            if each.state not in (LEFT, FAILED) and now - each.heard > self.limit:
                return self._silent(rank)
        failed = [r for r, s in seen.items() if s.state == FAILED]
        known = [(s.state, s.count) for s in seen.values()]
        busy = {LOCAL, OUTSIDE} if failed else {LOCAL, OUTSIDE, MOVING}
        if failed and ending.in_charge():
            busy = set()  # a rank of the command that has failed and does not end cannot end
        if known != self.last or busy & set(states):
            self.last, self.idle_since = known, now
        if now - self.idle_since <= self.limit:
            return ""
        if failed:
            who = failed[0]
            return f"rank {who}: {seen[who].why}; the others waited {self._limit_text} for it"
        where: dict[str, list[str]] = {}
        for r, s in seen.items():
            where.setdefault(s.state, []).append(self.places[r])
        what = "all ranks wait"
        if MULTIPLYING in where:
            what = f"{', '.join(where[MULTIPLYING])} multiplies"
        elif LEFT in where:
            what = f"{', '.join(where[LEFT])} has ended, and the others wait"
        return f"no rank has made progress for {self._limit_text}: {what}"

    def _judge_first(self, now: float) -> str:
        """Another rank's, of rank 0; a later rank waits longer, so that one speaks."""
        first, left = self.seen[0], self.seen[0].state == LEFT
        needless = self.state in IDLE or (left and self.calls <= first.calls)  # it did its part
        if self.seen[self.rank].debugged or first.debugged or needless:
            first.heard = now
        patience = self.limit + min(self.rank - 1, 20) * self.tick / 2
        if now - first.heard <= patience:
            return ""
        ended = f"{self.places[0]} has ended, and the others waited {self._limit_text} for it"
        return ended if left else self._silent(0)

    def _silent(self, rank: int) -> str:
        what = "is stopped, or its host or link is down"
        if self.hosts[rank] == self.hosts[self.rank]:
            what = {"T": "is stopped", "": "is gone", "Z": "is gone"}.get(
                process_state(self.pids[rank]), "does not answer"
            )
        return f"{self.places[rank]} {what}: no sign of it for {self._limit_text}"

    @property
    def _limit_text(self) -> str:
        return f"{self.limit:g} s (--rank-timeout)"


# --- one for each communicator ------------------------------------------------------------

_OFF = Heartbeat()


def of(comm: Any, limit: float) -> Heartbeat:
    """The heartbeat of these ranks with this limit, made if there is none. Collective."""
    limit = min(comm.allgather(limit))
    if not limit > 0 or comm.size == 1:
        return _OFF
    mine = own_communicator.own(comm)
    if limit not in mine.beats:
        mine.beats[limit] = Heartbeat(mine.comm, limit)
    return mine.beats[limit]


def known(comm: Any) -> Heartbeat:
    """The heartbeat made last for this communicator, or one that does nothing."""
    mine = own_communicator.known(comm)
    beats = reversed(mine.beats.values()) if mine else ()
    return next((x for x in beats if x.limit), _OFF)


@atexit.register
def leave() -> None:
    for mine in own_communicator.all_known():
        for each in mine.beats.values():
            each.leave()


# --- starting and finishing ---------------------------------------------------------------


@contextlib.contextmanager
def deadline(limit: float, what: str) -> Iterator[None]:
    """Ends the job if the block takes longer than `limit`: MPI's start, before heartbeats, and
    MPI's end, after them."""
    if not limit > 0 or traced():
        yield
        return

    def watch() -> None:
        left, tick = limit, min(MOST_TICK_S, limit / TICKS)
        while left > 0:
            before = time.monotonic()
            if started.wait(min(left, tick)):
                return
            # Time in which this process or its launcher is stopped, as with all of the job, does
            # not count.
            if process_state(os.getppid()) != "T":
                left -= min(time.monotonic() - before, 2 * tick)
        if debugged(os.getpid()):
            return
        stopped = next(iter(ending.stopped_beside().values()), "")
        cause = f": {stopped} is stopped" if stopped else ""
        ending.end_job(
            f"rank {ending.rank_here()}: {what} for {limit:g} s (--rank-timeout){cause}", 1
        )

    started = threading.Event()
    threading.Thread(target=watch, name="deadline", daemon=True).start()
    try:
        yield
    finally:
        started.set()


def at_the_end() -> tuple[contextlib.AbstractContextManager, contextlib.AbstractContextManager]:
    """What the command has around its last wait for all ranks, where rank 0 may have much to write
    still, and around MPI's end."""
    beats = (x for mine in own_communicator.all_known() for x in mine.beats.values() if x.limit)
    beat = next(beats, _OFF)
    return beat.call(WAITING), deadline(beat.limit, "MPI has not ended on all ranks")


# --- what the system tells ----------------------------------------------------------------


def process_state(pid: int) -> str:
    """The letter of a process's state on this host ("T" is stopped); "" if there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0]
    except OSError:
        return ""


def traced() -> bool:
    """Whether a debugger in Python traces this thread or, as from Python 3.12 on, monitors it."""
    monitoring = getattr(sys, "monitoring", None)
    monitored = monitoring and monitoring.get_tool(monitoring.DEBUGGER_ID)
    return sys.gettrace() is not None or bool(monitored)


def debugged(pid: int) -> bool:
    """Whether a debugger is attached to a process of this host."""
    text = ""
    with contextlib.suppress(OSError):
        text = Path(f"/proc/{pid}/status").read_text(errors="replace")
    return "TracerPid:\t0\n" not in text and "TracerPid:" in text
