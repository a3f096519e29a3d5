"""Plans over ranks: who makes and sums what, and what it costs."""

import dataclasses
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybrid_gemm.errors import OutOfMemoryError, UsageError
from hybrid_gemm.planning.hardware import DeviceSpec
from hybrid_gemm.problem import Problem
from hybrid_gemm.ranks.rank_plan import make_rank_plan

GPU = DeviceSpec(
    "gpu", "cuda", 0, 80 * 2**30, tflops=40, memory_gbps=4000, link_gbps=20, peer_gbps=100
)  # fmt: skip
CPU = DeviceSpec(
    "cpu", "cpu", 0, 2**40, tflops=0.1, memory_gbps=10, host_memory=True, on_gpu=False, alignment=1
)
sizes = st.integers(0, 60)


@given(sizes, sizes, sizes, st.integers(1, 9), st.sampled_from(["rows", "cols", "auto"]),
       st.none() | st.integers(1, 5), st.sampled_from([CPU, GPU]))  # fmt: skip
def test_pieces_tile_every_strip_and_bytes_add_up(m, n, k, ranks, split, rounds, spec):
    plan = make_rank_plan(Problem(m, n, k), spec, ranks, split=split, rounds=rounds)
    made, owned = np.zeros((m, n), int), np.zeros((m, n), int)
    for rank in range(ranks):
        if plan.box(rank) is None:
            assert plan.bytes_sent(rank) == plan.bytes_kept(rank) == 0
            continue
        pieces = plan.pieces(rank)
        for piece in pieces:
            made[piece.rows.slice, piece.cols.slice] += 1
        own = [p for p in pieces if p.owner == rank]
        assert own == plan.owned(rank)
        assert [p.round for p in own] == list(range(len(own)))
        for piece in own:
            owned[piece.rows.slice, piece.cols.slice] += 1
    if m and n:
        depth = len(plan.members(plan.plan.strips[0].owner))
        assert (made == depth).all()
        assert (owned == 1).all()
    sent = sum(plan.bytes_sent(rank) for rank in range(ranks))
    assert sent == sum(plan.bytes_received(rank) for rank in range(ranks))


@given(sizes, sizes, sizes, st.integers(1, 9), st.sampled_from(["rows", "cols", "auto"]),
       st.none() | st.integers(1, 5), st.sampled_from([CPU, GPU]))  # fmt: skip
def test_the_real_plan_of_a_complex_one_tiles_the_same_strips(
    m, n, k, ranks, split, rounds, spec
):  # fmt: skip
    plan = make_rank_plan(Problem(m, n, k, "complex64"), spec, ranks, split=split, rounds=rounds)
    real, made = plan.as_real, np.zeros((m, 2 * n), int)
    assert (real.problem.m, real.problem.n, real.problem.k) == (m, 2 * n, 2 * k)
    for rank in range(ranks):
        strip, wide = plan.strip(rank), real.strip(rank)
        assert plan.flops(rank) == real.flops(rank)
        if strip is None:
            assert wide is None
            continue
        assert (wide.cols.start, wide.cols.stop) == (2 * strip.cols.start, 2 * strip.cols.stop)
        assert plan.by_rows(rank) == real.by_rows(rank)
        for piece in real.owned(rank):
            assert wide.rows.start <= piece.rows.start and piece.rows.stop <= wide.rows.stop
            made[piece.rows.slice, piece.cols.slice] += 1
    if m and n:
        assert (made == 1).all()


def test_a_rank_keeps_slabs_and_strips_and_not_copies_of_c():
    problem = Problem(32768, 32768, 32768)
    c = 4 * 32768**2
    for ranks in (8, 16, 32):
        plan = make_rank_plan(problem, GPU, ranks, split="cols")
        slabs = 2 * c // ranks
        assert plan.bytes_kept(3) < slabs + c // ranks + 4 * c // plan.rounds
        assert plan.bytes_sent(3) == c - c // ranks


