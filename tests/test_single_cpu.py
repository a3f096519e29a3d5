"""Products that the CPU does without a plan: the same bits and errors as by one."""

import itertools

import ml_dtypes
import numpy as np
import pytest
from support.arrays import integers

import hybrid_gemm as hg
from hybrid_gemm import Runner
from hybrid_gemm.devices.cpu import CpuDevice
from hybrid_gemm.errors import (
    DTypeError,
    HybridGemmWarning,
    UnavailableError,
    UsageError,
    VerificationError,
)
from hybrid_gemm.execution import plan_maker
from hybrid_gemm.execution.checks import Checks
from hybrid_gemm.programs import on_cpu

pytestmark = pytest.mark.blas

SHAPES = (1, 1, 1), (5, 3, 7), (64, 33, 128), (300, 200, 100)
SCALARS = (1, 0), (2.5, 0), (1, 1), (-1, 0.5)


@pytest.fixture
def runner():
    return Runner(device="cpu")


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "int32", "int64", ">f4"])
def test_bits_are_those_of_a_run(dtype, runner, no_plans, rng):
    for (m, n, k), (alpha, beta), (trans_a, trans_b) in itertools.product(
        SHAPES, SCALARS, itertools.product((False, True), repeat=2)
    ):
        if np.dtype(dtype).kind == "i" and alpha % 1 + beta % 1:
            continue
        a = (rng.standard_normal((k, m) if trans_a else (m, k)) * 9).astype(dtype)
        b = (rng.standard_normal((n, k) if trans_b else (k, n)) * 9).astype(dtype)
        c = (rng.standard_normal((m, n)) * 9).astype(dtype) if beta else None
        given = {"alpha": alpha, "beta": beta, "trans_a": trans_a, "trans_b": trans_b}
        expected = runner.run(a, b, c, **given).c
        got = runner.gemm(a, b, c, **given)
        assert got.dtype == expected.dtype
        np.testing.assert_array_equal(got, expected)
        if c is not None and c.dtype == expected.dtype:
            assert runner.gemm(a, b, c, **given, out=c) is c
            np.testing.assert_array_equal(c, expected)


def test_what_a_run_decides_is_left_to_it(runner, rng):
    a = integers(rng, (40, 40))
    with pytest.raises(UsageError, match="out overlaps A"):
        runner.gemm(a, np.eye(40, dtype="f4"), out=a)
    interleaved = integers(rng, (40, 80))
    out = interleaved[:, 1::2]  # between the columns of A
    runner.gemm(interleaved[:, ::2], np.eye(40, dtype="f4"), out=out)
    np.testing.assert_array_equal(out, interleaved[:, ::2])
    for _ in range(2):
        with pytest.raises(UsageError, match="shapes do not match"):
            runner.gemm(a, a[:30])
        with pytest.raises(DTypeError, match="bool"):
            runner.gemm(a, a.astype(bool))
        with pytest.raises(UsageError, match="beta=2"):
            runner.gemm(a, a, beta=2)
        read_only = np.zeros((40, 40), "f4")
        read_only.flags.writeable = False
        with pytest.raises(UsageError, match="read-only"):
            runner.gemm(a, a, out=read_only)
    wide = np.empty((40, 40), "f8")
    assert runner.gemm(a, a, out=wide) is wide
    np.testing.assert_array_equal(wide, a @ a)
    for _ in range(2):
        with pytest.warns(HybridGemmWarning, match="C is float64"):
            assert runner.gemm(a, a, a.astype("f8"), beta=1.0).dtype == np.float64
    assert not runner.gemm(a[:, :0], a[:0]).any()
    assert not runner.gemm(a, a, alpha=0).any()
    np.testing.assert_array_equal(hg.gemm(a.tolist(), a, device="cpu"), a @ a)


def test_nan_and_inf_are_as_blas_has_them(runner):
    a = np.array([[np.inf, 1], [np.nan, 1]], "f4")
    with np.errstate(all="raise"):
        got = runner.gemm(a, np.array([[0, 1], [1, 1]], "f4"))
    np.testing.assert_array_equal(got, [[np.nan, np.inf], [np.nan, np.nan]])


