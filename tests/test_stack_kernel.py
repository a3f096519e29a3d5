"""The kernel for stacks: each variant, odd shapes, all layouts; exact, and nothing outside C
written. And which variant is taken."""

import json
from pathlib import Path

import numpy as np
import pytest
from support.arrays import fetch, integers, padded
from support.devices import open_device

from hybrid_gemm import catalog
from hybrid_gemm.devices.stack_products import bind_stack
from hybrid_gemm.kernel_choice import stacks

RESULTS = Path(__file__).parents[1] / "docs" / "results" / "stack_tiles_h200.json"
CASES = [(v, "float32") for v in catalog.helper("stack").kernel.variants()]
CASES += [(v, dtype) for v in catalog.helper("stack_mma").kernel.variants()
          for dtype in ("float16", "bfloat16")]  # fmt: skip
SHAPES = [
    (3, 32, 32, 32), (5, 33, 65, 17), (2, 130, 133, 21), (4, 1, 1, 1), (3, 7, 100, 40),
    (1, 64, 96, 3), (2, 140, 270, 19),
]  # fmt: skip


@pytest.mark.parametrize("layout", catalog.LAYOUTS)
@pytest.mark.parametrize("variant, dtype", CASES, ids=str)
def test_products_of_a_stack(kernel_device, variant, dtype, layout, rng):
    device = open_device(kernel_device)
    stream = device.stream()
    for i, (count, m, n, k) in enumerate(SHAPES):
        pad, made = (0, 4, 3)[i % 3], []
        a, b = integers(rng, (count, m, k)), integers(rng, (count, k, n))
        a, b = (x.clip(-1, 1).astype(dtype) if dtype != "float32" else x for x in (a, b))
        c = np.full((count, m, n), np.nan, dtype)
        for x, order in zip((a, b, c), (*layout, "n"), strict=True):
            # One matrix below the other: rows of all of them, in the order in which they lie.
            lying = x if order == "n" else x.swapaxes(1, 2)
            whole, view = padded(device, lying.reshape(-1, lying.shape[2]), pad, np.nan)
            first = view[: lying.shape[1]]
            made.append((whole, first if order == "n" else first.T, first.nbytes))
            made[-1] = (*made[-1][:2], lying.shape[1] * view.strides[0])
        wholes, views, steps = zip(*made, strict=True)
        with device.using(stream):
            bind_stack(device, variant, *views, count, steps)(*views, stream)
            stream.synchronize()
        expected = np.full(wholes[2].shape, np.nan, dtype)
        product = a.astype("f4") @ b.astype("f4")
        expected[1:-1, :n] = product.reshape(count * m, n).astype(dtype)
        got = fetch(device, wholes[2]).astype("f4")
        np.testing.assert_array_equal(got, expected.astype("f4"), err_msg=str((m, n, k)))


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
