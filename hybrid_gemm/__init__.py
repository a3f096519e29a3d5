"""hybrid-gemm: matrix products split by rows or by K-columns over threads, GPUs and ranks."""

__version__ = "0.1.0"

_API = {"Result", "Runner", "gemm", "matmul", "plan"}

__all__ = ["Result", "Runner", "gemm", "matmul", "plan"]


def __getattr__(name):
    # NumPy is imported by the first use, so that `hybrid-gemm --help` answers at once.
    if name in _API:
        from . import api

        return getattr(api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__():
    return sorted([*globals(), *_API])
