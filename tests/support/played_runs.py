"""Runs on GPUs that are played (`late_gpus`), by Python or native threads."""

import contextlib
import itertools
import random
from dataclasses import replace

import numpy as np
import pytest

import hybrid_gemm
from hybrid_gemm import Runner
from hybrid_gemm.devices.cuda.device import CudaDevice
from hybrid_gemm.execution import native_executor
from hybrid_gemm.execution.player import uncollected

from . import late_gpus
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
    """There is a GPU from now on, in this test, whose streams do at once what they are told. With
    `pinned` all memory of the host is page-locked."""
    late = late_gpus.play(monkeypatch, random.Random(0), eager=1).late
    if pinned:
        late.locked[0] = 1 << 64
    return late


def played_runner(**choices) -> Runner:
    """By a kernel that does not compute a tile of 128 x 128 for each panel of C."""
    return Runner(**{"device": "cuda", "kernel": "shared_tile"} | choices)


def small_runs(monkeypatch) -> None:
    """For tests of what native threads carry out: products cut and copied as large ones are, over
    links of their own. Skips where there are no such threads."""
    if reason := native_executor.unavailable():
        pytest.skip(reason)
    small_panels(monkeypatch)
    small_slots(monkeypatch)
    separate_links(monkeypatch, f"played {next(_numbers)}")


def fine_plans(monkeypatch) -> None:
    """GPUs have all the parts and panels that may be, and not the few that take least time."""
    spec = CudaDevice.spec
    monkeypatch.setattr(CudaDevice, "spec", lambda *x: replace(spec(*x), on_gpu=False))


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


@pytest.fixture(params=[0, 0.8], ids=["late", "eager"])
def gpus(request, monkeypatch):
    """Two GPUs, for modules that take this name; afterwards nothing was done without an order."""
    small_runs(monkeypatch)
    played = late_gpus.play(monkeypatch, random.Random(1), 2, eager=request.param)
    with uncollected():  # the driver's lock is not held by who closes a ring: others look at it
        yield played
    hybrid_gemm.free_memory()  # no kept runner has a played GPU
    assert not played.late.races and not played.late.errors
