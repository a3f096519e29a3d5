"""Complex products by three real ones (algorithm="3m"): exact on whole numbers, and judged by the
size of the three products."""

import itertools
import json

import numpy as np
import pytest
from support.command import run
from support.complex_arrays import DTYPES, OPS, factored, integers, normal, stored
from support.ranks import mpirun, needs_mpirun

from hybrid_gemm import Runner, gemm, gemm_many, matmul
from hybrid_gemm.errors import UsageError
from hybrid_gemm.options import Options
from hybrid_gemm.problem import make_problem
from hybrid_gemm.verify import verify

pytestmark = pytest.mark.blas


@pytest.fixture
def runner(device):
    with Runner(device=device, algorithm="3m") as made:
        yield made


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("trans", list(itertools.product(OPS, OPS)), ids=str)
def test_transposes_conjugates_and_factors(trans, dtype, runner, rng):
    shapes = (5, 3, 7), (1, 1, 1), (18, 33, 4)
    for a, b, c, options, expected in factored(rng, trans, dtype, shapes):
        got = runner.gemm(a, b, c if options["beta"] else None, **options)
        assert got.dtype == dtype
        np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("shape", [(0, 3, 2), (3, 0, 2), (3, 4, 0), (1, 9, 130), (65, 1, 3)])
def test_empty_and_thin_shapes(shape, runner, rng):
    a, b, c = stored(rng, *shape, (False, False), "complex64")
    np.testing.assert_array_equal(runner.gemm(a, b, c, beta=2j), a @ b + 2j * c)
    np.testing.assert_array_equal(runner.run(a, b, c, beta=2j).c, a @ b + 2j * c)


def test_a_run_says_what_it_did(device, rng):
    a, b, c = stored(rng, 37, 41, 53, ("c", False), "complex64")
    with Runner(device=device, algorithm="3m", threads=3, split="cols") as runner:
        seen = []
        result = runner.run(a, b, c, alpha=1j, beta=-1, trans_a="c", progress=seen.append)
        np.testing.assert_array_equal(result.c, 1j * (a.T.conj() @ b) - c)
        assert result.compute.endswith("three real products (3m)")
        assert result.problem.flops == 8 * 37 * 41 * 53 and result.total_ms > 0
        assert abs(sum(seen) - result.problem.flops) < len(seen) + 1
        starts = [x.start_ms for x in result.timeline.of("multiply", 0)]
        assert starts == sorted(starts) and len(starts) >= 3
        plan = runner.plan(result.problem)
        assert (plan.problem.m, plan.problem.n, plan.problem.k) == (37, 41, 53)
        assert plan.problem.dtype == "float32"


def test_places_and_orders(runner, rng):
    whole = integers(rng, (30, 40))
    views = (whole[:9, :9], whole[1:19:2, 3:30:3], whole[8::-1, 8::-1], whole.T[:9, :9])
    for a, b in itertools.product(views, views):
        for out in (None, np.zeros((9, 9), "c8", order="F"), np.zeros((18, 18), "c8")[::2, ::2],
                    np.zeros((9, 9), "c16")):  # fmt: skip
            got = runner.gemm(a, b, out=out, trans_b="c")
            assert out is None or got is out
            np.testing.assert_array_equal(got, a @ b.T.conj())
    c = integers(rng, (9, 9))
    expected = views[0] @ views[1] + 2j * c
    assert runner.gemm(views[0], views[1], c, beta=2j, out=c) is c
    np.testing.assert_array_equal(c, expected)
    with pytest.raises(UsageError, match="overlaps A"):
        runner.gemm(views[0], views[1], out=views[0])


def test_what_is_not_read_may_be_nan(runner, rng):
    a, b, c = stored(rng, 4, 5, 6, (False, False), "complex64")
    bad = np.full_like(a, complex(np.nan, np.inf))
    np.testing.assert_array_equal(runner.gemm(bad, b, c, alpha=0, beta=2j), 2j * c)
    bad = np.full_like(c, complex(np.nan, np.inf))
    np.testing.assert_array_equal(runner.gemm(a, b, bad, beta=0), a @ b)


