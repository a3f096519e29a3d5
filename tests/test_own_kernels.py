"""One's own kernels: what is wrong with a file or a parameter is said, and spoils nothing else."""

import os
import textwrap
from pathlib import Path

import numpy as np
import pytest
from support.command import python
from support.emulation import needs_emulator

import hybrid_gemm as hg
from hybrid_gemm import catalog
from hybrid_gemm.errors import UsageError
from hybrid_gemm.host import notes


@pytest.fixture(autouse=True)
def _afresh():
    """No note was printed yet."""
    notes.forget()


HEADER = """/*---
summary = "odd"
entry   = "gemm_odd"
source  = "test"
tile    = ["1", "1"]
{}
---*/
extern "C" __global__ void gemm_odd() {{}}
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A folder of one's own kernels, with one good file."""
    folder = tmp_path / "own"
    folder.mkdir()
    (folder / "gemm_good.cu").write_text(HEADER.format(""))
    monkeypatch.setenv(catalog.VARIABLE, str(folder))
    catalog.kernels.cache_clear()
    yield folder
    catalog.kernels.cache_clear()


BAD_HEADERS = [
    "params = [{TILE = 8.0}]", 'params = [{TILE = "8"}]', "params = [{TILE = true}]", "params = 5",
    "params = [5]", "params = [{A = 1}, {B = 2}]", "rung = 'one'", "block = 5",
    "block = ['1', '1']", "block = [1, 1, 1]", "block = ['1 +', '1', '1']",
    "grid = ['no_such_name', '1', '1']", "grid = ['m / 0', '1', '1']", "shared = 5",
    "require = ['BM ==']", "require = 5", "limits = ['x < 5']", "dtypes = ['float8']",
    "layouts = ['xx']", "arch = 'nine'", "arch = 90", "runs_on = ['toaster']", "summary = 5",
    "nonsense = 1", "= 5", "role = 5", "library = 5",
]  # fmt: skip


@pytest.mark.parametrize("line", BAD_HEADERS)
def test_a_kernel_with_a_bad_header_is_left_out(line, own, capsys):
    text = HEADER.format(line)
    if line.startswith("summary"):
        text = text.replace('summary = "odd"\n', "")
    (own / "gemm_odd.cu").write_text(text)
    assert left_out(own / "gemm_odd.cu", capsys)


@pytest.mark.parametrize(
    "make",
    [
        lambda path: path.write_text("no header"),
        lambda path: path.write_bytes(b"/*---\n\xff\xfe---*/"),
        lambda path: path.write_text("/*---\nentry = 'gemm_odd'\n---*/"),
        lambda path: path.write_text("/*---\na = " + "[" * 100_000 + "\n---*/"),
        lambda path: path.mkdir(),
        lambda path: path.symlink_to("nowhere"),
        lambda path: path.symlink_to(path.name),
        lambda path: path.symlink_to("/dev/zero"),
        lambda path: path.touch() or os.truncate(path, 1 << 40),
    ],
    ids=["text", "bytes", "keys", "deep", "folder", "dangling", "loop", "device", "huge"],
)
def test_an_odd_file_among_kernels_is_left_out(make, own, capsys):
    make(own / "gemm_odd.cu")
    assert left_out(own / "gemm_odd.cu", capsys)


def left_out(path, capsys):
    for _ in range(2):
        catalog.kernels.cache_clear()
        assert "odd" not in catalog.kernels() and "good" in catalog.kernels()
    shown = capsys.readouterr().err
    assert shown.count("\n") == 1 and str(path) in shown, shown
    return True


def test_a_file_that_may_not_be_read_is_left_out(own, capsys, monkeypatch):
    path = own / "gemm_odd.cu"
    path.write_text(HEADER.format(""))
    read = Path.read_text

    def refused(self, *args, **options):
        if self == path:  # root reads whatever the mode says
            raise PermissionError(13, "Permission denied", str(self))
        return read(self, *args, **options)

    monkeypatch.setattr(Path, "read_text", refused)
    assert left_out(path, capsys)


def test_a_fifo_among_kernels_is_never_opened(own):
    """Opening it would wait for a writer."""
    os.mkfifo(own / "gemm_odd.cu")
    code = """
        import numpy as np, hybrid_gemm
        print(hybrid_gemm.gemm(np.ones((2, 3)), np.ones((3, 2)), device="cpu").tolist())
    """
    done = python("-c", textwrap.dedent(code), timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[[3.0, 3.0], [3.0, 3.0]]\n"


def test_a_folder_that_may_not_be_read_is_named(own, monkeypatch):
    def refused(self):
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "iterdir", refused)
    catalog.kernels.cache_clear()
    with pytest.raises(UsageError, match="Permission denied"):
        catalog.kernels()


@needs_emulator
def test_a_refused_parameter_does_not_spoil_the_next_call():
    a = np.ones((9, 9), "f4")
    for wrong in (8.0, "8", True):
        with pytest.raises(TypeError, match="whole number"):
            hg.gemm(a, a, device="emulator", kernel="shared_tile", params={"TILE": wrong})
        for right in (8, np.int64(8)):
            c = hg.gemm(a, a, device="emulator", kernel="shared_tile", params={"TILE": right})
            assert (c == 9).all()


def test_counts_may_be_numbers_of_numpy():
    a = np.ones((9, 9))
    for count in (np.int64(2), np.uint8(2)):
        assert (hg.gemm(a, a, device="cpu", threads=count) == 9).all()
