"""Every table of every command in terminals of 80 and 160 columns, with rows that were measured."""

import functools
import json
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from support.devices import needs

from hybrid_gemm import Runner, catalog
from hybrid_gemm.bench import compare, models, study, tune, warm
from hybrid_gemm.bench.accuracy import AccuracyStudy
from hybrid_gemm.bench.kernels import KernelStudy
from hybrid_gemm.bench.libraries import LibraryStudy
from hybrid_gemm.cli import kernel_listing
from hybrid_gemm.errors import UnavailableError
from hybrid_gemm.execution.timeline import PHASES, Activity, Timeline
from hybrid_gemm.experiments import engine, output
from hybrid_gemm.planning.hardware import DeviceSpec
from hybrid_gemm.problem import Problem
from hybrid_gemm.ranks.rank_plan import make_rank_plan
from hybrid_gemm.reporting import console, rank_report, table_layout, thread_report
from hybrid_gemm.reporting.table_layout import Column
from hybrid_gemm.verify import verify

ROOT = Path(__file__).resolve().parents[1]
WIDE = 2000  # where nothing wraps


def few(name: str) -> dict:
    """The first rows of a committed result that has hundreds."""
    return results(name) | {"rows": results(name)["rows"][:60]}


@functools.cache
def results(name: str) -> dict:
    return json.loads((ROOT / "docs/results" / f"{name}.json").read_text())


def a_result(device: str, **options):
    """Shows a product in that way, and its plan."""

    @functools.cache
    def made():
        rng = np.random.default_rng(0)
        a, b = (rng.integers(-4, 5, (90, 90)).astype("f4") for _ in "ab")
        runner = Runner(device=device, **options)
        result = runner.run(a, b)
        return runner, result, verify(result.plan.problem, a, b, None, result.c)

    def show():
        runner, result, verdict = made()
        thread_report.print_plan(result.plan, str(result.variant))
        thread_report.print_result(result, verdict, runner.describe(result.plan))

    return show


def ranks(count: int, **options):
    """Shows a plan over ranks, and a result whose times are invented."""

    def show():
        spec = DeviceSpec("NVIDIA H200 of each rank", "cuda", 0, 140 << 30, 50.0, 4000.0)
        problem = Problem(20000, 16384, 131072)
        plan = make_rank_plan(problem, spec, count, threads=2, **options)
        places = [(f"gpu-node-{i // 8:04}.cluster.example", f"cuda:{i % 8}") for i in range(count)]
        rank_report.print_plan(plan, "tuned[BM=128 BN=256 BK=16 TM=8 TN=16]", problem, places)
        timeline = Timeline(lambda: [
            Activity(worker, phase, 10.0 * i, 10.0 * i + 1234.567)
            for worker in range(2 * count) for i, phase in enumerate(PHASES)
        ])  # fmt: skip
        result = SimpleNamespace(
            plan=plan, problem=problem, timeline=timeline, variant=catalog.get("tuned").variant(),
            compute="strict float32", reduction="ordered sum over ranks by CUDA IPC",
            total_ms=12345.6, gflops=54321.0, checks=None, executor="python",
        )  # fmt: skip
        rank_report.print_result(result, plan, None, places)

    return show


def listing():
    """The catalog, and one kernel compiled where there is a compiler."""
    data = kernel_listing.kernels([], None, "float32")
    try:
        data["compiled"] = kernel_listing.kernels(["naive"], "sm_90", "float32")["compiled"]
    except UnavailableError as error:
        pytest.skip(str(error))
    for named in (False, True):
        kernel_listing.print_kernels(data, named)


def one_of_each(name: str):
    """Shows one experiment of the published results."""
    data = results("experiments_h200")
    output.show(data | {"experiments": [x for x in data["experiments"] if x["name"] == name]})


@functools.cache
def on_the_cpu(name: str) -> dict:
    """An experiment for GPUs as it ends here: with a note in nearly every row."""
    return engine.run(engine.choose_experiments([name]), device="cpu")


def with_calls(name):
    """Results with what a call takes the host, too."""
    data = results(name)
    return data | {"rows": [row | {"call_us": 5.3} for row in data["rows"]]}


def compared(name: str):
    """Shows a result beside itself."""
    data = results(name)
    table = compare.table(compare.compare(data, data, names=("old.json", "new.json")))
    console.table(table.headings, table.rows, title=table.title)


