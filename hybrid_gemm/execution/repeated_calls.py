"""Calls of `gemm` with arrays of the host that lie as those of a call before did.

What decides how they are carried out was looked at then; what may have changed since is looked at
again: where the arrays are, whether they share memory or are page-locked, and whether `out` may be
written.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from ..arrays.operand import CallerArrays, Operand
from ..arrays.strides import address
from ..catalog import Variant
from ..devices.base import Device
from ..errors import shortage_in_words
from ..host.kept import Kept, is_key
from ..planning.plan import Plan
from ..problem import are_numbers
from .kept_programs import Alike, KeptPrograms, alike_of, spans_of

_MOST = 64  # layouts


class _Call(NamedTuple):
    """`alike` is what its run has in common with others, `sizes` the bytes that A, B and C span,
    `locked` whether each is page-locked; `plan` is kept because `alike` has its `id`."""

    alike: Alike
    plan: Plan
    shape: tuple[int, int]
    dtype: np.dtype
    sizes: tuple[int, ...]
    locked: tuple[bool, ...]


class RepeatedCalls:
    """Those that native threads carry out, by the programs that are kept; `device` is one of those
    that multiply."""

    def __init__(self, programs: KeptPrograms, device: Device) -> None:
        self.programs, self.device = programs, device
        self._known: Kept[_Call] = Kept(_MOST)

    @staticmethod
    def key(
        a: np.ndarray, b: np.ndarray, alpha: Any, beta: Any, trans_a: bool | str,
        trans_b: bool | str, out: np.ndarray | None,
    ) -> Hashable | None:  # fmt: skip
        """What calls alike have in common; None where alpha or beta is an array or a tensor, which
        may change."""
        key = (
            a.shape, a.strides, a.dtype, b.shape, b.strides, b.dtype,
            out is None or (out.shape, out.strides, out.dtype),
            alpha, type(alpha), beta, type(beta), trans_a, trans_b, a is b,
        )  # fmt: skip
        return key if are_numbers(alpha, beta) and is_key(key) else None

    def gemm(
        self, key: Hashable, a: np.ndarray, b: np.ndarray, out: np.ndarray | None
    ) -> np.ndarray | None:
        """The product, where such a call is known; None where it is not, and nothing was done."""
        call = self._known.get(key)
        if call is None:
            return None
        try:
            made = np.empty(call.shape, call.dtype) if out is None else out
        except MemoryError:
            return None
        matrices = (a, made) if a is b else (a, b, made)
        starts = [*map(address, matrices)]
        ends = sorted((x, x + size) for x, size in zip(starts, call.sizes, strict=True))
        if (
            any(y[0] < x[1] for x, y in pairwise(ends))
            or not made.flags.writeable
            or call.locked != self._locked(matrices)
        ):
            return None
        with shortage_in_words(call.plan.problem):
            done = self.programs.carry_out(call.alike, starts, made if out is None else None)
        return made if done else None

    def note(
        self, key: Hashable, arrays: CallerArrays, plan: Plan, variant: Variant, made: Any
    ) -> None:
        """Remembers a call without C that native threads carried out, which made `made`."""
        matrices = [*map(Operand.of, (arrays.op_a, arrays.op_b, made))]
        spans = spans_of(matrices)
        alike = alike_of(plan, variant, matrices, spans, self.device)
        if arrays.a is arrays.b:
            del matrices[1], spans[1]
        sizes, locked = tuple(map(len, spans)), self._locked([x.array for x in matrices])
        self._known.put(key, _Call(alike, plan, made.shape, made.dtype, sizes, locked))

    def _locked(self, matrices: Sequence[np.ndarray]) -> tuple[bool, ...]:
        return tuple(self.device.reads(x) for x in matrices)
