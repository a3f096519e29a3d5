"""`hybrid-gemm run --resume`: a run that was ended goes on, and makes the same bits."""

import os
import random
import signal
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest
from support import resuming
from support.arrays import integers
from support.command import COMMAND, environment, run
from support.resuming import KEPT, counted, interrupted, lines, plain, resume, whole

from hybrid_gemm.arrays.unfinished import panels_of
from hybrid_gemm.errors import UsageError

folder = resuming.folder


# --- the same bits ------------------------------------------------------------------------


def test_an_interrupted_run_goes_on(folder, device, monkeypatch):
    expected = whole(device=device)
    interrupted(monkeypatch, 2, device=device)
    assert sorted(os.listdir()) == ["A.npy", "B.npy", *KEPT, "out.json"]
    interrupted(monkeypatch, 1, device=device)
    assert counted(resume(device=device)) == (3, 3)
    assert Path("C.npy").read_bytes() == expected
    assert sorted(os.listdir()) == ["A.npy", "B.npy", "C.npy", "out.json"]
    assert counted(resume(device=device)) == (0, 6)  # nothing to resume
    assert Path("C.npy").read_bytes() == expected


@pytest.mark.parametrize(
    "options",
    [
        ["--trans-a", "--trans-b", "--alpha", 0.3],
        ["-c", "C0.npy", "--beta", 0.7],
        ["--threads", 3, "--split", "cols"],
        ["--threads", 3, "--split", "cols", "--reduce", "critical"],
        ["--threads", 2, "--split", "rows"],
        ["--algorithm", "strassen", "--levels", 2],
    ],
    ids=lambda options: " ".join(map(str, options)),
)
def test_an_interrupted_run_goes_on_with(folder, monkeypatch, rng, options):
    np.save("C0.npy", np.asfortranarray(rng.standard_normal((70, 50), "f4")))
    if "--trans-a" in options:
        for name in ("A.npy", "B.npy"):
            np.save(name, np.load(name).T)  # in Fortran order
    expected = whole(*options)
    interrupted(monkeypatch, 4, *options)
    assert counted(resume(*options)) == (4, 2)
    assert Path("C.npy").read_bytes() == expected


@pytest.mark.parametrize("dtype", ["f4", "f8", "i4", "f2", "V2"])
def test_sums_that_are_exact_are_those_of_a_run_without_resume(folder, monkeypatch, rng, dtype):
    a, b = (np.load(name).shape for name in ("A.npy", "B.npy"))
    np.save("A.npy", integers(rng, a, "bfloat16" if dtype == "V2" else dtype))
    np.save("B.npy", integers(rng, b, "bfloat16" if dtype == "V2" else dtype))
    plain("D.npy")
    interrupted(monkeypatch, 3)
    assert counted(resume()) == (3, 3)
    assert Path("C.npy").read_bytes() == Path("D.npy").read_bytes()


def test_generated_matrices_are_taken_up_too(folder, monkeypatch):
    given = "-m", 70, "-n", 50, "-k", 40, "--seed", 3
    expected = whole(*given, inputs=())
    interrupted(monkeypatch, 5, *given, inputs=())
    with pytest.raises(UsageError, match="A was 70 x 40 normal float32, seed 3 and is"):
        resume(*given[:-1], 4, inputs=())
    assert counted(resume(*given, inputs=())) == (5, 1)
    assert Path("C.npy").read_bytes() == expected


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (1, 1), (29, 31), (3000, 1), (1025, 2049)])
@pytest.mark.parametrize("side", [1024, 30])
def test_panels_are_all_of_c_each_once(shape, side):
    if side == 30 and shape[1] > 2000:
        shape = (100, 200)
    times = np.zeros(shape, int)
    for rows, cols in panels_of(*shape, side):
        assert 0 < len(rows) <= side and 0 < len(cols) <= side
        times[rows.slice, cols.slice] += 1
    assert (times == 1).all()


def test_too_many_panels_are_refused():
    with pytest.raises(UsageError, match="give a larger --panel"):
        panels_of(10**6, 10**6, 1)


def test_an_error_before_the_first_panel_leaves_nothing(folder, monkeypatch):
    interrupted(monkeypatch, 0)
    assert sorted(os.listdir()) == ["A.npy", "B.npy"]


def test_empty_matrices(folder):
    np.save("A.npy", np.ones((0, 40), "f4"))
    assert resume()["panels"] == 0
    assert np.load("C.npy").shape == (0, 50)
    np.save("A.npy", np.ones((70, 0), "f4"))
    np.save("B.npy", np.ones((0, 50), "f4"))
    assert counted(resume()) == (0, 6)
    np.testing.assert_array_equal(np.load("C.npy"), np.zeros((70, 50)))


# --- killed at any moment -----------------------------------------------------------------

MANY = "run", "--size", "600", "--dtype", "float64", "-o", "C.npy", "--resume", "--panel", "40"


def killed(folder, number: int, entries: int) -> int | None:
    """The exit code of a run that got a signal once its journal had so many more lines."""
    journal = folder / KEPT[1]
    before = lines(journal)
    child = subprocess.Popen(
        [*COMMAND, *MANY, "--device", "cpu"], cwd=folder, stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE, text=True, env=environment(),
    )  # fmt: skip
    while child.poll() is None and lines(journal) < before + entries:
        time.sleep(0.001)
    child.send_signal(number)
    error = child.communicate(timeout=60)[1]
    if number == signal.SIGTERM and child.returncode != 0:
        assert error.endswith("hybrid-gemm: terminated\n"), error
        assert "of 225 panels of C are kept" in error
    return child.returncode


@pytest.mark.slow
def test_runs_that_are_killed_again_and_again_make_the_same_bits(tmp_path):
    run(*MANY, "--device", "cpu", cwd=tmp_path, check=0)
    expected = (tmp_path / "C.npy").read_bytes()
    os.unlink(tmp_path / "C.npy")
    moments = random.Random(5)
    for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGKILL):
        assert killed(tmp_path, number, moments.randrange(3, 50)) in (-number, 128 + number)
    assert sorted(os.listdir(tmp_path)) == KEPT
    kept = lines(tmp_path / KEPT[1])
    done = run(*MANY, "--device", "cpu", cwd=tmp_path, check=0)
    assert os.listdir(tmp_path) == ["C.npy"]
    assert (tmp_path / "C.npy").read_bytes() == expected
    found = int(done.stdout.partition(" found, ")[0].rpartition(" ")[2])
    assert 9 <= found <= kept and f"{found} found, {225 - found} multiplied" in done.stdout


def test_a_disk_that_is_full_by_now_has_the_room_that_was_reserved(folder, monkeypatch):
    expected = whole()
    interrupted(monkeypatch, 4)
    real = os.fstatvfs

    def full(descriptor):
        found = list(real(descriptor))
        found[4] = 0  # f_bavail
        return os.statvfs_result(found)

    monkeypatch.setattr(os, "fstatvfs", full)
    assert counted(resume()) == (4, 2)
    assert Path("C.npy").read_bytes() == expected
