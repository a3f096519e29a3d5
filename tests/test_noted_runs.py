"""Which runs are noted, to be carried out by native threads, and why others are not: then Python
carries them out, as if nothing had been noted."""

import numpy as np
import pytest
from support.played_runs import (
    WAYS,
    K,
    M,
    N,
    by_python,
    operands,
    play,
    played_runner,
    run,
    small_runs,
)

from hybrid_gemm import Runner
from hybrid_gemm.arrays.npy_files import NpyWriter
from hybrid_gemm.devices.cuda.device import CudaDevice
from hybrid_gemm.execution import native_executor
from hybrid_gemm.execution.plan_maker import PlanMaker
from hybrid_gemm.execution.streamed import COMPILING, LOADING, NATIVE, Streamed, is_settled


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    small_runs(monkeypatch)


def test_while_kernels_are_compiled_python_carries_out(monkeypatch, rng):
    play(monkeypatch)
    runner, (a, b, _c) = played_runner(threads=3, split="rows"), operands(rng)
    with monkeypatch.context() as patched:
        patched.setattr(CudaDevice, "awaits_kernels", True)
        first = run(runner, a, b)
    assert first.executor == f"python ({COMPILING})" and not is_settled(first.executor)
    second = run(runner, a, b)
    assert second.executor == NATIVE and is_settled(NATIVE)
    np.testing.assert_array_equal(first.c, second.c)


def test_a_library_loads_its_kernels_in_its_first_run_of_each_kind(monkeypatch, rng):
    """Their launches are recorded after that; of another shape they are others."""
    play(monkeypatch)
    real = Streamed.__init__

    def by_library(streamed, *args):
        real(streamed, *args)
        streamed.loaded = False

    monkeypatch.setattr(Streamed, "__init__", by_library)
    runner, (a, b, _c) = played_runner(threads=3, split="rows"), operands(rng)
    for operand in (b, b[:, :-2].copy()):
        said = []
        for _ in range(2):
            said.append(runner.run(a, operand).executor)
        assert said == [f"python ({LOADING})", NATIVE]
    assert not is_settled(said[0])


def test_kernels_that_are_there_when_a_run_has_been_prepared(monkeypatch, rng):
    """It says why it has no program, not what would be true a moment later."""
    play(monkeypatch)
    runner, (a, b, _c) = played_runner(threads=3, split="rows"), operands(rng)
    asked = []
    awaits = property(lambda _device: not asked and (asked.append(1) or True))
    with monkeypatch.context() as patched:
        patched.setattr(CudaDevice, "awaits_kernels", awaits)
        first = run(runner, a, b)
    assert first.executor == f"python ({COMPILING})"
    assert run(runner, a, b).executor == NATIVE


def test_a_fresh_c_is_made_in_the_room_for_which_the_run_was_noted(monkeypatch, rng):
    """The threads that make its pages tell rooms apart: they are there before the run is noted."""
    play(monkeypatch, pinned=True)
    runner, (a, b, _c) = played_runner(threads=3, split="rows"), operands(rng)
    assert run(runner, a, b).executor == NATIVE  # what is compiled and loaded is there
    made, real = [], native_executor.NativeProgram.__init__
    monkeypatch.setattr(
        native_executor.NativeProgram, "__init__", lambda *what: made.append(real(*what))
    )
    for _ in range(3):
        assert runner.run(a, b).executor == NATIVE
    assert len(made) == 1


def test_what_cannot_be_noted_to_its_end_is_as_if_nothing_were(monkeypatch, rng):
    """A program is refused when half of its commands are noted; Python's run begins anew."""
    play(monkeypatch)
    runner, (a, b, c) = played_runner(**WAYS[4]), operands(rng)
    with by_python(monkeypatch):
        wanted = run(runner, a, b, c).c
    runner, starts, real = played_runner(**WAYS[4]), [], CudaDevice.listed

    def listed(*what):
        starts.append(1)
        return real(*what) if len(starts) < 3 else None

    monkeypatch.setattr(CudaDevice, "listed", listed)
    for _ in range(2):
        result = run(runner, a, b, c)
        assert result.executor == "python (Python starts its products)"
        np.testing.assert_array_equal(result.c, wanted)
    assert len(starts) == 3  # nobody asks again


