"""Plans over ranks: who makes and sums what, and what it costs."""

import dataclasses
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybrid_gemm.errors import OutOfMemoryError, UsageError
from hybrid_gemm.planning.hardware import DeviceSpec
from hybrid_gemm.planning.partition import Span
from hybrid_gemm.problem import Problem
from hybrid_gemm.ranks.rank_plan import make_rank_plan

GPU = DeviceSpec(
    "gpu", "cuda", 0, 80 * 2**30, tflops=40, memory_gbps=4000, link_gbps=20, peer_gbps=100
)
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
            assert plan.bytes_sent(rank) == plan.memory_bytes(rank) == 0
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
        depth = len(plan.members(plan.strips[0].owner))
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
        assert plan.memory_bytes(3) < slabs + c // ranks + 4 * c // plan.rounds
        assert plan.bytes_sent(3) == c - c // ranks


def test_grids_are_chosen_where_they_are_faster_or_fit():
    problem = Problem(65536, 65536, 65536)
    plan = make_rank_plan(problem, GPU, 4096)
    assert min(plan.grid) > 1
    assert plan.split == "grid"
    assert plan.predicted_ms < make_rank_plan(problem, GPU, 4096, split="cols").predicted_ms / 2
    with pytest.raises(OutOfMemoryError, match="GiB for it; more ranks need less"):
        make_rank_plan(Problem(2**18, 2**18, 2**18), GPU, 2)
    for asked in {"split": "rows"}, {"grid": (2, 1, 1)}:  # not where the plan is free already
        with pytest.raises(OutOfMemoryError, match="more ranks, or --split auto, need less"):
            make_rank_plan(Problem(2**18, 2**18, 2**18), GPU, 2, **asked)
    host = dataclasses.replace(GPU, host_memory=True)  # which its ranks share
    with pytest.raises(OutOfMemoryError, match="GiB for it; ranks on more hosts need less"):
        make_rank_plan(Problem(2**18, 2**18, 2**18), host, 2)
    assert make_rank_plan(problem, GPU, 8, grid=(2, 2, 2)).grid == (2, 2, 2)
    for wrong in ((2, 2, 1), (2, 2, 3)):
        with pytest.raises(UsageError, match="grid"):
            make_rank_plan(problem, GPU, 8, grid=wrong)


def test_blocks_that_lie_on_the_ranks_devices_take_no_memory():
    problem, mib = Problem(4096, 2048, 4096), 2**20
    for split, c in (("rows", 16), ("cols", 16 + 48)):  # a strip; and what is on its way
        small = dataclasses.replace(GPU, memory_bytes=c * mib)
        with pytest.raises(OutOfMemoryError, match="2 ranks"):
            make_rank_plan(problem, small, 2, split=split, rounds=2)
        plan = make_rank_plan(problem, small, 2, split=split, rounds=2, there=True)
        assert plan.split == split


def test_pages_of_files_take_no_memory_where_a_host_multiplies_them():
    problem, mib = Problem(64, 64, 2**24), 2**20
    small = dataclasses.replace(CPU, memory_bytes=mib)
    with pytest.raises(OutOfMemoryError, match="ranks on more hosts"):
        make_rank_plan(problem, small, 2)
    plan, beside = (make_rank_plan(problem, x, 2, mapped=True) for x in (small, CPU))
    assert plan.needs == max(plan.memory_bytes(rank) for rank in range(2)) <= mib
    assert plan.grid == beside.grid == make_rank_plan(problem, CPU, 2).grid
    assert plan.predicted_ms == make_rank_plan(problem, CPU, 2).predicted_ms
    copied = dataclasses.replace(problem, dtype="complex64")
    for other, spec in (copied, small), (problem, dataclasses.replace(GPU, memory_bytes=mib)):
        with pytest.raises(OutOfMemoryError):
            make_rank_plan(other, spec, 2, mapped=True)


