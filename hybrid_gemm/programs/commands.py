"""Commands of programs for one GPU: checks of what may differ from call to call, copies and casts.
The slots are each one's last argument; `partial` gives it the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..arrays.caller_arrays import broadcast_c, shares_memory
from ..arrays.complex_numbers import RealProduct
from ..arrays.on_gpus import copied, moved, on_gpu_of
from ..arrays.other_libraries import TORCH
from ..arrays.strides import Reach
from ..execution.checked_device import CheckedDevice
from ..problem import Problem
from .launch import Reaches, backwards, reach_of
from .program import OUT, A, B, C, Call, Command, Make, Unfit


def _meet(reaches: Sequence[Reach | None], x: int, y: int, slots: list[Any]) -> bool:
    """Whether two arrays may have a byte in common."""
    of, other = reaches[x], reaches[y]
    return bool(of and other and of.meets(slots[x].data.ptr, other, slots[y].data.ptr))


def apart(reaches: Reaches, put: bool, slots: list[Any]) -> None:
    """Checks that OUT has no byte in common with A and B and, if C is `put` there, with C."""
    lies = *reaches[:2], None, reaches[2]
    if _meet(lies, A, OUT, slots) or _meet(lies, B, OUT, slots):
        raise Unfit
    if put and shares_memory(slots[C], slots[OUT]):
        raise Unfit


def alone(call: Call) -> Command:
    """Checks that OUT, where it is given, has no byte in common with A, B and another C."""
    of_gpus = [x is not None and not isinstance(x, np.ndarray) for x in call.arrays]
    pairs = list(zip(call.arrays, of_gpus, strict=True))
    plain = not backwards(*(x for x, yes in pairs if yes))
    reaches = [reach_of(x) if yes and plain else None for x, yes in pairs]

    def check(slots: list[Any]) -> None:
        out = slots[OUT]
        for i in (A, B, C) if out is not None else ():
            if not of_gpus[i] or (plain and not _meet(reaches, i, OUT, slots)):
                continue
            if not (i == C and slots[C] is out) and shares_memory(slots[i], out):
                raise Unfit

    return check


def new(make: Make, slots: list[Any]) -> None:
    """OUT is a new array of the current pool."""
    array, shape, dtype = make
    slots[OUT] = array(shape, dtype)


def put(checked: CheckedDevice | None, slots: list[Any]) -> None:
    """OUT[...] = C, which is checked where products are."""
    if checked:
        checked.put(slots[OUT], slots[C])
    else:
        slots[OUT][...] = slots[C]


def not_captured(current: Callable[[], Any], lent: bool, _slots: list[Any]) -> None:
    """Checks that no graph records what the current stream is given: a product is waited for, or
    copies are made whose memory would be another array's when the graph runs, unless it is `lent`
    by PyTorch, whose graphs keep it."""
    if current().is_capturing() and not (lent and TORCH.lends):
        raise Unfit


def convert(of: int, to: int, dtype: str, turned: bool, slots: list[Any]) -> None:
    """A copy of an operand in another slot, of a dtype, without gaps, by rows or `turned`."""
    x = slots[of]
    slots[to] = copied(x.T, dtype).T if turned else copied(x, dtype)


def give(made: int, dtype: str, slots: list[Any]) -> None:
    """What was made aside, as the caller gets it: of a dtype, and in OUT, if that was given."""
    x, out = slots[made], slots[OUT]
    if x is out:
        return
    if out is None or out.dtype != dtype or out.dtype.kind not in "fiuc":
        x = x.astype(dtype, copy=False)  # otherwise the copy to OUT casts
    if out is None:
        slots[OUT] = x
    else:
        out[...] = x


def as_real(problem: Problem, trans: tuple[bool, bool], at: int, slots: list[Any]) -> None:
    """A complex product's real one (`arrays/complex_numbers.py`), in the five slots from `at` on:
    A, B, C, OUT, and OUT as complex numbers."""
    a, b, c, out = slots[:4]
    a, b = (x.T if yes else x for x, yes in zip((a, b), trans, strict=True))
    if c is not None:
        c = broadcast_c(c, problem.m, problem.n)
    real = RealProduct.of(problem, a, b, c, out)
    slots[at : at + 5] = real.a, real.b, real.c, real.out, real.made


def move(cp: Any, ordinal: int, moves: Sequence[tuple[int, int]], slots: list[Any]) -> None:
    """Arrays in some slots, copied to a GPU where they lie elsewhere: on another one, or on the
    host."""
    for of, to in moves:
        x = slots[of]
        if isinstance(x, np.ndarray):
            slots[to] = cp.asarray(x)
        else:
            slots[to] = x if x is None or x.data.device_id == ordinal else moved(x, ordinal)


def move_back(made: int, slots: list[Any]) -> None:
    """The product in a slot, copied to OUT, or where A lies, if that is a GPU."""
    x, out = slots[made], slots[OUT]
    like = slots[A] if out is None else out
    home = (x if isinstance(like, np.ndarray) else like).data.device_id
    x = x if x.data.device_id == home else moved(x, home)
    if out is None:
        slots[OUT] = x
    elif out is not x:
        with on_gpu_of(out):
            out[...] = x
