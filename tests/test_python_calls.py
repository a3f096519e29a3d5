"""Calls from Python as programs make them: what an error shows, and what options may be."""

import sys
import traceback
import types

import numpy as np
import pytest
from support.command import python

import hybrid_gemm as hg
from hybrid_gemm.errors import OptionTypeError, UsageError
from hybrid_gemm.programs import signature

A = np.arange(1, 10.0).reshape(3, 3)


@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        ((A, A[:2]), {}), ((A > 0, A), {}), ((A, A), {"alpha": "x"}), ((A, A), {"threads": "x"}),
        ((A, A), {"grid": [1, 2]}), ((A, A), {"params": {"BM": 1}}), ((A, A), {"checked": 1}),
        ((A, A), {"thread": 1}), ((A, A), {"out": A}), ((A, A), {"rounds": 1}),
    ],
    ids=repr,
)  # fmt: skip
def test_an_error_is_the_only_one_that_a_caller_sees(arguments, options):
    """What was looked up in vain before, such as a call that is not known yet, is none."""
    with pytest.raises((TypeError, ValueError)) as caught:
        hg.gemm(*arguments, device="cpu", **options)
    shown = "".join(traceback.format_exception(caught.value))
    assert shown.count("Traceback") == 1, shown


def test_truth_values_of_numpy_are_taken():
    np.testing.assert_array_equal(hg.gemm(A, A, device="cpu", checked=np.True_), A @ A)
    with hg.Runner(device="cpu", checked=np.False_) as runner:
        assert runner.options.checked is False
        np.testing.assert_array_equal(runner.run(A, A, resident=np.True_).c, A @ A)


MANY = np.ones((30, 30))


@pytest.mark.parametrize(
    "options",
    [
        {"alpha": MANY}, {"beta": MANY}, {"trans_a": MANY}, {"threads": MANY}, {"split": MANY},
        {"checked": MANY}, {"comm": MANY}, {"threads": MANY.tolist()}, {"alpha": "9" * 1000},
    ],
    ids=lambda options: next(iter(options)),
)  # fmt: skip
def test_what_is_long_is_not_shown_whole(options):
    (name,), (value,) = options.keys(), options.values()
    with pytest.raises(TypeError, match=name) as caught:
        hg.gemm(A, A, A, **({"device": "cpu"} | options))
    text = str(caught.value)
    assert "\n" not in text and len(text) < 300
    assert ("an array of shape (30, 30)" in text) == (value is MANY)


FIRST_CALLS = """
import importlib.machinery, sys, threading
import numpy as np
from hybrid_gemm import free_memory, gemm, plan

begun, may_end = threading.Event(), threading.Event()

def slowly(spec):
    begun.set()
    assert may_end.wait(10)

class Slow:  # as a package is that comes over a network
    def find_spec(self, name, path=None, target=None):
        if name == sys.argv[1]:
            spec = importlib.machinery.PathFinder.find_spec(name, path, target)
            spec.loader.create_module = slowly
            return spec

sys.meta_path.insert(0, Slow())
a = np.ones((3, 3))
threads = [
    threading.Thread(target=gemm, args=(a, a), kwargs={"device": "cpu"}),
    threading.Thread(target=free_memory),
    threading.Thread(target=plan, args=(3, 3, 3), kwargs={"device": "cpu"}),
]
threads[0].start()
assert begun.wait(10)
for other in threads[1:]:
    other.start()
    other.join(0.2)  # it waits for what the first one imports
may_end.set()
for thread in threads:
    thread.join()
"""


@pytest.mark.parametrize("package", ["devices", "catalog"])
def test_first_calls_of_several_threads_at_once(package):
    done = python("-c", FIRST_CALLS, f"hybrid_gemm.{package}", timeout=60)
    assert done.returncode == 0 and not done.stderr, done.stderr


@pytest.mark.parametrize("size", [10**400, 10**5000], ids=["long", "longer than Python prints"])
def test_numbers_of_any_length_are_refused_in_short(size):
    for name, value in (
        ("threads", size), ("threads", -size), ("emulate_devices", -size), ("levels", size),
        ("gpus", size), ("grid", size), ("grid", (size, 1, 1)), ("rounds", size),
        ("rank_timeout", size), ("rank_timeout", -size), ("params", size), ("alpha", size),
        ("max_device_memory", -size), ("trans_a", size),
    ):  # fmt: skip
        with pytest.raises((UsageError, OptionTypeError)) as caught:
            hg.gemm(A, A, device="cpu", **{name: value})
        assert len(str(caught.value)) < 150
    for number in (size, -size):
        with pytest.raises(UsageError, match=r"^params\['BM'\] is ") as caught:
            hg.gemm(A, A, device="emulator", kernel="tuned", params={"BM": number})
        assert len(str(caught.value)) < 150
    with pytest.raises(UsageError, match=r"^m is ") as caught:
        hg.plan(size, 1, 1)
    assert len(str(caught.value)) < 150


def test_pytorch_that_another_thread_imports_is_not_asked(monkeypatch):
    monkeypatch.delitem(sys.modules, "torch._dynamo", raising=False)  # of tests that compile
    monkeypatch.setitem(sys.modules, "torch", types.ModuleType("torch"))  # with nothing in it yet
    assert (hg.gemm(A, A, alpha=np.float32(2), device="cpu") == 2 * A @ A).all()
    programs = signature.Programs()
    programs._state = [None] * 12
    programs._know_libraries()
    assert programs._state == [None] * 12
