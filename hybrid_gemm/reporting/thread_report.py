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


def expected(plan: Plan, products: int = 1, files: Files = NO_FILES) -> dict:
    """What the cost model says of so many products by a plan: their time, and the bound on any
    plan's, with what disks take of files.

    On the cpu by rates that are measured there once, and nothing where they cannot be; on the
    emulator nothing is expected, since its time depends on each kernel's text.
    """
    kind = plan.devices[0].kind
    rated = cpu_rates.predicted(plan) if kind == "cpu" else plan
    if rated is None or kind == "emulator":
        return dict.fromkeys(("predicted_ms", "phases_ms", "bound_ms", "bound_by", "bounds_ms",
                              "links"))  # fmt: skip
    plan = rated
    bounds, phases = (
        {name: products * ms for name, ms in terms.items()}
        for terms in (cost_model.bound(plan), cost_model.phases(plan))
    )
    bounds |= files.bounds_ms
    links = cost_model.links(plan)
    return {
        "predicted_ms": cost_model.with_disk_ms(products * plan.predicted_ms, bounds),
        "phases_ms": phases,
        "bound_ms": max(bounds.values(), default=None),
        "bound_by": max(bounds, key=lambda name: bounds[name], default=None),
        "bounds_ms": bounds,
        "links": links and (links.measured or "assumed"),
    }


def _words(plan: Plan, said: dict, files: Files, besides: str = "") -> str:
    """What `expected` said, in words."""
    bound = ""
    if said["bound_ms"]:
        bound = f", at least {time_in_words(said['bound_ms'])} by {said['bound_by']}"
    links = ""
    if plan.devices[0].on_gpu and not plan.resident:
        links = f"; links as measured on {said['links']}"
        if said["links"] == "assumed":
            links = "; links assumed (measure them: hybrid-gemm tune --links)"
    about = f"about {time_in_words(said['predicted_ms'])} expected{besides}"
    return f"{about}{bound}{links}{files.words}"


def plan_data(plan: Plan, products: int = 1, files: Files = NO_FILES) -> dict:
    """A plan for JSON, by which so many products are multiplied."""
    return {
        "split": plan.split,
        "grid": list(plan.grid),
        "reduce": plan.reduce if plan.summed else "none",
        "devices": [d.name for d in plan.devices],
        "workers": [
            {
                "worker": w.index,
                "device": plan.devices[w.device].name,
                "boxes": [
                    {"rows": [b.rows.start, b.rows.stop], "cols": [b.cols.start, b.cols.stop],
                     "ks": [b.ks.start, b.ks.stop], "flops": products * b.flops}
                    for b in w.boxes
                ],
            }
            for w in plan.workers
        ],
        "strips": [
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
    tiles, chunks = counted(len(most.tiles), "tile"), counted(len(most.tiles[0]), "chunk")
    return f"{tiles} of C, {chunks} of K each{kept}"


def _strips(strips: Sequence[Strip]) -> str:
    """What of C a worker finishes; where that is many strips, how many and how much."""
    if len(strips) == 1:
        return f"{strips[0].rows} x {strips[0].cols}"
    count = sum(s.elements for s in strips)
    return f"{len(strips)} strips, {count} elements" if strips else ""


def _partials(strip: Strip) -> str:
    """The workers whose partials are summed, such as "0+(1+3)+2", where 1 and 3 are added on their
    own GPU before; of many the first and the last."""
    groups = ["+".join(map(str, group)) for group in strip.summands]
    workers = [f"({x})" if "+" in x else x for x in groups]
    shown = workers if len(workers) <= 8 else [*workers[:2], "...", workers[-1]]
    return "+".join(shown)


def _gflop(worker: Worker, products: int) -> str:
    """10^9 operations of a worker in so many products, with decimals where they are few."""
    count = products * sum(b.flops for b in worker.boxes) / 1e9
    return f"{count:.3f}" if count < 1e4 else f"{count:.0f}"


def print_plan(
    plan: Plan, kernel: str, problem: Problem | None = None, files: Files = NO_FILES
) -> None:
    """A plan as a table; `problem` is a complex one, where it is the plan of its real products."""
    p = problem or plan.problem
    line(
        f"plan: {p}, {report.factors(p)}, split by {plan.split}, "
        f"{counted(len(plan.workers), 'worker')}, kernel {kernel}"
    )
    report.print_real_product(p, plan)
    products = report.real_products(p, plan)
    owned = defaultdict(list)
    if plan.reduce != "critical":  # in which no worker owns a part of C
        for strip in plan.strips:
            owned[strip.owner].append(strip)
    rows = []
    for w in plan.workers[: report.LISTED]:
        strips = owned[w.index]
        rows.append([
            w.index, plan.devices[w.device].name, *_where(plan, w),
            _gflop(w, products),
            _strips(strips),
            _partials(strips[0]) if strips and plan.summed else "",
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
    if (said := expected(plan, products, files))["predicted_ms"]:
        line(_words(plan, said, files))


def result_data(
    result: Result, verdict: Verdict | None, totals_ms: Sequence[float], files: Files = NO_FILES
) -> dict:
    """A result for JSON, with its time as a multiple of the expected one and of the bound."""
    products = report.real_products(result.problem, result.plan)
    plan = plan_data(result.plan, products, files)
    data = report.result_data(result, verdict, totals_ms, plan)
    said = expected(result.plan, products, files)
    return data | _held_against(result, said, files) | {"files": file_report.data(files)}


def _held_against(result: Result, said: dict, files: Files) -> dict:
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
    line(f"{p}, {report.factors(p)}, split by {plan.split}")
    report.print_real_product(p, plan)
    products = report.real_products(p, plan)
    kernel = f"kernel: {result.variant} ({result.why})"
    report.print_facts(result, plan, f"device: {device}", kernel)
    rows = []
    for w in plan.workers[: report.LISTED]:
        ms = {phase: timeline.worker_ms(w.index, phase) for phase in PHASES}
        flops = products * sum(b.flops for b in w.boxes)
        rate = flops / ms["multiply"] / 1e6 if ms["multiply"] else 0
        rows.append([
            w.index, plan.devices[w.device].name, *_where(plan, w),
            *(milliseconds(ms[phase]) for phase in PHASES), f"{rate:.1f}" if rate else "",
        ])  # fmt: skip
    table(["worker", "<device", "rows of A", "columns of B", "K",
           *(f"{phase} ms" for phase in PHASES), "gflop/s"], rows)  # fmt: skip
    report.print_more(len(plan.workers), "workers")
    report.print_sum(result, plan.summed)
    said = expected(plan, products, files)
    held = _held_against(result, said, files)
    report.print_total(result)
    words = {"of_predicted": "as long as expected", "of_bound": "the bound"}
    times = [f"{held[x]:.2f} times {word}" for x, word in words.items() if held[x]]
    if said["predicted_ms"] and said["predicted_ms"] < START_MS:
        line(_words(plan, said, files, ", the start not counted"))
    elif said["predicted_ms"] and times:
        line(f"{', '.join(times)} ({_words(plan, said, files)})")
    for text in file_report.lines(files):
        line(text)
    report.print_checks(result.checks)
    report.print_verdict(verdict)
