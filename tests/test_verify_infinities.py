"""Verdicts where Inf and NaN are in a product, or come of it."""

import dataclasses
import math

import numpy as np
import pytest
from support.verdicts import both, case, product, sampled

from hybrid_gemm import gemm
from hybrid_gemm.problem import make_problem
from hybrid_gemm.verify import verify

pytestmark = pytest.mark.blas

INF = np.inf


def test_the_sign_of_inf_and_nan_are_compared():
    problem, a, b, c, right = case()
    b = abs(b)
    right = product(problem, a, b)
    a[5, 6], right[5] = INF, INF
    for verdict in both(problem, a, b, c, right):
        assert verdict.passed, verdict
    for value in (-INF, np.nan, 1.0):
        wrong = right.copy()
        wrong[5, 7] = value
        for verdict in both(problem, a, b, c, wrong):
            assert not verdict.passed
    b[6, 9] = 0
    right = product(problem, a, b)
    assert np.isnan(right[5, 9]) and right[5, 8] == INF
    for verdict in both(problem, a, b, c, right):
        assert verdict.passed, verdict
    a[5, 8] = -INF
    right[5] = np.nan  # Infs of both signs
    for verdict in both(problem, a, b, c, right):
        assert verdict.passed, verdict
    right[5, 3] = INF
    for verdict in both(problem, a, b, c, right):
        assert not verdict.passed


@pytest.mark.parametrize("sign", [1, -1])
def test_an_inf_that_meets_an_inf_is_one_of_its_terms(sign):
    problem, a, b, c, _right = case()
    a[3, 7], b[7, 9] = INF, sign * INF
    with np.errstate(invalid="ignore"):
        right = product(problem, a, b, c)
    assert right[3, 9] == sign * INF
    for verdict in both(problem, a, b, c, right):
        assert verdict.passed, verdict
    for value in (-sign * INF, np.nan, 1.0):
        wrong = right.copy()
        wrong[3, 9] = value
        for verdict in both(problem, a, b, c, wrong):
            assert not verdict.passed, value


def test_inf_in_b_and_before():
    problem, a, b, c, _right = case(beta=3)
    a = abs(a)
    b[7, 8:10], c[20, 30], c[21, 31] = (-INF, INF), INF, np.nan
    c[22:24, 8:10], c[24, 8] = [[INF, -INF], [-INF, INF]], np.nan
    with np.errstate(invalid="ignore"):
        right = product(problem, a, b, c)
    assert np.isneginf(right[0, 8]) and right[20, 30] == INF and np.isnan(right[21, 31])
    assert np.isnan([*right[22, 8:10], right[24, 8]]).all() and list(right[23, 8:10]) == [-INF, INF]
    for verdict in both(problem, a, b, c, right):
        assert verdict.passed, verdict
    others = {
        (0, 8): (5, INF, np.nan), (20, 30): (5, -INF, np.nan), (21, 31): (5, INF),
        (22, 8): (5, INF, -INF), (22, 9): (5, INF, -INF), (23, 8): (5, INF, np.nan),
        (23, 9): (5, -INF, np.nan), (24, 8): (5, -INF),
    }  # fmt: skip
    for place, value in ((x, y) for x, values in others.items() for y in values):
        wrong = right.copy()
        wrong[place] = value
        for verdict in both(problem, a, b, c, wrong):
            assert not verdict.passed


@pytest.mark.parametrize("m, alpha", [(60, 1), (200, 1), (200, 0.99)])
def test_overflow_is_inf_of_its_sign(m, alpha):
    a, b = np.full((m, 1400), 7, "f2"), np.full((1400, 50), 7, "f2")
    b[:, 3] *= -1
    b[:, 4] = 1
    problem = make_problem(a, b, alpha=alpha)
    with np.errstate(over="ignore"):
        right = product(problem, a, b)
    assert right[0, 0] == INF and right[0, 3] == -INF and np.isfinite(right[0, 4])
    for verdict in both(problem, a, b, None, right):
        assert verdict.passed, verdict
    for value in (-right[5, 6], np.nan, 60000, 0, 65504):
        wrong = right.copy()
        wrong[5, 6] = value
        for verdict in both(problem, a, b, None, wrong):
            assert not verdict.passed, value
    wrong = right.copy()
    wrong[5, 4] = INF
    for verdict in both(problem, a, b, None, wrong):
        assert not verdict.passed


