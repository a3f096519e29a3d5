"""Results as tables for people and as plain data for programs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from ..devices import cpu_rates
from ..errors import counted, in_words, time_in_words
from ..execution.result import Result
from ..execution.timeline import PHASES
from ..planning import cost_model
from ..planning.plan import Plan, Strip, Worker
from ..planning.planner import START_MS
from ..problem import Problem
from ..verify import Verdict
from . import file_report, report
from .console import line, milliseconds, table
from .file_report import Files

NO_FILES = Files()
# On a CPU a process's first product takes some 100 ms more, for threads and pages: of less than ten
# times that the time beside the expected one would say how it began.
FIRST_ON_CPU_MS = 1000
NOTHING = (
    "predicted_ms", "unpredicted", "phases_ms", "bound_ms", "bound_by", "bounds_ms", "links",
)  # fmt: skip
MOST_NUMBERS = 4_000_000  # that JSON has of boxes, and of strips
MOST_OF_BOUND = 10  # times the bound: what takes longer has other reasons


def expected(plan: Plan, products: int = 1, files: Files = NO_FILES) -> dict:
    """What the cost model says of so many products by a plan: their time, or why it is
    `unpredicted`; and the bound on any plan's, with what disks take of files.

    On the cpu by rates that are measured there once; of the emulator nothing.
    """
    kind = plan.devices[0].kind
    why = report.unpredicted(plan)
    if not report.has_rates(plan):
        return dict.fromkeys(NOTHING) | {"unpredicted": why}
    if kind == "cpu" and not why:
        rated = cpu_rates.predicted(plan)
        plan, why = (plan, rated) if isinstance(rated, str) else (rated, "")
    bounds, phases = (
        {name: products * ms for name, ms in terms.items()}
        for terms in (cost_model.bound(plan), cost_model.phases(plan))
    )
    bounds |= files.bounds_ms
    links = cost_model.links(plan)
    why = why or files.unknown
    ms = cost_model.with_disk_ms(products * plan.predicted_ms, bounds)
    return {
        "predicted_ms": None if why else ms,
        "unpredicted": why or None,
        "phases_ms": None if why and kind == "cpu" else phases,
        "bound_ms": max(bounds.values(), default=None),
        "bound_by": max(bounds, key=lambda name: bounds[name], default=None),
        "bounds_ms": bounds,
        "links": links and (links.measured or "assumed"),
    }


def _bound_tells(plan: Plan, said: dict, ms: float | None, files: Files) -> bool:
    """Whether a time says something beside the bound: all that may set it is known, and it is of
    the time's order."""
    known = not files.unknown and (plan.resident or said["links"] != "assumed")
    if not known or not said["bound_ms"]:
        return False
    return ms is None or ms <= MOST_OF_BOUND * said["bound_ms"]


def _by_links(plan: Plan, said: dict) -> str:
    measured = said["links"] not in (None, "assumed") and not plan.resident
    return f"; links as measured on {said['links']}" if measured else ""


def _print_expected(plan: Plan, said: dict, files: Files) -> None:
    """What a plan should take, or why that is not known."""
    ms = said["predicted_ms"]
    idle = " on an idle host" if plan.devices[0].kind == "cpu" else ""
    words = [f"about {time_in_words(ms)} expected{idle}"] if ms and ms >= START_MS else []
    if _bound_tells(plan, said, ms, files):
        words.append(f"at least {time_in_words(said['bound_ms'])} by {said['bound_by']}")
    report.print_unpredicted(said["unpredicted"], plan.predicted_ms)
    if words:
        line(f"{', '.join(words)}{_by_links(plan, said)}")


def _print_held(result: Result, said: dict, files: Files) -> None:
    """The measured time beside what was expected, or why nothing was."""
    held, words = held_against(result, said, files), []
    least = FIRST_ON_CPU_MS if result.plan.devices[0].kind == "cpu" else START_MS
    if said["predicted_ms"] and said["predicted_ms"] >= least:
        about = f"(about {time_in_words(said['predicted_ms'])})"
        words.append(f"{held['of_predicted']:.2f} times as long as expected {about}")
    took = (held["of_bound"] or 0) * (said["bound_ms"] or 0)
    if took and _bound_tells(result.plan, said, took, files):
        by = f"{time_in_words(said['bound_ms'])} by {said['bound_by']}"
        words.append(f"{held['of_bound']:.2f} times the bound ({by})")
    report.print_unpredicted(said["unpredicted"], result.plan.predicted_ms)
    if words:
        line(f"{', '.join(words)}{_by_links(result.plan, said)}")


