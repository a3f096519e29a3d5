"""K in chunks, so that products of host arrays begin early: when plans have them, and what comes
out."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.arrays import integers
from test_gpu_plans import GPU

from hybrid_gemm import Runner
from hybrid_gemm.planning import on_grid, planner
from hybrid_gemm.planning.partition import Span, cut_in, cut_span
from hybrid_gemm.planning.planner import make_plan, memory_needs
from hybrid_gemm.problem import Problem

LARGE = Problem(32768, 32768, 32768, compute="fp32x3")
NARROW = Problem(16384, 16384, 32768, operands="float16", out_dtype="float16")
flag, counts = st.booleans(), st.integers(1, 4)
SLOW = {"mode_tflops": (("narrow", 200.0),)}  # so that chunks would be worth it


def chunks(plan):
    """The spans of K of each worker's boxes in its first tile, once each."""
    return [list(dict.fromkeys(box.ks for box in w.boxes)) for w in plan.workers]


def test_parts_are_as_long_as_their_shares():
    assert cut_in(Span(0, 4096), (1, 1, 2), 32) == [
        Span(0, 1024),
        Span(1024, 2048),
        Span(2048, 4096),
    ]
    assert cut_in(Span(5, 15), (1, 3)) == [Span(5, 7), Span(7, 15)]
    assert cut_in(Span(0, 7), (1,)) == [Span(0, 7)] and cut_in(Span(0, 0), ()) == []
    for size in range(1, 40):
        assert cut_in(Span(3, 3 + size), (1,) * 5, 2) == cut_span(Span(3, 3 + size), 5, 2)


@pytest.mark.parametrize("page_locked", [False, True])
@pytest.mark.parametrize("count", [1, 2])
def test_large_products_come_in_chunks_where_that_is_predicted_to_be_faster(
    monkeypatch, count, page_locked
):
    gpus = [dataclasses.replace(GPU, name=f"gpu{i}", unit=i) for i in range(count)]
    plan = make_plan(LARGE, gpus, count, page_locked=page_locked)
    (first, *more), *_ = chunks(plan)
    assert more and not plan.turns_in_memory and len(first) <= len(more[-1])
    monkeypatch.setattr(planner, "CHUNKS", ((1,),))
    whole = make_plan(LARGE, gpus, count, page_locked=page_locked)
    assert whole.turns == 1 and plan.predicted_ms < 0.98 * whole.predicted_ms


@pytest.mark.parametrize(
    ("problem", "changes"),
    [
        (LARGE, {"checked": True}),  # a copy of what is added to would be kept
        (Problem(4096, 4096, 4096), {}),  # too short
        (NARROW, SLOW),  # C would leave as float32
    ],
    ids=["checked", "short", "narrow"],
)  # fmt: skip
def test_others_come_whole(problem, changes):
    gpu = dataclasses.replace(GPU, **changes)
    assert make_plan(problem, [gpu], 1, page_locked=True).turns == 1


def test_turns_cut_k_where_the_plan_without_turns_does():
    """So that the memory that is free does not change the bits."""
    problem = Problem(32768, 32768, 32768)
    gpu = dataclasses.replace(GPU, links=None, link_gbps=10)
    little = dataclasses.replace(gpu, memory_bytes=9 << 30)
    whole, in_turns = (make_plan(problem, [x], 1, page_locked=True) for x in (gpu, little))
    assert in_turns.turns_in_memory and len(in_turns.workers[0].boxes) > len(chunks(in_turns)[0])
    assert chunks(in_turns) == chunks(whole) and len(chunks(whole)[0]) > 1


def test_a_plan_without_turns_has_its_chunks_or_is_none(monkeypatch):
    """Where all of K would just fit, and its chunks, which are padded, just do not."""
    problem = Problem(32768, 32768, 32768, compute="tf32")
    with monkeypatch.context() as without:
        without.setattr(planner, "CHUNKS", ((1,),))
        (enough,) = memory_needs(make_plan(problem, [GPU], 1, page_locked=True))
    whole = make_plan(problem, [GPU], 1, page_locked=True)
    assert len(chunks(whole)[0]) > 1 and memory_needs(whole) > [enough]
    tight = dataclasses.replace(GPU, memory_bytes=enough)
    assert make_plan(problem, [tight], 1, page_locked=True).turns_in_memory


