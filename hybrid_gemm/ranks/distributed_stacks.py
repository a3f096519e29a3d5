"""Stacks of matrices over ranks: which rank multiplies which of them, and how they get there."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any

from ..arrays.caller_arrays import module_of
from ..arrays.on_gpus import copy_into, empty_beside, on_gpu_of
from ..arrays.stacks import as_matrices, shape_of_product
from ..errors import UsageError, shortage_in_words
from ..planning.partition import Span, cut
from ..problem import Problem
from . import launch
from .distributed_operands import DistributedOperands
from .redistribution import NOTHING, Part, move

DISTRIBUTIONS = ("replicated", "root")


class DistributedStacks:
    """The arrays of one call, which NumPy's `matmul` takes as stacks or vectors, and what every
    rank told of them. Pairs of matrices are numbered along the stack that A and B make together.
    Raises `UsageError` or `DTypeError` for what does not fit, the same on all ranks."""

    def __init__(self, given: DistributedOperands, everyone: Sequence[dict]) -> None:
        self.comm, self.given = given.comm, given
        for name in ("distribution", "result"):
            if (value := getattr(given, name)) not in DISTRIBUTIONS:
                raise UsageError(
                    f"{name}={value!r}: stacks and vectors over ranks are "
                    f"{' or '.join(DISTRIBUTIONS)}"
                )
        a, b = alike = [x for x in given.joined(everyone).values() if x is not None]
        self.stack, sides, self.problem = shape_of_product(a, b, given.least_out(everyone))
        self.shape, self.count = (*self.stack, *sides), math.prod(self.stack)
        # For each operand: whether it is one matrix, and the sides of each.
        matrices = dict(zip("AB", as_matrices(*alike), strict=True))
        self.one = {name: math.prod(x.shape[:-2]) == 1 for name, x in matrices.items()}
        self.sides = {name: x.shape[-2:] for name, x in matrices.items()}

    def of(self, given: DistributedOperands) -> DistributedStacks:
        """The same of the arrays of a call of which all ranks told the same."""
        found = copy.copy(self)
        found.given, given.dtypes = given, self.given.dtypes
        return found

    def multiply(
        self,
        gemm: Callable[[Any, Any, str], Any],
        alone: Callable[..., Any],
        faster_together: Callable[[Problem, int], bool],
    ) -> Any:
        """C: by `gemm`, over all ranks, if B is one matrix; it is given the dtype of C, which an
        `out` may widen. Otherwise each rank multiplies as many whole matrices as the others by
        `alone`, and those left over are shared out too, or made by `gemm` one by one where
        `faster_together` says so. Collective."""
        size, into = self.comm.size, self.problem.out_dtype
        if self.count and self.one["B"]:
            a, b = self._some("A", Span(0, self.count)), self._some("B", Span(0, 1))
            return self._returned([gemm(_lines_of(a), None if b is None else b[0], into)])
        left = self.count % size
        if left and not faster_together(self.problem, left):
            left = 0
        shared, made = self.count - left, []
        if shared:
            made.append(self._shared_out(shared, alone))
        for number in range(shared, self.count):
            a, b = (self._some(x, Span(number, number + 1)) for x in "AB")
            made.append(gemm(_lines_of(a), _lines_of(b), into))
        return self._returned(made)

    def _shared_out(self, count: int, alone: Callable[..., Any]) -> Any:
        """The first `count` matrices of C, below each other, where C is wanted. Collective."""
        spans, (m, n) = cut(count, self.comm.size), (self.problem.m, self.problem.n)
        a, b = (self._share(x, spans) for x in "AB")
        mine = len(spans[self.comm.rank])

        def multiply() -> Any:
            with shortage_in_words(f"{mine} products of {self.problem}"):
                c = empty_beside([a], (mine, m, n), self.problem.out_dtype)
                return alone(a, b, out=c)

        c = _lines_of(launch.together(self.comm, multiply))
        have, whole = [_lines(span, m, n) for span in spans], _lines(Span(0, count), m, n)
        want = [whole if self.given.gets_c(r) else NOTHING for r in range(self.comm.size)]
        return move(self.comm, c, have, want, self.problem.out_dtype)

    def _share(self, operand: str, spans: list[Span]) -> Any:
        """This rank's share of A or B, as a stack of one dimension. Collective."""
        given, rank, (rows, cols) = self.given, self.comm.rank, self.sides[operand]
        if given.distribution == "replicated":
            return self._some(operand, spans[rank])
        one = self.one[operand]
        whole = Span(0, 1 if one else spans[-1].stop)
        want = [_lines(whole if one else span, rows, cols) for span in spans]
        have = [_lines(whole, rows, cols) if given.holds(r) else NOTHING for r in range(len(spans))]
        here = _lines_of(self._some(operand, whole))
        got = move(self.comm, here, have, want, given.dtypes[operand])
        stack = got.reshape(1 if one else len(spans[rank]), rows, cols)
        return stack[: len(spans[rank])] if one else stack

    def _some(self, operand: str, span: Span) -> Any:
        """These matrices of A or B, the one that there is if it is one; None where none is."""
        given = self.given
        if not given.holds(self.comm.rank):
            return None
        x = as_matrices(given.arrays["A"], given.arrays["B"])["AB".index(operand)]
        sides = x.shape[-2:]
        if self.one[operand]:
            return x.reshape(1, *sides)[: len(span)]
        whole = module_of(x).broadcast_to(x, (*self.stack, *sides))
        inner = max(1, math.prod(self.stack[1:]))
        first, last = span.start // inner, -(-span.stop // inner)
        with on_gpu_of(x):  # where that takes a copy
            few = whole[first:last].reshape((last - first) * math.prod(self.stack[1:]), *sides)
        return few[span.within(Span(first * inner, 0))]

    def _returned(self, made: list[Any]) -> Any:
        """C as the caller wants it, a number of two vectors, of matrices that were made below each
        other; None where it is not wanted."""
        given, problem = self.given, self.problem
        if not given.gets_c(self.comm.rank):
            return None
        arrays, out = (given.arrays["A"], given.arrays["B"]), given.out
        if out is None:
            out = empty_beside(arrays, self.shape, problem.out_dtype)
        flat = out.flags.c_contiguous
        c = out if flat else empty_beside(arrays, self.shape, problem.out_dtype)
        place, row = c.reshape(self.count * problem.m, problem.n), 0
        for part in made:
            copy_into(place[row : row + len(part)], part)
            row += len(part)
        if not flat:
            copy_into(out, c)
        return out if out.ndim else out[()]


def _lines(matrices: Span, rows: int, cols: int) -> Part:
    """These matrices of a stack whose matrices lie one below the other."""
    return Part(Span(matrices.start * rows, matrices.stop * rows), Span(0, cols))


def _lines_of(stack: Any) -> Any:
    """The matrices of a stack one below the other; None of none."""
    if stack is None:
        return None
    with on_gpu_of(stack):  # where that takes a copy
        return stack.reshape(len(stack) * stack.shape[1], stack.shape[2])
