"""Matrices from files and to files."""

import contextlib
import os
import resource
import signal
import stat
import subprocess
import sys
import tempfile
import textwrap
import traceback
import warnings
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.lib import format as npy
from support.command import environment, python
from support.errors import message

from hybrid_gemm.arrays.npy_files import NpyFile, NpyWriter
from hybrid_gemm.arrays.output_files import check_output
from hybrid_gemm.errors import DTypeError, HybridGemmError, UsageError

DTYPES = ["f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8"]


@contextlib.contextmanager
def unprivileged_folder():
    """A folder, and a function that runs another without root's powers."""
    nobody = 65534

    def run(body):
        if os.geteuid():
            return body()
        child = os.fork()
        if child == 0:
            status = 1
            try:
                os.setgroups([])
                os.setresgid(nobody, nobody, nobody)
                os.setresuid(nobody, nobody, nobody)
                body()
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(status)
        assert os.waitpid(child, 0)[1] == 0

    with tempfile.TemporaryDirectory() as folder:
        if os.geteuid() == 0:
            os.chown(folder, nobody, nobody)
        yield Path(folder), run


# --- reading ------------------------------------------------------------------------------

matrices = st.sampled_from([order + d for d in DTYPES for order in "<>"]).flatmap(
    lambda d: hnp.arrays(np.dtype(d), hnp.array_shapes(min_dims=2, max_dims=2, min_side=0))
)


@given(matrices, st.booleans(), st.sampled_from([(1, 0), (2, 0), (3, 0)]))
def test_what_numpy_wrote_is_read(tmp_path_factory, a, fortran, version):
    path = tmp_path_factory.mktemp("npy") / "A.npy"
    a = np.asfortranarray(a) if fortran else a
    with open(path, "wb") as file:
        npy.write_array(file, a, version=version)
    b = NpyFile(path).array
    assert b.dtype == a.dtype and b.shape == a.shape
    assert b.dtype.byteorder == a.dtype.byteorder
    assert b.tobytes() == a.tobytes()
    assert not b.flags.writeable
    assert b.flags.f_contiguous if fortran else b.flags.c_contiguous


def test_files_are_mapped_without_a_copy(tmp_path):
    path = tmp_path / "big.npy"
    with open(path, "wb") as file:
        header = {"descr": "<f4", "fortran_order": False, "shape": (2**20, 2**20)}
        npy.write_array_header_1_0(file, header)
        file.truncate(file.tell() + 4 * 2**40)  # 4 TiB of holes
    assert NpyFile(path).array[-1, -1] == 0


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("matrx.npy", "matrix.npy"),
        ("matrix", "matrix.npy"),
        ("matrix.np", "matrix.npy"),
        ("Matrix.npy", "matrix.npy"),
        ("nope.npy", None),
        ("B.npy", None),
        ("result.txt", None),
    ],
)
def test_a_likely_misspelling_of_a_file_is_told_the_file(tmp_path, name, meant):
    for there in "matrix.npy", "Arec.npy", "A.npy", "results.csv":
        (tmp_path / there).touch()
    with pytest.raises(UsageError) as error:
        NpyFile(tmp_path / name)
    hint = f"; did you mean {tmp_path / meant}?" if meant else ""
    assert str(error.value) == f"{tmp_path / name}: no such file{hint}"


def write_header(path, text: bytes):
    path.write_bytes(npy.magic(1, 0) + len(text).to_bytes(2, "little") + text)


def test_what_is_no_whole_npy_file_is_refused(tmp_path, monkeypatch):
    path = tmp_path / "A.npy"

    def refused(*words):
        with pytest.raises(UsageError) as error:
            NpyFile(path)
        message(error, path, *words)

    refused("no such file")
    np.save(tmp_path / "a.npy", np.ones((2, 3)))
    refused(f"no such file; did you mean {tmp_path / 'a.npy'}?")
    (tmp_path / "a.npy").unlink()
    path.mkdir()
    refused("a directory")
    path.rmdir()
    os.mkfifo(path)
    refused("a pipe")
    path.unlink()
    path.write_bytes(b"")
    refused("is empty", "numpy.save")
    path.write_text("1 2\n3 4\n")
    refused("not a .npy file", "numpy.save")
    np.ones((2, 2)).dump(path)
    refused("pickle", "numpy.save")
    with open(path, "wb") as file:
        np.savez(file, a=np.ones((2, 2)))
    refused(".npz")

    np.save(path, np.ones((2, 3)))
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    refused("truncated", f"{len(whole)} bytes expected", f"{len(whole) - 1} found", "2 x 3")
    for cut in (6, 8, 9, 40):
        path.write_bytes(whole[:cut])
        refused("damaged .npy header", "EOF")
    path.write_bytes(whole[:6] + b"\x09\x00" + whole[8:])
    refused("damaged .npy header")
    for shape in (b"(-2, 3)", b"(2.5, 3)", b"(1 << 9, 3)", b"(2, 3", b"(10**30, 2)", b"None"):
        write_header(path, b"{'descr': '<f4', 'fortran_order': False, 'shape': %s}" % shape)
        refused("damaged .npy header")
    write_header(path, b"{'descr': '<f4', 'fortran_order': False, 'shape': (0, %d)}" % 10**30)
    refused("damaged .npy header")
    write_header(path, b"(" * 9000)
    refused("damaged .npy header")

    for shape in ((), (3,), (2, 2, 2)):
        np.save(path, np.ones(shape))
        refused(str(shape), "2-D")


