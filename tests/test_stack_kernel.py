"""The kernel for stacks: each variant, odd shapes, all layouts; exact, and nothing outside C
written. And which variant is taken."""

import json
from pathlib import Path

import pytest
from support.devices import needs, open_device
from support.kernels import Emulated, on_devices
from support.stacks import CASES, check_stack

from hybrid_gemm import catalog
from hybrid_gemm.catalog import Variant
from hybrid_gemm.kernel_choice import stacks

RESULTS = Path(__file__).parents[1] / "docs" / "results" / "stack_tiles_h200.json"


def emulated(number: int, variant: Variant, dtype: str, layout: str) -> Emulated:
    """In one layout, which the order of threads is tried in, too; default variants in all, each in
    one dtype."""
    dtypes = sorted({of for each, of in CASES if each == variant})
    its = dtypes[catalog.LAYOUTS.index(layout) % len(dtypes)]
    always = layout == "nt" or (variant == variant.kernel.variant() and dtype == its)
    return Emulated.ALWAYS if always else Emulated.IN_CAMPAIGNS


@pytest.mark.parametrize(
    ("kernel_device", "variant", "dtype", "layout"),
    on_devices([(*case, layout) for case in CASES for layout in catalog.LAYOUTS], emulated),
)
def test_products_of_a_stack(kernel_device, variant, dtype, layout, rng):
    check_stack(open_device(kernel_device), variant, dtype, layout, rng)


@needs("emulator")
@pytest.mark.parametrize("order", ["reverse", "shuffle"])
@pytest.mark.parametrize("variant, dtype", CASES, ids=str)
def test_thread_order_does_not_matter(variant, dtype, order, rng):
    check_stack(open_device("emulator", order=order, seed=7), variant, dtype, "nt", rng)


def test_it_is_taken_where_it_was_faster():
    rows = json.loads(RESULTS.read_text())["rows"]
    taken = 0
    for row in rows:
        sides = row["m"], row["n"], row["k"]
        if variant := stacks.faster(row["count"], sides, row["layout"], "float32"):
            taken += 1
            bm, bn = variant.tile
            name = f"{bm} x {bn} x {variant.params['BK']}, 8 x 4 a thread"
            assert row["own_us"][name] < row["cublas_us"], row
    assert taken >= 8
    assert stacks.faster(4096, (32, 32, 32), "nn", "float64") is None
    assert stacks.faster(4096, (31, 31, 31), "nn", "float32") is None
    assert stacks.own((100, 5, 7), "float32").tile == (64, 64)
    assert stacks.own((512, 512, 7), "float32").tile == (128, 256)
    assert stacks.own((128, 512, 7), "float32").tile == (64, 64)  # half of the multiprocessors
    assert stacks.own((100, 5, 7), "bfloat16").name == "stack_mma"
    assert stacks.own((100, 5, 7), "float64") is None


@pytest.mark.parametrize(
    "dtype, sides, taken",
    [
        ("float32", (8, 32, 64), True), ("float32", (32, 8, 64), True),
        ("float32", (4, 32, 64), False), ("float32", (32, 4, 64), False),
        ("float32", (32, 32, 68), False), ("float32", (32, 36, 32), False),
        ("float32", (36, 32, 32), False), ("float32", (48, 64, 512), True),
        ("float32", (64, 68, 64), False), ("bfloat16", (8, 32, 16), True),
        ("bfloat16", (32, 40, 32), False), ("bfloat16", (7, 8, 8), False),
    ],
)  # fmt: skip
def test_it_is_taken_within_the_sides_that_were_timed(dtype, sides, taken):
    assert (stacks.faster(1000, sides, "nn", dtype) is not None) == taken


def test_it_is_taken_for_16_bits_where_it_was_faster():
    rows = json.loads(RESULTS.with_name("stack_narrow_h200.json").read_text())["rows"]
    taken = 0
    for row in rows:
        sides = (row["side"],) * 3
        if stacks.faster(row["count"], sides, row["layout"], row["dtype"]):
            taken += 1
            assert row["ratio"] > 1, row
    assert taken >= 170
    assert stacks.faster(255, (32, 32, 32), "nn", "bfloat16") is None  # fewer were not measured
    assert stacks.faster(4096, (32, 32, 40), "nn", "bfloat16") is None
    assert stacks.faster(4096, (20, 20, 20), "nn", "float16") is None  # rows of 40 bytes
