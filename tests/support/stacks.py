"""Products of stacks by our kernels, on any device that runs kernels."""

import numpy as np

from hybrid_gemm import catalog
from hybrid_gemm.devices.stack_products import bind_stack

from .arrays import fetch, integers, padded

CASES = [(v, "float32") for v in catalog.helper("stack").kernel.variants()]
CASES += [
    (v, dtype)
    for v in catalog.helper("stack_mma").kernel.variants()
    for dtype in ("float16", "bfloat16")
]
SHAPES = [
    (3, 32, 32, 32), (5, 33, 65, 17), (2, 130, 133, 21), (4, 1, 1, 1), (3, 7, 100, 40),
    (1, 64, 96, 3), (2, 140, 270, 19),
]  # fmt: skip


def check_stack(device, variant, dtype: str, layout: str, rng) -> None:
    """Products of stacks of odd shapes by a variant: exact, and nothing outside C written."""
    stream = device.stream()
    for i, (count, m, n, k) in enumerate(SHAPES):
        made = []
        skip = 4 if i % 5 == 4 else 0  # lines lie 16 bytes apart, and begin between
        a, b = integers(rng, (count, m, k)), integers(rng, (count, k, n))
        a, b = (x.clip(-1, 1).astype(dtype) if dtype != "float32" else x for x in (a, b))
        c = np.full((count, m, n), np.nan, dtype)
        for x, order in zip((a, b, c), (*layout, "n"), strict=True):
            # One matrix below the other: rows of all of them, in the order in which they lie.
            lying = x if order == "n" else x.swapaxes(1, 2)
            lines = lying.reshape(-1, lying.shape[2])
            lines = np.pad(lines, ((0, 0), (skip, 0)), constant_values=np.nan)
            pad = -lines.shape[1] % 8 if skip else (0, 4, 3)[i % 3]
            whole, view = padded(device, lines, pad, np.nan)
            first = view[: lying.shape[1], skip:]
            made.append((whole, first if order == "n" else first.T, first.nbytes))
            made[-1] = (*made[-1][:2], lying.shape[1] * view.strides[0])
        wholes, views, steps = zip(*made, strict=True)
        with device.using(stream):
            bind_stack(device, variant, *views, count, steps)(*views, stream)
            stream.synchronize()
        expected = np.full(wholes[2].shape, np.nan, dtype)
        product = a.astype("f4") @ b.astype("f4")
        expected[1:-1, skip : skip + n] = product.reshape(count * m, n).astype(dtype)
        got = fetch(device, wholes[2]).astype("f4")
        np.testing.assert_array_equal(got, expected.astype("f4"), err_msg=str((m, n, k)))
