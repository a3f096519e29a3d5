"""What verification takes of the host's memory beside A, B and C."""

import tracemalloc

import numpy as np
import pytest
from click.testing import CliRunner

from hybrid_gemm.cli import cli, inputs
from hybrid_gemm.problem import make_problem
from hybrid_gemm.verify import host_bytes, verify

MIB = 1 << 20


@pytest.fixture
def sampled(monkeypatch):
    """`auto` samples products of any size: what that takes follows from m and n, and a long k takes
    time alone."""
    monkeypatch.setattr("hybrid_gemm.verify.FULL_FLOPS", 0)


def peak(m, n, k, dtype, mode="auto"):
    """The most bytes that the check of a right product takes, and the problem."""
    a, b, c = (np.zeros(shape, dtype) for shape in ((m, k), (k, n), (m, n)))
    problem = make_problem(a, b, None)
    tracemalloc.start()
    try:
        verdict = verify(problem, a, b, None, c, mode=mode, seed=1)
        return tracemalloc.get_traced_memory()[1], problem, verdict
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("m", "n", "k", "dtype", "mode"),
    [
        (2100, 2100, 700, "float32", "auto"),
        (900, 900, 4100, "float16", "auto"),
        (2100, 2100, 2100, "int32", "auto"),
        (1100, 1100, 300, "float32", "full"),
        (1100, 1100, 300, "int64", "full"),
        (300_000, 1, 1, "float32", "auto"),
        (64, 64, 100_000, "float32", "auto"),
        (1, 300_000, 1, "int32", "auto"),
    ],
)
def test_a_check_takes_a_few_mib(m, n, k, dtype, mode):
    found, _problem, verdict = peak(m, n, k, dtype, mode)
    assert verdict.passed
    assert found < 32 * MIB  # two threads convert blocks of float16 at once


@pytest.mark.parametrize(
    ("m", "n", "k", "dtype", "mode"),
    [
        (2100, 2100, 600, "float32", "auto"),
        (150, 20_000, 90, "float16", "auto"),
        (20_000, 600, 90, "float64", "auto"),
        (512, 512, 8000, "float32", "auto"),
        (3000, 900, 300, "complex64", "auto"),
        (100_000, 40, 100, "int64", "full"),
        (120_000, 60, 90, "int32", "auto"),
        (300_000, 1, 1, "float32", "auto"),
        (64, 64, 100_000, "float32", "auto"),
    ],
)
def test_a_check_takes_no_more_than_is_counted(sampled, m, n, k, dtype, mode):
    found, problem, verdict = peak(m, n, k, dtype, mode)
    assert verdict.passed
    assert found <= host_bytes(problem, mode, m, n)


def run(tmp_path, monkeypatch, available, *options):
    """`hybrid-gemm run -o` with so many bytes of memory; the error, and the files it leaves."""
    monkeypatch.setattr(inputs, "memory_available", lambda: available)
    target = tmp_path / "C.npy"
    done = CliRunner().invoke(cli, ["run", "--device", "cpu", "-o", str(target), *options])
    return done, [x.name for x in tmp_path.iterdir()]


def test_a_check_without_room_is_refused_before_the_product(tmp_path, monkeypatch):
    room = 3 * 380**2 * 4 + 10 * MIB
    done, left = run(tmp_path, monkeypatch, room, "--size", "380")
    assert done.exit_code != 0 and not left
    message = str(done.exception) + done.output
    assert "verification needs up to" in message and "--verify off" in message
    done, left = run(tmp_path, monkeypatch, room, "--size", "380", "--verify", "off")
    assert done.exit_code == 0 and left == ["C.npy"]
    (tmp_path / "C.npy").unlink()
    done, left = run(tmp_path, monkeypatch, room + 20 * MIB, "--size", "380")
    assert done.exit_code == 0 and left == ["C.npy"]


def test_a_check_of_files_without_room_is_refused(tmp_path, monkeypatch):
    folder = tmp_path / "in"
    folder.mkdir()
    names = [str(folder / x) for x in ("A.npy", "B.npy")]
    for name in names:
        np.save(name, np.ones((64, 64), "f4"))
    out = tmp_path / "out"
    out.mkdir()
    done, left = run(out, monkeypatch, 10 * MIB, *names)
    assert done.exit_code != 0 and not left
    assert "verification needs up to" in str(done.exception) + done.output


def test_a_dry_run_counts_the_check(monkeypatch):
    request = inputs.InputRequest(size=380)
    monkeypatch.setattr(inputs, "memory_available", lambda: 3 * 380**2 * 4 + 10 * MIB)
    assert inputs.host_memory(inputs.Inputs.of(request), "auto").fits is False
    assert inputs.host_memory(inputs.Inputs.of(request), "off").fits is True
