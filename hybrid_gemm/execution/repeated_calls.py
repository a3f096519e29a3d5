"""A call of `gemm` with arrays of the host that native threads carried out, made again with others
that lie alike.

What decides how it is carried out was looked at then; what may have changed since is looked at
again: where the arrays are, whether they share memory or are page-locked, and whether `out` may be
written.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from ..arrays.operand import CallerArrays, Operand
from ..arrays.strides import address
from ..catalog import Variant
from ..devices.base import Device
from ..errors import shortage_in_words
from ..planning.plan import Plan
from .kept_programs import KeptPrograms, alike_of, spans_of


class RepeatedCall:
    """The call without C that made `made`, by a program that is kept; `device` is one of those that
    multiply."""

    def __init__(
        self, programs: KeptPrograms, device: Device, arrays: CallerArrays, plan: Plan,
        variant: Variant, made: np.ndarray,
    ) -> None:  # fmt: skip
        self._programs, self._device = programs, device
        self._plan = plan  # so that no other has its `id`, which is in `alike`
        self._shape, self._dtype, self._square = made.shape, made.dtype, arrays.a is arrays.b
        matrices = [*map(Operand.of, (arrays.op_a, arrays.op_b, made))]
        spans = spans_of(matrices)
        self._alike = alike_of(plan, variant, matrices, spans, device)
        if self._square:
            del matrices[1], spans[1]
        self._sizes = tuple(map(len, spans))
        self._locked = self._read_directly([x.array for x in matrices])

    def made(self, a: np.ndarray, b: np.ndarray, out: np.ndarray | None) -> np.ndarray | None:
        """The product; None where something has changed, and nothing was done."""
        if (a is b) != self._square:
            return None
        try:
            made = np.empty(self._shape, self._dtype) if out is None else out
        except MemoryError:
            return None
        matrices = (a, made) if a is b else (a, b, made)
        starts = [*map(address, matrices)]
        ends = sorted((x, x + size) for x, size in zip(starts, self._sizes, strict=True))
        if (
            any(y[0] < x[1] for x, y in pairwise(ends))
            or not made.flags.writeable
            or self._locked != self._read_directly(matrices)
        ):
            return None
        with shortage_in_words(self._plan.problem):
            fresh = made if out is None else None
            done = self._programs.carry_out(self._alike, starts, fresh)
        return made if done else None

    def _read_directly(self, matrices: Sequence[np.ndarray]) -> tuple[bool, ...]:
        return tuple(self._device.reads(x) for x in matrices)
