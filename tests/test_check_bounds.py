"""Checked products have the bounds of docs/notes/verification.md, wherever sums are judged."""

import dataclasses
import math
from types import SimpleNamespace

import numpy as np
import pytest
from support.devices import open_device

from hybrid_gemm.devices.checksums import GROUPS, KernelChecksums, Sums, width
from hybrid_gemm.execution import checked_device
from hybrid_gemm.execution.checked_device import CheckedDevice
from hybrid_gemm.execution.checked_work import CheckedWork
from hybrid_gemm.execution.checks import Expected, FloatBounds
from hybrid_gemm.problem import Problem
from hybrid_gemm.verify import rounding

M, N, K = 5, 200, 300
CASES = {
    "float32": (Problem(M, N, K, alpha=3.0), None),
    "with C": (Problem(M, N, K, alpha=-3.0, beta=2.0), None),
    "float64": (Problem(M, N, K, "float64", alpha=0.5, beta=-2.0), None),
    "float16": (Problem(M, N, K, "float32", 3.0, 2.0, "float16", "fp32", "float16"), None),
    "tf32": (Problem(M, N, K, alpha=3.0, compute="tf32"), None),
    "partials": (Problem(M, N, 7, alpha=3.0, beta=2.0), 7),
}


@pytest.fixture(params=CASES)
def case(request, rng):
    """The bounds of a problem, right sums, the squares of C, and the limit L of each sum."""
    problem, parts = CASES[request.param]
    out = np.dtype(problem.out_dtype)
    bounds = FloatBounds(problem, out, parts)
    product = Sums(rng.normal(0, 1e-3, (M, GROUPS)), 1 + rng.random((M, 1)))
    before = Sums(rng.normal(0, 1e-3, (M, GROUPS)), 1 + rng.random((M, GROUPS)))
    alpha, beta = problem.alpha, problem.beta
    right = alpha * product.of + beta * before.of
    squares = 1 + rng.random((M, GROUPS))  # S
    of_sums = 2 * (squares + beta**2 * before.second) if beta else squares  # S'
    v1, v2, v3, v4 = bounds.variances
    if parts:
        assert v1 == pytest.approx((parts * rounding.of(problem, out).unit) ** 2, abs=0)
    noise = alpha**2 * v1 * product.second + v2 * of_sums + v3 * squares
    noise = noise + v4 * beta**2 * before.second
    t = rounding.deviations(8 * M) * rounding.of_block(width(N))
    limit = t * np.sqrt(noise / 3) + 4 * width(N) * rounding.of(problem, out).tiny
    return bounds, Expected(product, before if beta else None), right, squares, limit


@pytest.mark.parametrize("sign", [-1, 1])
def test_sums_pass_up_to_the_limit(case, sign):
    bounds, expected, right, squares, limit = case
    device = open_device("emulator")
    stream = device.stream()
    kernel = KernelChecksums(device).judge
    for share, wrong in ((0.999, 0), (1.001, M * GROUPS)):
        got = Sums(right + sign * share * limit, squares)
        judged = bounds.judge(expected, got)
        assert judged.bad.sum() == wrong
        np.testing.assert_allclose(judged.bound, limit)
        second = np.tile(expected.product.second, GROUPS)
        shares = Sums(expected.product.of[None], second[None])
        assert kernel(bounds.limits, shares, expected.before, got, stream) == bool(wrong)


def test_what_comes_again_passes_up_to_the_worst_case(case):
    bounds, expected, right, squares, limit = case
    r = bounds.rounding
    of_products = abs(bounds.alpha) * np.sqrt(bounds.k * expected.product.second)
    of_c = np.sqrt(squares)
    if bounds.beta:
        of_c = of_c + abs(bounds.beta) * np.sqrt(expected.before.second)
    worst = (2 * (bounds.k + 3) * r.unit + r.operands + r.cut * bounds.k) * of_products
    worst = limit + math.sqrt(width(N)) * (worst + (r.unit + r.out + 3 * r.last) * of_c)
    for share, impossible in ((0.999, False), (1.001, True)):
        got = Sums(right + share * worst, squares)
        found = bounds.explained(bounds.judge(expected, got), expected, got)
        assert found.bad.all() and (found.impossible == impossible).all()


