"""`hybrid-gemm run --resume`: what a run that was ended leaves, and what the next makes of it."""

import errno
import fcntl
import json
import os
import random
import resource
import signal
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from support.arrays import integers
from support.command import COMMAND, environment, one_line, run

from hybrid_gemm.arrays.journal import Journal
from hybrid_gemm.arrays.unfinished import Unfinished, panels_of
from hybrid_gemm.cli import alone, cli
from hybrid_gemm.errors import HybridGemmError, UsageError
from hybrid_gemm.runner import Runner
from hybrid_gemm.verify import Verdict

KEPT = ["C.npy.unfinished", "C.npy.unfinished.journal"]
PANELS = 6  # of 70 x 50 in panels of at most 30


class Interrupted(Exception):
    pass


@pytest.fixture
def folder(tmp_path, monkeypatch, rng):
    """A.npy and B.npy, whose product is 70 x 50, in the working directory."""
    np.save(tmp_path / "A.npy", rng.standard_normal((70, 40), "f4"))
    np.save(tmp_path / "B.npy", rng.standard_normal((40, 50), "f4"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def resume(*options, device="cpu", inputs=("A.npy", "B.npy")) -> dict:
    """What a run with --resume says of its panels, as JSON."""
    arguments = ["run", *inputs, "-o", "C.npy", "--resume", "--json", "out.json", "--panel", "30"]
    done = CliRunner().invoke(cli, [*arguments, "--device", device, *map(str, options)])
    if done.exception is not None:
        raise done.exception
    return json.loads(Path("out.json").read_text())["resume"]


def plain(output: str) -> None:
    """A run without --resume."""
    done = CliRunner().invoke(cli, ["run", "A.npy", "B.npy", "-o", output, "--device", "cpu"])
    assert done.exit_code == 0, done.exception


def interrupted(monkeypatch, panels: int, *options, **places) -> None:
    """A run that ends when it has finished so many panels."""
    real, left = Runner.run, [panels]

    def multiply(runner, *arguments, **keywords):
        left[0] -= 1
        if left[0] < 0:
            raise Interrupted
        return real(runner, *arguments, **keywords)

    with monkeypatch.context() as patch, pytest.raises(Interrupted):
        patch.setattr(Runner, "run", multiply)
        resume(*options, **places)
    assert not Path("C.npy").exists()


def whole(*options, **places) -> bytes:
    """The file of an uninterrupted run with --resume."""
    assert resume(*options, **places)["found"] == 0
    made = Path("C.npy").read_bytes()
    os.unlink("C.npy")
    return made


def counted(found: dict) -> tuple[int, int]:
    assert found["panels"] == found["found"] + found["multiplied"] == PANELS
    return found["found"], found["multiplied"]


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


def lines(path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


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


# --- damage -------------------------------------------------------------------------------


def changed(path: str, at: int) -> None:
    """Turns one bit of a byte over."""
    data = bytearray(Path(path).read_bytes())
    data[at] ^= 1
    Path(path).write_bytes(data)


@pytest.mark.parametrize("torn", [1, 30, 150])
def test_a_torn_last_entry_is_ignored(folder, monkeypatch, torn):
    expected = whole()
    interrupted(monkeypatch, 4)
    os.truncate(KEPT[1], os.path.getsize(KEPT[1]) - torn)
    interrupted(monkeypatch, 1)  # which appends to the journal
    assert counted(resume()) == (4, 2)
    assert Path("C.npy").read_bytes() == expected


def test_a_damaged_entry_is_ignored(folder, monkeypatch):
    expected = whole()
    interrupted(monkeypatch, 4)
    text = Path(KEPT[1]).read_bytes()
    changed(KEPT[1], text.index(b'"panel": 1') + 9)
    changed(KEPT[1], len(text) - 3)
    assert counted(resume()) == (2, 4)
    assert Path("C.npy").read_bytes() == expected


def test_a_damaged_panel_is_multiplied_again(folder, monkeypatch):
    expected = whole()
    interrupted(monkeypatch, 5)
    changed(KEPT[0], 128 + 4 * (50 * 10 + 7))
    assert counted(resume()) == (4, 2)
    assert Path("C.npy").read_bytes() == expected


@pytest.mark.parametrize("size", [0, 100, 128 + 50 * 30 * 4, 10**6])
def test_an_unfinished_file_of_another_size(folder, monkeypatch, size):
    expected = whole()
    interrupted(monkeypatch, 6 - 1)
    os.truncate(KEPT[0], size)
    found, _multiplied = counted(resume())
    assert found == {0: 0, 100: 0, 10**6: 5}.get(size, 2)
    assert Path("C.npy").read_bytes() == expected


def test_an_unfinished_file_that_is_gone(folder, monkeypatch):
    expected = whole()
    interrupted(monkeypatch, 5)
    os.unlink(KEPT[0])
    assert counted(resume()) == (0, 6)
    assert Path("C.npy").read_bytes() == expected


@pytest.mark.parametrize("text", [b"", b'{"kind": "hybrid-gemm jou'], ids=["empty", "torn"])
def test_a_journal_that_was_hardly_begun(folder, monkeypatch, text):
    expected = whole()
    interrupted(monkeypatch, 5)
    Path(KEPT[1]).write_bytes(text)
    assert counted(resume()) == (0, 6)
    assert Path("C.npy").read_bytes() == expected


@pytest.mark.parametrize("at", [3, 300])
def test_a_damaged_beginning_is_refused(folder, monkeypatch, at):
    interrupted(monkeypatch, 5)
    changed(KEPT[1], at)
    before = {name: Path(name).read_bytes() for name in KEPT}
    with pytest.raises(UsageError, match="is damaged, or no journal of hybrid-gemm; remove it"):
        resume()
    assert {name: Path(name).read_bytes() for name in KEPT} == before


def test_a_journal_without_a_finished_panel_binds_nobody(tmp_path):
    """As after SIGKILL in the first panel."""
    path = tmp_path / "C.npy"
    Unfinished(path, (40, 40), "f4", 20, lambda: {"alpha": "1"}).close()
    made = Unfinished(path, (20, 40), "f4", 20, lambda: {"alpha": "2"})
    made.close()
    assert journal(path).facts == {"alpha": "2"}
    assert os.path.getsize(tmp_path / KEPT[0]) == 128 + 4 * 20 * 40


def test_other_files_of_these_names_are_left_alone(folder):
    for name in KEPT:
        Path(name).write_text("a diary\n")
        with pytest.raises(UsageError, match="remove it"):
            resume()
        assert Path(name).read_text() == "a diary\n"
        os.unlink(name)
        Path(name).symlink_to("elsewhere")
        with pytest.raises(UsageError):
            resume()
        os.unlink(name)
    assert sorted(os.listdir()) == ["A.npy", "B.npy"]


# --- another product ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "options, words",
    [
        (["--alpha", 2], "alpha was 1.0 and is 2.0"),
        (["--panel", 20], "--panel was 30 and is 20"),
        (["--threads", 2], "--threads was None and is 2"),
        (["--split", "cols"], "--split was auto and is cols"),
        (["--compute", "auto"], "--compute was fp32 and is auto"),
        (["--kernel", "blas"], "--kernel was auto and is blas"),
        (["--algorithm", "strassen"], "--algorithm was ordinary and is strassen"),
        (["-c", "C0.npy", "--beta", 1], "C was none and is a file with SHA-256 "),
        (["--device", "emulator"], "the device was cpu with 1 workers and is emulator"),
    ],
)
def test_a_journal_of_another_product_is_refused(folder, monkeypatch, options, words):
    np.save("C0.npy", np.ones((70, 50), "f4"))
    interrupted(monkeypatch, 2)
    before = {name: Path(name).read_bytes() for name in KEPT}
    with pytest.raises(UsageError, match=words) as refused:
        resume(*options)
    assert "is of another product" in str(refused.value) and "\n" not in str(refused.value)
    assert {name: Path(name).read_bytes() for name in KEPT} == before
    assert counted(resume()) == (2, 4)


@pytest.mark.parametrize("name", ["A", "B"])
def test_other_content_of_the_same_size_and_time_is_refused(folder, monkeypatch, name):
    interrupted(monkeypatch, 2)
    status = os.stat(f"{name}.npy")
    changed(f"{name}.npy", -5)
    os.utime(f"{name}.npy", ns=(status.st_atime_ns, status.st_mtime_ns))
    with pytest.raises(UsageError, match=f"{name} was a file with SHA-256 .* and is a file with"):
        resume()


def test_the_same_content_by_another_name_is_taken_up(folder, monkeypatch):
    interrupted(monkeypatch, 2)
    os.rename("A.npy", "moved.npy")
    assert counted(resume(inputs=("moved.npy", "B.npy"))) == (2, 4)


def test_other_transposes_of_square_matrices_are_refused(folder, monkeypatch, rng):
    np.save("A.npy", rng.standard_normal((40, 40)))
    interrupted(monkeypatch, 1)
    with pytest.raises(UsageError, match="--trans-a was False and is True"):
        resume("--trans-a")


def test_another_number_of_blas_threads_is_refused(folder, monkeypatch):
    interrupted(monkeypatch, 2)
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    with pytest.raises(UsageError, match=r"the environment was .* and is .*OMP_NUM_THREADS=7"):
        resume()


def test_a_panel_that_is_multiplied_in_another_way_is_refused(tmp_path):
    """As where other memory is free, and K is cut elsewhere."""
    path = tmp_path / "C.npy"
    made = Unfinished(path, (40, 40), "f4", 20, dict)
    made.array[...] = 1
    made.finish(0, "K cut at [0]")
    made.close()
    made = Unfinished(path, (40, 40), "f4", 20, dict)
    with pytest.raises(HybridGemmError, match=r"another way \(K cut at \[0, 9\]\) than"):
        made.finish(1, "K cut at [0, 9]")
    made.close()
    assert [x["panel"] for x in journal(path).done if "panel" in x] == [0]


def journal(path) -> Journal:
    found = Journal(f"{path}.unfinished.journal")
    found.close()
    return found


# --- what is safe, and when ---------------------------------------------------------------


def test_an_entry_is_written_when_its_panel_is_on_the_disk(folder, monkeypatch):
    real, seen = os.fdatasync, []

    def fdatasync(descriptor):
        real(descriptor)
        seen.append((os.readlink(f"/proc/self/fd/{descriptor}"), lines(folder / KEPT[1])))

    monkeypatch.setattr(os, "fdatasync", fdatasync)
    resume()
    names = [os.path.basename(name) for name, _lines in seen]
    assert names == [KEPT[1], KEPT[1]] + KEPT * PANELS
    assert [count for _name, count in seen] == [1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7, 8]


def test_a_full_disk_keeps_what_is_finished(folder, monkeypatch):
    """The disk is played by `fdatasync`, where a file system tells it at the latest."""
    expected = whole()
    real, left = os.fdatasync, [2 + 2 * 3]

    def fdatasync(descriptor):
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", fdatasync)
        with pytest.raises(HybridGemmError, match="No space left on device; the panels that were"):
            resume()
    assert counted(resume()) == (3, 3)
    assert Path("C.npy").read_bytes() == expected


def test_a_disk_that_is_too_small_is_refused_at_once(folder):
    np.save("A.npy", np.ones((700, 40), "f4"))
    limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (10**5, 10**5))  # noqa: E731
    done = subprocess.run(
        [*COMMAND, "run", "A.npy", "B.npy", "-o", "C.npy", "--resume", "--device", "cpu"],
        capture_output=True, text=True, env=environment(), preexec_fn=limit,
    )  # fmt: skip
    assert done.returncode == 2
    assert "it needs 140128 bytes, more than one file may have here" in one_line(done)
    assert sorted(os.listdir()) == ["A.npy", "B.npy"]


def test_an_input_that_changes_meanwhile_makes_no_entry(folder, monkeypatch):
    real, left = Runner.run, [3]

    def multiply(runner, *arguments, **keywords):
        left[0] -= 1
        if not left[0]:
            time.sleep(0.02)
            changed("B.npy", -5)
        return real(runner, *arguments, **keywords)

    with monkeypatch.context() as patch, pytest.raises(HybridGemmError, match=r"B\.npy was chang"):
        patch.setattr(Runner, "run", multiply)
        resume()
    assert len([x for x in journal("C.npy").done if "panel" in x]) == 2
    changed("B.npy", -5)
    assert counted(resume()) == (2, 4)


def test_nothing_is_kept_of_a_product_that_is_wrong(folder, monkeypatch):
    wrong = Verdict(False, "every element", 7.0)
    monkeypatch.setattr(alone, "verify", lambda *given, **options: wrong)
    with pytest.raises(HybridGemmError, match="the product is wrong"):
        resume()
    assert sorted(os.listdir()) == ["A.npy", "B.npy", "out.json"]


def test_the_verdict_is_on_all_of_c(folder, monkeypatch):
    """Also on panels of an earlier run, whose checksums are right."""
    interrupted(monkeypatch, 3)
    right = Path(KEPT[0]).read_bytes()
    made = Unfinished("C.npy", (70, 50), "f4", 30, journal_facts)
    made.array[:23] = 9
    for i in made.finished:
        made.finish(i, next(x["how"] for x in made.journal.done if x.get("panel") == i))
    made.close()
    assert Path(KEPT[0]).read_bytes() != right
    with pytest.raises(HybridGemmError, match="the product is wrong"):
        resume()


def journal_facts() -> dict:
    """The facts in the journal, read beside the process that has it."""
    text = Path(KEPT[1]).read_text().splitlines()[0].rpartition(" ")[0]
    return {k: v for k, v in json.loads(text).items() if k != "kind"}


def test_a_second_process_is_refused(folder, monkeypatch):
    interrupted(monkeypatch, 2)
    first = Journal(KEPT[1])
    first.add_process()
    done = run("run", "A.npy", "B.npy", "-o", "C.npy", "--resume", "--panel", 30, check=1)
    assert f"in use by another --resume (process {os.getpid()} on " in one_line(done)
    first.close()
    assert counted(resume()) == (2, 4)


def test_a_filesystem_without_locks_is_told(folder, monkeypatch):
    def flock(file, operation):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", flock)
    done = CliRunner().invoke(cli, ["run", "A.npy", "B.npy", "-o", "C.npy", "--resume"])
    assert done.exit_code == 0 and "cannot be locked here: start no second" in done.output


def test_a_run_without_resume_leaves_the_files_alone(folder, monkeypatch):
    interrupted(monkeypatch, 2)
    before = {name: Path(name).read_bytes() for name in KEPT}
    plain("C.npy")
    assert {name: Path(name).read_bytes() for name in KEPT} == before
    os.unlink("C.npy")
    assert counted(resume()) == (2, 4)


# --- what is asked ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options, words",
    [
        (["--repeat", 2], "without --repeat"),
        (["--trace", "t.json"], "without --trace"),
        (["--resident"], "without --resident"),
        (["--dry-run"], "without --dry-run"),
        (["--panel", 0], "--panel 0: it takes at least 1"),
        (["--threads", 2, "--split", "cols", "--reduce", "critical"], "sums in any order"),
        (["--json", "C.npy.unfinished"], "was given for two outputs"),
    ],
)
def test_what_does_not_go_with_resume_is_refused(folder, options, words):
    with pytest.raises(UsageError, match=words):
        resume(*options)
    assert sorted(os.listdir()) == ["A.npy", "B.npy"]


def test_resume_needs_an_output_and_panel_needs_resume():
    for options, words in ((["--resume"], "give -o C.npy"), (["--panel", "5"], "is of --resume")):
        done = CliRunner().invoke(cli, ["run", "--size", "8", *options])
        assert isinstance(done.exception, UsageError) and words in str(done.exception)


def test_an_input_is_not_the_unfinished_file(folder):
    os.rename("A.npy", KEPT[0])
    with pytest.raises(UsageError, match="it is the input"):
        resume(inputs=(KEPT[0], "B.npy"))
