"""The package's own communicator beside each of the caller's, and what is kept with it.

Messages on it meet none of the caller's. It is an attribute that MPI keeps with the caller's, so it
ends when that one is freed, by whichever handle; a later communicator has none of it, even if MPI
gives it the same handle.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import UsageError, named
from ..host import forks
from . import ending

NAME_BYTES = 16  # drawn at random

_key: int | None = None  # of the attribute
_all: list[Own] = []
_left_behind: list[LeftBehind] = []  # by calls that failed
_mpi_ended = False
_users: dict[int, tuple[int, object]] = {}  # the thread in a call, by the caller's communicator
_beginning = threading.Lock()  # held while a thread begins a call


class Own:
    """What belongs to one communicator of the caller's."""

    def __init__(self, comm: Any) -> None:
        self.number = comm.py2f()
        self.comm = comm.Dup()
        # The same on all ranks, whose threads may make several of these in any order.
        self.name: bytes = self.comm.bcast(os.urandom(NAME_BYTES))
        self.beats: dict[float, Any] = {}  # heartbeats, by their limits
        self.runners: dict[int, tuple[Any, Any]] = {}  # options and runner, the last used last
        self.numbers = itertools.count()  # of runners, the same on all ranks
        self.failure = ""  # of this rank alone, in the middle of a call

    def keeps(self) -> bool:
        """Whether there is anything to close; the same on all ranks."""
        return bool(self.runners or self.beats)

    def close(self) -> None:
        """Ends heartbeats and closes runners. Collective, unless MPI has ended."""
        while self.runners:
            _options, runner = self.runners.pop(next(reversed(self.runners)))
            if not _mpi_ended:
                runner.close()
        self.end_beats()

    def end_beats(self) -> None:
        while self.beats:
            self.beats.popitem()[1].close()


@contextlib.contextmanager
def of_one_thread(comm: Any) -> Iterator[None]:
    """Around collective calls over `comm`, the caller's or the package's own. Raises `UsageError`
    where another thread makes some: MPI takes one at a time, in one order on all ranks. So it does
    for a thread that MPI was not started for, and after a call that failed on this rank alone,
    whose messages the next call would take."""
    mine = known(comm)
    if mine and mine.failure:
        raise UsageError(
            f"an earlier call over this communicator failed on this rank alone ({mine.failure}), "
            "so the ranks may be out of step; end all of them, or go on over a new communicator, "
            "such as comm.Dup()"
        )
    with of_this_thread(comm):
        try:
            yield
        except BaseException as error:
            mine = known(comm)
            if mine and comm.size > 1 and not ending.is_agreed(error):
                mine.failure = named(error)
            raise


@contextlib.contextmanager
def of_this_thread(comm: Any) -> Iterator[None]:
    """`of_one_thread` for what may follow a call that failed."""
    mine = known(comm)
    number = mine.number if mine else comm.py2f()
    user = threading.get_ident(), object()
    with _beginning:
        _check_thread()
        found = _users.setdefault(number, user)
    if _left_behind:
        give_back_left_behind()
    if found[0] != user[0]:
        raise UsageError(
            "another thread of this process is in a call over this communicator; give each thread "
            "a communicator of its own, such as comm.Dup()"
        )
    try:
        yield
    finally:
        if found is user:  # and not within another call of this thread
            del _users[number]


@dataclass(eq=False)
class LeftBehind:
    """Buffers of a call that failed, and the messages into them and out of them; None where these
    are not known."""

    buffers: Any
    messages: Sequence[Any] | None

    def has_come(self) -> bool:
        """Whether nothing reads or writes the buffers any more."""
        return self.messages is not None and all(each.Test() for each in self.messages)


@contextlib.contextmanager
def staying_if_it_fails(
    buffers: Any, messages: Callable[[], Sequence[Any] | None]
) -> Iterator[None]:
    """Around `messages` into `buffers` and out of them. Where it fails they stay until a later call
    finds that all have come: MPI may still write there, where something else of the program's would
    lie by then."""
    try:
        yield
    except BaseException:
        if buffers:
            _left_behind.append(LeftBehind(buffers, messages()))
        raise


def give_back_left_behind() -> None:
    """Lets go of what calls that failed left, where its messages have come or MPI has ended."""
    with _beginning:
        for each in list(_left_behind):
            if _mpi_ended or each.has_come():
                _left_behind.remove(each)


def _check_thread() -> None:
    """Raises `UsageError` where MPI was started for fewer threads than make calls: Open MPI then
    damages its memory, without a word."""
    from mpi4py import MPI

    if (level := MPI.Query_thread()) == MPI.THREAD_MULTIPLE:
        return
    here = threading.get_ident()
    if level < MPI.THREAD_SERIALIZED and not MPI.Is_thread_main():
        which = "THREAD_FUNNELED" if level == MPI.THREAD_FUNNELED else "THREAD_SINGLE"
        found = "and this is not the thread that started it"
    elif any(thread != here for thread, _call in list(_users.values())):
        which, found = "THREAD_SERIALIZED", "and another thread is in a call over ranks"
    else:
        return
    raise UsageError(
        f"MPI was started with {which}, {found}; products in several threads need "
        "THREAD_MULTIPLE, which mpi4py asks for unless mpi4py.rc or MPI.Init_thread says otherwise"
    )


def own(comm: Any) -> Own:
    """What is kept with `comm`, made if there is nothing. Collective."""
    if (found := known(comm)) is None:
        found = Own(comm)
        for each in comm, found.comm:
            each.Set_attr(_key_of_attribute(), found)
        _all.append(found)
    return found


def known(comm: Any) -> Own | None:
    """What is kept with `comm`; None if nothing is."""
    return None if comm is None or _key is None else comm.Get_attr(_key)


def all_known() -> list[Own]:
    """All that there is, in the same order on all ranks: so collective calls over one after the
    other end."""
    return sorted(_all, key=lambda each: each.name)


def mpi_has_ended() -> bool:
    return _mpi_ended


def _key_of_attribute() -> int:
    global _key
    from mpi4py import MPI

    with _beginning:
        if _key is None:
            _key = MPI.Comm.Create_keyval(delete_fn=_freed)
            MPI.COMM_SELF.Set_attr(MPI.Comm.Create_keyval(delete_fn=_mpi_ends), None)
        return _key


def _freed(comm: Any, _key: int, found: Own) -> None:
    """MPI calls it on all ranks where a communicator with the attribute is freed."""
    if _mpi_ended or comm == found.comm:
        return
    _all.remove(found)
    found.close()
    found.comm.Free()


def _mpi_ends(*_attribute: Any) -> None:
    """MPI_Finalize calls it before anything else: it frees the attributes of COMM_SELF first."""
    global _mpi_ended
    _mpi_ended = True
    for each in _all:
        each.end_beats()


def _forget() -> None:
    """In a forked child: all this is the parent's, and a close would be the parent's, too."""
    global _beginning
    for kept in _all, _left_behind, _users:
        kept.clear()
    _beginning = threading.Lock()


forks.forget_in_child(_forget)
