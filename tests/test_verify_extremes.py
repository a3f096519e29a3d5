"""Verification at the ends of a dtype's range: factors of Inf and NaN, C beside far smaller
products, beta C that overflows."""

import math

import numpy as np
import pytest

import hybrid_gemm.verify as module
from hybrid_gemm import gemm
from hybrid_gemm.problem import Problem, make_problem
from hybrid_gemm.verify import rounding, verify

INF = math.inf
pytestmark = [pytest.mark.blas, pytest.mark.filterwarnings("ignore::RuntimeWarning")]


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


def all_fail(judged, problem, a, b, right, place, *values, c=None):
    for value in values:
        wrong = right.copy()
        wrong[place] = value
        assert not judged(problem, a, b, c, wrong), value


@pytest.mark.parametrize("up, down", [(-1060, 700), (700, -1060), (1000, -1000)])
def test_float64_rows_and_columns_far_apart(judged, up, down, rng):
    """C fits float64; C scaled by rows alone, or by columns alone, does not."""
    a = np.ldexp(rng.standard_normal((40, 30)), up)
    b = np.ldexp(rng.standard_normal((30, 50)), down)
    problem, right = make_problem(a, b), a @ b
    assert judged(problem, a, b, None, right)
    all_fail(judged, problem, a, b, right, (3, 4), right[3, 4] * 1.001, -right[3, 4], 0)


def test_products_far_below_the_largest_elements(judged, rng):
    """The largest elements of rows of A meet zeros of B, so that no product is near them."""
    a, b = rng.standard_normal((40, 30)), rng.standard_normal((30, 50))
    a[:, 0], b[0] = 1e150, 0
    a[:, 1], b[1] = 0, 1e150
    problem, right = make_problem(a, b), a @ b
    assert judged(problem, a, b, None, right)
    all_fail(judged, problem, a, b, right, (3, 4), 1.01 * right[3, 4], math.nan, INF)


def test_an_alpha_of_nan_beside_inf(judged):
    a, b = np.ones((3, 2), "f4"), np.ones((2, 4), "f4")
    a[1, 0] = INF
    problem = make_problem(a, b, alpha=math.nan)
    right = np.full((3, 4), math.nan, "f4")
    assert judged(problem, a, b, None, right)
    all_fail(judged, problem, a, b, right, (1, 2), INF, 1)


def test_inf_beside_a_c_that_overflows_to_the_other_side(judged):
    a, b = np.ones((3, 2), "f4"), np.ones((2, 4), "f4")
    a[1, 0] = INF
    c = np.full((3, 4), -1e38, "f4")
    problem = make_problem(a, b, c, beta=10.0)
    right = (a @ b + np.float32(10) * c).astype("f4")
    assert np.isnan(right[1]).all() and (right[0] == -INF).all()
    assert judged(problem, a, b, c, right)
    all_fail(judged, problem, a, b, right, (1, 2), 1, c=c)
    right[1] = INF  # where beta C is added to it before it is rounded
    assert judged(problem, a, b, c, right)
    certain = make_problem(a, b, -c, beta=-INF)
    right[:] = -INF
    right[1] = math.nan
    assert judged(certain, a, b, -c, right)
    all_fail(judged, certain, a, b, right, (1, 2), INF, -INF, c=-c)
    for value in (-1, 1e38):
        c[:] = value
        right = (a @ b + np.float32(10) * c).astype("f4")
        assert judged(problem, a, b, c, right) and (right[1] == INF).all()
        all_fail(judged, problem, a, b, right, (1, 2), math.nan, c=c)


@pytest.mark.parametrize("k", range(2, 40, 7))
def test_a_c_that_overflows_far_below_the_product(judged, k, rng):
    """1e44 overflows float32, and is less than what float64 rounds 1e70 by."""
    a, b = (rng.uniform(1e34, 1e35, s).astype("f4") for s in ((9, k), (k, 8)))
    c = np.full((9, 8), -1e32, "f4")
    problem = make_problem(a, b, c, beta=1e12)
    assert judged(problem, a, b, c, np.full((9, 8), math.nan, "f4"))
    assert not judged(problem, a, b, c, np.full((9, 8), 3e38, "f4"))
    assert not judged(make_problem(a, b), a, b, None, np.full((9, 8), math.nan, "f4"))


