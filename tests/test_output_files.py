"""Output files: whole, in their places and on the disk, or errors that leave nothing."""

import errno
import fcntl
import os
import stat

import numpy as np
import pytest
from support.npy import folders_refuse_fsync, write

from hybrid_gemm.arrays import output_files
from hybrid_gemm.arrays.npy_files import NpyWriter
from hybrid_gemm.errors import HybridGemmError
from hybrid_gemm.reporting import console


def test_a_written_file_is_there_and_nothing_else(tmp_path, kind, rng):
    c = rng.random((700, 900))  # more than one checksum's worth
    opened, temporaries = len(os.listdir("/proc/self/fd")), set(output_files._temporaries)
    for turn in range(2):  # a new file, and one that replaces it
        write(tmp_path / "C.npy", c + turn)
        np.testing.assert_array_equal(np.load(tmp_path / "C.npy"), c + turn)
        assert os.listdir(tmp_path) == ["C.npy"]
    assert len(os.listdir("/proc/self/fd")) == opened
    assert output_files._temporaries == temporaries


def test_a_file_has_no_name_before_its_place_where_there_are_such_files(tmp_path):
    try:
        os.close(os.open(tmp_path, os.O_RDWR | os.O_TMPFILE))
    except OSError:
        pytest.skip("this filesystem has no files without a name")
    with NpyWriter(tmp_path / "C.npy", (3, 3), "f4") as writer:
        assert not writer._file.named and os.listdir(tmp_path) == []


def test_bytes_are_on_the_disk_before_the_name_and_then_the_folder(tmp_path, kind, monkeypatch):
    done = []

    def noted(name, what):
        real = getattr(os, name)

        def call(*given, **folders):
            done.append(what(*given))
            return real(*given, **folders)

        monkeypatch.setattr(os, name, call)

    noted("fsync", lambda descriptor: stat.S_ISDIR(os.fstat(descriptor).st_mode))
    noted("replace", lambda source, target: target)
    write(tmp_path / "C.npy", np.ones((3, 3)))
    output_files.write_file(str(tmp_path / "a.json"), b"text")
    assert done == [False, "C.npy", True, False, "a.json", True]


def test_a_temporary_file_is_locked_against_other_containers(tmp_path):
    """They cannot see this process, and remove what no process has locked."""
    with NpyWriter(tmp_path / "C.npy", (3, 3), "f4", shared=True) as writer:
        with open(writer.temporary, "rb") as file, pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        writer.commit()
        assert os.listdir(tmp_path) == ["C.npy"]


def test_a_removed_temporary_file_is_an_error(tmp_path):
    with (
        pytest.raises(HybridGemmError, match="removed or replaced meanwhile"),
        NpyWriter(tmp_path / "C.npy", (3, 3), "f4", shared=True) as writer,
    ):
        os.unlink(writer.temporary)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("by", ["another file", "a link to it"])
def test_a_replaced_temporary_file_is_an_error(tmp_path, by):
    with (
        pytest.raises(HybridGemmError, match="removed or replaced meanwhile"),
        NpyWriter(tmp_path / "C.npy", (3, 3), "f4", shared=True) as writer,
    ):
        os.rename(writer.temporary, tmp_path / "elsewhere")
        if by == "a link to it":
            os.symlink("elsewhere", writer.temporary)
        else:
            with open(writer.temporary, "wb") as file:
                np.save(file, np.ones((3, 3)))
    assert not (tmp_path / "C.npy").exists()


@pytest.mark.parametrize("again", [False, True], ids=["moved", "moved and made again"])
def test_a_moved_folder_is_an_error(tmp_path, kind, again):
    folder = tmp_path / "folder"
    folder.mkdir()
    with (
        pytest.raises(HybridGemmError, match="folder was removed or moved meanwhile"),
        NpyWriter(folder / "C.npy", (3, 3), "f4"),
    ):
        folder.rename(tmp_path / "elsewhere")
        if again:
            folder.mkdir()
    assert not [names for _, _, names in os.walk(tmp_path) if names]