def test_what_is_no_list_of_commands_says_so(monkeypatch, rng):
    play(monkeypatch)
    runner = played_runner(threads=2, split="cols")
    a, b, c = operands(rng)
    square = rng.standard_normal((K, K), "f4")

    def words(*operands, **more):
        said = []
        for _ in range(3):
            said.append(runner.run(*operands, **more).executor)
        return said[-1]

    assert words(a, b) == NATIVE
    assert words(square, square) == NATIVE  # one matrix, read twice
    assert words(square, rng.standard_normal((K, K), "f4")) == NATIVE  # and two that lie alike
    joined = rng.standard_normal((K, 2 * K), "f4")
    assert words(joined[:, :K], joined[:, K:]) == "python (matrices share memory)"
    assert words(a, b, np.asfortranarray(c), beta=1) == "python (Python's threads copy)"
    assert words(a.astype("f2"), b, out=np.empty((M, N), "f4")) == "python (Python's threads copy)"
    assert "before the clock" in words(a, b, resident=True)
    own = "python (workers have threads of their own)"
    assert Runner(device="cpu", threads=2).run(a, b).executor == own


def test_a_file_is_written_meanwhile_also_after_a_native_run_alike(monkeypatch, rng, tmp_path):
    """Native threads would not say what of it is final."""
    play(monkeypatch)
    runner, (a, b, _c) = played_runner(threads=2, split="rows"), operands(rng)
    wanted = [run(runner, a, b) for _ in range(2)][-1].c
    told = []
    monkeypatch.setattr(NpyWriter, "finished", lambda writer, part: told.append(part.size))
    with NpyWriter(tmp_path / "C.npy", (M, N), "f4") as writer:
        result = runner.run(a, b, alpha=2, out=writer.array)
        assert result.executor == "python (C is written to the disk meanwhile)"
        assert sum(told) == M * N
    np.testing.assert_array_equal(np.load(tmp_path / "C.npy"), wanted)


def test_two_matrices_are_not_taken_for_one(monkeypatch, rng):
    """A program made for A @ A is none for A @ B, and the other way round."""
    play(monkeypatch)
    runner = played_runner(threads=2)
    a, b = (rng.integers(-4, 5, (K, K)).astype("f4") for _ in "ab")
    for x, y in [(a, a)] * 4 + [(a, b)] * 4 + [(b, b), (b, a), (a, a)]:
        result = runner.run(x, y)
        np.testing.assert_array_equal(result.c, x @ y)
    assert result.executor == NATIVE


def test_without_a_compiler_python_carries_out(monkeypatch, rng):
    play(monkeypatch)
    monkeypatch.setattr(native_executor, "unavailable", lambda: "g++ is not installed")
    runner = played_runner(**WAYS[2])
    a, b, _c = operands(rng)
    for _ in range(3):
        assert run(runner, a, b).executor == "python (g++ is not installed)"


@pytest.mark.parametrize("k, alpha", [(0, 1), (7, 0)])
def test_what_reads_neither_a_nor_b_is_scaled_each_time(k, alpha, monkeypatch, rng):
    """A and B without elements may lie where C does: launches that are kept took C for A."""
    play(monkeypatch)
    monkeypatch.setattr(PlanMaker, "most_hosted", 0)
    monkeypatch.setattr(CudaDevice, "prepared", None)  # nothing is kept
    runner = played_runner(threads=1)
    a, b = rng.standard_normal((M, k), "f4"), rng.standard_normal((k, N), "f4")
    for _ in range(5):
        c = rng.integers(-9, 9, (M, N)).astype("f4")
        result = runner.run(a, b, c, alpha=alpha, beta=-2)
        np.testing.assert_array_equal(result.c, -2 * c)
