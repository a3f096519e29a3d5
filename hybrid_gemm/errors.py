"""The errors users meet, each with the exit code that the command gives it."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator


def in_words(size: float) -> str:
    """A number of bytes with its unit, three digits: `in_words(3 << 30)` is "3.00 GiB"."""
    for unit in ("KiB", "MiB"):
        size /= 1024
        if size < 1000:
            return f"{size:.3g} {unit}"
    return f"{size / 1024:.2f} GiB"


class HybridGemmError(Exception):
    """Base of the package's own errors.

    `exit_code` is the code that the `hybrid-gemm` command exits with.
    """

    exit_code = 1


class UsageError(HybridGemmError, ValueError):
    """The request is wrong: an unknown name, an impossible size, or options that exclude
    each other. A `ValueError`."""

    exit_code = 2


class OptionTypeError(HybridGemmError, TypeError):
    """An option of a wrong type; the message names the option and what it takes."""

    exit_code = 2


class DTypeError(HybridGemmError, TypeError):
    """A dtype that this package does not multiply. A `TypeError`."""

    exit_code = 2


class VerificationError(HybridGemmError):
    """The product disagrees with its reference."""

    exit_code = 3


class UnavailableError(HybridGemmError):
    """A device, library or compiler that was asked for is not on this machine."""

    exit_code = 5


class OutOfMemoryError(HybridGemmError, MemoryError):
    """A plan needs more memory than there is; the message gives both sizes. A `MemoryError`."""

    exit_code = 1


@contextlib.contextmanager
def shortage_in_words(task: object) -> Iterator[None]:
    """Makes an allocation that fails, the system's own too, an `OutOfMemoryError` that names the
    task, with the notes of the error."""
    try:
        yield
    except OutOfMemoryError:
        raise
    except (MemoryError, OSError) as error:
        if isinstance(error, OSError) and error.errno != errno.ENOMEM:
            raise
        reason = " ".join(str(error).split()) or "an allocation failed"
        clear = OutOfMemoryError(
            f"{task}: {reason}; fewer threads, or an out of the product's dtype, would need less"
        )
        for note in getattr(error, "__notes__", ()):
            clear.add_note(note)
        raise clear from error


class KernelError(HybridGemmError):
    """A kernel does not compile, or breaks a rule of CUDA while it runs."""

    exit_code = 1
