"""A complex part as a real one, whose reference is another than the product's own arithmetic.

The product expands B (`arrays/complex_numbers.py`); here each element of A becomes two rows, for
the real and the imaginary part of C, and each of B one column:

    re C = sum of (re A)(re B) - (im A)(im B),   im C = sum of (im A)(re B) + (re A)(im B).

With a complex alpha there are four terms in place of two, so that each term has one rounding of its
own size. Nothing is made but the pieces that are looked at.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..arrays.caller_arrays import module_of
from ..problem import REAL_OF, finfo, split_alpha
from .sampling import Part

# For an array of elements: rows of arrays of real numbers, which take each element's place.
Blocks = Callable[[Any], Sequence[Sequence[Any]]]


class Interleaved:
    """A complex matrix as a real one: each element is a block of `down` x `across` real numbers of
    `dtype`. Made where it is indexed."""

    def __init__(self, matrix: Any, blocks: Blocks, dtype: Any, down: int, across: int) -> None:
        self.matrix, self.blocks, self.dtype = matrix, blocks, np.dtype(dtype)
        self.sides = down, across
        self.xp = module_of(matrix)

    @property
    def shape(self) -> tuple[int, int]:
        rows, cols = self.matrix.shape
        return rows * self.sides[0], cols * self.sides[1]

    @property
    def T(self) -> Interleaved:
        """Its transpose."""

        def turned(x: Any) -> Sequence[Sequence[Any]]:
            return [[each.T for each in row] for row in zip(*self.blocks(x.T), strict=True)]

        return Interleaved(self.matrix.T, turned, self.dtype, *self.sides[::-1])

    def __getitem__(self, key: Any) -> Any:
        keys = key if isinstance(key, tuple) else (key, slice(None))
        (rows, picked_rows), (cols, picked_cols) = (
            _covered(index, size, side)
            for index, size, side in zip(keys, self.shape, self.sides, strict=True)
        )
        element = self.matrix[rows][:, cols]
        blocks, (down, across) = self.blocks(element), self.sides
        made = self.xp.empty((element.shape[0], down, element.shape[1], across), self.dtype)
        for i, row in enumerate(blocks):
            for j, each in enumerate(row):
                made[:, i, :, j] = each
        flat = made.reshape(element.shape[0] * down, element.shape[1] * across)
        return flat[picked_rows][..., picked_cols]


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
    a = Interleaved(part.a, _of_a(p.conj_a, alpha), "float64" if alpha else dtype, 2, terms)
    b = Interleaved(part.b, _of_b(p.conj_b, terms), dtype, terms, 1)
    if by_three:
        terms = 3
        a = Interleaved(part.a, _three_of_a(p.conj_a), "float64", 2, terms)
        b = Interleaved(part.b, _three_of_b(p.conj_b, alpha), "float64", terms, 1)
    c_in, size = part.c_in, None
    if p.beta:
        beta = p.beta if isinstance(p.beta, complex) else None
        c_in = Interleaved(part.c_in, _scaled(beta), "float64" if beta else dtype, 2, 1)
        size = Interleaved(part.c_in, _sizes(beta), "float64", 2, 1) if beta else None
    problem = dataclasses.replace(
        p, m=2 * p.m, k=terms * p.k, dtype=dtype, operands=dtype, out_dtype=dtype,
        alpha=factor, beta=p.as_real().beta, conj_a=False, conj_b=False,
    )  # fmt: skip
    rounds = float(finfo(dtype).eps) * ((2 if alpha else 0) + by_three)  # and sums of two parts
    result = Interleaved(part.result, _scaled(None), _real(part.result.dtype), 2, 1)
    return Part(
        problem, a, b, c_in, result, 2 * part.top, part.left,
        tuple(2 * edge for edge in part.row_edges), part.col_edges,
        (2 * part.origin[0], part.origin[1]),
        interleaved=True, alpha_rounds=rounds, c_size=size,
        mixes=by_three or alpha is not None,
    )  # fmt: skip


def _real(dtype: np.dtype) -> str:
    return REAL_OF[np.dtype(dtype).newbyteorder("=").name]


def _of_a(conj: bool, alpha: complex | None) -> Blocks:
    def blocks(x: Any) -> list[list[Any]]:
        re, im = x.real, -x.imag if conj else x.imag  # of integers without sign it is 0
        if alpha is None:
            return [[re, -im], [im, re]]
        re, im = re.astype("f8"), im.astype("f8")
        (p, q), (r, s) = (alpha.real * re, alpha.real * im), (alpha.imag * re, alpha.imag * im)
        return [[p, -1 * q, -1 * s, -1 * r], [q, p, r, -1 * s]]

    return blocks


def _of_b(conj: bool, terms: int) -> Blocks:
    def blocks(x: Any) -> list[list[Any]]:
        return [[x.real], [-x.imag if conj else x.imag]] * (terms // 2)

    return blocks


def _three_of_a(conj: bool) -> Blocks:
    """re C = P1 - P2 and im C = P3 - P1 - P2, P3 being the product of sums."""

    def blocks(x: Any) -> list[list[Any]]:
        re, im = x.real.astype("f8"), (-1 if conj else 1) * x.imag.astype("f8")
        return [[re, -im, 0 * re], [-re, -im, re + im]]

    return blocks


def _three_of_b(conj: bool, alpha: complex | None) -> Blocks:
    def blocks(x: Any) -> list[list[Any]]:
        y = x.astype("c16")
        y = y.conj() if conj else y
        y = y if alpha is None else alpha * y
        return [[y.real], [y.imag], [y.real + y.imag]]

    return blocks


def _scaled(beta: complex | None) -> Blocks:
    """The parts of C, or of C times a complex beta."""

    def blocks(x: Any) -> list[list[Any]]:
        y = x if beta is None else x.astype("c16") * beta
        return [[y.real], [y.imag]]

    return blocks


def _sizes(beta: complex) -> Blocks:
    """What the terms of C times beta add up to without their signs: their rounding goes by it."""

    def blocks(x: Any) -> list[list[Any]]:
        re, im = abs(x.real.astype("f8")), abs(x.imag.astype("f8"))
        p, q = abs(beta.real), abs(beta.imag)
        return [[p * re + q * im], [p * im + q * re]]

    return blocks
