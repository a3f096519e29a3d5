"""Links are measured once and kept; bounds and predictions follow from them. No GPU needed."""

import dataclasses
import itertools
import json
import math
import threading
import time

import numpy as np
import pytest
from click.testing import CliRunner

from hybrid_gemm.arrays.operand import CallerArrays, Operand, Operands
from hybrid_gemm.bench import links, tune
from hybrid_gemm.cli import cli
from hybrid_gemm.devices import open_devices
from hybrid_gemm.errors import UnavailableError
from hybrid_gemm.execution import staging
from hybrid_gemm.planning import cost_model, link_rates
from hybrid_gemm.planning.hardware import DeviceSpec, Links
from hybrid_gemm.planning.planner import make_plan
from hybrid_gemm.problem import Problem, make_problem

# A host like those measured: what GPUs share of its links grows slower than their number.
HOST = Links(
    h2d=((1, 50.0), (2, 100.0), (4, 80.0)), d2h=((1, 40.0), (2, 60.0), (4, 60.0)),
    both=((1, 80.0), (2, 90.0), (4, 90.0)), peers=((2, 600.0), (4, 1200.0)),
    memcpy=((1, 10.0), (16, 40.0), (64, 30.0)), measured="2026-01-01",
)  # fmt: skip
GPU = DeviceSpec(
    "gpu", "cuda", 0, 2**40, tflops=50, memory_gbps=4000, link_gbps=20, peer_gbps=100,
    best_tflops=50, links=HOST,
)  # fmt: skip
CPU = DeviceSpec(
    "cpu", "cpu", 0, 2**40, tflops=0.1, memory_gbps=10, host_memory=True, on_gpu=False, alignment=1
)


def gpus(count, **changes):
    return [dataclasses.replace(GPU, name=f"gpu{i}", unit=i, **changes) for i in range(count)]


def test_the_rate_of_n_is_that_of_the_largest_measured_number_up_to_n():
    assert [cost_model.rate(HOST.h2d, n) for n in (1, 2, 3, 4, 8)] == [50, 100, 100, 80, 80]
    assert cost_model.rate(HOST.peers, 1) == 600


def test_the_bound_takes_each_byte_once_over_all_links():
    problem = Problem(2000, 3000, 1000)
    a_b, c = 4 * (2000 * 1000 + 1000 * 3000), 4 * 2000 * 3000
    for split in ("rows", "cols"):  # whatever a plan moves
        plan = make_plan(problem, gpus(4), 4, split=split)
        assert cost_model.bound(plan) == pytest.approx({
            "compute": problem.flops / (4 * 50e9), "h2d": a_b / 80e6, "d2h": c / 60e6,
            "h2d+d2h": (a_b + c) / 100e6, "staging": (a_b + c) / 40e6,
        })  # fmt: skip
        plan = make_plan(problem, gpus(4), 4, split=split, page_locked=True)
        assert "staging" not in cost_model.bound(plan)


@pytest.mark.parametrize(
    ("count", "gbps"),
    [(1, 80),  # both ways at once, which is more than each way alone
     (2, 100),  # to GPUs alone, after which C comes back: both ways at once go 90
     (4, 100),  # by two of them
     (3, 200), (5, 200)],  # of three nothing is known: no more than any number
)  # fmt: skip
def test_bytes_in_and_out_share_what_carries_them(count, gbps):
    links = HOST
    if count in (3, 5):
        links = dataclasses.replace(HOST, both=(*HOST.both[:2], (4, 200.0)))
    plan = make_plan(Problem(512, 512, 512), gpus(count, links=links), count, page_locked=True)
    assert cost_model.bound(plan)["h2d+d2h"] == pytest.approx(3 * 4 * 512**2 / (gbps * 1e6))


def test_four_gpus_of_one_host_are_bound_by_both_ways_at_once():
    """As measured: docs/results/peers4_h200.json. TF32 at 16384 took 20.2 ms there."""
    measured = dataclasses.replace(
        HOST, h2d=((1, 55.0), (4, 176.5)), d2h=((1, 55.1), (4, 145.2)), both=((1, 101), (4, 177.6))
    )
    rates = {"mode_tflops": (("tf32", 430.0),), "links": measured}
    problem = Problem(16384, 16384, 16384, compute="tf32")
    plan = make_plan(problem, gpus(4, **rates), 4, page_locked=True)
    terms = cost_model.bound(plan)
    assert max(terms, key=terms.__getitem__) == "h2d+d2h"
    assert terms["h2d+d2h"] == pytest.approx(18.1, abs=0.1)


