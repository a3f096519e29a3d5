"""`dots`, C of few elements, `tall`, C of one long side, `outer`, a k of a few, and `skinny`, up to
16 rows or columns: each variant, odd sides, all layouts; exact, in one order, and nothing outside C
written."""

import numpy as np
import pytest
from support.arrays import fetch, padded
from support.devices import needs, open_device
from support.lines import (
    FEW,
    SKINNY,
    THIN,
    check_case,
    check_lines,
    check_one_order,
    few_blocks,
    in_all_layouts,
    lying,
)

import hybrid_gemm as hg
from hybrid_gemm import catalog
from hybrid_gemm.errors import UsageError
from hybrid_gemm.kernel_choice import fitted, on_gpu
from hybrid_gemm.kernel_choice.tables import Machine
from hybrid_gemm.problem import Problem

CASES = [case for case in THIN if not case[0].name.startswith("gemv")]


@pytest.mark.parametrize(("kernel_device", "variant", "dtype", "layout"), in_all_layouts(CASES))
def test_thin_products(kernel_device, variant, dtype, layout, rng):
    check_case(kernel_device, variant, dtype, layout, rng)


@pytest.mark.parametrize("layout", ["nn", "tt"])
def test_shares_of_k_are_added_in_one_order(kernel_device, layout, rng):
    variant = catalog.get("dots").variant()
    check_one_order(open_device(kernel_device), variant, (3, 5, 9000), layout, rng)


@pytest.mark.parametrize(("layout", "skip"), [("nn", 1), ("nt", 3), ("tn", 6), ("tt", 7)])
def test_skinny_reads_lines_that_begin_anywhere(kernel_device, layout, skip, rng):
    variant = few_blocks(SKINNY[0].variant({"THIN": 16}))
    device = open_device(kernel_device)
    check_lines(device, variant, "float16", layout, FEW, rng, skip)
    check_one_order(device, variant, (5, 70, 1300), layout, rng, "float16")


@pytest.mark.parametrize("layout", ["nn", "nt", "tn"])
@pytest.mark.parametrize("place", [0, 5, 203, 255, 256, 300])
def test_skinny_keeps_inf_to_its_row(kernel_device, layout, place, rng):
    """Where one element of A is Inf, all of its row of C is Inf, and nothing else: zeros that stand
    for what is not there meet no Inf."""
    device, (m, n, k) = open_device(kernel_device), (5, 75, 301)
    stream, variant = device.stream(), SKINNY[0].variant({"OUT": 4})
    a, b = np.ones((m, k), "f2"), np.ones((k, n), "f2")
    a[2, place] = np.inf
    views = lying(device, (a, b), layout, 1)
    _whole, c = padded(device, np.zeros((m, n), "f4"), 0, np.nan)
    with device.using(stream):
        device.gemm(variant, *views, c, alpha=1, beta=0, stream=stream)
        stream.synchronize()
    expected = np.full((m, n), k, "f4")
    expected[2] = np.inf
    np.testing.assert_array_equal(fetch(device, c), expected)


@needs("emulator")
def test_they_multiply_by_name(rng):
    points, turn = rng.integers(-3, 4, (500, 3)).astype("f4"), rng.integers(-3, 4, (3, 3))
    with hg.Runner(device="emulator", kernel="tall") as runner:
        moved = runner.gemm(points, turn.astype("f4"))
        np.testing.assert_array_equal(moved, points @ turn)
        twelve = rng.integers(-3, 4, (3, 12)).astype("f4")  # more than the default variant takes
        done = runner.run(points, twelve)
        np.testing.assert_array_equal(done.c, points @ twelve)
        assert done.variant.params["THIN"] == 16
        with pytest.raises(UsageError, match=r"THIN=32 .* it needs min\(m, n\) <= THIN"):
            runner.gemm(points, points.T)
    with (
        hg.Runner(device="emulator", kernel="tall", params={"THIN": 4}) as runner,
        pytest.raises(UsageError, match=r"THIN=4 .* it needs min\(m, n\) <= THIN"),
    ):
        runner.gemm(points, twelve)
    with hg.Runner(device="emulator", kernel="dots") as runner:
        np.testing.assert_array_equal(runner.gemm(points.T, moved), points.T @ moved)
        with pytest.raises(UsageError, match=r"it needs m <= 4 \* BM"):
            runner.gemm(points, turn.astype("f4"))


