"""Products on one GPU of arrays that no kernel reads or writes as they lie: of several dtypes, with
steps between elements, or complex. Operands are copied there, and C is made aside, all on the
caller's stream and without a plan."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from ..arrays.caller_arrays import broadcast_c, is_cast_to, shares_memory
from ..arrays.complex_numbers import RealProduct
from ..arrays.on_gpus import copied
from ..arrays.strides import leading, overlaps_itself
from ..problem import Problem
from .native_calls import How, copied_by, does_more

Multiply = Callable[..., Any]  # `SingleGpuExecutor.gemm`


class Conversion(NamedTuple):
    """What becomes of A and B: the dtype that each is copied as, None where it stays. `aside`: C is
    made in an array of its own, and cast or copied. `dtype` is the result's."""

    a: str | None
    b: str | None
    aside: bool
    dtype: str

    # Many parameters: a product has so many, as in BLAS.
    def multiplied(
        self, multiply: Multiply, a: Any, b: Any, c: Any, alpha: Any, beta: Any,
        trans_a: bool | str, trans_b: bool | str, out: Any,
    ) -> Any:  # fmt: skip
        """As `SingleGpuExecutor.gemm`, which is given to multiply what needs no conversion."""
        if self.aside:
            does_more()
        x, y = copied_by(_copying(self.a), a), copied_by(_copying(self.b), b)
        if out is not None and not self.aside:
            return multiply(x, y, c, alpha, beta, trans_a, trans_b, out)
        return _given(multiply(x, y, c, alpha, beta, trans_a, trans_b, None), self.dtype, out)


class ComplexConversion(NamedTuple):
    """A complex product, which is made as a real one (`arrays/complex_numbers.py`)."""

    problem: Problem

    # Many parameters: a product has so many, as in BLAS.
    def multiplied(
        self, multiply: Multiply, a: Any, b: Any, c: Any, alpha: Any, beta: Any,
        trans_a: bool | str, trans_b: bool | str, out: Any,
    ) -> Any:  # fmt: skip
        """As `Conversion.multiplied`."""
        does_more()
        op_a, op_b = a.T if trans_a else a, b.T if trans_b else b
        if c is not None:
            c = broadcast_c(c, self.problem.m, self.problem.n)
        real = RealProduct.of(self.problem, op_a, op_b, c, out)
        done = multiply(real.a, real.b, real.c, real.alpha, real.beta, False, False, real.out)
        if done is None or real.made is out:
            return None if done is None else out
        return _given(real.made, self.problem.out_dtype, out)


def _given(made: Any, dtype: str, out: Any) -> Any:
    """A product as its caller gets it: of a dtype, and in `out`, if that was given."""
    if made is None:
        return None
    if out is None or out.dtype != dtype or out.dtype.kind not in "fiuc":
        made = made.astype(dtype, copy=False)  # otherwise the copy to `out` casts
    if out is None:
        return made
    out[...] = made
    return out


# Many parameters: a product has so many, as in BLAS.
def multiplied(
    how: Conversion | ComplexConversion, multiply: Multiply, a: Any, b: Any, c: Any, alpha: Any,
    beta: Any, trans_a: bool | str, trans_b: bool | str, out: Any,
) -> Any:  # fmt: skip
    """The product, converted so. None where `out` meets A, B or another C, of which a run says what
    is wrong, and where the GPU has no memory for copies, without which a run takes turns."""
    given = (a, b) if c is None or c is out else (a, b, c)
    if out is not None and any(shares_memory(x, out) for x in given):
        return None
    try:
        return how.multiplied(multiply, a, b, c, alpha, beta, trans_a, trans_b, out)
    except MemoryError:
        return None


def conversion(
    problem: Problem, a: Any, b: Any, c: Any, out: Any
) -> Conversion | ComplexConversion | None:
    """How CuPy arrays of a settled product are converted; None where none is needed, where the
    product is not that of these arrays alone, and where something is wrong with them, which a run
    says."""
    if not (problem.m * problem.n * problem.k and problem.alpha):
        return None
    dtype = np.result_type(a.dtype, b.dtype).name
    if c is not None and (not problem.beta or problem.out_dtype != dtype):
        return None  # of which a run warns
    if out is not None and (
        out.shape != (problem.m, problem.n)
        or not (out.dtype.name == problem.out_dtype or (c is None and _casts(problem, out)))
        or overlaps_itself(out)
    ):
        return None
    return ComplexConversion(problem) if problem.is_complex else _conversion(problem, a, b, out)


def _casts(problem: Problem, out: Any) -> bool:
    """Whether the product is cast to `out`, by CuPy on any GPU."""
    plain = "bfloat16" not in (problem.out_dtype, out.dtype.name)
    return plain and is_cast_to(out.dtype, problem.out_dtype)


def _conversion(problem: Problem, a: Any, b: Any, out: Any) -> Conversion | None:
    """That of a real product."""
    made = problem.dtype, problem.operands
    of_a, of_b = (_copied(x, problem.operands) for x in (a, b))
    if any(x.dtype.name == "bfloat16" != problem.operands for x in (a, b)):
        return None  # CuPy casts it on some GPUs alone
    if out is None:
        aside = problem.out_dtype not in made
    else:
        aside = not (_lies(out) and out.dtype.name in made)
    if not (of_a or of_b or aside):
        return None
    return Conversion(of_a, of_b, aside, problem.out_dtype)


def _copied(x: Any, operands: str) -> str | None:
    return None if _lies(x) and x.dtype.name == operands else operands


def _lies(x: Any) -> bool:
    """Whether a matrix lies in rows or in columns."""
    return bool(leading(x, "n") or leading(x, "t"))


def _copying(dtype: str | None) -> How | None:
    return None if dtype is None else functools.partial(_as, dtype)


def _as(dtype: str, x: Any) -> Any:
    """A copy of an operand, of that dtype, without gaps and in the order it lies in."""
    turned = abs(x.strides[0]) < abs(x.strides[1])
    return copied(x.T, dtype).T if turned else copied(x, dtype)
