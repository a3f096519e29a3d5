"""Writes products that the CPU makes as one call of its BLAS, as NumPy's own."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np

from .. import catalog
from ..arrays.caller_arrays import (
    broadcast_c,
    cast_into,
    is_cast_to,
    is_free,
    is_same,
    silent,
)
from ..arrays.stacks import shape_of_product
from ..devices.cpu import CHUNK_BYTES, CpuDevice, product
from ..execution.checked_device import CheckedDevice, bounds_of
from ..execution.checked_work import CheckedWork
from ..execution.commands import INCOMPLETE
from ..execution.plan_maker import PlanMaker
from ..problem import Problem, make_problem, sides
from .program import OUT, Call, Command, Program, Unfit, Write


@dataclass(frozen=True)
class Multiply:
    """OUT = alpha * op(A) @ op(B) + beta * C in `dtype`, given as `result_dtype`; `plain` where
    that is one call of NumPy's. With a `shape` it is A @ B of vectors, matrices and stacks. With
    `checked`, that CPU with its products checked, it is made again where its sums are wrong."""

    device: CpuDevice
    problem: Problem
    trans: tuple[bool, bool]
    dtype: np.dtype
    result_dtype: np.dtype
    plain: bool
    checked: CheckedDevice | None = None
    shape: tuple[int, ...] | None = None

    def __call__(self, slots: list[Any]) -> None:
        """Raises `Unfit` for an OUT that overlaps, and for complex products of one call with Inf or
        NaN."""
        a, b, c, out = slots
        given, writing, problem = out is not None, False, self.problem
        if given:
            if c is not None and c is not out and is_same(c, out):
                c = out  # two views of it
            if not is_free(out, a, b, c):
                raise Unfit
        trans_a, trans_b = self.trans
        op_a, op_b = a.T if trans_a else a, b.T if trans_b else b
        if not problem.k and self.shape is None:  # as where alpha is 0: A and B are not read
            op_a, op_b = op_a[:, :0], op_b[:0]
        try:
            if out is None:
                sides = (problem.m, problem.n) if self.shape is None else self.shape
                out = slots[OUT] = np.empty(sides, self.result_dtype)
            if self.checked:
                writing = True
                self._check(self.checked, op_a, op_b, c, out)
            elif self.plain:
                writing = True
                op_a = op_a.conj() if problem.conj_a else op_a
                op_b = op_b.conj() if problem.conj_b else op_b
                product(op_a, op_b, out)
                if out.dtype.kind == "c":
                    _check_as_c99(out)
            elif self.shape is not None:
                writing = True
                _by_casts(a, b, out, self.dtype)
            else:
                writing = out.dtype == self.dtype == self.result_dtype
                self._by_factors(op_a, op_b, c, out, direct=writing)
                writing = True
        except Unfit:
            raise
        except BaseException as error:
            if given and writing:
                error.add_note(INCOMPLETE)
            raise

    def _by_factors(self, a: Any, b: Any, c: Any, out: Any, *, direct: bool) -> None:
        """With factors and casts; `direct` where the product is made in OUT."""
        problem, dtype = self.problem, self.dtype
        made = out if direct else np.empty(out.shape, dtype)
        a, b = _read_as(a, dtype), _read_as(b, dtype)
        if problem.beta and not (c is out and direct):
            cast_into(made, c)
        self.device.multiply(a, b, made, problem.alpha, problem.beta)
        if not direct:
            _give(made, out, self.result_dtype)

    def _check(self, checked: CheckedDevice, a: Any, b: Any, c: Any, out: Any) -> None:
        """The product in OUT, made again where its sums are wrong."""
        alpha, beta = self.problem.alpha, self.problem.beta
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


class OneCpu:
    """Writes products by one worker that has all cores. With `checked`, that CPU with its products
    checked, these are."""

    def __init__(
        self, device: CpuDevice, plans: PlanMaker, checked: CheckedDevice | None = None
    ) -> None:
        self.device, self.plans, self.checked = device, plans, checked

    def write(self, call: Call, planned: Write) -> Program:
        """The program of a call of NumPy's arrays, with a run's bits but for complex ones, which it
        expands; what `planned` writes for a product that is made in several pieces, complex ones
        with factors, and what is wrong."""
        found = self._work_out(call)
        if found is None:
            return planned(call)
        problem, dtype, result_dtype, plain = found
        trans = bool(call.trans_a), bool(call.trans_b)
        command = Multiply(
            self.device, problem, trans, dtype, result_dtype, plain, self.checked
        )  # fmt: skip
        return Program([command], otherwise=planned(call), task=problem)

    def write_stacks(self, a: Any, b: Any, out: Any, otherwise: Program) -> Program:
        """As `write`, of A @ B as NumPy's `matmul` has it; `otherwise` multiplies pair by pair, as
        where products are checked."""
        found = None if self.checked else self._one_call(a, b, out)
        if found is None:
            return otherwise
        shape, problem, dtype, result_dtype, plain = found
        command = Multiply(
            self.device, problem, (False, False), dtype, result_dtype, plain, shape=shape
        )  # fmt: skip
        number = not shape and out is None
        commands: list[Command] = [command, _as_number] if number else [command]
        return Program(commands, otherwise=otherwise, task=otherwise.task)

    def _one_call(self, a: Any, b: Any, out: Any) -> tuple | None:
        """The shape of C, and what `_work_out` finds of a pair, where `matmul` multiplies arrays of
        these shapes."""
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
        found = self._work_out(Call(x, y))
        return found and (shape, *found)

    def _work_out(self, call: Call) -> tuple[Problem, np.dtype, np.dtype, bool] | None:
        """The problem, the dtypes in which C is made and given, and whether it is one call of
        NumPy's; None if it takes a run, which also says what is wrong."""
        a, b, c, alpha, beta, trans_a, trans_b, out = call
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
        self.plans.alone(real, "nn", self.device)  # raises for a kernel that the CPU has not
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


def _as_number(slots: list[Any]) -> None:
    """What two vectors make, which is no array where no OUT was given."""
    slots[OUT] = slots[OUT][()]


def _give(made: np.ndarray, out: np.ndarray, result_dtype: np.dtype) -> None:
    """Casts a product to `out`; where that is of another dtype than the result, by way of it."""
    if out.dtype != result_dtype:  # rounded, or wrapped, before it is cast
        given_as = np.empty(out.shape, result_dtype)
        cast_into(given_as, made)
        made = given_as
    cast_into(out, made)


def _check_as_c99(made: np.ndarray) -> None:
    """Raises `Unfit` for a complex product by NumPy with Inf or NaN: where a part overflows, BLAS
    makes NaN of the other one too, by its factor of 1 + 0i."""
    with silent():
        if not np.isfinite(made.sum()):
            raise Unfit


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
