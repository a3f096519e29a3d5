"""Predictions beside the times of `scripts/measure-host ways`. No GPU needed."""

import dataclasses
import json
from pathlib import Path

import pytest
from support.scripts import loaded

from hybrid_gemm.planning import cost_model, link_rates
from hybrid_gemm.planning.hardware import DeviceSpec
from hybrid_gemm.planning.partition import grids
from hybrid_gemm.planning.planner import make_plan

ROOT = Path(__file__).resolve().parent.parent
predictions = loaded("predictions.py")
LINKS = {
    "measured": "2026-01-01",
    "rows": [
        {"link": link, "memory": memory, "at_once": count, "gbps": count * gbps}
        for link, memory, gbps in [
            ("h2d", "pinned", 50.0), ("d2h", "pinned", 50.0), ("both", "pinned", 80.0),
            ("ring", "device", 300.0), ("memcpy", "pinned", 40.0), ("h2d", "staged", 30.0),
            ("d2h", "staged", 30.0), ("both", "staged", 40.0),
        ]
        for count in (1, 2)
    ],
}  # fmt: skip
GPU = DeviceSpec(
    "gpu:0", "cuda", 0, 2**40, tflops=50, memory_gbps=3000, best_tflops=52,
    mode_tflops=(("fp32x3", 200.0), ("tf32", 400.0), ("narrow", 700.0)),
)  # fmt: skip


def a_file(**times) -> dict:
    """A result file's data, as it is read again, with rows of these times by number of GPUs."""
    specs = [dataclasses.replace(GPU, unit=i, links=link_rates.from_data(LINKS)) for i in (0, 1)]
    rows = [
        {"study": "host", "size": 8192, "arithmetic": "tf32", "memory": "pageable",
         "gpus": int(gpus[1:]), "workers": 2, "time_ms": time_ms, "run_ms": time_ms - 1}
        for gpus, time_ms in times.items()
    ]  # fmt: skip
    other = {"study": "pieces", "size": 64}
    return json.loads(json.dumps({"rows": [other, *rows], **predictions.described(specs, LINKS)}))


def test_rows_are_planned_anew_with_the_links_and_devices_of_their_file(tmp_path, capsys):
    first = predictions.compared(a_file(_0=1.0, _1=1.0, _2=1.0))
    chosen, one, two = (row["predicted_ms"] for row in first)
    assert chosen == two < one and {row["chosen"] for row in first} == {2}
    file = tmp_path / "ways.json"
    file.write_text(json.dumps(a_file(_0=two, _1=one * 1.1, _2=two * 1.5)))
    predictions.show(str(file))
    shown = capsys.readouterr().out
    assert "2 of 3 cells within 15%, ratios 0.67 to 1.00" in shown and shown.count("*") == 1


def test_what_a_choice_loses_is_of_the_best_that_was_measured():
    rows = predictions.compared(a_file(_0=30.0, _1=20.0, _2=30.0))
    assert predictions.losses(rows) == [pytest.approx(0.5)]
    assert predictions.losses(predictions.compared(a_file(_1=20.0, _2=10.0))) == [0]


def test_a_runs_own_clock_lacks_what_a_call_takes():
    (row,) = predictions.compared(a_file(_1=20.0), by_run=True)
    assert row["measured_ms"] == pytest.approx(19.0 + cost_model.CALL_MS)


def test_files_that_do_not_say_what_their_devices_are_are_refused():
    with pytest.raises(SystemExit, match="what its devices are"):
        predictions.compared({"rows": []})


@pytest.mark.parametrize(
    ("size", "arithmetic", "slower"),
    [(16384, "tf32", (1, 4, 1)),  # 22.1 ms; (1, 1, 4) took 20.2, (2, 2, 1) 21.1
     (4096, "float16", None)],  # four GPUs 1.0 ms, two 1.2
)  # fmt: skip
def test_plans_of_four_gpus_are_none_that_were_slower(size, arithmetic, slower):
    """As measured from page-locked arrays: host4_second_h200.json, host4_before_h200.json."""
    measured = json.loads((ROOT / "docs/results/host4_second_h200.json").read_text())
    specs = predictions._specs(measured)
    problem = predictions.problem_of(arithmetic, size)
    plan = make_plan(problem, specs, (1, 2, 4), page_locked=True)
    assert len(plan.workers) == 4 and plan.grid != slower
    alone = [make_plan(problem, specs, 4, grid=x, page_locked=True) for x in grids(4)]
    assert plan.predicted_ms <= 1.01 * min(x.predicted_ms for x in alone)
