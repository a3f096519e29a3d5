"""Other libraries beside ours: right rows, right verdicts, right calls. No GPU needed."""

import contextlib
import csv
import ctypes
import importlib.util
import io
import json
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from support.command import one_line, run

from hybrid_gemm.bench import libraries, study
from hybrid_gemm.bench.libraries import LibraryStudy
from hybrid_gemm.cli.option_types import shape
from hybrid_gemm.cli.pictures import pictures
from hybrid_gemm.errors import UnavailableError, UsageError
from hybrid_gemm.runner import Runner

SHAPES = [(60, 50, 70), (40, 40, 40)]


@pytest.fixture(scope="module")
def measured():
    return study.run(LibraryStudy(SHAPES, device="cpu", samples=2))


def test_rows_are_whole_checked_and_held_against_ours(measured):
    rows = measured["rows"]
    assert {(r["way"], r["c"]) for r in rows} == {
        (way, c) for way in ("ours", "numpy a @ b") for c in ("given", "fresh")
    }
    assert len(rows) == 4 * len(SHAPES)
    for row in rows:
        assert tuple(row)[: len(LibraryStudy.columns)] == LibraryStudy.columns
        assert row["verdict"] == "passed" and 0 <= row["worst_error_of_bound"] < 1
        assert row["samples"] == 2 == len(row["samples_ms"])
        assert row["min_ms"] <= row["time_ms"] <= row["max_ms"]
        ours = next(
            r for r in rows
            if r["way"] == "ours" and all(r[x] == row[x] for x in ("c", "m", "n", "k"))
        )  # fmt: skip
        assert row["ratio_to_ours"] == pytest.approx(row["time_ms"] / ours["time_ms"])
        assert row["gflops"] == pytest.approx(
            2 * row["m"] * row["n"] * row["k"] / row["time_ms"] / 1e6
        )


def test_a_wrong_product_fails_and_is_shown(monkeypatch, capsys):
    real = Runner.gemm

    def wrong(runner, a, b, *, out=None):
        made = real(runner, a, b, out=out)
        if out is None:
            made[3, 4] += 1
        return made

    monkeypatch.setattr(Runner, "gemm", wrong)
    data = study.run(LibraryStudy(SHAPES[:1], device="cpu", samples=1))
    assert {(r["way"], r["c"]): r["verdict"] for r in data["rows"]} == {
        ("ours", "given"): "passed", ("ours", "fresh"): "FAILED",
        ("numpy a @ b", "given"): "passed", ("numpy a @ b", "fresh"): "passed",
    }  # fmt: skip
    study.show(LibraryStudy, data)
    assert "FAILED" in capsys.readouterr().out


def test_a_library_that_does_not_write_c_fails(monkeypatch):
    """C holds no product of another library when it is its turn."""

    def unwritten(runner, a, b, *, out=None):
        return np.full((len(a), b.shape[1]), np.nan, a.dtype) if out is None else out

    monkeypatch.setattr(Runner, "gemm", unwritten)
    data = study.run(LibraryStudy(SHAPES[:1], device="cpu", samples=1))
    assert {r["verdict"] for r in data["rows"] if r["way"] == "ours"} == {"FAILED"}
    assert {r["verdict"] for r in data["rows"] if r["way"] != "ours"} == {"passed"}


def test_csv_and_pictures(measured):
    rows = list(csv.DictReader(io.StringIO(study.as_csv(LibraryStudy, measured))))
    assert [r["way"] for r in rows] == [r["way"] for r in measured["rows"]]
    found = pictures(measured)
    assert list(found) == ["libraries", "times"]
    (panel,) = found["libraries"].panels
    assert panel.title == "pageable memory"
    assert [line.x for line in panel.lines] == [["60 x 50 x 70", "40"]] * 2
    (panel,) = found["times"].panels  # of the largest product
    assert panel.title.endswith("60 x 50 x 70")
    given = {r["way"]: r["time_ms"] for r in measured["rows"] if r["m"] == 60 and r["c"] == "given"}
    ours, theirs = panel.lines
    assert (ours.theirs, theirs.theirs) == (False, True)
    assert dict(zip(ours.x, ours.y, strict=True))["hybrid-gemm"] == given["ours"]
    assert dict(zip(theirs.x, theirs.y, strict=True))["hybrid-gemm"] is None
    assert dict(zip(theirs.x, theirs.y, strict=True))["numpy a @ b"] == given["numpy a @ b"]


class ColumnMajor:
    """What cuBLASXt does, on the CPU: column-major matrices behind bare pointers."""

    def __init__(self):
        self.calls = []

    def __getattr__(self, name):
        def call(*args):
            self.calls.append((name, args))
            if name.endswith("gemm"):
                self.gemm(np.float32 if "Sgemm" in name else np.float64, *args)
            return 7 if name == self.failing else 0

        return call

    failing = ""

    @staticmethod
    def gemm(dtype, _handle, trans_a, trans_b, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc):
        assert trans_a == trans_b == 0

        def matrix(at, rows, cols, ld):
            kind = ctypes.c_float if dtype == np.float32 else ctypes.c_double
            flat = np.ctypeslib.as_array(ctypes.cast(at, ctypes.POINTER(kind)), (cols, ld))
            return flat.T[:rows]

        m, n, k, lda, ldb, ldc = (x.value for x in (m, n, k, lda, ldb, ldc))
        assert matrix(alpha, 1, 1, 1)[0, 0] == 1 and matrix(beta, 1, 1, 1)[0, 0] == 0
        matrix(c, m, n, ldc)[...] = matrix(a, m, k, lda) @ matrix(b, k, n, ldb)