def test_beta_brings_c_too_and_resident_data_crosses_nothing():
    with_beta = make_plan(Problem(100, 100, 100, beta=1), gpus(1), 1, split="rows")
    without = make_plan(Problem(100, 100, 100), gpus(1), 1, split="rows")
    assert cost_model.bound(with_beta)["h2d"] == pytest.approx(
        1.5 * cost_model.bound(without)["h2d"]
    )
    resident = make_plan(Problem(100, 100, 100), gpus(1), 1, split="rows", resident=True)
    assert list(cost_model.bound(resident)) == ["compute"]


def test_one_gpu_that_plays_four_multiplies_no_faster():
    problem = Problem(512, 512, 512)
    four = make_plan(problem, [GPU] * 4, 4, split="rows")
    one = make_plan(problem, [GPU], 1, split="rows")
    assert cost_model.bound(four) == cost_model.bound(one)


@pytest.mark.parametrize(
    ("size", "compute", "operands", "memory", "count"),
    [(512, "fp32x3", "float32", "pageable", 1), (1024, "fp32x3", "float32", "pageable", 2),
     (1024, "fp32", "float16", "pageable", 1), (4096, "fp32x3", "float32", "pageable", 2),
     (4096, "tf32", "float32", "pageable", 2), (8192, "fp32", "float32", "pageable", 2),
     (16384, "fp32x3", "float32", "pageable", 2), (8192, "fp32", "float16", "pageable", 2),
     (1024, "tf32", "float32", "pinned", 1), (2048, "fp32", "float16", "pinned", 1),
     (2048, "fp32", "float32", "pinned", 2), (4096, "fp32", "float32", "pinned", 2),
     (16384, "tf32", "float32", "pinned", 2), (8192, "fp32", "float16", "pinned", 2)],
)  # fmt: skip
def test_by_assumed_links_the_faster_count_of_gpus_is_chosen(
    size, compute, operands, memory, count
):
    """As measured on two H100s (docs/notes/several-gpus.md), and at 1024 from ordinary arrays on
    two H200s (docs/results/short_runs2_h200.json); here PCIe gives 55 GB/s."""
    known = {"links": None, "link_gbps": 55, "tflops": 52.5, "best_tflops": 55.3}
    modes = {"mode_tflops": (("fp32x3", 210.0), ("tf32", 338.0), ("narrow", 744.0))}
    problem = Problem(size, size, size, compute=compute, operands=operands)
    page_locked = memory == "pinned"
    plan = make_plan(problem, gpus(2, **known, **modes), (1, 2), page_locked=page_locked)
    assert len(plan.workers) == count


@pytest.mark.parametrize("count", [1, 2])
def test_slots_are_as_fast_as_the_slower_of_links_and_copies(count):
    """Where that was not measured."""
    quick, slow = (dataclasses.replace(HOST, memcpy=((1, gbps),)) for gbps in (1e9, 1.0))
    up, down, _both = cost_model._staged(quick, count)
    assert 0.5 * (50, 100)[count - 1] < up < (50, 100)[count - 1]
    assert 0.5 * (40, 60)[count - 1] < down < (40, 60)[count - 1]
    up, down, both = cost_model._staged(slow, count)
    assert up == down == both < 1


class Reader:
    """A device that reads some arrays of the host directly."""

    host_memory = False

    def __init__(self, *arrays):
        self.arrays = arrays

    def reads(self, array):
        return any(array is x for x in self.arrays)


def test_operands_are_page_locked_where_the_device_reads_all_of_them():
    a, b, out = np.ones((4, 3), "f4"), np.ones((3, 5), "f4"), np.empty((4, 5), "f4")
    problem = make_problem(a, b)
    described = [Operand.of(x) for x in (a, b)]
    operands = Operands(problem, *described, None, Operand.of(out))
    assert operands.page_locked(Reader(a, b, out))
    for some in ((a, b), (a, out), (b, out)):
        assert not operands.page_locked(Reader(*some))
    gpu = object()
    there = Operands(problem, *(Operand.of(x, gpu) for x in (a, b)), None, Operand.of(out, gpu))
    assert not there.page_locked(Reader(a, b, out))  # none is the host's
    half = dataclasses.replace(problem, operands="float16")
    assert not dataclasses.replace(operands, problem=half).page_locked(Reader(a, b, out))
    unread = dataclasses.replace(operands, c=Operand.of(out.copy()))  # beta is 0
    assert unread.page_locked(Reader(a, b, out))
    added = dataclasses.replace(unread, problem=dataclasses.replace(problem, beta=1))
    assert not added.page_locked(Reader(a, b, out))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_products_of_each_dtype_find_page_locked_arrays(dtype):
    a, b = np.ones((4, 3), dtype), np.ones((3, 5), dtype)
    arrays = CallerArrays.of(a, b, out=np.empty((4, 5), dtype))
    operands = arrays.described(
        arrays.problem(alpha=1, beta=0), open_devices("cpu", 1)[0], lambda x: None
    )
    assert operands.page_locked(Reader(a, b, arrays.out))
    given = dataclasses.replace(arrays, out=np.empty((4, 5), "c16"))
    cast = dataclasses.replace(operands, out=Operand.of(given.out))
    assert not cast.page_locked(Reader(a, b, given.out))


