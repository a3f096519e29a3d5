"""Integers on the CPU, in parts that are cast to float64: exact, whatever the parts."""

import numpy as np
import pytest

from hybrid_gemm.devices import cpu

SHAPES = [
    (700, 600, 3), (3, 3, 9001), (300, 5, 2100), (1, 9, 5000), (261, 70, 2049), (9000, 40, 1),
    (2, 70_000, 2), (257, 1, 4097),
]  # fmt: skip


@pytest.mark.parametrize("dtype", ["int32", "int64"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("most", [9, 60_000])
def test_parts_that_are_cast_are_exact(shape, dtype, most, rng, monkeypatch):
    """And wrap around, where sums are beyond 2^31."""
    monkeypatch.setattr(cpu, "CAST", 1 << 12)  # many parts
    m, n, k = shape
    a, b = (rng.integers(-most, most + 1, x).astype(dtype) for x in ((m, k), (k, n)))
    expected = (a.astype("i8") @ b.astype("i8")).astype(dtype)
    out = np.full((m, n), 7, dtype)
    for x, y in ((a, b), (np.asfortranarray(a), b[:, ::-1][:, ::-1])):
        np.testing.assert_array_equal(cpu.product(x, y, out), expected)
    if most > 9 and dtype == "int32" and k > 1000:
        assert (a.astype("f8") @ b.astype("f8") != expected).any()


def test_an_out_that_is_read_is_written_at_the_end(rng):
    a, b = rng.integers(-9, 10, (300, 300)), rng.integers(-9, 10, (300, 300))
    expected = a @ b
    for out in (a, b):
        kept = out.copy()
        np.testing.assert_array_equal(cpu.product(a, b, out), expected)
        out[...] = kept
