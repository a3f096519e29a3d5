"""Complex products: exact on whole numbers, bounded on others, on every device and split."""

import itertools
import json

import numpy as np
import pytest
from support.command import run
from support.complex_arrays import DTYPES, OPS, factored, integers, normal, stored
from support.devices import needs
from support.ranks import mpirun, needs_mpirun
from support.small_sizes import small_turns

from hybrid_gemm import Runner, gemm, matmul, plan
from hybrid_gemm.arrays.complex_numbers import expanded
from hybrid_gemm.arrays.generator import generate
from hybrid_gemm.errors import DTypeError, OptionTypeError, OutOfMemoryError, UsageError
from hybrid_gemm.problem import make_problem
from hybrid_gemm.verify import verify

pytestmark = pytest.mark.blas

# --- the product ---------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("trans", list(itertools.product(OPS, OPS)), ids=str)
def test_transposes_conjugates_and_factors(trans, dtype, device, rng):
    shapes = (5, 3, 7), (1, 1, 1), (18, 33, 4)
    for a, b, c, options, expected in factored(rng, trans, dtype, shapes):
        got = gemm(a, b, c if options["beta"] else None, device=device, **options)
        assert got.dtype == dtype
        np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("shape", [(0, 3, 2), (3, 0, 2), (3, 4, 0), (1, 9, 130), (65, 1, 3)])
def test_empty_and_thin_shapes(shape, device, rng):
    m, n, k = shape
    a, b, c = stored(rng, m, n, k, (False, False), "complex64")
    for threads in (1, 3):
        got = gemm(a, b, c, beta=2j, device=device, threads=threads)
        np.testing.assert_array_equal(got, a @ b + 2j * c)


@pytest.mark.parametrize("split", ["rows", "cols", "auto"])
@pytest.mark.parametrize("threads", [1, 2, 3, 4])
def test_splits_and_workers(split, threads, device, rng):
    with Runner(device=device, split=split, threads=threads) as runner:
        for sides in ((37, 41, 53), (64, 128, 96), (2, 3, 5)):
            a, b, c = stored(rng, *sides, ("c", False), "complex64")
            result = runner.run(a, b, c, alpha=1 + 1j, beta=-1, trans_a="c")
            np.testing.assert_array_equal(result.c, (1 + 1j) * (a.T.conj() @ b) - c)
            assert result.problem.flops == 8 * sides[0] * sides[1] * sides[2]
            assert result.problem.dtype == "complex64" and result.gflops > 0
            assert "four real products" in result.compute


@pytest.mark.filterwarnings("ignore:max_device_memory has no effect")
def test_grids_turns_and_strassen(device, monkeypatch, rng):
    small_turns(monkeypatch)
    a, b = integers(rng, (50, 61)), integers(rng, (61, 43))
    for options in (
        {"grid": (2, 1, 3)}, {"grid": (1, 3, 1)}, {"split": "cols", "threads": 2,
        "reduce": "critical"}, {"algorithm": "strassen", "levels": 2},
        {"max_device_memory": 60_000},
    ):  # fmt: skip
        np.testing.assert_array_equal(gemm(a, b, device=device, **options), a @ b)


@pytest.mark.parametrize("names", [
    ("float32", "complex64"), ("complex64", "float64"), ("int32", "complex64"),
    ("complex64", "int16"), ("float16", "complex64"), ("complex128", "complex64"),
    (">c8", "complex64"),
])  # fmt: skip
def test_dtypes_are_promoted_as_numpy_does(names, device, rng):
    a, b = (integers(rng, (6, 6)).astype("c16") for _ in names)
    a, b = (
        x.astype(d) if "c" in d else x.real.astype(d) for x, d in zip((a, b), names, strict=True)
    )
    got = gemm(a, b, device=device)
    assert got.dtype == np.result_type(a, b).newbyteorder("=")
    np.testing.assert_array_equal(got, a @ b)