def test_grids_are_chosen_where_they_are_faster_or_fit():
    problem = Problem(65536, 65536, 65536)
    plan = make_rank_plan(problem, GPU, 4096)
    assert min(plan.plan.grid) > 1
    assert plan.plan.split == "grid"
    assert plan.predicted_ms < make_rank_plan(problem, GPU, 4096, split="cols").predicted_ms / 2
    with pytest.raises(OutOfMemoryError, match="GiB"):
        make_rank_plan(Problem(2**18, 2**18, 2**18), GPU, 2)
    assert make_rank_plan(problem, GPU, 8, grid=(2, 2, 2)).plan.grid == (2, 2, 2)
    for wrong in ((2, 2), (2, 2, 3), (8, 0, 1)):
        with pytest.raises(UsageError, match="grid"):
            make_rank_plan(problem, GPU, 8, grid=wrong)


def test_blocks_that_lie_on_the_ranks_devices_take_no_memory():
    problem, mib = Problem(4096, 2048, 4096), 2**20
    for split, c in (("rows", 16), ("cols", 16 + 48)):  # a strip; and what is on its way
        small = dataclasses.replace(GPU, memory_bytes=c * mib)
        with pytest.raises(OutOfMemoryError, match="2 ranks"):
            make_rank_plan(problem, small, 2, split=split, rounds=2)
        plan = make_rank_plan(problem, small, 2, split=split, rounds=2, there=True)
        assert plan.plan.split == split


@pytest.mark.parametrize("n", [64, 512, 4096])
def test_what_lies_where_it_is_read_is_not_cut_to_read_less(n):
    """A and B that all ranks have cost no time, so no partial sums have to travel."""
    spec = DeviceSpec("cpu", "cpu", 0, 8 << 30, 0.4, 10, host_memory=True, on_gpu=False)
    for ranks in (2, 3, 8):
        plan = make_rank_plan(Problem(n, n, n), spec, ranks, there=True)
        assert plan.plan.grid[2] == 1
    long = make_rank_plan(Problem(8, 8, 10**6), spec, 4, there=True)
    assert long.plan.grid == (1, 1, 4)


@pytest.mark.parametrize("n", [64, 512, 4096])
def test_two_hosts_bring_rows_to_each_other_and_no_partials(n):
    """Cores sum partials in time of their own, and whole rows travel as they lie."""
    assert make_rank_plan(Problem(n, n, n), CPU, 2).plan.grid == (2, 1, 1)
    assert make_rank_plan(Problem(n, n, 100 * n), CPU, 2).plan.grid == (1, 1, 2)


@pytest.mark.parametrize(("m", "n", "lines"), [(64, 100, 32), (1, 90, 45), (0, 0, 1)])
def test_a_strip_has_no_more_rounds_than_lines(m, n, lines):
    started = time.monotonic()
    plan = make_rank_plan(Problem(m, n, 50), CPU, 2, split="cols", rounds=10**9)
    assert plan.rounds == lines
    assert len(plan.owned(1)) == (lines if m else 0)
    assert plan.bytes_kept(1) == make_rank_plan(
        plan.problem, CPU, 2, split="cols", rounds=lines
    ).bytes_kept(1)
    assert time.monotonic() - started < 5


@pytest.mark.parametrize("shape", [(512, 512, 512), (4096, 4096, 4096), (20000, 16, 16)])
def test_hosts_take_one_round_where_memory_lets_them(shape):
    """Cores make large pieces faster."""
    plan = make_rank_plan(Problem(*shape), CPU, 2, split="cols")
    assert plan.rounds == 1
    on_gpus = make_rank_plan(Problem(*shape), GPU, 2, split="cols").rounds
    assert on_gpus == max(1, min(8, shape[0] // 2 // 512))
    less = dataclasses.replace(CPU, memory_bytes=plan.needs - 1)
    assert make_rank_plan(Problem(*shape), less, 2, split="cols").rounds > 1


def test_a_split_by_rows_has_one_round_and_no_sum():
    plan = make_rank_plan(Problem(100, 100, 100), CPU, 4, split="rows")
    assert plan.rounds == 1
    assert not any(plan.summed(rank) or plan.bytes_sent(rank) for rank in range(4))
