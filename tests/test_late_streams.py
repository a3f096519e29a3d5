"""Runs on devices whose streams work late: what has to be over before something else begins is
waited for, on every way, and nothing is at work when a call has returned. What two streams do to
one memory without an order is found, whether or not the numbers are wrong."""

import contextlib
import copy
import random

import numpy as np
import pytest
from support import late_gpus
from support.played_runs import WAYS, K, M, N, by_python, fine_plans, played_runner, small_runs
from support.small_sizes import small_turns

from hybrid_gemm.arrays.strides import span
from hybrid_gemm.execution import native_executor
from hybrid_gemm.execution.commands import Wait
from hybrid_gemm.execution.player import uncollected
from hybrid_gemm.execution.streamed import NATIVE


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    small_runs(monkeypatch)
    fine_plans(monkeypatch)
    with uncollected():  # the driver's lock is not held by who closes a ring: others look at it
        yield


def whole(rng, *shape):
    return rng.integers(-9, 9, shape).astype("f4")


def lock(late, *arrays):
    """They are page-locked from now on."""
    for each in map(span, arrays):
        late.locked[each.start] = len(each)


def product(runner, rng, late, pinned, **more):
    """A right product, after which nothing is at work; who carried it out."""
    a, b, c = whole(rng, M, K), whole(rng, K, N), whole(rng, M, N)
    out = np.full((M, N), np.nan, "f4")
    if pinned:
        lock(late, a, b, c, out)
    result = runner.run(a, b, c, alpha=2, beta=3, out=out, **more)
    for x in (a, b, c, out):
        late.locked.pop(x.ctypes.data, None)
    assert not late.errors and not late.at_work()
    return result.executor, np.array_equal(out, 2 * a @ b + 3 * c)


@pytest.mark.parametrize("pinned", [False, True], ids=["pageable", "pinned"])
@pytest.mark.parametrize("eager", [0, 0.8])
@pytest.mark.parametrize("choices", WAYS, ids=str)
def test_all_that_meets_in_memory_has_an_order(choices, eager, pinned, monkeypatch, rng):
    late = late_gpus.play(monkeypatch, random.Random(1), eager=eager).late
    runner = played_runner(**choices)
    for native in (False, True, True):
        with contextlib.nullcontext() if native else by_python(monkeypatch):
            executor, right = product(runner, rng, late, pinned)
        assert right and (executor == NATIVE) == native
    assert product(runner, rng, late, pinned, resident=True)[1]
    assert not late.races


@pytest.mark.parametrize("choices", [x for x in WAYS if "grid" not in x], ids=str)
def test_turns_have_an_order(choices, monkeypatch, rng):
    small_turns(monkeypatch)
    late = late_gpus.play(monkeypatch, random.Random(2), eager=0.5).late
    runner = played_runner(max_device_memory=12_000, **choices)
    for pinned in (False, True):
        assert product(runner, rng, late, pinned)[1]
    assert not late.races


@pytest.mark.parametrize("choices", [WAYS[2], WAYS[4]], ids=str)
def test_a_wait_that_is_missing_is_found(choices, monkeypatch, rng):
    """Some are there for what another wait ensures, too: without these all is right."""
    late = late_gpus.play(monkeypatch, random.Random(3)).late
    real, waits, missing = native_executor.NativeProgram.__init__, [], []

    def without(native, program, *more):
        commands = program.commands
        waits[:] = [i for i, x in enumerate(commands) if isinstance(x, Wait)]
        program = copy.copy(program)
        program.commands = [x for i, x in enumerate(commands) if i not in missing]
        real(native, program, *more)

    monkeypatch.setattr(native_executor.NativeProgram, "__init__", without)
    product(played_runner(**choices), rng, late, True)
    found = 0
    for place in waits[::36]:
        missing[:] = [place]
        executor, right = product(played_runner(**choices), rng, late, True)
        assert executor == NATIVE and (right or late.races)
        found += bool(late.races)
        late.races.clear()
    assert found > len(waits[::36]) / 2


@pytest.mark.parametrize(
    "native, what",
    [
        *((True, what) for what in ("cuLaunchKernelEx", "cuMemcpyAsync", "cuEventRecord")),
        *((False, what) for what in ("cuLaunchKernel", "cuMemcpyAsync", "cuEventRecord")),
    ],
)
def test_a_run_that_failed_leaves_nothing_at_work(native, what, monkeypatch, rng):
    """Copies to a device that nobody waited for went on in memory that was another's."""
    late = late_gpus.play(monkeypatch, random.Random(4)).late
    runner = played_runner(**WAYS[2])
    a, b = whole(rng, M, K), whole(rng, K, N)
    failed = 0
    with contextlib.nullcontext() if native else by_python(monkeypatch):
        for number in (1, 2, 5, 12, 25):
            late.counts.clear()
            late.fails = what, number, 700
            try:
                runner.gemm(a, b)
            except RuntimeError as error:
                assert str(error).endswith("said 700")
                failed += 1
            late.fails = None
            assert not late.at_work()
            np.testing.assert_array_equal(runner.gemm(a, b), a @ b)
    assert failed and not late.races and not late.errors