def test_any_strides_and_places(device, rng):
    whole = integers(rng, (30, 40))
    views = (whole[:9, :9], whole[1:19:2, 3:30:3], whole[8::-1, 8::-1], whole.T[:9, :9],
             np.broadcast_to(whole[0, :9], (9, 9)))  # fmt: skip
    for a, b in itertools.product(views, views):
        for out in (None, np.zeros((9, 9), "c8", order="F"), np.zeros((18, 18), "c8")[::2, ::2],
                    np.zeros((9, 9), "c16")):  # fmt: skip
            got = gemm(a, b, out=out, device=device, trans_b="c")
            assert out is None or got is out
            np.testing.assert_array_equal(got, a @ b.T.conj())


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("beta", [1, -2, 1j])
def test_c_in_place_and_broadcast(order, beta, device, rng):
    a, b = integers(rng, (7, 5)), integers(rng, (5, 6))
    c = np.array(integers(rng, (7, 6)), order=order)
    expected = a @ b + beta * c
    assert gemm(a, b, c, beta=beta, out=c, device=device) is c
    np.testing.assert_array_equal(c, expected)
    for row in (integers(rng, (6,)), integers(rng, (7, 1)), np.float32(3)):
        np.testing.assert_array_equal(gemm(a, b, row, beta=beta, device=device), a @ b + beta * row)


def test_what_is_not_read_may_be_nan(device, rng):
    a, b, c = stored(rng, 4, 5, 6, (False, False), "complex64")
    bad = np.full_like(a, complex(np.nan, np.inf))
    np.testing.assert_array_equal(gemm(bad, b, c, alpha=0, beta=2j, device=device), 2j * c)
    bad = np.full_like(c, complex(np.nan, np.inf))
    np.testing.assert_array_equal(gemm(a, b, bad, beta=0, device=device), a @ b)


def test_stacks_and_vectors(device, rng):
    for shapes in (((4, 5, 7), (4, 7, 3)), ((2, 1, 5, 7), (3, 7, 3)), ((7,), (7,)), ((5, 7), (7,)),
                   ((4, 5, 7), (7, 3)), ((0, 5, 7), (7, 3)), ((7,), (4, 7, 3))):  # fmt: skip
        a, b = (integers(rng, shape) for shape in shapes)
        np.testing.assert_array_equal(matmul(a, b, device=device), np.matmul(a, b))
        np.testing.assert_array_equal(matmul(a.real, b, device=device), np.matmul(a.real, b))


# --- its numbers ---------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k", [1, 100, 3000])
def test_errors_are_within_their_bound(k, dtype, device, rng):
    a, b, c = normal(rng, (9, k), dtype), normal(rng, (k, 11), dtype), normal(rng, (9, 11), dtype)
    alpha, beta = 0.3 - 1.1j, 1.7 + 0.2j
    got = gemm(a, b, c, alpha=alpha, beta=beta, device=device, threads=2, split="cols")
    wide = (x.astype(np.clongdouble) for x in (a, b, c))
    x, y, z = wide
    unit = np.finfo(dtype).eps / 2
    size = abs(alpha) * (abs(x) @ abs(y)) + abs(beta) * abs(z)
    assert (abs(got - (alpha * (x @ y) + beta * z)) <= (2 * k + 10) * unit * size).all()


