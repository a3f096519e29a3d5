"""The verdict must fail on what is wrong: a check that cannot fail checks nothing."""

import numpy as np
import pytest

from hybrid_gemm.errors import UsageError
from hybrid_gemm.problem import make_problem
from hybrid_gemm.verify import verify


def case(dtype="float32", m=60, n=50, k=300, beta=0.0, scale=1.0):
    rng = np.random.default_rng(5)
    make = (lambda s: rng.integers(-9, 9, s).astype(dtype)) if dtype[0] == "i" else (
        lambda s: (scale * rng.standard_normal(s)).astype(dtype)
    )  # fmt: skip
    a, b, c = make((m, k)), make((k, n)), make((m, n))
    problem = make_problem(a, b, c, alpha=2, beta=beta)
    right = (2 * (a.astype("f8") @ b) + beta * c).astype(problem.out_dtype)
    return problem, a, b, c, right


def both(problem, a, b, c, result):
    full = verify(problem, a, b, c, result, mode="full")
    import hybrid_gemm.verify as module

    saved, module.FULL_FLOPS = module.FULL_FLOPS, 0
    try:
        return full, verify(problem, a, b, c, result)
    finally:
        module.FULL_FLOPS = saved


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "int32", "int64"])
@pytest.mark.parametrize("beta", [0, 3])
def test_right_products_pass(dtype, beta):
    for verdict in both(*case(dtype, beta=beta)):
        assert verdict.passed, verdict


@pytest.mark.parametrize("dtype", ["float32", "int32"])
def test_one_wrong_element_fails(dtype):
    problem, a, b, c, right = case(dtype)
    wrong = right.copy()
    wrong[17, 23] += 100 if dtype == "float32" else 1
    full, sampled = both(problem, a, b, c, wrong)
    assert not full.passed
    assert not sampled.passed


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_nan_and_inf_fail(value):
    problem, a, b, c, right = case()
    right[59, 49] = value
    for verdict in both(problem, a, b, c, right):
        assert not verdict.passed


def test_a_missing_nan_fails_and_a_present_one_passes():
    problem, a, b, c, right = case()
    a[3, 4] = np.nan
    assert not verify(problem, a, b, c, right, mode="full").passed
    right[3] = np.nan
    for verdict in both(problem, a, b, c, right):
        assert verdict.passed


def test_rounding_to_half_the_digits_fails():
    problem, a, b, c, right = case("float32", k=16)
    rough = right.astype("float16").astype("float32")
    assert not verify(problem, a, b, c, rough, mode="full").passed


def test_alpha_zero_does_not_read_the_operands():
    _p, a, b, c, _right = case()
    problem = make_problem(a, b, c, alpha=0, beta=2)
    a[:] = np.nan
    for verdict in both(problem, a, b, c, 2 * c):
        assert verdict.passed


def test_off_and_unknown_modes():
    arguments = case()
    assert verify(*arguments, mode="off") is None
    with pytest.raises(UsageError, match="auto, full, off"):
        verify(*arguments, mode="maybe")
