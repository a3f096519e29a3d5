"""Slots that `free_memory` gives back while native threads copy through them."""

import weakref

import numpy as np
import pytest
from support.played_runs import WAYS, operands, play, played_runner, run, small_runs

from hybrid_gemm.execution import native_executor, staging, streamed
from hybrid_gemm.execution.streamed import NATIVE


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    small_runs(monkeypatch)


@pytest.mark.parametrize("call", ["first", "again"])
def test_buffers_given_back_meanwhile_stay_as_long_as_the_run(call, monkeypatch, rng):
    """`free_memory` in another thread: native threads copied through slots that were given back."""
    play(monkeypatch)
    runner, (a, b, _c) = played_runner(**WAYS[1]), operands(rng)
    if call == "again":
        assert run(runner, a, b).executor == NATIVE
    there, real = [], native_executor._wait

    def wait(*args):
        link = staging.link(runner.devices[0])
        rings = [weakref.ref(ring.native()) for ring in (link.up, link.down)]
        del link
        staging.drop_links()
        there.append([ring() is not None for ring in rings])
        real(*args)
        there.append(rings)

    with monkeypatch.context() as patched:
        patched.setattr(native_executor, "_wait", wait)
        result = run(runner, a, b)
    during, rings = there
    assert result.executor == NATIVE and during == [True, True]
    del result
    assert [ring() for ring in rings] == [None, None]
    for _ in "12":  # with other buffers
        after = run(runner, a, b)
        assert after.executor == NATIVE
        np.testing.assert_allclose(after.c, 2 * a @ b, rtol=1e-4, atol=1e-3)


def test_a_run_whose_buffers_are_gone_before_it_begins_is_python_s(monkeypatch, rng):
    play(monkeypatch)
    runner, (a, b, _c) = played_runner(**WAYS[1]), operands(rng)
    make_native = streamed.Streamed.make_native

    def dropped(*args):
        program = make_native(*args)
        staging.drop_links()
        return program

    with monkeypatch.context() as patched:
        patched.setattr(streamed.Streamed, "make_native", dropped)
        result = run(runner, a, b)
    assert result.executor == streamed.python(streamed.GIVEN_BACK)
    assert not streamed.is_settled(result.executor)
    np.testing.assert_allclose(result.c, 2 * a @ b, rtol=1e-4, atol=1e-3)
    assert run(runner, a, b).executor == NATIVE
