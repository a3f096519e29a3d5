"""Calls with arrays of GPUs, which the emulator plays: what is asked of these arrays, CuPy has, and
it is done on the GPU that has them, for not all read each other's memory."""

import ml_dtypes
import numpy as np
import pytest
from support.cupy_arrays import Array
from support.emulation import needs_emulator
from support.played_gpus import held, play_here

import hybrid_gemm

SIDES = 0, 1, 2, 3, 5, 17, 40, 65
REALS = "float32", "float64", "float16", "bfloat16", "int8", "uint8", "int32", "int64"
DTYPES = *REALS, "complex64", "complex128"
WAYS = (
    {}, {"threads": 2, "split": "rows"}, {"threads": 3, "split": "cols"}, {"checked": True},
    {"threads": 2, "split": "cols", "checked": True}, {"algorithm": "strassen", "levels": 1},
)  # fmt: skip


@pytest.fixture(params=[(1, True), (3, True), (3, False)], ids="{0[0]} {0[1]}".format)
def gpus(request, monkeypatch):
    count, planned = request.param
    played = play_here(monkeypatch, count, planned=planned)
    yield played
    hybrid_gemm.free_memory()  # no kept runner has a played GPU
    assert not played.late.errors


def lying(x, random, gpus):
    """A matrix as one may lie: in either order, with steps, backwards; most on a GPU."""
    how = random.integers(4)
    if how == 1 and x.ndim == 2:
        x = np.asfortranarray(x)
    elif how == 2 and x.ndim == 2:
        wide = np.zeros((2 * x.shape[0] + 1, 2 * x.shape[1] + 1), x.dtype)
        wide[: 2 * x.shape[0] : 2, : 2 * x.shape[1] : 2] = x
        x = wide[: 2 * x.shape[0] : 2, : 2 * x.shape[1] : 2]
    elif how == 3:
        x = x[::-1].copy()[::-1]
    return gpus.array(x, int(random.integers(gpus.count))) if random.random() < 0.8 else x


@needs_emulator
@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.campaign) for seed in range(1, 8))]
)
def test_products_of_all_kinds(gpus, seed):
    random = np.random.default_rng(seed)
    for number in range(50):
        m, n, k = (int(x) for x in random.choice(SIDES, 3))
        dtype = np.dtype(getattr(ml_dtypes, name := str(random.choice(DTYPES)), name))
        stack = () if random.random() < 0.7 else (int(random.integers(1, 4)),)
        shapes = ((m, k), (k, n), (m, n))
        a, b, c = (random.integers(0, 4, (*stack, *s)).astype(dtype) for s in shapes)
        way = {} if stack else WAYS[random.integers(len(WAYS))]
        if dtype.kind == "c" and random.random() < 0.5:
            way = {"algorithm": "3m"}
        way = {"kernel": "naive", "device": "cuda", **way}
        if random.random() < 0.3:
            way["gpus"] = tuple(int(x) for x in random.permutation(gpus.count)[: 1 + number % 3])
        wide = {"c": "c16", "i": "i8", "u": "i8"}.get(dtype.kind, "f8")
        expected = a.astype(wide) @ b.astype(wide)
        x, y, z = (lying(v, random, gpus) for v in (a, b, c))
        if stack:
            got = hybrid_gemm.matmul(x, y, **way)
        else:
            alpha, beta = int(random.integers(3)), int(random.integers(2))
            if dtype.kind == "c" and random.random() < 0.5:
                alpha, beta = alpha + 1j, beta - 2j
            expected = alpha * expected + beta * c.astype(wide)
            z, out = z if beta else None, None
            if random.random() < 0.3:
                out = lying(np.full((m, n), 99, dtype), random, gpus)
            got = hybrid_gemm.gemm(x, y, z, alpha=alpha, beta=beta, out=out, **way)
            assert out is None or got is out
        on_gpu = any(isinstance(v, Array) for v in (x, y, z if not stack else None))
        assert isinstance(got, Array) == on_gpu or (not stack and out is not None), number
        expected = expected.astype(dtype).astype(wide)
        np.testing.assert_array_equal(held(got).astype(wide), expected, err_msg=f"product {number}")


@needs_emulator
def test_the_critical_reduction_adds_to_c_of_a_gpu_in_an_out_of_the_host(gpus):
    a, b, c = (np.arange(9.0).reshape(3, 3) + number for number in range(3))
    out = np.full((3, 3), 99.0)
    way = {"threads": 2, "split": "cols", "reduce": "critical", "device": "cuda"}
    hybrid_gemm.gemm(a, b, gpus.array(c), beta=2, out=out, kernel="naive", **way)
    np.testing.assert_array_equal(out, a @ b + 2 * c)


@needs_emulator
def test_a_stack_that_is_no_matrix_is_not_copied_on_the_current_gpu(gpus):
    a, b = np.arange(30.0).reshape(2, 5, 3).swapaxes(1, 2), np.arange(20.0).reshape(5, 4)
    got = hybrid_gemm.matmul(gpus.array(a, gpus.count - 1), b, kernel="naive", device="cuda")
    np.testing.assert_array_equal(held(got), a @ b)