@pytest.mark.parametrize("n", [64, 512, 4096])
def test_what_lies_where_it_is_read_is_not_cut_to_read_less(n):
    """A and B that all ranks have cost no time, so no partial sums have to travel."""
    spec = DeviceSpec("cpu", "cpu", 0, 8 << 30, 0.4, 10, host_memory=True, on_gpu=False)
    for ranks in (2, 3, 8):
        plan = make_rank_plan(Problem(n, n, n), spec, ranks, there=True)
        assert plan.grid[2] == 1
    long = make_rank_plan(Problem(8, 8, 10**6), spec, 4, there=True)
    assert long.grid == (1, 1, 4)


@pytest.mark.parametrize("n", [64, 512, 4096])
def test_two_hosts_bring_rows_to_each_other_and_no_partials(n):
    """Cores sum partials in time of their own, and whole rows travel as they lie."""
    assert make_rank_plan(Problem(n, n, n), CPU, 2).grid == (2, 1, 1)
    assert make_rank_plan(Problem(n, n, 100 * n), CPU, 2).grid == (1, 1, 2)


@pytest.mark.parametrize(("m", "n", "lines"), [(64, 100, 32), (65, 9, 33), (1, 90, 45), (0, 0, 1)])
def test_a_strip_has_no_more_rounds_than_lines(m, n, lines):
    started = time.process_time()
    plan = make_rank_plan(Problem(m, n, 50), CPU, 2, split="cols", rounds=10**9)
    assert plan.rounds == lines
    assert len(plan.owned(1)) == (lines if m else 0)
    assert plan.memory_bytes(1) == make_rank_plan(
        plan.problem, CPU, 2, split="cols", rounds=lines
    ).memory_bytes(1)
    assert time.process_time() - started < 5


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
    assert not any(plan.adds(rank) or plan.bytes_sent(rank) for rank in range(4))


def test_no_rank_is_sent_pieces_by_two_at_once():
    plan = make_rank_plan(Problem(60, 60, 60), CPU, 3, split="cols", rounds=2)
    for owners in zip(*([p.owner for p in plan.pieces(rank)] for rank in range(3)), strict=True):
        assert sorted(owners) == [0, 1, 2]
    assert [(p.owner, p.round) for p in plan.pieces(1)] == [
        (2, 0), (0, 0), (1, 0), (2, 1), (0, 1), (1, 1)
    ]  # fmt: skip


def test_one_block_of_several_that_is_a_sum_makes_sums():
    """The other cell has no rows."""
    plan = make_rank_plan(Problem(1, 8, 8), CPU, 4, grid=(2, 1, 2))
    assert plan.sums
    assert [plan.adds(rank) for rank in range(4)].count(True) == 2


@pytest.mark.parametrize("dtype", ["float32", "complex64", "float64"])
@pytest.mark.parametrize("grid", [(4, 1, 1), (1, 1, 4), (1, 2, 2), (2, 2, 1)])
def test_the_memory_that_is_asked_for_is_that_of_the_rank_that_keeps_most(grid, dtype):
    for rounds in 1, 2, 4:
        plan = make_rank_plan(Problem(64, 128, 256, dtype), GPU, 4, grid=grid, rounds=rounds)
        assert plan.needs == max(plan.memory_bytes(rank) for rank in range(4))


def test_bytes_and_operations_of_ranks():
    """B of a complex product is kept as the 2k x 2n of real numbers that it is multiplied as."""
    for dtype, size, expanded in (("float32", 4, 1), ("complex64", 8, 2)):
        plan = make_rank_plan(Problem(20, 30, 50, dtype), CPU, 2, split="rows")
        assert plan.bytes_input(0) == size * (10 * 50 + 50 * 30)
        assert plan.memory_bytes(0) == size * (10 * 50 + expanded * 50 * 30 + 10 * 30)
        assert plan.flops(0) + plan.flops(1) == plan.problem.flops
    adding = make_rank_plan(Problem(20, 30, 50, beta=1), CPU, 2, split="rows")
    assert adding.bytes_input(0) == 4 * (10 * 50 + 50 * 30 + 10 * 30)
    uneven = make_rank_plan(Problem(7, 9, 5), CPU, 3, grid=(3, 1, 1))
    assert sum(uneven.product_of(rank).m for rank in range(3)) == 7
    assert make_rank_plan(Problem(1, 9, 5), CPU, 3, split="rows").product_of(0).m == 1