def plan_data(plan: Plan, products: int = 1, files: Files = NO_FILES) -> dict:
    """A plan for JSON, by which so many products are multiplied."""
    strips = sum(times * (5 + len(s.partials)) for s, times in plan.kinds_of_strips)
    boxes = sum(7 * len(w.boxes) for w in plan.workers)
    return {
        "split": plan.split,
        "grid": list(plan.grid),
        "reduce": plan.reduce if plan.summed else "none",
        "devices": [d.name for d in plan.devices],
        "workers": [
            {"worker": w.index, "device": plan.devices[w.device].name,
             "boxes": None if boxes > MOST_NUMBERS else [
                 {"rows": [b.rows.start, b.rows.stop], "cols": [b.cols.start, b.cols.stop],
                  "ks": [b.ks.start, b.ks.stop], "flops": products * b.flops}
                 for b in w.boxes
             ]}
            for w in plan.workers
        ],
        "strips": None if strips > MOST_NUMBERS else [
            {"rows": [s.rows.start, s.rows.stop], "cols": [s.cols.start, s.cols.stop],
             "owner": s.owner, "partials": s.partials}
            for s in plan.strips
        ],
        "bytes_h2d": products * plan.bytes_h2d,
        "bytes_d2h": products * plan.bytes_d2h,
        "bytes_peer": products * plan.bytes_peer,
        "bytes_relayed": products * plan.bytes_relayed,
        "turns": plan.turns,
        "memory_bytes": {
            d.name: plan.memory_bytes(i) for i, d in enumerate(plan.devices)
        },
        **expected(plan, products, files),
    }  # fmt: skip


def _over_workers(plan: Plan) -> str:
    count = len(plan.workers)
    return f"split by {plan.split}, {count} workers" if count > 1 else "one worker"


def _where(plan: Plan, worker: Worker) -> list[str]:
    """The worker's rows, columns and K, each only where the plan cuts it."""
    if not worker.boxes:
        return ["none", "none", "none"] if max(plan.grid) == 1 else [
            "none" if parts > 1 else "" for parts in plan.grid
        ]  # fmt: skip
    first, last = worker.boxes[0], worker.boxes[-1]  # turns go through the whole in order
    spans = [
        f"{x.start}:{y.stop}"
        for x, y in ((first.rows, last.rows), (first.cols, last.cols), (first.ks, last.ks))
    ]
    whole = max(plan.grid) == 1
    return [s if whole or parts > 1 else "" for s, parts in zip(spans, plan.grid, strict=True)]


