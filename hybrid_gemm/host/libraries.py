"""Shared libraries, loaded in any locale: one that is not here is an `OSError`, and a function that
it lacks an `AttributeError`. Meanwhile Python's lock is let go.

ctypes reads what the system says of them as UTF-8. Where a program has set a locale of another
encoding, that ends in a `UnicodeDecodeError`, in place of the error that callers expect. And it
keeps the lock while a library is loaded: of one that hangs then, as the driver of a sick GPU may,
no thread could end the process.
"""

from __future__ import annotations

import ctypes
import os
from typing import Any


class Library(ctypes.CDLL):
    """Its calls let Python's lock go."""

    def __init__(
        self, name: str | None = None, mode: int = ctypes.DEFAULT_MODE, **how: Any
    ) -> None:
        handle = _loaded(name, mode) if name else None
        super().__init__(name, mode, handle, **how)

    def __getitem__(self, name_or_ordinal: Any) -> Any:  # of which ctypes makes attributes
        try:
            return super().__getitem__(name_or_ordinal)
        except UnicodeDecodeError as error:
            raise AttributeError(error.object.decode(errors="backslashreplace")) from None


class LibraryUnderLock(Library, ctypes.PyDLL):
    """Its calls keep Python's lock, for they are short."""


_loader = ctypes.CDLL(None)
_loader.dlopen.restype, _loader.dlopen.argtypes = ctypes.c_void_p, (ctypes.c_char_p, ctypes.c_int)
_loader.dlerror.restype = ctypes.c_char_p


def _loaded(name: str, mode: int) -> int:
    """The system's handle of a library."""
    handle: int | None = _loader.dlopen(os.fsencode(name), mode | os.RTLD_NOW)
    if handle is None:
        words: bytes = _loader.dlerror() or b"cannot be loaded"  # of this thread's last call
        raise OSError(words.decode(errors="backslashreplace"))
    return handle
