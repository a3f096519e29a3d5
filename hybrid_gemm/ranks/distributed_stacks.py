"""Stacks of matrices over ranks: which rank multiplies which of them, and how they get there."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..arrays.caller_arrays import as_array, check_out, module_of
from ..arrays.on_gpus import copy_into, empty_beside, on_gpu_of
from ..arrays.stacks import as_matrices, shape_of_product
from ..errors import UsageError, shortage_in_words
from ..planning.partition import Span, cut
from ..problem import Problem
from . import launch, replicas
from .distributed_operands import dtype_of, least_dtype
from .redistribution import NOTHING, Part, move
from .replicas import look

DISTRIBUTIONS = ("replicated", "root")


class DistributedStacks:
    """A and B of one call over ranks, as NumPy's `matmul` takes them, and C's place. Every rank
    passes all of A and B, or rank `root` does and the others None. Matrices are numbered along the
    stack that A and B make together."""

    def __init__(
        self, comm: Any, a: Any, b: Any, out: Any, distribution: str, result: str | None, root: int
    ) -> None:
        self.comm, self.root, self.out = comm, launch.check_root(comm, root), out
        self.distribution = distribution
        self.result = distribution if result is None else result
        self.a, self.b = (
            None if x is None else as_array(x, name) for x, name in ((a, "A"), (b, "B"))
        )

    @property
    def are_matrices(self) -> bool:
        """Whether all that this rank passed are matrices, which may be distributed in more ways."""
        return all(x is None or x.ndim == 2 for x in (self.a, self.b))

    def told(self) -> tuple:
        """What the other ranks have to know of this one's arrays. Raises `UsageError` for what is
        seen to be wrong from here."""
        if not self.are_matrices:
            self._check()
        choices = {"distribution": self.distribution, "result": self.result, "root": self.root}
        seen = {}
        if self.distribution == "replicated" and not self.are_matrices:
            seen = {"A": look(self.a), "B": look(self.b)}
        return choices, self._shapes(), dtype_of(self.out), seen

    def multiply(
        self,
        everyone: Sequence[tuple],
        gemm: Callable[[Any, Any, str], Any],
        alone: Callable[..., Any],
        faster_together: Callable[[Problem, int], bool],
    ) -> Any:
        """C, of what every rank `told`: by `gemm`, over all ranks, if B is one matrix; it is given
        the dtype of C, which an `out` may widen. Otherwise each rank multiplies as many whole
        matrices as the others by `alone`, and those left over are shared out too, or made by `gemm`
        one by one where `faster_together` says so. Collective."""
        launch.together(self.comm, lambda: self._settle(everyone))
        if self.count and self.one[1]:
            made = gemm(*self._joined(), self.problem.out_dtype)
            self._put(0, None if made is None else made.reshape(self.count, *self._sides_of_c))
            return self._c
        left = self.count % self.comm.size
        if left and not faster_together(self.problem, left):
            left = 0
        if shared := self.count - left:
            a, b = self._local(shared)
            mine = len(cut(shared, self.comm.size)[self.comm.rank])

            def multiply() -> Any:
                with shortage_in_words(f"{mine} products of {self.problem}"):
                    c = empty_beside([a], (mine, *self._sides_of_c), self.problem.out_dtype)
                    return alone(a, b, out=c)

            self._gather(launch.together(self.comm, multiply), shared)
        for number in range(shared, self.count):
            made = gemm(*self._pair(number), self.problem.out_dtype)
            self._put(number, None if made is None else made[None])
        return self._c

    def _settle(self, everyone: Sequence[tuple]) -> None:
        """Finds the shapes of A, B and C, and makes C. Raises `UsageError` or `DTypeError` for what
        does not fit."""
        self._check()
        first, shapes_of_first, *_ = everyone[0]
        for rank, (choices, shapes, *_) in enumerate(everyone):
            found = [(x, first[x], choices[x]) for x in first]
            if self.distribution == "replicated":
                found.append(("the shapes and dtypes of A and B", shapes_of_first, shapes))
            for name, theirs, other in found:
                if not launch.is_same(other, theirs):
                    raise UsageError(
                        f"ranks do not agree on {name}: rank 0 has {theirs!r}, rank {rank} has "
                        f"{other!r}"
                    )
        replicas.check([seen for *_rest, seen in everyone])
        self.shapes = everyone[self.root][1]
        self._make_c(least_dtype([told[2] for told in everyone], self.result, self.root))

    def _check(self) -> None:
        for name, value in (("distribution", self.distribution), ("result", self.result)):
            if value not in DISTRIBUTIONS:
                raise UsageError(
                    f"{name}={value!r}: stacks and vectors over ranks are "
                    f"{' or '.join(DISTRIBUTIONS)}"
                )
        if self._holds and (self.a is None or self.b is None):
            raise UsageError(
                f"{'A' if self.a is None else 'B'} is missing; with distribution="
                f"{self.distribution!r} this rank passes one"
            )

    @property
    def _holds(self) -> bool:
        return self.distribution == "replicated" or self.comm.rank == self.root

    @property
    def _gets_c(self) -> bool:
        return self.result == "replicated" or self.comm.rank == self.root

    def _shapes(self) -> list | None:
        if not self._holds or self.a is None or self.b is None:
            return None
        # In native byte order, as `dtype_of`; the numbers are the same.
        return [(tuple(x.shape), np.dtype(x.dtype).newbyteorder("=")) for x in (self.a, self.b)]

    def _make_c(self, least_out: np.dtype | None) -> None:
        a, b = alike = [np.broadcast_to(np.empty((), dtype), shape) for shape, dtype in self.shapes]
        self.stack, sides, self.problem = shape_of_product(a, b, least_out)
        self.count = math.prod(self.stack)
        # For each operand: whether it is one matrix, the sides of each, and the dtype.
        matrices = as_matrices(*alike)
        self.one = [math.prod(x.shape[:-2]) == 1 for x in matrices]
        self.sides = [x.shape[-2:] for x in matrices]
        if not self._gets_c:
            return
        shape, dtype = (*self.stack, *sides), self.problem.out_dtype
        if self.out is None:
            self.out = empty_beside((self.a, self.b), shape, dtype)
        else:
            check_out(self.out, shape, dtype, self.a, self.b)

    # --- parts of A and B --------------------------------------------------------------------

    def _pair(self, number: int) -> tuple[Any, Any]:
        """One pair of matrices; None on ranks that pass none."""
        a, b = (self._some(i, Span(number, number + 1)) for i in (0, 1))
        return (None, None) if a is None or b is None else (a[0], b[0])

    def _joined(self) -> tuple[Any, Any]:
        """All matrices of A as one on top of the other, and B, which is one."""
        a, b = self._some(0, Span(0, self.count)), self._some(1, Span(0, 1))
        return (
            (None, None)
            if a is None or b is None
            else (_reshaped(a, len(a) * a.shape[1], a.shape[2]), b[0])
        )

    def _local(self, count: int) -> tuple[Any, Any]:
        """This rank's share of the first `count` pairs, as stacks of one dimension. Collective."""
        spans = cut(count, self.comm.size)
        a, b = (self._share(i, spans) for i in (0, 1))
        return a, b

    def _share(self, operand: int, spans: list[Span]) -> Any:
        mine = spans[self.comm.rank]
        if self.distribution == "replicated":
            return self._some(operand, mine)
        rows, cols = self.sides[operand]
        whole = Span(0, 1 if self.one[operand] else spans[-1].stop)
        wanted = [whole if self.one[operand] else span for span in spans]
        want = [_lines(span, rows, cols) for span in wanted]
        have = [NOTHING] * self.comm.size
        have[self.root] = _lines(whole, rows, cols)
        here = self._some(operand, whole)
        moved = move(
            self.comm, None if here is None else _reshaped(here, len(whole) * rows, cols), have,
            want, self.shapes[operand][1],
        )  # fmt: skip
        got = moved.reshape(len(wanted[self.comm.rank]), rows, cols)
        return got[: len(mine)] if self.one[operand] else got

    def _some(self, operand: int, span: Span) -> Any:
        """These matrices of A or B, the one that there is if it is one; None where none is."""
        if self.a is None or self.b is None:
            return None
        x = as_matrices(self.a, self.b)[operand]
        if self.one[operand]:
            return x.reshape(1, *x.shape[-2:])[: len(span)]
        whole = module_of(x).broadcast_to(x, (*self.stack, *x.shape[-2:]))
        if len(self.stack) == 1:
            return whole[span.slice]
        chosen = [whole[np.unravel_index(i, self.stack)] for i in range(span.start, span.stop)]
        if not chosen:
            return empty_beside([x], (0, *x.shape[-2:]), x.dtype)
        with on_gpu_of(x):
            return module_of(x).stack(chosen)

    # --- C -----------------------------------------------------------------------------------

    def _gather(self, made: Any, count: int) -> None:
        """Takes each rank's share of the first `count` matrices of C to where C is wanted.
        Collective."""
        m, n = self._sides_of_c
        have = [_lines(span, m, n) for span in cut(count, self.comm.size)]
        everywhere = self.result == "replicated"
        whole = _lines(Span(0, count), m, n)
        want = [whole if everywhere or r == self.root else NOTHING for r in range(self.comm.size)]
        c = move(self.comm, made.reshape(len(made) * m, n), have, want, self.problem.out_dtype)
        if self._gets_c:
            self._put(0, c.reshape(count, m, n))

    def _put(self, first: int, c: Any) -> None:
        """Writes matrices of C from number `first` on; does nothing where C is not wanted."""
        if not self._gets_c:
            return
        a_is_vector, b_is_vector = (len(shape) == 1 for shape, _dtype in self.shapes)
        place = self.out[..., None] if b_is_vector else self.out
        place = place[..., None, :] if a_is_vector else place
        if len(self.stack) == 1:
            copy_into(place[first : first + len(c)], c)
            return
        for i in range(len(c)):
            copy_into(place[np.unravel_index(first + i, self.stack) if self.stack else ...], c[i])

    @property
    def _sides_of_c(self) -> tuple[int, int]:
        return self.problem.m, self.problem.n

    @property
    def _c(self) -> Any:
        """C as the caller wants it: a number of two vectors; None where it is not wanted."""
        if not self._gets_c:
            return None
        return self.out if self.out.ndim else self.out[()]


def _lines(matrices: Span, rows: int, cols: int) -> Part:
    """These matrices of a stack whose matrices lie one below the other."""
    return Part(Span(matrices.start * rows, matrices.stop * rows), Span(0, cols))


def _reshaped(x: Any, *shape: int) -> Any:
    """Where that takes a copy, one on the same GPU."""
    with on_gpu_of(x):
        return x.reshape(*shape)
