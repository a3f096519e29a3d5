"""NumPy's subclasses, whose operators may do other things than an array's; and what else callers
found: who holds a product, and when one may be made."""

import gc
import tracemalloc
import weakref

import numpy as np
import pytest
from support.arrays import Other
from support.command import python
from support.devices import on

import hybrid_gemm as hg

pytestmark = pytest.mark.blas

A = np.arange(1, 10.0).reshape(3, 3)
WAYS = [
    {}, {"threads": 2, "split": "cols"}, {"threads": 2, "split": "cols", "reduce": "critical"},
    {"algorithm": "strassen"}, {"checked": True},
]  # fmt: skip
MASKED = "ignore:.*masked array:UserWarning"


class Odd(np.ndarray):
    """Multiplies and adds in ways of its own."""

    def __mul__(self, other):
        raise AssertionError("not an array's *")

    __imul__ = __iadd__ = __add__ = __setitem__ = __mul__


def masked(x, **options):
    return np.ma.array(x.copy(), mask=A > 5, **options)


KINDS = [masked, np.matrix, lambda x: x.copy().view(Odd), lambda x: masked(x, hard_mask=True)]


@pytest.mark.filterwarnings(MASKED)
@pytest.mark.parametrize("kind", KINDS, ids=["masked", "matrix", "odd", "hard mask"])
@pytest.mark.parametrize("ways", WAYS, ids=str)
@pytest.mark.parametrize("dtype", ["float64", "int32", "complex128"])
def test_elements_are_multiplied_as_those_of_an_array(device, kind, ways, dtype):
    if device != "cpu" and ways:
        pytest.skip("one way of each device")
    if dtype != "float64" and (ways.get("algorithm") or ways.get("reduce")):
        pytest.skip("floating point alone")
    x = A.astype(dtype)
    options = {"device": device, **ways}
    made = hg.gemm(kind(x), x, **options)
    assert type(made) is np.ndarray
    np.testing.assert_array_equal(made, x @ x)
    c = kind(x)
    assert hg.gemm(x, kind(x), c, beta=1, out=c, **options) is c
    np.testing.assert_array_equal(np.asarray(c), x @ x + x)
    out = kind(np.zeros_like(x))
    assert hg.gemm(x, x, kind(x), beta=2, out=out, **options) is out
    np.testing.assert_array_equal(np.asarray(out), x @ x + 2 * x)
    assert hg.matmul(x, x, out=out, **options) is out
    np.testing.assert_array_equal(np.asarray(out), x @ x)
    (pair,) = hg.gemm_many([kind(x)], [x], **options)
    np.testing.assert_array_equal(pair, x @ x)


def test_maps_of_files_are_arrays(tmp_path, no_plans):
    there = np.memmap(tmp_path / "a", dtype="float64", mode="w+", shape=(3, 3))
    runner = hg.Runner(device="cpu")
    assert runner.gemm(A, A, out=there) is there
    np.testing.assert_array_equal(there, A @ A)
    for got in (runner.gemm(there.T, A), runner.matmul(there.T, A)):
        assert type(got) is np.ndarray
        np.testing.assert_array_equal(got, (A @ A).T @ A)


def test_a_number_of_two_vectors_goes_to_out(device):
    v, out = np.arange(3.0), np.zeros(())
    assert hg.matmul(v, v, out=out, device=device) is out and out == 5
    with hg.Runner(device=device) as runner:
        assert runner.matmul(v, v, out=out) is out
        assert type(runner.matmul(v, v)) is np.float64


def test_a_closed_runner_has_no_matmul_either(device):
    runner = hg.Runner(device=device)
    runner.close()
    with pytest.raises(hg.errors.UsageError, match="closed"):
        runner.matmul(A, A)


def test_a_product_is_gone_when_nobody_has_it(device):
    a, there = np.ones((6, 6), np.float32), []
    hg.gemm(a, a, device=device)
    gc.collect()
    gc.disable()
    try:
        for _ in range(5):
            made = hg.gemm(a, a, device=device)
            there.append(weakref.ref(made))
            del made
        assert not any(x() is not None for x in there)
    finally:
        gc.enable()


