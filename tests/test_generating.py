"""Generated matrices: a part is what it is in the whole, whoever makes it."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.errors import message

from hybrid_gemm.arrays.generator import generate
from hybrid_gemm.errors import UsageError

dtypes = st.sampled_from(["float16", "float32", "float64", "int32", "int64"])
fills = st.sampled_from(["normal", "uniform", "integers"])


@st.composite
def parts(draw):
    rows, cols = draw(st.integers(0, 600)), draw(st.integers(0, 600))
    cut = [sorted(draw(st.tuples(*[st.integers(0, size)] * 2))) for size in (rows, cols)]
    return rows, cols, tuple(cut[0]), tuple(cut[1])


@given(parts(), dtypes, fills, st.integers(0, 2**64 - 1), st.integers(1, 3))
def test_a_part_is_a_slice_of_the_whole(part, dtype, fill, seed, threads):
    rows, cols, (y0, y1), (x0, x1) = part
    given = {"dtype": dtype, "fill": fill, "seed": seed, "operand": "A"}
    whole = generate(rows, cols, **given)
    assert whole.shape == (rows, cols) and whole.dtype == dtype
    found = generate(rows, cols, **given, row_range=(y0, y1), col_range=(x0, x1), threads=threads)
    np.testing.assert_array_equal(found, whole[y0:y1, x0:x1])
    # Also into a view with strides, as a part of a Fortran-ordered array in a file has.
    out = np.zeros((x1 - x0, 2 * (y1 - y0)), dtype).T[::2]
    assert generate(rows, cols, **given, row_range=(y0, y1), col_range=(x0, x1), out=out) is out
    np.testing.assert_array_equal(out, found)


def test_the_stream_is_fixed():
    a = generate(300, 300, "float32", seed=7, operand="A")
    b = generate(300, 300, "float64", seed=7, operand="B", fill="uniform")
    c = generate(300, 300, "int32", seed=7, operand="C")
    corners = np.ix_([0, 299], [0, 255, 256, 299])
    assert a[corners].tolist() == [
        [-0.8158134818077087, -0.6904720664024353, -0.22437234222888947, -1.635481834411621],
        [0.3026554584503174, 0.8225024342536926, -0.13154982030391693, -0.39485859870910645],
    ]
    assert b[corners].tolist() == [
        [0.1888481949367964, 0.24407557696899396, 0.9602860123304677, 0.5794752144591213],
        [0.8383040511921094, 0.2308604025303349, 0.8945726645272384, 0.5237239044691325],
    ]
    assert c[corners].tolist() == [[-2, 3, -1, -4], [0, 2, -4, 4]]


def test_streams_differ():
    made = [
        generate(512, 512, "float32", seed=seed, operand=operand).reshape(2, 256, 2, 256)[i, :, j]
        for seed in (0, 1, 2**64 - 1)
        for operand in "ABC"
        for i in (0, 1)
        for j in (0, 1)
    ]
    assert len({tile.tobytes() for tile in made}) == len(made)


def test_fills_have_their_distributions():
    normal = generate(1000, 1000, "float32", seed=1, operand="A")
    assert abs(normal.mean(dtype=float)) < 0.005 and abs(normal.std(dtype=float) - 1) < 0.005
    uniform = generate(1000, 1000, "float64", seed=1, operand="A", fill="uniform")
    assert 0 <= uniform.min() < 1e-4 and 0.9999 < uniform.max() < 1
    assert abs(uniform.mean() - 0.5) < 0.005
    integers = generate(1000, 1000, "float16", seed=1, operand="A", fill="integers")
    values, counts = np.unique(integers, return_counts=True)
    assert list(values) == list(range(-4, 5)) and counts.min() > 100_000
    np.testing.assert_array_equal(integers, generate(1000, 1000, "int64", seed=1, operand="A"))


def test_float32_products_of_integers_are_exact_at_the_bound():
    k = 2**20
    a = np.full((1, k), 4, np.float32)
    assert (a @ a.T)[0, 0] == 16 * k == 2**24
    a = generate(3, 100_000, "float32", seed=1, operand="A", fill="integers")
    b = generate(100_000, 5, "float32", seed=1, operand="B", fill="integers")
    np.testing.assert_array_equal(a @ b, a.astype(np.int64) @ b.astype(np.int64))


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"rows": -1}, "-1 x 4"),
        ({"dtype": "uint8"}, "float32"),
        ({"seed": -1}, "2^64"),
        ({"operand": "D"}, "A, B and C"),
        ({"fill": "zeros"}, "uniform"),
        ({"threads": 0}, "at least 1"),
        ({"row_range": (1, 5)}, "within 0 to 4"),
        ({"col_range": (3, 2)}, "columns 3 to 2"),
        ({"out": np.empty((4, 5), np.float32)}, "(4, 5)"),
        ({"out": np.empty((4, 4))}, "float64"),
    ],
)
def test_bad_requests_are_refused(wrong, words):
    request = {"rows": 4, "cols": 4, "dtype": "float32", "seed": 0, "operand": "A"}
    with pytest.raises(UsageError) as error:
        generate(**{**request, **wrong})
    message(error, words)
