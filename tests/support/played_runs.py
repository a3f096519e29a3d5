"""Runs on emulated devices that are as GPUs are (`late_devices`), by Python or native threads."""

import contextlib
import itertools
import random

import numpy as np
import pytest

from hybrid_gemm.execution import native_executor

from . import late_devices
from .late_streams import Late
from .links import separate_links
from .small_sizes import small_panels, small_slots

M, N, K = 36, 50, 26
WAYS = [
    {"threads": 1}, {"threads": 3, "split": "rows"},
    {"threads": 3, "split": "cols", "emulate_devices": 3},
    {"threads": 4, "grid": (2, 2, 1), "emulate_devices": 3},
    {"threads": 4, "grid": (2, 1, 2), "emulate_devices": 4},
]  # fmt: skip
PYTHON = "python (asked for)"
_numbers = itertools.count()


def play(monkeypatch, *, pinned: bool = False) -> Late:
    """Emulated devices are as GPUs are from now on, in this test, and their streams do at once what
    they are told. With `pinned` all memory of the host is page-locked."""
    late = late_devices.play(monkeypatch, random.Random(0), eager=1)
    if pinned:
        late.locked[0] = 1 << 64
    return late


def small_runs(monkeypatch) -> None:
    """For tests of what native threads carry out: products cut and copied as large ones are, over
    links of their own. Skips where there are no such threads."""
    if reason := native_executor.unavailable():
        pytest.skip(reason)
    small_panels(monkeypatch)
    small_slots(monkeypatch)
    separate_links(monkeypatch, f"played {next(_numbers)}")


def operands(rng, order="C"):
    a, b = (np.asarray(rng.standard_normal(s, "f4"), order=order) for s in ((M, K), (K, N)))
    return a, b, rng.standard_normal((M, N), "f4")


def run(runner, a, b, c=None, **more):
    """A run, whose C was given."""
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
