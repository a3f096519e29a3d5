"""Checked products: what is damaged between a product and its check is found and made again, to
the bits of an undamaged run; right products raise no alarm."""

import math
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from support.checked_products import SPOT, K, M, N, flip, matrices, plant, put, run
from support.devices import needs

import hybrid_gemm as hg
from hybrid_gemm.errors import OptionTypeError, UsageError, VerificationError
from hybrid_gemm.execution.checked_work import CheckedWork
from hybrid_gemm.execution.checks import (
    MOST_FAULTS,
    Checks,
    Fault,
    FloatBounds,
    IntegerBounds,
    total,
)
from hybrid_gemm.planning.plan import CHECKING_BYTES
from hybrid_gemm.problem import Problem

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"
WARP = slice(70, 71), slice(64, 96)  # 32 neighbours of a row
PATCH = slice(64, 72), slice(88, 92)  # what a warp has of a tile
TILE = slice(64, 128), slice(64, 128)
FAULTS = {
    "sign": flip(0, *SPOT),
    "exponent": flip(2, *SPOT),
    "low exponent": flip(8, *SPOT),
    "mantissa": flip(9, *SPOT),
    "warp": flip(8, *WARP),
    "patch": flip(3, *PATCH),
    "zeros": put(0, *TILE),
    "nan": put(np.nan, *SPOT),
    "inf": put(np.inf, *SPOT),
}


@pytest.mark.parametrize("options", [
    {}, {"threads": 2, "split": "rows"}, {"threads": 3, "split": "cols"},
], ids=["alone", "rows", "cols"])  # fmt: skip
@pytest.mark.parametrize("beta", [0, 3])
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "int32", "int64"])
def test_checked_products_have_the_same_bits_and_no_alarm(device, rng, dtype, beta, options):
    arrays = matrices(rng, dtype)
    plain = run(device, arrays, checked=False, alpha=2, beta=beta, **options)
    done = run(device, arrays, alpha=2, beta=beta, **options)
    assert done.c.tobytes() == plain.c.tobytes()
    assert plain.checks is None
    workers = len(done.plan.workers)
    assert done.checks.products >= workers and (done.checks.copies or device == "cpu")
    assert bool(done.checks.sums) == done.plan.summed
    assert (done.checks.repeated, done.checks.confirmed, done.checks.faults) == (0, 0, ())


@pytest.mark.parametrize("dtype", ["float32", "int32", "int64"])
def test_a_long_k_whose_sums_come_in_shares_raises_no_alarm(device, rng, dtype):
    arrays = [(9 * rng.standard_normal(s)).astype(dtype) for s in ((9, 1500), (1500, 7), (9, 7))]
    done = run(device, arrays, alpha=2, beta=3)
    assert done.checks.products and (done.checks.confirmed, done.checks.faults) == (0, ())


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("beta", [0, 3])
def test_a_damaged_product_is_made_again(device, rng, monkeypatch, fault, beta):
    arrays = matrices(rng)
    right = run(device, arrays, alpha=2, beta=beta)
    plant(monkeypatch, {("product", 0): FAULTS[fault]})
    done = run(device, arrays, alpha=2, beta=beta)
    assert done.c.tobytes() == right.c.tobytes()
    assert done.checks.repeated == 1 and done.checks.confirmed == 0
    (found,) = done.checks.faults
    assert found.what == "product" and found.device in str(found)
    assert found.rows[0] <= 70 < found.rows[1]
    assert found.cols[0] < 128 and found.cols[1] > 64
    assert not found.magnitude <= found.limit or np.isinf(found.magnitude)


@pytest.mark.parametrize("dtype", ["int32", "int64"])
@pytest.mark.parametrize("bit", [0, 31])
def test_integers_are_checked_exactly(device, rng, monkeypatch, dtype, bit):
    arrays = matrices(rng, dtype)
    right = run(device, arrays, alpha=3, beta=2)
    plant(monkeypatch, {("product", 0): flip(bit, *SPOT)})
    done = run(device, arrays, alpha=3, beta=2)
    assert done.c.tobytes() == right.c.tobytes() and done.checks.repeated == 1