def test_products_near_the_largest_number(judged, rng):
    a, b = rng.uniform(0.9, 1, (20, 30)), rng.standard_normal((30, 9))
    b *= 1.7e308 / abs(a @ b).max()
    c = rng.standard_normal((20, 9))
    problem, right = make_problem(a, b, c, beta=1.0), a @ b
    assert judged(problem, a, b, c, right)
    i, j = np.unravel_index(abs(right).argmax(), right.shape)
    all_fail(judged, problem, a, b, right, (i, j), right[i, j] * (1 - 1e-10), math.nan, c=c)


def test_the_bound_of_the_second_look_near_the_largest_number():
    problem = Problem(1, 1, 2, "float64", beta=1.0)
    a, b = np.array([1e154, 1e154]), np.array([8e153, 8e153])
    reference, bound = rounding.own_bound(rounding.of(problem, "float64"), problem, a, b, 1.0)
    assert reference == pytest.approx(1.6e308) and bound < 1e294


def test_a_complex_alpha_by_which_a_alone_would_overflow(judged, rng):
    a, b = (x[0] + 1j * x[1] for x in map(rng.standard_normal, ((2, 9, 8), (2, 8, 7))))
    a, b, alpha = 1e300 * a, 1e-100 * b, 1 + 1e44j
    problem, right = make_problem(a, b, alpha=alpha), a @ (alpha * b)
    assert judged(problem, a, b, None, right)
    all_fail(judged, problem, a, b, right, (3, 4), 1.001 * right[3, 4], INF, math.nan)


@pytest.mark.parametrize("alpha, size", [(1e-310, 1e100), (1e300, 1e-250), (-3e-200, 1e60)])
@pytest.mark.parametrize("beta", [0.0, 2.0])
def test_factors_far_from_one_hide_no_error(judged, alpha, size, beta, rng):
    a, b = size * rng.standard_normal((9, 8)), rng.standard_normal((8, 7))
    c = alpha * size * rng.standard_normal((9, 7))
    problem = make_problem(a, b, c, alpha=alpha, beta=beta)
    right = alpha * (a @ b) + beta * c
    assert judged(problem, a, b, c, right)
    all_fail(judged, problem, a, b, right, (3, 4), 1.001 * right[3, 4], INF, math.nan, c=c)


def test_a_product_that_overflows_beside_inf_in_c(judged):
    """Far below the largest elements, so that only a second look finds it."""
    a, b, c = np.full((9, 8), 1e-100), np.full((8, 7), 1e-100), np.ones((9, 7))
    a[:, 0], b[0], a[:, 1], b[1] = 1e300, 0, 0, 1e300
    a[:, 2], b[2] = 1, 1e50
    problem = make_problem(a, b, c, alpha=1e300, beta=-INF)
    right = 1e300 * (a @ b) - INF * c
    assert np.isnan(right).all()
    assert judged(problem, a, b, c, right)


@pytest.mark.parametrize("alpha", [1.0, 1e-200])
@pytest.mark.parametrize("beta, size", [(1e100, 1e200), (-1e250, 1e50), (1e-100, 1e300)])
def test_a_large_beta_beside_far_smaller_products(judged, alpha, beta, size, rng):
    """Scaled as A and B are, beta C would be beyond float64."""
    a, b, c = (rng.standard_normal(shape) for shape in ((40, 30), (30, 50), (40, 50)))
    a, b, c = 1e-200 * a, 1e-90 * b, size * c
    problem, right = make_problem(a, b, c, alpha=alpha, beta=beta), beta * c
    assert judged(problem, a, b, c, right)
    all_fail(judged, problem, a, b, right, (3, 4), right[3, 4] * (1 + 1e-9), math.nan, INF, c=c)


def test_a_small_alpha_beside_a_large_c(judged, rng):
    """Sums before alpha overflow in all rows but one, which is far smaller."""
    a, b = np.full((9, 8), 1e60), np.full((8, 7), 1e300)
    a[0] = 1e-300
    c = 1e307 * rng.standard_normal((9, 7))
    problem = make_problem(a, b, c, alpha=-1e-136, beta=1.0)
    with np.errstate(over="ignore"):
        right = -1e-136 * (a @ b) + c
    assert (right[1:] == -INF).all()
    assert judged(problem, a, b, c, right)
    all_fail(judged, problem, a, b, right, (0, 4), 1.001 * right[0, 4], INF, math.nan, c=c)


