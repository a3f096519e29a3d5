"""The experiments: the engine, the model, claims, files, and the page made of them."""

import csv
import dataclasses
import errno
import json
import os
import re
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from support import invented
from support.devices import needs, on
from support.scripts import loaded

from hybrid_gemm import catalog, plan
from hybrid_gemm.arrays import output_files
from hybrid_gemm.cli import cli
from hybrid_gemm.devices.cuda import nvrtc
from hybrid_gemm.errors import HybridGemmError, UsageError
from hybrid_gemm.experiments import engine, measure, output, sizes
from hybrid_gemm.experiments.base import (
    CONFIRMED,
    NOT_TESTABLE,
    REFUTED,
    Claim,
    NotTestable,
    Point,
    Rows,
    read_published,
    verdict,
)
from hybrid_gemm.experiments.lab import Lab

ROOT = Path(__file__).resolve().parent.parent
EXPERIMENTS = engine.experiments()
document = loaded("experiments-doc")


@pytest.fixture(scope="module")
def full():
    return invented.results()


# --- the declarations ---------------------------------------------------------------------


def test_every_published_table_is_used():
    folder = Path(measure.__file__).parent / "published"
    used = {table.file for e in EXPERIMENTS.values() for table in e.published}
    assert used == {path.name for path in folder.glob("*.csv")}


@pytest.mark.parametrize("experiment", EXPERIMENTS.values(), ids=EXPERIMENTS)
def test_full_scale_meets_every_published_row(experiment):
    rows = [dict(point.row) for point in experiment.points("full", "cuda")]
    for table in experiment.published:
        for theirs in table.rows():
            keys = {key: theirs[key] for key in (*table.keys, *table.held)}
            assert any(keys.items() <= row.items() for row in rows), keys


@pytest.mark.parametrize("device", ["cuda", "cpu", "emulator"])
@pytest.mark.parametrize("scale", ["small", "full"])
def test_points_are_told_apart(scale, device):
    for experiment in EXPERIMENTS.values():
        points = list(experiment.points(scale, device))
        names = [json.dumps(dict(p.row), sort_keys=True) for p in points]
        assert points and len(set(names)) == len(names), experiment.name


def test_full_scale_fits_in_ten_minutes():
    assert sum(e.cap_s for e in EXPERIMENTS.values()) <= 600


def test_claims_are_decided_from_rows(full):
    for result in full["experiments"]:
        for v in result["verdicts"]:
            assert v["status"] in (CONFIRMED, REFUTED), (result["name"], v)
            assert any(c.isdigit() for c in v["because"]), v


@pytest.mark.parametrize("scale", ["small", "full"])
@pytest.mark.parametrize("missing", [0.1, 0.5, 0.9, 1])
def test_missing_rows_leave_claims_undecided(scale, missing):
    """Rows that could not be measured never break a claim or a picture."""
    random = np.random.default_rng(7)
    for _ in range(4):
        for result in invented.results(scale)["experiments"]:
            experiment = EXPERIMENTS[result["name"]]
            points = list(experiment.points(scale, "cuda"))
            rows = [
                dict(point.row) | {"note": "not here"} if random.random() < missing else row
                for point, row in zip(points, result["rows"], strict=True)
            ]
            for v in engine.verdicts(experiment, Rows(rows), "cuda"):
                assert v["because"]
            if experiment.picture:
                assert experiment.picture(
                    experiment.beside(rows), experiment.theirs(), "H200"
                ).panels


def test_published_units():
    rows = EXPERIMENTS["ladder"].theirs()
    assert rows.value("published_gflops", kernel="cublas", m_and_n=16384) == pytest.approx(
        12931.6086 * 1.073742, rel=1e-6
    )
    # A cell that was unreadable in the source is no figure.
    assert rows.where(kernel="conflict_free", m_and_n=16384)[0]["published_gflops"] is None
    assert read_published("lab_table4_cublas.csv")[0] == {"n": 512, "time_ms": 230.62}


def test_ratio_is_ours_over_published():
    row = {"n": 512, "time_ms": 115.31}
    (beside,) = EXPERIMENTS["library"].beside([row])
    assert beside["published_time_ms"] == 230.62
    assert beside["ratio_time_ms"] == pytest.approx(0.5)
    (other_size,) = EXPERIMENTS["register_tiles"].beside([{"tile_size": 8, "n": 64, "time_ms": 1}])
    assert "published_time_ms" not in other_size  # theirs is for n = 1024