@pytest.mark.parametrize("dtype", ["float32", "int32", "int64"])
@pytest.mark.parametrize("beta", [0, 2])
def test_the_device_judges_what_its_kernels_sum_up(kernel_device, rng, monkeypatch, dtype, beta):
    for bounds in FloatBounds, IntegerBounds:
        monkeypatch.setattr(bounds, "judge", lambda *_: pytest.fail("the host judged"))
    done = run(kernel_device, matrices(rng, dtype), alpha=2, beta=beta, threads=2, split="cols")
    assert done.checks.products >= 2 and not done.checks.confirmed


@pytest.mark.parametrize("where", ["product", "sum", "copy"])
def test_each_partial_sum_and_copy_of_several_devices(kernel_device, rng, monkeypatch, where):
    arrays = matrices(rng)
    options = {"threads": 2, "split": "cols", "emulate_devices": 2, "alpha": 2}
    right = run(kernel_device, arrays, **options)
    count = getattr(right.checks, {"copy": "copies"}.get(where, where + "s")) // 2
    assert count
    for number in range(count):
        with monkeypatch.context() as patch:
            plant(patch, {(where, number): flip(3, slice(5, 6), slice(7, 8))})
            done = run(kernel_device, arrays, **options)
        assert done.c.tobytes() == right.c.tobytes()
        assert done.checks.repeated == 2 and len(done.checks.faults) == 2
        for fault in done.checks.faults:
            assert fault.what == where
            assert fault.rows[0] <= 5 < fault.rows[1] and fault.cols[0] <= 7 < fault.cols[1]


def test_blocks_that_go_from_device_to_device(kernel_device, rng, monkeypatch):
    arrays = matrices(rng)
    options = {"threads": 2, "split": "rows", "emulate_devices": 2}
    right = run(kernel_device, arrays, **options)
    assert any(x.phase == "relay" for x in right.timeline)
    for number in range(3):
        with monkeypatch.context() as patch:
            plant(patch, {("copy", number): flip(31, slice(1, 2), slice(2, 3))})
            done = run(kernel_device, arrays, **options)
        assert done.c.tobytes() == right.c.tobytes() and done.checks.repeated


@pytest.mark.parametrize("where", ["product", "sum", "copy"])
def test_wrong_again_is_an_error_that_names_the_place(device, rng, monkeypatch, where):
    if (device, where) == ("cpu", "copy"):
        pytest.skip("the cpu device multiplies in place")
    plant(monkeypatch, {(where, None): flip(2)})
    options = {"threads": 2, "split": "cols"} if where == "sum" else {}
    match = rf"{where} on {device}.*rows .* columns"
    with pytest.raises(VerificationError, match=match):
        run(device, matrices(rng), **options)


def test_a_device_that_is_wrong_in_another_place_each_time(device, rng, monkeypatch):
    places = iter(range(99))

    def fault(made):
        row = next(places)
        flip(1, slice(row, row + 1))(made)

    plant(monkeypatch, {("product", None): fault})
    with pytest.raises(VerificationError, match="product on"):
        run(device, matrices(rng))


def test_within_the_worst_case_only_the_same_bits_are_right(device, rng, monkeypatch):
    arrays = matrices(rng)
    plant(monkeypatch, {("product", 0): flip(1, *SPOT)})
    (found,) = run(device, arrays).checks.faults  # whose limit is the worst case
    turns = iter(range(99))

    def fault(made):
        made[SPOT] += 0.4 * found.limit * (1 + next(turns) / 20)

    monkeypatch.undo()
    plant(monkeypatch, {("product", None): fault})
    with pytest.raises(VerificationError, match="product on"):
        run(device, arrays)
    assert next(turns) == 3


def test_what_the_judge_on_the_device_alone_finds_wrong_is_counted(device, rng, monkeypatch):
    """It rounds otherwise than the one on the host, which finds nothing just within a bound."""
    arrays = matrices(rng)
    right = run(device, arrays)
    plant(monkeypatch, {("product", 0): flip(31, *SPOT)})
    monkeypatch.setattr(CheckedWork, "suspicious", lambda *_: True)
    done = run(device, arrays)
    assert done.c.tobytes() == right.c.tobytes()
    assert (done.checks.repeated, done.checks.confirmed) == (1, 0)
    (found,) = done.checks.faults
    assert found.rows[0] <= SPOT[0].start < found.rows[1] and found.magnitude <= found.limit