@pytest.mark.parametrize("dtype", ["complex64", "complex128"])
def test_complex_products_are_numpys_own(dtype, runner, no_plans, rng):
    a, b = (
        rng.standard_normal((30, 2 * n)).astype("f8").view("c16").astype(dtype) for n in (20, 7)
    )
    for trans, op_a in ((True, a.T), ("c", a.conj().T)):
        np.testing.assert_array_equal(runner.gemm(a, b, trans_a=trans), op_a @ b)
    out = np.zeros((20, 7), dtype)
    assert runner.gemm(a.T, b, out=out) is out
    np.testing.assert_array_equal(out, a.T @ b)
    np.testing.assert_array_equal(runner.matmul(a.T, b[:, 0]), a.T @ b[:, 0])
    stack = np.stack([a, a])
    turned = stack.swapaxes(1, 2)
    np.testing.assert_array_equal(runner.matmul(turned, stack), turned @ stack)


def test_complex_parts_overflow_alone(runner):
    """As C99 has it, and NumPy, whose BLAS multiplies by 1 + 0i, has not."""
    a, b = np.full((2, 1), 1e30, "c8"), np.full((1, 2), 1e30 + 1j, "c8")
    for _ in range(2):
        for got in (runner.gemm(a, b), runner.matmul(a, b), runner.matmul(a[:, 0], b.T[:, 0])):
            assert np.isposinf(got.real).all() and np.isfinite(got.imag).all()


def test_blocks_of_one_matrix_take_no_run(runner, rng, no_plans):
    """As the updates of a blocked factorization have them, C as two views of one block."""
    x = integers(rng, (90, 90))
    for i in range(30, 90, 30):
        wanted = x[i:, i:] - x[i:, i - 30 : i] @ x[i - 30 : i, i:]
        out = x[i:, i:]
        got = runner.gemm(
            x[i:, i - 30 : i], x[i - 30 : i, i:], x[i:, i:], alpha=-1, beta=1, out=out
        )
        assert got is out
        np.testing.assert_array_equal(x[i:, i:], wanted)


@pytest.mark.parametrize("dtype", ["float32", "complex64"])
def test_a_stack_times_a_matrix_is_one_product(dtype, runner, rng, monkeypatch):
    a, b = integers(rng, (2, 3, 5, 4)).astype(dtype), integers(rng, (4, 6)).astype(dtype)
    wanted, products = a @ b, counted_products(runner, monkeypatch)
    np.testing.assert_array_equal(runner.matmul(a, b), wanted)
    out = np.zeros_like(wanted)
    assert runner.matmul(a, b, out=out) is out
    np.testing.assert_array_equal(out, wanted)
    assert [rows for rows, _columns in products] == [30, 30]


def counted_products(runner, monkeypatch):
    """The shapes of A in products that `matmul` makes one by one, from now on."""
    found, multiply = [], runner._writers.multiply
    monkeypatch.setattr(
        runner._writers, "multiply", lambda a, *more: found.append(a.shape) or multiply(a, *more)
    )
    return found


@pytest.mark.parametrize("dtype", ["float32", "complex64", "float16"])
def test_matmul_of_vectors_and_stacks(dtype, runner, rng):
    shapes = (
        ((3, 4), (4,)),
        ((4,), (4, 5)),
        ((4,), (4,)),
        ((2, 1, 3, 4), (5, 4, 2)),
        ((4,), (2, 4, 5)),
    )
    for a, b in (tuple(integers(rng, x).astype(dtype) for x in pair) for pair in shapes):
        expected = np.matmul(a.astype("c16"), b.astype("c16"))
        for _ in range(2):
            got = runner.matmul(a, b)
            assert got.dtype == dtype and got.shape == expected.shape
            np.testing.assert_array_equal(got, expected)
        out = np.zeros((*expected.shape, 2), dtype)[..., 1]
        assert runner.matmul(a, b, out=out) is out or not out.ndim
        np.testing.assert_array_equal(out, expected)
    stack = np.ones((2, 3, 3), dtype)
    for _ in range(2):
        with pytest.raises(UsageError, match="out overlaps A"):
            runner.matmul(stack, stack, out=stack)
        with pytest.raises(UsageError, match="do not broadcast"):
            runner.matmul(np.ones((2, 3, 4)), np.ones((3, 4, 5)))


