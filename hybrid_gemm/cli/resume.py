"""`hybrid-gemm run --resume`: C in panels, each a product of its own that is kept once finished."""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from ..arrays.unfinished import Panel, Unfinished
from ..catalog import Variant, text_digest
from ..errors import counted
from ..execution.checks import Checks, total
from ..execution.result import Result
from ..options import CHOICES, PANEL_SIDE, Options
from ..planning.plan import Plan
from ..problem import Problem
from ..reporting import resume_report
from ..reporting.environment import environment
from ..reporting.resume_report import ResumedResult
from ..runner import Runner
from ..verify import Verdict
from .alone import Alone
from .inputs import Inputs
from .job import Output, Wanted

# Options that are no facts of their own: they change no bits, or devices and plans say it.
_SEEN_ELSEWHERE = ("device", "gpus", "max_device_memory", "transport", "rank_timeout")
_VARIABLES = ("HYBRID_GEMM_CACHE", "CUDA_VISIBLE_DEVICES")  # that change no bits


class Resuming(abc.ABC):
    """What a site of `job.Job` does to multiply what an earlier run left to do, panel by panel."""

    problem: Problem
    options: Options
    side: int  # of a panel
    note: Callable[[str], None]
    unfinished: Any  # an `Unfinished`, or one over ranks
    about_device: Callable[[], dict]

    @contextlib.contextmanager
    def told(self, made: Unfinished) -> Iterator[None]:
        """Around the use of an unfinished file: says what is found of it, and what is kept."""
        total, where = len(made.panels), made.journal.path
        if not made.locked:
            self.note(f"{where} cannot be locked here: start no second --resume beside this one")
        if made.damaged:
            self.note(f"damaged, and multiplied again: {counted(made.damaged, 'panel')}")
        if made.found:
            self.note(f"{made.found} of {total} panels of C are finished already")
        try:
            yield
        except BaseException:
            kept = len(made.finished)
            if made.open and not made.is_there:
                self.note(
                    f"{made.temporary} or its journal is gone: does another host make the same C?"
                )
            elif made.open and kept:
                self.note(f"{kept} of {total} panels of C are kept for the same command to go on")
            elif made.open:
                made.discard()
            raise
        finally:
            made.close()

    def run(self, inputs: Inputs, out: Any, wanted: Wanted, progress: Callable) -> Any:
        made, p = self.unfinished, self.problem
        left = [i for i in range(len(made.panels)) if i not in made.finished]
        panels = [made.panels[i] for i in left]
        flops = sum(p.step_flops * p.k * len(rows) * len(cols) for rows, cols in panels)
        advance = progress(sum(map(self.own_flops, panels)), "multiplying")
        total_ms, last, checks = 0.0, None, Checks() if self.options.checked else None
        for i in left:
            last = self.finish(inputs, i, advance)
            total_ms += last.total_ms
            checks = checks and last.checks and total([checks, last.checks])
        return ResumedResult(
            made.array, p, self.side, len(made.panels), made.found, flops, total_ms, last, checks
        )

    def own_flops(self, panel: Panel) -> int:
        """Operations of what this process multiplies of a panel."""
        rows, cols = panel
        return self.problem.step_flops * self.problem.k * len(rows) * len(cols)

    def about_result(self, result: Any, verdict: Verdict | None, totals_ms: list) -> dict:
        return resume_report.result_data(result, verdict) | self.about_device()

    @abc.abstractmethod
    def finish(self, inputs: Inputs, panel: int, advance: Callable[[int], None]) -> Any:
        """Multiplies a panel, and returns its result when it is on the disk and in the journal."""


