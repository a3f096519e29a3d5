"""What `hybrid-gemm run` does as one of several ranks, and what it plans for ranks elsewhere."""

from __future__ import annotations

import contextlib
import os
import signal
import statistics

import numpy as np

from ..arrays import generator, npy_files
from ..planning.planner import Span
from ..ranks import verify
from ..ranks.launch import bind_cores, place, together
from ..ranks.rank_plan import make_rank_plan
from ..ranks.redistribution import NOTHING, Part, move
from ..ranks.runner import RankRunner, nothing_multiplied, parts_of
from ..reporting import console
from ..reporting.rank_report import plan_data, print_plan, print_result
from ..runner import Runner
from . import job


class RankJob(job.Job):
    """One `run` over ranks: each makes or reads its own parts, and writes its own strips.

    With `comm` None it plans for `ranks` ranks that each have what this machine has.
    """

    def __init__(self, comm, files, *, ranks=None, transport="auto", grid=None, rounds=None,
                 **options):  # fmt: skip
        self.comm, self.ranks = comm, comm.size if comm else ranks
        self.across = {"transport": transport, "grid": grid, "rounds": rounds}
        super().__init__(files, **options)

    def _prepare(self, **choices) -> None:
        self.choices = choices

    def open(self) -> None:
        """Finds devices and makes the plan. Collective."""
        problem = nothing_multiplied(self.problem)
        if self.comm is None:
            self._plan_elsewhere(problem)
            return
        bind_cores(self.comm, place(self.comm))
        self.runner = RankRunner(self.comm, **self.choices, **self.across)
        if self.runner.runner.note:
            self.note(f"device: {self.runner.runner.kind} ({self.runner.runner.note})")
        self.plan = self.runner.plan(problem, resident=self.resident)
        self.variant = self.runner.variant(self.plan)
        where = self.runner.where.host, self.runner.runner.describe()
        self.places = self.comm.allgather(where)

    def _plan_elsewhere(self, problem) -> None:
        split = "auto" if self.across["grid"] else self.choices["split"]
        one = Runner(**{**self.choices, "split": split})
        spec, problem = one.devices[0].spec(), one.settle(problem)
        self.plan = make_rank_plan(
            problem, spec, self.ranks, threads=one.threads, split=self.choices["split"],
            grid=self.across["grid"], rounds=self.across["rounds"],
            kernel=str(one.chosen or "auto"), resident=self.resident,
        )  # fmt: skip
        self.variant = one.chosen or one.variant(one.plan(problem))
        self.places = [("", one.devices[0].describe())] * self.ranks
        self.note(f"each rank is taken to have what this machine has: {one.describe()}")

    def plan_only(self) -> dict:
        self.print = lambda: print_plan(self.plan, str(self.variant), self.places)
        p = self.problem
        return {
            "problem": {"m": p.m, "n": p.n, "k": p.k, "dtype": p.dtype},
            "kernel": self.variant.name,
            "params": dict(self.variant.params),
            "plan": plan_data(self.plan),
        }

    def run(self, progress) -> dict:
        comm, plan, p = self.comm, self.plan, self.problem
        if self.a is None:
            self.note(f"generating A and B ({self.fill}, seed {self.seed}), each rank its parts")
        self.strip = parts_of(plan)[comm.rank]
        blocks = together(comm, self._blocks)
        flops = plan.box(comm.rank).flops if plan.box(comm.rank) else 0
        out = np.empty(self.strip.shape, p.out_dtype)
        with self._output() as write:
            results = []
            for _ in range(self.repeat):
                advance = progress(flops, "multiplying")
                results.append(
                    self.runner.run(
                        plan, *blocks, out, resident=self.resident, progress=advance
                    )
                )  # fmt: skip
            totals = [r.total_ms for r in results]
            median = statistics.median_low(totals)
            self.result = next(r for r in results if r.total_ms == median)
            self.verdict = verify.verify(comm, plan, *blocks, out, mode=self.mode)
            if write and (self.verdict is None or self.verdict.passed):
                write(out)
        shown = self._to_show(out) if self.show else {}
        self.print = lambda: self._print_all(shown)
        return self._data(totals, results[0].since)

    def where(self) -> dict[int, str]:
        threads = self.plan.threads
        return {
            rank * threads + i: " ".join(f"rank {rank}: {host} {device}".split())
            for rank, (host, device) in enumerate(self.places)
            for i in range(threads)
        }

    # --- matrices -------------------------------------------------------------------------

    def _blocks(self):
        """This rank's blocks of op(A) and op(B) and its strip of C."""
        box = self.plan.box(self.comm.rank)
        if box is None:
            empty = np.empty((0, 0), self.problem.dtype)
            return empty, empty, empty
        wanted = {
            "A": Part(box.rows, box.ks), "B": Part(box.ks, box.cols), "C": self.strip,
        }  # fmt: skip
        if self.a is None:
            shapes = [part.shape for part in wanted.values()] * self.runner.where.local_size
            job._check_host_memory(shapes, np.dtype(self.problem.out_dtype).itemsize)
        return tuple(
            self._block(x, part) if x != "C" or self.problem.beta else None
            for x, part in wanted.items()
        )

    def _block(self, operand: str, part: Part):
        transposed = {"A": self.trans["trans_a"], "B": self.trans["trans_b"], "C": False}[operand]
        given = {"A": self.a, "B": self.b, "C": self.c}[operand]
        rows, cols = (part.cols, part.rows) if transposed else (part.rows, part.cols)
        if given is not None:
            block = given[rows.slice, cols.slice]
        else:
            block = generator.generate(
                *self.shapes[operand], self.problem.out_dtype, seed=self.seed, operand=operand,
                fill=self.fill, threads=job.cores(), row_range=(rows.start, rows.stop),
                col_range=(cols.start, cols.stop),
            )  # fmt: skip
        return block.T if transposed else block

    @contextlib.contextmanager
    def _output(self):
        """Yields `write(strip)`, or None: one file that all ranks write, whole or not at all."""
        if not self.output:
            yield None
            return
        comm, shape = self.comm, (self.problem.m, self.problem.n)
        writer = together(comm, lambda: comm.rank == 0 and npy_files.NpyWriter(
            self.output, shape, self.problem.out_dtype, inputs=self.inputs
        ))  # fmt: skip
        path, offset = comm.bcast(writer and (writer.temporary, writer.offset))

        def remove(*_signal) -> None:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            if _signal:  # the launcher ends us because another rank has failed
                os._exit(128 + _signal[0])

        def write(strip) -> None:
            top, left = self.strip.rows.start, self.strip.cols.start
            together(comm, lambda: npy_files.write_part(
                path, offset, shape[1], strip, top, left
            ))  # fmt: skip
            together(comm, lambda: writer and writer.commit())

        before = signal.signal(signal.SIGTERM, remove)
        try:
            yield write
        finally:
            remove()
            signal.signal(signal.SIGTERM, before)

    def _to_show(self, out) -> dict:
        """Small matrices, whole on rank 0 to be printed."""
        p = self.problem
        if max(p.m, p.n, p.k) > job.PRINTED:
            self.note(f"{p}; --print shows up to {job.PRINTED} a side")
            return {}
        whole = Part(Span(0, p.m), Span(0, p.n))
        want = [whole, *[NOTHING] * (self.comm.size - 1)]
        c = move(self.comm, out, parts_of(self.plan), want, p.out_dtype)
        a, b = Part(whole.rows, Span(0, p.k)), Part(Span(0, p.k), whole.cols)
        return {"A": self._block("A", a), "B": self._block("B", b), "C": c}

    # --- what is said ---------------------------------------------------------------------

    def _data(self, totals, since: float) -> dict:
        p, result = self.problem, self.result
        timeline = result.timeline
        return {
            "problem": {
                "m": p.m, "n": p.n, "k": p.k, "dtype": p.dtype, "out_dtype": p.out_dtype,
                "alpha": p.alpha, "beta": p.beta,
            },
            "plan": plan_data(self.plan),
            "hosts": [host for host, _device in self.places],
            "kernel": result.variant.name,
            "params": dict(result.variant.params),
            "compute": result.compute,
            "reduction": result.reduction,
            "timeline": [
                {"worker": a.worker, "phase": a.phase, "start_ms": a.start_ms,
                 "stop_ms": a.stop_ms, "bytes": a.bytes, "flops": a.flops}
                for a in timeline
            ],
            "multiply_ms": timeline.multiply_ms,
            "multiply_and_sum_ms": timeline.multiply_and_sum_ms,
            "total_ms": result.total_ms,
            "totals_ms": totals,
            "multiplying_since": since,
            "gflops": result.gflops,
            "of_predicted": result.total_ms / (self.plan.predicted_ms or float("nan")),
            "verify": None if self.verdict is None else self.verdict.as_data(),
            "device": {"kind": self.runner.runner.kind, "why": self.runner.runner.note},
            "output": self.output,
        }  # fmt: skip

    def _print_all(self, shown: dict) -> None:
        for name, matrix in shown.items():
            console.print_matrix(name, matrix)
        print_result(self.result, self.verdict, self.places)
        if self.output and (self.verdict is None or self.verdict.passed):
            console.console.print(f"wrote {self.output}")
