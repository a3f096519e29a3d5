"""Float64 by residues of int8 (`compute="fp64x"`): exact, as accurate as float64, or native."""

import functools
import itertools
import json
import math
import random
import re
from pathlib import Path

import numpy as np
import pytest
from support import residues as model
from support.devices import needs

import hybrid_gemm as hg
from hybrid_gemm import catalog
from hybrid_gemm.devices import moduli
from hybrid_gemm.devices.emulator import program as emulation
from hybrid_gemm.errors import UnavailableError, UsageError
from hybrid_gemm.kernel_choice import compute_modes, residues
from hybrid_gemm.kernel_choice.tables import Machine
from hybrid_gemm.problem import Problem

RESULTS = Path(__file__).resolve().parents[1] / "docs/results"
H200 = Machine("NVIDIA H200", 132, 90, 66.9)
NATIVE = "fp64x (native float64)"


@functools.cache
def runner(kind, **options):
    """One that takes residues at any size."""
    if "kernel" not in options:
        arch = hg.Runner(device=kind).devices[0].capability
        options["kernel"] = compute_modes.kernel_for(kind, arch, "residues")
    return hg.Runner(device=kind, compute="fp64x", **options)


def count_of(result):
    """The moduli that a product took."""
    return int(result.compute.removeprefix("fp64x (").removesuffix(" moduli)"))


# --- numbers --------------------------------------------------------------------------------


def test_moduli_are_coprime_and_residues_fit_a_byte():
    found = moduli.moduli()
    assert len(found) == moduli.MOST and max(found) == 256
    assert all(math.gcd(x, y) == 1 for x, y in itertools.combinations(found, 2))


