"""Every kernel, every listed variant, odd shapes, all layouts and dtypes: exact, and nothing
outside C written. The same body runs on the emulator and on a GPU."""

import itertools

import numpy as np
import pytest
from support.arrays import fetch, padded
from support.checked_accesses import KINDS
from support.command import python
from support.devices import needs, open_device
from support.kernels import (
    GEMMS,
    Emulated,
    check_passes,
    in_layout,
    multiply,
    on_devices,
    usual_dtype,
    with_anything_new,
)
from support.lines import DOTS, GEMV, OUTER, SKINNY, TALL, check_one_order

from hybrid_gemm import catalog
from hybrid_gemm.catalog import Variant
from hybrid_gemm.devices.emulator import program as emulation
from hybrid_gemm.errors import UsageError

SHAPES = [
    (1, 1, 1), (5, 7, 3), (33, 65, 17), (130, 133, 21), (128, 128, 16), (1, 200, 50),
    (200, 1, 50), (129, 64, 1), (64, 31, 0), (3, 300, 8),
]  # fmt: skip


@pytest.mark.parametrize("operand", ["A", "B"])
def test_a_matrix_that_lies_in_no_order_is_not_read(kernel_device, operand):
    """It has to be copied first: there is no leading dimension by which it could be read."""
    device = open_device(kernel_device)
    stream, variant = device.stream(), catalog.get("naive").variant()
    with device.using(stream):
        whole, c = (device.empty(8, 8, "float32") for _ in "ac")
        a, b = (whole[::2, ::2] if operand == x else whole[:4, :4] for x in "AB")
        with pytest.raises(ValueError, match="no leading dimension"):
            device.gemm(variant, a, b, c[:4, :4], alpha=1, beta=0, stream=stream)


NEW = set(with_anything_new(GEMMS))
THIN = {kernel.name for kernels in (GEMV, DOTS, TALL, OUTER, SKINNY) for kernel in kernels}


def in_turn(variant: Variant, others: int) -> Emulated:
    """Where the emulator runs a variant beside the default ones: those of thin products are
    multiplied by test_thin_products.py and test_gemv.py, and others that have no new value of a
    parameter differ in nothing but their combination."""
    if others:
        return Emulated.NOWHERE
    new = variant in NEW and variant.name not in THIN
    return Emulated.ALWAYS if new else Emulated.IN_CAMPAIGNS