@pytest.mark.parametrize("split", ["rows", "cols"])
@pytest.mark.parametrize(
    ("name", "sides"),
    [
        ("outer_narrow", (40, 30, 4)), ("tall_narrow", (40, 4, 20)), ("dots_narrow", (5, 6, 90)),
        ("gemv_narrow", (1, 30, 40)), ("outer", (40, 30, 4)), ("tall", (40, 4, 20)),
    ],
)  # fmt: skip
def test_operands_with_steps_both_ways_compile_no_transpose(kernel_device, name, sides, split, rng):
    """They are copied, and the transpose has no form for 16 bits."""
    m, n, k = sides
    dtype = "f2" if name.endswith("narrow") else "f4"
    a = rng.integers(-3, 4, (2 * m, 2 * k)).astype(dtype)[::2, ::2]
    b = rng.integers(-3, 4, (2 * k, 2 * n)).astype(dtype)[::2, ::2]
    with hg.Runner(device=kernel_device, kernel=name, threads=2, split=split) as runner:
        done = runner.run(a, b, resident=True)
        loaded = {variant.name for variant, *_ in runner.devices[0]._loaded}
    np.testing.assert_array_equal(done.c, a @ b)
    assert name in loaded
    assert "transpose" not in loaded


@pytest.mark.parametrize(
    "kernel, dtype, sides",
    [
        ("tuned", "float64", (9, 10, 11)),
        ("outer", "float32", (9, 10, 12)),
        ("outer_narrow", "float16", (9, 10, 12)),
        ("tall_narrow", "float16", (40, 12, 9)),
        ("dots_narrow", "float16", (30, 31, 9)),
    ],
)
@pytest.mark.parametrize("split", ["rows", "cols"])
def test_a_named_kernel_takes_the_first_variant_that_can(rng, kernel, dtype, sides, split):
    m, n, k = sides
    a, b = (rng.integers(-3, 4, shape).astype(dtype) for shape in ((m, k), (k, n)))
    listed = catalog.get(kernel).variants()
    assert not (listed[0].suits(dtype) and listed[0].takes(*sides, dtype))
    with hg.Runner(device="emulator", kernel=kernel, threads=1, split=split) as runner:
        done = runner.run(a, b)
    np.testing.assert_array_equal(done.c, a @ b)
    assert done.why == "asked for" and done.variant in listed


@pytest.mark.parametrize("mode", ["float32", "float64", "float16"])
@pytest.mark.parametrize(
    ("kernel", "sides"),
    [
        ("tall", (4_000_000, 3, 3)), ("tall", (3, 1_500_000, 4)), ("tall", (700_001, 9, 5)),
        ("dots", (3, 3, 4_000_000)), ("dots", (6, 5, 1_200_000)), ("dots", (2, 9, 800_000)),
        ("outer", (9001, 7003, 2)), ("outer", (4001, 12_003, 3)),
    ],
)  # fmt: skip
def test_they_are_taken(mode, kernel, sides):
    """By the models of an H200, before all others and before cuBLAS."""
    dtype = fitted.OPERANDS[mode]
    posed = "float32" if mode == "float16" else dtype
    problem = Problem(*sides, posed, out_dtype=dtype, operands=dtype)
    choose = on_gpu.on_tensor_cores if mode == "float16" else on_gpu.strict
    machine = Machine("NVIDIA H200", 132, 90, 66.9)
    taken = [choose(machine, problem, layout, own=False)[0].name for layout in catalog.LAYOUTS]
    narrow = "_narrow" if mode == "float16" else ""
    assert taken.count(kernel + narrow) >= 3, taken


@pytest.mark.parametrize("operands", ["float16", "bfloat16"])
@pytest.mark.parametrize(
    "sides", [(3, 20_011, 3001), (50_257, 8, 769), (16, 30_001, 2049), (4097, 4, 11_007)]
)
def test_skinny_is_taken_where_lines_begin_anywhere(operands, sides):
    problem = Problem(*sides, "float32", out_dtype=operands, operands=operands)
    machine = Machine("NVIDIA H200", 132, 90, 66.9)
    for layout in catalog.LAYOUTS:
        choice = on_gpu.on_tensor_cores(machine, problem, layout, own=False)[0]
        assert choice.name == "skinny", (layout, str(choice))
