"""A complex part as a real one, whose reference is another than the product's own arithmetic.

The product expands B (`arrays/complex_numbers.py`); here each element of A becomes two rows, for
the real and the imaginary part of C, and each of B one column:

    re C = sum of (re A)(re B) - (im A)(im B),   im C = sum of (im A)(re B) + (re A)(im B).

With a complex alpha there are four terms in place of two, so that each term has one rounding of its
own size. Nothing is made but the pieces that are looked at.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..arrays.caller_arrays import module_of
from ..problem import REAL_OF, finfo, split_alpha
from .sampling import Part

# Rows of pairs: what a real number takes of its element's real and imaginary part.
Factors = Sequence[Sequence[tuple[float, float]]]


class Interleaved:
    """A complex matrix as a real one: each element is a block of real numbers of `dtype`, each of
    which is the real and the imaginary part times two factors, or the magnitudes of these. Made
    where it is indexed."""

    def __init__(
        self, matrix: Any, factors: Factors, dtype: Any, *, absolute: bool = False
    ) -> None:  # fmt: skip
        self.matrix, self.factors, self.dtype = matrix, factors, np.dtype(dtype)
        self.sides, self.absolute = (len(factors), len(factors[0])), absolute
        self.xp = module_of(matrix)

    @property
    def shape(self) -> tuple[int, int]:
        rows, cols = self.matrix.shape
        return rows * self.sides[0], cols * self.sides[1]

    @property
    def T(self) -> Interleaved:
        """Its transpose."""

        factors = list(zip(*self.factors, strict=True))
        return Interleaved(self.matrix.T, factors, self.dtype, absolute=self.absolute)

    def __getitem__(self, key: Any) -> Any:
        keys = key if isinstance(key, tuple) else (key, slice(None))
        (rows, picked_rows), (cols, picked_cols) = (
            _covered(index, size, side)
            for index, size, side in zip(keys, self.shape, self.sides, strict=True)
        )
        element = self.matrix[rows][:, cols]
        down, across = self.sides
        made = self.xp.empty((element.shape[0], down, element.shape[1], across), self.dtype)
        for i, row in enumerate(self.factors):
            for j, factors in enumerate(row):
                made[:, i, :, j] = self._number(element, *factors)
        flat = made.reshape(element.shape[0] * down, element.shape[1] * across)
        return flat[picked_rows][..., picked_cols]

    def _number(self, x: Any, of_real: float, of_imaginary: float) -> Any:
        exact = of_real * of_imaginary == 0 and of_real + of_imaginary == 1
        terms = [
            part if exact else factor * part.astype("f8")
            for part, factor in ((x.real, of_real), (x.imag, of_imaginary))
            if factor  # Inf times 0 would be NaN
        ]
        terms = [abs(x) for x in terms] if self.absolute else terms
        return sum(terms[1:], start=terms[0]) if terms else 0


def _covered(index: Any, size: int, side: int) -> tuple[Any, Any]:
    """The elements whose blocks have the rows (or columns) `index`, and which of these they are."""
    if isinstance(index, slice):
        start, stop, _step = index.indices(size)
        first = start // side
        stop = max(start, stop)
        return slice(first, -(-stop // side)), slice(start - first * side, stop - first * side)
    if isinstance(index, int | np.integer):
        return slice(int(index) // side, int(index) // side + 1), int(index) % side
    index = np.asarray(index)
    return index // side, np.arange(len(index)) * side + index % side


def real_part(part: Part, by_three: bool = False) -> Part:
    """The real part that a complex one is checked as: of C the rows of real and imaginary parts
    alternate. `by_three` is for products of three real ones (`arrays/three_products.py`), whose
    rounding errors go by the size of these three."""
    p = part.problem
    dtype = REAL_OF[p.dtype]
    alpha, factor = split_alpha(p.alpha, p.dtype)
    terms = 2 if alpha is None else 4
    a = Interleaved(part.a, _of_a(p.conj_a, alpha), "float64" if alpha else dtype)
    b = Interleaved(part.b, _of_b(p.conj_b, terms), dtype)
    if by_three:
        terms = 3
        a = Interleaved(part.a, _three_of_a(p.conj_a), "float64")
        b = Interleaved(part.b, _three_of_b(p.conj_b, alpha), "float64")
    c_in, size = part.c_in, None
    if p.beta:
        beta = p.beta if isinstance(p.beta, complex) else None
        parts = _parts(1.0 if beta is None else beta)
        c_in = Interleaved(part.c_in, parts, "float64" if beta else dtype)
        size = Interleaved(part.c_in, parts, "float64", absolute=True) if beta else None
    problem = dataclasses.replace(
        p, m=2 * p.m, k=terms * p.k, dtype=dtype, operands=dtype, out_dtype=dtype,
        alpha=factor, beta=p.as_real().beta, conj_a=False, conj_b=False,
    )  # fmt: skip
    rounds = float(finfo(dtype).eps) * ((2 if alpha else 0) + by_three)  # and sums of two parts
    result = Interleaved(part.result, _parts(1.0), _real(part.result.dtype))
    return Part(
        problem, a, b, c_in, result, 2 * part.top, part.left,
        tuple(2 * edge for edge in part.row_edges), part.col_edges,
        (2 * part.origin[0], part.origin[1]),
        interleaved=True, alpha_rounds=rounds, c_size=size,
        mixes=by_three or alpha is not None,
    )  # fmt: skip


def _real(dtype: np.dtype) -> str:
    return REAL_OF[np.dtype(dtype).newbyteorder("=").name]


def _parts(factor: complex, conj: bool = False) -> Factors:
    """The real and the imaginary part of elements, or of their conjugates, times `factor`."""
    x, y, sign = factor.real, factor.imag, -1.0 if conj else 1.0
    return [[(x, -sign * y)], [(y, sign * x)]]


def _of_a(conj: bool, alpha: complex | None) -> Factors:
    """Of each term, that its columns of B are multiplied with: re, im, and so again where alpha is
    complex, times its real part first and then times its imaginary one."""
    sign = -1.0 if conj else 1.0
    real, imaginary = [(1.0, 0.0), (0.0, -sign)], [(0.0, sign), (1.0, 0.0)]
    if alpha is None:
        return [real, imaginary]

    def times(factor: float, row: list) -> list:
        return [(factor * x, factor * y) for x, y in row]

    p, q = alpha.real, alpha.imag
    return [times(p, real) + times(-q, imaginary), times(p, imaginary) + times(q, real)]


def _of_b(conj: bool, terms: int) -> Factors:
    return [*_parts(1.0, conj)] * (terms // 2)


def _three_of_a(conj: bool) -> Factors:
    """re C = P1 - P2 and im C = P3 - P1 - P2, P3 being the product of sums."""
    sign = -1.0 if conj else 1.0
    return [[(1.0, 0.0), (0.0, -sign), (0.0, 0.0)], [(-1.0, 0.0), (0.0, -sign), (1.0, sign)]]


def _three_of_b(conj: bool, alpha: complex | None) -> Factors:
    (real,), (imaginary,) = _parts(1.0 if alpha is None else alpha, conj)
    return [[real], [imaginary], [(real[0] + imaginary[0], real[1] + imaginary[1])]]
