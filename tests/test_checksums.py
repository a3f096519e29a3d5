"""The sums by which products are checked: kernels make those that the host makes, and both are
what they should be."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from support.devices import needs, open_device

from hybrid_gemm.devices import native_sums
from hybrid_gemm.devices.checksums import (
    GROUPS,
    ExactLimits,
    KernelChecksums,
    Limits,
    Sums,
    width,
)
from hybrid_gemm.devices.emulator import program as emulation
from hybrid_gemm.devices.emulator.device import EmulatorDevice
from hybrid_gemm.devices.host_checksums import HostChecksums


def test_kernels_sum_as_numpy_does(kernel_device, rng):
    device = open_device(kernel_device)
    stream, sums, host = device.stream(), KernelChecksums(device), HostChecksums(open_device("cpu"))
    # Products of each dtype in each order are below.
    for dtype, orders in {"float32": "nt", "float64": "n", "float16": "t", "int32": "t",
                          "int64": "n"}.items():  # fmt: skip
        for rows, cols in ((1, 1), (37, 5), (130, 515), (64, 256)):
            for order in orders:
                x = (40 * rng.standard_normal((rows, cols))).astype(dtype)
                exact = x.dtype.kind == "i"
                with device.using(stream):
                    there = device.empty_like(x if order == "n" else np.asfortranarray(x), dtype)
                    device.copy(there, np.asfortranarray(x) if order == "t" else x, stream)
                    found = sums.sums(there, stream)
                    through = sums.product(there.T, there, stream).whole()
                    bits = sums.bits(there, stream)
                    kind = "odd" if exact else "float"
                    weights = {n: _host(w) for n, w in sums.weights._kept.items()}
                    host.weights._kept.update(weights)
                    stream.synchronize()
                assert any(n[1] == kind for n in weights)
                assert (bits == host.bits(x, stream)).all()
                wanted = host.sums(x, stream)
                same = np.array_equal if exact else np.allclose
                assert same(_host(found.of), wanted.of)
                assert same(_host(found.second), wanted.second)
                product = host.product(x.T, x, stream)
                assert same(_host(through.of), product.of)
                squares = product.second if exact else x.T.astype("f8") ** 2 @ wanted.second
                assert same(_host(through.second), squares)


@pytest.mark.parametrize(("dtype", "order"), [("float32", "n"), ("int32", "n"), ("float16", "t")])
def test_sums_of_many_rows_and_over_many_shares(kernel_device, rng, dtype, order):
    """Blocks have several groups, and a product more shares of k than one of many rows has."""
    device = open_device(kernel_device)
    stream, sums, host = device.stream(), KernelChecksums(device), HostChecksums(open_device("cpu"))
    x = (40 * rng.standard_normal((40_000, 13))).astype(dtype)
    x = x if order == "n" else np.asfortranarray(x)
    with device.using(stream):
        there = device.empty_like(x, dtype)
        device.copy(there, x, stream)
        found, product = sums.sums(there, stream), sums.product(there.T, there, stream)
        stream.synchronize()
    assert product.of.shape[0] == 157
    host.weights._kept.update({n: _host(w) for n, w in sums.weights._kept.items()})
    wanted, through = host.sums(x, stream), host.product(x.T, x, stream)
    same = np.array_equal if x.dtype.kind == "i" else np.allclose
    assert same(_host(found.of), wanted.of) and same(_host(found.second), wanted.second)
    assert same(_host(product.whole().of), through.of)


@pytest.mark.parametrize(("alone", "of_a", "of_b", "dtype"), [  # each pair of their values
    (i % 2 == j // 2, *order, dtype)
    for i, dtype in enumerate(("float32", "float16", "float64", "int32"))
    for j, order in enumerate(("nn", "nt", "tn", "tt"))
])  # fmt: skip
def test_warps_sum_up_rows_of_b_that_they_need(
    kernel_device, rng, monkeypatch, dtype, of_a, of_b, alone
):
    """As others do once for all. Few rows are those of several teams of a block."""
    monkeypatch.setattr(KernelChecksums, "_alone", lambda *_: alone)
    device = open_device(kernel_device)
    stream, sums, host = device.stream(), KernelChecksums(device), HostChecksums(open_device("cpu"))
    same = np.array_equal if dtype == "int32" else np.allclose
    for m, n, k in ((1, 1, 3000), (33, 70, 200), (65, 9, 1111), (130, 64, 96), (300, 150, 40)):
        a, b = ((9 * rng.standard_normal(s)).astype(dtype) for s in ((m, k), (k, n)))
        with device.using(stream):
            there = []
            for x, order in ((a, of_a), (b, of_b)):
                x = x if order == "n" else np.asfortranarray(x)
                there.append(device.empty_like(x, dtype))
                device.copy(there[-1], x, stream)
            found = sums.product(*there, stream)
            stream.synchronize()
        host.weights._kept.update({x: _host(w) for x, w in sums.weights._kept.items()})
        wanted = host.product(a, b, stream)
        of_rows = host.sums(b, stream).second
        squares = wanted.second if dtype == "int32" else a.astype("f8") ** 2 @ of_rows
        assert same(_host(found.whole().of), wanted.of)
        assert same(_host(found.whole().second), squares)


@pytest.mark.parametrize("dtype", ["float32", "float16", "int64"])
@pytest.mark.parametrize("order", "nt")
def test_blocks_share_few_long_rows(kernel_device, rng, dtype, order):
    device = open_device(kernel_device)
    stream, sums, host = device.stream(), KernelChecksums(device), HostChecksums(open_device("cpu"))
    same = np.array_equal if dtype == "int64" else np.allclose
    for rows, cols in ((1, 50_001), (3, 4_097), (70, 17_000)):
        x = (40 * rng.standard_normal((rows, cols))).astype(dtype)
        x = x if order == "n" else np.asfortranarray(x)
        with device.using(stream):
            there = device.empty_like(x, dtype)
            device.copy(there, x, stream)
            found = [sums.sums(there, stream) for _ in "12"]  # which leave flags as they were
            stream.synchronize()
        host.weights._kept.update({n: _host(w) for n, w in sums.weights._kept.items()})
        wanted = host.sums(x, stream)
        for of, second in found:
            assert same(_host(of), wanted.of)
            assert same(_host(second), wanted.second)


@needs("emulator")
def test_threads_that_share_a_stream_share_its_flags(rng):
    """As a worker's, which bring and give back on one stream: blocks of two launches at once would
    count each other in."""
    device = open_device("emulator")
    sums, stream = KernelChecksums(device), device.stream()
    given = [rng.integers(0, 2**32, (3, 20_000), np.uint32) for _ in range(2)]
    wanted = [sums.lines(x, stream).tolist() for x in given]
    with ThreadPoolExecutor(2) as threads:
        found = list(threads.map(lambda i: sums.lines(given[i % 2], stream).tolist(), range(60)))
    assert found == wanted * 30


@pytest.mark.parametrize("shares", [1, 7, 8, 19, 130])
@pytest.mark.parametrize("rows", [1, 5, 33, 300])
def test_each_sum_that_is_beyond_its_limits_is_counted(kernel_device, rng, rows, shares):
    device = open_device(kernel_device)
    limits = Limits(3.0, 0.5, 1e-20, 1e-20, 1e-20, 1e-20, 1e-9)
    product = rng.standard_normal((shares, rows, GROUPS))
    before = rng.standard_normal((rows, GROUPS))
    got = 3 * product.sum(axis=0) + 0.5 * before
    wrong = rng.random(got.shape) < 0.3
    wrong.flat[-1] = True
    got[wrong] += 1e-3
    squares = np.ones_like(product), np.ones_like(got), np.ones_like(got)
    of = product, squares[0], before, squares[1], got, squares[2]
    assert counted_beyond(device, limits, of) == wrong.sum()


@pytest.mark.parametrize("beta", [0, -0.5])
def test_each_part_of_a_limit_counts(kernel_device, rng, beta):
    """Errors about as large as the limit, which one part of it makes, or all do."""
    device = open_device(kernel_device)
    product, before = rng.standard_normal((2, 1, 40, GROUPS))
    seconds, old, new = 0.5 + rng.random((3, 1, 40, GROUPS))
    for parts in (*(0.01 + np.eye(5)), np.ones(5)):
        limits = Limits(3.0, beta, *parts)
        of_products, of_sums, of_c, of_before, tiny = parts
        added = beta * beta * old
        variance = of_products * seconds + of_c * new + of_before * added
        variance += of_sums * (2 * (new + added) if beta else new)
        error = (tiny + np.sqrt(variance)) * rng.uniform(0, 2, new.shape)
        got = 3 * product + beta * before + error * rng.choice([-1, 1], new.shape)
        given = product, seconds, before[0], old[0], got[0], new[0]
        beyond = np.abs(got - 3 * product - beta * before) - tiny > np.sqrt(variance)
        assert counted_beyond(device, limits, given) == beyond.sum()


@pytest.mark.parametrize("what", [np.nan, np.inf, 1e301])
@pytest.mark.parametrize("at", range(6))
def test_a_sum_that_no_limit_holds_is_beyond(kernel_device, at, what):
    given = [np.ones((1, 3, GROUPS)) for _ in range(6)]
    limits = Limits(0.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0)
    given[at][0, 1, 2] = what
    of = given[0], given[1], *(x[0] for x in given[2:])
    beyond = 0 if (at, what) == (0, 1e301) else 1
    assert counted_beyond(open_device(kernel_device), limits, of) == beyond


@pytest.mark.parametrize("beta", [0, 2**64 - 7])
@pytest.mark.parametrize("bits", [32, 64])
@pytest.mark.parametrize("shares", [1, 7, 8, 130])
@pytest.mark.parametrize("rows", [1, 33, 300])
def test_each_sum_of_integers_that_differs_is_counted(
    kernel_device, rng, rows, shares, bits, beta
):  # fmt: skip
    """In one bit of C's, of one of the two sums; bits beyond those of C may differ."""
    device = open_device(kernel_device)
    limits = ExactLimits(2**64 - 3, beta, 2**bits - 1)
    one, another = (
        rng.integers(0, 2**64, shape, np.uint64)
        for shape in ((2, shares, rows, GROUPS), (2, rows, GROUPS))
    )
    got = np.uint64(limits.alpha) * one.sum(axis=1) + np.uint64(beta) * another
    wrong = rng.random(got.shape) < 0.2
    wrong.flat[-1] = True
    flipped = np.uint64(1) << rng.integers(0, bits, got.shape, np.uint64)
    got ^= np.where(wrong, flipped, np.uint64(0))
    if bits == 32:
        got ^= rng.integers(0, 2**32, got.shape, np.uint64) << np.uint64(32)
    of = one[0], one[1], another[0], another[1], got[0], got[1]
    assert counted_beyond(device, limits, of) == wrong.any(axis=0).sum()


