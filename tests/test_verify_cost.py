"""What verification costs: how often matrices are read, by how many threads, and what is said."""

import contextlib
import json
import sys

import numpy as np
import pytest
import threadpoolctl
from click.testing import CliRunner

import hybrid_gemm.verify as module
from hybrid_gemm.cli import cli
from hybrid_gemm.problem import make_problem
from hybrid_gemm.verify import floats, scaled, verify


def matrices(m, n, k, dtype="float32"):
    rng = np.random.default_rng(3)
    a, b = (rng.standard_normal(shape).astype(dtype) for shape in ((m, k), (k, n)))
    return make_problem(a, b, None), a, b, a @ b


def blas_threads():
    return {x["num_threads"] for x in threadpoolctl.threadpool_info() if x["user_api"] == "blas"}


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("shape", [(900, 900, 900), (18000, 64, 900), (64, 18000, 900)])
def test_each_matrix_is_converted_once(shape, dtype, monkeypatch):
    """Beside it sampled rows and columns, and of B its extremes, which need no conversion."""
    problem, a, b, c = matrices(*shape, dtype)
    read, copied = [], scaled.Scaled._copied

    def counted(self, x):
        read.append(x.size)
        return copied(self, x)

    monkeypatch.setattr(scaled.Scaled, "_copied", counted)
    verdict = verify(problem, a, b, None, c, seed=1)
    assert verdict.passed and "random sums" in verdict.how
    assert sum(read) <= 1.15 * (a.size + b.size + c.size)


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

    monkeypatch.setattr(sys.modules["hybrid_gemm.cli.run"], "progress_bar", bar)
    run = ["run", "--size", "64", "--device", "cpu"]
    found = CliRunner().invoke(cli, [*run, "--json", "-"])
    assert begun == ["multiplying", "verifying"]
    assert 0 < json.loads(found.stdout)["verify"]["time_ms"] < 60_000
    assert "; it took " in CliRunner().invoke(cli, run).stdout
    begun.clear()
    CliRunner().invoke(cli, [*run, "--verify", "off"])
    assert begun == ["multiplying"]


@pytest.mark.parametrize("full", [True, False])
def test_the_first_look_changes_no_verdict(full, monkeypatch):
    """Errors from half of what is found to twice that, of one element, are found by the same
    verdicts without it: a first look that allows nothing leaves all to the second."""
    problem, a, b, c = matrices(320, 320, 320)
    monkeypatch.setattr(module, "FULL_FLOPS", 0)
    random, verdicts = np.random.default_rng(5), []
    for size in np.geomspace(1e-5, 1e-3, 40) * (1 if full else 10):
        at = tuple(random.integers(320, size=2))
        wrong = c.copy()
        wrong[at] += size
        found = []
        for allowed in (floats.FIRST, -1.0):
            with monkeypatch.context() as patch:
                patch.setattr(floats, "FIRST", allowed)
                found.append(
                    verify(problem, a, b, None, wrong, mode="full" if full else "auto", seed=1)
                )
        assert found[0].passed == found[1].passed, size
        verdicts.append(found[0].passed)
    assert 5 < sum(verdicts) < 35
