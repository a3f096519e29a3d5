"""One `hybrid-gemm run`, between the parsed options and the printing, wherever it multiplies."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np

from ..catalog import Variant
from ..errors import in_words
from ..reporting import chrome_trace, console, environment, report
from ..reporting.file_report import Files
from ..verify import Verdict
from .asked import Wanted
from .help import talk
from .inputs import Inputs, host_memory

PRINTED = 32  # the widest matrix that --print shows


class Output(Protocol):
    """Where C goes: `array` to multiply into, or None; `commit` makes the file appear, whole."""

    array: Any

    def commit(self) -> None: ...


class Site(Protocol):
    """Where a product is made: by this process alone, by this rank among others, or (to plan
    only) elsewhere."""

    plan: Any
    variant: Variant
    files: Files  # that are read and written, for what is expected and said

    def open(self, inputs: Inputs, *, resident: bool) -> str:
        """Finds devices and makes `plan` and `variant`; a note for the user, or ""."""

    def load(self, inputs: Inputs, verify: str) -> None:
        """Reads or makes what this process multiplies, where it and its verification fit."""

    def output(self, inputs: Inputs, path: str | None) -> AbstractContextManager[Output]:
        """A file for C, or none; what was not committed leaves nothing behind."""

    def run(self, inputs: Inputs, out: Any, wanted: Wanted, progress: Callable) -> Any:
        """One product: its `Result`."""

    def verify(
        self, inputs: Inputs, result: Any, mode: str, progress: Callable
    ) -> Verdict | None: ...

    def shown(self, inputs: Inputs, result: Any) -> dict[str, Any]:
        """A, B and C to be printed, of a small product."""

    def where(self) -> dict[int, str]:
        """Each worker's device, for a trace."""

    def about_plan(self) -> dict: ...

    def about_device(self) -> dict: ...

    def about_result(self, result: Any, verdict: Verdict | None, totals_ms: list) -> dict: ...

    def print_plan(self) -> None: ...

    def print_result(self, result: Any, verdict: Verdict | None) -> None: ...


class Job:
    """Opens or generates the input, multiplies, verifies, writes C."""

    def __init__(
        self, inputs: Inputs, wanted: Wanted, site: Site, note: Callable[[str], None]
    ) -> None:
        self.inputs, self.wanted, self.site, self.note = inputs, wanted, site, note
        self.verdict: Verdict | None = None
        self.print: Callable[[], None] = lambda: None
        p = inputs.problem
        size = p.m * p.n * np.dtype(p.out_dtype).itemsize if wanted.output else 0
        request = inputs.request
        names = request.names if p.beta else request.files
        site.files = Files(tuple(names), wanted.output, size)
        if text := site.open(inputs, resident=wanted.resident):
            note(text)

    def plan_only(self) -> dict:
        """The plan as data, without reading or making any input."""
        self.print = self._print_plan
        p, variant = self.inputs.problem, self.site.variant
        return {
            "problem": report.problem_data(p),
            "kernel": variant.name,
            "params": dict(variant.params),
            "plan": self.site.about_plan(),
            "host_memory": host_memory(self.inputs, self.wanted.verify)._asdict(),
            **self.site.about_device(),
        }

    def _print_plan(self) -> None:
        self.site.print_plan()
        found = host_memory(self.inputs, self.wanted.verify)
        if getattr(self.site.plan, "ranks", 1) > 1:  # whose hosts may be others
            console.line(f"A, B and C are {in_words(found.bytes)}, in parts over the ranks")
            return
        fits = {True: "; they fit", False: "; they do not fit", None: ""}[found.fits]
        console.line(
            f"host: A, B and C are {in_words(found.bytes)}, their verification up to "
            f"{in_words(found.verification_bytes)}, and "
            f"{in_words(found.available_bytes)} of memory is available{fits}"
        )

    def run(self, progress: Callable) -> dict:
        """The result as data. `progress(total, what)` makes a call that takes parts of the total
        as they are started, or done."""
        inputs, wanted, site = self.inputs, self.wanted, self.site
        if inputs.generated:
            request = inputs.request
            self.note(f"generating A and B ({request.fill}, seed {request.seed})")
        site.load(inputs, wanted.verify)
        with site.output(inputs, wanted.output) as output:
            results: list[Any] = []
            for _ in range(wanted.repeat):
                if results:  # of their Cs only the newest takes memory
                    results[-1] = dataclasses.replace(results[-1], c=None)
                started = time.perf_counter()
                results.append(site.run(inputs, output.array, wanted, progress))
            self.newest = results[-1]
            self.totals_ms = totals = [result.total_ms for result in results]
            median = statistics.median_low(totals)
            self.result = next(r for r in results if r.total_ms == median)
            self.verdict = site.verify(inputs, self.newest, wanted.verify, progress)
            if self.verdict is None or self.verdict.passed:
                output.commit()
            self._note_files(output, time.perf_counter() - started)
        shown = self._to_show() if wanted.show else {}
        self.print = lambda: self._print(shown)
        data = site.about_result(self.result, self.verdict, totals)
        return data | {"output": wanted.output}

    def _note_files(self, output: Output, seconds: float) -> None:
        """Has the site say what was read and written, so long after the last run's start."""
        written = getattr(output, "written", None)
        self.site.files = dataclasses.replace(
            self.site.files, made=True, written=written,
            reading=getattr(self.result, "reading", None),
            on_disk_ms=written and seconds * 1e3 - written.read_back_ms,
        )  # fmt: skip
        self.site.files.keep()

    def _to_show(self) -> dict[str, Any]:
        p = self.inputs.problem
        if max(p.m, p.n, p.k) > PRINTED:
            self.note(f"{p}; --print shows up to {PRINTED} a side")
            return {}
        return self.site.shown(self.inputs, self.newest)

    def _print(self, shown: dict[str, Any]) -> None:
        for name, matrix in shown.items():
            console.print_matrix(name, matrix)
        self.site.print_result(self.result, self.verdict)
        report.print_repetitions(self.totals_ms, each=talk.verbose)
        if self.wanted.output and (self.verdict is None or self.verdict.passed):
            console.line(f"wrote {self.wanted.output}")

    def write_trace(self) -> None:
        """Writes the timeline of the run that is shown, whole or not at all."""
        if not self.wanted.trace:
            return
        result = self.result
        plan = self.site.plan
        about = {
            "title": f"{self.inputs.problem}, {plan.split}, {' x '.join(map(str, plan.grid))}, "
            f"kernel {result.variant.name}, {result.total_ms:.1f} ms",
            "reduction": result.reduction, "total_ms": result.total_ms,
            "command": environment.command_line(), "environment": environment.environment(),
        }  # fmt: skip
        trace = chrome_trace.chrome(result.timeline, self.site.where(), about)
        console.write(self.wanted.trace, console.as_json(trace))
        self.note(f"wrote {self.wanted.trace}")
