"""Stacks and vectors over ranks, as NumPy's `matmul` has them."""

import functools

import ml_dtypes
import numpy as np
import pytest
from support.arrays import Other, integers
from support.devices import DEVICES

import hybrid_gemm
from hybrid_gemm import RankRunner
from hybrid_gemm.errors import DTypeError, UsageError
from hybrid_gemm.problem import Problem

pytestmark = pytest.mark.mpi
SHAPES = [
    ((7, 4, 5), (7, 5, 3)),  # more matrices than ranks, and some left over
    ((1, 4, 5), (1, 5, 3)),
    ((6, 4, 5), (5, 3)),  # one product
    ((2, 3, 4, 5), (5, 3)),
    ((4, 5), (6, 5, 3)),
    ((2, 1, 4, 5), (3, 5, 3)),  # stacks that broadcast
    ((5, 4, 5), (5,)),
    ((5,), (5, 5, 3)),
    ((5,), (5,)),
    ((4, 5), (5,)),
    ((4, 5), (5, 3)),
    ((0, 4, 5), (0, 5, 3)),
    ((3, 4, 0), (3, 0, 2)),
    ((3, 0, 5), (3, 5, 2)),
]


@pytest.fixture(scope="module", params=DEVICES)
def here(comm, request):
    with RankRunner(comm, device=request.param) as runner:
        yield runner


@pytest.mark.parametrize("shapes", SHAPES, ids=str)
def test_stacks(comm, device, shapes, rng):
    a, b = (integers(rng, shape) for shape in shapes)
    expected, last = np.matmul(a, b), comm.size - 1
    options = {"comm": comm, "device": device}
    got = hybrid_gemm.matmul(a, b, **options)
    np.testing.assert_array_equal(got, expected)
    assert np.shape(got) == np.shape(expected) and got.dtype == expected.dtype
    out = np.full(np.shape(expected), np.nan)[...]
    assert hybrid_gemm.matmul(a, b, out=out, **options) is out or not out.ndim
    np.testing.assert_array_equal(out, expected)
    given = (a, b) if comm.rank == last else (None, None)
    got = hybrid_gemm.matmul(*given, distribution="root", root=last, **options)
    if comm.rank == last:
        np.testing.assert_array_equal(got, expected)
    else:
        assert got is None
    got = hybrid_gemm.matmul(*given, distribution="root", result="replicated", root=last, **options)
    np.testing.assert_array_equal(got, expected)


def test_large_matrices_left_over_are_split_over_all_ranks(comm, rng):
    runner = RankRunner(comm, device="cpu")
    large, small = (Problem(s, s, s, "float32") for s in (8192, 4))
    faster = functools.partial(runner._planner.faster_together, runner.spec())
    if comm.size > 1:
        assert faster(large, 1) and not faster(large, comm.size)
    assert not faster(small, comm.size)
    runner._planner.faster_together = lambda *_: True
    for count in 1, comm.size, 2 * comm.size + 1:
        a, b = integers(rng, (count, 9, 5)), integers(rng, (count, 5, 7))
        np.testing.assert_array_equal(runner.matmul(a, b), a @ b)
        given = (a, b) if comm.rank == 0 else (None, None)
        got = runner.matmul(*given, distribution="root", result="replicated")
        np.testing.assert_array_equal(got, a @ b)
    runner.close()


@pytest.mark.parametrize("dtype", ["float16", "float64", "complex64", "int32"])
def test_dtypes(comm, device, dtype, rng):
    a, b = (integers(rng, shape).astype(dtype) for shape in ((5, 4, 6), (5, 6, 3)))
    got = hybrid_gemm.matmul(a, b, comm=comm, device=device)
    assert got.dtype == dtype
    np.testing.assert_array_equal(got, np.matmul(a, b))


@pytest.mark.parametrize("dtype", ["float32", "complex128", "int16"])
def test_ranks_may_differ_in_byte_order(comm, dtype, rng):
    a, b = (integers(rng, shape).astype(dtype) for shape in ((5, 4, 6), (5, 6, 3)))
    mine = a.astype(a.dtype.newbyteorder()) if comm.rank else a
    got = hybrid_gemm.matmul(mine, b, comm=comm, device="cpu")
    assert got.dtype == dtype
    np.testing.assert_array_equal(got, a @ b)
    given = (a.astype(a.dtype.newbyteorder()), b) if comm.rank == 0 else (None, None)
    got = hybrid_gemm.matmul(
        *given, comm=comm, device="cpu", distribution="root", result="replicated"
    )
    assert got.dtype == dtype
    np.testing.assert_array_equal(got, a @ b)


def test_arrays_of_another_library_come_back_as_its_own(comm, rng):
    a, b = integers(rng, (5, 4, 6)), integers(rng, (5, 6, 3))
    got = hybrid_gemm.matmul(Other(a), Other(b), comm=comm, device="cpu")
    assert isinstance(got, Other)
    np.testing.assert_array_equal(got.array, a @ b)


