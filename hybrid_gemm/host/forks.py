"""What a forked child must forget: threads did not come with it, and locks may be held for ever."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

_forgetting: list[Callable[[], object]] = []
_mpi_is_of_parent = False


def forget_in_child(forget: Callable[[], object]) -> None:
    """Has `forget` called in every child that is forked from now on, before the fork
    returns there.

    It runs in the only thread there is, and may take no lock that another thread could have held.
    """
    _forgetting.append(forget)


def mpi_is_of_parent() -> bool:
    """Whether this process was forked by one in which MPI ran, whose connections it has: a call of
    MPI's here would be one of the parent's."""
    return _mpi_is_of_parent


def _in_child() -> None:
    global _mpi_is_of_parent
    if runs := getattr(sys.modules.get("mpi4py.MPI"), "Is_initialized", None):
        _mpi_is_of_parent = runs()
    for forget in _forgetting:
        forget()


os.register_at_fork(after_in_child=_in_child)