def test_rows():
    rows = Rows([{"n": 1, "t": 2.0}, {"n": 2, "t": None, "note": "no card"}])
    assert rows.value("t", n=1) == 2.0
    assert rows.line("n", "t") == ([1], [2.0])
    with pytest.raises(NotTestable, match="no card"):
        rows.value("t", n=2)
    with pytest.raises(NotTestable, match="no row has n 3"):
        rows.value("t", n=3)


def test_a_claim_that_all_is_right_counts_what_is():
    rows = Rows([{"verdict": "passed"}, {"verdict": "FAILED"}])
    for name, text in (("coalescing", "Every pattern touches"), ("emulation", "Where there is no")):
        (claim,) = (x for x in EXPERIMENTS[name].claims if x.text.startswith(text))
        found = claim.judge(rows, "emulator")
        assert found.status == REFUTED and found.because.startswith("1 of 2 ")


def test_a_claim_knows_its_devices():
    claim = Claim("It is so.", lambda rows: verdict(True, "seen"))
    assert claim.judge(Rows(), "cuda").status == CONFIRMED
    assert claim.judge(Rows(), "emulator").status == NOT_TESTABLE


def test_columns_on_the_cpu_say_what_a_gpu_would_show(monkeypatch):
    assert sizes.lab_sizes("small", "cpu") == (512, 1024)
    monkeypatch.setattr(sizes, "LAB_SIZES", (64, 512))
    experiment = EXPERIMENTS["column_split"]
    data = engine.run([experiment], device="cpu", samples=1)
    (result,) = data["experiments"]
    for row in result["rows"]:  # what a device with memory of its own moves by the same plan
        reduce = "critical" if row["way"] == sizes.LAB else "ordered"
        options = {"threads": row["threads"], "split": "cols", "reduce": reduce}
        apart = plan(*3 * [row["n"]], device="emulator", **options)
        assert (row["bytes_h2d"], row["bytes_d2h"]) == (apart.bytes_h2d, apart.bytes_d2h)
        assert bool(row.get("published_compute_and_sum_ms")) == (row["n"] == 512)
    found = {v["claim"]: v for v in result["verdicts"]}
    assert found["Each thread sends all of C to the GPU."]["status"] == CONFIRMED
    assert found["The sum grows with more threads."]["status"] != NOT_TESTABLE
    dominates = found["The sum dominates at 8 threads."]
    assert dominates["status"] == NOT_TESTABLE
    lab, ours = 2 + 8 + 8, 2 + 1  # matrices of 512 x 512, and of 1 MiB
    assert f"carries {lab} MiB" in dominates["because"] and f"{ours} MiB" in dominates["because"]


# --- the engine ---------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.campaign
@pytest.mark.parametrize("kind", [on("cpu"), on("emulator")])
def test_all_small(kind):
    data = engine.run(engine.choose_experiments(["all"]), device=kind, samples=1)
    rows = [row for result in data["experiments"] for row in result["rows"]]
    assert not [row for row in rows if row.get("verdict") == "FAILED"]
    assert all("time_ms" in row or row.get("note") or "wrong" in row for row in rows)
    for result in data["experiments"]:
        assert len(result["verdicts"]) == len(EXPERIMENTS[result["name"]].claims)
    decided = [v for r in data["experiments"] for v in r["verdicts"] if v["status"] == CONFIRMED]
    assert len(decided) >= 8
    output.show(data)
    assert output.pictures_of(data).keys() >= {"ladder", "row_split"}


def test_what_blas_multiplied_is_no_row_of_a_kernel():
    data = engine.run(engine.choose_experiments(["block_size", "crossover"]), device="cpu")
    for result in data["experiments"]:
        assert not [row for row in result["rows"] if "time_ms" in row or not row["note"]]
        assert {v["status"] for v in result["verdicts"]} == {NOT_TESTABLE}


@pytest.mark.slow
@needs("cuda")
def test_small_on_a_gpu():
    data = engine.run(engine.choose_experiments(["all"]), device="cuda")
    rows = [row for result in data["experiments"] for row in result["rows"]]
    assert not [row for row in rows if row.get("verdict") == "FAILED"]
    by_name = {result["name"]: result for result in data["experiments"]}
    (driver,) = (
        v for v in by_name["occupancy"]["verdicts"] if v["claim"].startswith("Occupancy follows")
    )
    assert driver["status"] == CONFIRMED, driver


