"""alpha and beta of every kind: taken as they are, or refused by what they are."""

from fractions import Fraction

import numpy as np
import pytest

from hybrid_gemm import gemm
from hybrid_gemm.errors import DTypeError, UsageError
from hybrid_gemm.problem import make_problem
from hybrid_gemm.verify import verify

pytestmark = pytest.mark.blas


@pytest.mark.filterwarnings("error")
def test_factors_fit_the_dtype_of_the_arithmetic():
    a, c = np.ones((2, 2)), np.ones((2, 2), "c8")
    assert gemm(a, a, alpha=1e300, device="cpu").tolist() == [[2e300] * 2] * 2
    assert np.isposinf(gemm(a, a, alpha=np.inf, device="cpu")).all()  # as in BLAS
    with pytest.raises(UsageError, match=r"alpha=1e\+39j does not fit complex64"):
        gemm(c, c, alpha=1e39j, device="cpu")
    with pytest.raises(UsageError, match=r"beta=1e\+39 does not fit float32"):
        gemm(a.astype("f4"), a.astype("f4"), a.astype("f4"), beta=1e39, device="cpu")


def test_integer_scalars_must_be_whole_and_fit():
    a = np.ones((2, 2), "i4")
    with pytest.raises(TypeError, match="must be whole"):
        gemm(a, a, alpha=0.5, device="cpu")
    with pytest.raises(ValueError, match="does not fit int32"):
        gemm(a, a, alpha=2**40, device="cpu")


@pytest.mark.parametrize("bits", [32, 64])
def test_integers_without_sign_take_factors_of_their_own_dtype(device, bits):
    a, most = np.array([[3, 2], [5, 7]], f"u{bits // 8}"), 2**bits - 1
    c, one = a + a.dtype.type(most - 8), np.eye(2, dtype=a.dtype)
    for choices in {}, {"threads": 2, "split": "cols"}:
        got = gemm(a, one, c, alpha=a.dtype.type(most - 1), beta=most, device=device, **choices)
        assert got.dtype == a.dtype and (got == a * a.dtype.type(most - 1) - c).all()
    problem = make_problem(a, one, c, alpha=most - 1, beta=most)
    assert verify(problem, a, one, c, got).passed
    for wrong in 2**bits, -(2 ** (bits - 1)) - 1:
        with pytest.raises(UsageError, match=f"alpha={wrong} does not fit int{bits}"):
            gemm(a, one, alpha=wrong, device=device)


WHOLE = np.ones((2, 2), "i4")


@pytest.mark.parametrize(
    "alpha", [Fraction(1, 10**400), np.longdouble(2) + np.finfo("g").eps * 2, np.nan, -np.inf]
)
def test_what_rounds_to_a_whole_number_is_none(alpha):
    with pytest.raises(DTypeError, match=r"alpha.*with integer matrices; it must be whole"):
        gemm(WHOLE, WHOLE, alpha=alpha, device="cpu")
    assert gemm(WHOLE, WHOLE, alpha=Fraction(6, 2), device="cpu").tolist() == [[6, 6], [6, 6]]


@pytest.mark.parametrize("dtype", ["i4", "f4", "c16"])
@pytest.mark.parametrize("alpha", [10**5000, Fraction(-(10**400))], ids=["digits", "fraction"])
def test_huge_factors_are_refused_in_few_words(alpha, dtype):
    a = WHOLE.astype(dtype)
    with pytest.raises(UsageError, match=r"^alpha does not fit \w+") as found:
        gemm(a, a, alpha=alpha, device="cpu")
    assert len(str(found.value)) < 100


@pytest.mark.skipif(np.finfo("g").max == np.finfo("d").max, reason="longdouble is float64 here")
def test_a_longdouble_beyond_float64_is_not_infinite():
    huge = np.longdouble("1e4000")
    for dtype, alpha in (("f8", huge), ("c16", np.clongdouble(-huge))):
        a = WHOLE.astype(dtype)
        with pytest.raises(UsageError, match=r"alpha=.*does not fit"):
            gemm(a, a, alpha=alpha, device="cpu")
    assert np.isposinf(gemm(a, a, alpha=np.longdouble("inf"), device="cpu").real).all()


@pytest.mark.parametrize("masked", [np.ma.masked, np.ma.array(3.0, mask=True)], ids=["it", "one"])
def test_a_masked_factor_is_refused(masked):
    a = np.ones((2, 2))
    for name in ("alpha", "beta"):
        with pytest.raises(DTypeError, match=f"{name} is masked; it must be a number"):
            gemm(a, a, a, **{name: masked}, device="cpu")
    assert gemm(a, a, alpha=np.ma.array(3.0), device="cpu").tolist() == [[6, 6], [6, 6]]


@pytest.mark.filterwarnings("ignore:C is not read")
@pytest.mark.parametrize("options", [{}, {"threads": 2, "split": "rows"},
                                     {"threads": 2, "split": "cols"}])  # fmt: skip
@pytest.mark.parametrize("dtype", ["f2", "f4", "c8"])
def test_a_factor_that_is_0_in_the_arithmetic_reads_nothing(device, dtype, options):
    """1e-50 is 0 in float32, which C is multiplied in."""
    ones, nan = np.ones((4, 4), dtype), np.full((4, 4), np.nan, dtype)
    with np.errstate(all="raise"):
        for beta in (1e-50, Fraction(1, 10**400), *([1e-50j] if dtype == "c8" else [])):
            got = gemm(ones, ones, nan, beta=beta, device=device, **options)
            np.testing.assert_array_equal(got, 4)
        got = gemm(nan, nan, ones, alpha=-1e-50, beta=2, device=device, **options)
    np.testing.assert_array_equal(got, 2)


@pytest.mark.parametrize("dtype", ["f4", "c8"])
@pytest.mark.parametrize("factor", [1e-50, 3e-46, 1.5e-45, -1e-42, 3e-39, 0.1])
def test_products_by_tiny_factors_are_right(device, rng, dtype, factor):
    """Below 1.2e-38, float32 holds fewer bits of a factor the smaller it is."""
    a, b, c = (rng.standard_normal((20, 20)).astype(dtype) for _ in range(3))
    large = np.float32(1e18)
    for alpha, beta, x in ((factor, 0, large), (1, factor, np.float32(1e-10))):
        problem = make_problem(a, b, c, alpha=alpha, beta=beta)
        operands = x * a, x * b, large * c
        made = gemm(*operands, out=np.empty_like(c), alpha=alpha, beta=beta, device=device)
        verdict = verify(problem, *operands, made, mode="full")
        assert verdict.passed, verdict
        made[3, 4] *= 1.01
        assert not made[3, 4] or not verify(problem, *operands, made, mode="full").passed
