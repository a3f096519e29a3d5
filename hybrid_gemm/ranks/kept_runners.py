"""The runners that `gemm(..., comm=)` keeps from one call to the next."""

from __future__ import annotations

import functools
from typing import Any

from ..options import Options
from . import heartbeat, launch
from .runner import RankRunner

MAX_KEPT = 8

_kept: list[tuple[Any, Options, RankRunner]] = []  # the last used is the last


def kept_runner(comm: Any, given: tuple) -> RankRunner:
    """The runner for these values of the options over `comm`, kept for the next call. Collective:
    all ranks have it, or all make it."""
    launch.check_communicator(comm)
    with heartbeat.known(comm).call():
        return _kept_or_made(comm, given)


def _kept_or_made(comm: Any, given: tuple) -> RankRunner:
    options = launch.together(comm, lambda: _checked(given))
    here = [i for i, (of, chosen, _) in enumerate(_kept) if of == comm and chosen == options]
    kept = _kept.pop(here[0]) if here else None
    if not all(comm.allgather(kept is not None)) or kept is None:
        if len(_kept) >= MAX_KEPT:
            _kept.pop(0)[2].close()
        kept = comm, options, RankRunner.of(comm, options)
    _kept.append(kept)
    return kept[2]


@functools.lru_cache(maxsize=64, typed=True)
def _options(*given: Any) -> Options:
    return Options(*given).across_ranks()


def _checked(given: tuple) -> Options:
    try:
        return _options(*given)
    except TypeError:  # a list or a dict among them is no key, and a wrong type raises again
        return Options(*given).across_ranks()


def close_kept_runners() -> None:
    """Gives back what `gemm(comm=)` keeps. Collective over each communicator."""
    while _kept:
        _kept.pop()[2].close()
