"""Predictions piece by piece, by hand where they can be. No GPU needed."""

import dataclasses

import pytest

from hybrid_gemm.planning import cost_model, on_grid
from hybrid_gemm.planning.hardware import DeviceSpec, Links
from hybrid_gemm.planning.partition import cut
from hybrid_gemm.planning.pipeline import Pace, Runs, _HostLink, finished_ms
from hybrid_gemm.planning.planner import make_plan
from hybrid_gemm.problem import Problem

LINKS = Links(
    h2d=((1, 50.0), (2, 100.0)), d2h=((1, 50.0), (2, 100.0)), both=((1, 100.0), (2, 200.0)),
    peers=((2, 600.0),), memcpy=((1, 10.0), (16, 80.0)), measured="2026-01-01",
    ordinary=(10.0, 8.0),
)  # fmt: skip
GPU = DeviceSpec(
    "gpu", "cuda", 0, 2**40, tflops=50, memory_gbps=4000, link_gbps=50, peer_gbps=300,
    best_tflops=50, links=LINKS, mode_tflops=(("fp32x3", 200.0), ("tf32", 400.0)),
)  # fmt: skip


def gpus(count, **changes):
    return [dataclasses.replace(GPU, name=f"gpu{i}", unit=i, **changes) for i in range(count)]


def pace(**changes):
    """A GB takes a second over a link, a product 10 ms; nothing else takes time."""
    plain = Pace(
        up=lambda *run: 1.0, down=lambda *run: 1.0, beside=(1.0, 1.0), peer=1.0, start=0.0,
        start_sum=0.0, product=lambda unit, sides: 10.0,
        split=lambda unit, size: 0.0, add=lambda unit, size: 0.0,
    )  # fmt: skip
    return dataclasses.replace(plain, **changes)


MS = 4 * 1024 * 1024 / 1e6  # of 1024 x 1024 float32 over a link


def test_one_product_is_copied_multiplied_and_copied_back():
    plan = make_plan(Problem(1024, 1024, 1024), gpus(1), 1)
    assert len(plan.panels) == 1
    assert finished_ms(plan, pace()) == pytest.approx(2 * MS + 10 + MS)
    assert finished_ms(plan, pace(start=100.0)) == pytest.approx(100 + 10 + MS)


def test_the_c_that_is_added_comes_before_its_product():
    plan = make_plan(Problem(1024, 1024, 1024, beta=1), gpus(1), 1)
    assert finished_ms(plan, pace()) == pytest.approx(3 * MS + 10 + MS)


def test_a_sum_waits_for_the_c_that_is_added():
    plan = make_plan(Problem(1024, 1024, 1024, beta=1), gpus(2), 2, split="cols")
    assert plan.summed and len(plan.panels) == 1
    quick = pace(product=lambda unit, sides: 0.0, peer=1e9)
    assert finished_ms(plan, quick) == pytest.approx(MS + MS / 2 + MS / 2)


def test_each_worker_starts_its_own():
    plan = make_plan(Problem(1024, 1024, 1024), gpus(2), 2, split="rows")
    assert finished_ms(plan, pace(start=100.0)) == pytest.approx(100 + 10 + MS / 2)


def test_copies_both_ways_share_a_link():
    link = _HostLink((0.5, 0.5))
    assert link.upload(10) == 10
    link.download(12, 6)  # ends at 24, after 12 ms at half its rate
    assert link.upload(10) == 12 + 12 + 2  # 2 ms alone, 6 in the 12 ms, and the rest alone
    assert link.upload(1) == 27 and link.over() == 24
    link.download(26, 2)  # half a ms of it until the last upload is over
    assert link.over() == 27 + 1.5


def test_uploads_that_go_first_take_no_longer_for_downloads():
    link = _HostLink((1.0, 0.25))
    link.download(0, 5)
    assert link.upload(8) == 8 and link.over() == 8 + 5 - 8 / 4
    link.download(11, 1)
    link.download(11, 1)
    assert link.over() == 13