def test_stacks_lists_and_real_matrices(runner, rng):
    a, b = integers(rng, (3, 5, 7)), integers(rng, (7, 4))
    np.testing.assert_array_equal(runner.matmul(a, b), a @ b)
    others = [b, b, b.real.copy()]
    for got, x, y in zip(runner.gemm_many(list(a), others), a, others, strict=True):
        np.testing.assert_array_equal(got, x @ y)
    real = runner.run(a[0].real.astype("f4"), b.real.astype("f4"))
    np.testing.assert_array_equal(real.c, a[0].real @ b.real)
    assert "3m" not in real.compute
    np.testing.assert_array_equal(matmul(a, b, device=runner.kind, algorithm="3m"), a @ b)
    (one,) = gemm_many([a[0]], [b], device=runner.kind, algorithm="3m")
    np.testing.assert_array_equal(one, a[0] @ b)


def test_arrays_of_a_gpu(rng):
    cupy = pytest.importorskip("cupy")
    if not cupy.cuda.is_available():
        pytest.skip("no GPU")
    a, b, c = stored(rng, 65, 70, 90, ("c", True), "complex64")
    x, y, z = map(cupy.asarray, (a, b, c))
    expected = (1 - 2j) * (a.T.conj() @ b.T) + 1j * c
    for compute in ("fp32", "fp32x3"):
        options = {"alpha": 1 - 2j, "beta": 1j, "trans_a": "c", "trans_b": True,
                   "compute": compute, "algorithm": "3m"}  # fmt: skip
        got = gemm(x, y, z, **options)
        assert isinstance(got, cupy.ndarray)
        np.testing.assert_array_equal(got.get(), expected)
        place = cupy.asarray(c, order="F")
        assert gemm(x, y, place, out=place, **options) is place
        np.testing.assert_array_equal(place.get(), expected)
        np.testing.assert_array_equal(gemm(a, b, z, **options).get(), expected)


# --- how accurate ---------------------------------------------------------------------------


def uneven(rng, shape, dtype):
    """Imaginary parts a millionth of the real ones: where 3m loses digits."""
    x = normal(rng, shape, dtype)
    return (x.real + 1e-6j * x.imag).astype(dtype)


