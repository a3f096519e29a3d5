"""`hybrid-gemm run --resume`: C in panels, each a product of its own that is kept once finished."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from ..arrays.unfinished import Unfinished
from ..errors import UsageError
from ..execution.checks import Checks
from ..options import CHOICES, PANEL_SIDE, Options
from ..planning.partition import Span
from ..planning.plan import Plan
from ..reporting import resume_report
from ..reporting.environment import environment
from ..reporting.resume_report import ResumedResult
from ..runner import Result
from ..verify import Verdict
from .alone import Alone
from .inputs import Inputs
from .job import Output, Wanted

# Options that are no facts of their own: where they matter, devices and plans say it.
_SEEN_ELSEWHERE = ("device", "gpus", "max_device_memory")
_VARIABLES = ("HYBRID_GEMM_CACHE", "CUDA_VISIBLE_DEVICES")  # that change no bits


class Resumable(Alone):
    """A site of `job.Job` that multiplies what an earlier run left to do. `side` is a panel's."""

    def __init__(self, options: Options, side: int | None, note: Callable[[str], None]) -> None:
        super().__init__(options)
        if options.reduce == "critical":
            raise UsageError(
                "--resume promises the bits of an uninterrupted run, and --reduce critical sums in "
                "any order; the ordered reduction works"
            )
        self.side, self.note = side or PANEL_SIDE, note

    @contextlib.contextmanager
    def output(self, inputs: Inputs, path: str | None) -> Iterator[Output]:
        p = self.problem
        assert path is not None  # `Wanted` has checked that
        self.unfinished = made = Unfinished(
            path, (p.m, p.n), p.out_dtype, self.side, lambda: self._facts(inputs),
            inputs=inputs.request.names,
        )  # fmt: skip
        total, where = len(made.panels), made.journal.path
        if not made.locked:
            self.note(f"{where} cannot be locked here: start no second --resume beside this one")
        if made.damaged:
            self.note(f"{made.damaged} panels are damaged; they are multiplied again")
        if made.found:
            self.note(f"{made.found} of {total} panels of C are finished already")
        try:
            yield made
        except BaseException:
            kept = len(made.finished)
            if made.open and kept:
                self.note(f"{kept} of {total} panels of C are kept for the same command to go on")
            elif made.open:
                made.discard()
            raise
        finally:
            made.close()

    def _facts(self, inputs: Inputs) -> dict[str, Any]:
        """Whatever decides the bits of C, in the words of a message."""
        request, p = inputs.request, self.problem
        chosen = {
            f"--{name}": str(getattr(self.options, name))
            for name, choice in CHOICES.items()
            if not (choice.across_ranks or choice.of_calls) and name not in _SEEN_ELSEWHERE
        }
        if inputs.files:
            self.note(f"reading {', '.join(request.names)} to know them again (SHA-256)")
        return {
            **{name: _content(inputs, name) for name in ("A", "B", "C")},
            "alpha": str(request.alpha), "beta": str(request.beta),
            "--trans-a": request.trans_a, "--trans-b": request.trans_b,
            "the product": f"{p}, C in {p.out_dtype}",
            "--panel": self.side,
            **chosen,
            "the device": f"{', '.join(device.name for device in self.runner.devices)} with "
            f"{self.runner.threads} workers",
            **_machine(),
        }  # fmt: skip

    def run(self, inputs: Inputs, out: Any, wanted: Wanted, progress: Callable) -> Any:
        made = self.unfinished
        left = [i for i in range(len(made.panels)) if i not in made.finished]
        step = self.problem.step_flops * self.problem.k
        sizes = [step * len(r) * len(c) for r, c in (made.panels[i] for i in left)]
        advance = progress(sum(sizes), "multiplying")
        total_ms, last, checks = 0.0, None, Checks() if self.options.checked else None
        for i in left:
            last = self._multiply(inputs, made.panels[i], advance)
            inputs.check_unchanged()
            made.finish(i, how(last.plan, last))
            total_ms += last.total_ms
            checks = checks and last.checks and checks + last.checks
        return ResumedResult(
            made.array, self.problem, self.side, len(made.panels), made.found, sum(sizes), total_ms,
            last, checks,
        )  # fmt: skip

    def _multiply(
        self, inputs: Inputs, panel: tuple[Span, Span], advance: Callable[[int], None]
    ) -> Result:
        request = inputs.request
        rows, cols = (span.slice for span in panel)
        a = self.a[:, rows] if request.trans_a else self.a[rows]
        b = self.b[cols] if request.trans_b else self.b[:, cols]
        c = None if self.c is None else self.c[rows, cols]
        return self.runner.run(
            a, b, c, alpha=request.alpha, beta=request.beta, trans_a=request.trans_a,
            trans_b=request.trans_b, out=self.unfinished.array[rows, cols], progress=advance,
        )  # fmt: skip

    def verify(self, inputs: Inputs, result: Any, mode: str) -> Verdict | None:
        verdict = super().verify(inputs, result, mode)
        if verdict is not None and not verdict.passed:
            self.unfinished.discard()
        return verdict

    def about_result(self, result: Any, verdict: Verdict | None, totals_ms: list) -> dict:
        return resume_report.result_data(result, verdict) | self.about_device()

    def print_result(self, result: Any, verdict: Verdict | None) -> None:
        resume_report.print_result(result, verdict, self.runner.describe())


def how(plan: Plan, result: Result) -> str:
    """What of a plan and its kernel decides the bits of a product."""
    products = " ".join("x".join(map(str, sides)) for sides in plan.products)
    ks = sorted({box.ks.start for worker in plan.workers for box in worker.boxes})
    grid = " x ".join(map(str, plan.grid))
    return f"kernel {result.variant}, grid {grid}, products {products}, K cut at {ks}"


def _content(inputs: Inputs, name: str) -> str:
    """What makes a matrix what it is."""
    if name in inputs.files:
        return f"a file with SHA-256 {inputs.files[name].sha256()}"
    if name not in inputs.shapes:
        return "none"
    request, shape = inputs.request, " x ".join(map(str, inputs.shapes[name]))
    return f"{shape} {request.fill} {inputs.problem.out_dtype}, seed {request.seed}"


def _machine() -> dict[str, Any]:
    """What of this machine and installation may change the bits of a product."""
    found = environment()
    cuda, packages = found["cuda"], found["packages"]
    libraries = [x for x in packages if x.startswith(("numpy", "cupy", "cuda"))]
    gpus = sorted({x["name"] for x in cuda.get("gpus", [])})
    commit = found.get("checkout", {})
    return {
        "the version": found["hybrid_gemm"]
        + (f" (commit {commit['commit'][:12]}, modified: {commit['modified']})" if commit else ""),
        "the CPU": f"{found['cpu']['model']}, {found['cpu']['cores']} cores",
        "BLAS": ", ".join(found["blas"]),
        "the packages": ", ".join(f"{x} {packages[x]}" for x in libraries),
        "CUDA": f"{cuda['driver']}, {cuda['runtime']}, {cuda['cublas']} on {', '.join(gpus)}"
        if cuda["available"] else "none",
        "g++": found["compiler"],
        "the environment": ", ".join(
            f"{name}={value}" for name, value in found["variables"].items()
            if name not in _VARIABLES
        ),
    }  # fmt: skip
