"""scripts/compare-checkouts: its verdicts, and a run of a checkout beside itself."""

import json
import random
import subprocess
import sys

import pytest
from support.command import PACKAGE_FOLDER, environment
from support.scripts import SCRIPTS, loaded

SCRIPT = SCRIPTS / "compare-checkouts"


def starts(*afters, control=(1, 1, 1), before=(10, 20, 10)):
    """Times of starts: of AFTER and of the control these multiples of BEFORE's."""
    return [
        {"before": before, "control": [x * y for x in before], "after": [x * z for x in before]}
        for y, z in zip(control, afters, strict=True)
    ]


@pytest.mark.parametrize(
    "afters, control, verdict",
    [
        ((1.04, 1.05, 1.2), (1, 1, 1), "slower"),
        ((1.02, 1.5, 1.5), (1, 1, 1), "unclear"),  # a start says that it is as fast
        ((1.04, 1.05, 1.2), (0.9, 1, 1.06), "unclear"),  # so is the same code beside itself
        ((0.96, 0.9, 0.5), (1, 1, 1), "faster"),
        ((0.96, 0.9, 0.5), (1, 1, 0.95), "unclear"),
        ((0.98, 1, 1.02), (0.5, 1, 2), "same"),
    ],
)
def test_a_verdict_needs_all_starts_and_a_control_that_is_nearer(afters, control, verdict):
    script = loaded("compare-checkouts")
    row = script.judged(starts(*afters, control=control))
    assert row["verdict"] == verdict
    assert row["ratio"] == pytest.approx([sorted(afters)[1], min(afters), max(afters)])
    assert row["control"] == pytest.approx([sorted(control)[1], min(control), max(control)])
    assert row["before_us"] == 10


def test_the_true_median_is_in_nine_ranges_of_ten():
    likely, draw = loaded("compare-checkouts").likely, random.Random(1)
    assert likely([3, 1, 2, 5, 4]) == (1, 5)
    for count in (5, 8, 11, 30):
        ranges = [likely([draw.random() ** 3 for _ in range(count)]) for _ in range(2000)]
        assert 0.88 < sum(low <= 0.125 <= high for low, high in ranges) / 2000 < 0.97


def test_what_is_slower_one_way_is_faster_the_other():
    script = loaded("compare-checkouts")
    times = [{"before": (1, 1), "control": (1, 1), "after": (0.25, 4)}] * 3
    turned = [{**x, "before": x["after"], "after": x["before"]} for x in times]
    for x in (times, turned):
        assert script.judged(x)["ratio"] == pytest.approx([1, 1, 1])


def test_each_process_is_as_often_first_as_the_others():
    orders = loaded("compare-checkouts").ORDERS
    assert sorted(orders) == [(0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0)]
    assert all(orders[i] == orders[i + 1][::-1] for i in (0, 2, 4))


def test_what_one_cannot_run_has_failed():
    refused = loaded("compare-checkouts").refused
    cannot = {"verdict": "cannot run", "why": "no GPU"}
    assert refused([cannot] * 3) == cannot
    assert refused([{"us": 1}] * 3) == {}
    assert refused([{"us": 1}, {}, cannot]) == {"verdict": "failed", "why": "after: no GPU"}


def compare(*arguments):
    return subprocess.run(
        [sys.executable, SCRIPT, *map(str, arguments)], capture_output=True, text=True,
        env=environment(CUDA_VISIBLE_DEVICES=""), timeout=300,
    )  # fmt: skip


def test_a_checkout_beside_itself(tmp_path):
    file = tmp_path / "r.json"
    done = compare(
        PACKAGE_FOLDER, PACKAGE_FOLDER, "--cases", "cpu-64,cpu-stack,host-64", "--starts", 3,
        "--rounds", 2, "--json", file,
    )  # fmt: skip
    data = json.loads(file.read_text())
    rows = {row["case"]: row for row in data["rows"]}
    assert rows.keys() == {"cpu-64", "cpu-stack", "host-64"}
    assert rows["host-64"]["verdict"] == "cannot run" and rows["host-64"]["why"] in done.stdout
    timed = [rows["cpu-64"], rows["cpu-stack"]]
    for row in timed:
        assert [len(x["after"]) for x in row["starts"]] == [2, 2, 2]
        assert min(row["before_us"], row["after_us"], *row["ratio"], *row["control"]) > 0
    slower = any(row["verdict"] == "slower" for row in timed)  # by other load of this machine
    assert done.returncode == slower, done.stderr
    assert data["environment"]["cpu"] and data["versions"]["before"] == data["versions"]["after"]


def test_a_checkout_that_fails_is_said_to_and_stops_no_other_case(tmp_path):
    folder = tmp_path / "hybrid_gemm"
    folder.mkdir()
    (folder / "__init__.py").write_text("__version__ = free_memory = None")
    (folder / "errors.py").write_text("UnavailableError = OSError")
    (folder / "__main__.py").write_text("print('of nothing')")
    done = compare(PACKAGE_FOLDER, tmp_path, "--cases", "cpu-64,cpu-300", "--starts", 3)
    assert done.returncode == 1, done.stderr
    rows = [x for x in done.stdout.splitlines() if x.startswith("cpu-")]
    assert len(rows) == 2 and all("failed: after: TypeError" in row for row in rows)


def test_a_wrong_call_is_told_what_there_is():
    done = compare(PACKAGE_FOLDER, "no-such-revision", "--cases", "cpu-64")
    assert done.returncode == 1 and "no-such-revision is no checkout's folder" in done.stderr
    done = compare(PACKAGE_FOLDER, PACKAGE_FOLDER, "--cases", "cpu-64,gpu-64")
    assert done.returncode == 2 and "no case is named gpu-64: there are cpu-64, " in done.stderr
