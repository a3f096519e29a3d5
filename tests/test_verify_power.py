"""Planted faults are found, and right products pass: a small run of scripts/verify-power."""

import math

import numpy as np
import pytest
from support.scripts import loaded

from hybrid_gemm.devices import native_passes


@pytest.fixture(scope="module")
def tool():
    return loaded("verify-power")


def quiet(_text):
    pass


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("count", [100, pytest.param(300, marks=pytest.mark.campaign)])
def test_planted_faults_are_found(tool, count):
    random = np.random.default_rng(25)
    rows = tool.plant(np, (64, 256), count, math.inf, random, quiet)
    planted = [row for row in rows if row["found"] is not None]
    assert len(planted) == count and {row["fault"] for row in planted} == set(tool.FAULTS)
    assert {row["arithmetic"] for row in planted} == set(tool.ARITHMETICS)
    assert not [row for row in planted if not row["found"]]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_right_products_pass(tool):
    rows = tool.clean(np, 200, math.inf, np.random.default_rng(26), quiet)
    assert len(rows) == 200 and not [row for row in rows if not row["passed"]]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_check_that_sees_nothing_is_noticed(tool, monkeypatch):
    """The tool itself can fail: bounds a thousand times too large miss faults."""
    deviations = tool.rounding.deviations
    random = np.random.default_rng(27)
    product = tool.Product(np, random, "fp32", "normal", 256, 256, 256)
    planter = tool.Planter(product, random)
    monkeypatch.setattr(tool.rounding, "deviations", lambda tests: 1000 * deviations(tests))
    found = [not planter.verdict("element", False).passed for _ in range(10)]
    assert not any(found)


@pytest.mark.parametrize("native", [True, False])
def test_one_wrong_element_in_sums_is_found_as_in_full(tool, native, monkeypatch):
    """In the sum over a block that is farthest from its own, whose elements are looked at though it
    is within its bound: half of all at 15 times their noise, where a bound of sums leaves 70."""
    monkeypatch.setattr(tool.module, "FULL_FLOPS", 0)
    monkeypatch.setattr(native_passes, "not_ready", lambda elements: "" if native else "asked for")
    random = np.random.default_rng(28)
    product = tool.Product(np, random, "fp32", "normal", 512, 512, 512)
    found = sorted(tool._least(product, 1, random) for _ in range(9))
    assert found[4] < 25