def counted_beyond(device, limits, given):
    """How many sums the judge finds beyond: of the product, C before and C, and second ones."""
    stream, sums, there = device.stream(), KernelChecksums(device), []
    with device.using(stream):
        for x in given:
            flat = np.ascontiguousarray(x.reshape(-1, GROUPS))
            there.append(device.empty(*flat.shape, x.dtype.name))
            device.copy(there[-1], flat, stream)
        number, lock, place = sums.alarm()
        with lock:
            product, before, got = (Sums(*there[i : i + 2]) for i in (0, 2, 4))
            sums.count_beyond(limits, product, before, got, place, stream)
            stream.synchronize()
    return number[0]


@needs("emulator")
@pytest.mark.parametrize("dtype", ["float16", "float32", "int64"])
@pytest.mark.parametrize("order", "nt")
def test_sums_do_not_depend_on_the_order_of_threads(dtype, order, rng, monkeypatch):
    """Which would show a race."""
    a, b = ((40 * rng.standard_normal(s)).astype(dtype) for s in ((70, 600), (600, 90)))
    if order == "t":
        a, b = np.asfortranarray(a), np.asfortranarray(b)
    found, kept = [], None
    for threads in emulation.ORDERS:
        device = EmulatorDevice(options=emulation.Options(order=threads, seed=3))
        sums, stream = KernelChecksums(device), device.stream()
        kept = sums.weights._kept = sums.weights._kept if kept is None else kept
        made = [*sums.sums(b, stream), *sums.sums(b.T.reshape(1, -1), stream)]
        for alone in (True, False):
            monkeypatch.setattr(KernelChecksums, "_alone", lambda *_, alone=alone: alone)
            made += sums.product(a, b, stream)
        found.append([x.tobytes() for x in made])
    assert found[0] == found[1] == found[2]


