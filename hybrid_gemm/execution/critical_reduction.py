"""The lab's reduction, for comparison: one worker at a time adds its partial to C in host memory
(lab report, task 2, columns)."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..arrays.caller_arrays import by_rows, cast_into
from ..arrays.on_gpus import copy_into
from ..arrays.operand import Operands
from ..devices.base import Device, Stream
from ..devices.cpu import combine, scale
from ..errors import UsageError


class CriticalReduction:
    """The sum of all workers' partials, which is made in OUT where that may be."""

    def __init__(self, operands: Operands) -> None:
        problem, out = operands.problem, operands.out.array
        if operands.out.home is not None:
            raise UsageError(
                "the critical reduction sums through host memory; give host arrays, "
                "or use the ordered one"
            )
        self.operands, self.dtype = operands, np.dtype(problem.dtype)
        self.in_place = out.dtype == self.dtype and out.flags.c_contiguous
        # The partials' alone, until it is whole: parts times alpha may be Inf of both signs.
        self.wrote = self.in_place and not problem.beta
        self.sum = out if self.wrote else np.empty(out.shape, self.dtype)
        self.sum[...] = 0

    @staticmethod
    def add(device: Device, stream: Stream, total: Any, partial: Any) -> None:
        """In a worker's turn: C up, add, C down."""
        if device.host_memory:
            device.add(total, partial, stream)
        else:
            rows, cols = total.shape
            there = device.empty(rows, cols, total.dtype.name)
            device.copy(there, total, stream)
            device.add(there, partial, stream)
            device.copy(total, there, stream)
        stream.synchronize()

    def end(self) -> None:
        """Makes C of the sum, which is whole."""
        problem, out, made = self.operands.problem, self.operands.out.array, self.sum
        if problem.beta and self.operands.c is not None:
            made = out if self.in_place else np.empty_like(self.sum)
            self.wrote = self.in_place
            copy_into(made, self.operands.c.array)
            self._add_to(made, problem.alpha, problem.beta)
        else:
            scale(made, problem.alpha)
        if made is not out:
            self.wrote = True
            cast_into(out, made)

    def _add_to(self, c: np.ndarray, alpha: float, beta: float) -> None:
        """c = alpha * sum + beta * c."""
        by_rows(c, lambda x: combine(alpha, self.sum[x], beta, c[x], c[x]))
