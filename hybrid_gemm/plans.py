"""The plan that `gemm` would follow. Apart from `api.py`, so that what its type hints name is there
and no import of `gemm` waits for it."""

from __future__ import annotations

from typing import NamedTuple, Unpack

import numpy as np

from .errors import DTypeError, UsageError, shown
from .option_checks import check_whole
from .options import Options, OptionsAlone, with_options
from .planning.plan import Plan
from .problem import INT_LIMIT, Scalar, check_dtype, make_problem

__all__ = ["plan"]


class _Like(NamedTuple):
    """A matrix that there need not be."""

    shape: tuple[int, int]
    dtype: np.dtype


@with_options(alone=True)
def plan(
    m: int, n: int, k: int, *, dtype: str = "float32", alpha: Scalar = 1.0, beta: Scalar = 0.0,
    **options: Unpack[OptionsAlone],
) -> Plan:  # fmt: skip
    """The plan that `gemm` would follow for A of m x k, B of k x n and C of m x n, all of `dtype`
    (a name such as "float16") and in host memory; of a complex dtype, that of the real product of
    m x 2k and 2k x 2n as which it is multiplied. alpha and beta are as in `gemm`: C is read where
    beta is not 0. Nothing is multiplied, and no matrix made.

    `print(plan(...).summary())` shows it in a few lines. Raises `UsageError` (a `ValueError`) for a
    side below 0 or above 2^31 - 1, and a kernel that cannot run it, `DTypeError` (a `TypeError`)
    for a dtype that is not multiplied.

    >>> plan(100, 100, 100, device="cpu", threads=4, split="cols").grid
    (1, 1, 4)
    """
    from .runner import Runner  # as in `api.py`

    for name, side in (("m", m), ("n", n), ("k", k)):
        if not 0 <= check_whole(name, side) <= INT_LIMIT:
            raise UsageError(f"{name} is {shown(side)}; it takes 0 to {INT_LIMIT}")
    if dtype is None:  # which NumPy reads as float64
        raise DTypeError("dtype is None; it takes a name such as 'float32'")
    kind = check_dtype(dtype, "the product")
    a, b, c = (_Like(s, kind) for s in ((m, k), (k, n), (m, n)))
    problem = make_problem(a, b, c, alpha=alpha, beta=beta)
    runner = Runner.of(Options.of(options, "plan").alone())
    made = runner.plan(problem)
    runner.variant(made)  # which refuses what `gemm` does
    return made
