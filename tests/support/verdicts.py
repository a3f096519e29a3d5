"""Products and the verdicts that they get, held against every element or a sample."""

import numpy as np

import hybrid_gemm.verify as module
from hybrid_gemm.problem import make_problem
from hybrid_gemm.verify import verify


def case(dtype="float32", m=60, n=50, k=300, beta=0.0, scale=1.0):
    rng = np.random.default_rng(5)
    make = (lambda s: rng.integers(-9, 9, s).astype(dtype)) if dtype[0] == "i" else (
        lambda s: (scale * rng.standard_normal(s)).astype(dtype)
    )  # fmt: skip
    a, b, c = make((m, k)), make((k, n)), make((m, n))
    problem = make_problem(a, b, c, alpha=2, beta=beta)
    return problem, a, b, c, product(problem, a, b, c)


def product(problem, a, b, c=None):
    wide = problem.dtype if problem.dtype in ("int32", "int64") else "float64"
    exact = problem.alpha * (a.astype(wide) @ b.astype(wide))
    if problem.beta:
        exact = exact + problem.beta * c.astype(wide)
    return exact.astype(problem.out_dtype)


def sampled(*arguments, seed=None, mode="auto"):
    """The verdict that a large product gets."""
    saved, module.FULL_FLOPS = module.FULL_FLOPS, 0
    try:
        return verify(*arguments, seed=seed, mode=mode)
    finally:
        module.FULL_FLOPS = saved


def both(*arguments):
    return sampled(*arguments, mode="full"), sampled(*arguments)
