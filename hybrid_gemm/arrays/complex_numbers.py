"""Complex products as real ones, which everything below multiplies, splits and sums.

A complex matrix with contiguous rows is, without a copy, a real one of twice the columns: re, im,
re, im, ... With A B = Re(A) B + Im(A) (iB), let each row of B be followed by i times it. This
*expanded* B is a real matrix of 2k x 2n, and A (m x 2k) times it is C (m x 2n): 8mnk operations,
each product of two parts once, as C99 multiplies finite complex numbers. Conjugates are other signs
in the expansion, and a complex alpha is multiplied into it, but for a power of two, which is left
for the sums: so B keeps its range.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..problem import Problem, Scalar, check_complex_sides, split_alpha
from .caller_arrays import by_rows, is_device_array, silent
from .on_gpus import copy_into, empty_beside, on_gpu_of
from .strides import Array


@dataclass(frozen=True)
class RealProduct:
    """out = alpha * a @ b + beta * c, all real; `made` is `out` as the complex C, m x n."""

    a: Array
    b: Array
    c: Array | None
    out: Array
    alpha: float
    beta: float
    made: Array

    @classmethod
    def of(
        cls, problem: Problem, a: Array, b: Array, c: Array | None, out: Array | None, *,
        by_rows: bool = False,
    ) -> RealProduct:  # fmt: skip
        """For op(A) and op(B), which `problem` says are to be conjugated or not, C, and the place
        of the result or None.

        Made here: B expanded, of twice its size, and copies of A and C where they are not of the
        product's dtype with contiguous rows. Without a place that is, `made` is a new one. Where
        `out` has contiguous columns instead (Fortran order), the transposed product is made, and A
        and B change their parts, unless `by_rows`. A and B are not read where alpha or k is 0, nor
        C where beta is. Raises `UsageError` where the real product is too large.
        """
        check_complex_sides(a.shape[0], b.shape[1], a.shape[1])  # over ranks, of this one's part
        given = [x for x in (a, b, c, out) if x is not None]
        with on_gpu_of(*given):
            made: Array = out
            dtype = np.dtype(problem.dtype)
            if out is None or not (_lies(out, dtype) or (_lies(out.T, dtype) and not by_rows)):
                shape = (problem.m, problem.n) if out is None else out.shape
                made = empty_beside(given, shape, dtype)
            return cls._with_place(problem, a, b, c, made, ours=made is not out)

    @classmethod
    def _with_place(
        cls, problem: Problem, a: Array, b: Array, c: Array | None, made: Array, *, ours: bool
    ) -> RealProduct:
        """The real product of a complex one that is made in `made`; `ours` if it is new."""
        dtype = made.dtype
        if not problem.k or not problem.alpha:
            a, b = a[:, :0], b[:0]
        left, right, flags = a, b, (problem.conj_a, problem.conj_b)
        turned = not _lies(made, dtype)
        if turned:  # C^T = op(B)^T op(A)^T
            left, right, flags = b.T, a.T, flags[::-1]
        place = _real(made.T if turned else made)
        real, (near_one, _power) = problem.as_real(), split_alpha(problem.alpha, problem.dtype)
        added = None
        if problem.beta and c is not None:
            c = _addend(c, problem.beta, made, ours=ours)
            added = place if c is made else _real(_with_rows(c.T if turned else c, dtype))
        return cls(
            _real(_with_rows(left, dtype)),
            expanded(right, dtype, conj_left=flags[0], conj=flags[1], alpha=near_one),
            added, place, real.alpha, real.beta, made,
        )  # fmt: skip


def _lies(x: Array, dtype: np.dtype) -> bool:
    """Whether a matrix, or a stack, of this dtype has contiguous rows, so that its parts are a real
    one."""
    return x.dtype == dtype and (x.shape[-1] <= 1 or not x.size or x.strides[-1] == dtype.itemsize)


def _with_rows(x: Array, dtype: np.dtype) -> Array:
    if _lies(x, dtype):
        return x
    with on_gpu_of(x):
        return x.astype(dtype, order="C")


def _real(x: Array) -> Array:
    """The parts of a complex matrix with contiguous rows: a view."""
    return x.view(f"f{x.itemsize // 2}")


def _addend(c: Array, beta: Scalar, made: Array, *, ours: bool) -> Array:
    """C, times a complex beta: in the result's place where nothing else can be there yet."""
    if isinstance(beta, complex):
        with silent(), on_gpu_of(c):
            c = c.astype(made.dtype) * made.dtype.type(beta)
    if not ours or is_device_array(c) != is_device_array(made):
        return c
    copy_into(made, c)
    return made


def expanded(
    right: Array, dtype: np.dtype, *, conj_left: bool, conj: bool, alpha: complex | None = None
) -> Array:  # fmt: skip
    """Each row of a k x n matrix, or of a stack of them, followed by i times it, as 2k x 2n real
    numbers of `dtype`'s parts. With `conj` the matrix is conjugated first; with `conj_left` the
    other operand is to be, so that its rows are followed by -i times them. `alpha` is a factor
    of all."""
    k, n = right.shape
    made = empty_beside([right], (k, 2, n), dtype)
    if is_device_array(right):
        with on_gpu_of(right):
            _expand_on_gpu(right.astype(dtype, copy=False), made, conj_left, conj, alpha)
    else:

        def work(rows: slice) -> None:
            _expand(right[rows], made[rows, 0], made[rows, 1], conj_left, conj, alpha)

        by_rows(right, work)
    return _real(made.reshape(2 * k, n))


def _expand(
    right: np.ndarray, first: np.ndarray, second: np.ndarray, conj_left: bool, conj: bool,
    alpha: complex | None,
) -> None:  # fmt: skip
    with silent():
        first[...] = right
        if conj:
            np.conjugate(first, out=first)
        if alpha is not None:
            first *= first.dtype.type(alpha)
        # By products: np.negative of NumPy 2.4 writes other numbers into parts of complex arrays.
        np.multiply(first.imag, 1 if conj_left else -1, out=second.real)
        np.multiply(first.real, -1 if conj_left else 1, out=second.imag)


@functools.cache
def _gpu_kernel() -> Any:
    import cupy

    return cupy.ElementwiseKernel(
        "T x, T alpha, bool scaled, bool flip_left, bool flip", "T first, T second",
        """
        T y(x.real(), flip ? -x.imag() : x.imag());
        if (scaled) y = T(alpha.real() * y.real() - alpha.imag() * y.imag(),
                          alpha.real() * y.imag() + alpha.imag() * y.real());
        first = y;
        second = flip_left ? T(y.imag(), -y.real()) : T(-y.imag(), y.real());
        """,
        "hybrid_gemm_expand",
    )  # fmt: skip


def _expand_on_gpu(
    right: Array, made: Array, conj_left: bool, conj: bool, alpha: complex | None
) -> None:
    """On the caller's current stream of the GPU that has the matrix."""
    if right.size:
        factor = made.dtype.type(alpha or 0)
        first, second = made[..., 0, :], made[..., 1, :]
        _gpu_kernel()(right, factor, alpha is not None, conj_left, conj, first, second)