@pytest.mark.parametrize("options", [{}, {"algorithm": "3m"}, {"threads": 2, "split": "cols"}])
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_complex_alpha_leaves_b_in_its_range(dtype, sign, options, device, rng):
    """alpha * B was Inf, or 0, where C is far from either."""
    half, most = (2.0 ** (sign * np.finfo(dtype).maxexp * x // 4) for x in (2, 3))
    a, b = normal(rng, (4, 9), dtype), normal(rng, (9, 3), dtype)
    wanted = half * gemm(a, b, alpha=1 - 2j, device=device, **options)
    for order in "CF":  # in the latter A is expanded
        x, y = (a / most, b * most) if order == "C" else (a * most, b / most)
        out = np.empty((4, 3), dtype, order)
        gemm(x, y, alpha=half * (1 - 2j), out=out, device=device, **options)
        np.testing.assert_allclose(out, wanted, rtol=1e-3)


@pytest.mark.parametrize("options", [{}, {"algorithm": "3m"}, {"threads": 2, "split": "cols"}])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_complex_alpha_that_is_a_power_of_two_rounds_nothing(dtype, options, device, rng):
    """Of the least numbers half would be 0."""
    limits = np.finfo(dtype)
    least, large = limits.smallest_subnormal, 2.0 ** (limits.maxexp - 28)
    a, b = integers(rng, (4, 5), dtype), integers(rng, (5, 3), dtype)
    for alpha in (1j, -0.25j, 2 + 2j):
        wanted = alpha * (a @ b) * (least * large)
        for x, y, order in ((large, least, "C"), (least, large, "F")):  # in "F" A is expanded
            out = np.empty((4, 3), dtype, order)
            gemm(a * x, b * y, alpha=alpha, out=out, device=device, **options)
            np.testing.assert_array_equal(out, wanted)


def test_tensor_cores_are_as_accurate(kernel_device, rng, without_models):
    k = 200
    a, b = normal(rng, (40, k)), normal(rng, (k, 30))
    try:
        result = Runner(device=kernel_device, compute="fp32x3").run(a, b, trans_a=False)
    except OutOfMemoryError:
        pytest.skip("no memory")
    assert result.compute.startswith("fp32x3")
    x, y = a.astype("c16"), b.astype("c16")
    assert (abs(result.c - x @ y) <= 2 * k * 2.0**-24 * (abs(x) @ abs(y))).all()


def test_finite_parts_overflow_as_in_c99(device):
    """Each part for itself: NumPy's BLAS makes NaN of the part that is in range."""
    a = np.array([[1e30, 0], [0, 1]], "c8")
    b = np.array([[1e30 + 1j, 2], [3, 4j]], "c8")
    with np.errstate(over="ignore"):
        expected = np.array([[complex(np.inf, np.float32(1e30)), np.float32(2e30)], [3, 4j]], "c8")
    for options in ({}, {"threads": 2, "split": "cols"}):
        np.testing.assert_array_equal(gemm(a, b, device=device, **options), expected)


def test_infinite_parts_leave_nothing_finite(device, rng):
    a, b = normal(rng, (6, 5)), normal(rng, (5, 4))
    expected = a @ b
    a[2, 3] = complex(np.inf, 1)
    b[1, 3] = complex(0, np.nan)
    got = gemm(a, b, device=device)
    hit = np.zeros(got.shape, bool)
    hit[2], hit[:, 3] = True, True
    assert not np.isfinite(got[hit]).any()
    np.testing.assert_allclose(got[~hit], expected[~hit], rtol=1e-4)


@pytest.mark.parametrize("conj", list(itertools.product((False, True), repeat=2)))
@pytest.mark.parametrize("alpha", [1, 2 - 3j])
def test_the_expansion_is_that_of_its_docstring(conj, alpha, rng):
    b = integers(rng, (3, 4))
    made = expanded(b, b.dtype, conj_left=conj[0], conj=conj[1], alpha=alpha).view("c8")
    row = (b.conj() if conj[1] else b) * (alpha if isinstance(alpha, complex) else 1)
    np.testing.assert_array_equal(made[0::2], row)
    np.testing.assert_array_equal(made[1::2], row * (-1j if conj[0] else 1j))


def test_large_matrices_are_expanded_in_pieces(monkeypatch, rng):
    monkeypatch.setattr("hybrid_gemm.arrays.caller_arrays.PIECE", 50)
    a, b = integers(rng, (8, 40)), integers(rng, (40, 20))
    np.testing.assert_array_equal(gemm(a, b, device="cpu"), a @ b)


# --- what is refused -----------------------------------------------------------------------


@pytest.mark.parametrize("arguments, error, message", [
    ({"alpha": 1j}, DTypeError, "alpha must be a real number.*the matrices are real"),
    ({"beta": 1j, "c": np.ones((3, 3), "f4")}, DTypeError, "beta must be a real number"),
    ({"trans_a": "h"}, UsageError, "trans_a='h': it takes False, True, 'n', 't' or 'c'"),
    ({"trans_b": ""}, UsageError, "trans_b=''"),
    ({"trans_a": 2}, UsageError, "trans_a=2: it takes False, True"),
    ({"trans_b": None}, OptionTypeError, "trans_b=None"),
    ({"trans_b": b"n"}, OptionTypeError, "trans_b=b'n'"),
    ({"a": np.ones((3, 3), "c8"), "out": np.ones((3, 3), "f8")}, DTypeError, "complex64"),
    ({"a": np.ones((3, 3), np.clongdouble)}, DTypeError, "A has dtype complex256; .*complex128"),
    ({"a": np.ones((3, 3), "c8"), "alpha": "1"}, DTypeError, "alpha must be"),
    ({"a": np.ones((3, 3), "c8"), "b": np.ones((4, 3))}, UsageError, "3 x 3 and B is 4 x 3"),
])  # fmt: skip
def test_refusals(arguments, error, message):
    given = {"a": np.ones((3, 3), "f4"), "b": np.ones((3, 3), "f4"), "c": None} | arguments
    with pytest.raises(error, match=message):
        gemm(given.pop("a"), given.pop("b"), given.pop("c"), device="cpu", **given)


def test_an_out_that_overlaps_is_refused(device, rng):
    a, b = integers(rng, (5, 5)), integers(rng, (5, 5))
    for out in (a, b, a.T):
        with pytest.raises(UsageError, match="out overlaps"):
            gemm(a, b, out=out, device=device)


def test_compute_and_kernels_are_refused_as_for_real_matrices(rng):
    a = integers(rng, (4, 4), "complex128")
    with pytest.raises(UsageError, match="compute fp32x3 is for float32"):
        gemm(a, a, device="emulator", compute="fp32x3")
    with pytest.raises(UsageError, match="does not run on the cpu"):
        gemm(a, a, device="cpu", kernel="naive")
    np.testing.assert_array_equal(gemm(a, a, device="emulator", kernel="naive"), a @ a)


def test_letters_are_known_for_real_matrices_too(device, rng):
    a, b = integers(rng, (5, 4)).real, integers(rng, (5, 3)).real
    for letter in ("t", "T", "c"):
        np.testing.assert_array_equal(
            gemm(a, b, trans_a=letter, trans_b="n", device=device), a.T @ b
        )


# --- plans, files, the command ---------------------------------------------------------------


def test_plans_are_of_the_real_product():
    made = plan(10, 20, 30, dtype="complex128", device="cpu", threads=3, split="cols")
    assert (made.problem.m, made.problem.n, made.problem.k) == (10, 40, 60)
    assert made.problem.dtype == "float64" and made.problem.flops == 8 * 10 * 20 * 30


@pytest.mark.parametrize("fill", ["normal", "integers"])
def test_generated_parts_are_those_of_the_whole(fill):
    whole = generate(300, 520, "complex64", seed=3, operand="A", fill=fill)
    part = generate(300, 520, "complex64", seed=3, operand="A", fill=fill, threads=2,
                    row_range=(100, 290), col_range=(255, 513))  # fmt: skip
    np.testing.assert_array_equal(part, whole[100:290, 255:513])
    pairs = generate(300, 512, "float32", seed=3, operand="A", fill=fill)
    assert len(np.unique(whole.real)) > 1 and not np.array_equal(whole.real, whole.imag)
    assert pairs.shape == whole[:, :512].shape


def test_files(tmp_path, device, rng):
    a, b = integers(rng, (20, 30)), integers(rng, (25, 30), "complex128")
    np.save(tmp_path / "a.npy", np.asfortranarray(a))
    np.save(tmp_path / "b.npy", b.astype(">c16"))
    c = tmp_path / "c.npy"
    run(
        "run", tmp_path / "a.npy", tmp_path / "b.npy", "--conj-trans-b", "--alpha", "1-2j", "-o", c,
        "--device", device, "--threads", 2, "--json", tmp_path / "r.json", check=0,
    )  # fmt: skip
    np.testing.assert_array_equal(np.load(c), (1 - 2j) * (a @ b.T.conj()))
    found = json.loads((tmp_path / "r.json").read_text())
    assert found["problem"] == {
        "m": 20, "n": 25, "k": 30, "dtype": "complex128", "out_dtype": "complex128",
        "alpha": [1.0, -2.0], "beta": 0.0,
    }  # fmt: skip
    assert found["verify"]["passed"]


@needs_mpirun
@pytest.mark.parametrize("split", ["rows", "cols"])
def test_ranks_write_one_file(split, tmp_path):
    arguments = (
        "run", "-m", 37, "-n", 23, "-k", 41, "--dtype", "complex64", "--fill", "integers",
        "--device", "cpu", "--alpha", "1-2j", "--beta", "2j", "--conj-trans-b",
    )  # fmt: skip
    run(*arguments, "-o", tmp_path / "one.npy", check=0)
    mpirun(3, "-m", "hybrid_gemm", *arguments, "--split", split, "-o", tmp_path / "c.npy", check=0)
    found = np.load(tmp_path / "c.npy")
    assert found.dtype == "complex64"
    np.testing.assert_array_equal(found, np.load(tmp_path / "one.npy"))


@pytest.mark.parametrize("arguments, message", [
    (["--trans-a", "--conj-trans-a"], "give one of them"), (["--alpha", "x"], "not a number"),
    (["--alpha", "1j", "--dtype", "float32"], "the matrices are real"),
    (["--dtype", "c64"], "did you mean complex64"),
])  # fmt: skip
def test_the_command_refuses(arguments, message):
    done = run("run", "--size", 4, "--dtype", "complex64", "--device", "cpu", *arguments, check=2)
    assert message in done.stderr


# --- verification --------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["full", "auto"])
@pytest.mark.parametrize("alpha, beta", [(1, 0), (2, -1), (0.3 - 2j, 1.1 + 0.4j)])
def test_a_right_product_passes_and_wrong_signs_do_not(mode, alpha, beta, monkeypatch, rng):
    monkeypatch.setattr("hybrid_gemm.verify.FULL_FLOPS", 1000)
    a, b, c = normal(rng, (60, 70)), normal(rng, (70, 80)), normal(rng, (60, 80))
    problem = make_problem(a, b, c, alpha=alpha, beta=beta)
    got = gemm(a, b, c, alpha=alpha, beta=beta, device="cpu")
    assert verify(problem, a, b, c, got, mode=mode).passed
    wrong = [
        gemm(a.conj(), b, c, alpha=alpha, beta=beta), gemm(a, b.conj(), c, alpha=alpha, beta=beta),
        got.conj(), 1j * got, got.real.astype("c8"),
    ]  # fmt: skip
    wrong += [gemm(a, b, c, alpha=np.conj(alpha), beta=beta)] if alpha != np.conj(alpha) else []
    wrong += [gemm(a, b, c, alpha=alpha, beta=np.conj(beta))] if beta != np.conj(beta) else []
    for each in wrong:
        assert not verify(problem, a, b, c, each, mode=mode).passed


@pytest.mark.parametrize("beta", [0, 1 + 2j])
@pytest.mark.parametrize("part, off", [("Re", 1e-2), ("Im", 1e-2j)])
def test_the_wrong_element_is_named(part, off, beta, rng):
    a, b = normal(rng, (20, 30)), normal(rng, (30, 25))
    c = normal(rng, (20, 25)).real.astype("c8")  # without imaginary parts
    problem, got = make_problem(a, b, c, beta=beta), (a @ b + beta * c).astype("c8")
    got[7, 11] += off
    found = verify(problem, a, b, c, got)
    assert not found.passed and found.where.startswith(f"{part} C[7, 11] is")


def test_conjugates_are_part_of_what_is_verified(rng):
    a, b = normal(rng, (30, 20)), normal(rng, (25, 30))
    problem = make_problem(a, b, trans_a="c", trans_b="c")
    got = gemm(a, b, trans_a="c", trans_b="c", device="cpu")
    assert verify(problem, a.T, b.T, None, got).passed
    assert not verify(problem, a.T, b.T, None, gemm(a, b, trans_a=True, trans_b="c")).passed


# --- arrays on a GPU -------------------------------------------------------------------------


@needs("cuda")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("trans", list(itertools.product(OPS, OPS)), ids=str)
def test_arrays_on_a_gpu(trans, dtype, rng):
    cp = pytest.importorskip("cupy")
    shapes = (5, 3, 7), (130, 70, 33), (0, 2, 3)
    for a, b, c, options, expected in factored(rng, trans, dtype, shapes):
        x, y, z = map(cp.asarray, (a, b, c))
        for out in (
            None,
            cp.empty_like(z),
            cp.asfortranarray(z),
            cp.zeros((*z.shape, 2), dtype)[..., 0],
        ):
            got = gemm(x, y, z, out=out, **options)
            assert isinstance(got, cp.ndarray) and (out is None or got is out)
            np.testing.assert_array_equal(got.get(), expected)
        gemm(x, y, z, out=z, **options)
        np.testing.assert_array_equal(z.get(), expected)


@needs("cuda")
def test_arrays_on_a_gpu_are_multiplied_on_its_current_stream(rng):
    cp = pytest.importorskip("cupy")
    a, b = integers(rng, (257, 300)), integers(rng, (300, 129))
    with cp.cuda.Stream(non_blocking=True):
        x, y = cp.asarray(a), cp.asarray(b)
        products = [gemm(x, y, compute=compute) for compute in ("fp32", "fp32x3")] + [x @ y]
        for got in products:
            np.testing.assert_array_equal(got.get(), a @ b)


@needs("cuda")
@pytest.mark.parametrize("conj", list(itertools.product((False, True), repeat=2)))
def test_a_gpu_expands_as_the_host_does(conj, rng):
    cp = pytest.importorskip("cupy")
    for b in (normal(rng, (33, 70)), normal(rng, (70, 33)).T, normal(rng, (66, 140))[::2, ::2]):
        for alpha in (1, 2 - 1j):
            options = {"conj_left": conj[0], "conj": conj[1], "alpha": alpha}
            there = expanded(cp.asarray(b), b.dtype, **options)
            np.testing.assert_allclose(there.get(), expanded(b, b.dtype, **options), rtol=1e-5)
