"""Calls of `gemm` that come again are carried out without another look at what cannot have changed,
and what may have changed decides as ever. GPUs are played."""

from unittest import mock

import numpy as np
import pytest
from support.played_runs import play, played_runner, small_runs

from hybrid_gemm.arrays.operand import CallerArrays
from hybrid_gemm.errors import DTypeError, OutOfMemoryError, UsageError
from hybrid_gemm.execution import native_executor
from hybrid_gemm.execution.device_memory import Layout
from hybrid_gemm.execution.plan_maker import PlanMaker

M, N, K = 36, 50, 26
WAYS = [
    {"threads": 1}, {"threads": 3, "split": "rows"},
    {"threads": 3, "split": "cols", "emulate_devices": 3},
    {"threads": 4, "grid": (2, 1, 2), "emulate_devices": 4},
]  # fmt: skip


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    small_runs(monkeypatch)


class Calls:
    """`gemm` of one runner on played devices; `looked` counts the calls that looked at all."""

    def __init__(self, monkeypatch, *, pinned=False, **options):
        play(monkeypatch, pinned=pinned)
        monkeypatch.setattr(PlanMaker, "most_hosted", 0)  # small ones are not copied whole
        self.runner, self.looked = played_runner(**options), 0
        real = CallerArrays.of

        def of(*args, **more):
            self.looked += 1
            return real(*args, **more)

        monkeypatch.setattr(CallerArrays, "of", of)

    def __call__(self, *args, **more):
        return self.runner.gemm(*args, **more)


def whole(rng, *shape):
    return rng.integers(-9, 9, shape).astype("f4")


def known(calls, a, b, **more):
    """Makes a call known: Python's, noted, native, and one that is not looked at."""
    for _ in range(3):
        calls(a, b, **more)
    before = calls.looked
    made = calls(a, b, **more)
    assert calls.looked == before
    return made


def test_a_tensor_as_alpha_may_change(rng, monkeypatch):
    torch = pytest.importorskip("torch")
    calls, alpha = Calls(monkeypatch, threads=2), torch.tensor(1.0)
    a, b = whole(rng, M, K), whole(rng, K, N)
    for factor in range(1, 6):
        alpha.fill_(factor)
        np.testing.assert_array_equal(calls(a, b, alpha=alpha), factor * (a @ b))


@pytest.mark.parametrize("pinned", [False, True])
@pytest.mark.parametrize("options", WAYS, ids=str)
def test_calls_that_come_again_are_not_looked_at(options, pinned, rng, monkeypatch):
    calls = Calls(monkeypatch, pinned=pinned, **options)
    for turned in (False, True):
        a, b = whole(rng, M, K), whole(rng, K, N)
        given = (a.T.copy(), b) if turned else (a, b)
        out = np.full((M, N), np.nan, "f4")
        for place in (None, out):
            more = {"out": place, "alpha": 2, "trans_a": turned}
            first = known(calls, *given, **more)
            np.testing.assert_array_equal(first, 2 * (a @ b))
            before = calls.looked
            for _ in range(3):  # other matrices that lie alike, elsewhere
                x, y = whole(rng, *given[0].shape), whole(rng, K, N)
                z = None if place is None else np.full((M, N), np.nan, "f4")
                made = calls(x, y, **more | {"out": z})
                assert z is None or made is z
                np.testing.assert_array_equal(made, 2 * ((x.T if turned else x) @ y))
            assert calls.looked == before


def test_a_square_of_one_matrix_is_known_as_such(rng, monkeypatch):
    calls = Calls(monkeypatch, threads=1)
    a, b = whole(rng, 40, 40), whole(rng, 40, 40)
    np.testing.assert_array_equal(known(calls, a, a), a @ a)
    np.testing.assert_array_equal(calls(a, b), a @ b)
    np.testing.assert_array_equal(known(calls, a, b), a @ b)
    np.testing.assert_array_equal(calls(b, b), b @ b)