@pytest.mark.parametrize("beta", [0.0, 1.0])
@pytest.mark.parametrize("wrong", [1e155, -1e170, 1e200, 1e308])
def test_an_error_whose_square_is_beyond_float64_fails(judged, wrong, beta, rng):
    a, b, c = (rng.standard_normal(shape) for shape in ((70, 40), (40, 90), (70, 90)))
    problem = make_problem(a, b, c, beta=beta)
    right = a @ b + beta * c
    assert judged(problem, a, b, c, right)
    all_fail(judged, problem, a, b, right, (60, 80), wrong, c=c)


def test_an_error_beside_a_c_whose_square_is_beyond_float64_fails(judged, rng):
    """Each row has one in a block of columns, and in another the element that is wrong."""
    a, b, c = (rng.standard_normal(shape) for shape in ((600, 30), (30, 700), (600, 700)))
    c[5], c[:, 3] = 1e200, 1e200
    problem, right = make_problem(a, b, c, beta=1.0), a @ b + c
    assert judged(problem, a, b, c, right)
    all_fail(judged, problem, a, b, right, (10, 600), 1.5 * right[10, 600], c=c)


@pytest.mark.parametrize("alpha", [1.9j, 1.9 + 1.9j, 8e307 * (1 + 1j)])
def test_a_complex_alpha_beside_elements_near_the_largest_number(judged, alpha):
    a, b = np.array([[1.5e308 + 1e308j, 1]]), np.array([[1e-310], [1e-300j]])
    problem, sums = make_problem(a, b, alpha=alpha), a @ b
    right = alpha * sums
    assert np.isfinite(right).all()
    assert judged(problem, a, b, None, right)
    all_fail(judged, problem, a, b, right, (0, 0), 1.001 * right[0, 0], INF)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("sign", [1, -1])
def test_an_alpha_of_inf_beside_a_c_that_overflows(judged, dtype, sign, rng):
    """beta C is Inf of either sign, of which one makes NaN with the product's."""
    a, b = (rng.uniform(1, 2, s).astype(dtype) for s in ((9, 8), (8, 7)))
    c = (10 * rng.standard_normal((9, 7))).astype(dtype)
    c[0] = 0
    most = float(np.finfo("f8" if dtype == "float64" else "f4").max)
    problem = make_problem(a, b, c, alpha=sign * INF, beta=most)
    right = np.where(sign * c > -1, sign * INF, math.nan).astype(dtype)
    assert judged(problem, a, b, c, right)
    all_fail(judged, problem, a, b, right, (0, 4), 1, math.nan, -sign * INF, c=c)


def test_an_alpha_of_inf_times_sums_that_overflow_vanish_or_are_zero(judged):
    a, b = np.array([[1, 1], [1, -1], [0, 0], [1, 1]], "f4"), np.ones((2, 5), "f4")
    a[0], b[:, 1] = (3e38, -3e38), 3e38
    b[:, 2], a[3] = 1e-30, 1e-30
    problem = make_problem(a, b, alpha=-INF)
    right = -INF * (a @ b)
    assert np.isnan(right[2]).all()
    for value in (INF, -INF, math.nan):  # Inf - Inf is NaN in one order, and Inf in others
        right[0, 1] = value
        assert judged(problem, a, b, None, right)
    right[3, 2] = math.nan  # 2e-60 is 0 in float32
    assert judged(problem, a, b, None, right)
    all_fail(judged, problem, a, b, right, (3, 0), math.nan, INF, 1)
    all_fail(judged, problem, a, b, right, (2, 3), 1, 0, INF, -INF)


def test_an_alpha_of_inf_times_what_tf32_rounds_to_0(judged):
    a, b = np.full((3, 2), 2.0**60, "f4"), np.full((2, 4), 2.0**-139, "f4")
    b[:, 0] = 2.0**-60
    right = np.full((3, 4), math.nan, "f4")
    right[:, 0] = INF
    problem = make_problem(a, b, alpha=INF)
    assert judged(problem.having(compute="tf32"), a, b, None, right)
    assert not judged(problem, a, b, None, right)
    all_fail(judged, problem.having(compute="tf32"), a, b, right, (1, 0), math.nan, -INF, 1)


