"""alpha and beta of every kind: taken as they are, or refused by what they are."""

from fractions import Fraction

import numpy as np
import pytest

from hybrid_gemm import gemm
from hybrid_gemm.errors import DTypeError, UsageError


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
