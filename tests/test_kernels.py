"""Every kernel, every listed variant, odd shapes, all layouts and dtypes: exact, and nothing
outside C written. The same body runs on the emulator and on a GPU."""

import functools
import subprocess
import sys

import numpy as np
import pytest
from conftest import REASONS, integers

from hybrid_gemm import catalog, devices
from hybrid_gemm.catalog import Variant
from hybrid_gemm.devices.emulator import program as emulation
from hybrid_gemm.errors import UsageError

SHAPES = [
    (1, 1, 1), (5, 7, 3), (33, 65, 17), (130, 133, 21), (128, 128, 16), (1, 200, 50),
    (200, 1, 50), (129, 64, 1), (64, 31, 0), (3, 300, 8),
]  # fmt: skip
GEMMS = [v for k in catalog.gemm_kernels() if not k.library for v in k.variants()]
POISON = {"f": np.nan, "i": -(2**30)}


@functools.cache
def open_device(kind, **options):
    if options:
        from hybrid_gemm.devices.emulator.device import EmulatorDevice

        return EmulatorDevice(options=emulation.Options(**options))
    return devices.open_devices(kind, 1, gpus=[0] if kind == "cuda" else None)[0]


def padded(device, host, pad, poison):
    """The matrix on the device inside a larger one full of poison; returns both."""
    whole = np.full((host.shape[0] + 2, host.shape[1] + pad), poison, host.dtype)
    whole[1:-1, : host.shape[1]] = host
    stream = device.stream()
    there = device.empty(*whole.shape, host.dtype.name)
    device.copy(there, whole, stream)
    stream.synchronize()
    return there, there[1:-1, : host.shape[1]]


def fetch(device, matrix):
    stream = device.stream()
    host = np.empty(matrix.shape, matrix.dtype)
    device.copy(host, matrix, stream)
    stream.synchronize()
    return host


def multiply(device, variant, shape, layout, dtype, pad, alpha, beta, seed=0):
    """Runs the variant; returns C and what NumPy makes of the same whole numbers."""
    m, n, k = shape
    rng = np.random.default_rng(seed)
    poison = POISON[np.dtype(dtype).kind]
    stored = [integers(rng, s, dtype) for s in ((m, k), (k, n))]
    a, b = (
        padded(device, x if order == "n" else x.T.copy(), pad, poison)[1]
        for x, order in zip(stored, layout, strict=True)
    )
    old = integers(rng, (m, n), dtype) if beta else np.full((m, n), poison, dtype)
    whole, c = padded(device, old, pad, poison)
    stream = device.stream()
    with device.using(stream):
        device.gemm(
            variant, a if layout[0] == "n" else a.T, b if layout[1] == "n" else b.T, c,
            alpha=alpha if k else 0, beta=beta, stream=stream,
        )  # fmt: skip
        stream.synchronize()
    expected = np.full(whole.shape, poison, dtype)
    product = alpha * (stored[0].astype("i8") @ stored[1].astype("i8"))
    expected[1:-1, :n] = product + beta * old.astype("i8") if beta else product
    return fetch(device, whole), expected


@pytest.mark.parametrize("layout", catalog.LAYOUTS)
@pytest.mark.parametrize("variant", GEMMS, ids=str)
def test_float32_at_odd_shapes(kernel_device, variant, layout):
    """On the emulator, where each has to be compiled: defaults in all layouts, others in two."""
    turn = (layout in ("nn", "tt")) + GEMMS.index(variant)
    if kernel_device == "emulator" and variant != variant.kernel.variant() and turn % 2:
        pytest.skip("this variant is emulated in the other two layouts")
    device = open_device(kernel_device)
    for i, shape in enumerate(SHAPES):
        if reason := variant.refusal(device=kernel_device, dtype="float32", **mnk(shape)):
            assert variant.kernel.limits, reason
            continue
        got, expected = multiply(
            device, variant, shape, layout, "float32", pad=(0, 4, 3)[i % 3],
            alpha=(1, -2)[i % 2], beta=(0, 0, 3)[i % 3], seed=i,
        )  # fmt: skip
        np.testing.assert_array_equal(got, expected, err_msg=f"{shape}")