def test_the_critical_reduction_on_kernel_devices(kernel_device):
    lab = Lab(kernel_device, samples=1)
    found = measure.run(
        lab, n=70, threads=3, split="cols", reduce="critical", kernel="naive_row", alone=True
    )
    assert found["verdict"] == "passed" and found["reduction"].startswith("critical")
    assert found["compute_ms"] > 0 and found["compute_and_sum_ms"] > 0


def _slow(lab):
    lab.deadline = 0
    return lab.sampled(lambda: 1.0)


def test_the_time_cap_cuts_samples_then_points(monkeypatch):
    experiment = dataclasses.replace(
        EXPERIMENTS["library"],
        points=lambda scale, device: [Point(_slow, {"n": i}) for i in (1, 2)],
    )
    data = engine.run([experiment], device="cpu", samples=3)
    (result,) = data["experiments"]
    first, second = result["rows"]
    assert first["samples"] == 1 and "time was up" in second["note"]
    assert result["cut"] == 2


def test_a_measurement_that_cannot_run_is_a_row_with_its_reason():
    data = engine.run([EXPERIMENTS["library"]], device="cpu")
    assert all("CUDA" in row["note"] for row in data["experiments"][0]["rows"])


def test_unknown_names():
    with pytest.raises(UsageError, match="called 'nosuch'"):
        engine.choose_experiments(["all", "nosuch"])
    with pytest.raises(UsageError, match="did you mean row_split"):
        engine.choose_experiments(["rowsplit"])
    with pytest.raises(UsageError, match="small, full"):
        engine.run([], scale="huge")


# --- files --------------------------------------------------------------------------------


