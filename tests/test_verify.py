"""The verdict must fail on what is wrong: a check that cannot fail checks nothing."""

import dataclasses
import math
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
from support.verdicts import both, case, product, sampled

import hybrid_gemm.verify as module
from hybrid_gemm.errors import UsageError
from hybrid_gemm.problem import Problem, make_problem
from hybrid_gemm.verify import floats, integers, rounding, sampling, verify

pytestmark = pytest.mark.blas

INF = np.inf


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "int32", "int64"])
@pytest.mark.parametrize("beta", [0, 3])
def test_right_products_pass(dtype, beta):
    for verdict in both(*case(dtype, beta=beta)):
        assert verdict.passed, verdict


@pytest.mark.parametrize("dtype", ["float32", "int32"])
def test_one_wrong_element_fails_and_is_named(dtype):
    problem, a, b, c, right = case(dtype)
    wrong = right.copy()
    wrong[17, 23] += 100 if dtype == "float32" else 1
    full, blocks = both(problem, a, b, c, wrong)
    assert not full.passed and not blocks.passed
    assert "every element" in full.how and "every element" not in blocks.how
    assert "17" in full.where and "23" in full.where
    assert "C[17, 23]" in str(blocks) or dtype == "int32"


@pytest.mark.parametrize("value", [np.nan, INF, -INF])
def test_nan_and_inf_fail(value):
    problem, a, b, c, right = case()
    right[59, 49] = value
    for verdict in both(problem, a, b, c, right):
        assert not verdict.passed


def test_a_missing_nan_fails_and_a_present_one_passes():
    problem, a, b, c, right = case()
    a[3, 4] = np.nan
    for verdict in both(problem, a, b, c, right):
        assert not verdict.passed
    right[3] = np.nan
    for verdict in both(problem, a, b, c, right):
        assert verdict.passed, verdict
    right[3, 7] = INF
    for verdict in both(problem, a, b, c, right):
        assert not verdict.passed


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
@pytest.mark.parametrize("beta", [0, 3])
def test_no_sum_of_a_right_product_is_beyond_its_bound(dtype, beta, monkeypatch):
    """Where many are, those of a wrong element are not looked at."""
    beyond = []
    monkeypatch.setattr(
        floats.Floats,
        "_look",
        lambda self, *alarms: beyond.extend(x for y in alarms for x in y if x[1] > 1),
    )
    for scale in (1, 1e-21 if dtype == "float32" else 1e-3):  # some products vanish
        problem, a, b, c, _right = case(dtype, beta=beta, scale=scale)
        problem = dataclasses.replace(problem, alpha=3)
        assert sampled(problem, a, b, c, product(problem, a, b, c), seed=1).passed
    assert not beyond


def test_elements_within_their_bounds_may_be_wrong_together():
    """Unless their errors are equal, as those of equal products are."""
    bound, weights = np.full(4, 1.0), np.array([2.0, -2.0, 2.0, -2.0])
    for shape in ((1, 4), (4, 1)):
        for errors, share in (
            ([0.9, -0.8, 0.7, -0.6], 3.0 / 2),
            ([0.9, 0.8, 0.7, 0.6], 0.9),  # they cancel
            ([0.4, -0.3, 0.2, -0.1], 0.4),  # as much as random ones
            ([0.9, -0.8, 0.9, -0.6], 0.9),  # two are equal
        ):
            error = np.reshape(errors, shape)
            ratio = abs(error)
            found = SimpleNamespace(xp=np)
            floats.Floats._together(found, ratio, error, bound.reshape(shape), weights)
            assert ratio.max() == pytest.approx(share)


def test_blocks_and_weights_of_sums():
    """At most about 32 blocks, none across an edge; weights from 1 to 2, of both signs. A tile of
    equal errors is in sums of which one at least is as large as random signs make them."""
    assert [sampling.block_width(x) for x in (2048, 70)] == [64, 16]
    assert sampling._blocks(70, (0, 40), 16) == [
        slice(0, 16), slice(16, 32), slice(32, 40), slice(40, 56), slice(56, 70)
    ]  # fmt: skip
    weights = sampling.of_classes(sampling.weights(np.random.default_rng(1), 1000))
    assert weights.shape == (sampling.CLASSES, 1000) and len(np.unique(abs(weights))) == 1000
    assert abs(np.sign(weights).mean()) < 0.05
    assert abs(weights).min() >= 1 and abs(weights).max() <= 2
    for first in range(0, 900, 7):
        tile = slice(first, first + sampling.CLASSES)
        assert abs(weights[:, tile].sum(axis=1)).max() >= math.sqrt(sampling.CLASSES)


