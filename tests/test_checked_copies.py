"""Copies that are checked: what is damaged is found, named and copied again."""

import numpy as np
import pytest
from support.checked_products import FaultyDevice
from support.devices import open_device

from hybrid_gemm.errors import VerificationError
from hybrid_gemm.execution.checked_device import CheckedDevice


class Damaged(np.ndarray):
    """An array of which the first writings spoil an element."""

    faults = 0

    def __setitem__(self, at, x):
        super().__setitem__(at, x)
        if self.faults:
            self.faults -= 1
            self.view(np.ndarray)[3, 2] *= -1


@pytest.mark.parametrize("faults", [0, 1, 2, 3])
def test_what_is_put_into_place_on_a_gpu_is_checked(faults):
    checked = CheckedDevice(open_device("cpu"))
    out, source = np.zeros((6, 5), "f4").view(Damaged), np.arange(1.0, 6.0)
    out.faults = faults
    if faults == 3:
        with pytest.raises(VerificationError, match=r"copy on cpu: rows 0 to 5, .*, 3 times"):
            checked.put(out, source)
        assert len(checked.tally.faults) == 3 and not checked.tally.copies
        return
    checked.put(out, source)
    assert (out == source.astype("f4")).all()
    assert (checked.tally.copies, checked.tally.repeated) == (1, int(faults > 0))
    assert len(checked.tally.faults) == faults
    for fault in checked.tally.faults:
        assert (fault.what, fault.rows, fault.cols) == ("copy", (0, 6), (0, 5))


WHOLE = (0, 9), (0, 9)  # of a square: lines are told apart by their steps alone


@pytest.mark.parametrize(("orders", "dtype", "spots", "place"), [
    ("CC", "f4", [(3, 2)], ((3, 4), (0, 9))), ("FF", "f4", [(3, 2)], ((0, 9), (2, 3))),
    ("CC", "f8", [(3, 2), (6, 1)], ((3, 7), (0, 9))), ("FF", "i2", [(0, 8)], ((0, 9), (8, 9))),
    ("CF", "f4", [(3, 2)], WHOLE), ("FC", "f2", [(3, 2)], WHOLE),
    ("CC", "i1", [(3, 2)], WHOLE), ("FF", "i1", [(3, 2)], WHOLE),  # rows of 9 bytes
])  # fmt: skip
def test_the_lines_of_a_damaged_copy_are_named(orders, dtype, spots, place, rng):
    raw = open_device("emulator")

    def damage(copied):
        for i, j in spots:
            copied[i, j] = ~copied[i, j] if dtype[0] == "i" else -copied[i, j]

    checked = CheckedDevice(FaultyDevice(raw, {("copy", 0): damage}))
    out = raw.empty(9, 9, np.dtype(dtype).name)
    out = out if orders[0] == "C" else out.T
    source = np.array(1 + rng.permutation(81).reshape(9, 9), dtype, order=orders[1])
    checked.copy(out, source, checked.stream())
    assert (out == source).all()
    assert (checked.tally.copies, checked.tally.repeated) == (1, 1)
    (fault,) = checked.tally.faults
    assert (fault.what, fault.rows, fault.cols) == ("copy", *place)
