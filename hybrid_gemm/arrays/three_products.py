"""Complex products by three real ones (3M): (a + ib)(c + id) with one product of sums.

With P1 = Re(A) Re(B), P2 = Im(A) Im(B) and P3 = (Re A + Im A)(Re B + Im B),

    Re(C) = P1 - P2,   Im(C) = P3 - P1 - P2.

A quarter of the operations is saved (Higham 1992, "Stability of a method for multiplying complex
matrices with three real matrix multiplications"). The price: errors of Im(C) go by
|Re A||Re B| + |Im A||Im B| + |Re A + Im A||Re B + Im B|, which may be much larger than Im(C)'s own
terms where one part of A or B is much larger than the other; and where parts are Inf, or overflow
when they are added, Im(C) is NaN.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..problem import REAL_OF, Problem, Scalar, split_alpha
from .caller_arrays import by_rows, is_device_array, module_of, silent
from .on_gpus import copy_into, empty_beside, lie_together, on_gpu_of
from .strides import Array

Three = tuple[Array, Array, Array]


@dataclass(frozen=True)
class ThreeProducts:
    """The real matrices whose products are P1, P2 and P3: parts and their sums, all new."""

    problem: Problem
    a: Three
    b: Three

    @classmethod
    def of(cls, problem: Problem, a: Array, b: Array) -> ThreeProducts:
        """For op(A) and op(B), which `problem` says are to be conjugated or not. A complex alpha is
        multiplied into B here, but for a power of two. A and B are not read where alpha or k is
        0."""
        if not problem.k or not problem.alpha:
            a, b = a[:, :0], b[:0]
        alpha, _of_sums = split_alpha(problem.alpha, problem.dtype)
        return cls(
            problem, _parts(a, problem.dtype, problem.conj_a, None),
            _parts(b, problem.dtype, problem.conj_b, alpha),
        )  # fmt: skip

    def multiply(
        self, gemm: Callable[[Array, Array], Array], c: Array | None, out: Array | None
    ) -> Array:
        """The complex C, in `out` if it is of the product's dtype and lies where products do;
        `gemm(a, b)` multiplies real matrices. C is not read where beta is 0."""
        products = [gemm(x, y) for x, y in zip(self.a, self.b, strict=True)]
        return self.combined(products, c, out)

    def combined(self, products: Sequence[Array], c: Array | None, out: Array | None) -> Array:
        """As `multiply`, of P1, P2 and P3."""
        p1, p2, p3 = products
        problem = self.problem
        with on_gpu_of(p1):
            made = out
            if out is None or not lie_together(out, p1) or out.dtype != problem.dtype:
                made = empty_beside([p1], p1.shape, problem.dtype)
            added = c if problem.beta else None
            if added is not None and not lie_together(added, p1):
                added = empty_beside([p1], p1.shape, added.dtype)
                copy_into(added, c)
            _in_b, alpha = split_alpha(problem.alpha, problem.dtype)
            _combine(p1, p2, p3, added, float(alpha), problem.beta, made)
        if out is None and is_device_array(c) and not is_device_array(made):
            made = module_of(c).asarray(made)
        return made


def computed(words: Sequence[str]) -> str:
    """What was computed, in words, of the words for each of the three products."""
    return f"{' and '.join(dict.fromkeys(words))}, three real products (3m)"


def progress_of_one(progress: Callable[[int], None] | None) -> Callable[[int], None] | None:
    """What one of the three products tells its operations: they have three quarters of those of
    the complex product, of which `progress` is told."""
    return progress and (lambda flops: progress(flops * 4 // 3))


def _parts(x: Array, dtype: str, conj: bool, alpha: complex | None) -> Three:
    """Real and imaginary part and their sum, in the order in which the matrix lies."""
    xp, real = module_of(x), REAL_OF[dtype]
    turned = x.ndim == 2 and abs(x.strides[0]) < abs(x.strides[1])
    shape = x.shape[::-1] if turned else x.shape
    with on_gpu_of(x):
        made = tuple(xp.empty(shape, real) for _ in range(3))
        source = x.T if turned else x
        if is_device_array(x):
            if x.size:
                kernel, _ = _gpu_kernels()
                factor = np.dtype(dtype).type(alpha or 0)
                kernel(source.astype(dtype, copy=False), factor, alpha is not None, conj, *made)
        else:
            by_rows(source, lambda rows: _split(source, dtype, conj, alpha, made, rows))
    re, im, both = (y.T if turned else y for y in made)
    return re, im, both


def _split(
    x: np.ndarray,
    dtype: str,
    conj: bool,
    alpha: complex | None,
    made: tuple[Array, ...],
    rows: slice,
) -> None:
    with silent():
        here = x[rows].astype(dtype)  # a copy
        if conj:
            np.conjugate(here, out=here)
        if alpha is not None:
            here *= here.dtype.type(alpha)
        re, im, both = (y[rows] for y in made)
        re[...], im[...] = here.real, here.imag
        np.add(re, im, out=both)


def _combine(
    p1: Array, p2: Array, p3: Array, c: Array | None, alpha: float, beta: Scalar, made: Array
) -> None:
    dtype, real = made.dtype, p1.dtype.type
    if is_device_array(made):
        if made.size:
            _, kernel = _gpu_kernels()
            added = made if c is None else c.astype(dtype, copy=False)
            kernel(p1, p2, p3, added, real(alpha), dtype.type(beta), c is not None, made)
        return

    def work(rows: slice) -> None:
        with silent():
            # Part by part: NumPy's complex product makes NaN of a part beside one that is Inf.
            re = real(alpha) * (p1[rows] - p2[rows])
            im = real(alpha) * (p3[rows] - p1[rows] - p2[rows])
            if c is not None:
                here, x, y = c[rows].astype(dtype), real(beta.real), real(beta.imag)
                re += x * here.real - y * here.imag if y else x * here.real
                im += x * here.imag + y * here.real if y else x * here.imag
            made.real[rows], made.imag[rows] = re, im

    by_rows(p1, work)


@functools.cache
def _gpu_kernels() -> tuple[Any, Any]:
    import cupy

    parts = cupy.ElementwiseKernel(
        "T x, T alpha, bool scaled, bool flip", "R re, R im, R both",
        """
        T y(x.real(), flip ? -x.imag() : x.imag());
        if (scaled) y = T(alpha.real() * y.real() - alpha.imag() * y.imag(),
                          alpha.real() * y.imag() + alpha.imag() * y.real());
        re = y.real();
        im = y.imag();
        both = y.real() + y.imag();
        """,
        "hybrid_gemm_three_parts",
    )  # fmt: skip
    combine = cupy.ElementwiseKernel(
        "R p1, R p2, R p3, T c, R alpha, T beta, bool added", "T out",
        """
        R re = alpha * (p1 - p2), im = alpha * (p3 - p1 - p2);
        if (added) {
            if (beta.imag() == 0) {
                re += beta.real() * c.real();
                im += beta.real() * c.imag();
            } else {
                re += beta.real() * c.real() - beta.imag() * c.imag();
                im += beta.real() * c.imag() + beta.imag() * c.real();
            }
        }
        out = T(re, im);
        """,
        "hybrid_gemm_three_combined",
    )  # fmt: skip
    return parts, combine
