"""Parameters that no header lists: those that its rules allow multiply right, at odd shapes, and
others are refused by a rule, before anything is compiled."""

import dataclasses

import numpy as np
import pytest
from support.devices import open_device
from support.kernels import in_layout, multiply

from hybrid_gemm import catalog
from hybrid_gemm.errors import UsageError

RING = {"TM": 8, "TN": 8, "LM": 4, "STAGES": 3}
ALLOWED = [
    # C is stored by vectors of as many elements as divide the thin side
    ("tall", {"THIN": 3}, "float32"),
    ("tall", {"THIN": 6, "LINES": 3}, "float64"),
    ("tall_narrow", {"THIN": 7, "LINES": 2}, "float16"),
    ("tall_narrow", {"THIN": 12, "OUT": 4, "LINES": 2}, "bfloat16"),
    ("tuned", {"BM": 64, "BN": 64, "BK": 8, "KG": 1, "HOPS": 2, **RING}, "float32"),
    ("tuned", {"BM": 64, "BN": 64, "BK": 4, "KG": 2, "HOPS": 1, **RING}, "float32"),
    ("short_k", {"BM": 64, "BN": 64, "TM": 4, "TN": 4, "LM": 16, "BK": 16}, "int32"),
    ("cluster", {"KG": 2, "KV": 2, "BK": 24, "BM": 24, "LM": 1, "BN": 128}, "float32"),
    ("register_tile", {"TILE": 3, "BLOCK": 5}, "int64"),
    ("gemv", {"THREADS": 768, "FLY": 24}, "float32"),
    ("dots", {"FLY": 7, "BLOCKS": 5}, "float64"),
    ("outer", {"DEPTH": 5, "COLS": 3, "ROWS": 7}, "float32"),
    ("vector", {"BN": 128, "BM": 2, "BK": 384}, "float32"),
    ("skinny", {"THIN": 8, "WIDE": 192, "STAGES": 2}, "float16"),
]
TEAMS = "8 * THREADS / WIDE % 32 * (32 % (8 * THREADS / WIDE)) == 0"
REFUSED = [
    # sums of three groups cannot be added by halves: one was left out
    ("tuned", {"BM": 64, "BN": 64, "BK": 12, "KG": 3, "HOPS": 1, **RING}, "32 % KG == 0"),
    ("deep", {"BM": 64, "BN": 64, "BK": 12, "KG": 3, "HOPS": 1, **RING}, "32 % KG == 0"),
    ("stack_tile", {"BM": 64, "BN": 64, "BK": 12, "KG": 3, **RING}, "32 % KG == 0"),
    # two hops move eight of k
    ("tuned", {"BM": 64, "BN": 64, "BK": 4, "KG": 1, "HOPS": 2, **RING}, "BK % (4 * HOPS) == 0"),
    ("deep", {"BM": 64, "BN": 64, "BK": 4, "KG": 1, "HOPS": 2, **RING}, "BK % (4 * HOPS) == 0"),
    ("short_k", {"BM": 64, "BN": 64, "BK": 4, "HOPS": 2, "LM": 4}, "BK % (4 * HOPS) == 0"),
    # lanes of a warp lie in pairs along n
    ("short_k", {"BM": 128, "TM": 4, "TN": 4, "BN": 64, "LM": 32, "BK": 16}, "16 % LM == 0"),
    ("tuned", {"BM": 128, "TM": 4, "TN": 4, "BN": 64, "LM": 32, "BK": 8}, "16 % LM == 0"),
    # sums of a block's threads do not fit in registers
    ("wgmma", {"BM": 192, "CLUSTER": 1}, "BM * BN <= 36864"),
    ("residues", {"BM": 192, "CLUSTER": 1}, "BM * BN <= 36864"),
    ("wgmma", {"TERMS": 2, "CHUNK": 32}, "TERMS != 2"),
    ("wgmma", {"OUT": 6}, "OUT <= 4"),
    ("wgmma", {"OUT": 3}, "OUT % 2 == 0"),
    ("wgmma", {"CLUSTER": 3}, "BN % (64 * CLUSTER) == 0"),
    ("wgmma", {"TERMS": 3, "CHUNK": 32, "OUT": 2}, "(TERMS == 3) * (OUT == 2) == 0"),
    # vectors have as many bytes as a power of two
    (
        "cluster",
        {"BM": 48, "BN": 128, "KV": 3, "BK": 12, "KG": 2},
        "16 % (KV * SIZE) == 0",
    ),
    # a warp adds up the sums of whole teams, or of a part of one: others were mixed
    ("gemv", {"WIDE": 256, "THREADS": 768}, TEAMS),
    ("gemv_narrow", {"WIDE": 128, "THREADS": 768}, TEAMS),
    # a product on tensor cores has 16 rows, and others were left out
    ("skinny", {"THIN": 32}, "THIN <= 16"),
    # a thread has no stack for so many sums
    ("register_tile", {"TILE": 192, "BLOCK": 4}, "TILE * TILE * SIZE <= 65536"),
]
SHAPES = [
    (70, 67, 50), (33, 129, 17), (1, 300, 77), (300, 1, 1000), (200, 5, 130), (300, 3, 20),
    (3, 300, 20), (5, 7, 2), (9, 8, 900), (64, 64, 0),
]  # fmt: skip


@pytest.mark.parametrize(("name", "params", "dtype"), ALLOWED, ids=str)
def test_what_rules_allow_multiplies_right(kernel_device, name, params, dtype):
    variant = catalog.get(name).variant(params)
    turn = ALLOWED.index((name, params, dtype))
    layout = catalog.LAYOUTS[turn % 4]
    if kernel_device == "emulator":  # where each layout is compiled anew
        variant = in_layout(variant, layout)
    device, count = open_device(kernel_device), 0
    for i, shape in enumerate(SHAPES):
        if not variant.takes(*shape, dtype):
            continue
        count += 1
        got, expected = multiply(device, variant, shape, layout, dtype, i % 4, 2, (0, -1)[i % 2])
        np.testing.assert_array_equal(
            got.astype("f8"), expected.astype("f8"), err_msg=f"{shape} {layout}"
        )
    assert count > 1


@pytest.mark.parametrize(("name", "params", "rule"), REFUSED, ids=str)
def test_what_no_kernel_can_do_is_refused_by_a_rule(name, params, rule):
    """Of parameters that break this rule alone."""
    kernel = catalog.get(name)
    others = tuple(x for x in kernel.require if x != rule)
    assert dataclasses.replace(kernel, require=others).variant(params)
    with pytest.raises(UsageError) as refused:
        kernel.variant(params)
    assert str(refused.value).endswith(f"is not possible: it needs {rule}")
