"""What a forked child must forget: threads did not come with it, and locks may be held for ever."""

from __future__ import annotations

import os
from collections.abc import Callable

_forgetting: list[Callable[[], object]] = []


def forget_in_child(forget: Callable[[], object]) -> None:
    """Has `forget` called in every child that is forked from now on, before the fork
    returns there.

    It runs in the only thread there is, and may take no lock that another thread could have held.
    """
    _forgetting.append(forget)


def _in_child() -> None:
    for forget in _forgetting:
        forget()


os.register_at_fork(after_in_child=_in_child)
