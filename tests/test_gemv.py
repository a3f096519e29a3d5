"""`gemv` and `gemv_narrow`: each variant, odd lengths, all layouts; exact, in one order, and
nothing outside C written. And where they are taken."""

import itertools

import numpy as np
import pytest
from support.devices import needs, open_device
from support.kernels import Emulated, on_devices
from support.lines import (
    ANYWHERE,
    GEMV,
    cases,
    check_case,
    check_lines,
    check_one_order,
    few_blocks,
    in_all_layouts,
)

import hybrid_gemm as hg
from hybrid_gemm import catalog
from hybrid_gemm.bench import drawing
from hybrid_gemm.errors import UsageError
from hybrid_gemm.kernel_choice import fitted, model_files, on_gpu
from hybrid_gemm.kernel_choice.tables import Machine
from hybrid_gemm.problem import Problem

H200 = Machine("NVIDIA H200", 132, 90, 66.9)
CASES = cases(GEMV)


WIDE, DTYPES = (8, 32, 256), ("float32", "float64", "float16", "bfloat16")


@pytest.mark.parametrize(("kernel_device", "variant", "dtype", "layout"), in_all_layouts(CASES))
def test_one_row_or_column(kernel_device, variant, dtype, layout, rng):
    check_case(kernel_device, variant, dtype, layout, rng)


def each_pair(number: int, dtype: str, wide: int, layout: str) -> Emulated:
    """On the emulator each width meets each dtype, and each width each layout."""
    turn = WIDE.index(wide) + DTYPES.index(dtype) + catalog.LAYOUTS.index(layout)
    return Emulated.IN_CAMPAIGNS if turn % 4 else Emulated.ALWAYS


@pytest.mark.parametrize(
    ("kernel_device", "dtype", "wide", "layout"),
    on_devices(list(itertools.product(DTYPES, WIDE, catalog.LAYOUTS)), each_pair),
)
def test_lines_that_begin_anywhere(kernel_device, dtype, wide, layout, rng):
    """Wherever A and B begin beside 16 bytes, and their rows. The emulator takes every second place
    in a layout, and the others in the next, since a place means the same to all."""
    variant = next(
        v for v, of in CASES if of == dtype and v.params["WIDE"] == wide
        if v.params.get("OUT", 4) == 4
    )  # fmt: skip
    turn, of = catalog.LAYOUTS.index(layout) % 2, 2 if kernel_device == "emulator" else 1
    for skip in range(turn % of, 16 // np.dtype(dtype).itemsize, of):
        device = open_device(kernel_device)
        check_lines(device, few_blocks(variant), dtype, layout, ANYWHERE, rng, skip)


@pytest.mark.parametrize("layout", ["nn", "tt"])
def test_shares_of_k_are_added_in_one_order(kernel_device, layout, rng):
    variant = few_blocks(catalog.get("gemv").variant())
    check_one_order(open_device(kernel_device), variant, (1, 90, 3001), layout, rng)


@needs("emulator")
def test_it_multiplies_by_name(rng):
    a, v = rng.integers(-3, 4, (50, 70)).astype("f4"), rng.integers(-3, 4, 70).astype("f4")
    with hg.Runner(device="emulator", kernel="gemv") as runner:
        np.testing.assert_array_equal(runner.matmul(a, v), a @ v)
        with pytest.raises(UsageError, match=r"it needs min\(m, n\) <= 1"):
            runner.matmul(a, a.T)
    with hg.Runner(device="emulator", kernel="gemv_narrow", threads=2, split="cols") as runner:
        done = runner.run(a.astype("f2"), v.astype("f2")[:, None])
        np.testing.assert_array_equal(done.c[:, 0].astype("f4"), a @ v)
        assert "float16, products and sums in float32" in str(done.compute)


@pytest.mark.parametrize("mode, least", [("float32", 30), ("float64", 20), ("float16", 25)])
def test_it_is_taken_for_rows_and_columns(mode, least):
    """At lengths that no model was fitted to: of 60, or a library where it does not lead clearly;
    of our kernels nearly always."""
    dtype = fitted.OPERANDS[mode]
    posed = "float32" if mode == "float16" else dtype
    taken = ours = 0
    drawn = drawing.draw(5, 60, (drawing.LINE,))
    for each in drawn:
        m, n, k = each.shape
        problem = Problem(m, n, k, posed, out_dtype=dtype, operands=dtype)
        choose = on_gpu.on_tensor_cores if mode == "float16" else on_gpu.strict
        variant, _why = choose(H200, problem, each.layout, own=False)
        own, _why = choose(H200, problem, each.layout, own=True)
        taken += variant.name.startswith("gemv")
        ours += own.name.startswith("gemv")
    assert taken >= least
    assert ours >= 50


@pytest.mark.parametrize("sides", [(1, 5000, 700), (5000, 1, 700), (1, 1, 9)])
def test_a_dtype_without_a_model_can_have_one_row(sides):
    problem = Problem(*sides, "int64")
    machine = Machine("NVIDIA H200", 132, 90, 16.7)
    variant, why = on_gpu.strict(machine, problem, "nn")
    assert why == "by the cost model"
    assert variant.name == "gemv" or sides == (1, 1, 9), variant


def test_without_k_the_box_with_most_rows_is_the_largest():
    """The kernel is chosen for it: one for a single row would not multiply it."""
    plan = hg.plan(4, 13, 0, threads=3, split="rows", device="cpu")
    assert plan.products == ((2, 13, 0), (1, 13, 0))
    variant, _why = on_gpu.strict(H200, Problem(*plan.products[0], "float32"), "nt")
    for m, n, k in plan.products:
        assert variant.refusal(device="cuda", dtype="float32", m=m, n=n, k=k) is None


def test_other_shapes_never_get_it():
    for each in drawing.draw(6, 60):
        m, n, _k = each.shape
        if 1 not in (m, n):
            times = model_files.model(H200, "float32").times_us(each.shape, each.layout, H200)
            assert not [v for v in times if v.name == "gemv"]