def test_a_copy_of_c_that_is_damaged_too_is_an_error(rng, monkeypatch):
    # The first copy is that of C to where the result is made.
    plant(monkeypatch, {("product", 0): FAULTS["zeros"], ("copy", 1): flip(2, *SPOT)})
    with pytest.raises(VerificationError, match=r"the copy of C .* is damaged, too"):
        run("cpu", matrices(rng), beta=3)


def test_inf_and_nan_of_the_data_are_confirmed(device, rng, monkeypatch):
    arrays = matrices(rng)
    arrays[0][3, 4], arrays[0][8, 1], arrays[1][7, 9] = np.inf, np.nan, -np.inf
    right = run(device, arrays, checked=False)
    done = run(device, arrays)
    assert np.array_equal(done.c, right.c, equal_nan=True)
    assert done.checks.repeated == 0 and done.checks.confirmed == 1
    arrays[2][5, 6] = np.nan
    right = run(device, arrays, checked=False, beta=2)
    plant(monkeypatch, {("product", 0): flip(3, slice(20, 21), slice(9, 11))})
    done = run(device, arrays, beta=2)
    assert np.array_equal(done.c, right.c, equal_nan=True) and done.checks.repeated == 1
    assert [x.rows for x in done.checks.faults] == [(20, 21)]  # where it came out otherwise


SMALL_ALPHA = {"alpha": 1e-30, "threads": 2}


@pytest.mark.parametrize("dtype, large, options", [
    ("float32", 1e30, {}), ("float16", 300, {}),
    *(("float32", 3e18, {**SMALL_ALPHA, "split": split}) for split in ("rows", "cols")),
])  # fmt: skip
def test_products_that_overflow_are_confirmed(device, dtype, large, options):
    """Also where C would be finite, and the sum that alpha scales is not."""
    a = np.full((40, 40), large, dtype)
    done = run(device, (a, a, None), **options)
    cast = device == "cpu" and dtype == "float16"  # after it was checked, in float32
    assert np.isinf(done.c).all() and bool(done.checks.confirmed) != cast


def test_sums_that_cancel_more_than_is_assumed_are_confirmed(device):
    half = np.full((M, 4000), 3.7, np.float32)
    a, b = np.hstack([half, -half]), np.full((8000, N), 1.3, np.float32)
    done = run(device, (a, b, None))
    assert done.checks.repeated == 0


def tall(rng, kind, shape):
    x = rng.standard_normal(shape)
    match kind:
        case "lognormal":
            return np.exp(3 * x)
        case "one-signed":
            return np.abs(x)
        case "sparse":
            return x * (rng.random(shape) < 0.02)
        case "huge":
            return x * 1e18
        case "tiny":
            return x * 1e-18
        case "rows of all sizes":
            return x * 10.0 ** rng.integers(-15, 16, (shape[0], 1))
        case "integers":
            return np.rint(x * 3)
    return x


KINDS = ["normal", "lognormal", "one-signed", "sparse", "huge", "tiny", "rows of all sizes",
         "integers"]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_no_kind_of_data_alarms(device, rng, dtype, kind):
    with hg.Runner(device=device, checked=True) as runner:
        for shape in ((33, 500, 47), (200, 64, 129), (1, 300, 1), (64, 3, 64)):
            a, b = (tall(rng, kind, s).astype(dtype) for s in (shape[:2], shape[1:]))
            checks = runner.run(a, b).checks
            assert (checks.repeated, checks.confirmed) == (0, 0)


def test_cancelling_data_do_not_alarm(device, rng):
    x, y = rng.standard_normal((60, 300)), rng.standard_normal((300, 70))
    a, b = np.hstack([x, -x]).astype("f4"), np.vstack([y, y]).astype("f4")
    checks = run(device, (a, b, None)).checks
    assert (checks.repeated, checks.confirmed) == (0, 0)


@pytest.mark.parametrize("shape", [(0, 5, 4), (5, 0, 4), (5, 4, 0), (1, 1, 1)])
def test_empty_and_single(device, shape):
    m, k, n = shape
    done = run(device, (np.ones((m, k)), np.ones((k, n)), None))
    assert (done.c == k).all() and done.c.shape == (m, n)


