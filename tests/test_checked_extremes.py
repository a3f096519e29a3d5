"""Checked products at the ends of a dtype's range: right ones are confirmed, wrong ones found."""

import numpy as np
import pytest
from support.checked_products import SPOT, flip, matrices, plant, put, run

import hybrid_gemm as hg
from hybrid_gemm.errors import VerificationError

pytestmark = pytest.mark.blas


@pytest.mark.parametrize("scale", [1e-170, 1e-150, 1e150, 1e170])
def test_float64_whose_squares_have_no_float64_is_confirmed(device, rng, scale):
    a, b, _ = matrices(rng, "float64")
    done = run(device, (a * scale, b, None))
    assert done.checks.repeated == 0 and done.checks.products == 1


def test_float64_with_some_squares_that_vanish_is_confirmed(device, rng):
    """Of the larger products, which cancel, and whose elements in A are the smaller."""
    a, b, _ = matrices(rng, "float64")
    a[:, 1:] *= 1e-170
    b[1:], b[0] = 1e150 * b[1:], 1e-135 * b[0]
    a[:, 36:69], b[36:69] = -a[:, 2:35], b[2:35]
    a[:, [1, 35, 69]] = 0
    assert run(device, (a, b, None)).checks.repeated == 0


def test_a_c_whose_squares_vanish_times_a_large_beta(device, rng, monkeypatch):
    a, b, c = matrices(rng, "float64")
    arrays, beta = (a, b * 1e-137, c * 1e-318), 1e190
    right = run(device, arrays, beta=beta)
    assert (right.checks.repeated, right.checks.confirmed) == (0, 0)
    plant(monkeypatch, {("product", 0): flip(2, *SPOT)})
    done = run(device, arrays, beta=beta)
    assert done.c.tobytes() == right.c.tobytes() and done.checks.repeated == 1


def test_zeros_beside_a_c_whose_squares_vanish_are_right(device, rng):
    a, b, c = matrices(rng, "float64")
    assert run(device, (0 * a, b, 1e-180 * c), beta=-3.7).checks.repeated == 0


@pytest.mark.parametrize("beta", [0, 3])
def test_wrong_again_beside_rows_of_zeros_is_an_error(device, rng, monkeypatch, beta):
    """Float64 whose squares vanish is confirmed, but zeros are no such numbers."""
    arrays = matrices(rng, "float64")
    arrays[0][SPOT[0]] = 0
    assert run(device, arrays, beta=beta).checks.confirmed == 0
    plant(monkeypatch, {("product", None): put(1e-3, *SPOT)})
    with pytest.raises(VerificationError, match="product on"):
        run(device, arrays, beta=beta)


@pytest.mark.parametrize("choices", [{}, {"threads": 2, "split": "cols"}], ids=str)
@pytest.mark.parametrize("scale, fault", [(2.0**-138, put(2.0**-50)), (1.0, put(np.inf))],
                         ids=["small", "large"])  # fmt: skip
def test_what_tf32_makes_of_the_ends_of_float32_is_confirmed(
    rng, monkeypatch, scale, fault, choices
):
    """Few bits of subnormal operands, and Inf of the largest, whose partner here is 0."""
    a, b, _c = matrices(rng)
    a, b = (a * np.float64(scale)).astype("f4"), b / np.float32(scale**0.5)
    if scale == 1:
        a[3, 4], b[4] = np.finfo("f4").max, 0
    options = {"compute": "tf32", **choices}
    plain = run("emulator", (a, b, None), checked=False, **options)
    right = run("emulator", (a, b, None), **options)
    assert right.c.tobytes() == plain.c.tobytes()
    assert right.checks.confirmed and not right.checks.repeated
    plant(monkeypatch, {("product", 0): fault, ("product", 1): fault, ("product", 2): fault})
    with pytest.raises(VerificationError, match="again when it was made again"):
        run("emulator", (a, b, None), **options)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("choices", [{}, {"threads": 2, "split": "cols"}], ids=str)
def test_sums_that_overflow_are_no_concern_of_the_callers_seterr(device, choices):
    """Shares of k whose checks come to Inf of both signs."""
    a, b = np.full((40, 5000), 1e308), np.full((5000, 6), 1e307)
    a[:, 2500:] *= -1
    with np.errstate(all="raise"):
        got = hg.gemm(a, b, checked=True, device=device, **choices)
    assert not np.isfinite(got).any()
