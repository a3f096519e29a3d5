"""Products that the CPU does as one call of its BLAS, without a plan or threads: as NumPy's own.

What has to be worked out is worked out once for arrays of the same shapes and dtypes.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import numpy as np

from .. import catalog
from ..arrays.caller_arrays import (
    broadcast_c,
    cast_into,
    is_cast_to,
    is_same,
    shares_memory,
    silent,
)
from ..arrays.stacks import shape_of_product
from ..arrays.strides import overlaps_itself
from ..devices.cpu import CHUNK_BYTES, CpuDevice, product
from ..errors import shortage_in_words
from ..host.kept import NEW, Known
from ..problem import Problem, are_numbers, make_problem, sides
from .checked_device import CheckedDevice, bounds_of
from .checked_work import CheckedWork
from .executor import INCOMPLETE
from .plan_maker import PlanMaker


class SingleCpuExecutor:
    """Repeated products of NumPy arrays by one worker that has all cores. With `checked`, that CPU
    with its products checked, these are."""

    def __init__(
        self, device: CpuDevice, plans: PlanMaker, checked: CheckedDevice | None = None
    ) -> None:
        self.device, self.plans, self.checked = device, plans, checked
        self.known: Known[tuple, tuple | None] = Known()
        self._pieces: Known[Problem, int] = Known()

    def gemm(
        self, a: Any, b: Any, c: Any = None, alpha: Any = 1.0, beta: Any = 0.0,
        trans_a: bool | str = False, trans_b: bool | str = False, out: Any = None,
    ) -> Any:  # fmt: skip
        """alpha * op(A) @ op(B) + beta * C of NumPy's arrays, with a run's bits but for complex
        ones, which it expands. None for what takes a run: an `out` that overlaps, products that
        are made in several pieces, and complex ones with factors, Inf or NaN."""
        if c is not None and out is not None and c is not out and is_same(c, out):
            c = out  # two views of it
        found = self._find(a, b, c, alpha, beta, trans_a, trans_b, out)
        if found is None or (out is not None and not _free(out, a, b, c)):
            return None
        problem, dtype, result_dtype, plain = found
        op_a, op_b = a.T if trans_a else a, b.T if trans_b else b
        if not problem.k:  # as where alpha is 0, and A and B are not read
            op_a, op_b = op_a[:, :0], op_b[:0]
        given, writing = out is not None, False
        try:
            if out is None:
                out = np.empty((problem.m, problem.n), result_dtype)
            if self.checked:
                writing = True
                self._checked(self.checked, problem, op_a, op_b, c, out)
                return out
            if plain:
                writing = True
                op_a, op_b = _conjugated(problem.conj_a, op_a), _conjugated(problem.conj_b, op_b)
                return _as_c99(product(op_a, op_b, out))
            direct = out.dtype == dtype == result_dtype
            made = out if direct else np.empty(out.shape, dtype)
            op_a, op_b = _read_as(op_a, dtype), _read_as(op_b, dtype)
            writing = direct
            if problem.beta and not (c is out and direct):
                cast_into(made, c)
            self.device.multiply(op_a, op_b, made, problem.alpha, problem.beta)
            writing = True
            if not direct:
                _give(made, out, result_dtype)
        except BaseException as error:
            if given and writing:
                error.add_note(INCOMPLETE)
            with shortage_in_words(problem):
                raise
        return out

    def _checked(
        self, checked: CheckedDevice, problem: Problem, a: Any, b: Any, c: Any, out: Any
    ) -> None:
        """The product in `out`, made again where its sums are wrong."""
        alpha, beta = problem.alpha, problem.beta
        bounds = bounds_of(catalog.get("blas").variant(), a, b, out, alpha, beta)
        if beta and c is not out:
            cast_into(out, c)

        def make(_stream: Any) -> None:
            if alpha == 1 and not beta:
                product(a, b, out)
            else:
                self.device.multiply(a, b, out, alpha, beta)

        sums = functools.partial(checked.sums.product, a, b)
        CheckedWork(checked, out, beta, make, sums, bounds, (a, b)).run(self.device.stream())

    def matmul(self, a: Any, b: Any, out: Any = None) -> Any:
        """A @ B as NumPy's `matmul` has it, of vectors, matrices and stacks of NumPy's arrays; None
        where `gemm` of a pair would be None, and where products are checked, pair by pair. A stack
        times one matrix is one product, where it lies in memory as one matrix."""
        if self.checked:
            return None
        joined = a.ndim > 2 == b.ndim and a.shape[-1] == b.shape[0]
        if joined and a.size and a.flags.c_contiguous:
            return self._of_joined(a, b, out)
        key = "matmul", a.shape, a.dtype, b.shape, b.dtype, out is None or (out.shape, out.dtype)
        found = self.known.get(key, NEW)
        if found is NEW:
            found = self.known[key] = self._one_call(a, b, out)
        if found is None or (out is not None and not _free(out, a, b, None)):
            return None
        shape, dtype, result_dtype, plain = found
        given = out is not None
        try:
            if out is None:
                out = np.empty(shape, result_dtype)
            made = _as_c99(product(a, b, out)) if plain else _by_casts(a, b, out, dtype)
            return made if made is None or made.ndim else made[()]
        except BaseException as error:
            if given:
                error.add_note(INCOMPLETE)
            raise

    def _of_joined(self, a: np.ndarray, b: np.ndarray, out: np.ndarray | None) -> Any:
        shape = *a.shape[:-1], b.shape[1]
        if out is not None and not (out.shape == shape and out.flags.c_contiguous):
            return None
        rows = math.prod(a.shape[:-1])
        place = None if out is None else out.reshape(rows, shape[-1])
        made = self.matmul(a.reshape(rows, a.shape[-1]), b, place)
        return made if made is None or out is not None else made.reshape(shape)

    def _one_call(self, a: Any, b: Any, out: Any) -> tuple | None:
        """The shape of C, the dtypes in which it is made and given, and whether they are those of A
        and B, where `matmul` multiplies arrays of these shapes."""
        if a.ndim > 2 >= b.ndim > 1:  # which a run makes one product of, where it can
            return None
        stack, last, problem = shape_of_product(a, b)
        shape = (*stack, *last)
        if out is not None and (out.shape, out.dtype) != (shape, problem.out_dtype):
            return None
        pair = (problem.m, problem.k), (problem.k, problem.n)
        x, y = (
            np.broadcast_to(np.empty((), z.dtype), sides)
            for z, sides in zip((a, b), pair, strict=True)
        )
        found = self._work_out(x, y, None, None, alpha=1, beta=0, trans_a=False, trans_b=False)
        return found and (shape, *found[1:])

    def _find(
        self, a: Any, b: Any, c: Any, alpha: Any, beta: Any, trans_a: bool | str,
        trans_b: bool | str, out: Any,
    ) -> tuple | None:  # fmt: skip
        """What `_work_out` says, worked out once for arrays of these shapes and dtypes."""
        key = (
            a.shape, a.dtype, b.shape, b.dtype, alpha, type(alpha), beta, type(beta), trans_a,
            trans_b,
            c is None or (c.shape, c.dtype), out is None or (out.shape, out.dtype),
        )  # fmt: skip
        try:
            return self.known[key]
        except KeyError:
            pass
        except TypeError:  # an array as alpha or beta is no key
            return None
        if not are_numbers(alpha, beta):
            return None
        found = self.known[key] = self._work_out(
            a, b, c, out, alpha=alpha, beta=beta, trans_a=trans_a, trans_b=trans_b
        )
        return found

    def _work_out(
        self, a: Any, b: Any, c: Any, out: Any, *, alpha: Any, beta: Any, trans_a: bool | str,
        trans_b: bool | str,
    ) -> tuple | None:  # fmt: skip
        """The problem, as objects the dtypes in which C is made and given, and whether it is one
        call of NumPy's; None if it takes a run, which also says what is wrong."""
        if c is not None:
            c = broadcast_c(c, *sides(a, b, trans_a=trans_a, trans_b=trans_b)[:2])
        problem = self.plans.settle(
            make_problem(a, b, c, alpha=alpha, beta=beta, trans_a=trans_a, trans_b=trans_b, out=out)
        )
        if c is not None and out is None and not problem.beta:  # which a run warns of
            return None
        real = problem.as_real()  # of a complex one what a run multiplies
        if problem.is_complex and self.plans.options.algorithm == "3m":
            return None
        fits = (c is None or problem.out_dtype == np.result_type(a.dtype, b.dtype)) and (
            out is None
            or (
                out.shape == (problem.m, problem.n)
                and (out.dtype == problem.out_dtype or c is None)
                and is_cast_to(out.dtype, problem.out_dtype)
            )
        )
        if not (fits and problem.flops <= self.device.chunk_flops) or self.device.limits_blas():
            return None
        if self._pieces_of(real) > 1:
            return None
        dtypes = np.dtype(problem.dtype), np.dtype(problem.out_dtype)
        alike = {a.dtype, b.dtype, *dtypes, dtypes[0] if out is None else out.dtype}
        if self.checked and (
            problem.is_complex or alike != {dtypes[0]} or not (problem.flops and problem.alpha)
        ):
            return None
        plain = (
            (problem.alpha, problem.beta) == (1, 0)
            and dtypes[0].kind in "fc"
            and alike == {dtypes[0]}
        )
        expanded = problem.is_complex and not plain and (problem.k or problem.beta)
        if expanded:  # its real product comes here
            return None
        return problem, *dtypes, plain

    def _pieces_of(self, problem: Problem) -> int:
        """In how many pieces a run would multiply: the same for all alpha and beta but 0."""
        alike = dataclasses.replace(problem, alpha=1, beta=int(problem.beta != 0))
        if alike not in self._pieces:
            plan = self.plans.plan(alike)
            self.plans.choice(plan)  # raises for a kernel that the CPU has not
            self._pieces[alike] = len(plan.products)
        return self._pieces[alike]


