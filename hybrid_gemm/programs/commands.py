"""Commands of programs for one GPU: checks of what may differ from call to call, copies and casts.
The slots are each one's last argument; `partial` gives it the others."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ..arrays.caller_arrays import shares_memory
from ..arrays.other_libraries import TORCH
from ..arrays.stacks import Stacks
from ..arrays.strides import Reach, reach
from ..execution.checked_device import CheckedDevice
from .program import OUT, A, B, Call, Make, Unfit


def looks_at(call: Call) -> dict[int, Reach | None]:
    """The slots of A, B and a C that is read and another array, and of OUT, in none of which OUT
    may be; with their reaches, or none where one is of the host."""
    added = call.c if call.beta and call.c is not call.out else None
    arrays = [x for x in enumerate((call.a, call.b, added, call.out)) if x[1] is not None]
    tell = not any(type(x) is np.ndarray for _i, x in arrays)
    return {i: reach(x.shape, x.strides, x.itemsize) if tell else None for i, x in arrays}


def apart(looked_at: Mapping[int, Reach | None], slots: list[Any]) -> None:
    """Checks that OUT has no byte in common with others that are `looks_at`."""
    out, of_out = slots[OUT], looked_at[OUT]
    for i, of in looked_at.items():
        x = slots[i]
        if i == OUT or (of and of_out and not of.meets(x.data.ptr, of_out, out.data.ptr)):
            continue
        if shares_memory(x, out):
            raise Unfit


def put(
    checked: CheckedDevice | None, of: int, to: int, make: Make, slots: list[Any]
) -> None:  # fmt: skip
    """A slot's array, made where there is none, becomes C; which is checked where products are."""
    if slots[to] is None:
        array, shape, dtype = make
        slots[to] = array(shape, dtype)
    if checked:
        checked.put(slots[to], slots[of])
    else:
        slots[to][...] = slots[of]


def not_captured(current: Callable[[], Any], lent: bool, _slots: list[Any]) -> None:
    """Checks that no graph records what the current stream is given: a product is waited for, or
    copies are made whose memory would be another array's when the graph runs, unless it is `lent`
    by PyTorch, whose graphs keep it."""
    if current().is_capturing() and not (lent and TORCH.lends):
        raise Unfit


def as_stacks(make: Make, slots: list[Any]) -> None:
    """A, B and OUT, made where there is none, as stacks of matrices that are alike, or as matrices
    where they lie as such; the last slot has OUT as it was."""
    if slots[OUT] is None:
        array, shape, dtype = make
        slots[OUT] = array(shape, dtype)
    made = Stacks.of(slots[A], slots[B], slots[OUT])
    slots[-1] = slots[OUT]
    slots[A], slots[B], slots[OUT] = made.joined() or (made.a, made.b, made.c)


def whole(slots: list[Any]) -> None:
    """OUT as it was before `as_stacks`."""
    slots[OUT] = slots[-1]