def test_sums_on_a_device_have_the_bounds_of_their_partials(monkeypatch):
    monkeypatch.setattr(checked_device, "CheckedWork", lambda *x: SimpleNamespace(run=x))
    partials, out = [np.zeros((M, N), "f4") for _ in range(7)], np.zeros((M, N), "f4")
    device = CheckedDevice(open_device("cpu"))
    *_, bounds, operands = device.bound_sum(partials, out, alpha=3.0, beta=2.0)
    assert operands is None and vars(bounds) == vars(
        FloatBounds(CASES["partials"][0], out.dtype, 7)
    )


def test_variances_of_roundings():
    """Those of docs/notes/verification.md, three times: of a sum of k products, each term by
    itself."""
    none = dict.fromkeys((x.name for x in dataclasses.fields(rounding.Rounding)), 0.0)
    k, width = 6, 2**16
    reference = 2.0**-106 * width  # of what is compared with, in float64
    for found, expected in (
        ({"unit": 2.0**-10, "growth": 4.0}, (3 * 2.0**-16, 2 * 2.0**-16, 0, 0)),
        ({"cut": 2.0**-12}, (54 * 2.0**-24, 36 * 2.0**-24, 0, 0)),
        ({"operands": 2.0**-11}, (2.0**-22, 0, 0, 0)),
        ({"last": 2.0**-10}, (0, 2 * 2.0**-20, 2.0**-20, 2 * 2.0**-20)),
        ({"out": 2.0**-9}, (0, 0, 2.0**-18, 0)),
    ):
        v = rounding.Rounding(**{**none, **found}).variances(k, width)
        assert v == pytest.approx(np.add(expected, (reference, reference, 0, 0)), rel=1e-12)


def test_the_worst_case_of_sums():
    """Of 6 products in any order, whose magnitudes add up to 10."""
    none = dict.fromkeys((x.name for x in dataclasses.fields(rounding.Rounding)), 0.0)
    for found, expected in (
        ({"unit": 2.0**-10, "growth": 4.0}, 18 * 2.0**-8 * 10),
        ({"operands": 2.0**-11}, 2.0**-11 * 10),
        ({"cut": 2.0**-12}, 2.0**-12 * 6 * 10),
    ):
        bound = rounding.Rounding(**{**none, **found})
        assert bound.worst(10.0, 6) == pytest.approx(expected, rel=1e-12)
        assert bound.worst(0.0, 6) == 0


def test_the_largest_errors_of_a_block_are_within_its_bound(rng):
    """Uniform ones; and of wide blocks the bound is near what is expected."""
    for wide, factor in ((16, math.sqrt(3)), (400, 1.2), (2**16, 1.02)):
        largest = np.sqrt(3 * np.square(rng.uniform(-1, 1, (64, wide))).mean(1)).max()
        assert largest < rounding.of_block(wide) <= factor


@pytest.mark.parametrize("beta", [0.0, 3.0])
def test_what_was_made_already_is_made_again_only_where_it_is_wrong(rng, beta):
    """As after a small product's native calls on a GPU, with a copy of C before."""
    device = CheckedDevice(open_device("cpu"))
    a, b, before = [(4 * rng.standard_normal(x)).astype("f4") for x in ((M, K), (K, N), (M, N))]
    right, made = a @ b + np.float32(beta) * before, []

    def make(_stream):
        made.append(c.tobytes() == before.tobytes())
        c[...] = right

    def sums(stream):
        return device.sums.product(a, b, stream)

    for wrong in (False, True):
        c = right.copy()
        if wrong:
            c[-1, -1] += 100
        bounds = FloatBounds(Problem(M, N, K, beta=beta), c.dtype)
        work = CheckedWork(device, c, beta, make, sums, bounds, (a, b))
        work.run(device.stream(), made=True, before=before if beta else None)
        assert c.tobytes() == right.tobytes() and made == [beta != 0] * wrong
    assert device.tally.products == 2 and device.tally.repeated == 1
    (found,) = device.tally.faults
    assert (found.rows, found.cols[1]) == ((M - 1, M), N)