def test_out_of_another_dtype_and_order(device, rng):
    a, b = map(np.rint, matrices(rng, "float16")[:2])  # whose sums are exact in any order
    for out in (np.empty((M, N), "float64"), np.empty((N, M), "float32").T):
        plain = hg.gemm(a, b, out=out, device=device).copy()
        assert (hg.gemm(a, b, out=out, device=device, checked=True) == plain).all()


def test_turns_in_little_memory(kernel_device, rng, monkeypatch):
    a, b, c = (rng.standard_normal((700, 700)).astype("f4") for _ in range(3))
    options = {"max_device_memory": 6 << 20, "threads": 1}
    right = run(kernel_device, (a, b, c), checked=True, beta=1, **options)
    assert right.plan.turns_in_memory and right.checks.products > 1
    plant(monkeypatch, {("product", right.checks.products - 1): flip(2)})
    done = run(kernel_device, (a, b, c), beta=1, **options)
    assert done.c.tobytes() == right.c.tobytes() and done.checks.repeated == 1


def test_tensor_cores_of_the_emulator(rng, monkeypatch):
    a, b, _c = matrices(rng)
    for compute, dtype in (("fp32x3", "f4"), ("tf32", "f4"), ("fp32", "f2")):
        arrays = a.astype(dtype), b.astype(dtype), None
        options = {"kernel": "mma", "compute": compute}
        right = run("emulator", arrays, **options)
        assert (right.checks.repeated, right.checks.confirmed) == (0, 0)
        with monkeypatch.context() as patch:
            plant(patch, {("product", 0): flip(2, *SPOT)})
            done = run("emulator", arrays, **options)
        assert done.c.tobytes() == right.c.tobytes() and done.checks.repeated == 1


@pytest.mark.parametrize("scale", [2.0**-45, 2.0**45])
@pytest.mark.parametrize("compute, dtype", [("tf32", "float32"), ("fp32", "bfloat16")])
def test_squares_beyond_the_range_of_float32(rng, monkeypatch, compute, dtype, scale):
    of = np.dtype(getattr(ml_dtypes, dtype, dtype))
    a, b, _c = ((scale * x).astype(of) for x in matrices(rng))
    options = {"kernel": "mma", "compute": compute}
    right = run("emulator", (a, b, None), **options)
    assert (right.checks.repeated, right.checks.confirmed) == (0, 0)
    plant(monkeypatch, {("product", 0): put(4 * scale**2 * K, *SPOT)})
    done = run("emulator", (a, b, None), **options)
    assert done.c.tobytes() == right.c.tobytes()
    assert (done.checks.repeated, done.checks.confirmed) == (1, 0)


@needs("cuda")
@pytest.mark.parametrize("beta", [0, 3])
def test_arrays_on_a_gpu_are_checked_without_a_plan(rng, monkeypatch, beta):
    import cupy

    from hybrid_gemm.devices.cuda.device import CudaDevice

    a, b, c = map(cupy.asarray, matrices(rng))
    given = (a, b, c if beta else None)
    right = hg.gemm(*given, alpha=2, beta=beta, gpus=0)
    faults, real = [flip(2, *SPOT)], CudaDevice.bind

    def bind(self, *args, **keywords):
        make = real(self, *args, **keywords)

        def call(a, b, c, stream):
            make(a, b, c, stream)
            if faults:
                faults.pop()(c)

        return call

    with hg.Runner(device="cuda", gpus=0, checked=True) as runner:
        assert (runner.gemm(*given, alpha=2, beta=beta) == right).all()
        assert runner.devices[0].tally.products == 1
        assert runner.run(*given, alpha=2, beta=beta).checks.products == 1
    monkeypatch.setattr(CudaDevice, "bind", bind)
    with hg.Runner(device="cuda", gpus=0, checked=True) as runner:
        assert (runner.gemm(*given, alpha=2, beta=beta) == right).all()
        assert not faults and runner.devices[0].tally.repeated == 1