def test_a_removed_folder_is_an_error(tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    with (
        pytest.raises(HybridGemmError, match="folder was removed or moved meanwhile"),
        NpyWriter(folder / "C.npy", (3, 3), "f4") as writer,
    ):
        for name in os.listdir(folder):
            os.unlink(folder / name)
        folder.rmdir()
        assert writer.array.shape == (3, 3)


@pytest.mark.parametrize("how", ["removed", "moved with its folder"])
def test_a_target_taken_at_once_is_an_error(tmp_path, kind, how, monkeypatch):
    real, folder = os.replace, tmp_path / "folder"

    def replace(source, target, **folders):
        real(source, target, **folders)
        if how == "removed":
            os.unlink(folder / "C.npy")
        else:
            folder.rename(tmp_path / "elsewhere")

    monkeypatch.setattr(os, "replace", replace)
    for put in (lambda x: write(x, np.ones((3, 3))), lambda x: console.write(str(x), "text")):
        folder.mkdir(exist_ok=True)
        with pytest.raises(HybridGemmError, match="as soon as it was written"):
            put(folder / "C.npy")
        assert not [names for _, _, names in os.walk(tmp_path) if names]


@pytest.mark.parametrize("what", ["looked at", "written to the disk"])
def test_a_disk_that_fails_when_a_file_is_in_its_place_takes_no_file_away(
    tmp_path, kind, what, monkeypatch
):
    path, stat_of = tmp_path / "C.npy", os.stat

    def fail(*_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    def stat(place, **options):
        return fail() if place == str(path) and placed else stat_of(place, **options)

    def replace(*names, **folders):
        os_replace(*names, **folders)
        placed.append(names)

    placed, os_replace = [], os.replace
    monkeypatch.setattr(os, "replace", replace)
    if what == "looked at":
        monkeypatch.setattr(os, "stat", stat)
    else:
        folders_refuse_fsync(monkeypatch, errno.EIO)
    with pytest.raises(HybridGemmError, match=f"took its place, and .*{what}: Input/output error"):
        write(path, np.ones((3, 3)))
    monkeypatch.undo()
    assert os.listdir(tmp_path) == ["C.npy"] and np.load(path).sum() == 9


def test_files_that_cannot_take_their_places_leave_nothing(tmp_path, kind, monkeypatch):
    def fail(*_, **__):
        raise OSError(1, "Operation not permitted")

    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", fail)
        with pytest.raises(HybridGemmError, match="Operation not permitted"):
            write(tmp_path / "C.npy", np.ones((3, 3)))
        assert os.listdir(tmp_path) == []
    paths = str(tmp_path / "a.json"), str(tmp_path / "no folder" / "b.json")
    with pytest.raises(HybridGemmError) as error:
        output_files.write_files(dict.fromkeys(paths, b"text"))
    assert paths[1] in str(error.value) and os.listdir(tmp_path) == []


def test_filesystems_without_locks_lists_and_synced_folders_take_files(tmp_path, kind, monkeypatch):
    """As some network filesystems are, and folders that a user may write to and not list."""
    with monkeypatch.context() as patched:
        refused = folders_refuse_fsync(patched, errno.EINVAL)

        def refuse(*_):
            refused.append(1)
            raise OSError(errno.EINVAL, "Invalid argument")

        patched.setattr(os, "scandir", refuse)
        patched.setattr(fcntl, "flock", refuse)
        write(tmp_path / "C.npy", np.ones((3, 3)))
    assert len(refused) == 3 and os.listdir(tmp_path) == ["C.npy"]
    np.testing.assert_array_equal(np.load(tmp_path / "C.npy"), np.ones((3, 3)))


def test_a_text_file_is_whole_or_not_there(tmp_path, kind, monkeypatch):
    console.write(str(tmp_path / "a.json"), "text\n")
    assert (tmp_path / "a.json").read_text() == "text\n"
    (tmp_path / "a.json").chmod(0o604)
    console.write(str(tmp_path / "a.json"), "other\n")
    assert (tmp_path / "a.json").read_text() == "other\n"
    assert stat.S_IMODE((tmp_path / "a.json").stat().st_mode) == 0o604
    monkeypatch.setattr(os, "fsync", lambda descriptor: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        console.write(str(tmp_path / "a.json"), "third\n")
    assert (tmp_path / "a.json").read_text() == "other\n"
    assert os.listdir(tmp_path) == ["a.json"]
