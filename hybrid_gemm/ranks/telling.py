"""What each rank finds by itself, told to all of them by one collective call."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

from ..errors import UsageError
from . import heartbeat, launch

LENGTH, SHORT = 8, 1016  # bytes of a text's length, and of a short text

Own = TypeVar("Own")


def tell(comm: Any, what: str, call: Callable[[], tuple[Own, Any]]) -> tuple[Own, list[Any]]:
    """What this rank keeps of its `call()`, and what every rank tells the others.

    `call` gives both. `what` names the caller's own call, which has to be the same on all ranks:
    otherwise all raise `UsageError`. Where `call` raises on any rank, all raise the first one's
    error, as by `together`. Collective.
    """
    beat = heartbeat.known(comm)
    found = failure = None
    sent = b""
    with beat.call(heartbeat.LOCAL):
        try:
            found, told = call()
            sent = pickle.dumps((what, told))  # what cannot be sent is this rank's error
        except Exception as error:
            failure = error
    with beat.call(heartbeat.WAITING):
        everyone = _allgather(comm, sent)
    try:
        if not all(everyone):
            launch.together(comm, lambda: _raise(failure))
    finally:
        failure = None  # whose traceback leads here, and to arrays
    calls, all_told = zip(*map(pickle.loads, everyone), strict=True)
    for rank, other in enumerate(calls):
        if other != calls[0]:
            raise launch.agreed(
                UsageError(
                    f"ranks do not make the same call: rank 0 makes {calls[0]}, rank {rank} {other}"
                )
            )
    return found, list(all_told)  # type: ignore[return-value]


def _allgather(comm: Any, text: bytes) -> list[bytes]:
    """Every rank's text: by one call of MPI where all are short, as they are but for long options;
    mpi4py's own takes two."""
    from mpi4py import MPI

    sent = len(text).to_bytes(LENGTH) + text[:SHORT]
    everyone = bytearray(comm.size * (LENGTH + SHORT))
    comm.Allgather([sent.ljust(LENGTH + SHORT), MPI.BYTE], [everyone, MPI.BYTE])
    found = [everyone[i : i + LENGTH + SHORT] for i in range(0, len(everyone), LENGTH + SHORT)]
    sizes = [int.from_bytes(x[:LENGTH]) for x in found]
    if max(sizes) > SHORT:
        return comm.allgather(text)
    return [bytes(x[LENGTH : LENGTH + size]) for x, size in zip(found, sizes, strict=True)]


def refuse(comm: Any, error: Exception) -> NoReturn:
    """Raises this rank's `error` on all ranks, while others are in `tell`."""

    def fail() -> NoReturn:
        raise error

    tell(comm, "", fail)
    raise error  # which `tell` has done


def _raise(error: Exception | None) -> None:
    if error is not None:
        raise error
