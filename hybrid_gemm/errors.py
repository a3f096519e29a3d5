"""The errors users meet, each with the exit code that the command gives it."""

from __future__ import annotations

import contextlib
import difflib
import errno
import reprlib
from collections.abc import Iterable, Iterator

# Names that people know from elsewhere, and those that they have here.
_ELSEWHERE = {
    "gpu": "cuda", "nvidia": "cuda", "fp16": "float16", "f16": "float16", "half": "float16",
    "bf16": "bfloat16", "fp32": "float32", "f32": "float32", "single": "float32",
    "float": "float32", "fp64": "float64", "f64": "float64", "double": "float64", "int": "int32",
    "c64": "complex64", "c128": "complex128", "complex": "complex128", "cfloat": "complex64",
    "cdouble": "complex128", "i32": "int32", "long": "int64", "i64": "int64",
    "column": "cols", "columns": "cols", "f2": "float16", "f4": "float32", "f8": "float64",
    "c8": "complex64", "c16": "complex128", "i4": "int32", "i8": "int64",
}  # fmt: skip


def nearest(name: str, names: Iterable[str]) -> str:
    """ " (did you mean rows?)", or nothing where no name is alike enough."""
    known = {x.lower(): x for x in names}
    if (here := _ELSEWHERE.get(name.lower())) in known:
        return f" (did you mean {here}?)"
    found = likeliest(name, known)
    return f" (did you mean {known[found]}?)" if found else ""


def likeliest(name: str, known: Iterable[str]) -> str | None:
    """Which of some names in small letters `name` is likely a misspelling of; None if of none."""
    return next(iter(difflib.get_close_matches(name.lower(), known, 1, 0.7)), None)


def shown(value: object) -> str:
    """A wrong value for a message, in few words: an array by its shape, and of what is long the
    beginning and the end."""
    shape = getattr(value, "shape", None)
    if isinstance(shape, tuple) and shape:
        return f"an array of shape {tuple(shape)}"
    try:
        return reprlib.repr(value)
    except ValueError:  # of a whole number, or of one in it
        return f"<{type(value).__name__} of more digits than Python prints>"


def said(error: BaseException) -> str:
    """What an error says, be it of a class whose own code fails to say it."""
    try:
        return str(error)
    except Exception as other:
        return f"its message cannot be made ({type(other).__name__})"


def named(error: BaseException) -> str:
    """An error's class, and what it says, if anything."""
    return f"{type(error).__name__}: {said(error)}".removesuffix(": ")


LONGEST = 400  # letters of a message in one line


def in_one_line(error: BaseException) -> str:
    """Its message; of one in which a compiler names a thousand faults, the first of them."""
    words = " ".join(str(error).split())
    return words if len(words) <= LONGEST else f"{words[:LONGEST]} ..."


def in_words(size: float) -> str:
    """A number of bytes with its unit, three digits: `in_words(3 << 30)` is "3.00 GiB"."""
    if size < 1024:
        return counted(round(size), "byte")
    for unit in ("KiB", "MiB"):
        size /= 1024
        if size < 1000:
            return f"{size:.3g} {unit}"
    return f"{size / 1024:.2f} GiB"


def listed(words: Iterable[str]) -> str:
    """Words as a sentence has them: "a, b and c". There is one at least."""
    *most, last = words
    return f"{', '.join(most)} and {last}" if most else last


def counted(count: int, noun: str) -> str:
    """A count with its noun: "1 worker", "3 workers"."""
    return f"{count} {noun}{'s' * (count != 1)}"


def time_in_words(ms: float) -> str:
    """A time with its unit, three digits: `time_in_words(75_300)` is "75.3 s"."""
    if 0 < ms < 1e-3:
        return f"{1e3 * ms:.3g} µs"
    for unit, size, most in (("ms", 1, 1e3), ("s", 1e3, 120), ("min", 6e4, 120)):
        if ms / size < most:
            return f"{ms / size:.3g} {unit}"
    return f"{ms / 3.6e6:.3g} h" if ms < 3.6e9 else f"{ms / 3.6e6:.0f} h"


def is_of_threads(error: BaseException) -> bool:
    """Whether it is what Python raises where the system starts no more threads."""
    return isinstance(error, RuntimeError) and str(error) == "can't start new thread"


class HybridGemmWarning(UserWarning):
    """Something that the caller gave has no effect, or another than it seems."""


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


class SlowerError(HybridGemmError):
    """Times of a result are above those of an older one by more than their noise."""

    exit_code = 4


class VerificationError(HybridGemmError):
    """The product disagrees with its reference."""

    exit_code = 3


class UnavailableError(HybridGemmError):
    """A device, library or compiler that was asked for is not on this machine."""

    exit_code = 5


class OutOfMemoryError(HybridGemmError, MemoryError):
    """A plan needs more memory than there is; the message gives both sizes. A `MemoryError`."""

    exit_code = 1


# What errors of CUDA, cuBLAS and PyTorch say, which are no `MemoryError`, where memory of a GPU is
# short.
_SHORTAGES = (
    "CUDA_ERROR_OUT_OF_MEMORY", "cudaErrorMemoryAllocation", "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDA out of memory",
)  # fmt: skip


def _is_shortage(error: Exception) -> bool:
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    too_big = isinstance(error, ValueError) and str(error).startswith("array is too big")  # NumPy's
    return too_big or isinstance(error, MemoryError) or str(error).startswith(_SHORTAGES)


@contextlib.contextmanager
def shortage_in_words(task: object) -> Iterator[None]:
    """Makes an allocation that fails, the system's own too, an `OutOfMemoryError` that names the
    task, with the notes of the error."""
    try:
        yield
    except OutOfMemoryError:
        raise
    except Exception as error:
        if not _is_shortage(error):
            raise
        reason = " ".join(str(error).split()).rstrip(".") or "an allocation failed"
        clear = OutOfMemoryError(
            f"{task}: {reason}; fewer threads, an out of the product's dtype, or compute='fp32' "
            "in place of 'fp32x3' (which packs its operands) would need less"
        )
        for note in getattr(error, "__notes__", ()):
            clear.add_note(note)
        raise clear from error


class KernelError(HybridGemmError):
    """A kernel does not compile, or breaks a rule of CUDA while it runs."""

    exit_code = 1
