"""The sums of a check by native threads, and by NumPy."""

import time

import ml_dtypes
import numpy as np
import pytest
from support.command import python

from hybrid_gemm.devices import native_passes
from hybrid_gemm.problem import Problem
from hybrid_gemm.verify import complex_parts, elements, floats, sampling
from hybrid_gemm.verify.team import team

DTYPES = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
LAYOUTS = {
    "rows": lambda x: x,
    "columns": np.asfortranarray,
    "steps": lambda x: np.repeat(np.repeat(x, 2, 0), 3, 1)[::2, ::3],
    "backwards": lambda x: x[::-1, ::-1].copy()[::-1, ::-1],
    "unaligned": lambda x: np.frombuffer(b"\0" + x.tobytes(), x.dtype, offset=1).reshape(x.shape),
}


@pytest.fixture(autouse=True)
def _compiled():
    if reason := native_passes.unavailable():
        pytest.skip(reason)


def drawn(rng, shape, dtype):
    made = rng.standard_normal(shape)
    if dtype.startswith("complex"):
        made = made + 1j * rng.standard_normal(shape)
    return made.astype(DTYPES.get(dtype, dtype))


def parts(rng, dtype, shape, layout, *, beta=0.0, alpha=1.0, by_three=False):
    m, n, k = shape
    a, b, before, c = (
        LAYOUTS[layout](drawn(rng, s, dtype)) for s in ((m, k), (k, n), (m, n), (m, n))
    )
    computed = "float32" if dtype in DTYPES else dtype
    problem = Problem(
        m, n, k, computed, alpha=alpha, beta=beta, out_dtype=dtype, operands=dtype
    )  # fmt: skip
    part = sampling.Part(problem, a, b, before if beta else None, c)
    part = complex_parts.real_part(part, by_three) if problem.is_complex else part
    return [part, part.turned()]


def sums(part, native, threads=2):
    """What is summed of the product and of C, and the largest numbers of A and B."""
    samples = sampling.draw(part, np.random.default_rng(1), 16)
    with team(threads, lambda share: None) as workers, np.errstate(all="ignore"):
        check = floats.Floats(part, sampling.ALONE, samples, workers, 1.0, 0.0)
        check.native, check.every_square = native, True
        check._scale(slice(0, part.k))
        of_c = check.rounding.variances(part.problem.k, 64)[1:]
        made = [x for pair in check._summed() for found in pair for x in found]
        for found in check._sums_of_c(of_c):
            made += found[:2]
    return made, check.kind


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "dtype", ["float16", "bfloat16", "float32", "float64", "complex64", "complex128"]
)
def test_native_sums_are_those_of_numpy(dtype, layout, rng):
    """In tiles that are full and that are not, of few rows and of many."""
    for shape, beta in (((70, 33, 210), 0.0), ((300, 130, 1100), 0.5), ((5, 3, 1500), 2.0)):
        for part in parts(rng, dtype, shape, layout, beta=beta):
            (found, kind), (wanted, _kind) = sums(part, True), sums(part, False)
            for own, right in zip(found, wanted, strict=True):
                error = abs(own - right).max() / abs(right).max()
                assert error < (2e-6 if kind == "f4" else 1e-13)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "complex64"])
def test_native_elements_are_those_of_numpy(dtype, rng, monkeypatch):
    """Of more columns than registers hold, and of k that is multiplied in parts."""
    monkeypatch.setattr(elements, "THIN_BYTES", 1 << 18)
    for part in parts(rng, dtype, (150, 90, 1100), "rows"):
        samples = sampling.draw(part, np.random.default_rng(1), 0)
        with team(2, lambda share: None) as workers:
            check = floats.Floats(part, sampling.ALONE, samples, workers, 1.0, 0.0)
            check.native = check.every_square = True
            check._scale(slice(0, part.k))
            rows, cols = np.arange(3, part.m), np.arange(part.n)
            native = check._products_natively(
                part.a, check.row_scale, slice(3, part.m), part.n, check._b
            )
            for own, right in zip(native, check._products(rows, cols), strict=True):
                error = abs(own - right).max() / abs(right).max()
                assert error < (2e-6 if check.kind == "f4" else 1e-13)


@pytest.mark.parametrize("alpha, beta", [(1.0, 0.0), (0.5 - 1j, 1j)])
@pytest.mark.parametrize("by_three", [False, True])
def test_native_sums_of_complex_products(alpha, beta, by_three, rng):
    for part in parts(
        rng, "complex64", (40, 50, 90), "rows", beta=beta, alpha=alpha, by_three=by_three
    ):
        (found, kind), (wanted, _kind) = sums(part, True), sums(part, False)
        for own, right in zip(found, wanted, strict=True):
            assert abs(own - right).max() < (2e-6 if kind == "f4" else 1e-13) * abs(right).max()


def test_threads_change_no_bit(rng):
    (part, _turned) = parts(rng, "float32", (300, 200, 900), "rows", beta=0.5)
    for one, several in zip(sums(part, True, 1)[0], sums(part, True, 5)[0], strict=True):
        assert (one == several).all()


CHECK = """
import numpy as np
import hybrid_gemm.verify as module
from hybrid_gemm.devices import native_passes
from hybrid_gemm.problem import Problem
module.FULL_FLOPS = 0
if {small}: native_passes.WAIT = 0
a = np.ones((64, 64), {dtype!r})
problem = Problem(64, 64, 64, {dtype!r})
print(module.verify(problem, a, a, None, a @ a).how)
"""


@pytest.mark.slow
def test_the_first_check_does_not_wait_for_the_compiler(tmp_path):
    """It says that NumPy sums; and g++ makes the library for the checks to come."""
    environment = {"HYBRID_GEMM_CACHE": str(tmp_path)}
    code = CHECK.format(small=False, dtype="float32")
    done = python("-c", code, env=environment)
    assert "summed by NumPy (native_passes.cpp is not compiled yet)" in done.stdout, done.stderr
    until = time.monotonic() + 120
    while not [*tmp_path.rglob("*.so")] and time.monotonic() < until:
        time.sleep(0.2)
    done = python("-c", code, env=environment)
    assert "random sums" in done.stdout and "NumPy" not in done.stdout, done.stdout


@pytest.mark.slow
def test_a_check_waits_for_the_compiler_where_numpy_would_take_longer(tmp_path):
    code = CHECK.format(small=True, dtype="int32")
    done = python("-c", code, env={"HYBRID_GEMM_CACHE": str(tmp_path)})
    assert "random sums" in done.stdout and "NumPy" not in done.stdout, done.stderr


@pytest.mark.parametrize("dtype", ["float32", "int32"])
def test_without_a_compiler_a_check_says_that_numpy_sums(dtype):
    done = python("-c", CHECK.format(small=False, dtype=dtype), env={"PATH": ""})
    assert "summed by NumPy (g++ is not installed" in done.stdout, done.stderr