def test_what_changed_decides(rng, monkeypatch):
    calls = Calls(monkeypatch, threads=1)
    a, b, out = whole(rng, 40, 40), whole(rng, 40, 40), np.zeros((40, 40), "f4")
    known(calls, a, b, out=out)
    out.flags.writeable = False
    with pytest.raises(UsageError, match="read-only"):
        calls(a, b, out=out)
    with pytest.raises(UsageError, match="out overlaps A"):
        calls(a, b, out=a)
    room = np.zeros(40 * 40 + 8, "f4")
    x, z = room[8:].reshape(40, 40), room[:-8].reshape(40, 40)
    x[...] = a
    with pytest.raises(UsageError, match="out overlaps B"):
        calls(a, x, out=z)
    for bad in (True, 1 + 0j):
        with pytest.raises(DTypeError, match="alpha must be a real number"):
            calls(a, b, alpha=bad, out=np.zeros((40, 40), "f4"))
    wide, strided = np.zeros((40, 40)), np.zeros((40, 80), "f4")[:, ::2]
    for place in (wide, strided):
        np.testing.assert_array_equal(calls(a, b, out=place), a @ b)
    apart = np.zeros((41, 41), "f4")[1:, 1:]
    apart[...] = a
    np.testing.assert_array_equal(calls(apart, b), a @ b)
    np.testing.assert_array_equal(calls(a, b, out, beta=0.0, out=np.empty_like(a)), a @ b)


def test_memory_that_is_page_locked_now_is_looked_at(rng, monkeypatch):
    calls = Calls(monkeypatch, threads=1)
    a, b = whole(rng, M, K), whole(rng, K, N)
    known(calls, a, b)
    monkeypatch.setattr(type(calls.runner.devices[0]), "reads", lambda device, array: True)
    before = calls.looked
    np.testing.assert_array_equal(calls(a, b), a @ b)
    assert calls.looked == before + 1
    np.testing.assert_array_equal(known(calls, a, b), a @ b)


def test_memory_that_is_not_there_again_is_planned_for(rng, monkeypatch):
    calls = Calls(monkeypatch, threads=1)
    a, b = whole(rng, M, K), whole(rng, K, N)
    known(calls, a, b)
    with monkeypatch.context() as patch:
        take, short = Layout.take, mock.Mock(side_effect=[MemoryError] * 2 + [mock.DEFAULT] * 9)
        patch.setattr(Layout, "take", lambda layout: short() and take(layout))
        before = calls.looked
        np.testing.assert_array_equal(calls(a, b), a @ b)
        assert calls.looked == before + 1 and short.called
    np.testing.assert_array_equal(known(calls, a, b), a @ b)


def test_memory_that_runs_out_in_a_known_call_is_an_error_that_names_the_product(rng, monkeypatch):
    calls = Calls(monkeypatch, threads=1)
    a, b = whole(rng, M, K), whole(rng, K, N)
    known(calls, a, b)
    short = mock.Mock(side_effect=MemoryError)
    monkeypatch.setattr(native_executor.NativeProgram, "carry_out", short)
    with pytest.raises(OutOfMemoryError, match=f"m={M} n={N} k={K}"):
        calls(a, b)
    assert short.called


def test_a_closed_runner_multiplies_nothing(rng, monkeypatch):
    calls = Calls(monkeypatch, threads=1)
    a, b = whole(rng, M, K), whole(rng, K, N)
    known(calls, a, b)
    calls.runner.close()
    with pytest.raises(UsageError, match="closed"):
        calls(a, b)


@pytest.mark.parametrize(
    ("options", "seed", "count"),
    [
        *((WAYS[i], seed, 40) for i, seed in enumerate((0, 2, 0))),
        *(pytest.param(way, 7, 500, marks=pytest.mark.campaign) for way in WAYS),
    ],
    ids=str,
)
def test_any_sequence_of_calls_equals_numpy(options, seed, count, monkeypatch):
    """Calls of a few layouts in random order, with other places, factors and faults in between."""
    calls, random = Calls(monkeypatch, **options), np.random.default_rng(seed)
    sides, served = [(36, 50, 26), (33, 20, 45)], 0
    for _ in range(count):
        m, n, k = sides[random.integers(len(sides))]
        turned, placed, alpha = (int(random.integers(2)) for _ in range(3))
        a, b = whole(random, *((k, m) if turned else (m, k))), whole(random, k, n)
        out = np.full((m, n), np.nan, "f4") if placed else None
        expected = (1 + alpha) * ((a.T if turned else a) @ b)
        more = {"alpha": 1 + alpha, "trans_a": bool(turned)}
        match random.integers(8):
            case 0:  # an addend, which is no such call
                c = whole(random, m, n)
                made, expected = calls(a, b, c, beta=3, out=out, **more), expected + 3 * c
            case 1 if placed:
                out.flags.writeable = False
                with pytest.raises(UsageError, match="read-only"):
                    calls(a, b, out=out, **more)
                continue
            case 2:  # columns apart
                b = np.repeat(b, 2, axis=1)[:, ::2]
                made = calls(a, b, out=out, **more)
            case _:
                before = calls.looked
                made = calls(a, b, out=out, **more)
                served += calls.looked == before
        assert out is None or made is out
        np.testing.assert_array_equal(made, expected)
    assert served > 4
