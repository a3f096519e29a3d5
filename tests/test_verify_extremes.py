"""Verification at the ends of a dtype's range: factors of Inf and NaN, C beside far smaller
products, beta C that overflows."""

import math

import numpy as np
import pytest

import hybrid_gemm.verify as module
from hybrid_gemm.problem import make_problem
from hybrid_gemm.verify import verify

INF = math.inf
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.fixture(params=["full", "sums"])
def judged(request, monkeypatch):
    """Whether a product passes, by every element and by sums over blocks."""
    if request.param == "sums":
        monkeypatch.setattr(module, "FULL_FLOPS", -1)
    mode = "full" if request.param == "full" else "auto"
    return lambda *arguments: verify(*arguments, mode=mode, seed=1).passed


@pytest.mark.parametrize("dtype", ["float32", "complex64"])
@pytest.mark.parametrize("alpha", [INF, -INF, math.nan])
@pytest.mark.parametrize("beta", [0.0, 2.0])
def test_without_k_no_alpha_is_multiplied(judged, dtype, alpha, beta, rng):
    a, b = np.ones((3, 0), dtype), np.ones((0, 4), dtype)
    c = rng.standard_normal((3, 4)).astype(dtype)
    problem = make_problem(a, b, c, alpha=alpha, beta=beta)
    right = (beta * c).astype(dtype)
    assert judged(problem, a, b, c, right)
    right[2, 1] += 1
    assert not judged(problem, a, b, c, right)


@pytest.mark.parametrize("sign", [1, -1])
def test_an_overflow_far_below_terms_of_the_other_sign_passes(judged, sign):
    """1e50 overflows float32, and is lost beside 1e75 in float64."""
    a, b = np.array([[1e30, 1e37]], "f4"), np.array([[sign * 1e20], [-sign * 1e38]], "f4")
    problem = make_problem(a, b)
    for right in (INF, -INF, math.nan):
        assert judged(problem, a, b, None, np.array([[right]], "f4"))
    assert not judged(problem, a, b, None, np.array([[-sign * 3e38]], "f4"))
    b[0] = -b[0]
    assert judged(problem, a, b, None, np.array([[-sign * INF]], "f4"))
    for wrong in (sign * INF, math.nan):
        assert not judged(problem, a, b, None, np.array([[wrong]], "f4"))


def test_an_error_beside_products_of_the_smallest_numbers_fails(judged, rng):
    a, b = 1e-156 * rng.standard_normal((7, 40)), 1e-156 * rng.standard_normal((40, 30))
    c = 1e-155 * rng.standard_normal((7, 30))
    problem = make_problem(a, b, c, beta=1.0)
    right = a @ b + c
    assert judged(problem, a, b, c, right)
    wrong = right.copy()
    wrong[3, 5] *= 1.5
    assert not judged(problem, a, b, c, wrong)
    wrong = right.copy()
    wrong[[1, 2]] = wrong[[2, 1]]
    assert not judged(problem, a, b, c, wrong)
    problem = make_problem(a, b)
    right = a @ b
    assert judged(problem, a, b, None, right)
    right[6, 29] = 1e-300
    assert not judged(problem, a, b, None, right)


def test_an_error_in_a_c_far_above_the_products_fails(judged, rng):
    a, b = 1e-155 * rng.standard_normal((7, 40)), 1e-155 * rng.standard_normal((40, 30))
    c = 1e20 * rng.standard_normal((7, 30))
    problem = make_problem(a, b, c, beta=1.0)
    right = a @ b + c
    assert judged(problem, a, b, c, right)
    wrong = right.copy()
    wrong[3, 5] *= 1.5
    assert not judged(problem, a, b, c, wrong)
    wrong[3, 5] = INF
    assert not judged(problem, a, b, c, wrong)


def test_a_product_and_a_c_that_overflow_to_both_sides_make_nan(judged):
    a, b = np.full((3, 2), 1e30, "f4"), np.full((2, 4), 1e30, "f4")
    c = np.full((3, 4), -1e38, "f4")
    problem = make_problem(a, b, c, beta=1e4)
    right = a @ b + np.float32(1e4) * c
    assert np.isnan(right).all()
    assert judged(problem, a, b, c, right)
    assert judged(problem, a, b, c, np.full((3, 4), INF, "f4"))  # the exact sum is above
    assert not judged(problem, a, b, c, np.full((3, 4), 7, "f4"))
    same = make_problem(a, b, -c, beta=1e4)
    assert not judged(same, a, b, -c, right)  # both are +Inf


def test_a_complex_beta_may_make_nan_of_parts_that_overflow(judged):
    a, b = np.ones((3, 2), "c8"), np.ones((2, 4), "c8")
    c = np.full((3, 4), 1e38 + 1e38j, "c8")
    problem = make_problem(a, b, c, beta=1e4 + 1e4j)
    nan = np.full((3, 4), complex(math.nan, INF), "c8")  # Re: Inf - Inf
    assert judged(problem, a, b, c, nan)
    assert not judged(problem, a, b, c, np.full((3, 4), complex(0, math.nan), "c8"))


@pytest.mark.parametrize("kinds", [("u8", "c16"), ("c8", "u1"), ("u2", "c8"), ("c16", "i8")])
@pytest.mark.parametrize("by_three", [False, True])
@pytest.mark.parametrize("alpha", [1.0, 1 - 2j])
def test_integers_without_sign_times_complex_numbers(kinds, alpha, by_three, monkeypatch, rng):
    a, b = (rng.integers(0, 5, (9, 9)).astype(x) for x in kinds)
    problem = make_problem(a, b.T, alpha=alpha, trans_a="c", trans_b="c")
    right = (alpha * (a.T.conj() @ b.conj())).astype(problem.out_dtype)
    for most in (module.FULL_FLOPS, -1):
        monkeypatch.setattr(module, "FULL_FLOPS", most)
        assert verify(problem, a.T, b, None, right, by_three=by_three).passed
        wrong = right.copy()
        wrong[3, 4] += 1j
        assert not verify(problem, a.T, b, None, wrong, by_three=by_three).passed


def test_sums_of_errors_that_are_all_alike_pass(monkeypatch):
    """Equal products are rounded alike. Each error is within its own bound, and with random signs
    a sum of them may be several times as large as one."""
    monkeypatch.setattr(module, "FULL_FLOPS", -1)
    a, b = np.full((31, 680), 1 / 3, "f4"), np.full((680, 16), -0.7, "f4")
    c = np.full((31, 16), -0.7, "f4")
    problem = make_problem(a, b, c, alpha=7, beta=2.5)
    right = np.full((31, 16), -1112.41394, "f4")  # as a BLAS has it; exactly -1112.41668
    for seed in range(30):
        assert (verdict := verify(problem, a, b, c, right, seed=seed)).passed, verdict
    right[3, 4] -= 0.02
    for seed in range(5):
        assert not verify(problem, a, b, c, right, seed=seed).passed


@pytest.mark.parametrize("sign", [-1, 1])
def test_inf_beside_a_large_c_before_fails(judged, sign, rng):
    """A C before of a third of the largest number makes no Inf of either sign, and no NaN."""
    a, b = (rng.standard_normal(s).astype("f4") for s in ((20, 40), (40, 30)))
    c = np.full((20, 30), sign * np.finfo("f4").max / 3, "f4")
    problem = make_problem(a, b, c, beta=1.0)
    assert judged(problem, a, b, c, c)
    for value in (INF, -INF, math.nan):
        wrong = c.copy()
        wrong[5, 6] = value
        assert not judged(problem, a, b, c, wrong)
