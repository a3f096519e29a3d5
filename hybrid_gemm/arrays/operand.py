"""Each matrix of a product, described once: what it is, how it lies, and in which memory.

`CallerArrays` is the door by which every array enters; behind it nobody asks an array again
where it lies or in which order.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from ..host.notes import warn
from ..planning.partition import Span
from ..planning.plan import Homes
from ..problem import Problem, Scalar, make_problem, op_of, sides
from .caller_arrays import (
    Multiplier,
    as_array,
    broadcast_c,
    check_device,
    check_out,
    check_out_type,
    is_device_array,
    is_same,
    wait_for_streams,
)
from .on_gpus import copy_into, empty_beside, on_gpu_of
from .strides import layout, leading


class Memory(Protocol):
    """What an operand asks of a device: whether it multiplies in the host's own memory, and whether
    it copies an array of the host without another copy there."""

    host_memory: bool

    def reads(self, array: np.ndarray, /) -> bool: ...


@dataclass(frozen=True)
class Operand:
    """A matrix: a 2-D view, and what is known of it.

    `order` is "n" where rows are contiguous, "t" where columns are, None where neither is;
    `ld` the elements from one row (column) to the next, 0 without an order. `home` is the
    device in whose memory it lies; None is the host's.
    """

    array: Any
    dtype: np.dtype
    order: str | None
    ld: int
    home: Any = None

    @classmethod
    def of(cls, array: Any, home: Any = None) -> Operand:
        """Looks at a view, once."""
        order, ld = layout(array) or (None, 0)
        return cls(array, array.dtype, order, ld, home)

    @property
    def shape(self) -> tuple[int, int]:
        rows, cols = self.array.shape
        return rows, cols

    @property
    def T(self) -> Operand:
        """Its transpose: the same memory, read in the other order."""
        order = self.order and {"n": "t", "t": "n"}[self.order]
        return dataclasses.replace(self, array=self.array.T, order=order)

    def part(self, rows: Span, cols: Span) -> Operand:
        """Some rows and columns: a view that lies as the whole does."""
        view = self.array[rows.slice, cols.slice]
        return Operand(view, self.dtype, self.order, self.ld, self.home)

    def lies_on(self, device: Memory) -> bool:
        """Whether it is in the memory that the device multiplies in."""
        return self.home is device or (self.home is None and device.host_memory)

    def usable_in_place(self, device: Memory, dtype: str | np.dtype) -> bool:
        """Whether the device reads it where it is, as it is, for products in `dtype`."""
        readable = device.host_memory or self.order is not None
        return self.lies_on(device) and self.dtype == dtype and readable

    def written_in_place(self, device: Memory, dtype: str | np.dtype) -> bool:
        """Whether the device can make a result of `dtype` where it lies, in contiguous rows."""
        return self.lies_on(device) and self.dtype == dtype and self.order == "n"


@dataclass(frozen=True)
class Operands:
    """op(A), op(B), C (None where none was given) and `out`, the result's place.

    They are those of a settled `problem`. `fresh` says that `out` was made for this product and
    nothing was written to it yet.
    """

    problem: Problem
    a: Operand
    b: Operand
    c: Operand | None
    out: Operand
    fresh: bool = False

    @property
    def layouts(self) -> str:
        """The storage orders of op(A) and op(B), such as "nt"; "n" where there is none."""
        return (self.a.order or "n") + (self.b.order or "n")

    @property
    def on_gpus(self) -> bool:
        """Whether all of them lie on GPUs."""
        return all(x is None or x.home is not None for x in (self.a, self.b, self.c, self.out))

    def homes(self, devices: Sequence[Memory]) -> Homes:
        """Which of these devices reads A and B, and makes C, where they lie; None: none does."""

        def home(operand: Operand, dtype: str) -> int | None:
            there = (i for i, d in enumerate(devices) if operand.usable_in_place(d, dtype))
            return next(there, None) if operand.home is not None else None

        problem, out = self.problem, self.out
        c = home(out, problem.dtype) if out.order == "n" else None
        return home(self.a, problem.operands), home(self.b, problem.operands), c

    def page_locked(self, device: Memory) -> bool:
        """Whether the device copies all that is read or written in the host's memory from and to
        there without another copy on the host. C of 16 bits is taken to be written once, and so
        not cast."""
        p = self.problem
        of_c = p.out_dtype if p.out_dtype == p.operands else p.dtype
        addend = [(self.c, of_c)] if self.c is not None and p.beta else []
        wanted = [(self.a, p.operands), (self.b, p.operands), (self.out, of_c), *addend]
        hosted = [(x, dtype) for x, dtype in wanted if x.home is None]
        return bool(hosted) and all(
            x.dtype == dtype and x.order is not None and device.reads(x.array)
            for x, dtype in hosted
        )

    def part(self, rows: Span, cols: Span) -> Operand:
        """Some rows and columns of the result's place."""
        return self.out.part(rows, cols)