@pytest.mark.parametrize("count", range(moduli.LEAST, moduli.MOST + 1))
def test_the_tables_give_an_integer_back(count):
    """As the kernels use them, in exact integers: residues by weights, products, and parts."""
    chance, whole = random.Random(count), moduli.product_of(count)
    rows = moduli.table()[count][:count]
    for _ in range(50):
        x, y = (chance.randrange(-(2**62), 2**62) for _ in "xy")
        z = x * y % whole  # of which the wanted integer is a representative
        total = [0, 0, 0]
        for row, p in zip(rows, moduli.moduli(), strict=False):
            of_x, of_y = (_by_weights(v, row, name) for v, name in ((x, "a"), (y, "b")))
            assert (of_x - x) % p == 0 and (of_y * (whole // p) - y) % p == 0
            r = (of_x * of_y + p // 2) % p - p // 2
            total = [t + r * int(part) for t, part in zip(total, row["part"], strict=True)]
            assert sum(map(int, row["part"])) == whole // p
            unit = 2 ** moduli.cut(count)
            assert abs(total[0]) // unit < 2**53 and abs(total[2]) < 2**53
        assert (sum(total) - z) % whole == 0


def _by_weights(x, row, name):
    octets = (x + 2**63).to_bytes(8, "little")
    weights = np.array([*row[name]], "<u4").view(np.int8)
    start = int(row[f"{name}_start"]) - 0x4B400000
    found = start + sum(o * int(w) for o, w in zip(octets, weights, strict=True))
    assert abs(found) < 2**22  # so that float32 has it exactly, beside 1.5 * 2^23
    return found


def test_a_budget_keeps_products_below_half_of_the_moduli():
    for count in range(1, moduli.MOST + 1):
        largest = 2 ** (int(moduli.budgets()[count]) / 8)
        share = 2 * largest / moduli.product_of(count)
        assert 2 ** (-1 / 8) * 0.998 < share < 0.999


# --- products -------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["normal", "uniform", 0, 1])
def test_bits_are_those_of_exact_integers(kernel_device, kind):
    rng = np.random.default_rng(7)
    a, b = model.draw(kind, rng, (9, 400)), model.draw(kind, rng, (400, 8))
    result = runner(kernel_device).run(a, b)
    assert model.ulps(result.c, *model.product(a, b, count_of(result))) <= 0.5001


@needs("emulator")
@pytest.mark.parametrize(("order", "layout"), [("reverse", "nn"), ("shuffle", "tt")])
def test_thread_order_does_not_matter(order, layout):
    rng = np.random.default_rng(3)
    a, b = rng.standard_normal((133, 300)), rng.standard_normal((300, 70))
    a, b = (x if way == "n" else x.T.copy().T for x, way in zip((a, b), layout, strict=True))
    plain = runner("emulator").run(a, b)
    other = hg.Runner(device="emulator", compute="fp64x", kernel="residues_mma")
    other.devices[0].options = emulation.Options(order, seed=5)
    found = other.run(a, b)
    assert found.compute == plain.compute != NATIVE
    np.testing.assert_array_equal(found.c, plain.c)


@needs("emulator")
@pytest.mark.parametrize("order", emulation.ORDERS)
def test_one_row_of_few_large_elements_takes_more_moduli(order):
    """Whichever thread looks at it: what threads found is put together through shared memory."""
    rng = np.random.default_rng(3)
    a, b = rng.standard_normal((45, 100)), rng.standard_normal((100, 45))
    with hg.Runner(device="emulator", compute="fp64x", kernel="residues_mma") as other:
        other.devices[0].options = emulation.Options(order, seed=5)
        usual = count_of(other.run(a, b))
        a[37] *= 2.0 ** -rng.uniform(0, 50, 100)
        for x, y in ((a, b), (b.T, a.T)):
            found = count_of(other.run(x, y))
            assert found == count_of(runner("emulator").run(x, y)) > usual


def test_small_sums_of_large_products_have_the_bits_of_exact_integers(kernel_device):
    """All parts of P / p count where nearly all of a sum cancels."""
    rng = np.random.default_rng(11)
    x, y = rng.standard_normal((5, 150)), rng.standard_normal((150, 6))
    tiny = rng.standard_normal((5, 1)) * 1e-13
    a, b = np.hstack([x, x, tiny]), np.vstack([y, -y, rng.standard_normal((1, 6))])
    result = runner(kernel_device).run(a, b)
    whole, shift = model.product(a, b, count_of(result))
    assert np.abs(whole).max() < 2**62 and model.ulps(result.c, whole, shift) <= 0.5001


@pytest.mark.parametrize("kind", ["normal", "uniform", 0, 1, 2, 4])
def test_errors_are_no_larger_than_native_ones(kernel_device, kind):
    rng = np.random.default_rng(5)
    a, b = model.draw(kind, rng, (40, 700)), model.draw(kind, rng, (700, 45))
    result = runner(kernel_device).run(a, b)
    native = hg.Runner(device=kernel_device).run(a, b).c
    # cuBLAS sums a short k in several parts, to half a unit. Of ours, half a unit is typical at any
    # k, and the largest of 1,800 elements is about one.
    assert model.errors(result.c, a, b) <= max(1.25, model.errors(native, a, b))
    assert (result.compute == NATIVE) == (kind in (2, 4))
    assert model.errors(result.c, a, b) <= 700  # the bound: k 2^-53 abs(A) abs(B)


@pytest.mark.parametrize("kind", ["normal", "uniform"])
def test_typical_errors_decide_where_k_is_long(kernel_device, kind):
    """The bound alone would be kept by fewer moduli. Of 0.6, rounding to whole numbers may make
    0.5, and rounding C, which is abs(A) abs(B) on uniform data, makes 0.29."""
    rng = np.random.default_rng(12)
    a, b = model.draw(kind, rng, (12, 2000)), model.draw(kind, rng, (2000, 12))
    result = runner(kernel_device).run(a, b)
    assert result.compute != NATIVE and model.typical_error(result.c, a, b) < 0.6


SHAPES = [(1, 1, 300), (33, 130, 129), (70, 65, 257), (129, 3, 640)]


@pytest.mark.parametrize("layout", catalog.LAYOUTS)
@pytest.mark.parametrize("shape", SHAPES)
def test_shapes_and_layouts(kernel_device, layout, shape):
    turn = SHAPES.index(shape) + (layout in ("nn", "tt"))
    if kernel_device == "emulator" and turn % 2:
        pytest.skip("this shape is emulated in the other two layouts")
    m, n, k = shape
    rng = np.random.default_rng(1)
    a, b, c = (rng.standard_normal(s) for s in ((m, k), (k, n), (m, n)))
    x, y = (np.asfortranarray(v) if o == "t" else v for v, o in zip((a, b), layout, strict=True))
    result = runner(kernel_device).run(x, y, c, alpha=-1.5, beta=0.25)
    assert "moduli" in result.compute
    wide = -1.5 * (a.astype("g") @ b.astype("g")) + 0.25 * c
    size = 1.5 * (abs(a) @ abs(b)) + 0.25 * abs(c)
    assert (abs(result.c - wide) <= 8 * 2.0**-53 * size).all()


def test_beta_zero_reads_no_c_and_parts_of_arrays_do(kernel_device):
    rng = np.random.default_rng(2)
    a, b = rng.standard_normal((40, 601)), rng.standard_normal((602, 37))
    x, y = a[3:, 1:][:, ::-1], b[2:, 4:]
    out = np.full((37, 33), np.nan)
    result = runner(kernel_device).gemm(x, y, out, beta=0, out=out)
    assert result is out and model.errors(out, x, y) < 8


def test_zeros_and_whole_numbers_are_exact(kernel_device):
    rng = np.random.default_rng(3)
    a = rng.integers(-1000, 1001, (33, 300)).astype(float)
    b = rng.integers(-1000, 1001, (300, 40)).astype(float)
    a[5], b[:, 7] = 0, 0
    result = runner(kernel_device).run(a, b)
    assert (result.c == a @ b).all() and "moduli" in result.compute
    result = runner(kernel_device).run(a, np.zeros_like(b))
    assert not result.c.any()


def _with(a, value):
    a = a.copy()
    a[3, 5] = value
    return a


@pytest.mark.parametrize(
    "change",
    [
        lambda a: _with(a, np.inf), lambda a: _with(a, np.nan), lambda a: _with(a, -np.inf),
        lambda a: a * 1e150, lambda a: _with(a, 1e200), lambda a: a * 1e-150,
        lambda a: _with(a * 1e-310, 5e-324), lambda a: _with(a, 1e12),
    ],
)  # fmt: skip
def test_other_data_is_multiplied_natively(kernel_device, change):
    rng = np.random.default_rng(4)
    a, b = change(rng.standard_normal((20, 300))), rng.standard_normal((300, 30))
    with np.errstate(all="ignore"):
        result = runner(kernel_device).run(a, b)
        native = hg.Runner(device=kernel_device).run(a, b).c
    assert result.compute == NATIVE
    np.testing.assert_array_equal(result.c, native)


def test_a_row_of_elements_that_meet_small_ones_is_multiplied_natively(kernel_device):
    """Largest elements whose partners are small: what is lost beside them is all that there is."""
    rng = np.random.default_rng(6)
    a, b = rng.standard_normal((20, 300)), rng.standard_normal((300, 30))
    a[:, :150] *= 2.0**40
    b[:150] *= 2.0**-40
    result = runner(kernel_device).run(a, b)
    assert result.compute == NATIVE and model.errors(result.c, a, b) < 300


@pytest.mark.parametrize("split, threads", [("rows", 3), ("cols", 3)])
def test_splits(kernel_device, split, threads):
    rng = np.random.default_rng(8)
    a, b = rng.standard_normal((90, 600)), rng.standard_normal((600, 65))
    result = runner(kernel_device, split=split, threads=threads).run(a, b)
    assert result.compute == "fp64x (14 moduli)"
    assert model.errors(result.c, a, b) < 8
    again = runner(kernel_device, split=split, threads=threads).run(a, b)
    np.testing.assert_array_equal(result.c, again.c)


def test_a_split_by_rows_has_the_bits_of_one_product_where_scales_agree(kernel_device):
    """Scales depend on all rows of a part only through the eighth that they share."""
    rng = np.random.default_rng(8)
    a, b = rng.standard_normal((1, 400)), rng.standard_normal((400, 65))
    a = np.vstack([a] * 4)
    whole = runner(kernel_device).run(a, b).c
    parts = runner(kernel_device, split="rows", threads=2).run(a, b).c
    np.testing.assert_array_equal(whole, parts)


def test_with_others(kernel_device):
    """Complex numbers, Strassen's algorithm and checked products make real products by residues."""
    rng = np.random.default_rng(9)
    a, b = rng.standard_normal((40, 300)), rng.standard_normal((300, 36))
    z = a + 1j * rng.standard_normal(a.shape)
    result = runner(kernel_device).run(z, b.astype("D"))
    assert result.compute == "fp64x (14 moduli), four real products"
    assert (abs(result.c - z @ b) <= 1e-15 * (abs(z) @ abs(b))).all()
    result = runner(kernel_device, checked=True).run(a, b)
    assert "14 moduli" in result.compute and result.checks.products and not result.checks.repeated
    assert model.errors(result.c, a, b) < 8
    found = runner(kernel_device, algorithm="strassen", levels=1).gemm(a, b)
    np.testing.assert_allclose(found, a @ b, atol=1e-12)


@needs("cuda")
def test_arrays_on_a_gpu_stay_there():
    import cupy

    rng = np.random.default_rng(9)
    a, b = rng.standard_normal((300, 500)), rng.standard_normal((500, 200))
    here = runner("cuda")
    for x, y in ((a, b), (a[1:, 3:], b[3:, 1:])):
        made = here.gemm(cupy.asarray(x), cupy.asarray(y))
        assert isinstance(made, cupy.ndarray) and model.errors(made.get(), x, y) < 8
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        x, y = cupy.asarray(a), cupy.asarray(b)
        stream.synchronize()
        stream.begin_capture()
        with pytest.raises(UsageError, match="is being captured: leave compute out"):
            here.gemm(x, y)
        stream.end_capture()
    arch = here.devices[0].capability
    able = [x for x in ("residues", "residues_mma") if catalog.get(x).runs_at(arch)]
    first, *others = (runner("cuda", kernel=x).gemm(a, b) for x in able)
    for other in others:
        np.testing.assert_array_equal(first, other)


# --- what is asked for ----------------------------------------------------------------------


def test_names_that_do_not_go_together(rng):
    a = np.ones((5, 5))
    with pytest.raises(UnavailableError, match=r"fp64x needs tensor cores .* cpu; leave compute"):
        hg.gemm(a, a, device="cpu", compute="fp64x")
    others = ("float32", "fp32x3 is its like"), ("int32", "leave compute out"), ("float16", "leave")
    for dtype, other in others:
        with pytest.raises(UsageError, match=f"fp64x is for float64; .* {dtype}: {other}"):
            hg.gemm(a.astype(dtype), a.astype(dtype), device="emulator", compute="fp64x")
    for options, found in (
        (
            {"kernel": "mma"},
            "kernel mma multiplies float32 in fp32x3 or tf32, and compute is fp64x",
        ),
        ({"kernel": "naive"}, "naive does not use them; residues_mma does"),
    ):
        with pytest.raises(UsageError, match=found):
            hg.gemm(a, a, device="emulator", compute="fp64x", **options)
    with pytest.raises(
        UsageError, match="residues_mma multiplies float64 in fp64x, and compute is fp32"
    ):
        hg.gemm(a, a, device="emulator", kernel="residues_mma")
    with pytest.raises(UnavailableError, match=r"residues needs .* 9\.0; .* emulator"):
        hg.gemm(a, a, device="emulator", kernel="residues", compute="fp64x")


def choose(*sides, machine=H200, own=False):
    variant = catalog.get("residues").variant()
    return residues.choose(
        machine, variant, Problem(*sides, "float64", compute="fp64x"), "nn", own=own
    )


def test_the_planner_counts_what_residues_take():
    m, n, k = 300, 200, 500
    plans = [
        hg.Runner(device="emulator", compute=x).plan(Problem(m, n, k, "float64", compute=x))
        for x in ("fp32", "fp64x")
    ]
    native, ours = (plan.memory_bytes(0) for plan in plans)
    columns, pitch = 256, 512  # n and k, rounded up
    needed = 16 * ((m + columns) * pitch + m * columns) + (m + n) * (8 + 80 + 8 + 4)
    assert needed <= ours - native <= 1.3 * needed


def test_small_products_are_made_natively():
    for sides in ((64, 64, 64), (1, 1, 10**6), (512, 512, 512), (4096, 4096, 64)):
        variant, why = choose(*sides)
        assert variant.kernel.role != "residues", why
        assert not choose(*sides, own=True)[0].kernel.library
        assert compute_modes.ran(variant, Problem(*sides, "float64", compute="fp64x"), ()) in (
            "fp64x", "strict float64, expected to be faster here than fp64x"
        )  # fmt: skip
    variant, why = choose(8192, 8192, 2**17)
    assert variant.kernel.role != "residues" and why == "k is above 131071"


def test_large_products_are_made_by_as_many_moduli_as_pay():
    variant, why = choose(8192, 8192, 8192)
    assert variant.name == "residues" and "natively" in why
    most = variant.params["MODULI"]
    assert most >= residues.USUAL
    limit = residues.LEAD * residues.native_us(H200, (8192, 8192, 8192), "nn")
    assert residues.predicted_us(H200, (8192,) * 3, most) < limit
    assert most == moduli.MOST or residues.predicted_us(H200, (8192,) * 3, most + 1) >= limit


def test_predicted_times_are_those_that_were_measured():
    rows = json.loads((RESULTS / "fp64x_h200.json").read_text())
    seen = 0
    for row in (*rows["sizes"]["rows"], *rows["random"]["rows"]):
        if found := re.fullmatch(r"fp64x \((\d+) moduli\)", row["compute"]):
            us = residues.predicted_us(H200, (row["m"], row["n"], row["k"]), int(found[1]))
            assert us == pytest.approx(1e3 * row["ours_ms"], rel=0.12), row
            seen += 1
    assert seen == 5


def test_gpus_without_a_model_are_judged_by_their_peak():
    """Float64 has a 64th of the rate of float32 on this one, and half of it on the other."""
    for machine, taken in (
        (Machine("NVIDIA GeForce RTX 4090", 128, 89, 1.3), True),
        (Machine("NVIDIA A100", 108, 80, 9.7), False),
    ):
        variant, why = choose(8192, 8192, 8192, machine=machine)
        assert (variant.kernel.role == "residues") == taken, why
        assert choose(64, 64, 64, machine=machine)[0].kernel.role != "residues"


def test_an_unknown_gpu_multiplies_natively():
    unknown = Machine("a GPU", 10, 87, None)
    variant, _why = choose(8192, 8192, 8192, machine=unknown)
    assert variant.kernel.role != "residues"
