"""Strassen's algorithm over devices and kernels."""

import json

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from support.arrays import integers

import hybrid_gemm as hg
from hybrid_gemm import catalog, devices, verify
from hybrid_gemm.cli import cli
from hybrid_gemm.devices.cpu import CpuDevice
from hybrid_gemm.devices.strassen import Strassen
from hybrid_gemm.errors import UsageError
from hybrid_gemm.problem import Problem

pytestmark = pytest.mark.blas


@pytest.mark.parametrize("order_a", "CF")
@pytest.mark.parametrize("order_b", "CF")
@pytest.mark.parametrize("alpha, beta", [(1, 0), (2, 0), (1, 1), (3, -2), (0, 2)])
def test_whole_numbers_are_exact(device, rng, order_a, order_b, alpha, beta):
    m, n, k = 37, 41, 53
    a = np.asarray(integers(rng, (m, k)), order=order_a)
    b = np.asarray(integers(rng, (k, n)), order=order_b)
    c = integers(rng, (m, n)) if beta else np.full((m, n), np.nan, np.float32)
    wanted = alpha * (a @ b) + (beta * c if beta else 0)
    found = hg.gemm(
        a, b, c, alpha=alpha, beta=beta, device=device, algorithm="strassen", levels=2, out=c
    )
    assert (found == wanted).all()


@settings(max_examples=40)
@given(
    st.tuples(*[st.integers(0, 70)] * 3),
    st.integers(0, 4),
    st.sampled_from(["int32", "int64", "float64"]),
    st.integers(0, 2**32),
)
def test_any_shape_any_levels(shape, levels, dtype, seed):
    m, n, k = shape
    rng = np.random.default_rng(seed)
    a, b = integers(rng, (m, k), dtype), integers(rng, (k, n), dtype)
    found = hg.gemm(a, b, device="cpu", algorithm="strassen", levels=levels)
    assert (found == a @ b).all()


@pytest.mark.parametrize("split", ["rows", "cols"])
def test_splits(device, rng, split):
    a, b = integers(rng, (75, 90)), integers(rng, (90, 66))
    options = {"threads": 3, "split": split, "algorithm": "strassen", "levels": 1}
    assert (hg.gemm(a, b, device=device, **options) == a @ b).all()


@pytest.mark.parametrize("kernel", ["naive", "transposed_b", "shared_tile", "double_buffered"])
def test_over_any_kernel(kernel_device, rng, kernel):
    a, b = integers(rng, (72, 80)), integers(rng, (80, 67))
    found = hg.gemm(a, b, device=kernel_device, kernel=kernel, algorithm="strassen", levels=2)
    assert (found == a @ b).all()


def test_workspace_is_bounded(rng):
    taken = []

    class Counting:
        def __init__(self, device):
            self.device = device

        def __getattr__(self, name):
            return getattr(self.device, name)

        def empty(self, rows, cols, dtype):
            taken.append(rows * cols)
            return self.device.empty(rows, cols, dtype)

    m, n, k = 128, 192, 256
    a, b, c = integers(rng, (m, k)), integers(rng, (k, n)), np.empty((m, n), np.float32)
    device = Counting(devices.open_devices("cpu", 1)[0])
    variant = catalog.get("blas").variant()
    Strassen(device, 4).gemm(variant, a, b, c, alpha=1, beta=0, stream=device.stream())
    assert (c == a @ b).all()
    assert 0 < sum(taken) < (m * max(k, n) + k * n) / 3


def test_errors_grow_with_levels(rng):
    a, b = (rng.standard_normal((256, 256)).astype(np.float32) for _ in range(2))
    exact = a.astype(float) @ b.astype(float)
    errors = [
        np.linalg.norm(hg.gemm(a, b, device="cpu", algorithm="strassen", levels=x) - exact)
        for x in (0, 2, 4)
    ]
    assert errors[0] < errors[1] < errors[2] < 1e-4 * np.linalg.norm(exact)


def _some_zero(rng, shape):
    return rng.random(shape) * (rng.random(shape) < 0.05)


def _rows_of_zeros(rng, shape):
    return rng.random(shape) * (rng.random((shape[0], 1)) < 0.5)


def _rows_apart(rng, shape):
    return rng.standard_normal(shape) * 2.0 ** rng.integers(-30, 30, (shape[0], 1))