def test_a_download_has_what_uploads_leave_it(monkeypatch):
    monkeypatch.setattr(on_grid, "PART_BYTES", 1000)
    monkeypatch.setattr(on_grid, "PART_SIDE", {"A": 256, "B": 512})
    plan = make_plan(Problem(1024, 1024, 1024), gpus(1), 1)
    quick = pace(product=lambda unit, sides: 0.0)
    meanwhile, some, none = (
        finished_ms(plan, dataclasses.replace(quick, beside=(1.0, x))) for x in (1.0, 0.2, 0.0)
    )
    assert 2 * MS < meanwhile < some < none == pytest.approx(3 * MS)


@pytest.mark.parametrize("sides", [(0, 5, 5), (5, 0, 5), (5, 5, 0), (0, 0, 0)])
def test_nothing_takes_no_time(sides):
    """Also where uploads leave downloads nothing."""
    plan = make_plan(Problem(*sides), gpus(2), 2, split="rows")
    nothing = pace(beside=(1.0, 0.0), product=lambda unit, sides: 0.0)
    assert finished_ms(plan, nothing) == pytest.approx(0, abs=1e-3)


def under_way(gbps, count, ways):
    """Without what the copies that were timed took to begin and end."""
    size = count * ways * cost_model.TIMED_BYTES / 1e6
    return size / (size / gbps - cost_model.RUN_MS["pageable"])


def test_through_slots_plans_take_as_long_as_was_measured():
    slow = dataclasses.replace(
        LINKS, staged_h2d=((1, 30.0), (2, 40.0)), staged_d2h=((1, 30.0), (2, 40.0)),
        staged_both=((1, 35.0), (2, 45.0)),
    )  # fmt: skip
    for count in (1, 2):
        plan, derived = (
            make_plan(Problem(16384, 16384, 16384, compute="tf32"), gpus(count, links=x), count)
            for x in (slow, LINKS)
        )
        both = under_way(dict(slow.staged_both)[count], count, 2)
        moved = 4 * 16384**2 * 3 / 1e6 / both
        assert cost_model.phases(plan)["staging"] == pytest.approx(moved)
        assert max(moved, 1.1 * derived.predicted_ms) < plan.predicted_ms < 1.2 * moved
        locked = make_plan(plan.problem, gpus(count, links=slow), count, page_locked=True)
        assert locked.predicted_ms < derived.predicted_ms  # which goes through none
        # The bound is what no plan can beat: the largest of all rates of copying.
        assert cost_model.bound(plan)["staging"] == cost_model.bound(derived)["staging"]
    quick = dataclasses.replace(slow, staged_both=((1, 100.0),))
    plan = make_plan(plan.problem, gpus(1, links=quick), 1)
    least = 3 * 4 * 16384**2 / 1e6 / under_way(100, 1, 2)
    assert cost_model.bound(plan)["staging"] == pytest.approx(least)


def test_slots_are_filled_no_faster_than_the_host_copies():
    """As measured on four H200s: two GPUs reached 68 GB/s of 75, where 16 threads copied at 71."""
    fast = dataclasses.replace(
        LINKS, staged_h2d=((1, 90.0),), staged_d2h=((1, 90.0),), staged_both=((1, 110.0),)
    )
    up, down, both = cost_model._staged(fast, 1)
    assert up == down == pytest.approx(0.9 * 80) and both > 110


def test_a_shared_operand_comes_once_and_is_relayed():
    plan = make_plan(Problem(1024, 1024, 1024), gpus(2), 2, split="rows")
    # Half of A each; all of B to one GPU, and from there to the other, where all is later.
    assert finished_ms(plan, pace()) == pytest.approx(MS / 2 + MS + MS + 10 + MS / 2)
    assert finished_ms(plan, pace(peer=1e9)) == pytest.approx(MS / 2 + MS + 10 + MS / 2)
    alone = pace(peer=1e9, beside=(1.0, 1e-9), product=lambda unit, sides: 0.0)  # after all uploads
    assert finished_ms(plan, alone) == pytest.approx(MS / 2 + MS + MS / 2)


def test_a_gpu_sends_a_part_to_one_after_the_other():
    plan = make_plan(Problem(1024, 1024, 1024), gpus(4), 4, split="rows")
    assert finished_ms(plan, pace()) == pytest.approx(MS / 4 + MS + 3 * MS + 10 + MS / 4)


