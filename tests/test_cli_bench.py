"""The command `bench`, and the shapes that measuring commands take: rows, files, exit codes."""

import json

import pytest
from click.testing import CliRunner
from support.command import one_line, run, said

from hybrid_gemm.bench import libraries
from hybrid_gemm.cli import cli
from hybrid_gemm.errors import OutOfMemoryError


def test_bench_has_time_and_verdict_in_each_row(tmp_path, device):
    path = tmp_path / "rows.csv"
    names = "blas" if device == "cpu" else "naive,shared_tile,one_block"
    done = run("bench", "--device", device, "--kernels", names, "--shapes", "64,40x50x60",
               "--samples", 2, "--csv", path, "--json", "-", check=0)  # fmt: skip
    rows = json.loads(done.stdout)["rows"]
    assert len(rows) == 2 * len(names.split(","))
    for row in rows:
        if row["kernel"] == "one_block":
            assert "needs" in row["note"] and row["time_ms"] is None
        else:
            assert row["verdict"] == "passed" and row["time_ms"] > 0
    assert path.read_text().splitlines()[0].startswith("kernel,params,m,n,k")


@pytest.mark.parametrize("command", ["bench", "tune", "warm"])
@pytest.mark.parametrize("shapes", ["9999999999", "1x1x2147483648", "2000000000:4000000000:x2"])
def test_sides_that_no_kernel_takes_are_refused(command, shapes):
    done = CliRunner().invoke(cli, [command, "--device", "cpu", "--shapes", shapes])
    assert "a side is at most 2147483647" in str(done.exception)


@pytest.mark.parametrize("more", [[], ["--accuracy"], ["--libraries"]])
def test_a_bench_that_does_not_fit_does_not_begin(more, monkeypatch):
    monkeypatch.setattr(libraries, "Runner", None)  # nothing is measured
    given = ["bench", "--device", "cpu", "--shapes", "64,2147483647x2147483647x1", *more]
    done = CliRunner().invoke(cli, given)
    assert isinstance(done.exception, OutOfMemoryError), done.exception
    assert "2147483647 x 2147483647 x 1 needs" in str(done.exception)


@pytest.mark.parametrize("more", [["--accuracy"], ["--data", "huge"]])
def test_data_and_errors_of_nothing_are_refused(more):
    done = CliRunner().invoke(cli, ["bench", "--device", "cpu", "--shapes", "8x8x0", *more])
    assert "8 x 8 x 0 is empty" in str(done.exception)


def test_errors_are_measured_on_the_data_that_was_named():
    options = "--device", "cpu", "--shapes", "8x8x16", "--data", "wide,normal", "--json", "-"
    rows = json.loads(said("bench", "--accuracy", *options))["rows"]
    assert [row["data"] for row in rows] == ["wide", "normal"]


def test_a_bench_that_times_nothing_fails(tmp_path):
    file = tmp_path / "rows.json"
    options = "--kernels", "naive", "--device", "cpu", "--shapes", 8, "--json", file
    done = run("bench", *options, check=1)
    assert "nothing could be timed: kernel naive does not run on the cpu" in one_line(done)
    assert len(json.loads(file.read_text())["rows"]) == 1


@pytest.mark.parametrize("given", [["--compute", "auto"], ["--dtype", "float16"]])
def test_a_bench_without_tensor_cores_times_the_default_kernels(given):
    options = "--device", "cpu", "--shapes", 8, "--samples", 1, "--json", "-"
    (row,) = json.loads(said("bench", *given, *options))["rows"]
    assert (row["kernel"], row["verdict"]) == ("blas", "passed")


def test_bench_series_and_bad_names():
    assert "published" in one_line(run("bench", "--series", "mine", check=2))
    assert "--layout 'xx'" in one_line(run("bench", "--layout", "xx", "--device", "cpu", check=2))


def test_a_ratio_says_which_way_round_it_is():
    text = said("bench", "--libraries", "--device", "cpu", "--sizes", 32, "--samples", 1)
    assert "time / ours" in text
