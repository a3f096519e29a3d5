"""`hybrid-gemm run --resume` over MPI ranks: what a job that was ended leaves, and what the next
makes of it."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from support import resuming
from support.arrays import integers
from support.command import environment, one_line, run
from support.ranks import MPI_ENVIRONMENT, MPIRUN, failing_rank, mpirun, needs_mpirun, patience
from support.resuming import KEPT, PANELS, changed, counted, lines, reported

from hybrid_gemm.arrays.file_bytes import write_part
from hybrid_gemm.arrays.journal import Journal
from hybrid_gemm.arrays.unfinished import part_of
from hybrid_gemm.cli.resume_over_ranks import _of_all

folder = resuming.folder


def words(*options, panel=30):
    return [
        "run", "A.npy", "B.npy", "-o", "C.npy", "--resume", "--panel", panel, "--device", "cpu",
        "--json", "out.json", *options,
    ]  # fmt: skip


def resume(ranks, *options, check=0, **changes):
    done = mpirun(ranks, "-m", "hybrid_gemm", *words(*options), check=check, **changes)
    if check in (0, 3):
        assert not any(Path(name).exists() for name in KEPT)
    return done


def whole(ranks, *options) -> bytes:
    """The file of an uninterrupted job with --resume."""
    resume(ranks, *options)
    assert counted(reported()) == (0, PANELS)
    made = Path("C.npy").read_bytes()
    os.unlink("C.npy")
    return made


def entries() -> list[dict]:
    """The lines of the journal about panels."""
    lines = [line.rpartition(" ")[0] for line in Path(KEPT[1]).read_text().splitlines()]
    return [found for found in map(json.loads, lines) if "panel" in found]


def kept() -> dict[str, bytes]:
    return {name: Path(name).read_bytes() for name in KEPT}


@needs_mpirun
@pytest.mark.parametrize(
    ("ranks", "split"), [pytest.param(2, "rows", marks=pytest.mark.campaign), (3, "cols")]
)
def test_a_job_goes_on_after_a_rank_failed_was_killed_and_bytes_were_damaged(folder, ranks, split):
    options = "--split", split
    expected = whole(ranks, *options)
    products = 2  # of each rank, in two panels: each is so small that it is made whole
    # At rank 0, whose lock on the journal must be gone when the job has ended.
    done = resume(ranks, *options, check=5, **failing_rank(0, after=products))
    assert "rank 0: this rank is broken on purpose" in one_line(done)
    assert [x["panel"] for x in entries()] == [0, 1]
    assert [len(x["parts"]) for x in entries()] == [ranks] * 2
    rows = entries()[0]["parts"][1][2]  # of rank 1's strip, each one write
    changes = failing_rank(1, "kill", after=rows, where="write")  # in its second panel from here
    resume(ranks, *options, check=137, **changes)
    assert [x["panel"] for x in entries()] == [0, 1, 2] and not Path("C.npy").exists()
    changed(KEPT[0], 128 + 4 * (50 * 10 + 30))  # of panel 1
    done = resume(ranks, *options)
    assert counted(reported()) == (2, 4)
    assert "damaged, and multiplied again: 1 panel\n" in done.stderr
    assert Path("C.npy").read_bytes() == expected
    assert sorted(os.listdir()) == ["A.npy", "B.npy", "C.npy", "out.json"]


@needs_mpirun
def test_an_error_on_one_rank_is_an_agreed_one_on_all(folder, rng):
    options = "--split", "rows"
    for name in "AB":  # whose products come out exactly
        np.save(f"{name}.npy", integers(rng, np.load(f"{name}.npy").shape, "f4"))
    changes = failing_rank(2, after=10, where="write")  # of 10 rows in each panel
    done = resume(3, *options, check=5, **changes)
    assert "rank 2: this rank is broken on purpose" in one_line(done)
    assert "1 of 6 panels of C are kept for the same command to go on" in done.stderr
    resume(3, *options)
    assert counted(reported()) == (1, 5)
    np.testing.assert_array_equal(np.load("C.npy"), np.load("A.npy") @ np.load("B.npy"))


@needs_mpirun
def test_what_a_journal_was_not_begun_with_is_refused(folder):
    resume(2, check=5, **failing_rank(1, after=2))
    before = kept()
    others = [
        ((3, "--split", "rows"), "the number of ranks was 2 and is 3"),
        ((2, "--rounds", "2"), "--rounds was None and is 2"),
    ]
    for given, said in others:
        done = resume(*given, check=2)
        assert said in one_line(done) and "is of another product" in one_line(done)
    done = run(*words(), check=2)
    assert "the number of ranks was 2 and is 1" in one_line(done)
    np.save("B.npy", np.load("B.npy") * 2)
    assert "B was a file with SHA-256 " in one_line(resume(2, check=2))
    assert kept() == before
    np.save("B.npy", np.load("B.npy") / 2)
    resume(2)


@needs_mpirun
@pytest.mark.parametrize(
    "options",
    [
        pytest.param(["--trans-a", "--split", "cols"], id="transposed", marks=pytest.mark.campaign),
        pytest.param(["-c", "C0.npy", "--beta", 2, "--threads", 2], id="beta"),
        pytest.param(["-m", 70], id="generated", marks=pytest.mark.campaign),
    ],
)
def test_sums_that_are_exact_are_those_of_a_run_without_resume(folder, rng, options):
    np.save("A.npy", integers(rng, (40, 70) if "--trans-a" in options else (70, 40), "f4"))
    np.save("B.npy", integers(rng, (40, 50), "f4"))
    np.save("C0.npy", np.asfortranarray(integers(rng, (70, 50), "f4")))
    given = ["A.npy", "B.npy", *options]
    if "-m" in options:
        given = [*options, "-n", 50, "-k", 40, "--fill", "integers"]
    run("run", *given, "-o", "D.npy", "--device", "cpu", check=0)
    more = ["-o", "C.npy", "--resume", "--panel", 30, "--device", "cpu", "--verify", "full"]
    mpirun(3, "-m", "hybrid_gemm", "run", *given, *more, check=0)
    assert Path("C.npy").read_bytes() == Path("D.npy").read_bytes()


@needs_mpirun
def test_empty_matrices(folder):
    np.save("A.npy", np.ones((0, 40), "f4"))
    resume(2)
    assert np.load("C.npy").shape == (0, 50)
    np.save("A.npy", np.ones((70, 0), "f4"))
    np.save("B.npy", np.ones((0, 50), "f4"))
    resume(2)
    np.testing.assert_array_equal(np.load("C.npy"), np.zeros((70, 50)))


@needs_mpirun
def test_nothing_is_kept_of_a_product_that_is_wrong(folder):
    """A panel is wrong from an earlier job, and its checksum is right."""
    resume(2, check=5, **failing_rank(1, after=2))
    line = next(x for x in Path(KEPT[1]).read_text().splitlines() if '"panel": 0' in x)
    entry = json.loads(line.rpartition(" ")[0])
    for part in entry["parts"]:
        row, col, rows, cols, _digest = part
        wrong = np.full((rows, cols), 9, "f4")
        write_part(KEPT[0], 128, 50, wrong, row, col)
        part[:] = part_of(wrong, row, col)
    found = Journal(KEPT[1])
    found.add(entry)
    found.close()
    done = resume(2, check=3)
    assert "the product is wrong" in one_line(done)
    assert sorted(os.listdir()) == ["A.npy", "B.npy", "out.json"]


# --- killed at any moment -----------------------------------------------------------------

MANY = "run", "--size", "400", "--dtype", "float64", "-o", "C.npy", "--resume", "--panel", "40"


def killed(folder, ranks: int, entries: int) -> None:
    """Kills a whole job, launcher first, once its journal has so many more lines. What is left of
    the launcher is left beside the folder."""
    journal = folder / KEPT[1]
    before = lines(journal)
    child = subprocess.Popen(
        [MPIRUN, "-n", str(ranks), sys.executable, "-m", "hybrid_gemm", *MANY, "--device", "cpu"],
        cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        env=environment(**MPI_ENVIRONMENT, **patience(), TMPDIR=str(folder.parent)),
    )  # fmt: skip
    while child.poll() is None and lines(journal) < before + entries:
        time.sleep(0.001)
    started = [Path(f"/proc/{x}/stat") for x in children(child.pid)]
    for pid in (child.pid, *(int(x.parent.name) for x in started)):
        os.kill(pid, signal.SIGKILL)
    assert child.wait(timeout=60) == -signal.SIGKILL
    while any(x.exists() and ") Z " not in x.read_text() for x in started):
        time.sleep(0.01)


def children(pid: int) -> list[int]:
    found = []
    for place in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(place.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        if parent == pid:
            found.append(int(place.parent.name))
    return found


@needs_mpirun
@pytest.mark.slow
@pytest.mark.campaign
def test_jobs_that_are_killed_again_and_again_make_the_same_bits(tmp_path):
    tmp_path, ranks = tmp_path / "job", 2
    tmp_path.mkdir()
    mpirun(ranks, "-m", "hybrid_gemm", *MANY, "--device", "cpu", cwd=tmp_path, check=0)
    expected = (tmp_path / "C.npy").read_bytes()
    os.unlink(tmp_path / "C.npy")
    moments = random.Random(5)
    for _ in range(2):
        killed(tmp_path, ranks, moments.randrange(3, 40))
    assert sorted(os.listdir(tmp_path)) == KEPT
    done = mpirun(ranks, "-m", "hybrid_gemm", *MANY, "--device", "cpu", cwd=tmp_path, check=0)
    assert os.listdir(tmp_path) == ["C.npy"]
    assert (tmp_path / "C.npy").read_bytes() == expected
    found = int(done.stdout.partition(" found, ")[0].rpartition(" ")[2])
    assert 4 <= found < 100 and f"{found} found, {100 - found} multiplied" in done.stdout


# --- facts --------------------------------------------------------------------------------


def test_facts_of_ranks_are_told_once_where_they_are_alike():
    ranks = [{"BLAS": "x", "g++": "11"}, {"BLAS": "x", "g++": "12"}, {"BLAS": "x", "g++": "11"}]
    assert _of_all(ranks) == {"BLAS": "x", "g++": "of rank 0, 2 11; of rank 1 12"}