def _tiles(plan: Plan) -> str:
    most = max(plan.workers, key=lambda w: len(w.boxes))
    count = plan.turns_in_memory
    kept = f", blocks of {count} turns on a device at once" if count else ""
    chunks = len(most.chunks)
    tiles = counted(len(most.boxes) // chunks, "tile")
    return f"{tiles} of C, {counted(chunks, 'chunk')} of K each{kept}"


def _strips(strips: Sequence[tuple[Strip, int]]) -> str:
    """What of C a worker finishes, given the kinds of its strips; where those are many strips, how
    many and how much."""
    count = sum(times for _, times in strips)
    if count == 1:
        return f"{strips[0][0].rows} x {strips[0][0].cols}"
    elements = sum(times * s.elements for s, times in strips)
    return f"{count} strips, {elements} elements" if strips else ""


def _partials(strip: Strip) -> str:
    """The workers whose partials are summed, such as "0+(1+3)+2", where 1 and 3 are added on their
    own GPU before; of many the first and the last."""
    groups = ["+".join(map(str, group)) for group in strip.summands]
    workers = [f"({x})" if "+" in x else x for x in groups]
    shown = workers if len(workers) <= 8 else [*workers[:2], "...", workers[-1]]
    return "+".join(shown)


def _gflop(worker: Worker, products: int) -> str:
    """10^9 operations of a worker in so many products, with decimals where they are few."""
    count = products * worker.flops / 1e9
    return f"{count:.3f}" if count < 1e4 else f"{count:.0f}"


def print_plan(
    plan: Plan, kernel: str, problem: Problem | None = None, files: Files = NO_FILES
) -> None:
    """A plan as a table; `problem` is a complex one, where it is the plan of its real products."""
    p = problem or plan.problem
    line(f"plan: {p}, {report.factors(p)}, {_over_workers(plan)}, kernel {kernel}")
    report.print_real_product(p, plan)
    products = report.real_products(p, plan)
    owned = defaultdict(list)
    if plan.reduce != "critical":  # in which no worker owns a part of C
        for strip, times in plan.kinds_of_strips:
            owned[strip.owner].append((strip, times))
    rows = []
    for w in plan.workers[: report.LISTED]:
        strips = owned[w.index]
        rows.append([
            w.index, plan.devices[w.device].name, *_where(plan, w),
            _gflop(w, products),
            _strips(strips),
            _partials(strips[0][0]) if strips and plan.summed else "",
        ])  # fmt: skip
    table(["worker", "<device", "rows of A", "columns of B", "K", "gflop",
           "finishes C", "<sums partials of"], rows)  # fmt: skip
    report.print_more(len(plan.workers), "workers")
    if plan.reduce == "critical":
        line("one worker at a time adds its partial to C in host memory")
    for i, device in enumerate(plan.devices):
        if need := plan.memory_bytes(i):
            line(f"{device.name}: {in_words(need)} of {in_words(device.memory_bytes)} free")
    moved = {
        "host to device": plan.bytes_h2d, "back": plan.bytes_d2h,
        "of partials between devices": plan.bytes_peer, "relayed": plan.bytes_relayed,
    }  # fmt: skip
    if any(moved.values()):
        words = (f"{in_words(products * size)} {how}" for how, size in moved.items())
        line("moved: " + ", ".join(words))
    if plan.turns > 1:
        line(f"in up to {plan.turns} turns a worker: {_tiles(plan)}")
    _print_expected(plan, expected(plan, products, files), files)


def result_data(
    result: Result, verdict: Verdict | None, totals_ms: Sequence[float], files: Files = NO_FILES
) -> dict:
    """A result for JSON, with its time as a multiple of the expected one and of the bound."""
    products = report.real_products(result.problem, result.plan)
    plan = plan_data(result.plan, products, files)
    data = report.result_data(result, verdict, totals_ms, plan)
    said = expected(result.plan, products, files)
    return data | held_against(result, said, files) | {"files": file_report.data(files)}


def held_against(result: Result, said: dict, files: Files) -> dict:
    """The measured time as a multiple of the expected one and of the bound. Where that is set by
    the disk that takes C, it is the time until all of C was there."""
    took = {"predicted": result.total_ms, "bound": result.total_ms}
    if said["bound_by"] == "disk out" and files.on_disk_ms:
        took["bound"] = files.on_disk_ms
    return {
        f"of_{name}": ms / said[f"{name}_ms"] if said[f"{name}_ms"] else None
        for name, ms in took.items()
    }


def print_result(
    result: Result, verdict: Verdict | None, device: str, files: Files = NO_FILES
) -> None:
    plan, timeline = result.plan, result.timeline
    p = result.problem
    line(f"product: {p}, {report.factors(p)}, {_over_workers(plan)}")
    report.print_real_product(p, plan)
    products = report.real_products(p, plan)
    kernel = f"kernel: {result.variant} ({result.why})"
    report.print_facts(result, plan, f"device: {device}", kernel)
    rows = []
    for w in plan.workers[: report.LISTED]:
        ms = {phase: timeline.worker_ms(w.index, phase) for phase in PHASES}
        flops = products * w.flops
        rate = flops / ms["multiply"] / 1e6 if ms["multiply"] and report.has_rates(plan) else 0
        rows.append([
            w.index, plan.devices[w.device].name, *_where(plan, w),
            *(milliseconds(ms[phase]) for phase in PHASES), f"{rate:.1f}" if rate else "",
        ])  # fmt: skip
    table(["worker", "<device", "rows of A", "columns of B", "K",
           *(f"{phase} ms" for phase in PHASES), "gflop/s"], rows)  # fmt: skip
    report.print_more(len(plan.workers), "workers")
    print_below(result, verdict, expected(plan, products, files), plan.summed, files)


def print_below(
    result: Result, verdict: Verdict | None, said: dict, summed: bool, files: Files = NO_FILES
) -> None:
    """What stands below the table of a result: its time, beside what was `said` of its plan, files,
    checks and the verdict."""
    report.print_sum(result, summed)
    report.print_total(result, result.plan)
    _print_held(result, said, files)
    for text in file_report.lines(files):
        line(text)
    report.print_checks(result.checks)
    report.print_verdict(verdict)