@dataclass(frozen=True)
class CallerArrays:
    """A, B, C and `out` as one caller gave them, made arrays; `trans_a` and `trans_b` as `op_of`
    gives them."""

    a: Any
    b: Any
    c: Any = None
    out: Any = None
    trans_a: bool | str = False
    trans_b: bool | str = False

    @classmethod
    def of(
        cls, a: Any, b: Any, c: Any = None, out: Any = None, *, trans_a: bool | str = False,
        trans_b: bool | str = False,
    ) -> CallerArrays:  # fmt: skip
        """Anything array-like, and a C that broadcasts to the product, as a row or a column does.
        `UsageError` for what makes no array, and for shapes that do not fit."""
        trans_a, trans_b = op_of(trans_a, "trans_a"), op_of(trans_b, "trans_b")
        a, b = as_array(a, "A"), as_array(b, "B")
        if c is not None:
            m, n, _k = sides(a, b, trans_a=trans_a, trans_b=trans_b)
            c = broadcast_c(as_array(c, "C"), m, n)
        return cls(a, b, c, out, trans_a, trans_b)

    @property
    def given(self) -> list[Any]:
        return [x for x in (self.a, self.b, self.c, self.out) if x is not None]

    @property
    def op_a(self) -> Any:
        """A, transposed where it is to be: a view, which is not conjugated."""
        return self.a.T if self.trans_a else self.a

    @property
    def op_b(self) -> Any:
        """B in the same way."""
        return self.b.T if self.trans_b else self.b

    def on_their_gpu(self, device: Multiplier) -> contextlib.AbstractContextManager[None]:
        """As `on_gpu_of`. Raises `DTypeError` for arrays of a GPU where no GPU multiplies."""
        check_device(self.given, device)
        return on_gpu_of(*self.given)

    def turned(self) -> CallerArrays | None:
        """Those of C^T = op(B)^T op(A)^T, where the columns of an `out` of the host are contiguous
        and its rows are not; None elsewhere, and where another C is added."""
        out, c = self.out, self.c
        if not isinstance(out, np.ndarray) or out.ndim != 2 or not (c is None or c is out):
            return None
        if leading(out, "n") or not leading(out, "t"):
            return None
        place = out.T
        return CallerArrays(self.op_b.T, self.op_a.T, c if c is None else place, place)

    def problem(self, *, alpha: Scalar, beta: Scalar) -> Problem:
        """The problem that they pose. Raises `UsageError` on shapes, `DTypeError` on dtypes; warns
        where C alone makes it one of a wider dtype, and where a C that is no `out` is not read."""
        if self.out is not None:
            check_out_type(self.out)
        found = make_problem(
            self.a, self.b, self.c, alpha=alpha, beta=beta, trans_a=self.trans_a,
            trans_b=self.trans_b, out=self.out,
        )  # fmt: skip
        if self.c is not None and not found.beta and self.out is None:
            warn("C is not read: beta is 0; beta=1 (--beta 1) adds C, out=C puts the product there")
        if self.c is not None and found.out_dtype != np.result_type(self.a.dtype, self.b.dtype):
            warn(
                f"C is {self.c.dtype}, A is {self.a.dtype} and B is {self.b.dtype}: the product is "
                f"computed and returned in {found.out_dtype} (convert C to get another dtype)"
            )
        return found

    def described(
        self, problem: Problem, device: Multiplier, home_of: Callable[[Any], Any]
    ) -> Operands:
        """op(A), op(B), C and the result's place, each looked at once; `device` is one of those
        that multiply, and `home_of` says on which of them an array lies.

        Makes `out` where the caller gave none, or one of a wider dtype, to which the finished
        product is cast. Where K or alpha is 0, A and B are not read, as in BLAS. Waits for the
        caller's streams, which may still be writing. Raises as `check` does.
        """
        self.check(problem, device)
        fresh = self.out is None or self.out.dtype != problem.out_dtype
        out = self.empty(problem) if fresh else self.out
        op_a, op_b = self.op_a, self.op_b
        if not problem.k:
            op_a, op_b = op_a[:, :0], op_b[:0]
        place = Operand.of(out, home_of(out))
        addend = place if self.c is not None and is_same(self.c, out) else None
        if self.c is not None and addend is None:
            addend = Operand.of(self.c, home_of(self.c))
        wait_for_streams(*self.given)
        a, b = Operand.of(op_a, home_of(self.a)), Operand.of(op_b, home_of(self.b))
        return Operands(problem, a, b, addend, place, fresh)

    def check(self, problem: Problem, device: Multiplier) -> None:
        """Raises `UsageError` or `DTypeError` for an `out` that does not fit, or arrays of a GPU
        where no GPU multiplies."""
        check_device(self.given, device)
        if self.out is not None:
            check_out(self.out, (problem.m, problem.n), problem.out_dtype, self.a, self.b, self.c)

    def result(self, made: Any) -> Any:
        """What the caller gets of a finished product: itself, or `out` with it."""
        if self.out is None or self.out is made:
            return made
        copy_into(self.out, made)
        return self.out

    def empty(self, problem: Problem) -> Any:
        """A new C: on the GPU of the first of A, B, C that lies on one."""
        return empty_beside(self.given, (problem.m, problem.n), problem.out_dtype)


@dataclass(frozen=True)
class ForeignGpu:
    """A GPU that has a caller's array and is none of the devices that multiply."""

    ordinal: int


def home_of(array: Any, devices: Sequence[Any]) -> Any:
    """Which of these devices has an array in its memory, or another GPU; None is the host."""
    if not is_device_array(array):
        return None
    ordinal = array.device.id
    return next((d for d in devices if d.ordinal == ordinal), ForeignGpu(ordinal))