def test_there_is_no_bound_where_the_best_rate_is_not_known():
    plan = make_plan(Problem(64, 64, 64), [CPU], 2, split="rows")
    assert cost_model.bound(plan) == {}
    assert plan.predicted_ms > 0
    fast = Problem(64, 64, 64, compute="fp32x3")  # on tensor cores, at rates of their own
    assert cost_model.bound(make_plan(fast, gpus(1), 1)) == {}


@pytest.mark.parametrize("pinned", [True, False])
@pytest.mark.parametrize("split", ["rows", "cols"])
@pytest.mark.parametrize("resident", [True, False])
@pytest.mark.parametrize("shape", [(8192, 8192, 8192), (100, 200, 10**6), (30000, 30000, 64)])
def test_no_prediction_is_under_the_bound(shape, split, resident, pinned):
    for count in (1, 2, 4):
        plan = make_plan(
            Problem(*shape), gpus(count), count, split=split, resident=resident, page_locked=pinned
        )
        bound = max(cost_model.bound(plan).values())
        assert plan.predicted_ms >= bound * (1 - 1e-9)


def test_phases_overlap_on_gpus_and_add_up_on_the_host():
    plan = make_plan(Problem(4096, 4096, 4096), gpus(2), 2, split="cols")
    terms = cost_model.phases(plan)
    assert max(terms.values()) < plan.predicted_ms < sum(terms.values())
    plan = make_plan(Problem(512, 512, 512), [CPU], 2, split="cols")
    assert plan.predicted_ms == pytest.approx(sum(cost_model.phases(plan).values()))


def test_arithmetic_on_tensor_cores_is_expected_to_take_less():
    def multiply(device=GPU, **arithmetic):
        problem = Problem(8192, 8192, 8192, **arithmetic)
        return cost_model.phases(make_plan(problem, [device], 1))["multiply"]

    narrow = multiply(operands="bfloat16", out_dtype="bfloat16")
    assert narrow < multiply(compute="tf32") < multiply(compute="fp32x3") < multiply()
    elsewhere = dataclasses.replace(GPU, kind="emulator", on_gpu=False)
    assert multiply(elsewhere, compute="tf32") == multiply(elsewhere)


def test_slower_links_make_a_plan_slower():
    problem = Problem(8192, 8192, 8192)
    slow = dataclasses.replace(HOST, h2d=((1, 5.0),), both=((1, 5.0),))
    quick, late = (
        make_plan(problem, gpus(4, links=x), 4, split="cols").predicted_ms for x in (HOST, slow)
    )
    assert late > 3 * quick


def test_links_not_measured_are_assumed_and_say_so():
    plan = make_plan(Problem(64, 64, 64), gpus(2, links=None), 2, split="rows")
    found = cost_model.links(plan)
    assert not found.measured and cost_model.rate(found.h2d, 2) == 40
    assert set(cost_model.bound(plan)) == {"compute"}  # what is assumed bounds nothing
    assert cost_model.links(make_plan(Problem(8, 8, 8), [CPU], 1)) is None


@pytest.fixture(scope="module")
def measured():
    """Figures of the emulator's copies: what travels between arrays of the host."""
    devices, begun, seen = open_devices("emulator", 1, emulate=3), [], []

    def progress(total, _what):
        begun.append(total)
        return seen.append

    for ordinal, device in enumerate(devices):
        device.ordinal = ordinal
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(links, "ROW_BYTES", 1 << 12)
        patched.setattr(links, "ROWS", 1 << 7)
        data = links.measure(devices, lambda shape: np.empty(shape, "f4"), [1, 2], progress)
    assert begun == [links.ROUNDS * len(data["rows"])] == [len(seen)]
    return data


def test_a_rate_is_the_most_of_all_rounds(monkeypatch):
    """Whoever else is on the host makes copies slower for a while, never faster."""
    monkeypatch.setattr(links, "ROW_BYTES", 1 << 12)
    (device,) = open_devices("emulator", 1)
    device.ordinal = 0
    rates = itertools.count(1.0)
    monkeypatch.setattr(links.Links, "_gbps", lambda *_: next(rates))
    rows = links.measure([device], lambda shape: np.empty(shape, "f4"), [1])["rows"]
    assert rows[0]["gbps"] == 1 + 2 * len(rows)


