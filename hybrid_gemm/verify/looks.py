"""Which sums and elements beyond their bounds are looked at once more: those that come first in
either of two orders."""

from __future__ import annotations

import heapq
from typing import Any

SUMS = 16  # of each order, whose elements are looked at one by one
ELEMENTS = 64  # of each order, that are held against what their own products allow


def orders(ratio: Any, xp: Any) -> tuple[Any, Any]:
    """Numbers that begin with the largest and are 0 for what is within its bound: the worst first;
    and first those that are most alone in their row and column. Data that round alike have many
    such sums, which hide no other."""
    beyond = ratio > 1
    company = beyond.sum(axis=1)[:, None] * beyond.sum(axis=0)
    return xp.where(beyond, ratio, 0), xp.where(beyond, 1 / xp.maximum(company, 1), 0)


def first(found: list[tuple], count: int) -> list[tuple]:
    """What comes first in either order, `count` of each. Of (order, place in it, ...) the rest."""
    return list(dict.fromkeys(x[2:] for order in range(2) for x in first_of(found, order, count)))


def first_of(found: list[tuple], order: int, count: int) -> list[tuple]:
    """The same of one order, whole."""
    return heapq.nlargest(count, {x for x in found if x[0] == order})
