"""Notes on stderr, and warnings: one line for each thing that is not as the user may think."""

from __future__ import annotations

import contextlib
import os
import sys
import textwrap
import warnings

from ..errors import HybridGemmWarning
from . import terminal

_said: set[str] = set()
quiet = False  # whether nothing is to be printed


def note(text: str) -> None:
    """Prints a line, unless this process has printed it before, or has no stderr that takes it."""
    if quiet or text in _said or sys.stderr is None:
        return
    _said.add(text)
    # What is wrong with a host's files, its first rank says.
    if next(filter(None, map(os.environ.get, terminal.LOCAL_RANK)), "0") == "0":
        line = " ".join(text.split())
        with contextlib.suppress(OSError, ValueError):  # a full disk, no reader, or closed
            print(on_stderr(f"hybrid-gemm: {line}"), file=sys.stderr, flush=True)


def printable(text: str) -> str:
    """The text with control characters, as names of files may have, escaped."""
    return "".join(x if x.isprintable() or x in "\n\t" else repr(x)[1:-1] for x in text)


def on_stderr(text: str) -> str:
    """The text as stderr gets it: a terminal breaks lines at spaces, and not inside a word."""
    text = printable(text)
    if not (width := terminal.width(sys.stderr)):
        return text
    lines = (
        textwrap.fill(line, width, break_long_words=False, break_on_hyphens=False)
        for line in text.splitlines()
    )
    return "\n".join(lines)


def warn(text: str) -> None:
    """A `HybridGemmWarning` at the line of the caller's program that called the package."""
    frame, level = sys._getframe(1), 2
    package = __name__.partition(".")[0]
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] == package:
        frame, level = frame.f_back, level + 1
    warnings.warn(text, HybridGemmWarning, stacklevel=level)


def forget() -> None:
    """Prints lines again that were printed before."""
    _said.clear()
