"""Products of vectors and of stacks of matrices as products of matrices, by NumPy's rules.

The last two dimensions of an array are a matrix's; those before them make a stack, and stacks of
A and B broadcast. A vector as A is a row, as B a column, and C is without that dimension.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import UsageError
from ..problem import Problem, make_problem
from .caller_arrays import check_out, module_of
from .on_gpus import empty_beside


@dataclass(frozen=True)
class Stacks:
    """A, B and C of stacks that are alike, as views; `out` is C without the sides of vectors."""

    a: Any
    b: Any
    c: Any
    out: Any

    @property
    def result(self) -> Any:
        """C as the caller wants it: a number of two vectors."""
        return self.out if self.out.ndim else self.out[()]

    @classmethod
    def of(cls, a: Any, b: Any, out: Any = None) -> Stacks:
        """Makes C where no `out` is given. Raises `UsageError` for shapes that do not fit and for
        an `out` that overlaps, `DTypeError` for dtypes."""
        stack, sides, problem = shape_of_product(a, b)
        x, y = as_matrices(a, b)
        if out is None:
            out = empty_beside([a, b], (*stack, *sides), problem.out_dtype)
        else:
            check_out(out, (*stack, *sides), problem.out_dtype, a, b)
        c = out[..., None] if b.ndim == 1 else out
        return cls(
            _repeated(x, stack), _repeated(y, stack), c[..., None, :] if a.ndim == 1 else c, out
        )

    def multiply(
        self, gemm: Callable[[Any, Any, Any], Any], together: Callable[[Any, Any, Any], bool]
    ) -> Any:
        """C, by `gemm(a, b, c)` for all pairs of matrices; by one call where a stack is multiplied
        by one matrix and lies in memory as one. `together` is given all three stacks first, and
        says whether it multiplied them."""
        joined = self.joined()
        if joined is not None:
            gemm(*joined)
        elif not together(self.a, self.b, self.c):
            places = np.ndindex(self.c.shape[:-2])
            # Of matrices without elements one pair is enough, for what may be refused.
            for place in places if self.c.size else itertools.islice(places, 1):
                gemm(self.a[place], self.b[place], self.c[place])
        return self.result

    def joined(self) -> tuple[Any, Any, Any] | None:
        """A, B and C as one product of matrices, where a stack is multiplied by one matrix and lies
        in memory as one."""
        stack = self.c.shape[:-2]
        one = not any(step for step, size in zip(self.b.strides, stack, strict=False) if size > 1)
        if not (stack and one and self.c.size and self.a.size):
            return None
        if any(len(merged(x.shape[:-1], x.strides[:-1])[0]) > 1 for x in (self.a, self.c)):
            return None
        rows = math.prod(stack) * self.c.shape[-2]
        a, c = self.a.reshape(rows, self.a.shape[-1]), self.c.reshape(rows, self.c.shape[-1])
        return a, self.b[(0,) * len(stack)], c


def _repeated(x: Any, stack: tuple[int, ...]) -> Any:
    """Matrices of a stack, repeated to these sides where they have others."""
    if x.shape[:-2] == stack:  # which takes a tenth of the time
        return x
    return module_of(x).broadcast_to(x, (*stack, *x.shape[-2:]))


def as_matrices(a: Any, b: Any) -> tuple[Any, Any]:
    """A vector as A is a row, and one as B a column; others as they are."""
    return (a[None, :] if a.ndim == 1 else a), (b[:, None] if b.ndim == 1 else b)


def shape_of_product(
    a: Any, b: Any, out: np.dtype | None = None
) -> tuple[tuple[int, ...], tuple[int, ...], Problem]:
    """The shape of the stack that A and B make, the sides that C has behind it, and the product of
    one pair, for an `out` of that dtype if one is given. Raises `UsageError` for shapes that do not
    fit, `DTypeError` for dtypes."""
    return _shape_of_product(tuple(a.shape), a.dtype, tuple(b.shape), b.dtype, out)


@functools.lru_cache(maxsize=1024)  # working it out takes longer than many a stack
def _shape_of_product(
    a: tuple[int, ...], dtype_a: np.dtype, b: tuple[int, ...], dtype_b: np.dtype,
    out: np.dtype | None,
) -> tuple[tuple[int, ...], tuple[int, ...], Problem]:  # fmt: skip
    for name, shape in (("A", a), ("B", b)):
        if not shape:
            raise UsageError(f"{name} is a number; matmul takes arrays, * multiplies by numbers")
    x, y = (1, *a) if len(a) == 1 else a, (*b, 1) if len(b) == 1 else b
    try:
        stack = np.broadcast_shapes(x[:-2], y[:-2])
    except ValueError:
        raise UsageError(
            f"A is a stack of {x[:-2]} matrices and B one of {y[:-2]}: these "
            "shapes do not broadcast"
        ) from None
    one = (np.empty((), dtype) for dtype in (dtype_a, dtype_b))
    problem = make_problem(
        *(np.broadcast_to(v, shape[-2:]) for v, shape in zip(one, (x, y), strict=True)),
        out=None if out is None else np.empty((), out),
    )
    sides = *((problem.m,) if len(a) > 1 else ()), *((problem.n,) if len(b) > 1 else ())
    return stack, sides, problem


def merged(
    shape: Sequence[int], *strides: Sequence[int]
) -> tuple[tuple[int, ...], list[tuple[int, ...]]]:
    """The sides of stacks that lie with these strides, and the strides, with as few sides as one
    step each leads through: sides of 1 are left out, and neighbours joined where all stacks go on
    evenly. At least one side is left."""
    sides: list[int] = []
    steps: list[list[int]] = [[] for _ in strides]
    for i, size in enumerate(shape):
        if size == 1:
            continue
        here = [x[i] for x in strides]
        if sides and all(x[-1] == size * y for x, y in zip(steps, here, strict=True)):
            sides[-1] *= size
            for x, y in zip(steps, here, strict=True):
                x[-1] = y
            continue
        sides.append(size)
        for x, y in zip(steps, here, strict=True):
            x.append(y)
    return tuple(sides or [1]), [tuple(x or [0]) for x in steps]