def test_where_all_overflows_the_sign_is_known_without_the_sums(monkeypatch):
    """No element is looked at for it: only 1 of these sums that Inf spoils."""
    monkeypatch.setattr("hybrid_gemm.verify.floats.EXACT_FLOPS", 1)
    rng = np.random.default_rng(10)
    a, b = (rng.uniform(5, 9, s).astype("f2") for s in ((300, 2000), (2000, 320)))
    problem = make_problem(a, b)
    right = np.full((300, 320), INF, "f2")
    verdict = sampled(problem, a, b, None, right)
    assert verdict.passed and "spoil" in verdict.how and "spoil" in verdict.power
    for value in (-INF, np.nan):
        wrong = right.copy()
        wrong[123, 234] = value
        assert not sampled(problem, a, b, None, wrong).passed
    b[:] /= 100
    right = product(problem, a, b)
    assert sampled(problem, a, b, None, right).passed
    right[123, 234] = INF
    assert not sampled(problem, a, b, None, right).passed
    a, b = (x.astype("f4") * np.float32(1e19) for x in (a, b))
    problem, right = make_problem(a, b), np.full((300, 320), np.nan, "f4")
    for sign in (1, -1):
        assert sampled(problem, a, sign * b, None, sign * np.full_like(right, INF)).passed
        assert not sampled(problem, a, sign * b, None, right).passed
    b[::2] *= -1  # partial sums may pass the largest number, and minus that
    assert sampled(problem, a, b, None, right).passed


def test_partial_sums_that_overflow_may_be_inf_or_nan():
    a, b = np.full((40, 64), 1e20, "f4"), np.full((64, 40), 1e18, "f4")
    b[1::2] *= -1
    a[0] = 1
    problem = make_problem(a, b)
    right = np.zeros((40, 40), "f4")
    assert all(v.passed for v in both(problem, a, b, None, right))
    for value in (INF, -INF, np.nan):  # 32 products of 1e38 pass the largest number
        got = right.copy()
        got[5, 6] = value
        assert all(v.passed for v in both(problem, a, b, None, got))
        got[0, 6] = value
        assert not any(v.passed for v in both(problem, a, b, None, got))


@pytest.mark.parametrize("sign", [1, -1])
def test_finite_terms_that_overflow_beside_an_inf_may_make_nan(sign):
    a, b = np.full((40, 50), 1e20, "f4"), np.full((50, 30), -1e20 * sign, "f4")
    a[3, 0], a[4, :2], b[0] = INF, (0, INF), sign
    problem = make_problem(a, b)
    right = np.full((40, 30), -INF * sign, "f4")
    for fair in (INF * sign, np.nan):
        right[3] = fair
        assert all(v.passed for v in both(problem, a, b, None, right))
    for row, value in ((3, -INF), (3, 1), (4, INF), (4, 1)):
        wrong = right.copy()
        wrong[row, 7] = value * sign
        assert not any(v.passed for v in both(problem, a, b, None, wrong)), (row, value)


@pytest.mark.parametrize("scale", ["alpha", "beta"])
def test_a_factor_of_nan_makes_all_nan(scale):
    problem, a, b, c, right = case(beta=3)
    problem = dataclasses.replace(problem, **{scale: np.nan})
    right[:] = np.nan
    assert all(v.passed for v in both(problem, a, b, c, right))
    for value in (0, INF, 1.0):
        right[5, 6] = value
        assert not any(v.passed for v in both(problem, a, b, c, right))


def test_an_alpha_of_inf_leaves_the_sign():
    problem, a, b, c, right = case()
    problem = dataclasses.replace(problem, alpha=INF)
    right = right * np.float32(INF)
    assert all(v.passed for v in both(problem, a, b, c, right))
    for value in (0, -right[5, 6], np.nan, 1.0):
        got = right.copy()
        got[5, 6] = value
        assert not any(v.passed for v in both(problem, a, b, c, got)), value


