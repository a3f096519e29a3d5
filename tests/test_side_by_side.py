"""What is said of several variants at once is what each says of itself."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybrid_gemm import catalog
from hybrid_gemm.catalog import Variant
from hybrid_gemm.catalog.expressions import evaluate, with_values
from hybrid_gemm.kernel_choice import costs, fitted, model_files, reach
from hybrid_gemm.kernel_choice.likeness import Compared, places
from hybrid_gemm.kernel_choice.side_by_side import SideBySide
from hybrid_gemm.kernel_choice.tables import Machine
from hybrid_gemm.kernel_choice.tensor_cores import best, cut

H200 = Machine("NVIDIA H200", 132, 90, 66.9)
OURS = [v for k in catalog.gemm_kernels() if not k.library for v in k.variants()]
WGMMA = catalog.get("wgmma").variants()
side = st.one_of(st.integers(1, 300), st.integers(1, 2**31 - 1))


def dtype_of(variant):
    return "float32" if "float32" in variant.kernel.dtypes else variant.kernel.dtypes[0]


@given(side, side, side)
def test_arrays_have_what_each_variant_says(m, n, k):
    for dtype in {dtype_of(v) for v in OURS}:
        variants = [v for v in OURS if dtype_of(v) == dtype]
        those = SideBySide(variants)
        assert those.take((m, n, k), dtype).tolist() == [v.takes(m, n, k, dtype) for v in variants]
        assert those.blocks((m, n, k), dtype).tolist() == pytest.approx(
            [v.blocks(m, n, k, dtype) if v.takes(m, n, k, dtype) else 1 for v in variants],
            rel=1e-15,
        )
        assert those.steps(k, dtype).tolist() == [v.steps(k, dtype) for v in variants]
        assert list(zip(*those.tile, strict=True)) == [v.tile for v in variants]


@given(st.integers(1, 20000), st.integers(1, 20000), st.integers(1, 20000))
def test_cuts_of_several_variants_are_those_of_each(m, n, k):
    found = best(SideBySide(WGMMA), m, n, k, "float16", 132).cut
    assert list(zip(*found, strict=True)) == [cut(v, m, n, k, "float16", 132) for v in WGMMA]


def test_counts_of_several_variants_are_those_of_each():
    for name in ("tuned", "gemv", "tall", "dots", "outer"):
        variants = catalog.get(name).variants()
        for sides in ((700, 800, 900), (1, 800, 900), (900, 3, 7), (8, 16, 5000)):
            at = sides, "nt", "float32", 132
            found = costs.counts_of(SideBySide(variants), *at).T
            for variant, counted in zip(variants, found.tolist(), strict=True):
                taken = variant.takes(*sides, "float32")
                assert list(costs.counts(variant, *at)) == [x * taken for x in counted]


def with_header(**fields):
    """A variant of a kernel with such fields in its header."""
    kernel = dataclasses.replace(catalog.get("naive"), **fields)
    return Variant(kernel, kernel.params[0])


def test_a_grid_needs_a_value_within_the_limits_alone():
    variants = [
        with_header(limits=("m % 64 == 0",), grid=("m / 64", "n", "1")),
        with_header(limits=("k >= 32",), grid=("ceil(m / (k - 31))", "n", "1")),
        catalog.get("tuned").variant(),
    ]
    those = SideBySide(variants)
    for sides in ((128, 50, 60), (100, 50, 60), (100, 50, 31), (128, 50, 31)):
        taken = those.take(sides, "float32")
        assert taken.tolist() == [v.takes(*sides, "float32") for v in variants]
        blocks = [
            v.blocks(*sides, "float32") if v.takes(*sides, "float32") else 1 for v in variants
        ]
        assert those.blocks(sides, "float32").tolist() == blocks
        for variant, took, counted in zip(
            variants, taken, costs.counts_of(those, sides, "nn", "float32", 132).T, strict=True
        ):
            alone = costs.counts(variant, sides, "nn", "float32", 132)
            assert list(alone) == (counted * took).tolist()
    wrong = SideBySide([with_header(grid=("m / 64", "n", "1"))])
    with pytest.raises(ValueError, match="not a whole number"):
        wrong.blocks((100, 50, 60), "float32")


def test_limits_may_be_long_and_any_numbers():
    long = "m" + " + 0" * 200 + " <= 700"
    variants = [with_header(limits=(long, long)), with_header(limits=("n - 300",))]
    for sides in ((700, 200, 900), (701, 300, 900)):
        taken = SideBySide(variants).take(sides, "float32").tolist()
        assert taken == [v.takes(*sides, "float32") for v in variants]


def test_an_expression_has_values_in_the_place_of_names():
    known = {"BM": 30, "B": 4}
    for text in ("ceil(m / BM) + 1", "m % B == 0", "max(m, BM)"):
        assert evaluate(with_values(text, known), {"m": 100}) == evaluate(text, {"m": 100, **known})
        assert "B" not in with_values(text, known)


@pytest.mark.parametrize("mode", ("float32", "tf32", "float16"))
def test_predictions_are_as_exact_as_their_numbers(mode):
    """Weights of thousands of shapes add up to little of what they are: summed up carelessly in
    float32, times were wrong by 2e-4."""
    known, dtype = model_files.model(H200, mode), fitted.OPERANDS[mode]
    compared = Compared(known.places)
    for sides, layout in (((939, 299, 141), "nt"), ((1000, 900, 1100), "nn")):
        alike, _near = compared.both(places([sides], [layout], dtype)[0])
        error = known.errors_at(sides, layout)[1]
        times = known.times_us(sides, layout, H200)
        for each in known.fitted:
            if each.variant in times:
                counted = np.array(costs.counts(each.variant, sides, layout, dtype, 132))
                us = max(fitted.LEAST_US, counted @ each.constants)
                far = reach.distances((counted / us)[None], each.reach[None].astype(float))
                us *= np.exp(each.mean + alike.astype(float) @ each.weights + error * (far - 1))
                assert times[each.variant] == pytest.approx(float(us[0]), rel=5e-5)


def test_of_slower_variants_nothing_is_said_where_nobody_asks():
    known = model_files.model(H200, "float32")
    for sides in ((700, 800, 900), (1, 900, 5000)):
        times = known.times_us(sides, "nn", H200)
        ours = min((v for v in times if not v.kernel.library), key=times.__getitem__)
        library = next(v for v in times if v.kernel.library)
        for within in (1, 1.5):
            some = known.times_us(sides, "nn", H200, within=within)
            kept = {v: us for v, us in times.items() if us <= within * times[ours]}
            assert some == kept | {library: times[library]}
