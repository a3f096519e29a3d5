"""`hybrid-gemm run --resume` after what it kept was damaged, cut off or replaced."""

import hashlib
import os
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from support import resuming
from support.resuming import KEPT, changed, counted, interrupted, journal, resume, whole

from hybrid_gemm.arrays import unfinished
from hybrid_gemm.arrays.journal import _parsed
from hybrid_gemm.arrays.unfinished import Unfinished
from hybrid_gemm.cli import cli
from hybrid_gemm.errors import HybridGemmError, UsageError

folder = resuming.folder


@pytest.mark.parametrize("torn", [1, 30, 150])
def test_a_torn_last_entry_is_ignored(folder, monkeypatch, torn):
    expected = whole()
    interrupted(monkeypatch, 4)
    os.truncate(KEPT[1], os.path.getsize(KEPT[1]) - torn)
    interrupted(monkeypatch, 1)  # which appends to the journal
    assert all(map(_parsed, Path(KEPT[1]).read_bytes().splitlines()))  # after whole lines alone
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


def test_files_that_another_run_took_are_not_said_to_be_kept(folder, monkeypatch):
    real = Unfinished.finish

    def finish(self, panel, *arguments):
        real(self, panel, *arguments)
        if panel == 3:  # as a run on another host does, whose lock is not seen here
            os.rename(KEPT[0], "C.npy")
            os.unlink(KEPT[1])

    monkeypatch.setattr(Unfinished, "finish", finish)
    options = "run A.npy B.npy -o C.npy --resume --panel 30 --device cpu"
    done = CliRunner().invoke(cli, options.split())
    assert isinstance(done.exception, HybridGemmError)
    assert "or its journal is gone: does another host make the same C?" in done.stderr
    assert "kept" not in done.stderr and Path("C.npy").exists()


def test_a_journal_that_is_gone_when_c_is_in_its_place(folder, monkeypatch):
    expected = whole()
    real = Unfinished.finish

    def finish(self, panel, *arguments):
        real(self, panel, *arguments)
        Path(KEPT[1]).unlink(missing_ok=True)

    monkeypatch.setattr(Unfinished, "finish", finish)
    assert counted(resume()) == (0, 6)
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
    with pytest.raises(
        UsageError, match="is damaged, or no journal of hybrid-gemm; to begin again, remove"
    ):
        resume()
    assert {name: Path(name).read_bytes() for name in KEPT} == before


def test_a_line_of_nothing_is_damaged_though_its_checksum_is_right(folder, monkeypatch):
    expected = whole()
    interrupted(monkeypatch, 5)
    with open(KEPT[1], "ab") as journal:
        journal.write(b" 00000000\n")
    assert counted(resume()) == (5, 1)
    assert Path("C.npy").read_bytes() == expected


def test_a_journal_without_a_finished_panel_binds_nobody(tmp_path):
    """As after SIGKILL in the first panel."""
    path = tmp_path / "C.npy"
    Unfinished(path, (40, 40), "f4", 20, lambda: {"alpha": "1"}).close()
    made = Unfinished(path, (20, 40), "f4", 20, lambda: {"alpha": "2"})
    made.close()
    assert journal(path).facts == {"alpha": "2"}
    assert os.path.getsize(tmp_path / KEPT[0]) == 128 + 4 * 20 * 40


@pytest.mark.parametrize("name", KEPT)
def test_a_link_in_place_of_a_file_that_is_kept_is_named(folder, monkeypatch, name):
    interrupted(monkeypatch, 2)
    os.rename(name, "moved")
    Path(name).symlink_to("moved")
    with pytest.raises(UsageError, match=f"{name} is a link; remove it"):
        resume()


def test_other_files_of_these_names_are_left_alone(folder):
    for name in KEPT:
        Path(name).write_text("a diary\n")
        with pytest.raises(UsageError, match="remove it"):
            resume()
        assert Path(name).read_text() == "a diary\n"
        os.unlink(name)
        Path(name).symlink_to("elsewhere")
        with pytest.raises(UsageError, match="remove it"):
            resume()
        os.unlink(name)
        os.mkfifo(name)
        with pytest.raises(UsageError, match="regular file"):
            resume()
        os.unlink(name)
        if os.geteuid() == 0:  # somebody else's
            Path(name).touch()
            os.chown(name, 65534, -1)
            with pytest.raises(UsageError, match="remove it"):
                resume()
            os.unlink(name)
    assert sorted(os.listdir()) == ["A.npy", "B.npy"]


def test_rows_longer_than_what_is_hashed_at_once(monkeypatch):
    array = np.arange(150.0).reshape(5, 30)
    for most in (100, 500, 10**6):  # a row, two, all
        monkeypatch.setattr(unfinished, "HASH_BYTES", most)
        digest = hashlib.sha256(array.tobytes()).hexdigest()
        assert unfinished.part_of(array, 3, 4) == (3, 4, 5, 30, digest)
