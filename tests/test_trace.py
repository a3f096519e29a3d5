"""Traces: every activity once, nothing overlapping in a thread, legible pictures."""

import importlib
import itertools
import json
import sys
import types
from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.command import one_line, run
from support.devices import DEVICES

from hybrid_gemm.cli.pictures import pictures
from hybrid_gemm.execution import timeline
from hybrid_gemm.execution.timeline import PHASES, Activity
from hybrid_gemm.reporting import plots
from hybrid_gemm.reporting.chrome_trace import chrome, gantt

times = st.floats(0, 1e4, allow_nan=False)
activities = st.lists(
    st.builds(
        lambda worker, phase, start, ms, count: Activity(
            worker, phase, start, start + ms, count, 2 * count
        ),
        st.integers(0, 5), st.sampled_from(PHASES), times, times, st.integers(0, 10**9),
    ),
    max_size=40,
)  # fmt: skip


def spans(data):
    return [e for e in data["traceEvents"] if e["ph"] == "X"]


@given(activities)
def test_every_activity_is_there_once_and_no_two_of_a_thread_overlap(line):
    places = {w: f"gpu:{w % 2}" for w in range(6)}
    data = chrome(line, places, {})
    json.dumps(data, allow_nan=False)
    expected = sorted((a.phase, 1e3 * a.start_ms, 1e3 * a.ms, a.bytes, a.worker) for a in line)
    found = sorted(
        (e["name"], e["ts"], e["dur"], e["args"]["bytes"], e["args"]["worker"])
        for e in spans(data)
    )  # fmt: skip
    assert found == expected
    events = data["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    threads = defaultdict(list)
    for e in spans(data):
        assert names[e["pid"]] == places[e["args"]["worker"]]
        threads[e["pid"], e["tid"]].append(e)
    named = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    assert named == set(threads)
    for mine in threads.values():
        assert len({(e["name"], e["args"]["worker"]) for e in mine}) == 1
        mine.sort(key=lambda e: e["ts"])
        for before, after in itertools.pairwise(mine):
            assert before["ts"] + before["dur"] <= after["ts"] + 1e-6


def test_rates_come_with_bytes_and_flops():
    (event,) = spans(chrome([Activity(0, "multiply", 1, 3, 0, 10**9)], {0: "gpu"}, {}))
    assert event["args"] == {"worker": 0, "bytes": 0, "flops": 10**9, "gflops": 500}
    (event,) = spans(chrome([Activity(0, "upload", 1, 3, 10**8, 0)], {0: "gpu"}, {}))
    assert event["args"]["gbps"] == 50


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("split", ["rows", "cols"])
def test_a_run_leaves_its_trace(device, split, tmp_path):
    run("run", "--size", 96, "--threads", 3, "--split", split, "--device", device,
        "--trace", "t.json", cwd=tmp_path, check=0)  # fmt: skip
    data = json.loads((tmp_path / "t.json").read_text())
    events = spans(data)
    assert sum(e["args"]["flops"] for e in events if e["name"] == "multiply") == 2 * 96**3
    assert {e["args"]["worker"] for e in events} == {0, 1, 2}
    assert ("reduce" in {e["name"] for e in events}) == (split == "cols")
    assert all(e["dur"] >= 0 for e in events)
    assert data["otherData"]["command"].startswith("hybrid-gemm run --size 96")
    run("plot", "t.json", "-o", "t.svg", cwd=tmp_path, check=0)
    text = (tmp_path / "t.svg").read_text()
    for word in ("ms from the start", "multiply", split):
        assert word in text


def test_a_trace_is_refused_before_anything_is_multiplied(tmp_path):
    for path in ("missing/t.json", "."):
        done = run("run", "--size", 8, "--trace", path, cwd=tmp_path, check=2)
        assert "generating" not in done.stderr
        one_line(done)
    done = run("run", "--size", 8, "--dry-run", "--trace", "t.json", cwd=tmp_path, check=2)
    assert "--dry-run runs nothing" in one_line(done)
    assert not list(tmp_path.iterdir())


def test_overlapping_activities_count_once():
    spans = [(0, 4), (1, 2), (3, 6), (8, 9)]
    line = timeline.Timeline(lambda: [Activity(0, "upload", *s) for s in [(50, 60), *spans]])
    assert line.worker_ms(0, "upload") == 6 + 1 + 10
    assert line.worker_ms(1, "upload") == line.worker_ms(0, "reduce") == 0
    assert line.span_ms("upload") == 60


def test_rows_of_the_picture_are_workers_by_device():
    line = [Activity(w, phase, w, w + 1) for w in range(4) for phase in ("upload", "multiply")]
    alone = gantt(chrome(line, {w: f"gpu:{w}" for w in range(4)}, {"title": "here"}))
    assert list(alone.rows) == [f"gpu:{w}" for w in range(4)] and alone.title == "here"
    shared = gantt(chrome(line, {w: f"gpu:{w % 2}" for w in range(4)}, {}))
    assert list(shared.rows) == [f"gpu:{w % 2}, worker {w}" for w in (0, 2, 1, 3)]
    assert shared.phases == ["upload", "multiply"]
    assert shared.rows["gpu:1, worker 3"] == {"upload": [(3, 1)], "multiply": [(3, 1)]}


def test_phases_differ_in_grey():
    colors = pytest.importorskip("matplotlib.colors")
    assert set(plots.PHASE_STYLES) >= set(PHASES)

    def grey(style):
        red, green, blue = colors.to_rgb(style["facecolor"])
        return 0.3 * red + 0.59 * green + 0.11 * blue

    for one, other in itertools.combinations(plots.PHASE_STYLES.values(), 2):
        assert one.get("hatch") != other.get("hatch") or abs(grey(one) - grey(other)) > 0.4


def test_a_file_that_is_no_trace_has_no_pictures():
    assert pictures({"plan": {}}) == {}


def test_profilers_see_ranges_where_nvtx_is_there_and_nothing_costs_where_not(monkeypatch):
    def work(x, *, y):
        return x + y

    seen = []

    def annotate(name, domain):
        def wrap(function):
            def wrapped(*args, **kwargs):
                seen.append((name, domain))
                return function(*args, **kwargs)

            return wrapped

        return wrap

    try:
        monkeypatch.setitem(sys.modules, "nvtx", None)
        importlib.reload(timeline)
        assert timeline.marked("upload")(work) is work
        monkeypatch.setitem(sys.modules, "nvtx", types.SimpleNamespace(annotate=annotate))
        importlib.reload(timeline)
        assert timeline.marked("upload")(work)(1, y=2) == 3
        assert seen == [("upload", "hybrid-gemm")]
    finally:
        monkeypatch.undo()
        importlib.reload(timeline)