@pytest.mark.parametrize(("given", "error", "says"), [
    ({"distribution": "rows"}, UsageError, "distribution='rows': stacks .* replicated or root"),
    ({"result": "rows"}, UsageError, "result='rows'"),
    ({"root": 99}, UsageError, "root=99; there are ranks 0 to"),
    ({"b": np.ones((3, 5, 2), "f4")}, UsageError, "do not broadcast"),
    ({"b": np.ones((2, 4, 2), "f4")}, UsageError, "shapes do not match"),
    ({"b": np.ones((), "f4")}, UsageError, "B is a number"),
    ({"b": None}, UsageError, "B is missing"),
    ({"b": np.ones((2, 5, 2), "M8[s]")}, DTypeError, "B has dtype datetime64"),
    ({"out": np.ones((2, 4, 2), "i4")}, DTypeError, "out has dtype int32"),
    ({"out": np.ones((2, 4, 3), "f4")}, UsageError, "out has shape"),
])  # fmt: skip
def test_refusals_are_those_of_all_ranks(comm, given, error, says):
    usual = {"a": np.ones((2, 4, 5), "f4"), "b": np.ones((2, 5, 2), "f4")} | given
    with pytest.raises(error, match=says):
        hybrid_gemm.matmul(usual.pop("a"), usual.pop("b"), comm=comm, device="cpu", **usual)


def test_ranks_agree_on_shapes(comm):
    if comm.size == 1:
        pytest.skip("takes two ranks")
    a = np.ones((2 if comm.rank else 3, 4, 4))
    with pytest.raises(UsageError, match="A does not fit together"):
        hybrid_gemm.matmul(a, a, comm=comm, device="cpu")


def sums_of_2049(a, b):
    """A and B of these shapes, with k = 3."""
    return np.broadcast_to(np.array([1024, 1024, 1], "f4"), a), np.ones(b, "f4")


@pytest.mark.parametrize(("narrow", "dtype", "distribution", "result"), [  # each pair of them
    ("f2", "f8", "replicated", "root"), ("f2", "f8", "root", "replicated"),
    (ml_dtypes.bfloat16, "f4", "replicated", "replicated"),
    (ml_dtypes.bfloat16, "f4", "root", "root"),
])  # fmt: skip
@pytest.mark.parametrize(("shapes", "left_over"), [
    (((5, 2, 3), (5, 3, 3)), "shared out"), (((5, 2, 3), (5, 3, 3)), "split"),
    (((2, 2, 3), (3, 3)), None), (((3,), (4, 3, 3)), "shared out"),
    (((2, 1, 2, 3), (3, 3, 3)), "shared out"), (((3,), (3,)), None),
], ids=str)  # fmt: skip
def test_a_wider_out_of_16_bits_keeps_the_float32_sums(
    comm, here, shapes, left_over, distribution, result, narrow, dtype
):
    here._planner.faster_together = lambda *_: left_over == "split"
    root = comm.size - 1
    a, b = (x.astype(narrow) for x in sums_of_2049(*shapes))
    out = np.zeros(np.matmul(a.astype("f4"), b.astype("f4")).shape, dtype)
    given = (a, b) if distribution == "replicated" or comm.rank == root else (None, None)
    lie = {"distribution": distribution, "result": result, "root": root}
    here.matmul(*given, out=out if result == "replicated" or comm.rank == root else None, **lie)
    got = here.matmul(*given, **lie)
    if result == "replicated" or comm.rank == root:
        assert (out == 2049).all()  # which float16 and bfloat16 round to 2048
        assert (got == 2048).all() and got.dtype == narrow


def test_an_out_of_some_ranks_changes_the_numbers_of_none(comm):
    if comm.size == 1:
        pytest.skip("takes two ranks")
    a, b = (x.astype("f2") for x in sums_of_2049((5, 2, 3), (5, 3, 3)))
    for outs in ("f4", "f2"), ("f4", None):
        dtype = outs[comm.rank > 0]
        out = None if dtype is None else np.zeros((5, 2, 3), dtype)
        got = hybrid_gemm.matmul(a, b, out=out, comm=comm, device="cpu")
        assert (got == 2048).all() and got.dtype == (dtype or "f2")


def test_the_byte_order_of_the_out_of_one_rank_is_its_own(comm):
    """A swapped bfloat16 that is unpickled swaps the dtype that the whole process has."""
    dtype = np.dtype(ml_dtypes.bfloat16)
    a = np.arange(18 * comm.size).reshape(-1, 3, 3).astype("f4") % 7
    x, y = a.astype(dtype), np.eye(3).astype(dtype)[None].repeat(len(a), 0)
    swapped = comm.rank == comm.size - 1
    out = np.zeros(a.shape, dtype.newbyteorder() if swapped else dtype)
    hybrid_gemm.matmul(x, y, out=out, comm=comm, device="cpu")
    assert dtype.isnative
    np.testing.assert_array_equal(out.astype("f4"), a)