def _give(made: np.ndarray, out: np.ndarray, result_dtype: np.dtype) -> None:
    """Casts a product to `out`; where that is of another dtype than the result, by way of it."""
    if out.dtype != result_dtype:  # rounded, or wrapped, before it is cast
        given_as = np.empty(out.shape, result_dtype)
        cast_into(given_as, made)
        made = given_as
    cast_into(out, made)


def _conjugated(yes: bool, x: np.ndarray) -> np.ndarray:
    return x.conj() if yes else x


def _as_c99(made: np.ndarray) -> np.ndarray | None:
    """A product that NumPy made. None for a complex one with Inf or NaN: where a part overflows,
    BLAS makes NaN of the other one too, by its factor of 1 + 0i."""
    if made.dtype.kind == "f":
        return made
    with silent():
        return made if np.isfinite(made.sum()) else None


def _read_as(view: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """A view for arithmetic in `dtype`; integers, which `product` casts, as they are."""
    return view if dtype.kind == "i" or view.dtype == dtype else view.astype(dtype)


def _by_casts(a: np.ndarray, b: np.ndarray, out: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """out = a @ b in `dtype`, a part of a stack at a time, so that copies stay small."""
    stack = out.ndim - (a.ndim > 1) - (b.ndim > 1)
    if not out.size:
        return out
    if not stack:
        cast_into(out, product(_read_as(a, dtype), _read_as(b, dtype), np.empty(out.shape, dtype)))
        return out

    def part(x: np.ndarray, rows: slice) -> np.ndarray:
        return x[rows] if x.ndim == stack + 2 and len(x) > 1 else x

    step = max(1, CHUNK_BYTES * len(out) // (dtype.itemsize * max(1, a.size + b.size + out.size)))
    for i in range(0, len(out), step):
        rows = slice(i, i + step)
        x, y, z = part(a, rows), part(b, rows), out[rows]
        made = np.empty(z.shape, dtype)
        cast_into(z, product(_read_as(x, dtype), _read_as(y, dtype), made))
    return out


def _free(out: np.ndarray, a: np.ndarray, b: np.ndarray, c: Any) -> bool:
    """Whether a product can be written to `out` while A, B and C are read."""
    if not out.flags.writeable or (not out.flags.c_contiguous and overlaps_itself(out)):
        return False
    others = (a, b) if c is None or c is out else (a, b, c)
    return not any(shares_memory(x, out) for x in others)