def test_weights_of_integers_are_odd_in_one_sum_and_many():
    """An odd weight leaves no bit of one wrong element out; few weights would often be equal."""
    weights = integers._weights(np.random.default_rng(1), 1000)
    odd, others = weights[:, 0], weights[:, 1:]
    assert weights.shape == (1000, integers.VECTORS) and abs(weights).max() < 2**15
    assert (odd % 2 == 1).all() and abs((others % 2).mean() - 0.5) < 0.05
    assert len(np.unique(weights)) > 7500 and abs(np.sign(weights).mean()) < 0.1


@pytest.mark.parametrize("dtype", ["int8", "int16", "int64"])
def test_elements_of_integers_are_held_by_sums(dtype):
    a = np.ones((20, 30), dtype)
    problem = make_problem(a, a.T, np.empty((20, 20), dtype))
    c = np.full((20, 20), 30, dtype)
    full, found = both(problem, a, a.T, None, c)
    assert full.passed and full.how == "every element, exactly"
    assert full.power == "finds any wrong element"
    bits = np.iinfo(dtype).bits
    sums = f"{integers.VECTORS} random sums of every row and column"
    assert found.how.startswith(f"{sums}, modulo 2^{bits}, ") and "seed " in found.how
    assert found.passed and found.power.startswith("finds any single wrong element, and ")


@pytest.mark.parametrize("mode", ["full", "auto"])
def test_a_wrong_element_is_named_where_there_is_no_k(mode):
    problem, a, b, c, right = case(k=0, beta=3.0)
    right[17, 23] += 1
    verdict = sampled(problem, a, b, c, right, mode=mode)
    assert not verdict.passed and "C[17, 23] is " in str(verdict)


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
    for verdict in both(problem, a, b, c, 2 * c + 1):
        assert not verdict.passed


def test_off_and_unknown_modes():
    arguments = case()
    assert verify(*arguments, mode="off") is None
    with pytest.raises(UsageError, match="auto, full, off"):
        verify(*arguments, mode="maybe")


# --- what used to pass --------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["zeros", "random"])
def test_float16_is_judged_where_the_sum_of_magnitudes_is_beyond_its_range(what):
    rng = np.random.default_rng(1)
    a, b = (rng.uniform(-8, 8, s).astype("f2") * 4 for s in ((64, 2000), (2000, 64)))
    problem = make_problem(a, b)
    right = product(problem, a, b)
    assert np.isfinite(right).all() and (abs(a.astype("f8")) @ abs(b.astype("f8"))).min() > 65504
    wrong = np.zeros_like(right) if what == "zeros" else rng.permutation(right.ravel())
    wrong = wrong.reshape(right.shape)
    assert all(v.passed for v in both(problem, a, b, None, right))
    assert not any(v.passed for v in both(problem, a, b, None, wrong))


@pytest.mark.parametrize("what", ["nothing", "rows", "tile"])
def test_zeros_in_most_rows_fail(what):
    """A of rank 1, so that the product needs no multiplication of matrices."""
    rng = np.random.default_rng(2)
    m, n, k = 1024, 256, 512
    x, b = rng.standard_normal(m).astype("f4"), rng.standard_normal((k, n), "f4")
    a = np.outer(x, np.ones(k, "f4"))
    c = np.outer(x, b.sum(axis=0, dtype="f8")).astype("f4")
    if what == "rows":
        c[32:] = 0
    if what == "tile":
        c[512:528, 80:96] = 0
    assert sampled(make_problem(a, b), a, b, None, c).passed == (what == "nothing")


def test_a_fresh_seed_is_drawn_and_repeats():
    arguments = case()
    first, second = sampled(*arguments), sampled(*arguments)
    assert first.seed != second.seed and f"seed {first.seed}" in first.how
    again = sampled(*arguments, seed=first.seed)
    assert again == first
    assert "1e-06" in first.power and len(str(first)) < 120


def test_data_whose_roundings_are_not_random_pass():
    """Equal products are rounded alike, far from their mean: here every sum is in order."""
    for dtype in ("f4", "f8"):
        a, b = np.full((40, 8192), 0.1, dtype), np.full((8192, 48), 0.3, dtype)
        term = a[0, 0] * b[0, 0]
        c = np.full((40, 48), np.cumsum(np.full(8192, term, dtype), dtype=dtype)[-1])
        problem = make_problem(a, b)
        for verdict in both(problem, a, b, None, c):
            assert verdict.passed, verdict
        c[3] *= 1 - 1e-3
        for verdict in both(problem, a, b, None, c):
            assert not verdict.passed


