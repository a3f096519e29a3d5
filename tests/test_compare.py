"""`hybrid-gemm compare`, and what repeated measurements say of themselves."""

import json
import os
from pathlib import Path

import pytest
from click.testing import CliRunner
from support.command import one_line, run

from hybrid_gemm.bench import compare, study
from hybrid_gemm.bench.compare import FASTER, ONE_SAMPLE, SLOWER, WITHIN
from hybrid_gemm.bench.kernels import KernelStudy
from hybrid_gemm.cli import cli
from hybrid_gemm.errors import UsageError, in_words, time_in_words

RESULTS = Path(__file__).resolve().parents[1] / "docs/results"


@pytest.mark.parametrize(
    ("old", "new", "verdict"),
    [
        ([10.0] * 9, [11.0] * 9, SLOWER),
        ([10.0] * 9, [9.0] * 9, FASTER),
        ([10.0] * 9, [10.1] * 9, WITHIN),  # less than counts
        ([8.0, 9, 10, 11, 12], [9.0, 10, 11, 12, 13], WITHIN),  # less than their noise
        ([9.9, 10, 10.1], [12.0, 12.1, 12.2], SLOWER),
        ([9.0, 10, 11], [11.0, 12, 13], WITHIN),
        ([10.0], [20.0], ONE_SAMPLE),
    ],
)
def test_a_change_counts_beyond_the_noise(old, new, verdict):
    assert compare.judge(old, new) == verdict


def row(kernel="naive", m=64, ms=1.0, verdict="passed", samples=9):
    return {"kernel": kernel, "params": {"BM": 8}, "m": m, "n": m, "k": m, "dtype": "float32",
            "layout": "nn", "time_ms": ms, "samples_ms": [ms] * samples, "gflops": 1 / ms,
            "verdict": verdict, "note": ""}  # fmt: skip


def result(*rows, device="one") -> dict:
    return {"device": {"name": device}, "rows": list(rows)}


def compared(tmp_path, old: dict, new: dict, *arguments):
    for name, data in (("old", old), ("new", new)):
        (tmp_path / f"{name}.json").write_text(json.dumps(data))
    names = [str(tmp_path / f"{name}.json") for name in ("old", "new")]
    return CliRunner().invoke(cli, ["compare", *names, *map(str, arguments)])


def test_rows_are_matched_by_what_they_measure(tmp_path):
    old = result(row(m=64), row(m=128, ms=2.0), row("tuned", m=64))
    new = result(row(m=128, ms=1.0), row(m=64), row(m=256))
    done = compared(tmp_path, old, new, "--json", tmp_path / "c.json", "--markdown", tmp_path / "c")
    assert done.exit_code == 0, done.output
    data = json.loads((tmp_path / "c.json").read_text())
    assert [(r["m"], r["change_verdict"]) for r in data["rows"]] == [(128, FASTER), (64, WITHIN)]
    assert (data["only_old"], data["only_new"]) == (1, 1)
    assert data["mean_ratio"] == pytest.approx(0.5**0.5)
    assert "1 faster, 1 within noise" in done.output and "-50.0" in done.output
    assert "| naive | BM=8 |" in (tmp_path / "c").read_text()
    assert "; 1 row only in " in " ".join(done.output.split())


def test_a_result_may_begin_with_a_byte_order_mark(tmp_path):
    for name, encoding in ("old", "utf-8"), ("new", "utf-8-sig"):
        text = json.dumps({"rows": [row()]})
        (tmp_path / name).write_text(text, encoding=encoding)
    assert run("compare", tmp_path / "old", tmp_path / "new", check=0).stdout


def test_exit_codes_are_verdicts(tmp_path):
    same = compared(tmp_path, result(row()), result(row()))
    assert same.exit_code == 0
    slower = compared(tmp_path, result(row()), result(row(ms=1.5)))
    assert slower.exception.exit_code == 4 and "1 of 1 rows are slower" in str(slower.exception)
    allowed = compared(tmp_path, result(row()), result(row(ms=1.5)), "--least", 0.6)
    assert allowed.exit_code == 0
    whole = compared(tmp_path, result(row()), result(row()), "--least", 1)
    assert "--least 1: it takes a fraction of at least 0 and below 1" in str(whole.exception)
    wrong = compared(tmp_path, result(row()), result(row(verdict="FAILED")))
    assert wrong.exception.exit_code == 3
    added = compared(tmp_path, result(row()), result(row(), row(m=128, verdict="FAILED")))
    assert added.exception.exit_code == 3 and "1 row of " in str(added.exception)
    mended = compared(tmp_path, result(row(verdict="FAILED")), result(row()))
    assert mended.exit_code == 0


