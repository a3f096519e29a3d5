"""hybrid-gemm: matrix products split by rows or by columns of A over threads, GPUs and ranks."""

import concurrent.futures.thread as _thread  # noqa: F401  refused once the main thread has ended
import sys as _sys
from typing import TYPE_CHECKING, Any

if _sys.version_info < (3, 11):  # noqa: UP036  pip refuses it, a PYTHONPATH does not
    raise ImportError(
        f"hybrid-gemm needs Python 3.11 or newer, and this is {_sys.version.split()[0]}"
    )

from . import errors as errors

if _sys.platform == "win32":
    raise ImportError("hybrid-gemm runs on Linux, which WSL 2 is too, and not on Windows itself")

from .host import forks as _forks  # noqa: F401  a fork before the first use is known, too

__version__ = "0.2.0"

__all__ = [
    "RankRunner", "Result", "Runner", "empty_pinned", "free_memory", "gemm", "gemm_many", "matmul",
    "plan",
]  # fmt: skip

_MODULES = {
    "RankRunner": "ranks.runner", "Result": "execution.result", "Runner": "runner",
    "empty_pinned": "devices.cuda.pinned_memory", "free_memory": "api",
    "gemm": "api", "gemm_many": "api", "matmul": "api", "plan": "plans",
}  # fmt: skip

if TYPE_CHECKING:
    from .api import free_memory, gemm, gemm_many, matmul
    from .devices.cuda.pinned_memory import empty_pinned
    from .execution.result import Result
    from .plans import plan
    from .ranks.runner import RankRunner
    from .runner import Runner
else:

    def __getattr__(name: str) -> Any:
        # NumPy is imported by the first use, so that `hybrid-gemm --help` answers at once.
        if name in _MODULES:
            from importlib import import_module

            # Kept: looking here again takes as long as a third of a small product's call.
            try:
                value = getattr(import_module(f".{_MODULES[name]}", __name__), name)
            except (ImportError, AttributeError) as error:
                from .host.installing import unusable

                raise unusable(error) or error from None
            globals()[name] = value
            return value
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """What is public, and the names that every module has."""
    return sorted({*__all__, "errors", *(name for name in globals() if name.startswith("__"))})