@pytest.mark.parametrize("count", [2, 4])
def test_partials_are_fetched_and_added_before_they_go(count):
    plan = make_plan(Problem(1024, 1024, 1024), gpus(count), count, split="cols")
    assert len(plan.panels) == 1
    share = MS / count  # of A, of B and of C; a worker fetches its strip of each other's partial
    alone = 2 * share + 10 + (count - 1) * share + share
    assert finished_ms(plan, pace()) == pytest.approx(alone)
    assert finished_ms(plan, pace(add=lambda unit, size: 7.0)) == pytest.approx(alone + 7)


def test_copies_are_rated_by_how_they_lie_in_host_memory():
    plan = make_plan(Problem(1024, 512, 256, beta=1), gpus(2), 2, split="cols")
    up, down = set(), set()
    finished_ms(plan, pace(up=lambda x: up.add(x) or 1.0, down=lambda x: down.add(x) or 1.0))
    half_of_c = Runs(4 * 512, 4 * 512, 4 * 512 * 512)
    assert down == {half_of_c}
    # Half of the columns of A, in all rows; half of the rows of B, of which others read the rest.
    assert up == {half_of_c, Runs(4 * 128, 4 * 256, 4 * 256 * 1024), Runs(2048, 2048, 256 * 2048)}


def test_products_overlap_with_copies(monkeypatch):
    monkeypatch.setattr(on_grid, "PART_BYTES", 1000)
    monkeypatch.setattr(on_grid, "PART_SIDE", {"A": 256, "B": 512})
    plan = make_plan(Problem(1024, 1024, 1024), gpus(1), 1)
    steps = len(plan.panels)
    assert steps > 3
    quick = pace(product=lambda unit, sides: 0.001, down=lambda *run: 1e9)
    last = plan.panels[-1].strips[0].elements * 4 / 1e6
    assert finished_ms(plan, quick) == pytest.approx(2 * MS, rel=0.01)
    slow = pace(product=lambda unit, sides: 100.0)
    first = sum(4 * len(block.parts[0]) * 1024 for block in plan.blocks) / 1e6
    assert finished_ms(plan, slow) == pytest.approx(first + 100 * steps + last)


def test_what_comes_split_is_split_once():
    plan = make_plan(Problem(8192, 8192, 8192, compute="fp32x3"), gpus(1), 1)
    seen = []
    finished_ms(plan, pace(split=lambda unit, size: seen.append(size) or 0.0))
    assert len(seen) == len(plan.panels) and sum(seen) == 2 * 4 * 8192**2
    plan = make_plan(dataclasses.replace(plan.problem, compute="tf32"), gpus(1), 1)
    finished_ms(plan, pace(split=lambda unit, size: pytest.fail("nothing is split")))


@pytest.mark.parametrize("lead", [1, 4, 16])
@pytest.mark.parametrize("parts", [(1, 1), (4, 4), (16, 3), (3, 16)])
def test_parts_come_in_turn_with_b_ahead(parts, lead):
    """Neither operand is more than a part ahead of the share at which all of B comes with one
    `lead`th of A; and each panel is what a new part makes possible."""
    rows, cols = (cut(960, count) for count in parts)
    made = 0
    for r, c in on_grid._arms(rows, cols, lead):
        made += len(r) * len(c)
        came = [sum(x.stop <= y.stop for x in z) for z, y in ((rows, r), (cols, c))]
        (a, b), (most_a, most_b) = came, parts
        assert (a - 1) * lead * most_b <= b * most_a or b == most_b
        assert a * lead * most_b > (b - 1) * most_a or a == most_a
    assert made == 960 * 960


def test_every_arithmetic_whose_rate_is_known_has_a_bound():
    sides = 16384, 16384, 16384
    for compute, tflops in (("fp32", 50), ("fp32x3", 200), ("tf32", 400)):
        problem = Problem(*sides, compute=compute)
        plan = make_plan(problem, gpus(1), 1)
        assert cost_model.bound(plan)["compute"] == pytest.approx(problem.flops / tflops / 1e9)
    narrow = Problem(*sides, operands="float16", out_dtype="float16")
    assert cost_model.bound(make_plan(narrow, gpus(1), 1)) == {}  # at a rate that is not known
    known = gpus(1, mode_tflops=(("narrow", 700.0),))
    found = cost_model.bound(make_plan(narrow, known, 1))
    assert found["h2d"] == pytest.approx(2 * 2 * 16384**2 / 50e6)
    assert found["d2h"] == pytest.approx(found["h2d"] / 2)


