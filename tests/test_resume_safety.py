"""What `hybrid-gemm run --resume` writes and when, and what may happen meanwhile."""

import errno
import fcntl
import json
import os
import resource
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from support import resuming
from support.command import COMMAND, environment, one_line, run
from support.npy import folders_refuse_fsync
from support.resuming import (
    KEPT,
    PANELS,
    changed,
    counted,
    interrupted,
    journal,
    lines,
    plain,
    resume,
    whole,
)

from hybrid_gemm.arrays.journal import Journal
from hybrid_gemm.arrays.unfinished import Unfinished
from hybrid_gemm.cli import alone, cli
from hybrid_gemm.errors import HybridGemmError
from hybrid_gemm.runner import Runner
from hybrid_gemm.verify import Verdict

folder = resuming.folder


@pytest.mark.parametrize("call", ["ftruncate", "posix_fallocate", "lseek", "write", "fdatasync"])
def test_a_disk_that_fails_before_the_first_panel_keeps_nothing_and_says_so(
    folder, monkeypatch, call
):
    before, real = os.listdir(), getattr(os, call)
    words = ["run", "A.npy", "B.npy", "-o", "C.npy"]
    for good in range(9):  # calls until one fails
        left = [good]

        def failing(*given, left=left):
            left[0] -= 1
            if left[0] == -1:
                raise OSError(errno.EIO, "Input/output error")
            return real(*given)

        with monkeypatch.context() as patch:
            patch.setattr(os, call, failing)
            done = CliRunner().invoke(cli, [*words, "--resume", "--panel", "30"])
        if not done.exception or "are kept" in str(done.exception):
            assert good, "the first call is before any panel"
            break
        assert "Input/output error" in str(done.exception) and os.listdir() == before


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


def test_names_that_are_not_on_the_disk_are_told_before_a_panel_is_multiplied(folder, monkeypatch):
    """A disk that fails may lose the journal; one that cannot be asked is taken as it is."""
    with monkeypatch.context() as patch:
        folders_refuse_fsync(patch, errno.EIO)
        patch.setattr(Runner, "run", None)
        with pytest.raises(HybridGemmError, match="its journal: Input/output error"):
            resume()
    assert sorted(os.listdir()) == ["A.npy", "B.npy"]
    refused = folders_refuse_fsync(monkeypatch, errno.EINVAL)
    assert counted(resume()) == (0, PANELS) and refused


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