@pytest.mark.parametrize("trans", [False, True], ids=["A", "B"])
@pytest.mark.parametrize("partner", [0, 1, -3])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_operands_that_tf32_rounds_to_inf_pass(trans, partner, rng):
    """The largest float32 is beyond the largest TF32, which is 2^-11 less."""
    a, b = rng.standard_normal((40, 50)).astype("f4"), rng.standard_normal((50, 60)).astype("f4")
    a[3, 4], b[4] = np.finfo("f4").max, partner
    if trans:
        a, b = b.T, a.T
    problem = make_problem(a, b).having(compute="tf32")
    made = gemm(a, b, compute="tf32", device="emulator")
    there = ~np.isfinite(made)
    assert (there.T if trans else there)[3].all() and there.sum() == 60
    for verdict in both(problem, a, b, None, made):
        assert verdict.passed, verdict
    wrong = made.copy()
    wrong[7, 8] = np.inf
    for verdict in both(problem, a, b, None, wrong):
        assert not verdict.passed
    exact = a.astype("f8") @ b
    for verdict in both(problem, a, b, None, exact.astype("f4")):  # of a device that cuts off
        assert verdict.passed, verdict
    if not partner:
        for verdict in both(make_problem(a, b), a, b, None, made):
            assert not verdict.passed


@pytest.mark.parametrize("trans", [False, True], ids=["A", "B"])
@pytest.mark.parametrize("least", [2.0**-149, -(2.0**-138), 2.0**-126])
def test_inf_times_what_tf32_rounds_to_0_passes(trans, least, rng):
    a, b = rng.standard_normal((40, 50)).astype("f4"), rng.standard_normal((50, 60)).astype("f4")
    a[3, 4], b[4, :9] = INF, least
    if trans:
        a, b = b.T, a.T
    problem = make_problem(a, b).having(compute="tf32")
    made = gemm(a, b, compute="tf32", device="emulator")
    row, rounded = (made.T if trans else made)[3], abs(least) < 2.0**-136
    assert np.isnan(row[:9]).all() == rounded and np.isinf(row[9:]).all()
    for verdict in both(problem, a, b, None, made):
        assert verdict.passed, verdict
    exact = gemm(a, b, device="cpu")  # where nothing is rounded, NaN is wrong
    (exact.T if trans else exact)[3, :9] = np.nan
    for verdict in both(make_problem(a, b), a, b, None, exact):
        assert not verdict.passed
    for place, value in ((5, 1.0), (5, np.copysign(INF, -least)), (12, np.nan), (12, -row[12])):
        before, row[place] = row[place], value
        for verdict in both(problem, a, b, None, made):
            assert not verdict.passed, value
        row[place] = before


@pytest.mark.parametrize("full", [True, False])
@pytest.mark.parametrize("beta", [0.0, 1.0, math.inf])
@pytest.mark.parametrize("alpha", [math.inf, -math.inf])
def test_an_infinite_alpha_makes_inf_of_sums_and_nan_of_0(alpha, beta, full, monkeypatch, rng):
    monkeypatch.setattr("hybrid_gemm.verify.FULL_FLOPS", 10**12 if full else 0)
    monkeypatch.setattr("hybrid_gemm.verify.SAMPLED", 5)
    a, b, c = (rng.integers(-2, 3, shape).astype("f4") for shape in ((40, 30), (30, 9), (40, 9)))
    with np.errstate(all="ignore"):
        sums = a @ b
        right = np.float32(alpha) * sums + (np.float32(beta) * c if beta else 0)
    assert np.isnan(right).any() and np.isinf(right).any()
    problem = make_problem(a, b, c if beta else None, alpha=alpha, beta=beta)
    assert verify(problem, a, b, c if beta else None, right).passed
    i, j = np.argwhere(np.isinf(right) & (sums != 0))[3]
    for wrong in (1.0, -right[i, j], math.nan):
        changed = right.copy()
        changed[i, j] = wrong
        found = verify(problem, a, b, c if beta else None, changed, mode="full")
        assert not found.passed, wrong


def test_rows_whose_middle_is_small_may_overflow(monkeypatch):
    """Rows of A are scaled by their middle at first; what may be Inf is said by all of them."""
    monkeypatch.setattr("hybrid_gemm.verify.FULL_FLOPS", 0)
    for dtype in "float16", "float64":
        large = 40.0 if dtype == "float16" else 3e153
        a, b = np.full((100, 300), large, dtype), np.full((300, 90), large, dtype)
        a[:, 140:180] = large / 40
        with np.errstate(over="ignore"):
            c = (a.astype("float64") @ b.astype("float64")).astype(dtype)
        assert np.isinf(c).all()
        problem = make_problem(a, b, None)
        assert verify(problem, a, b, None, c, seed=1).passed
        c[3, 4] = -np.inf
        assert not verify(problem, a, b, None, c, seed=1).passed