def test_small_arrays_of_one_gpu_are_copied_whole():
    plan = make_plan(Problem(512, 512, 512), gpus(1), 1)
    bytes_ = 4 * 512**2
    pageable = cost_model.predict_ms(plan)
    assert pageable == pytest.approx(
        cost_model.HOSTED_MS
        + cost_model.phases(plan)["multiply"]
        + 2 * bytes_ / 10e6
        + bytes_ / 8e6
    )
    page_locked = make_plan(Problem(512, 512, 512), gpus(1), 1, page_locked=True)
    assert page_locked.predicted_ms < pageable / 2
    # C counts once, as where the product is made (`programs/packed.py`): 7.7 MB.
    added = make_plan(Problem(800, 800, 800, beta=1), gpus(1), 1)
    assert added.bytes_h2d == 3 * 4 * 800**2 and cost_model.is_hosted(added)
    assert not cost_model.is_hosted(make_plan(Problem(840, 840, 840, beta=1), gpus(1), 1))


def test_without_measured_links_small_arrays_take_about_what_was_measured():
    """0.80 ms, at 1024 in float16: docs/results/host4_h200.json."""
    narrow = Problem(1024, 1024, 1024, operands="float16", out_dtype="float16")
    known = {"links": None, "link_gbps": 55, "mode_tflops": (("narrow", 744.0),)}
    assert make_plan(narrow, gpus(1, **known), 1).predicted_ms == pytest.approx(0.8, rel=0.15)
    slow = make_plan(narrow, gpus(1, **known | {"link_gbps": 3}), 1)  # than the driver's copies
    assert slow.predicted_ms > 3 * 2 * 1024**2 / 3e6


def test_as_many_gpus_work_as_should_be_fastest():
    for sides, count in ((512, 1), (32768, 2)):
        for compute in ("fp32", "fp32x3", "tf32"):
            problem = Problem(sides, sides, sides, compute=compute)
            plan = make_plan(problem, gpus(2), (1, 2))
            assert len(plan.workers) == count
            others = [make_plan(problem, gpus(2), n).predicted_ms for n in (1, 2)]
            assert plan.predicted_ms <= 1.03 * min(others)


def test_small_products_that_copies_bound_come_in_smaller_parts():
    """As measured on an H200 (docs/results/pieces1_h200.json): 1.11 ms instead of 1.31."""
    problem = Problem(2048, 2048, 2048, compute="fp32x3")
    plan = make_plan(problem, gpus(1), 1, page_locked=True)
    parts = {o: {p for x in plan.blocks if x.operand == o for p in x.parts} for o in "AB"}
    assert len(parts["A"]) == len(parts["B"]) == 2 and len(plan.panels) == 3
    task = on_grid.Task(problem, tuple(gpus(1)), page_locked=True)
    whole = on_grid.on_grid(task, task.grid((1, 1, 1)), on_grid.Cuts())
    assert len(whole.panels) == 1 and plan.predicted_ms < cost_model.predict_ms(whole)


def test_runs_of_page_locked_memory_are_slower_apart_and_more_so_over_many_bytes():
    def gbps(size, apart, over):
        return cost_model._straight_gbps(50.0, Runs(size, apart, over))

    assert gbps(4096, 4096, 2**31) == 50
    many, few = (
        [gbps(size << 10, 64 << 10, over) for size in (4, 8, 16, 32)] for over in (2**30, 2**29)
    )
    assert many == sorted(many) and few == sorted(few) and max(few) < 50
    assert all(x < y for x, y in zip(many, few, strict=True)) and many[0] < 25 < 40 < few[0]


@pytest.mark.parametrize("grid", [(1, 2, 1), (1, 1, 2), (2, 1, 1)])
def test_runs_lie_over_what_all_gpus_read(grid):
    """As measured on two H100s, whose halves of B by rows came no faster than all of it; and on
    H200s, whose chunks of K did not either (docs/results/chunks2_before_h200.json)."""
    k = 16384
    seen = set()
    plan = make_plan(Problem(k, k, k), gpus(2), 2, grid=grid)
    finished_ms(plan, pace(up=lambda runs: seen.add(runs) or 1.0))
    apart = {runs.over for runs in seen if runs.size < runs.apart}
    assert apart and apart <= {k * k * 4, k * k * 4 // grid[0]}