def test_every_link_is_measured_alone_and_together(measured):
    rows = measured["rows"]
    assert all(math.isfinite(r["gbps"]) and r["gbps"] > 0 for r in rows)
    for link, memory in [("h2d", "pinned"), ("d2h", "pinned"), ("both", "pinned"),
                         ("h2d", "pageable"), ("d2h", "pageable"), ("h2d", "staged"),
                         ("d2h", "staged"), ("both", "staged")]:  # fmt: skip
        found = [r["at_once"] for r in rows if (r["link"], r["memory"]) == (link, memory)]
        assert found == [1, 2, 3]
    pairs = {(r["from"], r["to"]) for r in rows if r["link"] == "peer"}
    assert pairs == {(i, j) for i in range(3) for j in range(3) if i != j}
    assert [r["at_once"] for r in rows if r["link"] == "ring"] == [2, 3]
    assert [r["at_once"] for r in rows if r["link"] == "memcpy"] == [1, 2]


def test_measuring_counts_the_bytes_that_it_moves(monkeypatch):
    """By a clock that goes on by a second for 10^9 bytes copied, every rate is 1 GB/s."""
    monkeypatch.setattr(links, "ROW_BYTES", 1 << 12)
    devices = open_devices("emulator", 1, emulate=3)
    lock, copied = threading.Lock(), [0]

    def copy(dst, src, *_stream):
        with lock:
            copied[0] += src.nbytes

    for ordinal, device in enumerate(devices):
        device.ordinal, device.copy = ordinal, copy
    monkeypatch.setattr(np, "copyto", copy)
    monkeypatch.setattr(staging, "cast_into", lambda dst, src: None)  # the other copy of each byte
    monkeypatch.setattr(time, "perf_counter", lambda: copied[0] / 1e9)
    data = links.measure(devices, lambda shape: np.empty(shape, "f4"), [1, 3])
    assert {row["link"] for row in data["rows"]} == {"h2d", "d2h", "both", "peer", "ring", "memcpy"}
    assert {row["memory"] for row in data["rows"]} == {"pinned", "pageable", "staged", "device"}
    for row in data["rows"]:
        assert row["gbps"] == pytest.approx(1), row


def test_the_cost_model_knows_how_much_was_copied_through_slots():
    copied = links.REPEATS * links.ROWS * links.ROW_BYTES
    assert copied == cost_model.TIMED_BYTES


def test_figures_are_kept_for_these_gpus_alone(measured, monkeypatch, tmp_path):
    monkeypatch.setenv("HYBRID_GEMM_CACHE", str(tmp_path))
    link_rates.forget()
    assert link_rates.known(("aa", "bb")) is None
    link_rates.forget()
    link_rates.path(("bb", "aa")).write_text(json.dumps(measured))
    found = link_rates.known(("aa", "bb"))
    assert found == link_rates.from_data(measured)
    assert found.measured and [n for n, _ in found.h2d] == [1, 2, 3]
    assert [n for n, _ in found.staged_both] == [1, 2, 3]
    assert link_rates.known(("aa",)) is None
    link_rates.forget()


def test_files_of_before_copies_through_slots_were_measured_are_read(
    measured, monkeypatch, tmp_path
):
    monkeypatch.setenv("HYBRID_GEMM_CACHE", str(tmp_path))
    older = {**measured, "rows": [r for r in measured["rows"] if r["memory"] != "staged"]}
    link_rates.path(("aa",)).write_text(json.dumps(older))
    link_rates.forget()
    found = link_rates.known(("aa",))
    assert found.h2d and found.staged_h2d == found.staged_d2h == found.staged_both == ()
    plan = make_plan(Problem(4096, 4096, 4096), gpus(1, links=found), 1)
    assert plan.predicted_ms > 0 and "staging" in cost_model.phases(plan)
    link_rates.forget()


def test_one_gpu_has_no_peers_to_wait_for(measured):
    alone = {**measured, "rows": [r for r in measured["rows"] if r["link"] not in ("ring", "peer")]}
    found = link_rates.from_data(alone)
    plan = make_plan(Problem(64, 64, 64), [dataclasses.replace(GPU, links=found)] * 2, 2,
                     split="cols")  # fmt: skip
    assert cost_model.phases(plan)["peers"] == 0


def test_the_table_shows_every_figure(measured, capsys):
    tune.print_links({**measured, "gpus": ["gpu:0 Invented", "gpu:1", "gpu:2"], "table": "x"})
    shown = capsys.readouterr().out
    for row in measured["rows"]:
        assert f"{row['gbps']:.1f}" in shown


def test_without_a_gpu_it_is_refused_by_name():
    for device in ("cpu", "emulator"):
        with pytest.raises(UnavailableError, match=f"the device is {device}"):
            tune.host_links(device=device, gpus=None, progress=None, note=None)
    for option, *value in (["--quick"], ["--shapes", "64"], ["--samples", "3"], ["-o", "x"]):
        result = CliRunner().invoke(cli, ["tune", "--links", option, *value])
        assert "is for kernels, and --links was given" in str(result.exception)
    result = CliRunner().invoke(cli, ["tune", "--gpus", "0"])
    assert "--gpus is for --links" in str(result.exception)