def test_what_cannot_be_compared_is_refused(tmp_path):
    for old, new, says in (
        (result(row()), result(row(m=65)), "in common; compare results of the same kernels"),
        (result(row()), {"plan": 1}, "no times to compare"),
        (result(row()), {"rows": []}, "no times to compare"),
    ):
        done = compared(tmp_path, old, new)
        assert isinstance(done.exception, UsageError) and says in str(done.exception)
    missing = CliRunner().invoke(cli, ["compare", "no.json", "no.json"])
    assert "no such file" in str(missing.exception)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[]", "holds no result"),
        ("5", "holds no result"),
        ("null", "holds no result"),
        ("[" * 100_000, "is not JSON"),
        ('{"rows": ' + "1" * 5000 + "}", "is not JSON"),
        ("\udce9", "is not JSON"),
        ('{"rows": [1]}', "no whole result"),
        ('{"rows": [{"time_ms": 1.0, "m": 1}]}', "no whole result"),
        ('{"rows": [{"time_ms": "a", "m": 1, "n": 1, "k": 1, "kernel": "x"}]}', ""),
        ('{"totals_ms": [], "problem": {}}', ""),
        ('{"traceEvents": []}', ""),
        ('{"traceEvents": [{"name": "a"}], "otherData": {}}', ""),
        ('{"experiments": [{}]}', ""),
        ('{"experiments": 5}', ""),
        ('{"rows": [{"gflops": 1}]}', ""),
        ('{"rows": [{"gflops": null, "time_ms": null, "m": 1, "n": 1, "k": 1, "kernel": "x"}],'
         ' "device": {"name": "cpu"}}', ""),
    ],
    ids=range(16),
)  # fmt: skip
def test_files_of_another_form_are_refused(tmp_path, text, says):
    file = tmp_path / "strange.json"
    file.write_bytes(text.encode(errors="surrogateescape"))
    for command in (["compare", file, file], ["plot", file, "-o", tmp_path / "x.svg"]):
        done = CliRunner().invoke(cli, [*map(str, command)])
        assert isinstance(done.exception, UsageError), done.exception
        if says != "no whole result" or command[0] == "compare":
            assert says in str(done.exception)
        if "give" in str(done.exception):
            assert ("reproduce" in str(done.exception)) == (command[0] == "plot")
        assert os.listdir(tmp_path) == ["strange.json"]


def test_what_is_no_regular_file_is_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for name, what in (("pipe", "a pipe"), ("/dev/zero", "a character device")):
        for command in (["compare", name, name], ["plot", name, "-o", "x.svg"]):
            done = run(*command, cwd=tmp_path, check=2)
            assert f"is {what}, not a regular file" in one_line(done)


@pytest.mark.parametrize("name", ["ladder_h200", "peers4_h200", "fp32x3_h200"])
def test_committed_results_are_within_the_noise_of_themselves(name):
    data = json.loads((RESULTS / f"{name}.json").read_text())
    found = compare.compare(data, data, names=("a", "b"))
    samples = sum(len(row["samples_ms"]) for row in data["rows"] if row["time_ms"])
    assert sum(row["samples"] for row in found["rows"]) == samples
    assert found["counts"][FASTER] == found["counts"][SLOWER] == 0
    assert compare.table(found).rows


def test_runs_are_compared_and_say_their_spread(tmp_path):
    file = tmp_path / "a.json"
    done = run("run", "--size", 32, "--repeat", 5, "--device", "cpu", "--json", file, check=0)
    assert "5 runs: median" in done.stdout and "% of the median" in done.stdout
    assert "in order" not in done.stdout
    data = json.loads(file.read_text())
    assert len(data["totals_ms"]) == 5
    slower = data | {"totals_ms": [10 * ms for ms in data["totals_ms"]]}
    found = compare.compare(data, slower, names=("a", "b"))
    assert found["mean_ratio"] == pytest.approx(10) and len(found["rows"]) == 1


