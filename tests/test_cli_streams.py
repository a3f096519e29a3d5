"""Streams, names and warnings that a command meets: what is written is whole, what is said is one
line, and nothing that cannot be said fails a product."""

import json
import os
import subprocess

import numpy as np
import pytest
from support.command import COMMAND, environment, one_line, python, run


def shell(line: str, cwd, **changes: str) -> subprocess.CompletedProcess:
    """Runs a line of bash, in which $RUN is the command."""
    return subprocess.run(
        ["bash", "-c", line], capture_output=True, text=True, cwd=cwd,
        env=environment(RUN=" ".join(COMMAND), **changes),
    )  # fmt: skip


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_json_that_is_cut_off_is_no_success(tmp_path, unbuffered):
    line = "ulimit -f 1; $RUN kernels naive tuned --json - > found.json"
    # Python would cut off what it keeps of modules as well.
    changes = {"PYTHONUNBUFFERED": unbuffered, "PYTHONDONTWRITEBYTECODE": "1"}
    done = shell(line, tmp_path, **changes)
    assert done.returncode == 1
    assert "File too large" in one_line(done)
    done = shell("$RUN kernels naive --json - >&-", tmp_path, **changes)
    assert done.returncode == 2
    assert "--json - writes to standard output, which is closed" in one_line(done)


@pytest.mark.parametrize(
    ("arguments", "files"),
    [
        ("run --size 8 --device cpu --json found.json --trace trace.json", "found.json trace.json"),
        ("kernels naive --json found.json", "found.json"),
    ],
)
def test_files_of_a_result_do_not_wait_for_who_reads_stdout(tmp_path, arguments, files):
    """As `head` leaves it."""
    line = f"$RUN {arguments} | true; exit ${{PIPESTATUS[0]}}"
    done = shell(line, tmp_path)
    assert done.returncode == 1 and sorted(os.listdir(tmp_path)) == files.split()
    for name in files.split():
        assert json.loads((tmp_path / name).read_text())


@pytest.mark.parametrize("reader", ["cat", "true"])
def test_a_table_is_shown_where_its_file_cannot_be_written(tmp_path, reader):
    line = f"ulimit -f 1; $RUN kernels naive tuned --json found.json | {reader}"
    done = shell(line, tmp_path, PYTHONDONTWRITEBYTECODE="1")
    assert "File too large" in one_line(done) and os.listdir(tmp_path) == []
    assert ("naive:" in done.stdout) == (reader == "cat")


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_notes_that_nobody_takes_fail_no_product(tmp_path, unbuffered):
    line = "$RUN run --size 8 -o C.npy 2> /dev/full"
    done = shell(line, tmp_path, PYTHONUNBUFFERED=unbuffered)
    assert done.returncode == 0 and "verification passed" in done.stdout
    assert np.load(tmp_path / "C.npy").shape == (8, 8)
    for wrong in ("run --sise 8", "run -v -o /dev/null", ""):  # the message, too, and the help
        line = f"$RUN {wrong} 2> /dev/full"
        assert shell(line, tmp_path, PYTHONUNBUFFERED=unbuffered).returncode == 2


def test_notes_are_notes_where_warnings_are_errors():
    done = run(
        "run", "--size", 8, "--device", "cpu", "--max-device-memory", "8GB", check=0,
        PYTHONWARNINGS="error",
    )  # fmt: skip
    assert "note: --max-device-memory has no effect" in done.stderr


def test_an_output_whose_file_was_removed_is_refused(tmp_path):
    line = "exec 5> gone; rm gone; $RUN run --size 4 -o /dev/fd/5"
    done = shell(line, tmp_path)
    assert done.returncode == 2
    assert "cannot write /dev/fd/5: it leads to a file that was removed" in one_line(done)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("line", "stream"),
    [
        ("$RUN run --size 4 --json both > both", "standard output"),
        ("$RUN bench --shapes 8 --csv both >> both", "standard output"),
        ("$RUN run --size 4 -o /dev/stdout > both", "standard output"),
        ("touch both; ln both b.npy; $RUN run --size 4 -o b.npy 2> both", "standard error"),
        ("$RUN kernels --json /dev/stdout > both", "standard output"),
    ],
)
def test_no_output_takes_the_place_of_a_stream(tmp_path, line, stream):
    """What is printed would go into a file without a name."""
    done = shell(line, tmp_path)
    said = done.stderr or (tmp_path / "both").read_text()
    assert done.returncode == 2 and f": {stream} goes there; give another name" in said
    assert len(said.splitlines()) == 1


def test_a_line_break_in_a_name_breaks_no_message(tmp_path):
    done = run("run", "no\nsuch.npy", "B.npy", cwd=tmp_path, check=2)
    assert r"no\nsuch.npy: no such file" in one_line(done)
    done = run("run", "--size", 4, "--trace", "a\nb.json", cwd=tmp_path, check=0)
    assert r"wrote a\nb.json" in done.stderr.splitlines()


def test_a_factor_beyond_float64_is_no_infinity():
    for text in ("1e400", "-1e309", "1e400j"):
        done = run("run", "--size", 4, "--dtype", "complex64", f"--alpha={text}", check=2)
        assert "beyond the largest number" in one_line(done)
    run("run", "--size", 4, "--alpha=-inf", check=0)


def test_results_in_a_folder_that_was_removed_are_refused(tmp_path):
    line = "mkdir gone; cd gone; rmdir ../gone; $RUN reproduce column_split -o out"
    done = shell(line, tmp_path)
    assert done.returncode == 2 and "the working directory was removed" in one_line(done)


def test_a_batch_script_has_the_bytes_of_a_name(tmp_path):
    done = subprocess.run(
        [*COMMAND, "slurm", "--", b"A\xff.npy", "B.npy"], capture_output=True, env=environment(),
    )  # fmt: skip
    assert done.returncode == 0 and b"'A\xff.npy' B.npy" in done.stdout.splitlines()[-1]


@pytest.mark.parametrize(
    ("error", "more"), [("MemoryError()", ""), ("MemoryError('8 GB')", ": 8 GB")]
)
def test_memory_that_runs_out_is_said(error, more):
    """Python's own error has no words."""
    code = f"""
from hybrid_gemm import cli
def fails(**_options): raise {error}
cli.cli.main = fails
cli.main()
"""
    done = python("-c", code)
    assert (done.returncode, done.stderr) == (1, f"hybrid-gemm: out of host memory{more}\n")


def test_threads_that_the_system_refuses_are_said():
    """As in a container with a limit of processes."""
    code = """
import sys, threading
from hybrid_gemm import cli
def refused(self): raise RuntimeError("can't start new thread")
cli.ending.watch_signals = lambda **_options: setattr(threading.Thread, "start", refused)
sys.argv[1:] = "run --size 300 --threads 2 --device cpu".split()
cli.main()
"""
    done = python("-c", code)
    assert done.returncode == 1
    assert "the system starts no more threads: fewer --threads" in one_line(done)
