"""Strassen's algorithm over devices and kernels."""

import json

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from support.arrays import integers

import hybrid_gemm as hg
from hybrid_gemm import catalog, devices
from hybrid_gemm.cli import cli
from hybrid_gemm.devices.strassen import Strassen
from hybrid_gemm.errors import UsageError


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


def test_describe_names_strassen_and_its_levels(rng):
    runner = hg.Runner(device="cpu", algorithm="strassen", levels=2)
    assert "Strassen with 2 levels" in runner.describe()
    with pytest.raises(UsageError, match="0 to 6"):
        hg.Runner(device="cpu", algorithm="strassen", levels=7)
    with pytest.raises(UsageError, match="ordinary, strassen and 3m"):
        hg.Runner(device="cpu", algorithm="winograd")


def test_the_command(device):
    options = ["--size", "67", "--device", device, "--verify", "full", "--json", "-"]
    made = CliRunner().invoke(cli, ["run", "--algorithm", "strassen", "--levels", "2", *options])
    assert made.exit_code == 0, made.output
    data = json.loads(made.stdout)
    assert data["algorithm"] == {"name": "strassen", "levels": 2}
    assert data["verify"]["passed"]


def test_an_infinite_alpha_is_a_factor_of_the_whole_sum(device):
    """And not of the part of K that quarters have and of the rest, of other signs."""
    a, b = np.ones((8, 9), "f4"), np.ones((9, 8), "f4")
    a[:, 8] = -20
    for c, beta in ((None, 0), (np.ones((8, 8), "f4"), 1)):
        got = hg.gemm(a, b, c, alpha=np.inf, beta=beta, device=device, algorithm="strassen")
        assert (got == -np.inf).all()
