"""Memory pools of GPUs, some of which outlive their devices.

Parts of one allocation refer to each other in CuPy's pools: where one comes back after the pool has
ended, none of it is ever freed. So a pool of which somebody still has memory is kept until that is
back.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Pool(NamedTuple):
    """CuPy's pool of a device on GPU `ordinal`; `cupy` is the module."""

    of: Any
    cupy: Any
    ordinal: int

    def free(self) -> bool:
        """Frees what is not in use. Says whether that was all."""
        with self.cupy.cuda.Device(self.ordinal):  # it frees, and counts, on the current GPU
            self.of.free_all_blocks()
            return not self.of.used_bytes()


_outliving: list[Pool] = []


def end(pool: Pool) -> None:
    """For a device that is gone, and what it kept with it."""
    if not pool.free():
        _outliving.append(pool)


def free_outliving() -> None:
    """Ends the pools whose memory is back by now."""
    _outliving[:] = [pool for pool in _outliving if not pool.free()]