TABLES = {
    "compare": lambda: compared("peers4_h200"),
    "compare, kernels": lambda: compared("fp32x3_h200"),
    "bench": lambda: study.show(KernelStudy, results("tf32_h200")),
    "bench, with calls": lambda: study.show(KernelStudy, with_calls("tf32_h200")),
    "bench, many columns": lambda: study.show(KernelStudy, results("fp32x3_h200")),
    "bench, narrow": lambda: study.show(KernelStudy, results("narrow_h200")),
    "bench --libraries": lambda: study.show(LibraryStudy, results("peers4_h200")),
    "bench --libraries, one GPU": lambda: study.show(LibraryStudy, results("peers1_h200")),
    "bench --accuracy": lambda: study.show(AccuracyStudy, few("accuracy_h200")),
    "tune": lambda: tune.print_kernels(results("fp32x3_h200") | {"table": "/a/table.json"}),
    "tune, models": lambda: models.show({
        "device": {"name": "cuda:0 NVIDIA H200"}, "models": "/a/cache/of/the/user/tuned",
        "rows": [{"mode": mode, **found["worth"]["all"]}
                 for mode, found in results("fitted_h200")["modes"].items()],
    }),
    "warm": lambda: warm.show({
        "kernels": [{"variant": str(v), "dtype": "float32", "layout": "nn"}
                    for v in catalog.get("tuned").variants()],
        "products": 12, "seconds": 34.5,
    }),
    "tune --links": lambda: tune.print_links(results("links8_h200") | {"table": "/a/links.json"}),
    "kernels": listing,
    "run": a_result("cpu", threads=3, split="cols"),
    "run, alone": a_result("cpu"),
    "ranks": ranks(16, split="cols"),
    "ranks, grid": ranks(8, grid=(2, 2, 2)),
    "reproduce, on the cpu": lambda: output.show(on_the_cpu("ladder")),
    **{
        f"reproduce {name}": lambda name=name: one_of_each(name)
        for name in engine.experiments()
    },
}  # fmt: skip


def shown(monkeypatch, width: int, call) -> str:
    """What `call` prints in a terminal so wide."""
    monkeypatch.setattr(console.console, "width", width)
    monkeypatch.setattr(console.console, "soft_wrap", False)
    with console.console.capture() as captured:
        call()
    return captured.get()


def check(monkeypatch, width: int, call) -> None:
    """That no line is longer than the terminal, and that no number and no word is cut."""
    printed = shown(monkeypatch, width, call)
    assert max(map(len, printed.splitlines())) <= width, printed
    assert not tokens(shown(monkeypatch, WIDE, call)) - tokens(printed), printed


def tokens(text: str) -> set[str]:
    return set(re.findall(r"[^\s;,]+", text))


@pytest.mark.parametrize("width", [80, 160])
@pytest.mark.parametrize("name", TABLES)
def test_tables_fit(monkeypatch, name, width):
    check(monkeypatch, width, TABLES[name])


@needs("emulator")
def test_tables_of_several_devices_fit(monkeypatch):
    show = a_result("emulator", threads=4, split="cols", emulate_devices=2)
    assert max(map(len, shown(monkeypatch, 80, show).splitlines())) <= 80


# --- the layout ---------------------------------------------------------------------------


def columns(**cells) -> list[Column]:
    return [
        Column(name, tuple(map(str, found)), not isinstance(found[0], int | float))
        for name, found in cells.items()
    ]


def words(layout) -> set[str]:
    return {x for part in layout.parts for c, _width in part for x in (c.heading, *c.cells)}


def test_what_fits_is_left_alone():
    given = columns(kernel=["naive", "tuned"], time=[1.5, 2.5], note=["", "it does not run"])
    layout = table_layout.fit(given, 80)
    assert [c for c, _width in layout.parts[0]] == given
    assert not layout.above and not layout.below


def test_notes_go_below_once():
    note = "it runs on cuda and on the emulator"
    given = columns(kernel=["a", "b", "c"], time=[1, 2, 3], note=[note, "", note])
    layout = table_layout.fit(given, 40)
    assert layout.below == (f"[1] {note}",)
    assert layout.parts[0][-1][0].cells == ("[1]", "", "[1]")


def test_columns_that_say_the_same_go_above_as_far_as_needed():
    given = columns(dtype=["float32"] * 2, layout=["nn"] * 2, time=[1, 2], verdict=["passed"] * 2)
    layout = table_layout.fit(given, 22)
    assert layout.above == "in every row: dtype = float32"
    assert [c.heading for c, _width in layout.parts[0]] == ["layout", "time", "verdict"]


def test_one_row_keeps_its_columns():
    given = columns(dtype=["float32"], kernel=["naive"], time=[123456])
    layout = table_layout.fit(given, 16)
    assert not layout.above
    assert words(layout) == {"dtype", "kernel", "time", "float32", "naive", "123456"}


def test_parts_begin_with_what_tells_rows_apart():
    given = columns(
        kernel=["a", "a", "b"], size=[1, 2, 1], **{f"time {i}": [10**9, 2, 3] for i in range(9)}
    )
    layout = table_layout.fit(given, 40)
    assert len(layout.parts) > 1
    for part in layout.parts:
        assert [c.heading for c, _width in part[:2]] == ["kernel", "size"]
        assert sum(width + 2 for _c, width in part) - 2 <= 40
