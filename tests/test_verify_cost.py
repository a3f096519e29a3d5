"""What verification costs: how often matrices are read, by how many threads, and what is said."""

import contextlib
import ctypes
import json
import sys

import numpy as np
import pytest
import threadpoolctl
from click.testing import CliRunner

from hybrid_gemm.cli import cli
from hybrid_gemm.devices import native_passes
from hybrid_gemm.problem import make_problem
from hybrid_gemm.verify import verify
from hybrid_gemm.verify.sums import ENDS


def matrices(m, n, k, dtype="float32"):
    rng = np.random.default_rng(3)
    a, b = ((9 * rng.standard_normal(shape)).astype(dtype) for shape in ((m, k), (k, n)))
    return make_problem(a, b, None), a, b, a @ b


def blas_threads():
    return {x["num_threads"] for x in threadpoolctl.threadpool_info() if x["user_api"] == "blas"}


@pytest.mark.parametrize("dtype", ["float32", "float64", "complex64", "int32"])
@pytest.mark.parametrize("shape", [(900, 900, 900), (18000, 64, 900), (64, 18000, 900)])
def test_each_matrix_is_read_once(shape, dtype, monkeypatch):
    """And the smaller one of A and B again, a quarter of it for elements; integers twice. Beside
    that come sampled rows and columns, and the elements by which A and B are scaled."""
    if reason := native_passes.unavailable():
        pytest.skip(reason)
    problem, a, b, c = matrices(*shape, dtype)
    read, run = {}, native_passes.Pass.run

    def counted(self):
        stored, x = self.kept[0], self.about.x
        rows, cols = (
            np.ctypeslib.as_array(ctypes.cast(at, ctypes.POINTER(ctypes.c_int64)), (count + 1,))
            for at, count in (
                (self.about.row_edges, self.about.blocks),
                (self.about.col_edges, self.about.segments),
            )
        )
        share = (rows[-1] - rows[0]) * (cols[-1] - cols[0]) / (x.rows * x.cols)
        name = min(
            "abc", key=lambda n: abs({"a": a, "b": b, "c": c}[n].ctypes.data - stored.ctypes.data)
        )
        read[name] = read.get(name, 0) + share
        run(self)

    monkeypatch.setattr(native_passes.Pass, "run", counted)
    verdict = verify(problem, a, b, None, c, seed=1)
    assert verdict.passed and "random sums" in verdict.how and "NumPy" not in verdict.how
    if dtype == "int32":
        assert read == pytest.approx({"a": 2, "b": 2, "c": 2})
    else:
        larger, smaller = ("a", "b") if shape[0] >= shape[1] else ("b", "a")
        scaled_by = ENDS / shape[2] * (0.5 if dtype == "complex64" else 1)
        assert read[larger] == pytest.approx(1 + scaled_by) and read["c"] == pytest.approx(1)
        assert 2 < read[smaller] < 2.6


@pytest.mark.parametrize("mode", ["auto", "full"])
def test_threads_of_its_own_share_no_blas_of_several(mode):
    problem, a, b, c = matrices(700, 700, 700)
    before, during, shares = blas_threads(), [], []

    def progress(share):
        during.append(blas_threads())
        shares.append(share)

    assert verify(problem, a, b, None, c, mode=mode, progress=progress).passed
    assert all(found == {1} for found in during) and blas_threads() == before
    assert sum(shares) == pytest.approx(1)


def test_a_run_says_that_it_verifies_and_how_long(monkeypatch):
    begun = []

    @contextlib.contextmanager
    def bar(shown=True):
        yield lambda total, what: begun.append(what) or (lambda amount: None)

    monkeypatch.setattr(sys.modules["hybrid_gemm.cli.shared"], "progress_bar", bar)
    run = ["run", "--size", "64", "--device", "cpu"]
    found = CliRunner().invoke(cli, [*run, "--json", "-"])
    assert begun == ["multiplying", "verifying"]
    assert 0 < json.loads(found.stdout)["verify"]["time_ms"] < 60_000
    assert "; it took " in CliRunner().invoke(cli, run).stdout
    begun.clear()
    CliRunner().invoke(cli, [*run, "--verify", "off"])
    assert begun == ["multiplying"]
