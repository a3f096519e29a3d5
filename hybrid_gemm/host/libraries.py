"""Shared libraries, loaded in any locale: one that is not here is an `OSError`, and a function that
it lacks an `AttributeError`.

ctypes reads what the system says of them as UTF-8. Where a program has set a locale of another
encoding, that ends in a `UnicodeDecodeError`, in place of the error that callers expect.
"""

from __future__ import annotations

import ctypes
from typing import Any


class Library(ctypes.CDLL):
    """Its calls let Python's lock go."""

    def __init__(self, name: str | None = None, **how: Any) -> None:
        try:
            super().__init__(name, **how)
        except UnicodeDecodeError as error:
            raise OSError(_words(error)) from None

    def __getitem__(self, name_or_ordinal: Any) -> Any:  # of which ctypes makes attributes
        try:
            return super().__getitem__(name_or_ordinal)
        except UnicodeDecodeError as error:
            raise AttributeError(_words(error)) from None


class LibraryUnderLock(Library, ctypes.PyDLL):
    """Its calls keep Python's lock, for they are short."""


def _words(error: UnicodeDecodeError) -> str:
    return error.object.decode(errors="backslashreplace")
