"""`hybrid-gemm run` by this process alone."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np

from ..arrays.npy_files import NpyWriter
from ..devices import cpu_rates
from ..errors import UsageError
from ..execution.result import Result
from ..host.notes import warn
from ..options import Options
from ..ranks import ending
from ..reporting import report, thread_report
from ..reporting.file_report import Files
from ..runner import Runner
from ..verify import Verdict, growth_of, host_bytes, no_progress, verify
from .inputs import Inputs, check_host_memory, expansion
from .job import Output, Wanted


class Alone:
    """A site of `job.Job`: threads and devices of this process."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.files = Files()

    def open(self, inputs: Inputs, *, resident: bool) -> str:
        problem = inputs.problem
        self.runner = runner = Runner.of(self.options.alone())
        if resident and runner.kind == "cpu":
            warn("resident has no effect: the cpu device multiplies in the host's memory")
        self.problem = inputs.asked(runner.plans.settle(problem))
        self.plan = runner.plan(problem, resident=resident)
        self.variant = runner.variant(self.plan)
        if runner.kind not in self.variant.kernel.runs_on:  # an empty product asks no kernel
            raise UsageError(
                f"kernel {self.variant.name} does not run on the {runner.kind} device; it runs on "
                f"{', '.join(self.variant.kernel.runs_on)}"
            )
        return f"device: {runner.kind} ({runner.note})" if runner.note else ""

    def load(self, inputs: Inputs, verify: str) -> None:
        p, beta = self.problem, self.problem.beta
        shapes = [*inputs.shapes.values(), *expansion(p, p.k, p.n)] if inputs.generated else []
        more = host_bytes(p, verify, p.m, p.n)
        check_host_memory(shapes, np.dtype(p.out_dtype).itemsize, more)
        cpu_rates.watch()
        self.a, self.b = inputs.whole("A"), inputs.whole("B")
        self.c = inputs.whole("C") if beta or not inputs.generated else None

    @contextlib.contextmanager
    def output(self, inputs: Inputs, path: str | None) -> Iterator[Output]:
        if not path:
            yield SimpleNamespace(array=None, commit=lambda: None)
            return
        p, names = self.problem, inputs.request.names
        with ending.naming():
            writer = NpyWriter(path, (p.m, p.n), p.out_dtype, inputs=names)
        try:
            yield writer
        finally:
            writer.abort()  # does nothing after commit

    def run(self, inputs: Inputs, out: Any, wanted: Wanted, progress: Callable) -> Result:
        request = inputs.request
        result = self.runner.run(
            self.a, self.b, self.c, alpha=request.alpha, beta=request.beta,
            trans_a=request.trans_a, trans_b=request.trans_b, out=out, resident=wanted.resident,
            progress=progress(self.problem.flops, "multiplying"),
        )  # fmt: skip
        inputs.check_unchanged()
        return result if self.problem.k else dataclasses.replace(result, problem=self.problem)

    def verify(
        self, inputs: Inputs, result: Result, mode: str, progress: Callable
    ) -> Verdict | None:
        request = inputs.request
        a = self.a.T if request.trans_a else self.a
        b = self.b.T if request.trans_b else self.b
        algorithm, levels = self.options.algorithm, self.options.levels
        tell = no_progress if mode == "off" else progress(1.0, "verifying")
        verdict = verify(
            self.problem, a, b, self.c, result.c, mode=mode, growth=growth_of(algorithm, levels),
            by_three=algorithm == "3m", progress=tell,
        )  # fmt: skip
        inputs.check_unchanged()  # before a verdict on another product, and before C is there
        return verdict

    def shown(self, inputs: Inputs, result: Result) -> dict[str, Any]:
        return {"A": self.a, "B": self.b, "C": result.c}

    def where(self) -> dict[int, str]:
        return {w.index: self.plan.devices[w.device].name for w in self.plan.workers}

    def about_plan(self) -> dict:
        return thread_report.plan_data(
            self.plan, report.real_products(self.problem, self.plan), self.files
        )

    def about_result(self, result: Result, verdict: Verdict | None, totals_ms: list) -> dict:
        data = thread_report.result_data(result, verdict, totals_ms, self.files)
        return data | self.about_device()

    def about_device(self) -> dict:
        """What multiplies, and how, for JSON."""
        runner = self.runner
        name = runner.describe(self.plan)
        return {
            "device": {"kind": runner.kind, "name": name, "why": runner.note},
            "algorithm": report.algorithm_data(self.options),
        }

    def print_plan(self) -> None:
        thread_report.print_plan(self.plan, str(self.variant), self.problem, self.files)

    def print_result(self, result: Result, verdict: Verdict | None) -> None:
        device = self.runner.describe(result.plan)
        thread_report.print_result(result, verdict, device, self.files)
