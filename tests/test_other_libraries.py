"""Arrays of PyTorch, JAX, Numba and of anything with DLPack: what comes back, and where."""

import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest
from support.arrays import Other, integers
from support.devices import needs

from hybrid_gemm import Runner, gemm, matmul
from hybrid_gemm.arrays.guests import Guests
from hybrid_gemm.arrays.other_libraries import library_of
from hybrid_gemm.errors import UsageError

on_cuda = needs("cuda")
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


@pytest.fixture
def jax():
    return pytest.importorskip("jax")


def test_anything_with_dlpack_comes_back_as_it_is(rng):
    a, b = integers(rng, (5, 7)), integers(rng, (7, 3))
    for pair in (Other(a), Other(b)), (Other(a), b), (a, Other(b)):
        got = gemm(*pair, device="cpu")
        assert type(got) is Other
        np.testing.assert_array_equal(got.array, a @ b)
    out = np.empty((5, 3), "f4")
    assert gemm(Other(a), Other(b), out=out, device="cpu") is out
    np.testing.assert_array_equal(out, a @ b)
    stack = integers(rng, (2, 5, 7))
    np.testing.assert_array_equal(matmul(Other(stack), Other(b), device="cpu").array, stack @ b)
    assert type(Runner(device="cpu").run(Other(a), Other(b)).c) is Other


def test_what_has_names_and_says_how_an_array_is_made_of_it_is_one():
    class Table(dict):
        def __array__(self, dtype=None, copy=None):
            return np.stack([*self.values()], 1)

    table, b = Table(x=np.arange(4.0), y=np.ones(4)), np.arange(6.0).reshape(2, 3)
    np.testing.assert_array_equal(gemm(table, b, device="cpu"), np.asarray(table) @ b)


def test_an_out_of_which_numpy_gets_copies_is_written_by_dlpack_or_refused(rng, device):
    class Copied(Other):
        def __array__(self, dtype=None, copy=None):
            return self.array.copy()

    class NeverShown(Copied):
        def __dlpack__(self, **_options):
            raise BufferError("this one lends no memory")

    a, b = integers(rng, (5, 7)), integers(rng, (7, 3))
    for multiply in gemm, matmul:
        out = Copied(np.zeros((5, 3), "f4"))
        assert multiply(a, b, out=out, device=device) is out
        np.testing.assert_array_equal(out.array, a @ b)
    assert gemm(a, b, out, beta=1, out=out, device=device) is out
    np.testing.assert_array_equal(out.array, 2 * (a @ b))
    with pytest.raises(UsageError, match="out is a NeverShown, of which NumPy gets only copies"):
        gemm(a, b, out=NeverShown(np.zeros((5, 3), "f4")), device=device)


def test_numpys_arrays_and_lists_are_of_no_other_library():
    class Mine(np.ndarray):
        pass

    for x in (np.ones(3), [[1.0]], 3, "text", None):
        assert library_of(x) is None
    for x in (np.ones(3).view(Mine), np.ma.ones(3)):
        assert type(library_of(x).view(x, "A")) is np.ndarray
    assert Guests.of(np.ones((2, 2)), [[1.0]]) is None
    assert type(gemm([[1.0]], [[2.0]], device="cpu")) is np.ndarray


def test_arrays_of_ctypes_are_read():
    a = np.arange(6, dtype="f4").reshape(2, 3)
    made = gemm(np.ctypeslib.as_ctypes(a), np.eye(3, dtype="f4"), device="cpu")
    np.testing.assert_array_equal(made, a)


@pytest.mark.parametrize("module", ["torch", "jax", "cupy", "numba"])
def test_no_other_library_is_imported(module):
    program = (
        "import sys, numpy as np, hybrid_gemm; hybrid_gemm.gemm(np.ones((2, 2)), np.ones((2, 2)), "
        f"device='cpu'); sys.exit({module!r} in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "int32"])
def test_jaxs_arrays_give_one(jax, dtype, rng, device):
    a, b = integers(rng, (5, 7)), integers(rng, (7, 3))
    with jax.default_device(jax.devices("cpu")[0]):
        x, y = (jax.numpy.asarray(v, dtype) for v in (a, b))
        got = gemm(x, y, device=device)
        assert isinstance(got, jax.Array) and got.dtype == x.dtype and got.devices() == x.devices()
        np.testing.assert_array_equal(np.asarray(got), (a @ b).astype(got.dtype))
        assert isinstance(gemm(a, y, device=device), jax.Array)
        assert isinstance(matmul(x, y[:, 0], device=device), jax.Array)
        out = np.empty((5, 3), got.dtype)
        assert gemm(x, y, out=out, device=device) is out
    with pytest.raises(UsageError, match="out is a JAX array, and those are never written"):
        gemm(x, y, out=got, device=device)


def test_products_of_traced_values_fail_by_jaxs_own_error(jax):
    with pytest.raises(jax.errors.TracerArrayConversionError):
        jax.jit(lambda x: gemm(x, x, device="cpu"))(np.ones((3, 3), "f4"))


@on_cuda
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_jaxs_arrays_on_a_gpu(jax, dtype, rng):
    try:
        place = jax.devices("cuda")[0]
    except RuntimeError:
        pytest.skip("this JAX has no CUDA")
    a, b = integers(rng, (70, 90)), integers(rng, (90, 50))
    x, y = (jax.device_put(jax.numpy.asarray(v, dtype), place) for v in (a, b))
    for _ in range(3):
        got = gemm(jax.numpy.negative(x), y)  # which may still be at work
        assert isinstance(got, jax.Array) and got.dtype == x.dtype and got.devices() == {place}
        np.testing.assert_array_equal(np.asarray(got + 0), -(a @ b).astype(got.dtype))


@on_cuda
def test_numbas_arrays_give_one(rng):
    cuda = pytest.importorskip("numba.cuda")
    a, b = integers(rng, (70, 90)), integers(rng, (90, 50))
    x, y, out = (cuda.to_device(v) for v in (a, b, np.zeros((70, 50), "f4")))
    got = gemm(x, y)
    assert cuda.is_cuda_array(got) and type(got) is type(x)
    np.testing.assert_array_equal(got.copy_to_host(), a @ b)
    assert gemm(x, y, out=out) is out
    np.testing.assert_array_equal(out.copy_to_host(), a @ b)
