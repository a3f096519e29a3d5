"""One row or one column by `gemv` and `gemv_narrow`, on any device that runs kernels."""

import numpy as np

from hybrid_gemm import catalog
from hybrid_gemm.catalog import Variant

from .arrays import fetch, integers, padded

STRICT, NARROW = catalog.get("gemv"), catalog.get("gemv_narrow")
CASES = [(v, dtype) for v in STRICT.variants() for dtype in ("float32", "float64")]
CASES += [(v, dtype) for v in NARROW.variants() for dtype in ("float16", "bfloat16")]
# Sides beside k, k, and what rows have beyond their length: rows on 16 bytes, on 4, on neither.
SHAPES = [(70, 300, 0), (64, 520, 8), (301, 34, 2), (33, 1031, 1), (1, 4096, 0), (700, 1, 4)]


def few_blocks(variant: Variant) -> Variant:
    """The variant where blocks share k as soon as they can."""
    return variant.kernel.variant({**variant.params, "KIB": 1})


def check_lines(device, variant, dtype: str, layout: str, rng) -> None:
    """Rows and columns of odd lengths by a variant: exact, and nothing outside C written."""
    stream = device.stream()
    out = "float32" if variant.params.get("OUT") == 4 else dtype
    for i, (length, k, pad) in enumerate(SHAPES):
        m, n = ((1, length), (length, 1))[(i + len(dtype)) % 2]
        a, b = integers(rng, (m, k)), integers(rng, (k, n))
        if variant.name == NARROW.name:
            a, b = a.clip(-1, 1), b.clip(-1, 1)
        old = np.full((m, n), np.nan if i % 3 else 2, out)
        views = [
            padded(device, x.astype(dtype) if y == "n" else x.T.astype(dtype), pad, np.nan)[1]
            for x, y in zip((a, b), layout, strict=True)
        ]
        views = [x if y == "n" else x.T for x, y in zip(views, layout, strict=True)]
        whole, c = padded(device, old, pad, np.nan)
        beta = 0 if i % 3 else 3
        with device.using(stream):
            device.gemm(variant, *views, c, alpha=-1, beta=beta, stream=stream)
            stream.synchronize()
        expected = np.full(whole.shape, np.nan)
        product = (-a.astype("f4") @ b.astype("f4") + (6 if beta else 0)).astype(out)
        expected[1:-1, :n] = product
        got = fetch(device, whole).astype("f8")
        np.testing.assert_array_equal(got, expected, err_msg=str((m, n, k, pad)))
