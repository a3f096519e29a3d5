"""Turns: what they take of memory, and that the memory decides no sum but by one of three ways of
cutting K."""

import itertools
import time
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybrid_gemm.errors import OutOfMemoryError
from hybrid_gemm.planning.cost_model import phases
from hybrid_gemm.planning.hardware import DeviceSpec
from hybrid_gemm.planning.on_grid import Cuts, Task, on_grid
from hybrid_gemm.planning.partition import Box, cut_in, cut_span
from hybrid_gemm.planning.planner import TURNS_IN_MEMORY, make_plan, memory_needs
from hybrid_gemm.problem import Problem
from hybrid_gemm.reporting import thread_report

GPU = DeviceSpec("gpu", "cuda", 0, 2**40, tflops=40, memory_gbps=4000, link_gbps=20, peer_gbps=100)
few = st.integers(1, 4)


def made_whole(plan):
    """The plan with all its boxes, blocks and panels in tuples, of which each counts for itself."""
    workers = tuple(replace(w, boxes=tuple(w.boxes)) for w in plan.workers)
    return replace(plan, workers=workers, blocks=tuple(plan.blocks), panels=tuple(plan.panels))


def straightforward(task, grid, cuts):
    """The boxes of each worker, and what of A and B each turn needs."""
    boxes, blocks = [], []
    for rows, cols, ks in itertools.product(grid.rows, grid.cols, grid.ks):
        sides = (cut_span(rows, cuts.rows, task.align), cut_span(cols, cuts.cols, task.align),
                 cut_in(ks, cuts.ks[: len(ks)], task.align))  # fmt: skip
        own = [Box(*spans) for spans in itertools.product(*sides) if all(map(len, spans[:2]))]
        for turn, box in enumerate(own):
            index = len(boxes)
            blocks += [("A", box.rows, box.ks, index, turn), ("B", box.ks, box.cols, index, turn)]
        boxes.append(own)
    return boxes, blocks


@given(
    st.tuples(*[st.integers(1, 900)] * 3),
    st.tuples(few, few, few),
    st.tuples(*[st.sampled_from([1, 2, 3, 8])] * 3),
    st.integers(1, 3),
    st.sampled_from(["ordered", "nccl"]),
    st.sampled_from(["fp32", "fp32x3"]),
    st.sampled_from([(None, None, None), (0, None, 0), (None, 0, 0)]),
)
def test_turns_are_counted_by_kinds_and_made_when_they_are_asked_for(
    sides, shape, cut, count, reduce, compute, homes
):
    devices = tuple(replace(GPU, unit=unit) for unit in range(count))
    problem = Problem(*sides, beta=1, compute=compute)
    task = Task(problem, devices, reduce=reduce, homes=homes)
    rows, cols, ks = cut
    cuts = Cuts(rows, cols, (1,) * ks, TURNS_IN_MEMORY)
    grid = task.grid(shape)
    plan = on_grid(task, grid, cuts)
    whole, figures = made_whole(plan), (
        "bytes_h2d", "bytes_d2h", "bytes_peer", "bytes_relayed", "turns", "products", "multiplied",
        "split_once", "writes_once",
    )  # fmt: skip
    assert memory_needs(whole) == memory_needs(plan)
    assert [getattr(whole, x) for x in figures] == [getattr(plan, x) for x in figures]
    assert phases(whole) == pytest.approx(phases(plan), rel=1e-12)
    boxes, blocks = straightforward(task, grid, cuts)
    assert [list(worker.boxes) for worker in plan.workers] == boxes
    for lazy in (plan.blocks, plan.panels, *(worker.boxes for worker in plan.workers)):
        assert len(lazy) == sum(times for _, times in lazy.kinds) == len([*lazy])
        assert [lazy[i] for i in range(len(lazy))] == [*lazy]
    made = [(x.operand, x.rows, x.cols, *x.workers, x.turn) for x in plan.blocks]
    assert made == blocks
    left = {(x.index, i // len(x.chunks)): 0 for x in plan.workers for i in range(len(x.boxes))}
    for panel in plan.panels:  # those of a tile are all of it, and their strips all of them
        assert sum(strip.elements for strip in panel.strips) == panel.rows.by(panel.cols)
        for worker in panel.workers:
            left[worker, panel.tile] += panel.rows.by(panel.cols)
    for (worker, tile), elements in left.items():
        box = plan.workers[worker].boxes[tile * len(plan.workers[worker].chunks)]
        assert elements == box.rows.by(box.cols)


def test_a_thousand_workers_in_millions_of_turns_are_planned_at_once():
    """100000 by cols: each of 4 million boxes has strips of a thousand workers."""
    cpu = DeviceSpec("cpu", "cpu", 0, 2**34, tflops=0.1, memory_gbps=10, host_memory=True,
                     on_gpu=False, alignment=1)  # fmt: skip
    started = time.process_time()
    plan = make_plan(Problem(*[100_000] * 3), [cpu], 1000, split="cols")
    said = thread_report.plan_data(plan)
    thread_report.print_plan(plan, "blas")
    assert time.process_time() - started < 20
    assert plan.turns * 1000 == len(plan.workers) * len(plan.workers[0].boxes) > 4e6
    assert said["strips"] is None and {x["boxes"] for x in said["workers"]} == {None}


@pytest.mark.parametrize(
    "problem",
    [
        Problem(32768, 32768, 32768),
        Problem(20000, 3000, 100_000, compute="tf32"),
        Problem(64, 64, 2**22),
        Problem(9000, 9000, 9000, dtype="float64"),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "workers, split",
    [*(pytest.param(x, "rows", marks=pytest.mark.campaign) for x in (1, 3)), (4, "cols")],
)
def test_memory_decides_only_which_of_three_cuts_of_k_is_taken(problem, workers, split):
    seen, fitted = {}, 0
    for mib in (100, 150, 400, 1600, 5000, 9000, 20_000, 10**6):
        device = replace(GPU, memory_bytes=mib << 20)
        try:
            plan = make_plan(problem, [device], workers, split=split)
        except OutOfMemoryError:
            continue
        fitted += 1
        assert memory_needs(plan)[0] <= device.memory_bytes
        cut = tuple(tuple((ks.start, ks.stop) for ks in worker.chunks) for worker in plan.workers)
        for worker in plan.workers:  # every element of C is a sum over the same chunks
            tiles = len(worker.boxes) // len(worker.chunks)
            assert tuple(box.ks for box in worker.boxes) == worker.chunks * tiles
        seen.setdefault(cut, []).append((mib, plan.turns_in_memory))
    assert fitted > 4 and len(seen) <= 3
    # More memory never means more chunks, and all of it the cut that a whole plan has.
    chunks = [max(map(len, cut)) for cut in seen]
    assert chunks == sorted(chunks, reverse=True)
    assert list(seen.values())[-1][-1] == (10**6, 0)


def test_many_workers_are_planned_in_turns():
    """Each of 300 has a partial of every tile: strips name 300 summands, all in one tuple."""
    device = replace(GPU, memory_bytes=8 << 30)
    plan = make_plan(Problem(9000, 9000, 9000), [device], 300, split="cols")
    assert plan.turns_in_memory and len(plan.strips) >= plan.turns
    (summands,) = {id(strip.summands): strip.summands for strip in plan.strips}.values()
    assert summands == tuple((worker,) for worker in range(300))
