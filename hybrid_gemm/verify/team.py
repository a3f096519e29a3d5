"""The threads that verify: each takes pieces of its own, and BLAS has one thread for each of them,
for a BLAS of many threads takes longer for small pieces than one of one thread."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from ..devices.cpu import CpuDevice, together

Progress = Callable[[float], None]


def no_progress(share: float) -> None:
    """Shows nothing."""


class Team:
    """`each` does pieces of work at once where `pool` is one, and one after the other on a GPU;
    `tell` is told the share of the whole that is done."""

    def __init__(self, pool: ThreadPoolExecutor | None, threads: int, tell: Progress) -> None:
        self.pool, self.threads, self.tell = pool, threads, tell

    def each(self, work: Callable[[Any], None], pieces: list) -> None:
        def quietly(piece: Any) -> None:
            with np.errstate(all="ignore"):  # which a thread has of its own
                work(piece)

        if self.pool is None or len(pieces) < 2:
            for piece in pieces:
                quietly(piece)
        else:
            together(self.pool, quietly, pieces)


@contextlib.contextmanager
def team(threads: int, tell: Progress) -> Iterator[Team]:
    """So many threads while it lasts; none, for arrays of a GPU."""
    if not threads:
        yield Team(None, 1, tell)
        return
    with CpuDevice(max(2, threads)).session(), ThreadPoolExecutor(threads) as pool:
        yield Team(pool if threads > 1 else None, threads, tell)
