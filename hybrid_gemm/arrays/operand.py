"""Each matrix of a product, described once: what it is, how it lies, and in which memory.

`Operands.of` is the door by which every array enters; behind it nobody asks an array again
where it lies or in which order.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from ..errors import DTypeError, UsageError
from ..planning.partition import Span
from ..planning.plan import Homes
from ..problem import Problem
from .caller_arrays import (
    as_array,
    cast_into,
    check_device,
    is_device_array,
    module_of,
    shares_memory,
    wait_for_streams,
)
from .strides import address, layout


class Memory(Protocol):
    """What an operand asks of a device: whether it multiplies in the host's own memory."""

    host_memory: bool


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

    `fresh` says that `out` was made for this product and nothing was written to it yet.
    """

    a: Operand
    b: Operand
    c: Operand | None
    out: Operand
    fresh: bool = False

    @classmethod
    def of(
        cls, arrays: CallerArrays, problem: Problem, *, trans: tuple[bool, bool],
        home_of: Callable[[Any], Any],
    ) -> Operands:  # fmt: skip
        """Describes the arrays of a product; `home_of` says on which device an array lies.

        Makes `out` where the caller gave none, or one of a wider dtype, to which the finished
        product is cast. Where K or alpha is 0, A and B are not read, as in
        BLAS. Raises `UsageError` or `DTypeError` for an `out` that does not fit.
        """
        a, b, c = arrays.a, arrays.b, arrays.c
        if arrays.out is not None:
            check_out(arrays.out, problem, a, b, c)
        fresh = arrays.out is None or arrays.out.dtype != problem.out_dtype
        out = arrays.empty(problem) if fresh else arrays.out
        op_a, op_b = (x.T if turned else x for x, turned in zip((a, b), trans, strict=True))
        if not problem.k:
            op_a, op_b = op_a[:, :0], op_b[:0]
        place = Operand.of(out, home_of(out))
        addend = place if c is not None and _same(c, out) else None
        if c is not None and addend is None:
            addend = Operand.of(c, home_of(c))
        return cls(
            Operand.of(op_a, home_of(a)), Operand.of(op_b, home_of(b)), addend, place, fresh
        )  # fmt: skip

    @property
    def layouts(self) -> str:
        """The storage orders of op(A) and op(B), such as "nt"; "n" where there is none."""
        return (self.a.order or "n") + (self.b.order or "n")

    def homes(self, devices: Sequence[Memory], problem: Problem) -> Homes:
        """Which of these devices reads A and B, and makes C, where they lie; None: none does."""
        a, b = (
            next((i for i, d in enumerate(devices) if x.home and x.usable_in_place(d, dtype)), None)
            for x, dtype in ((self.a, problem.operands), (self.b, problem.operands))
        )
        out = self.out
        c = (
            i for i, d in enumerate(devices)
            if out.home and out.order == "n" and out.usable_in_place(d, problem.dtype)
        )  # fmt: skip
        return a, b, next(c, None)

    def part(self, rows: Span, cols: Span) -> Operand:
        """Some rows and columns of the result's place."""
        return self.out.part(rows, cols)


@dataclass(frozen=True)
class CallerArrays:
    """A, B, C and `out` as one caller gave them, made arrays."""

    a: Any
    b: Any
    c: Any = None
    out: Any = None

    @classmethod
    def of(cls, a: Any, b: Any, c: Any = None, out: Any = None) -> CallerArrays:
        """Anything array-like; `UsageError` for what makes no array."""
        a, b = as_array(a, "A"), as_array(b, "B")
        return cls(a, b, None if c is None else as_array(c, "C"), out)

    @property
    def given(self) -> list[Any]:
        return [x for x in (self.a, self.b, self.c, self.out) if x is not None]

    @property
    def on_gpus(self) -> bool:
        """Whether all of them lie on GPUs; a result that is still to be made lies with them."""
        return all(map(is_device_array, self.given))

    def check_device(self, kind: str) -> None:
        check_device(self.given, kind)

    def wait(self) -> None:
        """Waits for the caller's streams, which may still be writing them."""
        wait_for_streams(*self.given)

    def result(self, made: Any) -> Any:
        """What the caller gets of a finished product: itself, or `out` with it."""
        if self.out is None or self.out is made:
            return made
        if type(self.out) is type(made):
            cast_into(self.out, made)
        else:  # one of them lies on a GPU
            self.out[...] = module_of(self.out).asarray(
                made.get() if is_device_array(made) else made
            )
        return self.out

    def empty(self, problem: Problem) -> Any:
        """A new C: on a GPU if any of A, B, C lies on one."""
        there = next(filter(is_device_array, self.given), self.a)
        return module_of(there).empty((problem.m, problem.n), problem.out_dtype)


def check_out(out: Any, problem: Problem, a: Any, b: Any, c: Any) -> None:
    """Raises `UsageError` or `DTypeError` if the product cannot be written to `out`."""
    if not (isinstance(out, np.ndarray) or is_device_array(out)):
        raise DTypeError(f"out must be a NumPy or CuPy array, not {type(out).__name__}")
    if tuple(out.shape) != (problem.m, problem.n):
        raise UsageError(
            f"out has shape {tuple(out.shape)}; this product is ({problem.m}, {problem.n})"
        )
    if not np.can_cast(problem.out_dtype, out.dtype, "same_kind"):
        raise DTypeError(
            f"out has dtype {out.dtype}; the product has dtype {problem.out_dtype}, which "
            "does not cast to it"
        )
    if isinstance(out, np.ndarray) and not out.flags.writeable:
        raise UsageError("out is read-only")
    for name, x in (("A", a), ("B", b)):
        if type(x) is type(out) and shares_memory(x, out):
            raise UsageError(f"out overlaps {name}; give it memory of its own")
    if c is not None and type(c) is type(out) and not _same(c, out) and shares_memory(c, out):
        raise UsageError("out overlaps C without being C; give it memory of its own, or C")


def _same(c: Any, out: Any) -> bool:
    """Whether C and `out` are one matrix in one place."""
    if c is out:
        return True
    alike = type(c) is type(out) and c.dtype == out.dtype and c.strides == out.strides
    return alike and c.shape == out.shape and address(c) == address(out)