class Resumable(Resuming, Alone):
    """One process that resumes. `side` is a panel's."""

    def __init__(self, options: Options, side: int | None, note: Callable[[str], None]) -> None:
        super().__init__(options)
        self.side, self.note = side or PANEL_SIDE, note

    @contextlib.contextmanager
    def output(self, inputs: Inputs, path: str | None) -> Iterator[Output]:
        p = self.problem
        assert path is not None  # `Wanted` has checked that

        def facts() -> dict[str, Any]:
            found = facts_of(inputs, p, self.options, self.side, self.note)
            return found | {"the number of ranks": 1} | here(self.runner)

        self.unfinished = made = Unfinished(
            path, (p.m, p.n), p.out_dtype, self.side, facts, inputs=inputs.request.names
        )
        with self.told(made):
            yield made

    def finish(self, inputs: Inputs, panel: int, advance: Callable[[int], None]) -> Result:
        request, made = inputs.request, self.unfinished
        rows, cols = (span.slice for span in made.panels[panel])
        a = self.a[:, rows] if request.trans_a else self.a[rows]
        b = self.b[cols] if request.trans_b else self.b[:, cols]
        c = None if self.c is None else self.c[rows, cols]
        result = self.runner.run(
            a, b, c, alpha=request.alpha, beta=request.beta, trans_a=request.trans_a,
            trans_b=request.trans_b, out=made.array[rows, cols], progress=advance,
        )  # fmt: skip
        inputs.check_unchanged()
        made.finish(panel, how(result.plan, result.variant))
        return result

    def verify(self, inputs: Inputs, result: Any, mode: str, progress: Callable) -> Verdict | None:
        verdict = super().verify(inputs, result, mode, progress)
        if verdict is not None and not verdict.passed:
            self.unfinished.discard()
        return verdict

    def print_result(self, result: Any, verdict: Verdict | None) -> None:
        resume_report.print_result(result, verdict, self.runner.describe())


# --- what decides the bits ----------------------------------------------------------------


def how(plan: Plan, variant: Variant) -> str:
    """What of a plan and its kernel decides the bits of a product."""
    products = " ".join("x".join(map(str, sides)) for sides in plan.products)
    ks = sorted({box.ks.start for worker in plan.workers for box in worker.boxes})
    grid = " x ".join(map(str, plan.grid))
    return f"kernel {variant}, grid {grid}, products {products}, K cut at {ks}"


def facts_of(
    inputs: Inputs, p: Problem, options: Options, side: int, note: Callable[[str], None]
) -> dict[str, Any]:
    """Whatever is asked that decides the bits of C, in the words of a message."""
    request = inputs.request
    chosen = {
        f"--{name}": str(getattr(options, name))
        for name, choice in CHOICES.items()
        if not choice.of_calls and name not in _SEEN_ELSEWHERE
    }
    if inputs.files:
        note(f"reading {', '.join(request.names)} to know them again (SHA-256)")
    return {
        **{name: _content(inputs, name) for name in ("A", "B", "C")},
        "alpha": str(p.alpha), "beta": str(p.beta),
        "--trans-a": request.trans_a, "--trans-b": request.trans_b,
        "the product": f"{p}, C in {p.out_dtype}",
        "--panel": side,
        **chosen,
    }  # fmt: skip


def here(runner: Runner) -> dict[str, Any]:
    """What of this process's devices, machine and installation may change the bits."""
    devices = ", ".join(device.name for device in runner.devices)
    on_cpu = runner.kind == "cpu"  # where none of the texts takes part
    return {
        "the device": f"{devices} with {runner.threads} workers",
        "the text of the kernels": "none" if on_cpu else f"SHA-256 {text_digest()}",
        **_machine(),
    }


def _content(inputs: Inputs, name: str) -> str:
    """What makes a matrix what it is."""
    if name in inputs.files:
        return f"a file with SHA-256 {inputs.files[name].sha256()}"
    if name not in inputs.shapes:
        return "none"
    request, shape = inputs.request, " x ".join(map(str, inputs.shapes[name]))
    return f"{shape} {request.fill} {inputs.problem.out_dtype}, seed {request.seed}"


def _machine() -> dict[str, Any]:
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
        )
        or "none",
    }  # fmt: skip