def test_what_cannot_be_checked_is_refused():
    with pytest.raises(UsageError, match="Strassen's algorithm adds"):
        hg.Runner(device="cpu", checked=True, algorithm="strassen")
    with pytest.raises(UsageError, match="the ordered one works"):
        hg.Runner(device="cpu", checked=True, reduce="critical", split="cols", threads=2)
    with pytest.raises(OptionTypeError, match="True or False"):
        hg.Runner(device="cpu", checked="yes")


def test_a_run_lists_its_own_faults_and_not_those_of_runs_before(monkeypatch, rng):
    a, b, _c = matrices(rng)
    plant(monkeypatch, {})
    options = {"emulate_devices": 2, "threads": 2, "split": "rows", "checked": True}
    with hg.Runner(device="emulator", **options) as runner:
        for number in 1, 0:
            device = runner.devices[number].device
            device.faults = {("product", device.done["product"]): flip(0)}
            checks = runner.run(a, b).checks
            assert checks.repeated == 1
            assert [fault.device for fault in checks.faults] == [device.name]


def test_a_run_lists_its_faults_after_many(device, monkeypatch, rng):
    a, b, _c = matrices(rng)
    plant(monkeypatch, {("product", 0): flip(0)})
    with hg.Runner(device=device, checked=True) as runner:
        for _ in range(2 * MOST_FAULTS):
            old = Fault("gpu", "copy", (0, 1), (0, 1), 0.0, 0.0)
            runner.devices[0].count(Checks(faults=(old,)))
        (found,) = runner.run(a, b).checks.faults
        assert found.what == "product"
        assert len(runner.devices[0].tally.faults) == MOST_FAULTS  # it keeps no more


def test_checks_add_up_and_say_so():
    one, again = (
        Checks(products=2, repeated=1, faults=(Fault("gpu", "copy", (0, 1), (0, 1), 0.0, 0.0),))
        for _ in "12"
    )  # fmt: skip
    assert (one + again).products == 4 and (one + again).since(one) == again
    assert (one + again).since(Checks()) == one + again
    many = total([one] * 2 * MOST_FAULTS)
    assert many.repeated == 2 * MOST_FAULTS and many.faults == one.faults * MOST_FAULTS
    assert "2 products, 0 sums, 0 copies checked, 1 wrong and made again" in str(one)


@pytest.mark.parametrize("count", [8, pytest.param(100, marks=pytest.mark.campaign)])
def test_a_small_campaign(count):
    arguments = ["--device", "cpu", "--count", str(count), "--clean", str(count), "--seed", "1"]
    command = [sys.executable, "-W", "ignore", str(SCRIPTS / "checked-campaign"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"'planted': {count}" in done.stdout and "'repeated': 0" in done.stdout


def test_plans_count_the_memory_of_checks():
    sizes = {}
    for beta in (0, 1):
        problem = Problem(512, 512, 512, beta=beta)
        for checked in (False, True):
            with hg.Runner(device="emulator", checked=checked) as runner:
                sizes[beta, checked] = runner.plan(problem).memory_bytes(0)
    assert sizes[0, True] == sizes[0, False] + CHECKING_BYTES * (512 + 512)
    assert sizes[1, True] == sizes[1, False] + CHECKING_BYTES * (512 + 512) + 4 * 512 * 512


@pytest.mark.parametrize("dtype", ["float32", "float64", "complex128"])
@pytest.mark.parametrize(
    "alpha, beta",
    [(math.inf, 0), (math.nan, 1), (1e200, 0), (1, 1e300), (1, math.inf), (1e-200, 1)],
)
@pytest.mark.parametrize("choices", [{"threads": 1}, {"threads": 2, "split": "cols"}], ids=str)
def test_factors_of_any_size_raise_no_alarm(dtype, alpha, beta, choices, rng):
    """Also where their squares overflow, and where a group of columns is empty."""
    if dtype == "float32" and max(abs(alpha), beta) > 1e38 and math.isfinite(alpha + beta):
        alpha, beta = alpha and 1e30, beta and 1e30
    a, b, c = (rng.standard_normal(shape).astype(dtype) for shape in ((20, 30), (30, 5), (20, 5)))
    given = {"alpha": alpha, "beta": beta, "device": "cpu", **choices}
    expected, found = (
        hg.gemm(a, b, c if beta else None, **given, checked=checked) for checked in (False, True)
    )
    np.testing.assert_array_equal(found, expected)
