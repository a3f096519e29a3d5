"""Is C right? A float64 reference with a bound that scales with k.

For floats every element must hold `|C - ref| <= (k + 3) eps (|alpha| |A||B| + |beta C|)`,
plus half a unit of C's own dtype (Higham, Accuracy and Stability, section 3.5: the bound
holds for any order of summation, with eps twice the unit roundoff), and for TF32 2^-10 |A||B|
more. Integers must be equal. NaN where the reference has none fails, and so does a missing NaN.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from .devices.cpu import integer_product
from .errors import UsageError
from .kernel_choice.compute_modes import rounding
from .problem import Problem, finfo

FULL_FLOPS = 2 * 2048**3  # `auto` computes the whole reference up to here: under a second
SAMPLED_ROWS = 32
MODES = ("auto", "full", "off")


@dataclasses.dataclass(frozen=True)
class Verdict:
    """`worst` is the largest error as a fraction of its bound (integers: 0 or inf)."""

    passed: bool
    how: str
    worst: float

    def __str__(self) -> str:
        word = "passed" if self.passed else "FAILED"
        return f"{word}: {self.how}, largest error {self.worst:.2g} of its bound"


def verify(
    problem: Problem, a, b, c_in, result, *, mode: str = "auto", seed: int = 0
) -> Verdict | None:
    """The verdict on `result` for op(A) `a` (m x k), op(B) `b` (k x n) and C `c_in`.

    Works where the arrays are (NumPy or CuPy, all of one kind). `full` computes the whole
    reference; `auto` does so for small problems and otherwise checks 32 rows in full and
    every row against a random vector of signs (Freivalds). `off` gives None.
    """
    if mode not in MODES:
        raise UsageError(f"no verification is called {mode!r}; there are {', '.join(MODES)}")
    if mode == "off":
        return None
    if not problem.m or not problem.n:
        return Verdict(result.shape == (problem.m, problem.n), "empty", 0.0)
    check = _Integers if problem.is_integer else _Floats
    check = check(problem, a, b, c_in, result)
    if mode == "full" or problem.flops <= FULL_FLOPS:
        step = max(1, 2**24 // problem.n)
        worst = max(check.rows(slice(i, i + step)) for i in range(0, problem.m, step))
        return Verdict(bool(worst <= 1), "every element against float64", worst)
    rng = np.random.default_rng(seed)
    count = min(SAMPLED_ROWS, problem.m)
    rows = np.sort(rng.choice(problem.m, count, replace=False))
    worst = max(check.rows(rows), check.against(rng.choice([-1.0, 1.0], problem.n)))
    return Verdict(bool(worst <= 1), f"{count} rows, and all rows times a random vector", worst)


def _module(array):
    if isinstance(array, np.ndarray):
        return np
    import cupy

    return cupy


class _Floats:
    def __init__(self, problem: Problem, a, b, c_in, result):
        self.p, self.a, self.b, self.c_in, self.result = problem, a, b, c_in, result
        self.xp = _module(result)
        self.eps = float(finfo(problem.dtype).eps)
        self.out_eps = float(finfo(result.dtype).eps)
        self.rounded = rounding(problem)
        self.reads_product = problem.alpha != 0 and problem.k > 0

    def rows(self, rows) -> float:
        """Worst error over bound in some rows."""
        xp, p = self.xp, self.p
        shape = self.result[rows].shape
        reference, size = xp.zeros(shape), xp.zeros(shape)
        if self.reads_product:
            a, b = self.a[rows].astype("f8"), self.b.astype("f8")
            reference = p.alpha * (a @ b)
            size = abs(p.alpha) * (abs(a) @ abs(b))
        return self._compare(rows, self.result[rows].astype("f8"), reference, size, None)

    def against(self, vector) -> float:
        """Worst error over bound of result @ vector, in float64."""
        xp, p = self.xp, self.p
        v = xp.asarray(vector)
        got = _times(xp, self.result, v)
        reference, size = xp.zeros(p.m), xp.zeros(p.m)
        if self.reads_product:
            reference = p.alpha * _times(xp, self.a, _times(xp, self.b, v))
            size = abs(p.alpha) * _times(xp, self.a, _times(xp, self.b, abs(v), True), True)
        return self._compare(slice(None), got, reference, size, v)

    def _compare(self, rows, got, reference, size, vector) -> float:
        xp, p = self.xp, self.p
        if p.beta:
            c = self.c_in[rows].astype("f8")
            reference = reference + p.beta * (c if vector is None else c @ vector)
            size = size + abs(p.beta) * (abs(c) if vector is None else abs(c) @ abs(vector))
        bound = ((p.k + 3) * self.eps + self.rounded) * size + self.out_eps * abs(reference)
        tiny = float(finfo(self.result.dtype).tiny) * (p.k + 3)
        if vector is not None:
            bound = bound + self.out_eps * size
            tiny *= p.n
        largest = float(finfo(self.result.dtype).max)
        finite = xp.isfinite(reference) & (size <= largest)
        with np.errstate(invalid="ignore"):
            ratio = abs(got - reference) / (bound + tiny)
        worst = xp.where(finite, xp.where(xp.isnan(ratio), xp.inf, ratio), 0)
        # Where the reference is not finite, C must not be either (Inf and NaN are both fair:
        # which of them appears depends on the order of the sum); past C's range anything is.
        lost = xp.isfinite(got) & ~xp.isfinite(reference)
        return float(xp.where(lost, xp.inf, worst).max())


class _Integers:
    """Exact, modulo 2^bits as the kernels and NumPy wrap."""

    def __init__(self, problem: Problem, a, b, c_in, result):
        self.p, self.a, self.b, self.c_in, self.result = problem, a, b, c_in, result
        self.xp = _module(result)

    def rows(self, rows) -> float:
        return self._same(rows, integer_product(self.a[rows], self.b), None)

    def against(self, vector) -> float:
        v = self.xp.asarray(vector.astype("i8"))
        return self._same(slice(None), self._times(self.a, self._times(self.b, v)), v)

    def _times(self, matrix, v):
        step = max(1, 2**24 // max(1, matrix.shape[1]))
        parts = [
            (matrix[i : i + step].astype("i8") * v).sum(axis=1)
            for i in range(0, matrix.shape[0], step)
        ]
        return self.xp.concatenate(parts) if parts else self.xp.zeros(0, "i8")

    def _same(self, rows, product, vector) -> float:
        expected = self.p.alpha * product.astype("i8")
        if self.p.beta:
            c = self.c_in[rows]
            expected = expected + self.p.beta * (
                c.astype("i8") if vector is None else self._times(c, vector)
            )
        if vector is None:
            got = self.result[rows]
            same = bool((expected.astype(got.dtype) == got).all())
        else:  # the vector's product is only known modulo C's own range
            bits = 8 * self.result.dtype.itemsize
            difference = expected - self._times(self.result, vector)
            same = bool((difference % 2**bits == 0).all()) if bits < 64 else not difference.any()
        return 0.0 if same else float("inf")


def _times(xp, matrix, v, magnitude: bool = False):
    """matrix @ v (or |matrix| @ v) in float64 without a float64 copy of the matrix."""
    step = max(1, 2**24 // max(1, matrix.shape[1]))
    parts = []
    for i in range(0, matrix.shape[0], step):
        part = matrix[i : i + step].astype("f8")
        parts.append((abs(part) if magnitude else part) @ v)
    return xp.concatenate(parts) if parts else xp.zeros(0)