@pytest.mark.slow
def test_files_whole_or_not_at_all(tmp_path, full, monkeypatch):
    """Of some experiments, for drawing takes long; the page below has the pictures of all."""
    target = tmp_path / "out"
    some = "ladder", "row_split", "occupancy"
    full = full | {"experiments": [x for x in full["experiments"] if x["name"] in some]}
    output.write(str(target), full)
    names = {path.name for path in target.iterdir()}
    assert {"results.json", "report.md", "ladder.csv", "ladder.svg"} <= names
    linked = re.findall(r"\]\((\w+\.svg)\)", (target / "report.md").read_text())
    assert set(linked) == {name for name in names if name.endswith(".svg")}
    assert json.loads((target / "results.json").read_text())["scale"] == "full"
    with (target / "row_split.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 40 and float(rows[0]["published_time_ms"]) == 3.28
    before = (target / "results.json").stat().st_mtime_ns

    def fail(data):
        raise RuntimeError("drawing failed")

    monkeypatch.setattr(output, "pictures", fail)
    with pytest.raises(RuntimeError):
        output.write(str(target), full)
    assert (target / "results.json").stat().st_mtime_ns == before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("results", [None, "{}", "[]", '{"experiments": 5}', "no JSON"])
def test_a_folder_of_other_files_is_refused(tmp_path, full, results):
    (tmp_path / "mine.txt").write_text("keep")
    if results is not None:
        (tmp_path / "results.json").write_text(results)
    with pytest.raises(UsageError, match="other files"):
        output.write(str(tmp_path), full)
    assert (tmp_path / "mine.txt").read_text() == "keep"
    with pytest.raises(UsageError, match="no directory"):
        output.check_directory(str(tmp_path / "no" / "out"))
    with pytest.raises(UsageError, match=r"cannot write .*: File name too long"):
        output.check_directory(str(tmp_path / ("x" * 300)))


def test_only_what_earlier_results_wrote_is_replaced(tmp_path, full):
    def some(name):
        return full | {"experiments": [x for x in full["experiments"] if x["name"] == name]}

    output.write(str(tmp_path), some("device_query"))
    (tmp_path / ".git").mkdir()
    (tmp_path / "mine.csv").write_text("keep")
    output.write(str(tmp_path), some("emulation"))
    names = {".git", "mine.csv", "emulation.csv", "report.md", "results.json"}
    assert {path.name for path in tmp_path.iterdir()} == names


def test_results_on_a_full_disk_leave_the_earlier_ones(tmp_path, full, monkeypatch):
    some = full | {"experiments": [x for x in full["experiments"] if x["name"] == "device_query"]}
    output.write(str(tmp_path / "out"), some)
    before = {path.name: path.stat().st_ino for path in (tmp_path / "out").iterdir()}
    write = output_files.OutputFile.write

    def fail(file, data):
        if file.name == "results.json":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(file, data)

    monkeypatch.setattr(output_files.OutputFile, "write", fail)
    for folder in ("out", "new"):
        with pytest.raises(HybridGemmError, match=f"{folder}/results.json: No space left"):
            output.write(str(tmp_path / folder), some)
    assert {path.name: path.stat().st_ino for path in (tmp_path / "out").iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_reproduce_command(tmp_path, monkeypatch):
    run = CliRunner().invoke
    listed = run(cli, ["reproduce", "--list"])
    assert listed.exit_code == 0 and all(name in listed.output for name in EXPERIMENTS)
    target = tmp_path / "out"
    monkeypatch.setattr(sizes, "LAB_SIZES", (64, 128))
    made = run(cli, ["reproduce", "column_split", "--device", "cpu", "-o", str(target)])
    assert made.exit_code == 0, made.output
    data = json.loads((target / "results.json").read_text())
    assert data["environment"]["python"] and data["command"].startswith("hybrid-gemm")
    assert "confirmed" in made.output
    named = run(cli, ["reproduce"])
    assert isinstance(named.exception, UsageError)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["device_query", "--device", "cpu", "--gpus", "0"], "the device is cpu"),
        (["device_query", "--seed", "-1"], "it takes 0 to 2^63 - 1"),
        (["device_query", "--seed", str(2**63)], "it takes 0 to 2^63 - 1"),
        (["device_query", "-o", ""], "'' names no folder"),
        (["device_query", "-o", "out", "--json", "out"], "--json out is in out"),
        (["device_query", "-o", "out", "--json", "out/x.json"], "leave out --json"),
        (["--list", "--json", "x.json"], "--json is for results, and --list shows none"),
        (["--list", "-o", "out"], "-o is for results"),
        (["--list", "ladder"], "leave out the names"),
    ],
)
def test_what_reproduce_cannot_do_is_refused_at_once(arguments, says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(cli, ["reproduce", *arguments])
    assert isinstance(done.exception, UsageError), done.exception
    assert says in str(done.exception)
    assert not list(tmp_path.iterdir())


# --- the page -----------------------------------------------------------------------------


@pytest.mark.slow
def test_the_page_follows_from_the_results(tmp_path, full):
    (tmp_path / "docs/results").mkdir(parents=True)
    (tmp_path / document.RESULTS).write_text(json.dumps(full))
    document.write(tmp_path)
    assert document.drift(tmp_path) == []
    page = (tmp_path / document.PAGE).read_text()
    for experiment in EXPERIMENTS.values():
        assert f"## {experiment.title}" in page and experiment.exercise in page
        assert (f"experiments/{experiment.name}.svg" in page) == bool(experiment.picture)
    full["experiments"][1]["rows"][0]["time_ms"] = 1e9
    (tmp_path / document.RESULTS).write_text(json.dumps(full))
    name = full["experiments"][1]["name"]
    assert document.drift(tmp_path) == [document.PAGE, f"docs/experiments/{name}.svg"]


def test_answers_follow_from_verdicts():
    first = {"claim": "It turns.", "status": CONFIRMED, "because": "3 of 4"}
    other = {"claim": "It burns.", "status": REFUTED, "because": "0 of 4"}
    assert document.answer([first]) == "It turns: 3 of 4."
    assert document.answer([first, other]) == "It turns: 3 of 4. Its other claim is refuted."
    assert "does not hold: 0 of 4. Of its 2 other claims 1 is confirmed and 1 is refuted." in (
        document.answer([other, first, other])
    )


@pytest.mark.skipif(
    not (ROOT / document.RESULTS).exists(), reason=f"{document.RESULTS} is not there yet"
)
def test_the_committed_page_is_current():
    assert document.drift(ROOT) == [], "run scripts/experiments-doc"


def test_compiled_usage_reaches_the_rows(monkeypatch):
    try:
        nvrtc.version()
    except Exception as error:
        pytest.skip(str(error))
    lab = Lab("cpu")
    found = lab.model(catalog.get("register_tile").variant({"TILE": 16}), 64, 64, 64, "int32")
    assert found["registers"] == 255 and found["local_bytes"] > 0