def test_a_subnormal_alpha_times_sums_that_overflow(judged, rng):
    a, b = np.full((9, 8), 1e308), rng.uniform(1, 2, (8, 7))
    problem = make_problem(a, b, alpha=5.6e-309)
    right = np.full((9, 7), INF)
    assert judged(problem, a, b, None, right)
    a /= 1e10
    all_fail(judged, problem, a, b, 5.6e-309 * (a @ b), (3, 4), INF, -INF, math.nan)


def test_beta_c_beyond_float64_that_the_product_takes_back(judged, rng):
    """As with a fused multiply-add: beta C itself is never rounded."""
    a, b = np.full((9, 8), -1e154), np.full((8, 7), 1e153)
    c = np.full((9, 7), 1e307) * rng.uniform(9, 10, (9, 7))
    problem = make_problem(a, b, c, beta=2.0)
    right = (c - 4e307) * 2
    assert np.isfinite(right).all()
    assert judged(problem, a, b, c, right)
    assert judged(problem, a, b, c, np.full((9, 7), INF))
    all_fail(judged, problem, a, b, right, (3, 4), -INF, math.nan, 1.001 * right[3, 4], c=c)


def test_a_complex_alpha_whose_products_with_parts_overflow(judged, rng):
    """As in BLAS alpha multiplies B first: Inf times 0 is NaN there."""
    a, b = np.zeros((9, 8), "c8"), rng.standard_normal((8, 7)).astype("c8")
    b += 2
    for alpha in (3e38j, 3e38 + 1e30j):
        right = np.full((9, 7), complex(math.nan, math.nan), "c8")
        assert judged(make_problem(a, b, alpha=alpha), a, b, None, right)
    assert not judged(make_problem(a, b, alpha=3e36j), a, b, None, right)


def test_a_complex_beta_whose_products_with_parts_overflow(judged):
    a, b = np.zeros((9, 8), "c8"), np.zeros((8, 7), "c8")
    c = np.full((9, 7), 3e38 - 3e38j, "c8")
    problem = make_problem(a, b, c, beta=-2.5 + 3e38j)
    # Re: -7.5e38 + 9e76, which a fused multiply-add makes Inf; Im: 7.5e38 + 9e76
    right = np.full((9, 7), complex(math.nan, INF), "c8")
    assert judged(problem, a, b, c, np.full((9, 7), complex(INF, INF), "c8"))
    assert judged(problem, a, b, c, right)
    all_fail(judged, problem, a, b, right, (3, 4), complex(1, INF), complex(INF, 1), c=c)


def test_three_products_of_equal_elements():
    """alpha times B, and sums of two parts, are rounded alike in all products, which cancel."""
    k, alpha = 1000, 1e-3j
    a, b = np.full((6, k), 1 / 3 + 1e-4j, "c8"), np.full((k, 9), 1e-4 - 0.7j, "c8")
    scaled = np.complex64(alpha) * b
    factors = [
        (a.real, scaled.real), (a.imag, scaled.imag), (a.real + a.imag, scaled.real + scaled.imag)
    ]  # fmt: skip
    p1, p2, p3 = (np.cumsum(x[:1].T * y[:, :1], axis=0, dtype="f4")[-1] for x, y in factors)
    right = np.full((6, 9), (p1 - p2) + 1j * (p3 - p1 - p2), "c8")
    problem = make_problem(a, b, alpha=alpha)
    assert verify(problem, a, b, None, right, by_three=True).passed
    right[2, 3] += 0.01j * abs(right[2, 3])
    assert not verify(problem, a, b, None, right, by_three=True).passed


@pytest.mark.parametrize("trans", [False, True], ids=["A", "B"])
def test_what_tf32_keeps_of_subnormal_operands_passes(judged, trans, rng):
    """Multiples of 2^-136, which are few below 2^-126."""
    a, b = rng.standard_normal((40, 50)) * 2.0**-133, rng.standard_normal((50, 60)) * 2.0**60
    a, b = (y.astype("f4") for y in ((b.T, a.T) if trans else (a, b)))
    problem = make_problem(a, b).having(compute="tf32")
    made = gemm(a, b, compute="tf32", device="emulator")
    assert abs(made - a.astype("f8") @ b).max() > 0.02 * abs(made).max()
    assert judged(problem, a, b, None, made)
    assert not judged(make_problem(a, b), a, b, None, made)
    made[3, 5] += 0.5 * abs(made).max()
    assert not judged(problem, a, b, None, made)