@pytest.mark.parametrize("size", [(1, 1, 1), (40, 30, 50), (300, 200, 400)], ids=str)
@pytest.mark.parametrize("make", [normal, uneven])
@pytest.mark.parametrize("dtype", DTYPES)
def test_verdicts_go_by_the_three_products(dtype, make, size, rng):
    m, n, k = size
    a, b, c = make(rng, (m, k), dtype), make(rng, (k, n), dtype), make(rng, (m, n), dtype)
    with Runner(device="cpu", algorithm="3m") as runner:
        for alpha, beta in ((1, 0), (2 - 1j, 1j)):
            result = runner.run(a, b, c, alpha=alpha, beta=beta)
            problem = result.problem
            mode = "full" if m < 300 else "auto"
            verdict = verify(problem, a, b, c, result.c, mode=mode, by_three=True)
            assert verdict.passed, str(verdict)
            largest = (abs(a) @ abs(b)).max()
            result.c[m // 2, n // 2] += 1j * largest * 300 * np.finfo(dtype).eps * k
            assert not verify(problem, a, b, c, result.c, mode="full", by_three=True).passed


def test_errors_are_small_beside_moduli(rng):
    """docs/arrays.md: |error| <= 3 (k + 4) u (|A| |B|) with moduli, here far below."""
    a, b = uneven(rng, (60, 500), "complex64"), uneven(rng, (500, 70), "complex64")
    exact = a.astype("c16") @ b.astype("c16")
    error = abs(gemm(a, b, device="cpu", algorithm="3m") - exact)
    assert (error <= 3 * 504 * 2.0**-24 * (abs(a) @ abs(b))).all()
    plain = abs((gemm(a, b, device="cpu") - exact).imag).max()
    assert error.max() > 100 * plain  # the price, and why it is not the default


# --- the surface ----------------------------------------------------------------------------


def test_what_does_not_go_together():
    with pytest.raises(UsageError, match=r"what 3m adds to them is not checked"):
        Options(algorithm="3m", checked=True)


def test_the_tables_are_of_all_three_products(tmp_path):
    words = ["run", "--size", "200", "--dtype", "complex64", "--algorithm", "3m", "--device", "cpu"]
    done = run(*words, "--json", tmp_path / "r.json", check=0)
    assert "three real products m=200 n=200 k=200 float32, one after the other" in done.stdout
    assert run(*words, "--dry-run", check=0).stdout.count(f" {3 * 2 * 200**3 / 1e9:.3f} ") == 1
    data = json.loads((tmp_path / "r.json").read_text())
    boxes = [box for worker in data["plan"]["workers"] for box in worker["boxes"]]
    assert sum(box["flops"] for box in boxes) == 3 * 2 * 200**3


@needs_mpirun
def test_ranks_make_three_products(tmp_path):
    done = mpirun(
        3, "-m", "hybrid_gemm", "run", "--size", "90", "--dtype", "complex128", "--algorithm",
        "3m", "--split", "cols", "--threads", "2", "--alpha", "1+2j", "--conj-trans-a",
        "--device", "cpu", "--verify", "full", "--json", tmp_path / "r.json", timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "three real products (3m)" in done.stdout
    data = json.loads((tmp_path / "r.json").read_text())
    assert data["verify"]["passed"] and data["gflops"] > 0
    assert data["algorithm"] == {"name": "3m"}
    starts = [x["start_ms"] for x in data["timeline"] if x["phase"] == "multiply"]
    assert len(starts) >= 9  # three a rank, one after the other
    assert max(starts) <= data["total_ms"]


def test_the_command(tmp_path):
    done = run("run", "--size", "96", "--dtype", "complex64", "--algorithm", "3m", "--device",
               "cpu", "--verify", "full", "--json", tmp_path / "r.json", check=0)  # fmt: skip
    assert "three real products (3m)" in done.stdout
    data = json.loads((tmp_path / "r.json").read_text())
    assert data["algorithm"] == {"name": "3m"} and data["verify"]["passed"]


@pytest.mark.parametrize("what", ["A", "B", "C", "sum"])
def test_inf_and_overflow_beside_three_products(what, rng):
    """Inf of one part may be NaN in both; elements that meet none are what they were."""
    a, b, c = (normal(rng, s, "complex64") for s in ((9, 8), (8, 7), (9, 7)))
    matrix = {"A": a, "B": b, "C": c, "sum": a}[what]
    matrix[2, 3] = complex(2e38, 2e38) if what == "sum" else complex(1, np.inf)
    with np.errstate(all="ignore"):
        got = gemm(a, b, c, alpha=0.5, beta=2.0, algorithm="3m", device="cpu")
        problem = make_problem(a, b, c, alpha=0.5, beta=2.0)
        assert not np.isfinite(got).all()
        for mode in ("full", "auto"):
            assert verify(problem, a, b, c, got, mode=mode, by_three=True).passed
        i, j = (8, 6) if what != "C" else (2, 2)
        got[i, j] = np.inf
        assert not verify(problem, a, b, c, got, by_three=True).passed


def test_a_part_beside_inf_in_c_is_multiplied_alone(rng):
    a, b, c = (normal(rng, s, "complex64") for s in ((9, 8), (8, 7), (9, 7)))
    c[2, 3] = complex(np.inf, 1)
    with np.errstate(all="ignore"):
        got = gemm(a, b, c, alpha=0.5, beta=2.0, algorithm="3m", device="cpu")
    c[2, 3] = 1j
    right = gemm(a, b, c, alpha=0.5, beta=2.0, algorithm="3m", device="cpu")
    assert got[2, 3].real == np.inf and got[2, 3].imag == right[2, 3].imag
