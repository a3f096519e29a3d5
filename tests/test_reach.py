"""How far products lie from those that constants were fitted to. Pure."""

import numpy as np
import pytest
from support.fitted import MACHINE

from hybrid_gemm.bench import fitting
from hybrid_gemm.errors import UsageError
from hybrid_gemm.kernel_choice import choices, model_files, reach


def far(timed, *shares):
    """How far products of these shares are from those that were timed."""
    one = reach.of(np.array(timed, float))
    return reach.distances(np.array(shares, float), np.stack([one] * len(shares)))


def test_what_was_timed_is_not_far():
    timed = np.random.default_rng(1).random((50, 6))
    assert far(timed, *timed) == pytest.approx(1, abs=1e-3)


def test_a_mix_of_counts_that_was_not_timed_is_far_though_each_of_them_was():
    """Of two counts that went together nothing is known apart."""
    rng = np.random.default_rng(2)
    together = np.stack([x := rng.uniform(1, 2, 40), x * rng.uniform(0.99, 1.01, 40)], 1)
    between, apart, farther = far(together, (1.5, 1.5), (1.2, 1.8), (1, 2))
    assert between == 1 and 10 < apart < farther


def test_a_count_that_nothing_timed_has_is_far():
    timed = [(1.0, x, 0.0) for x in (0.1, 0.2, 0.4)]
    without, with_it = far(timed, (1, 0.3, 0), (1, 0.3, 0.1))
    assert without == 1 and with_it > 50


def test_counts_that_follow_from_others_are_not_far():
    timed = [(1.0, x, 3 * x) for x in (0.1, 0.2, 0.4)]
    assert far(timed, (1, 0.3, 0.9)) == 1


def test_a_kernel_is_not_believed_at_rows_of_c_of_which_none_like_them_was_timed():
    """`tall` was timed in float64 at wide rows of C that begin anywhere, and at short ones that it
    stores by vectors, not at wide ones that it stores so: it takes 168 us here, the library 69."""
    model = model_files.from_data(model_files.shipped(MACHINE, "float64"), MACHINE)
    choice = choices.chosen(model, (1411795, 16, 1), "nt", MACHINE, own=False)
    assert choice.variant.name != "tall"


@pytest.mark.parametrize("mode", ["float64", "int32", "fp32x3"])
def test_shipped_models_reach_as_far_as_their_shapes(mode):
    data = model_files.shipped(MACHINE, mode)
    made = fitting.reaches(data)
    assert made.shape == data["reaches"].shape
    for mine, theirs in zip(made, data["reaches"], strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-3, atol=1e-3 * float(np.abs(theirs).max()))


def test_a_model_that_does_not_say_how_far_it_reaches_is_made_anew(tmp_path):
    data = dict(model_files.shipped(MACHINE, "fp32x3"))
    del data["reaches"]
    (tmp_path / "model.npz").write_bytes(model_files.as_bytes(data))
    with pytest.raises(UsageError, match="run tune again"):
        model_files.read(tmp_path / "model.npz", MACHINE)
