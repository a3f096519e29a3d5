"""Operands in parts, bit by bit as NumPy splits them, and the rules on which split is taken."""

import numpy as np
import pytest
from test_kernels import fetch, open_device
from test_tensor import FP16, LEAST_K, STRICT, TF32, data, multiply, to_tf32

from hybrid_gemm import catalog
from hybrid_gemm.devices import tensor_core_products as products


def exponents(x):
    return np.frexp(x)[1] - 1


def halves(rows, dtype):
    """hi and lo of each row, and the row's exponent, by NumPy."""
    largest = np.abs(rows).max(axis=1)
    top = {"float16": 14, "tfloat32": 50}[dtype]
    exponent = np.where(largest > 0, exponents(largest) - top, 0)
    x = np.ldexp(rows, -exponent[:, None]).astype("f4")
    round_to = np.float16 if dtype == "float16" else to_tf32
    hi = round_to(x).astype("f4")
    return hi, round_to(x - hi).astype("f4"), exponent


@pytest.fixture
def packed(monkeypatch):
    """What the product kernels were given, as NumPy arrays; nothing is multiplied."""
    seen = {}

    def product(self, dtype, parts, *_views):
        device = self.device

        def call(a, b, c, stream, exponents=None, verdict=None, wanted=-1):
            stream.synchronize()
            names = "A", "B"
            for name, x in zip(names, (a, b), strict=True):
                seen[dtype, name] = fetch(device, x.reshape(-1, x.shape[2])).reshape(x.shape)
            if verdict is not None:
                seen["verdict"] = fetch(device, verdict)[0, 0]
                seen[dtype, "exponents"] = [fetch(device, e[None])[0] for e in exponents]

        return call

    monkeypatch.setattr(products.PackedProduct, "multiply", product)
    return seen


@pytest.mark.parametrize("layout", catalog.LAYOUTS)
@pytest.mark.parametrize("kind", ["normal", "wide", "sparse", "huge", "ill-scaled"])
def test_operands_are_split_as_numpy_splits_them(kernel_device, packed, kind, layout):
    device, k = open_device(kernel_device), 517 if kind in ("wide", "huge") else 133
    a, b, verdict = data(kind, 37, 70, k)
    a[5] = 0
    multiply((device, "mma"), a, b, layout=layout, pad=layout.count("t"))
    assert packed["verdict"] == verdict
    dtype = ("float16", "tfloat32")[verdict]
    for name, rows, exponent in zip("AB", (a, b.T), packed[dtype, "exponents"], strict=True):
        hi, lo, expected = halves(rows, dtype)
        np.testing.assert_array_equal(exponent, expected)
        parts = packed[dtype, name].view("f2" if dtype == "float16" else "f4")
        assert parts.shape == (2, len(rows), -(-k // 64) * 64)
        assert not parts[:, :, k:].any()
        np.testing.assert_array_equal(parts[0, :, :k], hi)
        np.testing.assert_array_equal(parts[1, :, :k], lo)


def test_what_is_not_cut_short_keeps_22_bits():
    """The claim behind the rules: elements from 2^-17 of their row's largest exponent on."""
    rng = np.random.default_rng(1)
    x = (rng.uniform(1, 2, (64, 4096)) * 2.0 ** rng.integers(-17, 1, (64, 4096))).astype("f4")
    x[:, 0] = 1.5
    hi, lo, exponent = halves(x, "float16")
    error = np.abs(np.ldexp(hi.astype("f8") + lo, exponent[:, None]) - x)
    assert (error <= 2.0**-22 * x).all()
    hi, lo, exponent = halves(x, "tfloat32")
    error = np.abs(np.ldexp(hi.astype("f8") + lo, exponent[:, None]) - x)
    assert (error <= 2.0**-22 * x).all()


def rule(a, b):
    """The verdict by the rules, from NumPy's own counts."""
    k, found = a.shape[1], []
    for rows in (np.abs(a), np.abs(b.T)):
        rows = rows[rows.max(axis=1) > 0]
        if not np.isfinite(rows).all():
            return STRICT
        top = exponents(rows.max(axis=1))
        least = np.where(rows > 0, rows, np.inf).min(axis=1)
        low = np.where(least < 2.0**-126, -149, exponents(np.maximum(least, 2.0**-126)))
        e = np.where(rows > 0, exponents(rows), -999)
        large = (e >= top[:, None] - 6).sum(axis=1).min(initial=k)
        cut = ((e < top[:, None] - 17) & (rows > 0)).sum(axis=1).max(initial=0)
        reach = (top - low).max(initial=0)
        found.append((top.max(initial=-200), top.min(initial=200), reach, large, cut))
    (high_a, low_a, reach_a, large_a, cut_a), (high_b, low_b, reach_b, large_b, cut_b) = found
    doublings = int(np.ceil(np.log2(k)))
    if min(low_a, low_b) < -76 or max(high_a, high_b) > 96 or high_a + high_b + 2 + doublings > 127:
        return STRICT
    cut = int(cut_a) + int(cut_b)
    if cut == 0 or 8 * cut <= int(large_a) + int(large_b) - k:
        return FP16
    held = max(reach_a, reach_b) <= 153 and reach_a + reach_b <= 203 and doublings <= 24
    return TF32 if held and k >= LEAST_K else STRICT


@pytest.mark.parametrize("seed", range(12))
def test_the_verdict_follows_the_rules(kernel_device, packed, seed):
    """Rows with just so many elements cut short, large, zero or far apart."""
    rng = np.random.default_rng(seed)
    m, n, k = rng.integers(1, 90, 3)
    k = (k, LEAST_K - 1, LEAST_K, LEAST_K + k)[seed % 4]
    a, b = rng.uniform(1, 2, (m, k)), rng.uniform(1, 2, (k, n))
    for x in (a, b.T):
        row = rng.integers(len(x))
        count = rng.integers(0, k // 2 + 1)
        small = rng.choice(k, count, replace=False)
        x[row, small] *= 2.0 ** rng.choice([-6, -7, -17, -18, -100, -102, -130])
    if seed % 3 == 0:
        a *= 2.0 ** rng.choice([-77, -76, 60, 95])
        b *= 2.0 ** rng.choice([-30, 30, 60])
    a, b = a.astype("f4"), b.astype("f4")
    multiply((open_device(kernel_device), "mma"), a, b, layout="nt")
    assert packed["verdict"] == rule(a, b)