@pytest.mark.parametrize("ways", WAYS, ids=str)
def test_what_failed_holds_no_memory_once_its_error_is_gone(device, ways):
    def fails(_flops):
        raise KeyError("mine")

    a = np.ones((300, 300), "f4")

    def product():
        with pytest.raises(KeyError, match="mine"):
            runner.run(a, a, progress=fails)

    with hg.Runner(device=device, **ways) as runner:
        for _ in range(3):  # what it keeps for later calls
            product()
        gc.collect()
        gc.disable()
        tracemalloc.start()
        try:
            product()
            assert tracemalloc.get_traced_memory()[0] < a.nbytes
        finally:
            tracemalloc.stop()
            gc.enable()


@pytest.mark.parametrize(
    ("says", "dtype", "options"),
    [
        ("does not run on the cpu device", "float32", {"device": "cpu"}),
        ("has no int64 form", "int64", {"device": "emulator"}),
    ],
)
def test_a_plan_is_refused_where_its_product_is(says, dtype, options):
    a = np.ones((8, 8), dtype)
    with pytest.raises(ValueError, match=f"kernel tuned {says}") as refused:
        hg.gemm(a, a, kernel="tuned", **options)
    with pytest.raises(ValueError, match=f"^{refused.value}$"):
        hg.plan(8, 8, 8, dtype=dtype, kernel="tuned", **options)


def test_plans_of_any_sides():
    most = 2**31 - 1
    assert hg.plan(most, most, 1, device="cpu").problem.m == most
    assert hg.plan(most, 1, 2**30, dtype="float64", device="cpu").problem.k == 2**30


@pytest.mark.parametrize("device", [on("cpu"), on("emulator")])
def test_the_first_product_may_be_made_once_the_main_thread_has_ended(device, tmp_path):
    """Python then starts no threads in a pool; kernels were to be compiled by one."""
    text = f"""
import threading, time
import numpy as np
import hybrid_gemm as hg
def work():
    threading.main_thread().join()
    time.sleep(0.1)
    print(hg.gemm(np.ones((3, 3)), np.ones((3, 3)), device="{device}").sum())
threading.Thread(target=work).start()
"""
    done = python("-c", text, env={"HYBRID_GEMM_CACHE": str(tmp_path / "cache")})
    assert done.stdout.strip() == "27.0"


@pytest.mark.parametrize("kind", [np.matrix, np.ma.array, lambda x: x.view(Odd)])
def test_beside_another_librarys_array_they_are_numpys(kind):
    a, b = kind(A.copy()), Other(A)
    with hg.Runner(device="cpu") as runner:
        made = [hg.gemm(a, b, device="cpu"), runner.gemm(a, b)]
        made += [hg.matmul(a, b, device="cpu"), runner.matmul(a, b), runner.run(a, b).c]
    for c in made:
        assert type(c) is Other
        np.testing.assert_array_equal(c.array, A @ A)
    out = kind(A.copy())
    assert hg.gemm(b, a, out=out, device="cpu") is out
    np.testing.assert_array_equal(np.asarray(out), A @ A)


@pytest.mark.parametrize(
    ("product", "narrow"),
    [("complex64", "bfloat16"), ("complex128", "float8_e4m3fn"), ("float32", "int4"),
     ("bfloat16", "uint2"), ("int8", "uint4")],
)  # fmt: skip
def test_no_part_of_a_number_is_lost_in_dtypes_of_ml_dtypes(product, narrow, device):
    """NumPy casts complex numbers and fractions to them."""
    a, out = A.astype(product), np.zeros((3, 3), narrow)
    with pytest.raises(TypeError, match=rf"out has dtype {narrow}; .* does not cast to it"):
        hg.gemm(a, a, out=out, device=device)
    with pytest.raises(TypeError, match="does not cast to it"):
        hg.matmul(a[None], a[None], out=out[None], device=device)
    one = np.eye(3, dtype="uint8" if narrow.startswith("u") else "int8")
    assert (hg.gemm(one, one, out=out, device=device) == one.astype(narrow)).all()