def test_sums_that_rise_and_fall_pass():
    """Half of the products are positive, the other half negative: C is small, its errors not."""
    rng = np.random.default_rng(3)
    k = 8192
    a, b = rng.random((96, k), "f4"), rng.random((k, 80), "f4")
    a[:, k // 2 :], b[k // 2 :] = a[:, : k // 2], -b[: k // 2]
    c = np.zeros((96, 80), "f4")
    for i in range(0, k, 16):  # a few roundings where 16 would be
        c += a[:, i : i + 16] @ b[i : i + 16]
    problem = make_problem(a, b)
    for verdict in both(problem, a, b, None, c):
        assert verdict.passed, verdict
    c[30, 40] += 0.5
    for verdict in both(problem, a, b, None, c):
        assert not verdict.passed


@pytest.mark.parametrize("compute", ["fp32", "tf32"])
def test_the_bound_of_an_element_follows_its_own_partial_sums(compute, rng):
    """Here those of its products one after the other, which are the largest."""
    a, b = rng.random(8192, "f4").astype("f8"), np.repeat([1.0, -1.0], 4096)
    problem = Problem(1, 1, 8192, compute=compute)
    r = rounding.of(problem, np.dtype("float32"))
    reference, bound = rounding.own_bound(r, problem, a, b, 0.0)
    walk, squares = (math.sqrt(np.square(x).sum()) for x in (np.cumsum(a * b), a))
    assert reference == (a * b).sum() != 0
    random = rounding.deviations(64) * math.hypot(r.unit * walk, r.operands * squares)
    assert bound == pytest.approx(random + r.cut * walk * math.sqrt(8192), rel=0.01)


@pytest.mark.parametrize("compute", ["fp32", "tf32"])
def test_the_bound_of_an_element_is_not_beyond_the_worst_case(compute):
    problem, x = Problem(1, 1, 2, compute=compute), np.array([3.0, 5.0])
    r = rounding.of(problem, np.dtype("float32"))
    worst = (2 * 5 * r.unit + r.operands + 2 * r.cut) * 34
    assert rounding.own_bound(r, problem, x, x, 0.0)[1] == pytest.approx(worst, rel=1e-6)


def test_an_element_whose_operands_are_all_rounded_alike_passes():
    """By TF32, from 1 + 0.9 2^-12 to 1."""
    problem, x = Problem(1, 1, 8192, compute="tf32"), np.full(8192, 1 + 0.9 * 2.0**-12)
    r = rounding.of(problem, np.dtype("float32"))
    reference, bound = rounding.own_bound(r, problem, x, x, 0.0)
    assert reference - 8192 < bound < 8 * (reference - 8192)


@pytest.mark.parametrize("scale", [1e-22, 1e-30, 1e17])
def test_extremes_of_float32(scale):
    problem, a, b, c, right = case(scale=scale)
    for verdict in both(problem, a, b, c, right):
        assert verdict.passed, verdict


def test_float64_far_from_one():
    for left, right in ((1e-150, 1e-150), (1e150, 1e150), (1e200, 1e-200)):
        rng = np.random.default_rng(4)
        a, b = left * rng.standard_normal((60, 70)), right * rng.standard_normal((70, 80))
        problem = make_problem(a, b)
        c = a @ b
        assert all(v.passed for v in both(problem, a, b, None, c))
        c[3, 4] *= 1.001
        assert not any(v.passed for v in both(problem, a, b, None, c))


def test_integers_wrap():
    rng = np.random.default_rng(6)
    for dtype in ("int8", "int16", "int32", "int64", "uint32"):
        limits = np.iinfo(dtype)
        a, b, c = (
            rng.integers(limits.min, limits.max, s, dtype) for s in ((90, 40), (40, 70), (90, 70))
        )
        problem = make_problem(a, b, c, alpha=-3, beta=7)
        wide = (x.astype("i8") for x in (a, b, c))
        x, y, z = wide
        right = (-3 * (x @ y) + 7 * z).astype(problem.out_dtype)
        assert all(v.passed for v in both(problem, a, b, c, right)), dtype
        for change in (1, limits.max // 2 + 1):
            wrong = right.copy()
            wrong[80, 60] += np.array(change, dtype)
            assert not any(v.passed for v in both(problem, a, b, c, wrong)), dtype


@pytest.mark.parametrize(
    "places",
    [([4, 4], [5, 9]), ([4, 8], [5, 5]), ([4, 4, 8, 8], [5, 9, 5, 9]), np.s_[:16, :16]],
    ids=["row", "column", "rectangle", "tile"],
)
@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_wrong_signs_that_add_up_to_nothing(dtype, places):
    """An even number of them escapes odd weights: in a rectangle by rows and by columns."""
    problem, a, b, c, right = case(dtype)
    right[places] ^= np.iinfo(dtype).min
    assert not any(v.passed for v in both(problem, a, b, c, right))


def test_sums_of_integers_that_no_float64_holds():
    a = np.full((1, 2**18 + 1), 2**18 - 1)
    problem, right = make_problem(a, a.T), a @ a.T
    assert int(right[0, 0]) > 2**53
    assert all(v.passed for v in both(problem, a, a.T, None, right))
    assert not any(v.passed for v in both(problem, a, a.T, None, right + 1))


@pytest.mark.parametrize("dtype", ["float16", ml_dtypes.bfloat16])
def test_sixteen_bits_come_back_as_float32(dtype):
    rng = np.random.default_rng(7)
    a, b = (rng.standard_normal((500, 500)).astype(dtype) for _ in "ab")
    problem = make_problem(a, b)
    exact = a.astype("f8") @ b.astype("f8")
    for out in (np.float32, dtype):
        c = exact.astype(out)
        assert all(v.passed for v in both(problem, a, b, None, c))
    rough = exact.astype(dtype).astype("f4")
    assert not verify(problem, a, b, None, rough, mode="full").passed


def test_what_arithmetic_may_lose_is_allowed_and_no_more():
    rng = np.random.default_rng(8)
    a, b = (rng.standard_normal((400, 400), "f4") for _ in "ab")

    def kept(x, bits):
        fraction, exponent = np.frexp(x)
        return np.ldexp(np.rint(fraction * 2**bits), exponent - bits).astype("f4")

    c = kept(a, 11) @ kept(b, 11)
    strict = make_problem(a, b)
    rounded = dataclasses.replace(strict, compute="tf32")
    assert all(v.passed for v in both(rounded, a, b, None, c))
    assert not any(v.passed for v in both(strict, a, b, None, c))
    c = kept(a, 8) @ kept(b, 8)
    assert not verify(rounded, a, b, None, c, mode="full").passed


@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 700, 30), (700, 1, 30), (33, 17, 1), (5, 5, 0)])
def test_odd_shapes(shape):
    m, n, k = shape
    rng = np.random.default_rng(9)
    a, b, c = (rng.standard_normal(s).astype("f4") for s in ((m, k), (k, n), (m, n)))
    problem = make_problem(a, b, c, beta=1)
    right = (a.astype("f8") @ b + c).astype("f4")
    assert all(v.passed for v in both(problem, a.T.copy().T, b.T.copy().T, c, right))
    right[-1, -1] += 1
    assert not any(v.passed for v in both(problem, a, b, c, right))
    assert verify(Problem(0, n, k), a[:0], b, None, right[:0]).passed


@pytest.mark.parametrize("most, times", [(math.inf, 100), (-1, 400)])
def test_data_that_round_alike_hide_no_error_beside_them(most, times, monkeypatch, rng):
    """Sums of 1 and many halves of its last place lose these all: thousands of elements are beyond
    what random roundings leave, and right."""
    monkeypatch.setattr(module, "FULL_FLOPS", most)
    m, n, k = 200, 120, 2000
    a, b = (rng.standard_normal(shape).astype("f4") for shape in ((m, k), (k, n)))
    a[:100], a[:100, 0], b[:, :60] = 2.0**-24, 1, 1
    c = np.zeros((m, n), "f4")
    for i in range(k):
        c += a[:, i : i + 1] * b[i]
    problem = make_problem(a, b)
    assert verify(problem, a, b, None, c, seed=1).passed
    noise = (c - a.astype("f8") @ b)[100:, 60:].std()
    for i, j in zip(range(100, m, 12), range(60, n, 6), strict=False):
        wrong = c.copy()
        wrong[i, j] += times * noise
        verdict = verify(problem, a, b, None, wrong, seed=1)
        assert not verdict.passed and f"C[{i}, {j}]" in verdict.where
