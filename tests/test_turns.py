"""Turns: what they take of memory, and that the memory decides no sum but by one of three ways of
cutting K."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybrid_gemm.errors import OutOfMemoryError
from hybrid_gemm.planning.hardware import DeviceSpec
from hybrid_gemm.planning.on_grid import Cuts, Task, on_grid
from hybrid_gemm.planning.planner import TURNS_IN_MEMORY, make_plan, memory_needs
from hybrid_gemm.problem import Problem

GPU = DeviceSpec("gpu", "cuda", 0, 2**40, tflops=40, memory_gbps=4000, link_gbps=20, peer_gbps=100)
few = st.integers(1, 4)


@given(
    st.tuples(*[st.integers(1, 900)] * 3),
    st.tuples(few, few, few),
    st.tuples(*[st.sampled_from([1, 2, 3, 8])] * 3),
    st.integers(1, 3),
    st.sampled_from(["ordered", "nccl"]),
    st.sampled_from(["fp32", "fp32x3"]),
    st.sampled_from([(None, None, None), (0, None, 0), (None, 0, 0)]),
)
def test_a_sample_of_turns_takes_the_memory_of_all(
    sides, shape, cut, count, reduce, compute, homes
):
    devices = tuple(replace(GPU, unit=unit) for unit in range(count))
    problem = Problem(*sides, beta=1, compute=compute)
    task = Task(problem, devices, reduce=reduce, homes=homes)
    rows, cols, ks = cut
    cuts = Cuts(rows, cols, (1,) * ks, TURNS_IN_MEMORY)
    whole, sample = (on_grid(task, task.grid(shape), cuts, sample=x) for x in (False, True))
    assert memory_needs(whole) == memory_needs(sample)
    assert len(sample.blocks) <= len(whole.blocks)


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
        cut = tuple(
            tuple((box.ks.start, box.ks.stop) for box in worker.tiles[0]) for worker in plan.workers
        )
        for worker in plan.workers:  # every element of C is a sum over the same chunks
            for tile in worker.tiles:
                assert [box.ks for box in tile] == [box.ks for box in worker.tiles[0]]
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
