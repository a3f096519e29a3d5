"""Calls that are known, on GPUs that are played: what they start natively, copy and wait for."""

import weakref

import numpy as np
import pytest
from hybrid_gemm.execution.single_gpu import SingleGpuExecutor
from hybrid_gemm.execution.stacks_on_gpu import StacksOnGpu
from support import late_gpus, played_runs
from support.emulation import needs_emulator

from hybrid_gemm import Runner
from hybrid_gemm.devices.cuda.stream import CudaStream
from hybrid_gemm.errors import UsageError
from hybrid_gemm.execution import native_calls

M, N, K = 36, 50, 26
pytestmark = needs_emulator
gpus, whole, counted = played_runs.gpus, late_gpus.whole, late_gpus.counted


@pytest.mark.parametrize("checked", [False, True])
@pytest.mark.parametrize("name", ["gemm", "matmul"])
def test_a_call_of_a_runner_that_came_before_is_started_natively(
    name, checked, gpus, rng, monkeypatch
):
    if reason := native_calls.unavailable():
        pytest.skip(reason)
    cp, runner = gpus.module, Runner(device="cuda", gpus=[0], kernel="shared_tile", checked=checked)
    slow = counted(monkeypatch, Runner, "_multiply")
    with cp.cuda.Stream(non_blocking=True):
        for _ in range(6):
            a, b, out = whole(rng, M, K), whole(rng, K, N), cp.empty((M, N), "f4")
            assert getattr(runner, name)(cp.asarray(a), cp.asarray(b), out=out) is out
            np.testing.assert_array_equal(out.get(), a @ b)
    assert len(slow) == (6 if checked else 3)  # checked ones are waited for, by Python
    with pytest.raises(TypeError):
        getattr(runner, name)(out, out, out, out)
    runner.close()
    with pytest.raises(UsageError, match="was closed"):
        getattr(runner, name)(cp.asarray(a), cp.asarray(b), out=out)


def test_what_runners_know_is_not_anothers(gpus, rng, monkeypatch):
    """Of other options, and of a Runner that ended, whose device goes with it."""
    cp, a, b = gpus.module, whole(rng, M, K), whole(rng, K, N)
    labels, give = [], gpus.late.give
    monkeypatch.setattr(
        gpus.late, "give", lambda at, label, *work: (labels.append(label), give(at, label, *work))
    )
    with cp.cuda.Stream(non_blocking=True):
        x, y, out = cp.asarray(a), cp.asarray(b), cp.empty((M, N), "f4")
        for kernel in ("shared_tile", "naive"):
            runner = Runner(device="cuda", gpus=[0], kernel=kernel)
            held = weakref.ref(runner.devices[0])
            for _ in range(5):
                runner.gemm(x, y, out=out, alpha=2)
                assert [x for x in labels if kernel in x], labels
                labels.clear()
                np.testing.assert_array_equal(out.get(), 2 * (a @ b))
            del runner
            assert held() is None


@pytest.mark.parametrize(
    "how", ["matrices", "of two dtypes", "C in columns", "stacks", "backwards"]
)
def test_a_known_call_of_the_host_starts_natively_and_waits_once(how, gpus, rng, monkeypatch):
    stack = how in ("stacks", "backwards")
    owner, name = (StacksOnGpu, "matmul") if stack else (SingleGpuExecutor, "gemm")
    slow, waits = (counted(monkeypatch, *x) for x in ((owner, name), (CudaStream, "synchronize")))
    runner = Runner(device="cuda", gpus=[0], kernel="own")
    shapes = ((4, 7, 6), (4, 6, 8)) if stack else ((M, K), (K, N))
    for turn in range(6):
        a, b = (whole(rng, *shape) for shape in shapes)
        b = b.astype("f8") if how == "of two dtypes" else b[::-1] if how == "backwards" else b
        given = {"out": np.empty((M, N), "f4", "F")} if how == "C in columns" else {}
        before = len(waits)
        made = (runner.matmul if stack else runner.gemm)(a, b, **given)
        np.testing.assert_array_equal(made, a @ b)
        assert turn < 3 or len(waits) == before + 1
    assert len(slow) == (6 if how == "of two dtypes" else 3)  # that of copies is a call, too
    held = weakref.ref(runner.devices[0])
    del runner
    assert held() is None


