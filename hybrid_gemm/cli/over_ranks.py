"""`hybrid-gemm run` as one of several MPI ranks, and plans for ranks elsewhere."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from ..arrays import file_bytes, npy_files, output_files
from ..execution.result import Result
from ..options import Options
from ..planning.partition import Span
from ..ranks import ending, verify
from ..ranks.launch import Place, agree, bind_cores, place, together
from ..ranks.rank_plan import RankPlan
from ..ranks.rank_planner import RankPlanner
from ..ranks.redistribution import NOTHING, Part, move, parts_of
from ..ranks.runner import RankRunner
from ..reporting import rank_report, report
from ..reporting.file_report import Files
from ..runner import Runner
from ..verify import Verdict, growth_of, host_bytes, no_progress
from .inputs import Inputs, check_host_memory, expansion
from .job import Output, Wanted


class OverRanks:
    """A site of `job.Job`: each rank makes or reads its own parts, and writes its own strips."""

    def __init__(self, comm: Any, options: Options) -> None:
        self.comm, self.options = comm, options
        self.files = Files()

    def open(self, inputs: Inputs, *, resident: bool) -> str:
        comm = self.comm
        bind_cores(comm, place(comm))
        self.runner = runner = RankRunner.of(comm, self.options.across_ranks())
        self.plan = runner.plan(inputs.problem, resident=resident, mapped=not inputs.generated)
        self.problem = inputs.asked(self.plan.problem)
        self.variant = runner.variant(self.plan)
        self.strip = parts_of(self.plan)[comm.rank]
        self.places = comm.allgather((runner.where.host, runner.local.describe()))
        self.local = local = runner.local
        return f"device: {local.kind} ({local.note})" if local.note else ""

    def load(self, inputs: Inputs, verify: str) -> None:
        agree(self.comm, together(self.comm, inputs.facts))
        self.blocks = together(self.comm, lambda: self._blocks(inputs, self.plan, verify))

    def _check_verification(self, verify: str) -> None:
        """Raises `OutOfMemoryError` where verification alone does not fit on this host."""
        check_host_memory([], 1, self._verification(self.plan, verify))

    def _verification(self, plan: RankPlan, verify: str) -> int:
        """What verification takes of this host's memory, if its ranks have blocks like this."""
        box = plan.box(self.comm.rank)
        if box is None:
            return 0
        one = host_bytes(self.problem, verify, len(box.rows), len(box.cols))
        return self.runner.where.local_size * one

    def _blocks(
        self, inputs: Inputs, plan: RankPlan, verify: str, row: int = 0, col: int = 0
    ) -> tuple[Any, Any, Any]:
        """This rank's blocks of op(A) and op(B) and its strip of C, by the plan of a part of C
        whose first element is that of (`row`, `col`), where they and `verify` fit."""
        box, strip = plan.box(self.comm.rank), parts_of(plan)[self.comm.rank]
        if box is None:
            empty = np.empty((0, 0), self.problem.dtype)
            return empty, empty, empty
        wanted = {"A": (box.rows + row, box.ks), "B": (box.ks, box.cols + col)}
        if self.problem.beta:
            wanted["C"] = strip.rows + row, strip.cols + col
        shapes: list[tuple[int, int]] = []
        if inputs.generated:
            shapes = [(len(rows), len(cols)) for rows, cols in wanted.values()]
            shapes += [strip.shape, *expansion(self.problem, len(box.ks), len(box.cols))]
            shapes *= self.runner.where.local_size
        size = np.dtype(self.problem.out_dtype).itemsize
        check_host_memory(shapes, size, self._verification(plan, verify))
        found = {x: inputs.block(x, *spans) for x, spans in wanted.items()}
        return found["A"], found["B"], found.get("C")

    @contextlib.contextmanager
    def output(self, inputs: Inputs, path: str | None) -> Iterator[Output]:
        """One file that all ranks write, whole or not at all."""
        strip = np.empty(self.strip.shape, self.problem.out_dtype)
        if not path:
            yield _Strip(strip)
            return
        comm = self.comm
        try:
            writer = together(comm, lambda: comm.rank == 0 and self._writer(inputs, path))
            temporary, offset = comm.bcast(writer and (writer.temporary, writer.offset))
            output_files.remember(temporary)
            together(comm, lambda: file_bytes.check_shared(temporary))
            yield _Strip(strip, self._writing(strip, writer, temporary, offset))
        finally:
            output_files.remove_all()

    def _writer(self, inputs: Inputs, path: str) -> npy_files.NpyWriter:
        p = self.problem
        with ending.naming():
            return npy_files.NpyWriter(
                path, (p.m, p.n), p.out_dtype, inputs=inputs.request.names, shared=True
            )

    def _writing(
        self, strip: np.ndarray, writer: Any, temporary: str, offset: int
    ) -> Callable[[], None]:
        """What brings this rank's strip into the file; rank 0 then puts it in its place."""
        comm, columns = self.comm, self.problem.n

        def write() -> None:
            top, left = self.strip.rows.start, self.strip.cols.start
            together(comm, lambda: file_bytes.write_part(
                temporary, offset, columns, strip, top, left
            ))  # fmt: skip
            together(comm, lambda: writer and writer.commit())

        return write

    def run(self, inputs: Inputs, out: Any, wanted: Wanted, progress: Callable) -> Result:
        a, b, c = self.blocks
        result = self.runner.run(
            self.plan, a, b, c, out, resident=wanted.resident,
            progress=progress(self.plan.flops(self.comm.rank), "multiplying"),
        )  # fmt: skip
        together(self.comm, inputs.check_unchanged)
        return dataclasses.replace(result, problem=self.problem)

    def verify(
        self, inputs: Inputs, result: Result, mode: str, progress: Callable
    ) -> Verdict | None:
        a, b, c = self.blocks
        tell = no_progress if mode == "off" else progress(1.0, "verifying")
        verdict = verify.verify(
            self.comm, self.plan, a, b, c, result.c, mode=mode, by_three=self.runner.by_three,
            growth=growth_of(self.options.algorithm, self.options.levels), progress=tell,
        )  # fmt: skip
        together(self.comm, inputs.check_unchanged)
        return verdict

    def shown(self, inputs: Inputs, result: Result) -> dict[str, Any]:
        p = self.problem
        m, n, k = Span(0, p.m), Span(0, p.n), Span(0, inputs.problem.k)
        want = [Part(m, n), *[NOTHING] * (self.comm.size - 1)]
        c = move(self.comm, result.c, parts_of(self.plan), want, p.out_dtype)
        return {"A": inputs.block("A", m, k), "B": inputs.block("B", k, n), "C": c}

    def where(self) -> dict[int, str]:
        threads = self.plan.threads
        return {
            rank * threads + i: " ".join(f"rank {rank}: {host} {device}".split())
            for rank, (host, device) in enumerate(self.places)
            for i in range(threads)
        }

    def about_plan(self) -> dict:
        return rank_report.plan_data(self.plan)

    def about_result(self, result: Result, verdict: Verdict | None, totals_ms: list) -> dict:
        data = rank_report.result_data(result, self.plan, verdict, totals_ms)
        return data | self.about_device()

    def about_device(self) -> dict:
        """What multiplies, where and how, for JSON."""
        local = self.local
        hosts = {"hosts": [host for host, _device in self.places]} if self.comm else {}
        return {
            **hosts,
            "device": {"kind": local.kind, "name": local.describe(), "why": local.note},
            "algorithm": report.algorithm_data(self.options),
        }

    def print_plan(self) -> None:
        rank_report.print_plan(self.plan, str(self.variant), self.problem, self.places)

    def print_result(self, result: Result, verdict: Verdict | None) -> None:
        rank_report.print_result(result, self.plan, verdict, self.places)


class _Strip:
    """A rank's strip of C; `write` brings it into the file that all ranks write."""

    def __init__(self, array: np.ndarray, write: Callable[[], None] = lambda: None) -> None:
        self.array, self.commit = array, write


class Elsewhere(OverRanks):
    """A site that only plans, for ranks that each have what this machine has."""

    def __init__(self, ranks: int, options: Options) -> None:
        super().__init__(None, options)
        self.ranks = ranks

    def open(self, inputs: Inputs, *, resident: bool) -> str:
        options = self.options.across_ranks()
        split = "auto" if options.grid else options.split
        self.local = one = Runner.of(dataclasses.replace(options, grid=None, split=split))
        here = Place(0, 0, 0, 1, "")
        planner = RankPlanner(self.ranks, here, one, options, sharing=1)
        spec, mapped = one.devices[0].spec(), not inputs.generated
        self.plan = planner.plan(inputs.problem, spec, resident=resident, mapped=mapped)
        self.problem = inputs.asked(self.plan.problem)
        self.variant = one.variant(one.plan(self.plan.product_of(0)))
        self.places = [("", one.devices[0].describe())] * self.ranks
        return f"each rank is taken to have what this machine has: {one.describe()}"
