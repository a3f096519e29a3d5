"""The errors users meet, each with the exit code that the command gives it."""


def in_words(size: float) -> str:
    """Bytes, for people."""
    for unit in ("KiB", "MiB"):
        size /= 1024
        if size < 1000:
            return f"{size:.3g} {unit}"
    return f"{size / 1024:.2f} GiB"


class HybridGemmError(Exception):
    """Base of the package's own errors. `exit_code` is what the command exits with."""

    exit_code = 1


class UsageError(HybridGemmError, ValueError):
    """What was asked cannot be done as asked: a name, a size or a combination is wrong."""

    exit_code = 2


class OptionTypeError(HybridGemmError, TypeError):
    """An option of a wrong type; the message names the option and what it takes."""

    exit_code = 2


class DTypeError(HybridGemmError, TypeError):
    """A dtype that this package does not multiply."""

    exit_code = 2


class VerificationError(HybridGemmError):
    """The product disagrees with its reference."""

    exit_code = 3


class UnavailableError(HybridGemmError):
    """What was asked for is not on this machine (a device, a library, a compiler)."""

    exit_code = 5


class OutOfMemoryError(HybridGemmError, MemoryError):
    """More memory is needed than there is; the message has both figures."""

    exit_code = 1


class KernelError(HybridGemmError):
    """A kernel that does not compile, or that broke a rule while it ran."""

    exit_code = 1
