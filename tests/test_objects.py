"""The objects that users hold: how they print, end and travel."""

import copy
import inspect
import pickle
import subprocess
import sys
import typing

import numpy as np
import pytest

import hybrid_gemm
from hybrid_gemm import Runner, catalog
from hybrid_gemm.errors import OptionTypeError, UsageError
from hybrid_gemm.planning.hardware import DeviceSpec
from hybrid_gemm.planning.planner import make_plan
from hybrid_gemm.problem import Problem
from hybrid_gemm.ranks.rank_plan import make_rank_plan

A, B = (np.arange(i * j, dtype="f4").reshape(i, j) % 7 for i, j in ((30, 40), (40, 20)))


@pytest.fixture
def made(device):
    runner = Runner(device=device, threads=2, split="cols")
    return runner, runner.run(A, B)


def test_objects_print_as_one_short_line(made):
    runner, result = made
    problem = Problem(300, 200, 10**6)
    ranks = make_rank_plan(problem, DeviceSpec("gpu", "cuda", 0, 80 << 30, 50, 3000), 4)
    for x, words in (
        (runner, ["Runner", "threads=2", "split='cols'", runner.devices[0].name]),
        (result, ["Result", "30 x 20 float32", "GFLOP/s", "2 workers"]),
        (result.plan, ["Plan", "m=30 n=20 k=40", "split by cols", "2 workers"]),
        (result.timeline, ["Timeline", "2 workers", "ms"]),
        (catalog.get("tuned"), ["Kernel", "tuned"]),
        (result.variant, ["Variant", result.variant.name]),
        (ranks, ["RankPlan", "4 ranks"]),
    ):
        text = repr(x)
        assert len(text) < 200 and "\n" not in text
        assert all(word in text for word in words), text


def test_a_plans_summary_says_who_does_what(made):
    plan = made[1].plan
    lines = plan.summary().splitlines()
    assert lines[0].startswith("m=30 n=20 k=40 float32, split by cols, grid 1 x 1 x 2")
    assert "rows 0:30, columns 0:20, K 0:20" in lines[1] and "K 20:40" in lines[2]
    assert any("free" in line for line in lines) and "between devices" in plan.summary()
    gpu = DeviceSpec("gpu", "cuda", 0, 80 << 30, 50, 3000)
    assert "expected time: " in make_plan(Problem(8192, 8192, 8192), (gpu,), 1).summary()
    assert ("expected" in plan.summary()) == plan.devices[0].on_gpu  # other rates are not known
    many = hybrid_gemm.plan(8, 8, 100, device="cpu", threads=50, split="cols").summary()
    assert "... and 42 workers more" in many and len(many.splitlines()) < 20


def test_a_runner_is_closed_at_the_end_of_its_block(device):
    with Runner(device=device) as runner:
        np.testing.assert_array_equal(runner.gemm(A, B), A @ B)
    for use in (lambda: runner.gemm(A, B), lambda: runner.plan(Problem(8, 8, 8))):
        with pytest.raises(UsageError, match="was closed"):
            use()
    runner.close()  # once more is no harm
    assert repr(runner) == "<Runner, closed>"
    with pytest.raises(AttributeError, match="'plant'"):
        runner.plant  # noqa: B018


def test_a_result_is_pickled_without_its_devices(made):
    _runner, result = made
    again = pickle.loads(pickle.dumps(result))
    np.testing.assert_array_equal(again.c, A @ B)
    assert list(again.timeline) == list(result.timeline) and again.plan == result.plan
    assert again.timeline.multiply_ms == result.timeline.multiply_ms
    assert again.variant == result.variant and repr(again) == repr(result)


def test_results_are_equal_where_they_are_one(made):
    runner, result = made
    assert result == result and result != runner.run(A, B) and result in {result}


def test_a_copy_of_a_runner_is_another_with_its_options(made):
    runner, _result = made
    for again in (copy.copy(runner), copy.deepcopy(runner), pickle.loads(pickle.dumps(runner))):
        assert again is not runner and again.options == runner.options
        again.close()
    np.testing.assert_array_equal(runner.gemm(A, B), A @ B)


def test_what_a_run_takes_besides_matrices_is_checked():
    runner = Runner(device="cpu")
    with pytest.raises(OptionTypeError, match="progress takes a function of a number; 3 was given"):
        runner.run(A, B, progress=3)
    with pytest.raises(OptionTypeError, match="resident takes True or False; 'yes' was given"):
        runner.run(A, B, resident="yes")


def test_the_package_lists_what_is_public_and_has_its_errors_at_once():
    shown = "import hybrid_gemm as hg; print(hg.errors.UsageError); print(*dir(hg))"
    done = subprocess.run([sys.executable, "-c", shown], capture_output=True, text=True, check=True)
    error, names = done.stdout.splitlines()
    assert error == "<class 'hybrid_gemm.errors.UsageError'>"
    public = {name for name in names.split() if not name.startswith("_")}
    assert public == {*hybrid_gemm.__all__, "errors"}


def test_type_hints_of_all_that_is_public_are_there_when_asked_for():
    """As what checks or documents calls at run time asks for them."""
    public = [getattr(hybrid_gemm, name) for name in hybrid_gemm.__all__]
    methods = [
        thing
        for each in public
        if isinstance(each, type)
        for name, thing in vars(each).items()
        if inspect.isfunction(thing) and (name[0] != "_" or name == "__init__")
    ]
    assert len(methods) > 15
    for each in (*public, *methods):
        assert isinstance(typing.get_type_hints(each), dict)
    assert typing.get_type_hints(hybrid_gemm.plan)["return"].__name__ == "Plan"


def test_what_is_public_of_a_runner_is_documented():
    public = {name for name in vars(Runner) if not name.startswith("_")}
    assert public == {
        "of",
        "gemm_many",
        "threads",
        "close",
        "plan",
        "variant",
        "run",
        "gemm",
        "matmul",
        "describe",
    }
    assert all(getattr(Runner, name).__doc__ for name in public)