@pytest.mark.parametrize("dtype", ["float64", "int32", "int64"])
@pytest.mark.parametrize("variant", GEMMS, ids=str)
def test_other_dtypes(kernel_device, variant, dtype):
    device = open_device(kernel_device)
    layout = catalog.LAYOUTS[(GEMMS.index(variant) + len(dtype)) % 4]
    for i, shape in enumerate([(33, 65, 17), (130, 133, 21), (5, 3, 40)]):
        reason = variant.refusal(device=kernel_device, dtype=dtype, **mnk(shape))
        if reason:
            assert "needs" in reason or "form" in reason
            continue
        got, expected = multiply(device, variant, shape, layout, dtype, i, 2, (0, -1)[i % 2])
        np.testing.assert_array_equal(got, expected, err_msg=f"{shape} {layout}")


def mnk(shape):
    return dict(zip("mnk", shape, strict=True))


@pytest.mark.parametrize("order", ["reverse", "shuffle"])
@pytest.mark.parametrize("kernel", [k for k in catalog.gemm_kernels() if not k.library],
                         ids=lambda k: k.name)  # fmt: skip
def test_thread_order_does_not_matter(kernel, order):
    if REASONS["emulator"]:
        pytest.skip(REASONS["emulator"])
    device = open_device("emulator", order=order, seed=7)
    shape = (30, 31, 33) if kernel.limits else (133, 130, 37)
    got, expected = multiply(device, kernel.variant(), shape, "nn", "float32", 1, 1, 1)
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("kernel", ["tuned", "deep", "cluster", "vector"])
def test_the_same_input_gives_the_same_bits(kernel_device, kernel):
    """Parts of k are added in one order, whichever block comes last."""
    device, variant = open_device(kernel_device), catalog.get(kernel).variant()
    if reason := variant.refusal(device=kernel_device, dtype="float32", m=70, n=90, k=3000):
        pytest.skip(reason)
    rng, stream = np.random.default_rng(5), device.stream()
    a, b = (rng.standard_normal(s).astype("f4") for s in ((70, 3000), (3000, 90)))
    there = [padded(device, x, 0, 0)[1] for x in (a, b)]
    results = []
    for _ in range(5):
        _whole, c = padded(device, np.full((70, 90), np.nan, "f4"), 0, np.nan)
        with device.using(stream):
            device.gemm(variant, *there, c, alpha=1, beta=0, stream=stream)
            stream.synchronize()
        results.append(fetch(device, c))
    np.testing.assert_allclose(results[0], a.astype("f8") @ b, rtol=0, atol=3000 * 1e-6)
    for again in results[1:]:
        np.testing.assert_array_equal(again, results[0])


def every_kernel_once(device, variants):
    """Each variant at an odd shape, and the passes: what a checker of accesses should watch.

    Of kernels with a fixed number of blocks, with fewer blocks than tiles too.
    """
    for i, variant in enumerate(variants):
        layout = catalog.LAYOUTS[-1 - i % 4]
        cases = [(variant, (29, 33, 35) if variant.kernel.limits else (131, 137, 21))]
        if "BLOCKS" in variant.params:
            few = Variant(variant.kernel, {**variant.params, "BLOCKS": 2})
            cases.append((few, (301, 299, 20)))
        for case, shape in cases:
            got, expected = multiply(device, case, shape, layout, "float32", 3, 1, 1)
            np.testing.assert_array_equal(got, expected, err_msg=f"{case} {shape}")
    passes(device)
    print(f"clean: {len(variants)} variants and the passes")


SANITIZED = """
import sys
sys.path.insert(0, {here!r})
from test_kernels import GEMMS, every_kernel_once, open_device
default = {{v.name: v for v in reversed(GEMMS)}}
every_kernel_once(open_device("emulator", sanitize=True), list(default.values()))
"""


