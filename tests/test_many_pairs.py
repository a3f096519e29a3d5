"""`gemm_many`: lists of matrices of any sides."""

import ml_dtypes
import numpy as np
import pytest
from support.arrays import integers
from support.devices import needs

from hybrid_gemm import gemm_many
from hybrid_gemm.errors import UsageError


def test_many_pairs_of_any_sides(device, rng):
    sides = [(3, 4, 5), (1, 1, 1), (64, 3, 17), (3, 4, 5), (0, 2, 3), (2, 2, 0)]
    for dtypes in (("f4", "f4"), ("f4", "f8"), ("c8", "c8")):
        a, b = (
            [integers(rng, shape).astype(dtype) for shape in shapes]
            for shapes, dtype in zip(
                ([(m, k) for m, _n, k in sides], [(k, n) for _m, n, k in sides]), dtypes,
                strict=True,
            )
        )  # fmt: skip
        made = gemm_many(a, b, device=device)
        for x, y, c in zip(a, b, made, strict=True):
            assert c.dtype == np.result_type(x, y)
            np.testing.assert_array_equal(c, x @ y)
    assert gemm_many([], [], device=device) == []


def test_lists_that_do_not_fit_are_refused():
    one = np.ones((2, 2))
    with pytest.raises(UsageError, match="A is a list of 2 and B is a list of 1; each"):
        gemm_many([one, one], [one], device="cpu")
    with pytest.raises(TypeError, match="A is of type NoneType; a list of matrices is needed"):
        gemm_many(None, [one], device="cpu")
    with pytest.raises(TypeError, match="pair 1: B is None"):
        gemm_many(iter([one, one]), [one, None], device="cpu")
    with pytest.raises(UsageError, match=r"pair 1: .* 2 x 2 and B is 3 x 2"):
        gemm_many([one, one], [one, np.ones((3, 2))], device="cpu")
    with pytest.raises(TypeError, match=r"^pair 0: A is None"):
        gemm_many([None], [one], device="cpu")
    with pytest.raises(TypeError, match="threads"):
        gemm_many([one], [one], thread=2)


@needs("cuda")
@pytest.mark.parametrize("dtype", ["complex64", "complex128", "int32"])
def test_many_pairs_of_other_dtypes_on_a_gpu(dtype, rng):
    cp = pytest.importorskip("cupy")
    a = [rng.integers(-2, 3, (n, n + 1)).astype(dtype) for n in (3, 40, 200)]
    b = [x.T * (1j if dtype[0] == "c" else 1) for x in a]
    b = [x.astype(dtype) for x in b]
    for c, x, y in zip(gemm_many(map(cp.asarray, a), map(cp.asarray, b)), a, b, strict=True):
        assert c.dtype == dtype
        np.testing.assert_array_equal(c.get(), x @ y)


@needs("cuda")
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
def test_many_pairs_on_a_gpu(dtype, rng):
    cp = pytest.importorskip("cupy")
    dtype = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.dtype(dtype)
    sides = [(3, 4, 5), (1, 1, 1), (64, 3, 17), (3, 4, 5), (300, 200, 100), (5, 4, 3)]
    a, b = ([rng.integers(-2, 3, s).astype("f4") for s in shapes] for shapes in (
        [(m, k) for m, _n, k in sides], [(n, k) for _m, n, k in sides]))  # fmt: skip
    x = [cp.asarray(z.astype(dtype)) for z in a]
    y = [cp.asarray(z.astype(dtype)).T for z in b]
    for c, left, right in zip(gemm_many(x, y), a, b, strict=True):
        assert c.dtype == dtype
        np.testing.assert_array_equal(c.get().astype("f4"), left @ right.T)
