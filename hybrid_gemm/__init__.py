"""hybrid-gemm: matrix products split by rows or by K-columns over threads, GPUs and ranks."""

__version__ = "0.2.0"

_API = {"free_memory", "gemm", "matmul", "plan"}
_RUNNER = {"Result", "Runner"}
_RANKS = {"RankResult", "RankRunner"}
_PINNED = {"empty_pinned"}

__all__ = [
    "RankResult", "RankRunner", "Result", "Runner", "empty_pinned", "free_memory", "gemm",
    "matmul", "plan",
]  # fmt: skip


def __getattr__(name):
    # NumPy is imported by the first use, so that `hybrid-gemm --help` answers at once.
    if name in _API:
        from . import api

        return getattr(api, name)
    if name in _RUNNER:
        from . import runner

        return getattr(runner, name)
    if name in _RANKS:
        from .ranks import runner

        return getattr(runner, name)
    if name in _PINNED:
        from .devices.cuda import pinned_memory

        return getattr(pinned_memory, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__():
    return sorted([*globals(), *_API, *_RUNNER, *_RANKS, *_PINNED])