def _host(x):
    return x if isinstance(x, np.ndarray) else x.get()


@pytest.mark.parametrize(("rows", "cols"), [(1, 1), (5, 70), (700, 333), (33, 0), (0, 9)])
@pytest.mark.parametrize("order", "CF")
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("compiler", [True, False])
def test_the_host_sums_what_it_should(rng, rows, cols, order, dtype, compiler, monkeypatch):
    if not compiler:
        monkeypatch.setattr(native_sums, "unavailable", lambda: "no compiler")
        for name in ("weighted", "product"):
            monkeypatch.setattr(native_sums, name, lambda *_: pytest.fail("it was called"))
    sums = HostChecksums(open_device("cpu"))
    x = np.asarray(rng.standard_normal((rows, cols)), dtype, order=order)
    if rows > 6:
        x[3, -1:], x[4, :1] = np.nan, np.inf  # of their rows and groups alone
    weights = sums.weights.of(cols, exact=False)[:cols]
    groups = [slice(g * width(cols), (g + 1) * width(cols)) for g in range(GROUPS)]
    with np.errstate(all="ignore"):
        terms = x.astype("f8") * weights
        of = np.stack([terms[:, g].sum(axis=1) for g in groups], 1)
        second = np.stack([(terms[:, g] ** 2).sum(axis=1) for g in groups], 1)
        found = sums.sums(x, None)
        np.testing.assert_allclose(found.of, of, rtol=1e-12, atol=1e-12)
        np.testing.assert_allclose(found.second, second, rtol=1e-12)
        product = sums.product(x.T, x, None)
        wanted = x.T.astype("f8") @ of
        np.testing.assert_allclose(product.of, wanted, rtol=1e-11, atol=1e-11)
        wanted = x.T.astype("f8") ** 2 @ second.max(axis=1, keepdims=True)
        np.testing.assert_allclose(product.second, wanted, rtol=1e-11)


def test_groups_cover_all_columns():
    for cols in (1, 3, 31, 32, 33, 100, 8192, 8193):
        assert width(cols) % 8 == 0 and (GROUPS - 1) * width(cols) < cols + 64
        assert GROUPS * width(cols) >= cols