@pytest.mark.parametrize(
    "dtype", [object, np.clongdouble, "S3", "U3", "M8[s]", bool, [("x", "f4"), ("π", "f4")]]
)
def test_files_of_other_dtypes_are_refused(tmp_path, dtype):
    path = tmp_path / "A.npy"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # such names need version 3.0 of the format
        np.save(path, np.zeros((2, 2), dtype))
    with pytest.raises(DTypeError) as error:
        NpyFile(path)
    message(error, path, "float64")
    assert isinstance(error.value, TypeError)


def test_files_without_permission_are_refused():
    def body():
        path = folder / "A.npy"
        np.save(path, np.ones((2, 2)))
        path.chmod(0)
        with pytest.raises(UsageError) as error:
            NpyFile(path)
        message(error, path, "permission denied")

    with unprivileged_folder() as (folder, run):
        run(body)


# --- writing ------------------------------------------------------------------------------


@given(hnp.array_shapes(min_dims=2, max_dims=2, min_side=0), st.sampled_from(DTYPES))
def test_a_written_matrix_is_read_back(tmp_path_factory, shape, dtype):
    folder = tmp_path_factory.mktemp("npy")
    c = np.arange(shape[0] * shape[1]).reshape(shape).astype(dtype)
    with NpyWriter(folder / "C.npy", shape, ">" + dtype) as writer:
        assert writer.array.dtype.isnative
        writer.array[...] = c
    for read in (np.load(folder / "C.npy"), NpyFile(folder / "C.npy").array):
        assert read.dtype == c.dtype
        np.testing.assert_array_equal(read, c)
    assert os.listdir(folder) == ["C.npy"]


def test_no_file_exists_before_commit_nor_after_abort(tmp_path):
    path = tmp_path / "C.npy"
    writer = NpyWriter(path, (3, 4), "float32")
    assert not path.exists()
    writer.abort()
    assert os.listdir(tmp_path) == []

    for error in (KeyboardInterrupt, ValueError):
        with pytest.raises(error), NpyWriter(path, (3, 4), "float32", shared=True) as writer:
            raise error
        assert os.listdir(tmp_path) == []

    with NpyWriter(path, (3, 4), "float32") as writer:
        writer.array[...] = 1
        writer.commit()
        assert NpyFile(path).array.sum() == 12
    with NpyWriter(path, (3, 4), "float32") as writer:
        writer.abort()
    with pytest.raises(ValueError), NpyWriter(path, (3, 4), "float32") as writer:
        writer.array[...] = 2
        raise ValueError
    assert NpyFile(path).array.sum() == 12  # what was there before is still there
    assert os.listdir(tmp_path) == ["C.npy"]


def test_a_failing_commit_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "C.npy"
    np.save(path, np.ones((2, 2)))

    def fail(*_):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fsync", fail)
    for shared in (False, True):
        with NpyWriter(path, (2, 2), "float64", shared=shared) as writer:
            with pytest.raises(HybridGemmError) as error:
                writer.commit()
            message(error, path, "Input/output error")
            assert error.value.exit_code == 1
            assert os.listdir(tmp_path) == ["C.npy"]
    assert NpyFile(path).array.sum() == 4


def test_permissions_are_those_of_an_ordinary_file(tmp_path):
    path = tmp_path / "C.npy"

    def written_mode():
        with NpyWriter(path, (1, 1), "float32"):
            pass
        return stat.S_IMODE(path.stat().st_mode)

    before = os.umask(0o027)
    try:
        assert written_mode() == 0o640
        path.chmod(0o606)
        assert written_mode() == 0o606
    finally:
        os.umask(before)


def test_a_linked_output_replaces_the_target(tmp_path):
    (tmp_path / "data").mkdir()
    link, target = tmp_path / "C.npy", tmp_path / "data" / "real.npy"
    link.symlink_to(target)
    for value in (1, 2):  # first dangling, then not
        with NpyWriter(link, (1, 1), "float32") as writer:
            writer.array[...] = value
        assert link.is_symlink() and NpyFile(target).array[0, 0] == value
    assert os.listdir(tmp_path / "data") == ["real.npy"]


def test_output_onto_an_input_is_refused(tmp_path):
    a = tmp_path / "A.npy"
    np.save(a, np.ones((2, 2)))
    (tmp_path / "soft.npy").symlink_to(a)
    (tmp_path / "hard.npy").hardlink_to(a)
    (tmp_path / "sub").mkdir()
    for name in ("A.npy", "soft.npy", "hard.npy", "sub/../A.npy"):
        with pytest.raises(UsageError) as error:
            NpyWriter(tmp_path / name, (2, 2), "float64", inputs=[tmp_path / "B.npy", a])
        message(error, name, f"it is the input {a}")
    assert NpyFile(a).array.sum() == 4
    assert len(os.listdir(tmp_path)) == 4