@pytest.mark.parametrize("mode", ["full", "auto"])
@pytest.mark.parametrize("made", [_some_zero, _rows_of_zeros, _rows_apart])
def test_errors_that_come_from_other_rows_and_columns_pass(made, mode, rng, monkeypatch):
    """Quarters are added, so elements whose own products are 0 or small have errors too."""
    monkeypatch.setattr(verify, "FULL_FLOPS", 0)
    a, b = (made(rng, shape).astype("f4") for shape in ((96, 128), (128, 64)))
    done = hg.Runner(device="cpu", algorithm="strassen", levels=2).run(a, b)
    judged = {"mode": mode, "growth": verify.growth_of("strassen", 2)}
    assert verify.verify(done.problem, a, b, None, done.c, **judged).passed
    done.c[40, 20] += 0.3 * np.abs(done.c).max()
    found = verify.verify(done.problem, a, b, None, done.c, **judged)
    assert not found.passed and "Strassen" in found.power


def test_sums_over_wide_blocks_find_an_element_that_is_missing(rng, monkeypatch):
    """The bounds of all elements of a block were added up: beyond the largest element."""
    monkeypatch.setattr(verify, "FULL_FLOPS", 0)
    monkeypatch.setattr(verify.sampling, "BLOCKS", 1)
    a, b = (rng.standard_normal((256, 256)).astype("f4") for _ in "ab")
    c, problem = a @ b, Problem(256, 256, 256)
    judged = {"growth": verify.growth_of("strassen", 4), "seed": 5}
    assert verify.verify(problem, a, b, None, c, **judged).passed
    c[np.unravel_index(np.abs(c).argmax(), c.shape)] = 0
    assert not verify.verify(problem, a, b, None, c, **judged).passed


class Rounding(CpuDevice):
    """A CPU that rounds operands to 11 bits."""

    def gemm(self, variant, a, b, c, **how):
        a, b = (np.ldexp(np.rint(np.ldexp(f, 11)), e - 11) for f, e in map(np.frexp, (a, b)))
        super().gemm(variant, a, b, c, **how)


def test_sums_of_quarters_are_rounded_as_operands(rng):
    """TF32 rounds them more than A and B."""
    a, b = (rng.standard_normal((64, 64)).astype("f4") for _ in "ab")
    c, problem = np.empty((64, 64), "f4"), Problem(64, 64, 64, compute="tf32")
    device, growth = Strassen(Rounding(1), 3), verify.growth_of("strassen", 3)
    device.gemm(catalog.get("blas").variant(), a, b, c, alpha=1, beta=0, stream=device.stream())
    assert np.abs(c - a.astype("f8") @ b).max() > 0.01
    assert verify.verify(problem, a, b, None, c, growth=growth).passed
    c[5, 7] = np.nan
    assert not verify.verify(problem, a, b, None, c, growth=growth).passed


def test_describe_names_strassen_and_its_levels(rng):
    runner = hg.Runner(device="cpu", algorithm="strassen", levels=2)
    assert "Strassen with 2 levels" in runner.describe()
    with pytest.raises(UsageError, match="0 to 6"):
        hg.Runner(device="cpu", algorithm="strassen", levels=7)
    with pytest.raises(UsageError, match="ordinary, strassen and 3m"):
        hg.Runner(device="cpu", algorithm="winograd")


def test_the_command(device, tmp_path):
    file = tmp_path / "run.json"
    options = ["--size", "67", "--device", device, "--verify", "full", "--json", str(file)]
    made = CliRunner().invoke(cli, ["run", "--algorithm", "strassen", "--levels", "2", *options])
    assert made.exit_code == 0, made.output
    data = json.loads(file.read_text())
    assert data["algorithm"] == {"name": "strassen", "levels": 2}
    assert data["verify"]["passed"]


def test_an_infinite_alpha_is_a_factor_of_the_whole_sum(device):
    """And not of the part of K that quarters have and of the rest, of other signs."""
    a, b = np.ones((8, 9), "f4"), np.ones((9, 8), "f4")
    a[:, 8] = -20
    for c, beta in ((None, 0), (np.ones((8, 8), "f4"), 1)):
        got = hg.gemm(a, b, c, alpha=np.inf, beta=beta, device=device, algorithm="strassen")
        assert (got == -np.inf).all()
