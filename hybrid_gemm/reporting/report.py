"""What every result says, of threads or of ranks: as plain data, and in lines below its table."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import time_in_words
from ..execution.checks import Checks
from ..options import Options
from ..planning import cost_model
from ..planning.plan import Plan
from ..planning.planner import START_MS
from ..problem import Problem
from ..verify import Verdict
from .console import facts, line


def problem_data(problem: Any) -> dict:
    """A problem for JSON; a complex alpha or beta is a list of its two parts."""
    alpha, beta = (
        [x.real, x.imag] if isinstance(x, complex) else x
        for x in (problem.alpha or 0, problem.beta)
    )
    return {
        "m": problem.m, "n": problem.n, "k": problem.k, "dtype": problem.dtype,
        "out_dtype": problem.out_dtype, "alpha": alpha, "beta": beta,
    }  # fmt: skip


def algorithm_data(options: Options) -> dict:
    """The algorithm for JSON; only Strassen's has levels."""
    levels = {"levels": options.levels} if options.algorithm == "strassen" else {}
    return {"name": options.algorithm, **levels}


def factors(problem: Problem) -> str:
    """alpha and beta in words; those of integers with all digits."""
    pairs = ("alpha", problem.alpha or 0), ("beta", problem.beta)
    return " ".join(f"{name}={x if isinstance(x, int) else f'{x:g}'}" for name, x in pairs)


def result_data(
    result: Any, verdict: Verdict | None, totals_ms: Sequence[float], plan: dict
) -> dict:
    """A `Result` for JSON. Times are in ms; `totals_ms` are those of all
    repetitions, `plan` is its plan as data."""
    timeline = result.timeline
    return {
        "problem": problem_data(result.problem),
        "plan": plan,
        "kernel": result.variant.name if result.variant else None,
        "params": dict(result.variant.params) if result.variant else {},
        "compute": result.compute,
        "reduction": result.reduction,
        "executor": result.executor,
        "timeline": [
            {"worker": a.worker, "phase": a.phase, "start_ms": a.start_ms, "stop_ms": a.stop_ms,
             "bytes": a.bytes, "flops": a.flops}
            for a in timeline
        ],
        "multiply_ms": timeline.multiply_ms,
        "multiply_and_sum_ms": timeline.multiply_and_sum_ms,
        "total_ms": result.total_ms,
        "totals_ms": list(totals_ms),
        "gflops": result.gflops,
        "checks": result.checks and result.checks.as_data(),
        "verify": None if verdict is None else verdict.as_data(),
    }  # fmt: skip


def print_facts(result: Any, plan: Plan, *more: str) -> None:
    """Says by what a product was computed; on GPUs also who started what they did,
    which is native threads where it can be."""
    started = [f"executor: {result.executor}"] if plan.devices[0].on_gpu else []
    facts(*more, f"compute: {result.compute}", f"reduction: {result.reduction}", *started)


def real_products(problem: Problem, plan: Plan) -> int:
    """How many products by its plan a problem is multiplied as: three of a complex one by 3m."""
    same = (plan.problem.n, plan.problem.k) == (problem.n, problem.k) != (0, 0)
    return 3 if problem.is_complex and same else 1


def print_real_product(problem: Problem, plan: Plan) -> None:
    """Says of a complex problem as which products the lines below have it."""
    if real_products(problem, plan) > 1:
        line(f"multiplied as three real products {plan.problem}, one after the other")
    elif problem.is_complex:
        line(
            f"multiplied as the real product {plan.problem}: columns and K below count real "
            "numbers, two of which are a complex one"
        )


LISTED = 64  # workers or ranks that a table shows


def print_more(count: int, what: str) -> None:
    """Says how many workers or ranks the table above leaves out."""
    if count > LISTED:
        line(f"... and {count - LISTED} {what} more (--json has them all)")


def print_sum(result: Any, summed: bool) -> None:
    """What summing partials took beside multiplying."""
    if not summed:
        return
    timeline = result.timeline
    both, alone = timeline.multiply_and_sum_ms, timeline.multiply_ms
    ratio = f" ({both / alone:.3f} of multiply alone)" if alone else ""
    line(f"multiply {time_in_words(alone)}, multiply and sum {time_in_words(both)}{ratio}")


OF_EMULATOR = "the emulator's times are those of a kernel's text on the CPU, and not of a GPU"


def unpredicted(plan: Plan) -> str:
    """Why the predicted time of a plan is not known to hold; "" where it is."""
    return cost_model.unknown(plan) if has_rates(plan) else OF_EMULATOR


def print_total(result: Any, plan: Plan | None) -> None:
    """The time of a result, and its rate where that tells anything."""
    rate = result.gflops
    words = f", {rate:{'.1f' if rate >= 1 else '.2g'}} GFLOP/s" if has_rates(plan) else ""
    line(f"total {time_in_words(result.total_ms)}{words}")


def has_rates(plan: Plan | None) -> bool:
    """Whether operations over time tell anything: a device's speed, and not that of emulation."""
    return plan is not None and plan.devices[0].kind != "emulator"


def print_unpredicted(why: str | None, about_ms: float) -> None:
    """Says why there is no predicted time of what should take about so long; of less than a start
    there is none anyway."""
    if why and about_ms >= START_MS:
        line(f"no predicted time to compare with: {why}")


def print_repetitions(totals_ms: Sequence[float], each: bool) -> None:
    """What repeated runs took: in a line, and with `each` every one of them."""
    if len(totals_ms) < 2:
        return
    median, low, high = statistics.median(totals_ms), min(totals_ms), max(totals_ms)
    spread = f", spread {100 * (high - low) / median:.1f} % of the median" if median else ""
    line(
        f"{len(totals_ms)} runs: median {time_in_words(median)}, minimum {time_in_words(low)}, "
        f"maximum {time_in_words(high)}{spread}"
    )
    if each:
        line(f"in order: {', '.join(map(time_in_words, totals_ms))}", indent=4, first=0)


def print_checks(checks: Checks | None) -> None:
    """What `--checked` came to, with what was wrong."""
    if checks is None:
        return
    line(f"checks: {checks}")
    for fault in checks.faults:
        line(str(fault), indent=4, first=4)


def print_verdict(verdict: Verdict | None) -> None:
    if verdict is None:
        line("verification off")
    else:
        line(f"verification {verdict}; it took {time_in_words(verdict.time_ms)}")


def note(row: Mapping[str, Any]) -> str:
    """The note of a measured row, without the kernel's name where the row has that already."""
    return (row.get("note") or "").removeprefix(f"kernel {row.get('kernel')} ")