def test_address_sanitizer_finds_nothing_at_odd_shapes():
    """Every kernel's default variant, and the passes, with each access checked."""
    if REASONS["emulator"]:
        pytest.skip(REASONS["emulator"])
    here = str(__import__("pathlib").Path(__file__).parent)
    done = subprocess.run(
        [sys.executable, "-c", SANITIZED.format(here=here)], capture_output=True, text=True,
        env=emulation.sanitized_environment(),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.startswith("clean: ")


def passes(device):
    """Transpose, slab copy, add and ordered sum, with odd sizes and leading dimensions."""
    rng = np.random.default_rng(3)
    stream = device.stream()
    with device.using(stream):
        for rows, cols, pad in ((1, 1, 0), (33, 70, 1), (64, 128, 0), (130, 3, 2), (7, 301, 4)):
            host = integers(rng, (rows, cols))
            _whole, there = padded(device, host, pad, np.nan)
            turned = device.transposed(there, stream)
            again = device.transposed(turned, stream)
            stream.synchronize()
            assert turned.strides[0] == 4
            np.testing.assert_array_equal(fetch(device, turned.T), host.T)
            np.testing.assert_array_equal(fetch(device, again), host)
            whole, copy = padded(device, np.full_like(host, np.nan), pad + 1, 9)
            device.copy_here(copy, there, stream)
            device.add(copy, there, stream)
            stream.synchronize()
            got = fetch(device, whole)
            np.testing.assert_array_equal(got[1:-1, :cols], 2 * host)
            assert (got[0] == 9).all() and (got[1:-1, cols:] == 9).all()
            for parts in (1, 2, 5, 9):
                hosts = [integers(rng, (rows, cols)) for _ in range(parts)]
                views = [padded(device, x, pad, np.nan)[1] for x in hosts]
                for beta, start in ((0, np.nan), (2, 3)):
                    whole, out = padded(device, np.full_like(host, start), pad, 9)
                    device.sum(views, out, alpha=3, beta=beta, stream=stream)
                    stream.synchronize()
                    got = fetch(device, whole)
                    np.testing.assert_array_equal(got[1:-1, :cols], 3 * sum(hosts) + 3 * beta)
                    assert (got[0] == 9).all() and (got[1:-1, cols:] == 9).all()


def test_passes(kernel_device):
    passes(open_device(kernel_device))


def test_partials_are_added_in_their_order(kernel_device):
    """(1 + 1e8) - 1e8 is 0 in float32 and 1e8 - 1e8 + 1 is 1: the order shows."""
    device = open_device(kernel_device)
    stream = device.stream()
    for values, total in (((1, 1e8, -1e8), 0), ((1e8, -1e8, 1), 1)):
        parts = [padded(device, np.full((3, 5), v, "f4"), 0, 0)[1] for v in values]
        _whole, out = padded(device, np.zeros((3, 5), "f4"), 0, 0)
        with device.using(stream):
            device.sum(parts, out, alpha=1, beta=0, stream=stream)
            stream.synchronize()
        np.testing.assert_array_equal(fetch(device, out), total)


def test_grids_past_the_limit_become_several_launches():
    variant = catalog.get("naive").variant()
    assert len(list(variant.launches(10, 10, 10, "float32"))) == 1
    parts = list(variant.launches(2**21, 100, 8, "float32"))
    assert len(parts) > 1
    assert [p[0].start for p in parts] == [0] + [p[0].stop for p in parts[:-1]]
    assert parts[-1][0].stop == 2**21
    for rows, _cols, launch in parts:
        assert launch.grid[1] == -(-(rows.stop - rows.start) // 16) <= catalog.MAX_GRID[1]


def test_custom_parameters_are_held_to_the_rules():
    shared = catalog.get("shared_tile")
    assert shared.variant({"TILE": 5}).params["TILE"] == 5
    with pytest.raises(UsageError, match="TILE <= 32"):
        shared.variant({"TILE": 33})
    with pytest.raises(UsageError, match="at least 1"):
        shared.variant({"TILE": 0})
    with pytest.raises(UsageError, match="did you mean 'TILE'"):
        shared.variant({"TILES": 8})
    with pytest.raises(UsageError, match="needs BM % TM == 0"):
        catalog.get("block_tile").variant({"BM": 100})


def test_a_custom_tile_runs(kernel_device):
    variant = catalog.get("shared_tile").variant({"TILE": 5})
    got, expected = multiply(
        open_device(kernel_device), variant, (23, 31, 17), "nt", "int32", 2, 1, 0
    )
    np.testing.assert_array_equal(got, expected)


def test_one_block_refuses_what_exceeds_the_block_limit():
    variant = catalog.get("one_block").variant()
    assert variant.refusal(device="cuda", dtype="float32", m=32, n=32, k=99) is None
    assert "m * n <= 1024" in variant.refusal(device="cuda", dtype="float32", m=33, n=32, k=1)
