"""What verification takes of the host's memory beside A, B and C."""

import tracemalloc

import numpy as np
import pytest

from hybrid_gemm.problem import make_problem
from hybrid_gemm.verify import verify

MIB = 1 << 20


def peak(m, n, k, dtype, mode="auto"):
    """The most bytes that the check of a right product takes, and the problem."""
    a, b, c = (np.zeros(shape, dtype) for shape in ((m, k), (k, n), (m, n)))
    problem = make_problem(a, b, None)
    tracemalloc.start()
    try:
        verdict = verify(problem, a, b, None, c, mode=mode, seed=1)
        return tracemalloc.get_traced_memory()[1], problem, verdict
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("m", "n", "k", "dtype", "mode"),
    [
        (2100, 2100, 2100, "float32", "auto"),
        (2100, 2100, 2100, "float16", "auto"),
        (2100, 2100, 2100, "int32", "auto"),
        (512, 512, 40000, "float32", "auto"),
        (1100, 1100, 300, "float32", "full"),
        (1100, 1100, 300, "int64", "full"),
        (300_000, 1, 1, "float32", "auto"),
        (1, 300_000, 1, "int32", "auto"),
    ],
)
def test_a_check_takes_a_few_mib(m, n, k, dtype, mode):
    found, _problem, verdict = peak(m, n, k, dtype, mode)
    assert verdict.passed
    assert found < 24 * MIB
