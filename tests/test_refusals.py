"""What the command says to odd names, closed streams and contradictions: one line, and no work."""

import os
import pickle
import subprocess
import sys

import numpy as np
import pytest
from support.command import COMMAND, environment, one_line, run

from hybrid_gemm.arrays import output_files
from hybrid_gemm.errors import HybridGemmError, UsageError
from hybrid_gemm.ranks import ending, launch
from hybrid_gemm.reporting import console


@pytest.fixture
def folder(tmp_path):
    for name in ("A.npy", "B.npy"):
        np.save(tmp_path / name, np.ones((4, 4), "f4"))
    (tmp_path / "link.npy").symlink_to("gone.npy")
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["run", "", "B.npy"], "'' names no file; give a .npy file"),
        (["run", "A.npy", "B.npy", "-c", "", "--beta", "2"], "'' names no file"),
        (["run", "link.npy", "B.npy"], "link.npy is a link to gone.npy, which is not there"),
        (["run", "A.npy", "B.npy", "A.npy"], "C.npy goes with -c"),
        (["run", "A.npy", "B.npy", "--beta", "2"], "-c C.npy gives it"),
        (["run", "A.npy", "B.npy", "--seed", "0"], "--seed is for generated input"),
        (["run", "A.npy", "B.npy", "--fill", "normal"], "--fill is for generated input"),
        (["slurm", "--", "A.npy", "B.npy", "--seed", "1"], "--seed is for generated input"),
        (["run", "A.npy", "B.npy", "-o", "-"], "cannot write to standard output"),
        (["run", "A.npy", "B.npy", "--trace", "-"], "cannot write to standard output"),
        (["run", "--size", "8", "--levels", "2"], "2 levels need the algorithm strassen"),
        (["run", "--size", "8", "--alpha", "1e39"], "alpha=1e+39 does not fit float32"),
        (["bench", "--sizes", "abc"], "--shapes/--sizes 'abc' is not a list"),
        (["bench", "--sizes", ""], "--shapes/--sizes '' is empty; it takes a list such as 1024"),
        (["bench", "--noise", "nan"], "noise of at least 0"),
        (["bench", "--accuracy", "--libraries"], "--accuracy and --libraries were given"),
        (["slurm", "--threads", "0"], "threads=0: it takes at least 1"),
        (["slurm", "--time", "tomorrow"], "time='tomorrow': it takes minutes, HH:MM:SS"),
    ],
    ids=str,
)
def test_what_cannot_be_meant_is_refused_before_any_work(folder, arguments, says):
    before = sorted(os.listdir(folder))
    done = run(*arguments, cwd=folder, check=2)
    assert says in one_line(done) and len(done.stderr.splitlines()) == 1
    assert done.stdout == "" and sorted(os.listdir(folder)) == before


def test_a_product_of_nan_is_right():
    assert "verification passed" in run("run", "--size", 8, "--alpha", "nan", check=0).stdout


@pytest.mark.parametrize("time", ["30", "1:30", "00:30:00", "2-12", "1-00:00:00", "unlimited"])
def test_times_are_as_sbatch_has_them(time):
    assert f"--time={time}\n" in run("slurm", "--time", time, check=0).stdout


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_streams_do_not_matter(folder, closed):
    script = f'exec "$@" {closed}'
    command = [*COMMAND, "run", "A.npy", "B.npy", "-o", "C.npy", "--device", "cpu"]
    done = subprocess.run(
        ["sh", "-c", script, "sh", *command], capture_output=True, text=True, cwd=folder,
        env=environment(),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    np.testing.assert_array_equal(np.load(folder / "C.npy"), np.full((4, 4), 4, "f4"))


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-"])
def test_a_library_may_keep_a_file_in_place_of_a_closed_stream(folder, closed):
    """As libffi 3.5 does, which ctypes loads before the command starts."""
    script = f'exec "$@" {closed}'
    code = "import os; os.open('.', 0); from hybrid_gemm.cli import main; main()"
    command = [sys.executable, "-c", code, "run", "A.npy", "B.npy", "-o", "C.npy"]
    done = subprocess.run(
        ["sh", "-c", script, "sh", *command, "--device", "cpu"], capture_output=True, text=True,
        cwd=folder, env=environment(),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    np.testing.assert_array_equal(np.load(folder / "C.npy"), np.full((4, 4), 4, "f4"))


def test_a_full_standard_output_is_one_line_after_what_is_written(tmp_path):
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [*COMMAND, "run", "--size", "8", "--device", "cpu", "-q", "-o", "C.npy"], stdout=full,
            stderr=subprocess.PIPE, text=True, cwd=tmp_path, env=environment(),
        )  # fmt: skip
    assert done.returncode == 1 and (tmp_path / "C.npy").exists()
    assert done.stderr == (
        "note: C.npy is written; what failed came after that\n"
        "hybrid-gemm: cannot write or read: No space left on device\n"
    )


def test_a_removed_working_directory_is_named(tmp_path):
    script = 'mkdir gone; cd gone; rmdir ../gone; exec "$@"'
    command = [*COMMAND, "run", "--size", "8", "--json", "r.json"]
    done = subprocess.run(
        ["sh", "-c", script, "sh", *command], capture_output=True, text=True, cwd=tmp_path,
        env=environment(HYBRID_GEMM_ENDED=str(tmp_path / "ended")),
    )  # fmt: skip
    assert done.returncode == 2
    assert one_line(done).endswith("cannot write r.json: the working directory was removed")
    assert not (tmp_path / "ended").exists()  # by which a batch script knows


def test_a_variable_that_nothing_reads_is_noted(tmp_path):
    said = "HYBRID_GEMM_DEVICE is set, and nothing reads it; HYBRID_GEMM_CACHE and"
    done = run("kernels", "naive", check=0, HYBRID_GEMM_DEVICE="cpu")
    assert said in one_line(done)
    assert run("kernels", "naive", "-q", check=0, HYBRID_GEMM_DEVICE="cpu").stderr == ""
    read = {"HYBRID_GEMM_KERNELS": "", "HYBRID_GEMM_ENDED": str(tmp_path / "ended")}
    assert run("kernels", "naive", check=0, **read).stderr == ""
    assert (tmp_path / "ended").read_text() == "done\n"


def test_a_script_that_cannot_be_told_of_the_end_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setenv("HYBRID_GEMM_ENDED", str(tmp_path / "none" / "ended"))
    assert ending.tell_script().endswith("HYBRID_GEMM_ENDED names: No such file or directory")


def test_a_full_disk_names_the_text_file(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(output_files.os, "write", full)
    with pytest.raises(HybridGemmError, match=r"could not write .*x\.json: No space left"):
        console.write(str(tmp_path / "x.json"), "text")
    assert os.listdir(tmp_path) == []


def test_ranks_agree_on_nan(monkeypatch):
    def agree(mine, other):
        def tell(_comm, _what, call):
            return None, pickle.loads(pickle.dumps([call()[1], {"alpha": other}]))

        monkeypatch.setattr(launch, "tell", tell)
        launch.agree(None, {"alpha": mine})

    agree(float("nan"), float("nan"))
    for other in (1.0, None):
        with pytest.raises(UsageError, match="rank 0 has nan, rank 1 has"):
            agree(float("nan"), other)