@pytest.fixture
def library(monkeypatch):
    from hybrid_gemm.devices.cuda import cublas

    found = ColumnMajor()
    monkeypatch.setattr(cublas, "library", lambda: found)
    return found


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_cublasxt_is_called_as_it_reads_matrices(library, rng, dtype):
    a = rng.integers(-4, 5, (7, 11)).astype(dtype)
    b = rng.integers(-4, 5, (11, 5)).astype(dtype)
    c = np.full((7, 5), np.nan, dtype)
    with libraries.CublasXt([2, 3]) as xt:
        assert xt.gemm(a, b, c, block=4096, pin=True) is c
    np.testing.assert_array_equal(c, a @ b)
    names = [name.removeprefix("cublasXt") for name, _ in library.calls]
    gemm = "Sgemm" if dtype == "float32" else "Dgemm"
    assert names == ["Create", "DeviceSelect", "SetBlockDim", "SetPinningMemMode", gemm, "Destroy"]
    calls = dict(library.calls)
    assert list(calls["cublasXtDeviceSelect"][2]) == [2, 3]
    assert calls["cublasXtSetBlockDim"][1] == 4096 and calls["cublasXtSetPinningMemMode"][1] == 1


def test_cublasxt_says_what_failed(library):
    library.failing = "cublasXtSetBlockDim"
    with libraries.CublasXt([0]) as xt, pytest.raises(Exception, match=r"cublasXtSetBlockDim.* 7"):
        xt.gemm(*[np.zeros((2, 2), "f4")] * 3, block=1, pin=False)


@pytest.mark.parametrize("memory", libraries.MEMORIES)
def test_the_fastest_of_all_settings_take_part(library, memory, monkeypatch):
    asked = []

    def timed(way, arrays):
        asked.append(way.settings)
        way.call(*arrays)
        block, pinning = library.calls[-3][1][1], library.calls[-2][1][1]
        assert way.settings == f"block {block}, pinning {'on' if pinning else 'off'}"
        return {2048: 21, 4096: 10, 8192: 15}[block] + pinning

    monkeypatch.setattr(libraries, "timed", timed)
    arrays = tuple(np.ones((3, 3), "f4") for _ in range(3))
    with libraries.CublasXt([0]) as xt:
        best = xt.fastest(memory, arrays)
    assert best.settings == "block 4096, pinning off"
    assert [t["settings"] for t in best.trials] == asked
    assert len(set(asked)) == len(asked) == (6 if memory == "pageable" else 3)


class OnGpu:
    """An array of CuPy or PyTorch on a GPU, played by NumPy."""

    def __init__(self, array):
        self.array = array

    def cuda(self, gpu):
        return OnGpu(self.array.copy())

    def __matmul__(self, other):
        return OnGpu(self.array @ other.array)

    def copy_(self, other):
        self.array[...] = other.array

    def get(self, out=None):
        made = self.array.copy() if out is None else out
        made[...] = self.array
        return made

    def cpu(self):
        return OnGpu(self.array.copy())

    def numpy(self):
        return self.array


@pytest.mark.parametrize("given", [True, False])
def test_libraries_of_one_gpu_make_c_and_are_given_it(given, monkeypatch, rng):
    cuda = SimpleNamespace(Device=lambda gpu: contextlib.nullcontext())
    matmul = SimpleNamespace(allow_tf32=True)
    backends = SimpleNamespace(cuda=SimpleNamespace(matmul=matmul))
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=cuda, asarray=OnGpu))
    torch = SimpleNamespace(backends=backends, from_numpy=OnGpu)
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    a, b = rng.standard_normal((3, 4)), rng.standard_normal((4, 5))
    xt = SimpleNamespace(gpus=[0], fastest=lambda *_: libraries.Way("cublasxt", id))
    ways = libraries.others(xt, "pageable", (a, b, np.empty((3, 5))))
    ways = [way for way in ways if way.given is given and way.name != "cublasxt"]
    assert [way.name for way in ways] == ["cupy", "torch"]
    for way in ways:
        c = np.full((3, 5), np.nan)
        made = way.call(a, b, c)
        np.testing.assert_array_equal(made, a @ b)
        assert (made is c) is given
    assert matmul.allow_tf32 is False


def test_what_peers_cannot_do_is_said():
    with pytest.raises(UsageError, match="the emulator has none"):
        study.run(LibraryStudy(SHAPES, device="emulator"))
    with pytest.raises(UnavailableError, match="pinned memory is for GPUs"):
        study.run(LibraryStudy(SHAPES, device="cpu", memories=["pinned"]))
    with pytest.raises(UsageError, match="pageable, pinned"):
        study.run(LibraryStudy(SHAPES, device="cpu", memories=["shared"]))
    with pytest.raises(UsageError, match="float32 and float64"):
        study.run(LibraryStudy(SHAPES, device="cpu", dtype="int32"))


def test_the_command(tmp_path):
    done = run("bench", "--libraries", "--device", "cpu", "--sizes", "32,40x30x20", "--samples", 1,
               "--json", "p.json", "--csv", "p.csv", cwd=tmp_path, check=0)  # fmt: skip
    assert "numpy a @ b" in done.stdout and "passed" in done.stdout
    data = json.loads((tmp_path / "p.json").read_text())
    assert {(r["m"], r["n"], r["k"]) for r in data["rows"]} == {shape("32"), shape("40x30x20")}
    assert (tmp_path / "p.csv").read_text().startswith(",".join(LibraryStudy.columns))
    for options, message in [
        (("--libraries", "--kernels", "naive"), "--kernels is for kernels"),
        (("--libraries", "--cold"), "--cold is for kernels"),
        (("--libraries", "--dtype", "float32,float64"), "one --dtype"),
        (("--memory", "pinned"), "--memory is for --libraries"),
    ]:
        done = run("bench", "--device", "cpu", "--sizes", 8, *options, check=2)
        assert message in one_line(done)