@pytest.mark.filterwarnings("error")
def test_lists_bias_and_empty_matrices_take_no_run(runner, rng, no_plans):
    a, b = integers(rng, (30, 20)), integers(rng, (20, 50))
    for left in (a.tolist(), memoryview(a), np.ma.masked_array(a)):
        np.testing.assert_array_equal(runner.gemm(left, b), a @ b)
    for shape in ((50,), (1, 50), (30, 1), ()):
        c = integers(rng, shape)
        np.testing.assert_array_equal(runner.gemm(a, b, c, alpha=2, beta=3), 2 * (a @ b) + 3 * c)
    c = integers(rng, (30, 50))
    np.testing.assert_array_equal(runner.gemm(a, b, c, alpha=0, beta=2), 2 * c)
    for m, n, k in ((0, 5, 3), (5, 0, 3), (5, 3, 0), (0, 0, 0)):
        for dtype in ("f4", "i4", "f2", "c8"):
            x, y, z = np.ones((m, k), dtype), np.ones((k, n), dtype), np.ones((m, n), dtype)
            assert not runner.gemm(x, y).any() and runner.gemm(x, y).shape == (m, n)
            if dtype != "c8":
                np.testing.assert_array_equal(runner.gemm(x, y, z, beta=2), 2 * z)


def test_a_new_factor_is_not_planned_anew(runner, monkeypatch):
    a = np.ones((8, 8), "f4")
    runner.gemm(a, a, a, alpha=2, beta=3)
    monkeypatch.setattr(plan_maker, "make_plan", None)
    for i in range(5):
        assert runner.gemm(a, a, a, alpha=i + 0.5, beta=i + 1)[0, 0] == 8 * (i + 0.5) + i + 1
    assert np.isnan(runner.gemm(a, a, a, alpha=np.nan, beta=np.nan)).all()


@pytest.mark.parametrize("dtype", ["int8", "uint32", "int64", "float16", "bfloat16", "complex64"])
@pytest.mark.parametrize("shapes", [
    ((40, 3, 4), (40, 4, 2)), ((5, 1, 3, 4), (8, 4, 2)), ((4,), (4,)), ((4,), (40, 4, 2)),
    ((40, 3, 0), (40, 0, 2)), ((40, 3, 4), (4, 0)), ((0, 3, 4), (0, 4, 2)),
], ids=str)  # fmt: skip
def test_stacks_of_all_dtypes_are_not_multiplied_pair_by_pair(
    dtype, shapes, runner, rng, monkeypatch
):
    dtype = np.dtype(ml_dtypes.bfloat16) if dtype == "bfloat16" else np.dtype(dtype)
    monkeypatch.setattr(on_cpu, "CHUNK_BYTES", 100)  # a few matrices at a time
    products = counted_products(runner, monkeypatch)
    high = np.iinfo(dtype).max if dtype.kind in "iu" else 9
    a, b = (rng.integers(0, high, x).astype(dtype) for x in shapes)
    wanted = np.matmul(a, b) if dtype.kind in "iu" else np.matmul(a.astype("c8"), b.astype("c8"))
    np.testing.assert_array_equal(runner.matmul(a, b), wanted.astype(dtype))
    out = np.ones(wanted.shape, dtype)
    assert runner.matmul(a, b, out=out) is out
    np.testing.assert_array_equal(out, wanted.astype(dtype))
    assert len(products) <= 2  # one a call, of matrices without elements


@pytest.mark.parametrize("dtype", ["int32", "uint32", "int64", "uint64"])
def test_large_integers_wrap_as_numpys_do(dtype, runner, rng):
    """Matrices are multiplied in digits, as float64, and vectors by a loop of NumPy's."""
    info = np.iinfo(dtype)
    for m, n, k in ((64, 70, 65), (65, 64, 5000)):
        a = rng.integers(info.min, info.max, (m, k), dtype, endpoint=True)
        b = rng.integers(info.min, info.max, (k, n), dtype, endpoint=True)
        extreme = np.full_like(a, info.min), np.full_like(a, info.max), np.full_like(a, 1 << 21)
        for left in (a, a % 100, *extreme):
            np.testing.assert_array_equal(runner.gemm(left, b), left @ b)
    np.testing.assert_array_equal(runner.gemm(a, a, trans_b=True), a @ a.T)
    for x, y in ((a, a[0]), (a[:, 0], a), (a[0], a[1]), (a[:3], a[0]), (a[:1], a.T), (a, a[:1].T)):
        np.testing.assert_array_equal(runner.matmul(x, y), x @ y)
        np.testing.assert_array_equal(runner.matmul(y.T, x.T), y.T @ x.T)


