"""`matmul` of vectors and stacks, and C that broadcasts, as NumPy has them."""

import itertools

import numpy as np
import pytest
from support.arrays import integers

import hybrid_gemm as hg
from hybrid_gemm import Runner, matmul
from hybrid_gemm.errors import DTypeError, UsageError

SHAPES = [
    ((7,), (7,)), ((5, 7), (7,)), ((7,), (7, 3)), ((4, 5, 7), (7,)), ((7,), (4, 7, 3)),
    ((4, 5, 7), (7, 3)), ((5, 7), (4, 7, 3)), ((4, 5, 7), (4, 7, 3)), ((2, 1, 5, 7), (3, 7, 3)),
    ((2, 3, 5, 7), (1, 1, 7, 3)), ((1, 5, 7), (1, 7, 3)), ((0, 5, 7), (7, 3)), ((4, 5, 0), (0, 3)),
    ((4, 0, 7), (7, 3)), ((3, 1, 7), (3, 7, 1)),
]  # fmt: skip


@pytest.mark.parametrize("shapes", SHAPES, ids=str)
def test_shapes_are_numpys(shapes, device, rng):
    a, b = (integers(rng, shape) for shape in shapes)
    expected = np.matmul(a, b)
    got = matmul(a, b, device=device)
    assert np.shape(got) == expected.shape and got.dtype == expected.dtype
    assert isinstance(got, np.ndarray) == isinstance(expected, np.ndarray)
    np.testing.assert_array_equal(got, expected)
    out = np.full(expected.shape, np.nan, "f4")
    given = matmul(a, b, out, device=device)
    assert given is out or (not out.ndim and given == out)
    np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize("dtype", ["float64", "float16", "int32", "int64"])
def test_dtypes_and_layouts(dtype, rng):
    whole = integers(rng, (4, 6, 8, 10)).astype(dtype)
    vector = integers(rng, (8,)).astype(dtype)
    for view in (whole, whole[::2, 1::2], whole[::-1], whole.swapaxes(0, 1), whole.swapaxes(1, 2)):
        for a, b in ((view, view.swapaxes(-1, -2)), (view.swapaxes(-1, -2), view)):
            np.testing.assert_array_equal(matmul(a, b), np.matmul(a, b))
    np.testing.assert_array_equal(matmul(vector, whole), np.matmul(vector, whole))
    assert matmul(vector, vector).dtype == dtype


def test_a_stack_that_lies_as_one_matrix_is_one_product(monkeypatch, rng):
    calls, real = [], Runner._run
    monkeypatch.setattr(
        Runner, "_run", lambda self, *x, **y: calls.append(x) or real(self, *x, **y)
    )
    a, b = integers(rng, (6, 5, 4)), integers(rng, (4, 3))
    np.testing.assert_array_equal(matmul(a, b, threads=2), a @ b)
    assert len(calls) == 1
    np.testing.assert_array_equal(matmul(a[::2], b, threads=2), a[::2] @ b)
    assert len(calls) == 4
    np.testing.assert_array_equal(matmul(a[::2], b, device="cpu"), a[::2] @ b)
    assert len(calls) == 4  # NumPy's own loop


@pytest.mark.parametrize("shapes, message", [
    (((5, 7), (6, 3)), "5 x 7 and B is 6 x 3"), (((7,), (6,)), "1 x 7 and B is 6 x 1"),
    (((2, 5, 7), (3, 7, 3)), r"\(2,\) .* \(3,\)"), (((), (3, 3)), "A is a number"),
])  # fmt: skip
def test_shapes_that_do_not_fit_are_refused(shapes, message):
    with pytest.raises(UsageError, match=message):
        matmul(*(np.ones(shape) for shape in shapes))


def test_outputs_that_do_not_fit_are_refused(rng):
    a, b = integers(rng, (4, 5, 5)), integers(rng, (5, 5))
    with pytest.raises(UsageError, match="overlaps A"):
        matmul(a, b, a)  # also where the products one by one would overlap nothing
    with pytest.raises(UsageError, match="overlaps A"):
        matmul(a[1:], b, a[:-1])
    with pytest.raises(UsageError, match=r"shape \(4, 5\)"):
        matmul(a, b, np.empty((4, 5), "f4"))
    with pytest.raises(DTypeError, match="out must be"):
        matmul(a, b, a.tolist())
    with pytest.raises(DTypeError, match="bool"):
        matmul(a.astype(bool), b)
    with pytest.raises(TypeError, match="threads"):
        matmul(a, b, thread=2)


def test_c_broadcasts_to_the_product(device, rng):
    """A row or a column of bias."""
    a, b = integers(rng, (30, 20)), integers(rng, (20, 50))
    for shape, (alpha, beta) in itertools.product(
        [(50,), (1, 50), (30, 1), (1, 1), (), (30, 50)], [(1, 1), (2, -1), (1, 0), (0, 3)]
    ):
        c = integers(rng, shape)
        before = c.copy()
        for threads in (1, 2):
            got = hg.gemm(a, b, c, alpha=alpha, beta=beta, device=device, threads=threads)
            np.testing.assert_array_equal(got, alpha * (a @ b) + beta * c)
            np.testing.assert_array_equal(c, before)
    with pytest.raises(UsageError, match=r"C has shape \(30,\).* 30 x 50"):
        hg.gemm(a, b, np.ones(30), beta=1, device=device)
