"""Checked products of float64 whose squares are beyond its range: right ones are confirmed, wrong
ones are found."""

import pytest
from support.checked_products import SPOT, flip, matrices, plant, put, run

from hybrid_gemm.errors import VerificationError


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