def test_outputs_that_cannot_be_are_refused(tmp_path):
    def refused(path, *words):
        with pytest.raises(UsageError) as error:
            check_output(path)
        message(error, path, *words)

    refused(tmp_path / "no" / "C.npy", "there is no directory", "mkdir")
    refused(tmp_path, "a directory")
    refused(f"{tmp_path}/new/", "names no file")
    refused(f"{tmp_path}/new/.", "names no file")
    refused("/dev/null", "a character device")
    refused("-", "standard output")
    refused(tmp_path / ("x" * 300), "name too long")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    refused(tmp_path / "loop", "symbolic links")
    (tmp_path / "file").touch()
    refused(tmp_path / "file" / "C.npy", "Not a directory")
    os.mkfifo(tmp_path / "pipe")
    refused(tmp_path / "pipe", "a pipe")
    # Standard output by its name, where that is a pipe.
    code = "from hybrid_gemm.arrays.output_files import check_output; check_output('/dev/stdout')"
    done = python("-c", code)
    assert "UsageError: cannot write /dev/stdout: it is a pipe" in done.stderr


def test_protected_places_are_refused():
    def refused(path, *words):
        with pytest.raises(UsageError) as error:
            NpyWriter(path, (1, 1), "float32")
        message(error, path, *words)

    def body():
        (folder / "C.npy").touch(0o444)
        refused(folder / "C.npy", "write-protected")
        folder.chmod(0o555)
        refused(folder / "D.npy", "lets this user make no files; give another place")
        folder.chmod(0o755)
        if shared:
            refused(shared, "only its owner may replace it")
            own = shared.with_name("D.npy")
            own.touch()
            check_output(own)

    shared = None
    with unprivileged_folder() as (folder, run):
        if os.geteuid() == 0:  # a sticky folder, as /tmp is, with a file of somebody else
            sticky = folder / "sticky"
            sticky.mkdir()
            sticky.chmod(0o1777)
            shared = sticky / "C.npy"
            shared.touch()
            shared.chmod(0o666)
        run(body)


def test_a_read_only_filesystem_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(os, "access", lambda *_: False)
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_flag=os.ST_RDONLY))
    with pytest.raises(UsageError, match="is on a read-only filesystem; give another place"):
        NpyWriter(tmp_path / "C.npy", (1, 1), "float32")


@pytest.mark.parametrize("reports", [True, False])
def test_a_disk_too_small_is_refused_at_once(monkeypatch, reports):
    # Memory-backed, so that asking for more than all of it fills nobody's disk.
    if not os.path.ismount("/dev/shm"):
        pytest.skip("needs /dev/shm")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        disk = os.statvfs(folder)
        if reports:
            monkeypatch.setattr(os, "posix_fallocate", lambda *_: pytest.fail("it fills the disk"))
        else:  # then the reservation itself is what fails
            none = os.statvfs_result([*disk[:2], 0, *disk[3:]])
            monkeypatch.setattr(os, "fstatvfs", lambda _: none)
        rows = disk.f_blocks * disk.f_frsize // 2**20  # of 2 MiB each: twice the disk
        with pytest.raises(UsageError) as error:
            NpyWriter(f"{folder}/C.npy", (rows, 2**18), "float64")
        text = message(error, "C.npy", "are free there")
        needs, free = (int(word) for word in text.split() if word.isdecimal())
        assert needs == rows * 2**21 + 128 and 0 < free < needs
        assert os.listdir(folder) == []


def test_a_file_size_limit_is_refused_at_once(tmp_path):
    code = """
        import sys
        from hybrid_gemm.arrays.npy_files import NpyWriter
        NpyWriter(sys.argv[1], (1000, 1000), "float64")
    """
    done = python(
        "-c", textwrap.dedent(code), tmp_path / "C.npy",
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (10**6, 10**6)),
    )  # fmt: skip
    assert "UsageError: cannot write" in done.stderr and "8000128 bytes" in done.stderr
    assert "ulimit -f" in done.stderr
    assert os.listdir(tmp_path) == []


def test_an_interrupt_leaves_nothing(tmp_path):
    code = """
        import sys, time
        from hybrid_gemm.arrays.npy_files import NpyWriter
        with NpyWriter(sys.argv[1], (100, 100), "float64"):
            print("computing", flush=True)
            for _ in range(6000):  # a signal that comes just before a sleep does not end it
                time.sleep(0.01)
    """
    child = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), tmp_path / "C.npy"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=environment(),
    )
    with child:
        assert child.stdout.readline() == b"computing\n"
        assert not (tmp_path / "C.npy").exists()
        child.send_signal(signal.SIGINT)
        assert child.wait(30) != 0
    assert os.listdir(tmp_path) == []
