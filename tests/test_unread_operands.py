"""Where k or alpha is 0, A and B are not read, and C is beta C."""

import numpy as np
import pytest

from hybrid_gemm import Runner, gemm
from hybrid_gemm.problem import Problem
from hybrid_gemm.reporting import report


@pytest.mark.parametrize("options", [
    {"threads": 1}, {"threads": 3, "split": "rows"}, {"threads": 3, "split": "cols"},
    {"threads": 3, "split": "cols", "reduce": "critical"},
], ids=str)  # fmt: skip
@pytest.mark.parametrize("dtype", ["float32", "float16", "complex64"])
def test_zeros_of_c_keep_their_sign_where_a_and_b_are_not_read(device, dtype, options):
    """BLAS leaves C as it is for beta = 1."""
    runner = Runner(device=device, **options)
    c = np.array([[-0.0, 0.0, 1.5, np.inf], [0.0, -0.0, -0.0, np.nan]], dtype)
    part = c.real.dtype
    if dtype == "complex64":
        c.imag[:] = c.real[:, ::-1]
    for alpha, k in ((0, 3), (1, 0), (-0.0, 2), (0.5, 0)):
        a, b = np.ones((2, k), dtype), np.ones((k, 4), dtype)
        kept = runner.gemm(a, b, c, alpha=alpha, beta=1)
        # Bits of NaN apart, of which GPUs know one.
        (got, at), (before, there) = ((x.view(part), np.isnan(x.view(part))) for x in (kept, c))
        np.testing.assert_array_equal(at, there)
        np.testing.assert_array_equal(np.signbit(got[~at]), np.signbit(before[~at]))
        np.testing.assert_array_equal(got[~at], before[~at])
        for beta in 0, -0.0:
            assert not runner.gemm(a, b, out=c.copy(), alpha=alpha, beta=beta).view("i2").any()


def test_the_sign_that_alpha_gets_is_not_shown():
    problem = Problem(2, 4, 3, "float32", 0, 1).as_blas()
    assert report.factors(problem) == "alpha=0 beta=1"
    assert str(report.problem_data(problem)["alpha"]) == "0"
    whole = np.array([[5]])
    assert gemm(whole, whole, whole, alpha=0, beta=1, device="cpu") == 5