def in_layouts(number: int, variant: Variant, layout: str) -> Emulated:
    """Default variants in two layouts, in which A and B have both orders, and in campaigns in all;
    others in one, in turn, as those of thin products, whose own tests have all."""
    turn = (catalog.LAYOUTS.index(layout) + number // 4) % 4  # of the variant and its layouts
    if variant == variant.kernel.variant():
        two = (("nn", "tt"), ("nt", "tn"))[number // 4 % 2]
        beside = turn if variant.name in THIN else layout not in two
        return Emulated.IN_CAMPAIGNS if beside else Emulated.ALWAYS
    return in_turn(variant, turn)


@pytest.mark.parametrize(
    ("kernel_device", "variant", "layout"),
    on_devices(list(itertools.product(GEMMS, catalog.LAYOUTS)), in_layouts),
)
def test_odd_shapes(kernel_device, variant, layout):
    """In float32 where the kernel has that."""
    if kernel_device == "emulator" and variant != variant.kernel.variant():
        variant = in_layout(variant, layout)
    device = open_device(kernel_device)
    dtype = usual_dtype(variant.kernel)
    for i, shape in enumerate(SHAPES):
        if reason := variant.refusal(device=kernel_device, dtype=dtype, **mnk(shape)):
            assert variant.kernel.limits, reason
            continue
        got, expected = multiply(
            device, variant, shape, layout, dtype, pad=(0, 4, 3)[i % 3],
            alpha=(1, -2)[i % 2], beta=(0, 0, 3)[i % 3], seed=i,
        )  # fmt: skip
        np.testing.assert_array_equal(got, expected, err_msg=f"{shape}")


def in_dtypes(number: int, variant: Variant, dtype: str) -> Emulated:
    """Default variants in one of these dtypes, in turn; in campaigns in all. What
    others do differently follows from an element's size: float32 was multiplied above, and one
    dtype of 8 bytes is here."""
    if variant == variant.kernel.variant():
        kernels = list(dict.fromkeys(v.name for v in GEMMS))
        taken = ("float64", "int32", "int64")[kernels.index(variant.name) % 3]
        return Emulated.ALWAYS if dtype == taken else Emulated.IN_CAMPAIGNS
    wide = ("float64", "int64")[number // 3 % 2]
    return in_turn(variant, dtype != wide or dtype not in variant.kernel.dtypes)


@pytest.mark.parametrize(
    ("kernel_device", "variant", "dtype"),
    on_devices(list(itertools.product(GEMMS, ("float64", "int32", "int64"))), in_dtypes),
)
def test_other_dtypes(kernel_device, variant, dtype):
    device = open_device(kernel_device)
    layout = catalog.LAYOUTS[(GEMMS.index(variant) + len(dtype)) % 4]
    for i, shape in enumerate([(33, 65, 17), (130, 133, 21), (5, 3, 40), (1, 70, 30)]):
        reason = variant.refusal(device=kernel_device, dtype=dtype, **mnk(shape))
        if reason:
            assert "needs" in reason or "form" in reason
            continue
        got, expected = multiply(device, variant, shape, layout, dtype, i, 2, (0, -1)[i % 2])
        np.testing.assert_array_equal(got, expected, err_msg=f"{shape} {layout}")


def mnk(shape):
    return dict(zip("mnk", shape, strict=True))


def test_the_emulators_sample_has_every_layout_and_every_value_of_a_parameter():
    always, ever = set(), set()
    for number, (variant, layout) in enumerate(itertools.product(GEMMS, catalog.LAYOUTS)):
        where = in_layouts(number, variant, layout)
        ever |= {variant} if where is not Emulated.NOWHERE else set()
        if where is Emulated.ALWAYS:
            default = [(variant.name, layout)] if variant == variant.kernel.variant() else []
            always |= {*default, *((variant.name, *x) for x in variant.params.items())}
    assert ever == set(GEMMS)
    for variant in GEMMS:
        if variant.name not in THIN:
            layouts = [x for x in catalog.LAYOUTS if (variant.name, x) in always]
            assert layouts in (["nn", "tt"], ["nt", "tn"])
            assert all((variant.name, *x) in always for x in variant.params.items()), variant


@needs("emulator")
@pytest.mark.parametrize("order", ["reverse", "shuffle"])
@pytest.mark.parametrize("kernel", [k for k in catalog.gemm_kernels() if not k.library],
                         ids=lambda k: k.name)  # fmt: skip
def test_thread_order_does_not_matter(kernel, order):
    device = open_device("emulator", order=order, seed=7)
    variant = kernel.variant()
    shapes = [
        (133, 130, 37), (30, 31, 33), (1, 131, 37), (5, 3, 1031), (1031, 3, 5), (133, 130, 3),
        (133, 130, 13),
    ]  # fmt: skip
    dtype = usual_dtype(kernel)
    able = [
        x for x in shapes if not variant.refusal(device="emulator", dtype=dtype, **mnk(x))
    ]  # fmt: skip
    for shape in (able[0], able[-1]):  # several steps of k, and one
        got, expected = multiply(device, variant, shape, "nn", dtype, 1, 1, 1)
        np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("kernel", ["tuned", "deep", "cluster", "vector", "mma_double"])
def test_the_same_input_gives_the_same_bits(kernel_device, kernel, rng):
    """Parts of k are added in one order, whichever block comes last."""
    device, variant = open_device(kernel_device), catalog.get(kernel).variant()
    dtype = usual_dtype(variant.kernel)
    if reason := variant.refusal(device=kernel_device, dtype=dtype, m=70, n=90, k=3000):
        pytest.skip(reason)
    check_one_order(device, variant, (70, 90, 3000), "nn", rng, dtype)


@needs("emulator")
@pytest.mark.slow
@pytest.mark.timeout(900)  # on a busy machine; of "thin" g++ compiles for minutes
@pytest.mark.parametrize(
    "what", ["few", *(pytest.param(kind, marks=pytest.mark.campaign) for kind in KINDS)]
)
def test_address_sanitizer_finds_nothing(what):
    """Runs kernels of each kind with each access checked; in campaigns every kernel's default
    variant, the passes, and the sums of checks."""
    checked = emulation.sanitized_environment()
    done = python("-m", "support.checked_accesses", "emulator", what, env=checked)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("clean: ") == (len(KINDS) if what == "few" else 1)


def test_passes(kernel_device):
    check_passes(open_device(kernel_device))


def test_partials_are_added_in_their_order(kernel_device):
    """(1 + 1e8) - 1e8 is 0 in float32 and 1e8 - 1e8 + 1 is 1: the order shows."""
    device = open_device(kernel_device)
    stream = device.stream()
    for values, total in (((1, 1e8, -1e8), 0), ((1e8, -1e8, 1), 1)):
        parts = [padded(device, np.full((3, 5), v, "f4"), 0, 0)[1] for v in values]
        _whole, out = padded(device, np.zeros((3, 5), "f4"), 0, 0)
        with device.using(stream):
            device.sum(parts, out, alpha=1, beta=0, stream=stream)
            stream.synchronize()
        np.testing.assert_array_equal(fetch(device, out), total)


def test_grids_past_the_limit_become_several_launches():
    variant = catalog.get("naive").variant()
    assert len(list(variant.launches(10, 10, 10, "float32"))) == 1
    parts = list(variant.launches(2**21, 100, 8, "float32"))
    assert len(parts) > 1
    assert [p[0].start for p in parts] == [0] + [p[0].stop for p in parts[:-1]]
    assert parts[-1][0].stop == 2**21
    for rows, _cols, launch in parts:
        assert launch.grid[1] == -(-(rows.stop - rows.start) // 16) <= catalog.MAX_GRID[1]


def test_custom_parameters_are_held_to_the_rules():
    shared = catalog.get("shared_tile")
    assert shared.variant({"TILE": 5}).params["TILE"] == 5
    with pytest.raises(UsageError, match="TILE <= 32"):
        shared.variant({"TILE": 33})
    with pytest.raises(UsageError, match="at least 1"):
        shared.variant({"TILE": 0})
    with pytest.raises(UsageError, match="did you mean TILE"):
        shared.variant({"TILES": 8})
    with pytest.raises(UsageError, match="needs BM % TM == 0"):
        catalog.get("block_tile").variant({"BM": 100})


def test_vector_takes_tiles_that_its_threads_share_evenly(kernel_device):
    """Others gave wrong products: lines of the wide side are shared by lanes and by warps."""
    vector, device = catalog.get("vector"), open_device(kernel_device)
    for params in ({"BM": 8, "BN": 192}, {"BM": 256, "BN": 1}, {"BM": 64, "BN": 10}):
        with pytest.raises(UsageError, match="is not possible"):
            vector.variant(params)
    with pytest.raises(UsageError, match="is not possible"):
        vector.variant({"BM": 4, "BN": 128}).check("float64")
    for params in ({"BM": 2, "BN": 128}, {"BM": 128, "BN": 16}):
        for layout in catalog.LAYOUTS:
            got, expected = multiply(
                device, vector.variant(params), (131, 137, 83), layout, "float32", 1, 1, 2
            )
            np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize(
    ("kernels", "params", "rule"),
    [
        ("tuned deep", {"BM": 64, "BN": 128, "BK": 12, "TM": 16, "TN": 8, "KG": 3}, "32 % KG"),
        ("tuned deep short_k", {"BM": 128, "BN": 32, "TM": 4, "TN": 4, "LM": 32}, "16 % LM"),
    ],
)
def test_parameters_that_a_text_is_not_made_for_are_refused(kernels, params, rule):
    """Products were wrong, as sums of a third group and halves of columns were lost, or a text did
    not compile."""
    for kernel in kernels.split():
        with pytest.raises(UsageError, match=f"is not possible: it needs {rule} == 0"):
            catalog.get(kernel).variant(params)


@pytest.mark.parametrize("kernel", ["tuned", "short_k"])
@pytest.mark.parametrize("lanes", [1, 16])
def test_a_warp_of_few_or_many_lanes_along_m(kernel, lanes, kernel_device):
    params = {"BM": 64, "BN": 128, "BK": 8, "TM": 4, "TN": 4, "LM": lanes, "KG": 1}
    got, expected = multiply(
        open_device(kernel_device), catalog.get(kernel).variant(params), (131, 137, 83), "nn",
        "float32", 1, 1, 2,
    )  # fmt: skip
    np.testing.assert_array_equal(got, expected)


def test_a_custom_tile_runs(kernel_device):
    variant = catalog.get("shared_tile").variant({"TILE": 5})
    got, expected = multiply(
        open_device(kernel_device), variant, (23, 31, 17), "nt", "int32", 2, 1, 0
    )
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize(
    "params", [{"BM": 80, "BN": 64, "WM": 1}, {"BM": 96, "BN": 96, "WM": 2}], ids=str
)
@pytest.mark.parametrize("layout", catalog.LAYOUTS)
def test_double_tiles_that_threads_do_not_divide_run(kernel_device, params, layout):
    """Of the last lines of a step, some threads copy none."""
    variant = catalog.get("mma_double").variant(params)
    for pad in (0, 1):  # copies of 16 bytes, and of 8
        got, expected = multiply(
            open_device(kernel_device), variant, (82, 98, 50), layout, "float64", pad, 1, 2
        )
        np.testing.assert_array_equal(got, expected)


def test_one_block_refuses_what_exceeds_the_block_limit():
    variant = catalog.get("one_block").variant()
    assert variant.refusal(device="cuda", dtype="float32", m=32, n=32, k=99) is None
    assert "m * n <= 1024" in variant.refusal(device="cuda", dtype="float32", m=33, n=32, k=1)
