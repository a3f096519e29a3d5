"""What is remembered from call to call: so many things, and no more."""

from __future__ import annotations

import functools
import sys
from collections.abc import Hashable
from typing import TYPE_CHECKING, Generic, TypeVar

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")
MOST_KNOWN = 4096


class Known(dict[K, T]):
    """What was worked out, by key, found as quickly as in any dict. It starts over when it has
    `MOST_KNOWN` things, as a program of ever new ones makes it have."""

    def __setitem__(self, key: K, thing: T) -> None:
        if len(self) >= MOST_KNOWN:
            self.clear()
        super().__setitem__(key, thing)


def is_key(value: object) -> bool:
    """Whether something can be asked for by this: lists, dicts and arrays are no keys."""
    try:
        hash(value)
    except TypeError:
        return False
    return True


if TYPE_CHECKING or sys.version_info >= (3, 12):
    from functools import cached_property as cached_property
else:

    class cached_property(functools.cached_property):
        """Python's own as it is from 3.12 on: before, all objects of a class have one lock, which
        a forked child could find held for ever."""

        def __get__(self, instance, owner=None):
            if instance is None:
                return self
            value = instance.__dict__[self.attrname] = self.func(instance)
            return value


class Kept(Generic[T]):
    """The last `most` things that were put here or asked for, by key.

    Any thread may ask, without a lock, which a forked child could find held: where two ask at
    once, one may not get what is here, and makes it again.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._things: dict[Hashable, T] = {}  # the last used is the last

    def __len__(self) -> int:
        return len(self._things)

    def get(self, key: Hashable) -> T | None:
        """What was put under this key; None if it is not here, or no longer."""
        thing = self._things.pop(key, None)
        if thing is not None:
            self._things[key] = thing
        return thing

    def put(self, key: Hashable, thing: T) -> None:
        """Keeps a thing, and lets the one go that was not used for the longest time."""
        self._things.pop(key, None)
        self._things[key] = thing
        for oldest in list(self._things)[: -self.most]:
            self._things.pop(oldest, None)

    def drop(self, key: Hashable) -> None:
        """Lets a thing go, if it is here."""
        self._things.pop(key, None)
