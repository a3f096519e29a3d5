"""Plans and results over MPI ranks, as tables and as JSON."""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import counted, in_words, time_in_words
from ..execution.result import Result
from ..execution.timeline import PHASES
from ..planning.partition import Span
from ..problem import Problem
from ..ranks.rank_plan import RankPlan
from ..verify import Verdict
from . import console, report, thread_report

OF_HOSTS = "the rates of the ranks' hosts are not known"
NOTHING = dict.fromkeys(thread_report.NOTHING)
Places = Sequence[tuple[str, str]]


def plan_data(plan: RankPlan) -> dict:
    def span(x: Span) -> list[int]:
        return [x.start, x.stop]

    ranks = []
    for rank in range(plan.ranks):
        box, strip = plan.box(rank), plan.strip(rank)
        ranks.append({
            "rank": rank,
            "box": box and {"rows": span(box.rows), "cols": span(box.cols), "ks": span(box.ks)},
            "strip": strip and {"rows": span(strip.rows), "cols": span(strip.cols)},
            "flops": plan.flops(rank),
            "bytes_input": plan.bytes_input(rank), "bytes_sent": plan.bytes_sent(rank),
            "bytes_received": plan.bytes_received(rank), "bytes_kept": plan.memory_bytes(rank),
        })  # fmt: skip
    return {
        "split": plan.split, "grid": list(plan.grid), "ranks": ranks,
        "threads": plan.threads, "rounds": plan.rounds, **_expected(plan),
    }  # fmt: skip


def _expected(plan: RankPlan) -> dict:
    """The predicted time, or why it is not known to hold: the rates of the hosts of a job never
    are."""
    why = OF_HOSTS if plan.devices[0].kind == "cpu" else report.unpredicted(plan)
    return {"predicted_ms": None if why else plan.predicted_ms, "unpredicted": why or None}


def _where(plan: RankPlan, rank: int) -> list[str]:
    box, strip = plan.box(rank), plan.strip(rank)
    if box is None:
        return ["nothing to do", "", "", ""]
    own = f"{strip.rows} x {strip.cols}" if strip else ""
    return [str(box.rows), str(box.cols), str(box.ks), own]


def _listed(plan: RankPlan) -> range:
    return range(min(plan.ranks, report.LISTED))


def _print_head(plan: RankPlan, p: Problem, what: str) -> None:
    grid = " x ".join(map(str, plan.grid))
    console.line(
        f"{what}: {p}, {report.factors(p)}, split by {plan.split} over {plan.who}, grid {grid}"
        + (f", C in {counted(plan.rounds, 'round')}" if plan.grid[2] > 1 else "")
    )


def print_plan(plan: RankPlan, kernel: str, problem: Problem, places: Places) -> None:
    """The plan over ranks for a problem as a table; `places` are (host, device) by rank."""
    _print_head(plan, problem, "plan")
    console.line(f"kernel: {kernel}   each rank: {places[0][1]}")
    rows = [
        [rank, *_where(plan, rank), in_words(plan.bytes_input(rank)),
         in_words(plan.bytes_sent(rank)), in_words(plan.memory_bytes(rank))]
        for rank in _listed(plan)
    ]  # fmt: skip
    console.table(["rank", "rows of A", "columns of B", "K", "finishes C", "reads", "sends",
                  "keeps"], rows)  # fmt: skip
    report.print_more(plan.ranks, "ranks")
    ms = _expected(plan)["predicted_ms"]
    sent = [plan.bytes_sent(rank) for rank in range(plan.ranks)]
    kept = [plan.memory_bytes(rank) for rank in range(plan.ranks)]
    console.line(
        f"a rank sends up to {in_words(max(sent))} and keeps up to {in_words(max(kept))}; "
        f"all send {in_words(sum(sent))}"
        + (f"; about {time_in_words(ms)} expected" if ms is not None else "")
    )


def result_data(
    result: Result, plan: RankPlan, verdict: Verdict | None, totals_ms: Sequence[float]
) -> dict:
    """A result over ranks for JSON; `multiplying_since` is in seconds of the Unix clock."""
    data = report.result_data(result, verdict, totals_ms, plan_data(plan))
    held = thread_report.held_against(result, NOTHING | _expected(plan), thread_report.NO_FILES)
    return data | {"multiplying_since": result.since, "of_predicted": held["of_predicted"]}


def print_result(
    result: Result, plan: RankPlan, verdict: Verdict | None, places: Places
) -> None:  # fmt: skip
    """A result over ranks as a table, with its times and its verdict below."""
    timeline = result.timeline
    _print_head(plan, result.problem, "product")
    report.print_facts(result, plan, f"kernel: {result.variant or 'none'}")
    rows = []
    for rank in _listed(plan):
        mine = [a for a in timeline if a.worker // plan.threads == rank]
        ms = {phase: sum(a.ms for a in mine if a.phase == phase) for phase in PHASES}
        rows.append([
            rank, *places[rank], *_where(plan, rank),
            *(console.milliseconds(ms[phase]) for phase in PHASES), in_words(plan.bytes_sent(rank)),
        ])  # fmt: skip
    console.table(["rank", "<host", "<device", "rows of A", "columns of B", "K", "finishes C",
                  *(f"{phase} ms" for phase in PHASES), "sent"], rows)  # fmt: skip
    report.print_more(plan.ranks, "ranks")
    said = NOTHING | _expected(plan)
    if said["unpredicted"] == OF_HOSTS:
        said["unpredicted"] = None  # as of all jobs without GPUs
    thread_report.print_below(result, verdict, said, plan.grid[2] > 1)
