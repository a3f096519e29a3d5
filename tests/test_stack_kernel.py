"""The kernel for stacks: each variant, odd shapes, all layouts; exact, and nothing outside C
written. And which variant is taken."""

import numpy as np
import pytest
from support.arrays import fetch, integers, padded
from support.devices import open_device

from hybrid_gemm import catalog
from hybrid_gemm.devices.stack_products import bind_stack
from hybrid_gemm.kernel_choice.stacks import variant_for

VARIANTS = catalog.helper("stack").kernel.variants()
SHAPES = [
    (3, 32, 32, 32), (5, 33, 65, 17), (2, 130, 133, 21), (4, 1, 1, 1), (3, 7, 100, 40),
    (1, 64, 96, 3),
]  # fmt: skip


@pytest.mark.parametrize("layout", catalog.LAYOUTS)
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_products_of_a_stack(kernel_device, variant, layout, rng):
    if kernel_device == "emulator" and (VARIANTS.index(variant) + (layout in ("nn", "tt"))) % 2:
        pytest.skip("this variant is emulated in the other two layouts")
    device = open_device(kernel_device)
    stream = device.stream()
    for i, (count, m, n, k) in enumerate(SHAPES):
        pad, made = (0, 4, 3)[i % 3], []
        a, b = integers(rng, (count, m, k)), integers(rng, (count, k, n))
        c = np.full((count, m, n), np.nan, "f4")
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
        expected = np.full(wholes[2].shape, np.nan, "f4")
        expected[1:-1, :n] = (a @ b).reshape(count * m, n)
        np.testing.assert_array_equal(fetch(device, wholes[2]), expected, err_msg=str((m, n, k)))


def test_small_matrices_take_small_tiles():
    def tile(*sides):
        return variant_for(*sides, "float32", 132).tile

    assert tile(4096, 32, 32, 32) == (32, 32)
    assert tile(64, 512, 512, 512) == (128, 128)
    assert max(tile(10, 20, 20, 500)) == 32
