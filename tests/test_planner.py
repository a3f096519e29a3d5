"""Plans are pure: every index of the cuboid is in one box, every element of C in one strip."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from hybrid_gemm.errors import OutOfMemoryError, UsageError
from hybrid_gemm.planning import planner
from hybrid_gemm.planning.cost_model import least_ms, predict_ms
from hybrid_gemm.planning.hardware import DeviceSpec
from hybrid_gemm.planning.partition import Grid, cut, grids
from hybrid_gemm.planning.planner import make_plan, memory_needs
from hybrid_gemm.problem import Problem

GPU = DeviceSpec("gpu", "cuda", 0, 2**40, tflops=40, memory_gbps=4000, link_gbps=20)
CPU = DeviceSpec(
    "cpu", "cpu", 0, 2**40, tflops=0.1, memory_gbps=10, host_memory=True, on_gpu=False, alignment=1
)
sizes = st.integers(0, 70)


@given(st.integers(0, 10**6), st.integers(1, 64), st.sampled_from([1, 8, 32]))
@example(500, 4, 32)  # a part has less than four units
def test_cut_covers_and_balances(size, parts, align):
    spans = cut(size, parts, align)
    assert len(spans) == parts
    assert spans[0].start == 0 and spans[-1].stop == size
    assert all(a.stop == b.start for a, b in itertools.pairwise(spans))
    lengths = [len(s) for s in spans]
    unit = align if size >= 4 * align * parts else 1
    assert max(lengths) - min(lengths) < 2 * unit
    assert all(s.start % unit == 0 for s in spans)


@given(sizes, sizes, sizes, st.integers(1, 9), st.integers(1, 3),
       st.sampled_from(["rows", "cols", "auto"]), st.sampled_from([CPU, GPU]))  # fmt: skip
def test_boxes_and_strips_tile_the_product(m, n, k, workers, devices, split, spec):
    plan = make_plan(Problem(m, n, k), [spec] * devices, workers, split=split)
    assert len(plan.workers) == workers
    seen = np.zeros((m, n, k), int)
    for worker in plan.workers:
        for box in worker.boxes:
            seen[box.rows.slice, box.cols.slice, box.ks.slice] += 1
    assert (seen == 1).all()
    owned = np.zeros((m, n), int)
    for strip in plan.strips:
        owned[strip.rows.slice, strip.cols.slice] += 1
        assert plan.workers[strip.owner].boxes
        # The partials of a strip cover K exactly once; its summands are in order.
        covered = [plan.workers[p].boxes[0].ks for p in sorted(strip.partials)]
        assert covered[0].start == 0 and covered[-1].stop == k
        assert all(a.stop == b.start for a, b in itertools.pairwise(covered))
        assert list(strip.summands) == sorted(strip.summands)
        for group in strip.summands:  # several are on one other device
            on = {plan.workers[p].device for p in group}
            assert len(group) == 1 or (len(on) == 1 and plan.workers[strip.owner].device not in on)
    assert (owned == 1).all()


@given(sizes, sizes, sizes, st.integers(1, 12), st.integers(1, 3), st.booleans(),
       st.sampled_from([CPU, GPU, replace(GPU, on_gpu=False)]),
       st.sampled_from([2**40, 2**14]))  # fmt: skip
def test_no_plan_takes_less_than_its_grid_says(m, n, k, workers, devices, resident, spec, memory):
    """So grids that are passed over have no plan that would have been taken."""
    problem, specs = Problem(m, n, k), [replace(spec, unit=i) for i in range(devices)]
    specs = [replace(x, memory_bytes=memory) for x in specs]
    for shape in grids(workers):
        grid = Grid.even(problem, shape, spec.alignment)
        least = least_ms(problem, specs, grid, resident=resident)
        try:
            plan = make_plan(problem, specs, workers, grid=shape, resident=resident)
        except OutOfMemoryError:
            continue
        for page_locked in (False, True):
            assert 0 <= least <= predict_ms(replace(plan, page_locked=page_locked))


shown = st.sampled_from([1, 300, 3000, 30_000])


@given(shown, shown, shown, st.integers(1, 12), st.integers(1, 3), st.sampled_from([CPU, GPU]))
def test_no_other_grid_seems_better_than_the_one_taken(m, n, k, workers, devices, spec):
    problem, specs = Problem(m, n, k), [replace(spec, unit=i) for i in range(devices)]
    resident = spec.on_gpu  # else the two best come in other parts, too
    taken = make_plan(problem, specs, range(1, workers + 1), resident=resident)
    for count in range(1, workers + 1):
        for shape in grids(count):
            other = make_plan(problem, specs, count, grid=shape, resident=resident)
            assert planner._seems(taken) <= planner._seems(other), shape


def test_a_thousand_workers_are_planned_without_looking_at_every_grid(monkeypatch):
    seen = []
    monkeypatch.setattr(planner, "predict_ms", lambda plan: seen.append(plan) or predict_ms(plan))
    plan = make_plan(Problem(3000, 2000, 4000), [CPU], 1000)
    assert plan.grid == (10, 25, 4)
    assert len(seen) < 10 < len(grids(1000))


def test_more_workers_than_rows_shows_idle_ones():
    plan = make_plan(Problem(3, 5, 7), [CPU], 5, split="rows")
    assert [bool(w.boxes) for w in plan.workers].count(True) == 3
    assert len(plan.workers) == 5


@pytest.mark.parametrize(
    "homes, devices",
    [((None, None, None), [0, 1, 2, 3]), ((1, 0, 2), [2, 3, 0, 1]), ((3, 1, None), [1, 2, 3, 0])],
)
def test_workers_take_devices_in_order_from_that_of_c_or_b_or_a_on(homes, devices):
    four = [replace(GPU, unit=unit) for unit in range(4)]
    plan = make_plan(Problem(512, 64, 64), four, 4, split="rows", homes=homes)
    assert [worker.device for worker in plan.workers] == devices


def test_rows_share_b_on_one_device():
    plan = make_plan(Problem(64, 64, 64), [GPU], 4, split="rows")
    (b,) = [x for x in plan.blocks if x.operand == "B"]
    assert b.workers == (0, 1, 2, 3)
    assert plan.bytes_h2d == 2 * 64 * 64 * 4
    assert plan.bytes_d2h == 64 * 64 * 4


def test_rows_relay_b_between_devices():
    problem, two = Problem(64, 32, 128), [GPU, replace(GPU, unit=1)]
    plan = make_plan(problem, two, 2, split="rows")
    assert plan.bytes_h2d == (64 * 128 + 128 * 32) * 4 and plan.bytes_relayed == 128 * 32 * 4
    there = make_plan(problem, two, 2, split="rows", resident=True)
    assert there.bytes_h2d == there.bytes_d2h == there.bytes_relayed == 0


def test_cols_bring_each_byte_once_and_fetch_from_peers():
    plan = make_plan(Problem(64, 32, 64), [GPU, GPU], 2, split="cols")
    assert plan.bytes_h2d == (64 * 64 + 64 * 32) * 4
    assert plan.bytes_peer == 64 * 32 * 4  # half of C from each side
    assert plan.summed


def test_workers_of_one_device_send_one_subtotal():
    problem, two = Problem(64, 32, 64), [replace(GPU, unit=unit) for unit in range(2)]
    plan = make_plan(problem, two, 8, split="cols", resident=True)
    c = 64 * 32 * 4
    assert plan.bytes_peer == c  # half of C from each side, as by two workers
    for strip in plan.strips:
        own = strip.owner % 2
        others = tuple(range(1 - own, 8, 2))
        assert set(strip.summands) == {others, *((w,) for w in range(own, 8, 2))}
    # Four partials on each device, half of C as fetched and as subtotal, and that half itself.
    operands = 4 * (64 * 64 + 64 * 32) // 2
    assert [plan.memory_bytes(i) - operands for i in range(2)] == [4 * c + 3 * c // 2] * 2
    alone = make_plan(problem, two[:1], 8, split="cols", resident=True)
    assert not any(list(panel.subtotals) for panel in alone.panels)


def test_critical_moves_all_of_c_for_every_worker():
    plan = make_plan(Problem(64, 64, 64), [GPU], 4, split="cols", reduce="critical")
    c = 64 * 64 * 4
    assert plan.bytes_h2d == 2 * c + 4 * c
    assert plan.bytes_d2h == 4 * c


def test_auto_takes_rows_for_squares_and_cols_for_deep_products():
    assert make_plan(Problem(4096, 4096, 4096), [CPU], 4).split == "rows"
    assert make_plan(Problem(8, 8, 2**20), [GPU, GPU], 2, resident=True).split == "cols"


def test_a_split_or_a_grid_is_of_the_most_workers():
    """Of several numbers, however they are ordered; that would be worth less is not asked."""
    problem = Problem(64, 64, 64)
    for counts in ([1, 2, 4], [4, 2, 1], (2, 4)):
        assert make_plan(problem, [GPU] * 4, counts, split="rows").grid == (4, 1, 1)
        assert make_plan(problem, [GPU] * 4, counts, split="cols").grid == (1, 1, 4)
        assert make_plan(problem, [GPU] * 4, counts, grid=(2, 2, 1)).grid == (2, 2, 1)
        with pytest.raises(UsageError, match="is not 4 workers"):
            make_plan(problem, [GPU] * 4, counts, grid=(2, 1, 1))


def test_as_many_gpus_as_are_worth_starting():
    """Data on the GPUs: 2, 20 and 1300 ms of one. What only several together hold takes them."""
    eight = [replace(GPU, unit=unit) for unit in range(8)]
    counts = 1, 2, 4, 8
    used = [
        len(make_plan(Problem(n, n, n), eight, counts, resident=True).workers)
        for n in (64, 3400, 7400, 30000)
    ]
    assert used[0] == used[1] == 1 < used[2] < used[3] == 8
    assert len(make_plan(Problem(64, 64, 64), eight, 8, resident=True).workers) == 8
    small = [replace(x, memory_bytes=2**20) for x in eight]
    assert len(make_plan(Problem(512, 512, 512), small, counts, resident=True).workers) == 8
    with pytest.raises(OutOfMemoryError, match="over 8 workers"):
        make_plan(Problem(2048, 2048, 2048), small, counts, resident=True)


@pytest.mark.parametrize(
    "devices, gpus, n, k, compute, rows",
    [
        (2, 2, 8192, 8192, "fp32", [2048] * 3 + [1024] * 2),
        (4, 4, 8192, 8192, "fp32", [2048] * 3 + [1024] * 2),
        (8, 8, 8192, 8192, "fp32", [4096] * 2),  # one thread starts 56 copies for each panel
        (8, 1, 8192, 8192, "fp32", [2048] * 3 + [1024] * 2),  # one GPU that plays them takes longer
        (4, 4, 8192, 8192, "tf32", [4096] * 2),  # multiplied sooner
        (4, 4, 8192, 1024, "fp32", [4096] * 2),
        (8, 8, 16384, 16384, "fp32", [2336] * 6 + [1184] * 2),
        (8, 8, 4096, 4096, "fp32", [4096]),
    ],
)
def test_no_more_panels_than_one_thread_starts_meanwhile(devices, gpus, n, k, compute, rows):
    each = [replace(GPU, tflops=50, unit=i % gpus) for i in range(devices)]
    problem = replace(Problem(n, n, k), compute=compute)
    plan = make_plan(problem, each, devices, split="cols", resident=True)
    assert [len(panel.rows) for panel in plan.panels] == rows


def test_memory_is_refused_with_both_figures():
    small = DeviceSpec("small", "cuda", 0, 2**20, 1, 1, 1)
    with pytest.raises(OutOfMemoryError, match=r"needs 192 MiB on small, which has 1 MiB free"):
        make_plan(Problem(4096, 4096, 4096), [small], 2)


def test_operands_on_a_device_take_no_further_memory_there():
    """The partials of a split of K do, and what the other devices have of it."""
    problem, mib = Problem(1024, 512, 256), 2**20
    there = {"resident": True, "homes": (1, 1, 1)}
    two = [replace(GPU, unit=unit) for unit in range(2)]
    alone = make_plan(problem, two, 1, **there)
    assert [w.device for w in alone.workers] == [1] and memory_needs(alone) == [0, 0]
    rows = make_plan(problem, two, 2, split="rows", **there)
    assert [w.device for w in rows.workers] == [1, 0]
    assert memory_needs(rows) == [2 * mib, 0]  # half of A, all of B, half of C
    cols = make_plan(problem, two, 2, split="cols", **there)
    assert memory_needs(cols) == [int(4.75 * mib), 3 * mib]  # C, half of it again from the other,
    # and where C does not lie half of it finished, and half of A and B
    small = [replace(x, memory_bytes=mib) for x in two]
    assert len(make_plan(problem, small, (1, 2), **there).workers) == 1


def test_split_products_need_memory_for_their_parts():
    """4 bytes an element of A and B beside their 4, which are split once, and for each of two
    products at once 8 of what it reads, for the TF32 split; in turns where that does not fit. A
    product that is the only one to read its operands splits them itself, in 8 bytes."""
    sides = m, n, k = 4096, 2048, 8192
    plain = make_plan(Problem(*sides), [GPU], 1, split="rows")
    split = make_plan(Problem(*sides, compute="fp32x3"), [GPU], 1, split="rows")
    assert split.split_once and len(split.panels) > 1
    shares = [(len(panel.rows) + len(panel.cols)) * k for panel in split.panels]
    parts = sum(len(block.parts) for block in split.blocks)
    once = (m + n) * (4 * k + 8) + 64 * parts
    assert memory_needs(split)[0] == memory_needs(plain)[0] + once + 2 * 8 * max(shares)
    small = Problem(256, 128, 512)
    alone = make_plan(replace(small, compute="fp32x3"), [GPU], 1)
    assert not alone.split_once
    of_plain = memory_needs(make_plan(small, [GPU], 1))[0]
    assert memory_needs(alone)[0] == of_plain + 8 * (256 + 128) * 512
    small = replace(GPU, memory_bytes=memory_needs(plain)[0])
    assert make_plan(Problem(*sides), [small], 1, split="rows").turns_in_memory == 0
    turns = make_plan(Problem(*sides, compute="fp32x3"), [small], 1, split="rows")
    assert turns.turns_in_memory and memory_needs(turns)[0] <= small.memory_bytes


@pytest.mark.parametrize("reduce", ["nccl", "critical"])
def test_only_the_ordered_reduction_goes_in_turns(reduce):
    problem, small = Problem(2048, 2048, 2048), [replace(GPU, memory_bytes=2**24, unit=0)]
    small.append(replace(small[0], unit=1))
    assert make_plan(problem, small, 2, split="cols").turns_in_memory
    with pytest.raises(
        OutOfMemoryError, match=r"has 16 MiB free.* ordered reduction goes in turns"
    ):
        make_plan(problem, small, 2, split="cols", reduce=reduce)


@pytest.mark.parametrize(
    "sides, gib, cut, mib",
    [
        ((8192, 8192, 2**18), 1, (1, 1, 64), 256),
        ((8192, 16384, 2**18), 1, (1, 2, 64), 256),
        ((1024, 7168, 2**18), 1, (1, 1, 32), 256),
        ((65536, 65536, 65536), 16, (2, 2, 16), 1024),
    ],
)
def test_turns_are_worth_their_copies(sides, gib, cut, mib):
    """K is cut into chunks of A and B that are large, and C into no smaller tiles than needed."""
    plan = make_plan(Problem(*sides), [replace(GPU, memory_bytes=gib * 2**30)], 1)
    assert plan.turns_in_memory == 2
    boxes = plan.workers[0].boxes
    assert tuple(len({getattr(box, x) for box in boxes}) for x in ("rows", "cols", "ks")) == cut
    first = sum(block.elements for block in plan.blocks if block.turn == 0)
    assert 4 * first == mib * 2**20


def test_turns_without_k_bring_nothing_of_a_and_b():
    plan = make_plan(Problem(4096, 4096, 0, beta=1), [replace(GPU, memory_bytes=2**24)], 1)
    assert plan.turns_in_memory and plan.turns == 8 and not plan.blocks


def test_short_and_long_blocks_come_in_parts_of_about_256_mib():
    plan = make_plan(Problem(1024, 512, 10**6), [GPU], 1)
    assert 4 * max(block.elements for block in plan.blocks) == pytest.approx(2**28, rel=0.05)
    assert plan.turns == 15 and not plan.turns_in_memory
    assert make_plan(Problem(4096, 4096, 4096), [GPU], 1).turns == 1


def test_emulated_devices_share_one_memory():
    half = DeviceSpec("gpu", "cuda", 0, 2 * 2**20, 1, 1, 1)
    problem = Problem(512, 512, 256)  # 1 MiB of C; 0.5 each of A and B
    make_plan(problem, [half], 1, split="rows")
    with pytest.raises(OutOfMemoryError):
        make_plan(problem, [half, half], 2, split="cols")


def test_nccl_is_refused_only_where_something_is_to_be_summed_without_it():
    problem, two = Problem(64, 64, 64), [GPU, replace(GPU, unit=1)]
    for devices, split in (([CPU], "rows"), (two, "rows"), (two, "cols")):
        assert make_plan(problem, devices, 2, split=split, reduce="nccl").split == split
    assert make_plan(problem, [CPU], 2, reduce="nccl").split == "rows"
    with pytest.raises(UsageError, match="sums between GPUs, and the device is cpu"):
        make_plan(problem, [CPU], 2, split="cols", reduce="nccl")
    with pytest.raises(UsageError, match="3 workers of the grid 1 x 1 x 3 sum on 2 GPUs"):
        make_plan(problem, two, 3, split="cols", reduce="nccl")


def test_plans_of_millions_of_turns_are_refused_at_once():
    small = DeviceSpec("gpu", "cuda", 0, 2**30, 1, 1, 1)
    with pytest.raises(OutOfMemoryError, match=r"needs \d{7} turns .* and 1048576 are the most"):
        make_plan(Problem(10**6, 10**6, 10**6), [small], 1)


def test_turns_are_planned_only_where_nothing_fits_whole(monkeypatch):
    asked = []
    monkeypatch.setattr(planner, "_in_turns", lambda *given: asked.append(given) or (None, 1))
    problem = Problem(2**26, 2**26, 1)  # by cols a worker has a sum of all of C
    assert make_plan(problem, [CPU], 2).grid == (2, 1, 1) and not asked
    with pytest.raises(OutOfMemoryError, match="in turns it needs"):
        make_plan(problem, [CPU], 2, split="cols")
    assert len(asked) == 1
