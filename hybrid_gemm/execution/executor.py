"""What executors of one process offer: a single GPU, and threads over several devices."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from ..arrays.operand import Operands
from ..catalog import Variant
from ..planning.plan import Plan
from .checks import Checks
from .read_ahead import Reading
from .timeline import Timeline

INCOMPLETE = "out is incomplete: it was being written when this error came"  # a note of errors


@dataclass(frozen=True)
class Execution:
    """What an executor did: C is in the operands' `out`. `total_ms` is the host's time for what
    the clock covered, and `plan` what was followed in the end, where memory was shorter than it
    was said to be. `compute` and `reduction` say in words what was computed and how partial C
    were summed, `executor` who carried it out: "native", or "python" and why; `checks` what was
    checked, `reading` what was read ahead of mapped files, if there were any."""

    timeline: Timeline
    total_ms: float
    plan: Plan | None = None
    compute: str = ""
    reduction: str = "none"
    executor: str = "python"
    checks: Checks | None = None
    reading: Reading | None = None


class Executor(Protocol):
    """Carries out one product whose plan and kernel are known. Returns when C is finished, or
    raises the first error of any part, with nothing still at work in the operands. Kernels are
    compiled before the clock runs; where nobody asks for the time, not `timed`, they are compiled
    while operands are brought."""

    def execute(
        self, plan: Plan, variant: Variant, operands: Operands, *, resident: bool = False,
        progress: Callable[[int], None] | None = None, timed: bool = True,
    ) -> Execution: ...  # fmt: skip
