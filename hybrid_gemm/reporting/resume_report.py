"""What a run with --resume made, as lines and as plain data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..execution.checks import Checks
from ..execution.result import Result
from ..problem import Problem
from ..verify import Verdict
from . import report
from .console import console


@dataclass(frozen=True)
class ResumedResult:
    """C in `panels` panels of at most `side` rows and columns, of which `found` were finished by
    earlier runs; this one multiplied the others, by `flops` operations in `total_ms`. `last` is
    the last product, None where all were found."""

    c: Any
    problem: Problem
    side: int
    panels: int
    found: int
    flops: int
    total_ms: float
    last: Result | None
    checks: Checks | None = None

    @property
    def gflops(self) -> float:
        """10^9 operations a second, of what this run multiplied."""
        return self.flops / self.total_ms / 1e6 if self.total_ms else 0.0


def result_data(result: ResumedResult, verdict: Verdict | None) -> dict:
    """A result for JSON. Times are in ms, and of this run alone."""
    last = result.last
    return {
        "problem": report.problem_data(result.problem),
        "resume": {
            "panel": result.side, "panels": result.panels, "found": result.found,
            "multiplied": result.panels - result.found,
        },
        "kernel": last and last.variant.name,
        "params": dict(last.variant.params) if last else {},
        "compute": last and last.compute,
        "reduction": last and last.reduction,
        "executor": last and last.executor,
        "checks": result.checks and result.checks.as_data(),
        "total_ms": result.total_ms,
        "gflops": result.gflops,
        "verify": None if verdict is None else verdict.as_data(),
    }  # fmt: skip


def print_result(result: ResumedResult, verdict: Verdict | None, device: str) -> None:
    p, last = result.problem, result.last
    console.print(f"product: {p}, {report.factors(p)}")
    plan = None
    if last:
        kernel = f"kernel: {last.variant}" + (f" ({last.why})" if last.why else "")
        plan = last.plan
        report.print_facts(last, plan, f"device: {device}", kernel)
    console.print(
        f"panels of at most {result.side} x {result.side}: {result.found} found, "
        f"{result.panels - result.found} multiplied"
    )
    report.print_total(result, plan)
    report.print_checks(result.checks)
    report.print_verdict(verdict)
