"""What each rank finds by itself, told to all of them by one collective call."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

from ..errors import HybridGemmError
from . import heartbeat, launch

Own = TypeVar("Own")


def tell(comm: Any, call: Callable[[], tuple[Own, Any]]) -> tuple[Own, list[Any]]:
    """What this rank keeps of its `call()`, and what every rank tells the others.

    `call` gives both. Where it raises on any rank, all raise the first one's error: `together`'s
    of its kind, and `HybridGemmError` for errors of other kinds, such as those of an array's own
    code. Collective.
    """
    beat = heartbeat.known(comm)
    found = failure = None
    sent = b""
    with beat.call(heartbeat.LOCAL):
        try:
            found, told = call()
            sent = pickle.dumps(told)  # here, where what cannot be sent is this rank's error
        except Exception as error:
            failure = error
    with beat.call(heartbeat.WAITING):
        everyone = comm.allgather(sent)
    try:
        if not all(everyone):
            launch.together(comm, lambda: _raise(failure))
    finally:
        failure = None  # whose traceback leads here, and to arrays
    return found, [pickle.loads(x) for x in everyone]  # type: ignore[return-value]


def refuse(comm: Any, error: Exception) -> NoReturn:
    """Raises this rank's `error` on all ranks, while others are in `tell`."""

    def fail() -> NoReturn:
        raise error

    tell(comm, fail)
    raise error  # which `tell` has done


def _raise(error: Exception | None) -> None:
    if error is None:
        return
    if isinstance(error, (HybridGemmError, OSError, MemoryError, TypeError, ValueError)):
        raise error
    raise HybridGemmError(f"{type(error).__name__}: {error}") from error
