"""Operands in parts, bit by bit as NumPy splits them, and the rules on which split is taken."""

import numpy as np
import pytest
from support.arrays import fetch
from support.launches import recording_device
from support.tensor_cores import FP16, LEAST_K, STRICT, TF32, multiply, operands, to_tf32

from hybrid_gemm.errors import OutOfMemoryError


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
def device(kernel_device):
    made = recording_device(kernel_device)
    made.launched.clear()
    return made


def packed(device):
    """What the kernels that pack a product's operands wrote: for each dtype both operands in parts,
    and the exponents of their rows. And the verdict, which says which dtype is multiplied."""
    parts, exponents = {}, {}
    (halves,), (instead,) = device.of("halves"), device.of("strict")
    (m, n, *_), state = halves.args, halves.args[-1]
    rows = fetch(device, halves.args[9][None])[0].reshape(2, m + n)
    found = {"float16": halves.args[7:9], "tfloat32": instead.args[13:15]}
    verdict = fetch(device, state)[0, 0]
    for dtype, of_rows in zip(found, rows, strict=True):
        exponents[dtype] = of_rows[:m], of_rows[m:]
        if verdict == (FP16, TF32)[dtype == "tfloat32"]:
            parts[dtype] = [np.stack([fetch(device, part) for part in x]) for x in found[dtype]]
    return parts, exponents, verdict


@pytest.mark.parametrize(("kind", "layout"), [  # outside campaigns each kind and each layout twice
    pytest.param(kind, layout, marks=[pytest.mark.campaign] if (i + j) % 2 else [])
    for i, kind in enumerate(("normal", "wide", "sparse", "huge", "ill-scaled"))
    for j, layout in enumerate(("nn", "nt", "tt", "tn"))
])  # fmt: skip
def test_operands_are_split_as_numpy_splits_them(device, kind, layout):
    k = 517 if kind in ("wide", "huge") else 133
    a, b, wanted = operands(kind, 37, 70, k)
    a[5] = 0
    multiply((device, "mma"), a, b, layout=layout, pad=layout.count("t"))
    all_parts, exponents, verdict = packed(device)
    assert verdict == wanted
    dtype = ("float16", "tfloat32")[verdict]
    for parts, rows, exponent in zip(all_parts[dtype], (a, b.T), exponents[dtype], strict=True):
        hi, lo, expected = halves(rows, dtype)
        np.testing.assert_array_equal(exponent, expected)
        parts = parts.view("f2" if dtype == "float16" else "f4")
        assert parts.shape == (2, len(rows), -(-k // 64) * 64)
        assert not parts[:, :, k:].any()
        np.testing.assert_array_equal(parts[0, :, :k], hi)
        np.testing.assert_array_equal(parts[1, :, :k], lo)


def test_elements_that_are_not_cut_short_keep_22_bits():
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
def test_the_verdict_follows_the_rules(device, seed):
    """Some rows have so many elements cut short, large, zero or far apart that it is in doubt."""
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
    multiply((device, "mma"), a, b, layout="nt")
    *_parts, verdict = packed(device)
    assert verdict == rule(a, b)


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("small, most", [(-6, 64), (-7, 63)])
def test_so_many_elements_of_a_row_may_be_cut_short(device, small, most, swapped, rng):
    """One for 8 that are large: a ninth of k, and one less where 9 of the other operand are not."""
    for cut, wanted in ((most, FP16), (most + 1, TF32)):
        a, b = rng.uniform(1, 2, (40, 9 * 64)), rng.uniform(1, 2, (9 * 64, 50))
        a[7, rng.choice(9 * 64, cut, replace=False)] *= 2.0**-18
        b[rng.choice(9 * 64, 9, replace=False), 49] *= 2.0**small
        a, b = (b.T, a.T) if swapped else (a, b)
        a, b = a.astype("f4"), b.astype("f4")
        device.launched.clear()
        multiply((device, "mma"), a, b, layout="nt")
        *_parts, verdict = packed(device)
        assert verdict == rule(a, b) == wanted


@pytest.mark.parametrize("swapped", [False, True])
def test_the_smallest_element_that_is_not_cut_short(device, swapped):
    """It is whole from 2^-17 of the largest exponent on, and no bit below."""
    least = np.float32(2**-17)
    for small, wanted in ((least, FP16), (np.nextafter(least, np.float32(0)), TF32)):
        a, b = np.ones((40, LEAST_K), "f4"), np.ones((LEAST_K, 50), "f4")
        a[7, ::2] = small
        a, b = (b.T, a.T) if swapped else (a, b)
        device.launched.clear()
        multiply((device, "mma"), a, b, layout="nt")
        *_parts, verdict = packed(device)
        assert verdict == rule(a, b) == wanted


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize(
    ("tops", "k", "ranges", "wanted"),
    [
        ((96, 0), 16, (0, 0), FP16), ((97, 0), 16, (0, 0), STRICT),
        ((-76, 0), 16, (0, 0), FP16), ((-77, 0), 16, (0, 0), STRICT),
        ((60, 61), 16, (0, 0), FP16), ((60, 62), 16, (0, 0), STRICT),
        ((60, 61), 17, (0, 0), STRICT),
        ((4, 0), LEAST_K, (153, 0), TF32), ((5, 0), LEAST_K, (154, 0), STRICT),
        ((4, 0), LEAST_K, (153, 50), TF32), ((4, 0), LEAST_K, (153, 51), STRICT),
    ],
)  # fmt: skip
def test_the_verdict_turns_at_its_limits(device, tops, k, ranges, wanted, swapped):
    """Of the exponents of largest elements, and of how far below them a row's smallest are."""
    found = []
    for top, far in zip(tops, ranges, strict=True):
        rows = np.full((40, k), 2.0**top)
        rows[7, ::2] = 2.0 ** (top - far)
        found.append(rows.astype("f4"))
    a, b = found[::-1] if swapped else found
    multiply((device, "mma"), a, b.T, layout="nt")
    *_parts, verdict = packed(device)
    assert verdict == rule(a, b.T) == wanted


@pytest.mark.parametrize("step", ["scratch", "launch"])
def test_a_product_that_had_no_memory_leaves_nothing_to_the_next(device, monkeypatch, rng, step):
    """Its rows allowed no split; those of the next product allow one."""
    wide = np.ldexp(rng.uniform(1, 2, (40, 64)), rng.integers(-40, 40, (40, 64))).astype("f4")
    plain = rng.uniform(1, 2, (40, 300)).astype("f4")

    done = getattr(device, step)

    def full(*arguments):
        done(*arguments)  # as blocks of a launch that was made in part
        raise OutOfMemoryError("no memory")

    stream = device.stream()  # what is kept is kept with it
    monkeypatch.setattr(device, "stream", lambda: stream)
    with monkeypatch.context() as patch:
        patch.setattr(device, step, full)
        with pytest.raises(OutOfMemoryError):
            multiply((device, "mma"), wide, wide.T, layout="nt")
    device.launched.clear()
    multiply((device, "mma"), plain, plain.T, layout="nt")
    *_parts, verdict = packed(device)
    assert verdict == FP16
