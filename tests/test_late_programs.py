"""Calls that have a program, on GPUs that are played: they are written once, begun by Python twice,
and native ever after where their program is launches alone."""

import weakref

import numpy as np
import pytest
from support import late_gpus, played_runs
from support.emulation import needs_emulator

from hybrid_gemm import Runner
from hybrid_gemm.devices.cuda.stream import CudaStream
from hybrid_gemm.errors import UsageError
from hybrid_gemm.programs import signature
from hybrid_gemm.programs.launch import Launch
from hybrid_gemm.programs.program import Program
from hybrid_gemm.programs.writers import Writers

M, N, K = 36, 50, 26
pytestmark = needs_emulator
gpus, whole, counted = played_runs.gpus, late_gpus.whole, late_gpus.counted
# How a call's arrays lie, the function, and whether its program is played natively.
WAYS = {
    "matrices": ("gemm", True), "a new C": ("gemm", True), "of matmul": ("matmul", True),
    "C in columns": ("gemm", True), "added to OUT": ("gemm", True), "another C": ("gemm", True),
    "a row as C": ("gemm", True), "of two dtypes": ("gemm", True), "steps": ("gemm", True),
    "all with steps": ("gemm", True), "int8": ("gemm", True), "backwards": ("gemm", True),
    "stacks": ("matmul", True), "stacks backwards": ("matmul", True), "checked": ("gemm", False),
    "stacks with steps": ("matmul", True), "stacks of two dtypes": ("matmul", True),
}  # fmt: skip
# Of a play: casts of A, B and C, the product, and a cast of it.
LAUNCHES = {"matrices": 1, "steps": 2, "another C": 2, "int8": 4, "all with steps": 5}


def drawn(how, rng, cp):
    """A, B, C if there is one, the keywords and the product."""
    there = cp.asarray
    shapes = ((5, 7, 6), (5, 6, 8)) if "stacks" in how else ((M, K), (K, N))
    a, b = (whole(rng, *shape) for shape in shapes)
    if "of two dtypes" in how:
        a = a.astype("f2" if "stacks" in how else "f8")
    expected = a[::-1] @ b if "backwards" in how else a @ b
    c = whole(rng, N) if how == "a row as C" else whole(rng, M, N)
    out = cp.empty(expected.shape, expected.dtype)
    if how == "C in columns":
        out = there(np.asfortranarray(c))
    if how == "int8":
        a, b, expected = (x.astype("i1") for x in (a, b, expected))
        out = cp.empty((M, 2 * N), "i1")[:, ::2]
    x = there(np.repeat(a, 2, 1))[:, ::2] if "steps" in how else there(a)
    args, keywords = [x[::-1] if "backwards" in how else x, there(b)], {"out": out}
    if how == "all with steps":
        args[1] = there(np.repeat(b, 3, 1))[:, ::3]
        keywords = {"out": there(np.repeat(c, 2, 1))[:, ::2], "beta": -1}
        args.append(there(c))
        expected = expected - c
    if how in ("added to OUT", "another C", "a row as C"):
        args.append(there(c))
        keywords = {"beta": 2, "out": args[2] if how == "added to OUT" else out}
        expected = expected + 2 * c
    if how in ("a row as C", "a new C", "of matmul"):
        del keywords["out"]
    return args, keywords, expected


@pytest.mark.parametrize("how", WAYS)
def test_a_call_is_written_once_and_native_ever_after(how, gpus, rng, monkeypatch):
    if reason := signature.unavailable():
        pytest.skip(reason)
    name, native = WAYS[how]
    kernel = "own" if "stacks" in how else "shared_tile"
    runner = Runner(device="cuda", gpus=[0], kernel=kernel, checked=how == "checked")
    written, begun, played = (
        counted(monkeypatch, *x) for x in ((Writers, "write"), (Launch, "begin"), (Program, "play"))
    )
    with gpus.module.cuda.Stream(non_blocking=True):
        for turn in range(5):
            args, keywords, expected = drawn(how, rng, gpus.module)
            made = getattr(runner, name)(*args, **keywords)
            assert made is keywords.get("out", made)
            np.testing.assert_array_equal(made.get(), expected)
            if turn == 1:
                once = len(written), len(begun)
                played.clear()
                gpus.late.said.clear()
    assert len(written) == once[0] and bool(played) is not native
    assert len(begun) == once[1] + 3 * (how == "checked")  # which is waited for
    starts = [what for what, *_ in gpus.late.said if what == "start"]
    assert len(starts) == 3 * LAUNCHES.get(how, len(starts) // 3)
    with pytest.raises(TypeError):
        getattr(runner, name)(*args, *args, **keywords)
    held = weakref.ref(runner.devices[0])
    runner.close()
    with pytest.raises(UsageError, match="was closed"):
        getattr(runner, name)(*args, **keywords)
    assert held() is None


@pytest.mark.parametrize("how", ["matrices", "of two dtypes", "C in columns", "stacks"])
def test_a_call_of_the_host_is_begun_once_and_waited_for_once(how, gpus, rng, monkeypatch):
    runner, stack = Runner(device="cuda", gpus=[0], kernel="own"), how == "stacks"
    written, begun, waits = (
        counted(monkeypatch, *x)
        for x in ((Writers, "write"), (Launch, "begin"), (CudaStream, "synchronize"))
    )
    shapes = ((4, 7, 6), (4, 6, 8)) if stack else ((M, K), (K, N))
    for turn in range(4):
        a, b = (whole(rng, *shape) for shape in shapes)
        b = b.astype("f8") if how == "of two dtypes" else b
        given = {"out": np.empty((M, N), "f4", "F")} if how == "C in columns" else {}
        made = (runner.matmul if stack else runner.gemm)(a, b, **given)
        np.testing.assert_array_equal(made, a @ b)
        if turn == 1:
            once = len(written), len(begun)
            waits.clear()
    assert (len(written), len(begun)) == once and len(waits) == 2


def test_a_product_without_k_has_the_columns_of_its_b(gpus):
    """Which matrices without rows do not say by their number of elements."""
    cp, runner = gpus.module, Runner(device="cuda", gpus=[0])
    a = cp.asarray(np.ones((M, K), "f4"))
    for columns in 3, 3, 5:
        b = cp.asarray(np.ones((K, columns), "f4"))
        assert runner.gemm(a[:, :0], b[:0]).shape == (M, columns)