def planned_both_ways(sides, compute, gpus, page_locked):
    """The plan for so many GPUs, and the one of all kinds of parts and chunks, none left out."""
    specs = [dataclasses.replace(GPU, name=f"gpu{i}", unit=i) for i in range(gpus)]
    asked = Problem(*sides, compute=compute), specs, [*range(1, gpus + 1)]
    plan = make_plan(*asked, page_locked=page_locked)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planner, "distinct", lambda _task, _grid, _cuts, kinds: kinds)
        patch.setattr(planner, "CHUNK_PIECES", len(on_grid.PIECES))
        return plan, make_plan(*asked, page_locked=page_locked)


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_plans_that_are_left_out_are_hardly_faster(data):
    """Kinds of parts that are taken for the same are."""
    sides = [data.draw(st.integers(7, 4096)) * 8 for _ in range(3)]
    compute = data.draw(st.sampled_from(["fp32", "fp32x3", "tf32"]))
    plan, full = planned_both_ways(sides, compute, data.draw(counts), data.draw(flag))
    assert plan.predicted_ms <= 1.04 * full.predicted_ms
    if plan.turns == full.turns == 1:
        assert plan == full


@pytest.mark.parametrize("sides, gpus", [((17480, 25888, 26328), 1), ((17464, 27176, 21872), 1)])
def test_chunks_come_in_all_parts_that_matter(sides, gpus):
    """In the best two kinds alone, or three, these would take 12 and 4 % longer."""
    plan, full = planned_both_ways(sides, "fp32x3", gpus, page_locked=True)
    assert full.turns > 1 and plan.predicted_ms <= 1.02 * full.predicted_ms


@pytest.mark.parametrize("ks", [(1, 1, 2), pytest.param((1, 3), marks=pytest.mark.campaign)])
@pytest.mark.parametrize(
    "options",
    [
        {}, {"beta": -1, "alpha": 2}, {"compute": "fp32x3"}, {"threads": 2, "split": "rows"},
        {"threads": 2, "split": "cols", "beta": 1}, {"threads": 3, "grid": (1, 3, 1)},
        {"alpha": np.inf}, {"alpha": -1e38, "beta": 2, "threads": 2, "split": "rows"},
    ],
    ids=str,
)  # fmt: skip
def test_chunks_have_the_right_sums(kernel_device, monkeypatch, rng, options, ks):
    monkeypatch.setattr(on_grid, "PART_BYTES", 256)
    monkeypatch.setattr(on_grid, "PART_SIDE", {"A": 64, "B": 64})
    monkeypatch.setattr(planner, "_whole_cuts", lambda task, shape: on_grid.Cuts(ks=ks))
    m, n, k = 160, 192, 270
    a, b = integers(rng, (m, k)), integers(rng, (k, n))
    scales = {name: options[name] for name in ("alpha", "beta") if name in options}
    c = integers(rng, (m, n)) if "beta" in scales else None
    threads = options.get("threads", 1)
    given = {name: value for name, value in options.items() if name not in scales}
    runner = Runner(
        device=kernel_device, **{**given, "threads": threads, "emulate_devices": threads}
    )
    with np.errstate(invalid="ignore", over="ignore"):  # alpha times the whole sum
        expected = np.float32(scales.get("alpha", 1)) * (a @ b)
    if c is not None:
        expected += scales["beta"] * c
    for _ in range(3):  # the third time as a list of commands
        out = np.full((m, n), np.nan, np.float32)
        result = runner.run(a, b, c, out=out, **scales)
        assert np.array_equal(result.c, expected, equal_nan=True)
    assert {len(each) for each in chunks(result.plan)} == {len(ks)}
