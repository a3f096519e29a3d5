"""Verdicts where matrices are looked at in many tiles, and where a part of C is one of several
strips: the same as of the whole."""

import itertools

import numpy as np
import pytest
from support.verdicts import both, product

from hybrid_gemm.problem import make_problem
from hybrid_gemm.verify import judge, sampling

pytestmark = pytest.mark.blas

SIDE = 16
M, N, K = 40, 36, 64  # three tiles each way, of which the last is smaller; K in whole places
INF = np.inf


@pytest.fixture
def small_tiles(monkeypatch):
    monkeypatch.setattr(sampling, "CHUNK", {True: SIDE**2, False: SIDE**2})


def drawn(rng, dtype: str, beta: float):
    """A problem, its matrices, and the right C."""

    def matrix(*shape):
        if dtype.startswith("int"):
            limits = np.iinfo(dtype)
            return rng.integers(limits.min, limits.max, shape, dtype, endpoint=True)
        x = rng.standard_normal(shape)
        return (x + 1j * rng.standard_normal(shape) if dtype[0] == "c" else x).astype(dtype)

    a, b, c = matrix(M, K), matrix(K, N), matrix(M, N)
    problem = make_problem(a, b, c, alpha=2, beta=beta)
    if not dtype.startswith("c"):
        return problem, a, b, c, product(problem, a, b, c)
    return problem, a, b, c, (2 * (a.astype("c16") @ b) + beta * c).astype(dtype)


def places():
    """One element of each tile."""
    return itertools.product((0, 20, M - 1), (3, 20, N - 1))


def changed(c, place):
    wrong = c.copy()
    wrong[place] += wrong.dtype.type(1 if c.dtype.kind == "i" else 100)
    return wrong


@pytest.mark.parametrize("dtype", ["float32", "complex64", "int32", "int64"])
@pytest.mark.parametrize("beta", [0, 3])
def test_a_wrong_element_of_any_tile_is_found(small_tiles, dtype, beta, rng):
    problem, a, b, c, right = drawn(rng, dtype, beta)
    for verdict in both(problem, a, b, c, right):
        assert verdict.passed, verdict
    for i, j in places():
        full, sums = both(problem, a, b, c, changed(right, (i, j)))
        assert not full.passed and not sums.passed, (i, j)
        if dtype.startswith("int"):
            assert full.where == f"row {i}, column {j} is wrong"
            assert sums.where in (f"row {i} is wrong", f"column {j} is wrong")
        else:
            assert f"C[{i}, {j}]" in full.where and f"C[{i}, {j}]" in sums.where


@pytest.mark.parametrize("dtype", ["float32", "float64", "complex64"])
@pytest.mark.parametrize("beta", [0, 3])
def test_tiles_change_no_bound(monkeypatch, dtype, beta, rng):
    problem, a, b, c, right = drawn(rng, dtype, beta)
    parts = [sampling.Part(problem, a, b, c, x) for x in (right, changed(right, (33, 21)))]
    for part, mode in itertools.product(parts, ("full", "auto")):
        monkeypatch.setattr("hybrid_gemm.verify.FULL_FLOPS", 0)
        worst = []
        for chunk in (2**18, SIDE**2):
            monkeypatch.setattr(sampling, "CHUNK", {True: chunk, False: chunk})
            again = sampling.Part(problem, a, b, c, part.result)
            worst.append(judge(again, sampling.ALONE, mode=mode, seed=1).worst)
        # What float32 rounds in the first look depends on tiles.
        assert worst[1] == pytest.approx(worst[0], rel=1e-3, abs=0 if worst[0] > 1 else 0.1)
        assert (worst[0] > 1) == (part is parts[1])


@pytest.mark.parametrize("where", ["a", "b"])
def test_inf_of_operands_is_held_in_any_tile(small_tiles, where, rng):
    problem, a, b, c, _right = drawn(rng, "float32", 3)
    if where == "a":
        a[33, 50] = INF
        spoiled = [(33, j) for j in (2, 20, N - 1)]
    else:
        b[50, 33] = INF
        spoiled = [(i, 33) for i in (2, 20, M - 1)]
    right = product(problem, a, b, c)
    for verdict in both(problem, a, b, c, right):
        assert verdict.passed, verdict
    for place in spoiled:
        assert np.isinf(right[place])
        for value in (-right[place], np.nan, 1.0):
            wrong = right.copy()
            wrong[place] = value
            for verdict in both(problem, a, b, c, wrong):
                assert not verdict.passed, (place, value)


EDGES = (0, 20, 31), (0, 18)  # strips of rows, and of columns, of a block


@pytest.mark.parametrize("dtype", ["float32", "int32", "int64"])
@pytest.mark.parametrize("beta", [0, 3])
@pytest.mark.parametrize("mode", ["full", "auto"])
def test_each_strip_is_held_against_its_own(small_tiles, dtype, beta, mode, rng, monkeypatch):
    monkeypatch.setattr("hybrid_gemm.verify.FULL_FLOPS", 0)
    problem, a, b, c, right = drawn(rng, dtype, beta)
    stops = [[*edges[1:], size] for edges, size in zip(EDGES, (M, N), strict=True)]
    strips = [
        (slice(top, stop), slice(left, end))
        for top, stop in zip(EDGES[0], stops[0], strict=True)
        for left, end in zip(EDGES[1], stops[1], strict=True)
    ]

    def verdict(result, rows, cols):
        part = sampling.Part(
            problem, a, b, c[rows, cols], result[rows, cols], rows.start, cols.start, *EDGES,
            origin=(1000, 2000),
        )  # fmt: skip
        return judge(part, sampling.ALONE, mode=mode, seed=1)

    assert all(verdict(right, *strip).passed for strip in strips)
    for i, j in [(19, 17), (20, 18), (39, 0), (30, 35)]:
        wrong = changed(right, (i, j))
        for rows, cols in strips:
            found = verdict(wrong, rows, cols)
            mine = rows.start <= i < rows.stop and cols.start <= j < cols.stop
            assert found.passed == (not mine), (i, j, rows, cols)
            if mine and dtype == "float32":
                assert f"C[{1000 + i}, {2000 + j}]" in found.where
            elif mine:
                assert f"row {1000 + i}" in found.where or f"column {2000 + j}" in found.where