def test_a_grid_that_fits_is_taken_before_a_faster_one():
    problem, slow = Problem(256, 256, 65536), dataclasses.replace(GPU, peer_gbps=0.01)
    fastest = make_rank_plan(problem, slow, 4)
    needs = {
        grid: make_rank_plan(problem, slow, 4, grid=grid, rounds=1).needs
        for grid in ((4, 1, 1), (2, 2, 1), (2, 1, 2), (1, 2, 2), (1, 1, 4))
    }
    least = min(needs.values())
    assert fastest.needs > least
    fitting = make_rank_plan(problem, dataclasses.replace(slow, memory_bytes=least), 4)
    assert fitting.needs <= least


def test_rounds_that_were_asked_for_are_kept():
    """Also where more would need less memory, or data lies cut already."""
    problem = Problem(512, 512, 512)
    needs = make_rank_plan(problem, CPU, 2, split="cols", rounds=1).needs
    less = dataclasses.replace(CPU, memory_bytes=needs - 1)
    with pytest.raises(OutOfMemoryError, match="2 ranks"):
        make_rank_plan(problem, less, 2, split="cols", rounds=1)
    ks = [Span(0, 100), Span(100, 512)]
    spans = [Span(0, 512)], [Span(0, 512)], ks
    plan = make_rank_plan(problem, CPU, 2, split="cols", grid=(1, 1, 2), spans=spans, rounds=3)
    assert [plan.box(rank).ks for rank in range(2)] == ks
    assert plan.rounds == 3


def test_data_on_gpus_takes_rounds_of_4096_rows():
    """As docs/mpi.md says."""
    for rows, rounds in ((8192, 1), (16384, 2), (32768, 4), (2**19, 8)):
        plan = make_rank_plan(
            Problem(rows, 64, 4096), GPU, 2, split="cols", resident=True
        )  # fmt: skip
        assert plan.rounds == rounds


def test_what_cores_make_in_two_milliseconds_is_brief():
    problem = Problem(4096, 4096, 4096)
    plan = make_rank_plan(problem, CPU, 2, split="rows")
    assert plan.brief(0, 4, 4) and not plan.brief(0, 2048, 4096)
    assert not make_rank_plan(problem, GPU, 2, split="rows").brief(0, 4, 4)


def ms(*sides, spec=GPU, dtype="float32", ranks=2, split="cols", **options):
    return make_rank_plan(
        Problem(*sides, dtype), spec, ranks, split=split, **options
    ).predicted_ms  # fmt: skip


def test_predicted_times_have_what_links_take():
    c_ms = 4 * 8192 * 8192 / 2 / 100e6  # of what each rank sends, at 100 GB/s
    assert ms(8192, 8192, 2, rounds=8) > c_ms
    assert ms(8192, 8192, 2, rounds=8) < ms(8192, 8192, 2, rounds=1)
    inputs_ms = 4 * (4096 * 2048 + 2048 * 4096) / 20e6
    there = ms(4096, 4096, 4096, resident=True, rounds=1)
    assert ms(4096, 4096, 4096, rounds=1) - there == pytest.approx(inputs_ms, rel=0.01)
    # An unknown link between hosts is no infinite one.
    assert ms(4096, 4096, 64, spec=CPU) > ms(
        4096, 4096, 64, spec=dataclasses.replace(CPU, peer_gbps=1000)
    )


def test_predicted_times_have_what_cores_and_units_take():
    """A core that sums does not multiply then; a GPU does."""
    near = {"link_gbps": 1e6, "peer_gbps": 1e6}
    cpu, gpu = (dataclasses.replace(x, **near) for x in (CPU, GPU))
    sums = [ms(4096, 4096, 64, spec=cpu, rounds=rounds) for rounds in (1, 8)]
    assert sums[0] == pytest.approx(sums[1], rel=0.01)
    sums = [ms(4096, 4096, 64, spec=gpu, rounds=rounds) for rounds in (1, 8)]
    assert sums[0] > 1.1 * sums[1]
    size = 4096, 4096, 4096  # four multiplications of real numbers are one of complex ones
    rows = [ms(*size, spec=cpu, split="rows", dtype=dtype) for dtype in ("float32", "complex64")]
    assert rows[1] == pytest.approx(4 * rows[0], rel=0.05)
