"""What `hybrid-gemm run` and `kernels` do, between the parsed options and the printing."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable

import numpy as np

from .. import verify
from ..arrays import generator, npy_files
from ..errors import OutOfMemoryError, UsageError, in_words
from ..host.resources import cores, memory_available
from ..problem import Problem, compute_dtype, make_problem
from ..reporting import chrome_trace, console, environment, thread_report
from ..runner import Runner

DEFAULT_SIZE = 2048
PRINTED = 32  # the widest matrix that --print shows


class Job:
    """One `run`: opens or generates the input, multiplies, verifies, writes C."""

    def __init__(
        self, files, *, m, n, k, size, c_file, output, threads, split, device, gpus,
        emulate_devices, kernel, params, reduction, dtype, fill, seed, alpha, beta, trans_a,
        trans_b, resident, repeat, mode, show, dry_run, note: Callable[[str], None],
        algorithm="ordinary", levels=1, trace_file=None, compute="fp32",
        grid=None, max_device_memory=None,
    ):  # fmt: skip
        if repeat < 1:
            raise UsageError(f"--repeat {repeat}: it takes at least 1")
        if mode not in verify.MODES:
            raise UsageError(f"--verify {mode!r}: it takes {', '.join(verify.MODES)}")
        self.trans = {"trans_a": trans_a, "trans_b": trans_b}
        self.alpha, self.beta = alpha, beta
        self.algorithm = {"name": algorithm}
        if algorithm == "strassen":
            self.algorithm["levels"] = levels
        self.mode, self.seed, self.repeat, self.resident = mode, seed, repeat, resident
        self.note, self.output, self.show = note, output, show
        self.inputs = [*files, *([c_file] if c_file else [])]
        if files:
            self._from_files(files, c_file, (m, n, k, size, dtype))
        else:
            self._to_generate(m, n, k, size, c_file, dtype or "float32", fill)
        if trace_file and dry_run:
            raise UsageError("--trace shows what a run did, and --dry-run does nothing")
        self.trace = trace_file
        self._prepare(
            device=device, threads=threads, split=split, reduce=reduction, gpus=gpus,
            emulate_devices=emulate_devices, kernel=kernel, params=params, algorithm=algorithm,
            levels=levels, compute=compute, max_device_memory=max_device_memory,
            **({"grid": grid} if grid else {}),
        )  # fmt: skip
        self.verdict = None

    def _prepare(self, **choices) -> None:
        self.runner = Runner(**choices)
        if self.runner.note:
            self.note(f"device: {self.runner.kind} ({self.runner.note})")
        self.problem = self.runner.settle(self.problem)
        self.plan = self.runner.plan(self.problem, resident=self.resident)
        self.variant = self.runner.variant(self.plan)

    def _from_files(self, files, c_file, generated) -> None:
        if len(files) != 2:
            raise UsageError(f"{len(files)} file was given; give A.npy and B.npy, or neither")
        if any(x is not None for x in generated):
            raise UsageError("sizes and --dtype are for generated input; the files have their own")
        self.a, self.b = map(npy_files.open_npy, files)
        self.c = npy_files.open_npy(c_file) if c_file else None
        self.problem = self._problem(self.a, self.b, self.c)

    def _problem(self, a, b, c) -> Problem:
        return make_problem(a, b, c, alpha=self.alpha, beta=self.beta, **self.trans)

    def _to_generate(self, m, n, k, size, c_file, dtype, fill) -> None:
        if c_file:
            raise UsageError("-c goes with A.npy B.npy; generated input makes its own C")
        if size is not None and any(x is not None for x in (m, n, k)):
            raise UsageError("--size sets m, n and k; give it or -m -n -k")
        size = DEFAULT_SIZE if size is None else size
        m, n, k = (size if x is None else x for x in (m, n, k))
        if min(m, n, k) < 0:
            raise UsageError(f"m={m} n={n} k={k}: sizes are 0 or more")
        if dtype not in generator.GENERATED_DTYPES:
            raise UsageError(f"--dtype {dtype!r}: it takes {', '.join(generator.GENERATED_DTYPES)}")
        if fill not in generator.FILLS:
            raise UsageError(f"--fill {fill!r}: it takes {', '.join(generator.FILLS)}")
        if seed_out_of_range(self.seed):
            raise UsageError(f"--seed {self.seed}: it takes 0 to 2^63 - 1")
        compute_dtype(np.dtype(dtype))
        self.fill = fill
        self.shapes = {
            "A": (k, m) if self.trans["trans_a"] else (m, k),
            "B": (n, k) if self.trans["trans_b"] else (k, n),
            "C": (m, n),
        }
        self.a = self.b = self.c = None
        views = {x: np.broadcast_to(np.empty((), dtype), s) for x, s in self.shapes.items()}
        self.problem = self._problem(views["A"], views["B"], views["C"] if self.beta else None)

    def _generate(self, operand: str):
        return generator.generate(
            *self.shapes[operand], self.problem.out_dtype, seed=self.seed, operand=operand,
            fill=self.fill, threads=cores(),
        )  # fmt: skip

    def plan_only(self) -> dict:
        """The plan, without reading or making any input."""
        self.print = lambda: thread_report.print_plan(self.plan, str(self.variant))
        p = self.problem
        return {
            "problem": {"m": p.m, "n": p.n, "k": p.k, "dtype": p.dtype},
            "kernel": self.variant.name,
            "params": dict(self.variant.params),
            "plan": thread_report.plan_data(self.plan),
        }

    def run(self, progress) -> dict:
        p = self.problem
        if self.a is None:
            _check_host_memory(self.shapes.values(), np.dtype(p.out_dtype).itemsize)
            self.note(f"generating A and B ({self.fill}, seed {self.seed})")
            self.a, self.b = self._generate("A"), self._generate("B")
            self.c = self._generate("C") if p.beta else None
        with contextlib.ExitStack() as stack:
            writer, out = None, None
            if self.output:
                writer = stack.enter_context(
                    npy_files.NpyWriter(self.output, (p.m, p.n), p.out_dtype, inputs=self.inputs)
                )
                out = writer.array
            results = [
                self.runner.run(
                    self.a, self.b, self.c, alpha=self.alpha, beta=self.beta, **self.trans,
                    out=out, resident=self.resident,
                    progress=progress(p.flops, "multiplying"),
                )
                for _ in range(self.repeat)
            ]  # fmt: skip
            totals = [r.total_ms for r in results]
            median = statistics.median_low(totals)
            self.result = next(r for r in results if r.total_ms == median)
            self.verdict = self._verify()
            if writer and self.verdict is not None and not self.verdict.passed:
                writer.abort()
        self.print = self._print
        data = thread_report.result_data(self.result, self.verdict, totals)
        data["device"] = {"kind": self.runner.kind, "why": self.runner.note}
        data["algorithm"] = self.algorithm
        data["output"] = self.output
        return data

    def write_trace(self) -> None:
        """Writes the timeline of the run that is shown, whole or not at all."""
        if not self.trace:
            return
        plan, result = getattr(self.plan, "plan", self.plan), self.result  # over ranks, or alone
        about = {
            "title": f"{self.problem}, {plan.split}, {' x '.join(map(str, plan.grid))}, "
            f"kernel {result.variant.name}, {result.total_ms:.1f} ms",
            "reduction": result.reduction, "total_ms": result.total_ms,
            "command": environment.command_line(), "environment": environment.environment(),
        }  # fmt: skip
        console.write(
            self.trace, console.as_json(chrome_trace.chrome(result.timeline, self.where(), about))
        )
        self.note(f"wrote {self.trace}")

    def where(self) -> dict[int, str]:
        """Each worker's device."""
        return {w.index: self.plan.devices[w.device].name for w in self.plan.workers}

    def _verify(self):
        a = self.a.T if self.trans["trans_a"] else self.a
        b = self.b.T if self.trans["trans_b"] else self.b
        growth = verify.GROWTH ** self.algorithm.get("levels", 0)
        return verify.verify(
            self.problem, a, b, self.c, self.result.c, mode=self.mode, growth=growth
        )

    def _print(self) -> None:
        if self.show:
            shown = {"A": self.a, "B": self.b, "C": self.result.c}
            for name, matrix in shown.items():
                if max(matrix.shape) > PRINTED:
                    self.note(f"{name} is {matrix.shape}; --print shows up to {PRINTED} a side")
                else:
                    console.print_matrix(name, matrix)
        thread_report.print_result(
            self.result, self.verdict, self.runner.describe(self.result.plan)
        )
        if self.output and (self.verdict is None or self.verdict.passed):
            console.console.print(f"wrote {self.output}")


def seed_out_of_range(seed: int) -> bool:
    return not 0 <= seed < 2**63


def _check_host_memory(shapes, itemsize: int) -> None:
    need = sum(rows * cols for rows, cols in shapes) * itemsize
    have = memory_available()
    if need > have:
        raise OutOfMemoryError(
            f"A, B and C need {in_words(need)} of host memory and {in_words(have)} is available; "
            "smaller sizes fit, or .npy files, which are read in parts"
        )
