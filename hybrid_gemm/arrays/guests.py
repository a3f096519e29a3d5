"""The arrays of one call where some are of other libraries: looked at as NumPy's or CuPy's, on the
streams of their libraries, and C given back to one of these."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

from .other_libraries import SUBCLASS, Library, external_stream, library_of
from .strides import is_device_array


class Guests:
    """The arrays of one call, at least one of which is another library's: `a`, `b`, `c` and `out`
    are the views of them."""

    def __init__(self, given: tuple[Any, ...], libraries: list[Library | None]) -> None:
        self.given, self.libraries = given, libraries
        views = [self._view(i) for i in range(4)]
        if given[3] is not None and given[3] is given[2]:
            views[2] = views[3]
        self.a, self.b, self.c, self.out = views

    @classmethod
    def of(cls, a: Any, b: Any, c: Any = None, out: Any = None) -> Guests | None:
        """None where all arrays are NumPy's or CuPy's, or made from lists. Raises `UsageError` or
        `DTypeError` for an array that cannot be looked at, or `out` that cannot be written to."""
        given = a, b, c, out
        libraries = [library_of(x) for x in given]
        return cls(given, libraries) if any(libraries) else None

    def _view(self, place: int) -> Any:
        x, library = self.given[place], self.libraries[place]
        if library is None:
            return x
        return library.out(x) if place == 3 else library.view(x, "ABC"[place])

    @property
    def taker(self) -> tuple[Library, Any]:
        """The library that C is given back to, and its array: the first, but for NumPy's own."""
        pairs = zip(self.libraries, self.given, strict=True)
        found = ((library, x) for library, x in pairs if library)
        return min(found, key=lambda pair: pair[0] is SUBCLASS)

    def served(self, multiply: Callable[[Any, Any, Any, Any], Any]) -> Any:
        """What `multiply(a, b, c, out)` makes of the views, given back to the caller's library."""
        if not any(map(is_device_array, (self.a, self.b, self.c, self.out))):
            return self.given_back(multiply(self.a, self.b, self.c, self.out))
        with self.on_their_streams():
            return self.given_back(multiply(self.a, self.b, self.c, self.out))

    def given_back(self, made: Any) -> Any:
        """C as an array of the caller's library, or the caller's `out`."""
        out, library = self.given[3], self.libraries[3]
        if out is not None:
            if library:
                library.written(out)
            return out
        if made is None:  # on a rank that has none
            return None
        library, like = self.taker
        return library.give(made, like)

    @contextlib.contextmanager
    def on_their_streams(self) -> Iterator[None]:
        """Makes the libraries' current streams CuPy's, as far as arrays lie on GPUs.

        Where two libraries meet, the stream of the first works between the other's: it waits for
        what that was given before, and that waits for it. Where an array's memory may be used anew
        as soon as its view is gone, the product is waited for.
        """
        views = (self.a, self.b, self.c, self.out)
        there = [
            (x.device.id, x, library, view)
            for x, library, view in zip(views, self.libraries, self.given, strict=True)
            if is_device_array(x)
        ]
        if not there:
            yield
            return
        cp = sys.modules["cupy"]
        streams: dict[int, dict[Library | None, int | None]] = {}
        for ordinal, _x, library, _view in there:
            known = streams.setdefault(ordinal, {})
            if library not in known:
                known[library] = library.stream(ordinal) if library else None
        with contextlib.ExitStack() as stack:
            for ordinal, known in reversed(streams.items()):
                stack.enter_context(cp.cuda.Device(ordinal))
                stack.enter_context(_working(cp, ordinal, [*known.values()]))
            library, _like = self.taker
            joined = [ordinal for ordinal, known in streams.items() if library in known]
            stack.enter_context(library.lending(joined))
            yield
            if any(library and library.lets_go(x) for _o, _x, library, x in there):
                for ordinal in streams:
                    with cp.cuda.Device(ordinal):
                        cp.cuda.get_current_stream().synchronize()


@contextlib.contextmanager
def _working(cp: Any, ordinal: int, pointers: list[int | None]) -> Iterator[None]:
    """Makes the first of these streams of the current GPU CuPy's; None is what CuPy's is now."""
    before = cp.cuda.get_current_stream()
    found = [before.ptr if pointer is None else pointer for pointer in pointers]
    ours = external_stream(cp, found[0], ordinal)
    others = [external_stream(cp, x, ordinal) for x in {*found} - {found[0]}]
    for other in others:
        ours.wait_event(other.record())
    if found[0] == before.ptr:
        yield
    else:
        with ours:
            yield
    for other in others:
        other.wait_event(ours.record())
