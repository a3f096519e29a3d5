"""The verdict on arrays of a GPU, which stay there, is that on the same arrays of the host. Without
a GPU, CuPy's arrays are played."""

import re

import ml_dtypes
import numpy as np
import pytest
from support import cupy_arrays

import hybrid_gemm.verify as module
from hybrid_gemm.problem import make_problem
from hybrid_gemm.verify import verify

KINDS = "float32", "float64", "float16", "bfloat16", "int8", "int32", "int64", "uint8", "uint32"


def drawn(random, dtype, shape):
    if dtype.kind in "iu":
        return random.integers(0, 9, shape).astype(dtype)
    parts = random.standard_normal((2, *shape))
    return (parts[0] + 1j * parts[1] if dtype.kind == "c" else parts[0]).astype(dtype)


@pytest.mark.parametrize("fault", ["", "an element", "Inf and NaN"])
@pytest.mark.parametrize("beta", [0, 2])
@pytest.mark.parametrize("dtype", [*KINDS, "complex64", "complex128"])
@pytest.mark.parametrize("how", ["full", "auto"])
def test_the_verdict_is_that_on_arrays_of_the_host(how, dtype, beta, fault, monkeypatch):
    monkeypatch.setattr(module, "FULL_FLOPS", 0)
    random, dtype = np.random.default_rng(3), np.dtype(getattr(ml_dtypes, dtype, dtype))
    a, b, c = (drawn(random, dtype, shape) for shape in ((70, 301), (301, 90), (70, 90)))
    exact = dtype.kind in "iu"
    if fault == "Inf and NaN" and not exact:
        a[3, 4], b[7, 2] = np.inf, np.nan
    problem = make_problem(a, b, c, alpha=2, beta=beta)
    wide = dtype if exact else {"c": "complex128"}.get(dtype.kind, "float64")
    with np.errstate(all="ignore"):
        right = 2 * (a.astype(wide) @ b.astype(wide)) + beta * c.astype(wide)
        result = right.astype(problem.out_dtype)
    if fault == "an element":
        result[17, 23] += 1 if exact else 100
    matrices = [a, b, c if beta else None, result]
    on_host = verify(problem, *matrices, mode=how, seed=5)
    cupy_arrays.play(monkeypatch)
    on_gpu = [None if x is None else cupy_arrays.Array(x.copy()) for x in matrices]
    got = verify(problem, *on_gpu, mode=how, seed=5)
    how_on_host = re.sub(r", summed by NumPy \(.*\)", "", on_host.how)
    assert (got.passed, got.how, got.where) == (on_host.passed, how_on_host, on_host.where)
    # The reference is of the dtype of C too, and sums pieces of other sizes on a GPU.
    assert got.worst == pytest.approx(on_host.worst, rel=0.5, abs=0.25)
    if dtype.kind != "c" or fault != "Inf and NaN":  # where NumPy's product is not that of terms
        assert got.passed == (fault != "an element")


def test_the_stand_in_refuses_what_cupy_does():
    pytest.importorskip("cupy")
    x = cupy_arrays.Array(np.ones((2, 3)))
    for fault in (
        lambda: x.max(initial=0), lambda: x + np.ones(3), lambda: np.add.reduce(x),
        lambda: np.sqrt(x, where=x > 0), lambda: np.asarray(x),
        lambda: cupy_arrays.Module().sqrt(np.ones(3)),
    ):  # fmt: skip
        with pytest.raises(TypeError):
            fault()
    with pytest.raises(AttributeError):
        cupy_arrays.Module().setxor2d(x)
    assert isinstance(x.sum(), cupy_arrays.Array) and float(x.sum()) == 6