@pytest.mark.parametrize("wide", ["i2", "i8", "f2", "f4", "f8", "c16", ">f8", ml_dtypes.bfloat16])
@pytest.mark.parametrize("dtype", ["i1", "u1", "i4", "f2", "f4", "f8", "c8", ml_dtypes.bfloat16])
def test_a_place_of_another_dtype_gets_what_a_run_gives(dtype, wide, rng):
    """Rounded, or wrapped, to the product's dtype first, but for float32 sums of 16 bits."""
    a, b = ((30 * rng.standard_normal(s)).astype(dtype) for s in ((9, 8), (8, 7)))
    if b.dtype.kind not in "iu":  # so that an element of C is one product, rounded once
        b[~np.eye(8, 7, dtype=bool)] = 0
    for order, alpha in itertools.product("CF", (1, 2, 0)):
        made = []
        for options in ({}, {"threads": 2}):
            out = np.zeros((9, 7), wide, order)
            try:
                assert hg.gemm(a, b, alpha=alpha, out=out, device="cpu", **options) is out
            except hg.errors.DTypeError as error:
                out = str(error)
            made.append(out if isinstance(out, str) else out.tobytes())
        assert made[0] == made[1]


# --- checked ------------------------------------------------------------------------------


@pytest.fixture
def checked(no_plans):
    return Runner(device="cpu", checked=True)


@pytest.mark.parametrize("dtype", ["float32", "float64", "int32", "int64"])
def test_checked_products_take_no_plan_and_have_the_bits_of_others(dtype, runner, checked, rng):
    calls = 0
    for (m, n, k), (alpha, beta), trans, given in itertools.product(
        SHAPES, SCALARS, (False, True), (False, True)
    ):
        if dtype[0] == "i" and isinstance(alpha + beta, float):
            alpha, beta = 3, beta and 2
        a = integers(rng, (k, m) if trans else (m, k)).astype(dtype)
        b = integers(rng, (k, n)).astype(dtype)
        c = integers(rng, (m, n)).astype(dtype) if beta else None
        out = np.zeros((m, n), dtype) if given else None
        for added, place in ((c, out), *([(c.copy(),) * 2] if beta else [])):
            wanted = runner.gemm(a, b, c, alpha=alpha, beta=beta, trans_a=trans)
            got = checked.gemm(a, b, added, alpha=alpha, beta=beta, trans_a=trans, out=place)
            assert place is None or got is place
            assert got.tobytes() == wanted.tobytes()
            calls += 1
    assert checked.devices[0].tally == Checks(products=calls)
    stack = integers(rng, (6, 20, 30)).astype(dtype)
    made = checked.matmul(stack, stack.swapaxes(1, 2))
    np.testing.assert_array_equal(made, stack @ stack.swapaxes(1, 2))
    assert checked.devices[0].tally.products == calls + 6


@pytest.mark.parametrize("beta", [0, 2])
@pytest.mark.parametrize("dtype", ["float32", "int32"])
def test_a_damaged_product_is_made_again(dtype, beta, checked, rng, monkeypatch):
    a, b = (integers(rng, (40, 40)).astype(dtype) for _ in "ab")
    c, wrong = integers(rng, (40, 40)).astype(dtype), [True]
    real = CpuDevice.multiply, on_cpu.product

    def damaged(out):
        if wrong.pop():
            out[7, 9] += 1000

    def multiply(self, x, y, out, *scale):
        real[0](self, x, y, out, *scale)
        damaged(out)

    def product(x, y, out):
        made = real[1](x, y, out)
        damaged(made)
        return made

    monkeypatch.setattr(CpuDevice, "multiply", multiply)
    monkeypatch.setattr(on_cpu, "product", product)
    wrong[:] = [False, True]
    out = c.copy()
    got = checked.gemm(a, b, out, beta=beta, out=out) if beta else checked.gemm(a, b)
    np.testing.assert_array_equal(got, a @ b + beta * c)
    tally = checked.devices[0].tally
    assert (tally.products, tally.repeated) == (1, 1) and tally.faults[0].rows[0] <= 7
    wrong[:] = [True] * 9
    with pytest.raises(VerificationError, match="again"):
        checked.gemm(a, b)


def test_a_numpy_that_multiplies_wrongly_is_refused(monkeypatch):
    monkeypatch.setattr(np, "__version__", "2.3.0")
    with pytest.raises(UnavailableError, match=r"NumPy 2\.3\.0 multiplies wrongly"):
        CpuDevice()
