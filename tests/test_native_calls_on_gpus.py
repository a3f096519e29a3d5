"""Calls that one native function finds and starts, on a GPU."""

import threading

import numpy as np
import pytest
from support.arrays import integers
from support.devices import needs

import hybrid_gemm


@needs("cuda")
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "complex64"])
@pytest.mark.parametrize(
    "shapes", [((33, 70), (70, 45)), ((5, 33, 70), (5, 70, 45)), ((70, 70), (70,))]
)
def test_products_of_a_gpu(dtype, shapes, rng):
    import cupy

    for trial in range(8):
        host = [integers(rng, s, "f4").astype(dtype) for s in shapes]
        if dtype == "complex64":
            host = [x + 1j * x[::-1] for x in host]
        a, b = map(cupy.asarray, host)
        expected = np.matmul(*[x.astype("c16") for x in host])
        out = cupy.zeros(expected.shape, dtype)
        cupy.cuda.Device().synchronize()  # another stream would not wait for these
        with cupy.cuda.Stream(non_blocking=True) if trial > 5 else cupy.cuda.Stream.null:
            for made in (hybrid_gemm.matmul(a, b), hybrid_gemm.matmul(a, b, out=out)):
                np.testing.assert_array_equal(made.get(), expected.astype(dtype))
            if a.ndim == b.ndim == 2:
                made = hybrid_gemm.gemm(a, b, out, alpha=2, beta=1, out=out)
                np.testing.assert_array_equal(made.get(), 3 * expected.astype(dtype))


@needs("cuda")
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
@pytest.mark.parametrize(
    "shapes",
    [((1024, 1024), (1024, 1024)), ((16, 256, 256), (16, 256, 256)),
     ((512, 64, 64), (512, 64, 64)), ((8, 100, 77), (8, 77, 33))],
)  # fmt: skip
def test_known_calls_have_the_bits_of_first_ones(dtype, shapes, rng):
    """Also where what cuBLAS launches is recorded, for matrices that lie elsewhere."""
    import cupy

    made = np.dtype(dtype)
    pairs = [
        [cupy.asarray(rng.standard_normal(s).astype("f4").astype(made)) for s in shapes]
        for _ in range(3)
    ]
    first = [
        hybrid_gemm.Runner(device="cuda", gpus=[0]).matmul(a, b).view(np.uint8) for a, b in pairs
    ]
    for _ in range(4):
        for (a, b), expected in zip(pairs, first, strict=True):
            out = cupy.empty_like(expected.view(made))
            assert hybrid_gemm.matmul(a, b, out=out) is out
            assert bool((out.view(np.uint8) == expected).all())
            assert bool((hybrid_gemm.matmul(a, b).view(np.uint8) == expected).all())


@needs("cuda")
def test_a_new_thread_starts_what_another_prepared(rng):
    """Whose context is not the new thread's yet."""
    import cupy

    a, b = (cupy.asarray(integers(rng, (70, 70))) for _ in "ab")
    expected, out, failed = (a @ b).get(), cupy.zeros((70, 70), "f4"), []

    def work():
        try:
            for _ in range(2):
                assert hybrid_gemm.gemm(a, b, out=out) is out
        except BaseException as error:
            failed.append(error)

    for _ in range(4):
        work()
    out.fill(0)
    cupy.cuda.Device().synchronize()
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert not failed
    np.testing.assert_array_equal(out.get(), expected)