# --- bench --------------------------------------------------------------------------------


def test_runs_of_16_bits_are_not_compared_with_those_of_32(tmp_path):
    options = ["run", "--size", 16, "--device", "cpu", "--json"]
    for dtype in ("float32", "float16"):
        run(*options, tmp_path / f"{dtype}.json", "--dtype", dtype, check=0)
    done = run("compare", tmp_path / "float32.json", tmp_path / "float16.json", check=2)
    assert "no row in common" in one_line(done)


def test_an_empty_product_has_no_time_to_compare(tmp_path):
    file = str(tmp_path / "empty.json")
    options = ["run", "-m", "0", "-n", "4", "-k", "4", "--device", "cpu", "--repeat", "2"]
    done = CliRunner().invoke(cli, [*options, "--json", file])
    assert done.exit_code == 0, done.output
    assert "2 runs: median 0 ms" in done.output and "spread" not in done.output
    with pytest.raises(UsageError, match="no times to compare"):
        compare.rows_of(json.loads(Path(file).read_text()), file)
    untimed = result(row() | {"time_ms": None})
    with pytest.raises(UsageError, match="old has no times to compare"):
        compare.compare(untimed, untimed, names=("old", "new"))


def test_outliers_are_counted_and_named():
    rows = [row(), row("tuned", m=128)]
    rows[1]["samples_ms"] = [1.0, 1.0, 1.1, 4.0]
    said = study.outliers(result(*rows))
    assert "1 of 13 samples" in said and "4 times, tuned at 128" in said
    assert study.outliers(result(row())) == ""


def test_rows_are_sorted():
    rows = [row("b", 64, 2.0), row("a", 128, 1.0), row("c", 32, 3.0) | {"time_ms": None}]
    order = {name: [r["kernel"] for r in sorted(rows, key=key)]
             for name, key in study.SORTS.items()}  # fmt: skip
    assert order["time"] == ["a", "b", "c"] and order["kernel"] == ["a", "b", "c"]
    assert order["size"] == ["c", "b", "a"] and order["gflops"][0] == "a"


def test_markdown_holds_the_table():
    full = dict.fromkeys(KernelStudy.columns) | row()
    text = study.as_markdown(KernelStudy, result(full, full | {"m": 65, "note": "a | b"}))
    lines = text.splitlines()
    assert lines[0] == "one" and lines[2].startswith("| kernel | parameters |")
    assert lines[3].count("|") == lines[4].count("|") == 8
    assert "a \\| b" in text


def test_bench_sorts_and_writes_markdown(tmp_path):
    file = tmp_path / "rows.md"
    done = CliRunner().invoke(cli, [
        "bench", "--device", "cpu", "--kernels", "bla*", "--shapes", "16:48:16", "--samples", "2",
        "--sort", "size", "--markdown", str(file), "--json", "-",
    ])  # fmt: skip
    assert [r["m"] for r in json.loads(done.stdout)["rows"]] == [16, 32, 48]
    assert "| blas | 32 |" in file.read_text()
    refused = CliRunner().invoke(cli, ["bench", "--accuracy", "--sort", "time"])
    assert "--sort is for kernels" in str(refused.exception)


@pytest.mark.parametrize(
    ("ms", "words"),
    [(0, "0 ms"), (7e-5, "0.07 µs"), (0.0123, "0.0123 ms"),
     (999, "999 ms"), (75_300, "75.3 s"), (600_000, "10 min"),
     (7.2e6, "2 h"), (3.6e10, "10000 h")],
)  # fmt: skip
def test_times_have_units(ms, words):
    assert time_in_words(ms) == words


@pytest.mark.parametrize(
    ("size", "words"),
    [(0, "0 bytes"), (1, "1 byte"), (1024, "1 KiB"), (5 << 18, "1.25 MiB"), (3 << 30, "3.00 GiB")],
)
def test_numbers_of_bytes_have_units(size, words):
    assert in_words(size) == words
