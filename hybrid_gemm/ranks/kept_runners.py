"""The runners that `gemm(..., comm=)` keeps from one call to the next."""

from __future__ import annotations

import functools
from typing import Any, NoReturn

from ..host.kept import is_key
from ..options import Options
from . import heartbeat, launch
from .own_communicator import (
    Own,
    all_known,
    give_back_left_behind,
    mpi_has_ended,
    of_one_thread,
    of_this_thread,
    own,
)
from .runner import RankRunner

MAX_KEPT = 8  # of one communicator


def kept_runner(comm: Any, given: tuple) -> RankRunner:
    """The runner for these values of the options over `comm`, kept for the next call. Collective:
    all ranks have it, or all make it."""
    launch.check_communicator(comm)
    with of_one_thread(comm):
        mine = own(comm)
        with heartbeat.known(comm).call():
            return _kept_or_made(mine, given)


def refuse(comm: Any, error: TypeError) -> NoReturn:
    """Raises this rank's `error` on all ranks. Collective, where others call `kept_runner`."""
    launch.check_communicator(comm)
    launch.refuse(own(comm).comm, error)


def _kept_or_made(mine: Own, given: tuple) -> RankRunner:
    comm, kept = mine.comm, mine.runners

    def known() -> tuple[Options, set[int]]:
        # By numbers, since ranks that differ in their options may each have a runner for its own.
        options = _checked(given)
        return options, {number for number, (chosen, _r) in kept.items() if chosen == options}

    options, fitting = launch.tell(comm, "gemm or matmul with comm", known)
    common = set.intersection(*fitting)
    if common:
        number = max(common)
        found = kept.pop(number)
    else:
        if len(kept) >= MAX_KEPT:
            kept.pop(next(iter(kept)))[1].close()
        number, found = next(mine.numbers), (options, RankRunner.of(comm, options))
    kept[number] = found
    return found[1]


@functools.lru_cache(maxsize=64, typed=True)
def _options(*given: Any) -> Options:
    return Options(*given).across_ranks()


def _checked(given: tuple) -> Options:
    return (_options if is_key(given) else _options.__wrapped__)(*given)


def close_kept_runners() -> None:
    """Gives back what `gemm(comm=)` keeps, and ends heartbeats. Collective over each
    communicator that anything is kept of: where other ranks make another call, all raise
    `UsageError`, and this one alone where another of its threads is in a call over one."""
    give_back_left_behind()
    for each in filter(Own.keeps, all_known()):
        if mpi_has_ended():
            each.close()
            continue
        with of_this_thread(each.comm):
            launch.tell(each.comm, "free_memory", lambda: (None, None))
            each.close()