@pytest.mark.parametrize("how", ["C in columns", "added to C", "another C", "and of two dtypes"])
def test_a_product_whose_c_lies_in_columns_is_known(how, gpus, rng, monkeypatch):
    cp, runner = gpus.module, Runner(device="cuda", gpus=[0], kernel="shared_tile")
    slow = counted(monkeypatch, Runner, "_multiply")
    with cp.cuda.Stream(non_blocking=True):
        for _ in range(6):
            a, b, c = whole(rng, M, K), whole(rng, K, N, dtype="f8"), whole(rng, M, N, dtype="f8")
            if how != "and of two dtypes":
                b, c = b.astype("f4"), c.astype("f4")
            out = cp.asarray(np.asfortranarray(c))
            added = {"added to C": (out,), "another C": (cp.asarray(c),)}.get(how, ())
            x, y, beta = cp.asarray(a), cp.asarray(b), 2 * len(added)
            assert runner.gemm(x, y, *added, beta=beta, out=out) is out
            np.testing.assert_array_equal(out.get(), a @ b + beta * c)
    assert len(slow) == (6 if how == "another C" else 3)  # which Python copies


def test_a_product_of_narrow_integers_is_cast_to_its_place_at_once(gpus, rng, monkeypatch):
    cp, runner = gpus.module, Runner(device="cuda", gpus=[0], kernel="shared_tile")
    with cp.cuda.Stream(non_blocking=True):
        a, b = whole(rng, M, K, dtype="i1"), whole(rng, K, N, dtype="i1")
        x, y, out = cp.asarray(a), cp.asarray(b), cp.empty((M, N), "i1")
        casts = counted(monkeypatch, gpus.array, "astype")
        for _ in range(3):
            runner.gemm(x, y, out=out)
            np.testing.assert_array_equal(out.get(), a @ b)
    assert len(casts) == 3 * 2  # of A and B


@pytest.mark.parametrize("how", ["of two dtypes", "with steps"])
def test_a_known_call_copies_what_no_kernel_reads(how, gpus, rng, monkeypatch):
    cp, runner = gpus.module, Runner(device="cuda", gpus=[0], kernel="shared_tile")
    slow = counted(monkeypatch, Runner, "_multiply")
    with cp.cuda.Stream(non_blocking=True):
        for _ in range(6):
            a = whole(rng, M, K, dtype="f8" if how == "of two dtypes" else "f4")
            b = whole(rng, 2 * K, N)
            rows = np.s_[::2] if how == "with steps" else np.s_[:K]
            made = runner.gemm(cp.asarray(a), cp.asarray(b)[rows, ::2])
            np.testing.assert_array_equal(made.get(), a @ b[rows, ::2])
    assert len(slow) == 3


@pytest.mark.parametrize("how", ["backwards", "of two dtypes", "with steps"])
def test_a_known_call_copies_stacks_that_no_kernel_reads(how, gpus, rng, monkeypatch):
    cp, runner = gpus.module, Runner(device="cuda", gpus=[0], kernel="own")
    slow = counted(monkeypatch, Runner, "_matmul")
    at = {"with steps": np.s_[:, :, ::2], "backwards": np.s_[::-1]}.get(how, np.s_[:])
    with cp.cuda.Stream(non_blocking=True):
        for _ in range(6):
            a, b = whole(rng, 5, 7, 6), whole(rng, 5, 6, 8)
            x = (
                a.astype("f2")
                if how == "of two dtypes"
                else np.repeat(a, 1 + (how == "with steps"), 2)
            )
            made = runner.matmul(cp.asarray(x)[at], cp.asarray(b))
            np.testing.assert_array_equal(made.get(), x[at] @ b)
    assert len(slow) == 3
