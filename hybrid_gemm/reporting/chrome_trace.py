"""A timeline as a trace that Chrome (chrome://tracing) and Perfetto (ui.perfetto.dev) open. Pure.

A process of the trace is a device; a thread is one phase of one worker, because phases overlap.
Times come from the devices' own events, in microseconds from the start of the run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ..execution.timeline import PHASES, Activity
from .pictures import machine, machines

CLOCK_MS = 1e-4  # no device's clock is so fine: no rate follows from a shorter time


def chrome(
    timeline: Iterable[Activity], places: Mapping[int, str], about: Mapping[str, Any]
) -> dict[str, Any]:
    """The trace as plain data, in the trace event format.

    `places` names the device of each worker; `about` is kept with the trace. An event has its
    bytes and flops, and rates in GB/s and GFLOP/s.
    """
    pids = {place: pid for pid, place in enumerate(dict.fromkeys(places.values()))}
    events: list[dict[str, Any]] = []
    ends: dict[tuple[int, str, int], float] = {}  # of each worker, phase and lane, in ms
    for a in sorted(timeline, key=lambda a: (a.start_ms, a.stop_ms)):
        lane = 0  # the first in which nothing of this phase still runs
        while ends.get((a.worker, a.phase, lane), a.start_ms) > a.start_ms:
            lane += 1
        ends[a.worker, a.phase, lane] = a.stop_ms
        args: dict[str, float] = {"worker": a.worker, "bytes": a.bytes, "flops": a.flops}
        if a.ms > CLOCK_MS:
            args |= {"gbps": a.bytes / a.ms / 1e6} if a.bytes else {}
            args |= {"gflops": a.flops / a.ms / 1e6} if a.flops else {}
        events.append({
            "name": a.phase, "cat": a.phase, "ph": "X", "ts": 1e3 * a.start_ms,
            "dur": 1e3 * a.ms, "pid": pids[places[a.worker]], "tid": _tid(a, lane), "args": args,
        })  # fmt: skip
    named = [_meta("process_name", pid, 0, name=place) for place, pid in pids.items()]
    for worker, phase, lane in sorted(ends, key=lambda x: (x[0], PHASES.index(x[1]), x[2])):
        a = Activity(worker, phase, 0, 0)
        name = f"worker {worker} {phase}" + (f" {lane}" if lane else "")
        where = pids[places[worker]], _tid(a, lane)
        named.append(_meta("thread_name", *where, name=name))
        named.append(_meta("thread_sort_index", *where, sort_index=where[1]))
    return {"traceEvents": named + events, "displayTimeUnit": "ms", "otherData": about}


def _tid(a: Activity, lane: int) -> int:
    """The trace's thread of an activity: one for each worker, phase and lane."""
    return 1000 * a.worker + 100 * PHASES.index(a.phase) + min(lane, 99)


def _meta(kind: str, pid: int, tid: int, **args: str | int) -> dict[str, Any]:
    """An event that names or orders a process or thread."""
    return {"name": kind, "ph": "M", "pid": pid, "tid": tid, "args": args}


# --- its picture --------------------------------------------------------------------------


@dataclass(frozen=True)
class Gantt:
    """Who did what when: for each worker its phases, each a list of (start, length) in ms."""

    rows: Mapping[str, Mapping[str, list[tuple[float, float]]]]
    title: str = ""

    @property
    def phases(self) -> list[str]:
        """The phases that some worker has, in their order in a run."""
        return [p for p in PHASES if any(row.get(p) for row in self.rows.values())]

    @property
    def empty(self) -> bool:
        """Whether nothing took any time."""
        bars = (bar for row in self.rows.values() for each in row.values() for bar in each)
        return not any(length for _start, length in bars)


def gantt(data: Mapping[str, Any]) -> Gantt:
    """The picture of a trace file's data."""
    events = data["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    rows: dict[tuple[int, int], dict[str, list]] = {}
    for e in events:
        if e["ph"] == "X":
            row = rows.setdefault((e["pid"], e["args"]["worker"]), {})
            row.setdefault(e["name"], []).append((e["ts"] / 1e3, e["dur"] / 1e3))
    alone = len({pid for pid, _worker in rows}) == len(rows)
    labels = {
        (pid, worker): names[pid] if alone else f"{names[pid]}, worker {worker}"
        for pid, worker in sorted(rows)
    }
    about = data["otherData"]
    gpus = about.get("environment", {}).get("cuda", {}).get("gpus", [])
    title = about.get("title", "")
    if gpus and any(name.startswith("cuda") for name in names.values()):
        title += ", " + machines(len(names), machine(f"cuda {gpus[0]['name']}"))
    return Gantt({labels[x]: rows[x] for x in sorted(rows)}, title)
