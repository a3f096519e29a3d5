"""Which variant of a kernel on tensor cores is taken, how it cuts k, and what is counted of it."""

import pytest

from hybrid_gemm import catalog
from hybrid_gemm.kernel_choice import costs, tensor_cores
from hybrid_gemm.kernel_choice.tensor_cores import cut, fastest

WGMMA = catalog.get("wgmma")
VARIANTS = WGMMA.variants()
CUTTING = [v for v in VARIANTS if v.most_shares > 1]
LAST = [v for v in VARIANTS if v.cuts_last]


def names(variants):
    return [" ".join(map(str, v.params.values())) for v in variants]


@pytest.mark.parametrize("terms", [1, 3])
@pytest.mark.parametrize("side", [1, 64, 1000, 1024, 4096, 16384])
def test_a_choice_is_a_listed_variant(side, terms):
    chosen = fastest(WGMMA, side, side, side, terms=terms, dtype="float16", processors=132)
    assert chosen in VARIANTS
    assert chosen.params["TERMS"] == terms
    assert chosen.params["OUT"] == 4


def test_small_products_take_small_tiles():
    def area(side):
        params = fastest(WGMMA, side, side, side, terms=3, dtype="float16", processors=132).params
        return params["BM"] * params["BN"]

    assert area(1024) < area(8192)


@pytest.mark.parametrize("variant", CUTTING, ids=names(CUTTING))
def test_k_is_cut_where_tiles_are_few(variant):
    shares = cut(variant, 88, 16, 770295, "float16", 132)
    steps = variant.steps(770295, "float16")
    tiles = -(-88 // variant.tile[0]) * -(-16 // variant.tile[1])
    assert 120 <= tiles * shares.shares <= 132
    assert shares.steps == -(-steps // shares.shares)
    for sides in ((8192, 8192, 8192), (4096, 4096, 64), (100, 100, 100), (64, 64, 0)):
        assert cut(variant, *sides, "float16", 132).shares == 1
    assert cut(variant.uncut, 88, 16, 770295, "float16", 132)[:2] == (1, steps)


@pytest.mark.parametrize("variant", CUTTING, ids=names(CUTTING))
def test_costs_count_shares(variant):
    dtype = "float32" if variant.params["TERMS"] == 3 else "float16"
    counted = costs.counts(variant, (88, 16, 770295), "nt", dtype, 132)
    shares = cut(variant, 88, 16, 770295, "float16", 132)
    assert counted[1] == shares.steps  # of the busiest processor
    assert counted[8] == 1 and counted[9] == pytest.approx(shares.shares * 88 * 16 * 4e-6)


@pytest.mark.parametrize("variant", LAST, ids=names(LAST))
def test_costs_count_parts_of_the_last_tiles(variant):
    of_c = "float32" if variant.params["TERMS"] == 3 else "float16"
    steps, tiles = variant.steps(9000, "float16"), -(-9000 // variant.tile[1])
    tiles *= -(-9000 // (variant.tile[0] * variant.cluster))
    clusters = tensor_cores.slots(variant, 132)
    said, counted = (
        cut(variant, 9000, 9000, 9000, "float16", 132),
        costs.counts(variant, (9000, 9000, 9000), "nt", of_c, 132),
    )
    if not said.tiles:
        assert counted[1] == -(-tiles // clusters) * steps
        return
    assert said.tiles == tiles % clusters and said.tiles <= said.runs <= clusters
    run = -(-said.tiles * steps // said.runs)
    assert counted[1] == tiles // clusters * steps + run < -(-tiles // clusters) * steps
    assert counted[8] == 1 and counted[9] > 0  # another launch, and what it adds up


def test_without_a_model_a_long_k_takes_a_variant_that_cuts_it():
    for terms in (1, 3):
        options = {"terms": terms, "dtype": "float16", "processors": 132}
        assert fastest(WGMMA, 88, 16, 770295, **options).most_shares > 1
        assert fastest(WGMMA, 8192, 8192, 8192, **options).most_shares == 1
