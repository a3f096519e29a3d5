"""Runs on emulated devices whose driver is played, by Python or native threads."""

import contextlib

import numpy as np

from hybrid_gemm.execution import native_executor

M, N, K = 36, 50, 26
WAYS = [
    {"threads": 1}, {"threads": 3, "split": "rows"},
    {"threads": 3, "split": "cols", "emulate_devices": 3},
    {"threads": 4, "grid": (2, 2, 1), "emulate_devices": 3},
    {"threads": 4, "grid": (2, 1, 2), "emulate_devices": 4},
]  # fmt: skip
PYTHON = "python (asked for)"


def operands(rng, order="C"):
    a, b = (np.asarray(rng.standard_normal(s, "f4"), order=order) for s in ((M, K), (K, N)))
    return a, b, rng.standard_normal((M, N), "f4")


def run(runner, memory, a, b, c=None, **more):
    """A run, whose C was given."""
    memory.next = 0
    out = np.full((M, N), np.nan, "f4")
    result = runner.run(a, b, c, alpha=2, beta=3 if c is not None else 0, out=out, **more)
    assert result.c is out
    return result


@contextlib.contextmanager
def by_python(monkeypatch):
    """Python carries out all runs meanwhile."""
    with monkeypatch.context() as patched:
        patched.setattr(native_executor, "unavailable", lambda: "asked for")
        yield
