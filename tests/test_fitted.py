"""Models of times: fitting them, reading them, and choosing by them. Pure."""

import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import counted
from support.fitted import MACHINE, invented, judged, made

from hybrid_gemm import catalog
from hybrid_gemm.bench import drawing, fitting
from hybrid_gemm.errors import UsageError
from hybrid_gemm.kernel_choice import (
    choices,
    compute_modes,
    costs,
    fitted,
    likeness,
    model_files,
    on_gpu,
)
from hybrid_gemm.kernel_choice.library_kernels import Launched
from hybrid_gemm.problem import Problem

ROOT = Path(__file__).resolve().parents[1]
side = st.integers(1, 20000)
COUNTED = [
    variant
    for name in (
        "tuned", "deep", "short_k", "vector", "cluster", "wgmma", "mma_in_place", "cublas"
    )
    for variant in catalog.get(name).variants()
]  # fmt: skip


@given(side, side, side, st.sampled_from(catalog.LAYOUTS))
def test_counts_are_finite_and_of_one_length_for_a_kernel(m, n, k, layout):
    lengths: dict[str, set[int]] = {}
    for variant in COUNTED:
        dtype = "float16" if variant.kernel.role == "tensor" else "float32"
        counted = costs.counts(variant, (m, n, k), layout, dtype, 132)
        assert all(math.isfinite(x) and x >= 0 for x in counted) and counted[0] == 1
        lengths.setdefault(variant.name, set()).add(len(counted))
    assert all(len(found) == 1 for found in lengths.values())


def test_shipped_models_were_fitted_to_what_is_counted():
    """Other counts spoil them, and those of users, and no other test would tell."""
    fitted_to, now = json.loads(counted.FILE.read_text()), counted.counted()
    changed = sorted(x for x in {*fitted_to, *now} if fitted_to.get(x) != now.get(x))
    assert not changed, (
        "raise _COUNTS of likeness.py, fit models to the new counts (scripts/refit-models fit, "
        "then continue), and run tests/support/counted.py"
    )


def test_tiles_beyond_the_blocks_of_one_round_are_cut_whatever_split_is():
    """135 tiles on 132 multiprocessors take little more than one round: the last are cut along k
    by all blocks (tuned.cuh)."""
    tuned = [v for v in catalog.get("tuned").variants() if v.params["BM"] == 128 < v.params["BN"]]
    assert {v.params["SPLIT"] for v in tuned} == {1, 132}
    for variant in tuned:
        busiest, one_round = (
            costs.counts(variant, (m, 3676, 4564), "nn", "float32", 132)[1] for m in (1137, 1024)
        )
        assert 1 < busiest / one_round < 1.2


def test_stored_lines_decide_what_is_off_16_bytes():
    assert costs.off_line((5, 8, 12), "nn", "float32") == (False, False)
    assert costs.off_line((5, 8, 12), "tn", "float32") == (True, False)
    assert costs.off_line((5, 6, 12), "nn", "float16") == (True, True)


def test_shapes_whose_rows_begin_on_fewer_bytes_are_less_alike():
    """Below 16 bytes, where operands cannot be read as vectors, a halving tells more."""
    on_bytes = {128: 1024, 64: 1040, 32: 1032, 16: 1028, 8: 1026, 4: 1025}  # of rows of so many
    at = likeness.places([(512, 512, k) for k in on_bytes.values()], ["nn"] * 6, "float32")
    alike = dict(zip(on_bytes, likeness.likeness(at[:1], at)[0], strict=True))
    steps = -np.diff(np.log(list(alike.values())))
    assert min(steps) > 0 and min(steps[3:]) > 3 * max(steps[:3])


def test_times_that_follow_the_counts_are_learned():
    measured = invented()
    model, seen = made(measured), {str(v): i for i, v in enumerate(measured.variants)}
    unseen = invented(40, seed=4)
    for drawn, times in zip(unseen.drawn, unseen.times, strict=True):
        predicted = model.times_us(drawn.shape, drawn.layout, MACHINE)
        for variant, us in predicted.items():
            if not variant.kernel.library:
                assert us == pytest.approx(times[seen[str(variant)]], rel=0.05), (drawn, variant)


def test_the_faster_of_ours_and_the_library_is_taken():
    """And ours only where it leads by more than the error, which is small here."""
    unseen, model = invented(60, seed=5), made(invented())
    columns = {str(v): i for i, v in enumerate(unseen.variants)}
    lost, libraries = [], 0
    for drawn, times in zip(unseen.drawn, unseen.times, strict=True):
        choice = choices.chosen(model, drawn.shape, drawn.layout, MACHINE, own=False)
        own = choices.chosen(model, drawn.shape, drawn.layout, MACHINE, own=True).variant
        lost.append(times[columns[str(choice.variant)]] / times.min())
        libraries += choice.variant.kernel.library != ""
        assert not own.kernel.library
    assert max(lost) < 1.25 and np.mean(lost) < 1.03, lost
    assert 10 < libraries < 50


def test_what_beta_scales_is_read_faster_by_some_than_by_others():
    """Our kernels take longer for it where C has 16 bits, the library elsewhere."""
    library, strict = catalog.get("cublas").variant(), catalog.get("tuned").variant()
    tensor, sides = catalog.get("wgmma").variant(), (4000, 2000, 100)
    order = [
        costs.adding_us(v, sides, size)
        for v, size in ((strict, 4), (tensor, 4), (library, 4), (tensor, 2), (library, 2))
    ]
    assert order[0] == order[1] < order[2] and order[3] > order[4] == order[2] / 2
    changed = []
    for drawn in drawing.draw(7, 100):
        case = MACHINE, "float16", drawn.shape, drawn.layout
        plain, adds = (choices.fastest(*case, own=False, adds=x) for x in (False, True))
        if plain.variant == adds.variant:
            longer = costs.adding_us(adds.variant, drawn.shape, 2)
            assert adds.us == pytest.approx(plain.us + longer)
        else:
            changed.append((plain.variant.kernel.role, adds.variant.kernel.library))
    assert changed and set(changed) == {("tensor", "cublas")}


def test_beyond_all_that_was_measured_the_library_is_taken():
    """Even where ours are predicted to lead by far."""
    model, longest = made(invented()), max(max(d.shape) for d in invented().drawn)
    for place in range(3):
        sides = [64, 64, 64]
        sides[place] = 8 * longest
        choice = choices.chosen(model, tuple(sides), "nn", MACHINE, own=False)
        assert choice.variant.kernel.library and choice.error == math.inf, sides
        own = choices.chosen(model, tuple(sides), "nn", MACHINE, own=True)
        assert not own.variant.kernel.library
    assert all(map(math.isfinite, model.errors_at((64, 64, longest), "nn")))


@pytest.mark.parametrize("columns", [3, 8192, 20_000])
def test_sums_of_any_length_are_those_of_a_matrix_product(columns):
    rng = np.random.default_rng(3)
    rows, x = rng.integers(-9, 9, (5, columns)) * 1.0, rng.integers(-9, 9, columns) * 1.0
    np.testing.assert_array_equal(fitted.dots(rows, x), rows @ x)


def test_a_kernel_is_taken_only_near_the_sides_at_which_it_was_timed():
    """Where it was fastest for a long k, nothing is known of it for a short one."""
    measured = invented()
    fast = measured.ours[0]
    short = np.array([d.shape[2] < 500 for d in measured.drawn])
    times = measured.times.copy()
    times[:, fast] = times[:, measured.ours].min(1) / 4
    everywhere = made(dataclasses.replace(measured, times=times.copy()))
    times[short, fast] = np.nan
    model = made(dataclasses.replace(measured, times=times))
    variant = measured.variants[fast]
    for k, near in ((4000, True), (300, True), (20, False)):
        found = model.times_us((700, 800, k), "nn", MACHINE)
        assert (variant in found) is near and len(found) >= 3
        assert variant in everywhere.times_us((700, 800, k), "nn", MACHINE)
        assert [*model.times_us((700, 800, k), "nn", MACHINE, among=[variant])] == [variant]
    alone = dataclasses.replace(
        measured, times=times[:, [fast, -1]], variants=[variant, measured.variants[-1]]
    )
    assert variant in made(alone).times_us((700, 800, 20), "nn", MACHINE)  # there is no other


def test_a_time_is_longer_far_from_what_was_timed():
    """Where rows begin on 16 bytes alone, what others cost is not known."""
    measured = invented()
    measured.times[...] *= np.random.default_rng(6).lognormal(0, 0.1, measured.times.shape)
    everywhere, fast = made(measured), measured.ours[0]
    off = [any(costs.off_line(d.shape, d.layout, "float32")) for d in measured.drawn]
    measured.times[off, fast] = np.nan
    model, variant = made(measured), measured.variants[fast]
    for k, longer in ((1024, False), (1025, True)):
        at = (2048, 2048, k), "nn", MACHINE
        ratio = model.times_us(*at)[variant] / everywhere.times_us(*at)[variant]
        assert (ratio > 2) is longer and (0.9 < ratio < 1.1) is not longer


def test_one_row_or_column_asks_for_a_smaller_lead():
    leads = [fitted.lead_of(sides) for sides in ((1, 5, 7), (5, 1, 7), (5, 7, 1))]
    assert leads[0] == leads[1] < leads[2] == fitted.lead_of((5, 7, 9))


def test_a_library_that_jumps_makes_the_lead_that_is_asked_larger():
    """Times that no model can know are known not to be known."""
    measured = invented()
    measured.times[:, -1] *= np.random.default_rng(1).choice([0.7, 1.4], len(measured.times))
    steady, jumping = made(invented()), made(measured)
    at = (2000, 3000, 1000), "nn"
    assert jumping.errors_at(*at)[0] > 4 * steady.errors_at(*at)[0]


def test_what_is_said_of_a_model_is_of_shapes_left_out():
    measured = invented()
    worth = judged(measured)
    assert worth["own_regret"] < 0.02 and worth["regret"] < 0.04 and worth["worst"] > 0.8
    noise = np.random.default_rng(2).lognormal(0, 0.5, measured.times.shape)
    noisy = fitting.Measured("float32", measured.drawn, measured.variants, measured.times * noise)
    worth = judged(noisy)
    assert worth["own_regret"] > 0.1


def with_two_kernels(seed):
    """Times of a library with two kernels, one of which takes twice as long, and what it launched:
    which of them it takes is drawn at random."""
    plain = invented(seed=seed)
    slow = np.random.default_rng(seed).random(len(plain.drawn)) < 0.5
    plain.times[:, -1] *= np.where(slow, 1.4, 0.7)
    launched = [Launched(("fast", "slow")[x], 64, 64, 132, 1) for x in slow.astype(int)]
    launches = fitting.LibraryTimes(plain.drawn, launched, plain.times[:, -1].copy())
    return dataclasses.replace(plain, launches=launches)


def test_what_a_library_launches_tells_its_time():
    model, unseen = made(with_two_kernels(3)), with_two_kernels(4)
    off = []
    for drawn, launched, us in zip(
        unseen.drawn, unseen.launches.launched, unseen.launches.times, strict=True
    ):
        at = drawn.shape, drawn.layout
        variant = unseen.variants[-1]
        guesses = [
            model.times_us(*at, MACHINE, x)[variant] for x in (None, launched)
        ]  # fmt: skip
        off.append(np.abs(np.log(np.array(guesses) / us)))
        assert model.errors_at(*at, launched)[0] < model.errors_at(*at)[0]
    blind, told = np.mean(off, 0)
    assert blind > 0.2 and told < 0.1, (blind, told)
    unknown = made(invented())  # a model without launches
    assert unknown.times_us(*at, MACHINE, launched) == unknown.times_us(*at, MACHINE)
    assert unknown.errors_at(*at, launched) == unknown.errors_at(*at)


@pytest.mark.parametrize("mode", ("float32", "float64", "float16", "tf32"))
def test_what_the_library_launches_is_known_of_all_classes(mode):
    """A library that was known at one row or column alone was predicted slow everywhere else."""
    data = model_files.shipped(MACHINE, mode)
    sides = np.asarray(data["library_sides"])
    thin, k = sides[:, :2].min(1), sides[:, 2]
    for some in (thin == 1, (thin > 1) & (thin <= 8), thin > 64, k <= 360, k >= 8192):
        assert some.sum() >= 100, some.sum()


def test_the_library_is_asked_where_it_decides(monkeypatch):
    """Once, where what it launches may change the choice; and the choice goes by the answer."""
    model = made(with_two_kernels(3))
    monkeypatch.setattr(model_files, "model", lambda machine, mode: model)
    choices.fastest.cache_clear()
    asked, taken = [], {"fast": [], "slow": []}
    for kernel, found in taken.items():

        def ask(problem, layout, kernel=kernel):
            asked.append((problem.m, problem.n, problem.k, layout))
            return Launched(kernel, 64, 64, 132, 1)

        for drawn in drawing.draw(5, 60):
            problem = Problem(*drawn.shape)
            found.append(on_gpu.strict(MACHINE, problem, drawn.layout, ask=ask)[0].kernel.library)
            assert not on_gpu.strict(MACHINE, problem, drawn.layout, own=True)[0].kernel.library
    choices.fastest.cache_clear()
    assert 10 < len(set(asked)) < 60
    assert taken["fast"].count("") < taken["slow"].count("")


def test_fp32x3_is_multiplied_in_strict_fp32_where_that_is_faster():
    large, small = (
        Problem(4096, 4096, 4096, compute="fp32x3"),
        Problem(16, 500, 9000, compute="fp32x3"),
    )
    variant, _why = on_gpu.on_tensor_cores(MACHINE, large, "nn", own=True)
    assert variant.params["TERMS"] == 3
    variant, why = on_gpu.on_tensor_cores(MACHINE, small, "nn", own=True)
    assert "TERMS" not in variant.params and why.startswith("strict fp32 predicted")


def test_no_library_is_asked_about_strict_fp32_that_is_not_taken():
    """Asking loads cuBLAS, which takes a process's first call a tenth of a second. At all shapes
    the choice is the one that asking each time gives."""
    asked = []

    def ask(problem, layout):
        asked.append(problem)
        return Launched("cutlass_80_simt_sgemm", 128, 64, problem.m * problem.n // 8192 + 1, 1)

    for drawn in drawing.draw(7, 60):
        for mode in ("fp32x3", "tf32"):
            problem = Problem(*drawn.shape, compute=mode)
            variant, _why = on_gpu.on_tensor_cores(
                MACHINE, problem, drawn.layout, own=False, ask=ask
            )
            choice = on_gpu._fitted(MACHINE, mode, problem, drawn.layout, mode == "fp32x3", ask)
            plain = on_gpu._fitted(MACHINE, "float32", problem, drawn.layout, False, ask)
            faster = choices.strict_is_faster(mode, plain, choice)
            assert variant == (plain if faster else choice).variant
    del asked[:]
    for n in (1024, 2048, 8192):
        problem = Problem(n, n, n, compute="fp32x3")
        on_gpu.on_tensor_cores(MACHINE, problem, "nn", own=False, ask=ask)
    assert not asked


def test_tf32_is_multiplied_in_strict_fp32_where_that_is_faster():
    """For a few columns A is read at the memory's speed there."""
    few, large = (
        Problem(*sides, compute="tf32") for sides in ((16001, 2, 9001), (4096, 4096, 4096))
    )
    variant, why = on_gpu.on_tensor_cores(MACHINE, few, "nn", own=True)
    assert variant.kernel.role == "gemm" and why.startswith("strict fp32 predicted")
    assert compute_modes.ran(variant, few) == "strict float32, expected to be faster here than tf32"
    variant, _why = on_gpu.on_tensor_cores(MACHINE, large, "nn", own=True)
    assert variant.params["TERMS"] == 1


def test_strict_fp32_leads_a_library_in_tf32_clearly_or_is_not_taken():
    """By the errors of both: of a time of TF32 that is little known it has to lead by more."""
    ours, library = catalog.get("wgmma").variant(), catalog.get("cublas_tf32").variant()
    strict = choices.Choice(catalog.get("tuned").variant(), 9.0, 0.1, "")
    for variant, us, error, taken in (
        (ours, 9.1, 0.1, True), (library, 9.1, 0.1, False), (library, 11.5, 0.1, True),
        (library, 11.5, 0.2, False),
    ):  # fmt: skip
        choice = choices.Choice(variant, us, error, "")
        assert choices.strict_is_faster("tf32", strict, choice) == taken
    split = choices.Choice(ours, 8.5, 0.1, "")
    assert choices.strict_is_faster("fp32x3", strict, split)  # which does not lead clearly
    assert not choices.strict_is_faster("tf32", strict, split)


def test_beyond_all_that_was_measured_fp32x3_is_taken_where_it_is_predicted_to_be_faster(
    monkeypatch,
):
    """Nothing leads clearly there, and strict fp32 takes four times as long at large products."""
    monkeypatch.setattr(model_files, "others", lambda *_of: [])
    choices.fastest.cache_clear()
    for n, k, strict in ((4096, 4096, False), (64, 64, True)):
        sides = (30_000_000, n, k)
        choice = choices.fastest(MACHINE, "fp32x3", sides, "nn", own=True)
        assert choice.error == math.inf
        problem = Problem(*sides, compute="fp32x3")
        variant, why = on_gpu.on_tensor_cores(MACHINE, problem, "nn", own=False)
        assert why.startswith("strict fp32") is strict and ("TERMS" in variant.params) is not strict
    choices.fastest.cache_clear()


def test_what_a_library_launches_counts_in_what_a_choice_is_worth():
    told = with_two_kernels(3)
    blind = dataclasses.replace(told, launches=None)
    assert judged(told)["regret"] < judged(blind)["regret"]


def test_a_model_needs_shapes(tmp_path):
    from hybrid_gemm.bench import models

    class Gpu:
        model = "Test GPU"

    with pytest.raises(UsageError, match="no model is made of mode 'fp8'"):
        models.make(Gpu(), ["fp8"], minutes=1)
    with pytest.raises(UsageError, match="minutes=0: shapes are timed"):
        models.make(Gpu(), ["tf32"], minutes=0)
    with pytest.raises(UsageError, match="no directory"):  # before it is measured for an hour
        models.make(Gpu(), ["tf32"], minutes=60, output=str(tmp_path / "missing"))


def test_disturbed_times_are_left_out_and_no_others():
    """Samples that something else made 50 us longer."""
    measured, rng = invented(), np.random.default_rng(2)
    measured.times[...] *= np.exp(0.03 * rng.standard_normal(measured.times.shape))
    counts = measured.counts(132)
    assert np.isfinite(fitting.undisturbed(measured, counts).times).all()
    rows = rng.choice(np.flatnonzero(measured.times[:, 1] < 30), 5, replace=False)
    measured.times[rows, 1] += 50 + 10 * rng.random(5)
    found = fitting.undisturbed(measured, counts)
    assert np.isnan(found.times[rows, 1]).all()
    assert np.isnan(found.times).sum() == 5


def test_few_products_stand_for_many():
    rng = np.random.default_rng(5)
    assert choices.few([((8, 8, 8), 3)]) == [((8, 8, 8), 3.0)]
    for _ in range(50):
        count = int(rng.integers(1, 60))
        many = {
            tuple(rng.integers(1, 5000, 3).tolist()): int(rng.integers(1, 4)) for _ in range(count)
        }
        found = choices.few(tuple(many.items()))
        assert 1 <= len(found) <= choices.FEW and {x for x, _ in found} <= many.keys()
        operations = sum(np.prod(x, dtype=float) * n for x, n in many.items())
        assert sum(np.prod(x, dtype=float) * n for x, n in found) == pytest.approx(operations)


@pytest.mark.parametrize("mode", ["fp32x3", "tf32", "float16"])
def test_parts_of_the_last_tiles_cost_what_is_known(mode):
    """A fit to large products made it 137 us a launch, at any size."""
    cutting = [x for x in model_files.model(MACHINE, mode).fitted if x.variant.cuts_last]
    assert cutting
    for each in cutting:
        assert tuple(each.constants[8:10]) == (3.0, 0.3)


def test_products_of_the_largest_sides_have_times():
    """Their counts are more than 64 bits hold."""
    largest = 2**31 - 1
    times = made(invented()).times_us((largest, 2**23, largest), "nn", MACHINE)
    assert all(0 < us < np.inf for us in times.values())


@pytest.mark.parametrize("shapes", [
    "float32", "float64", "float16", "tf32", "fp32x3", "lines_float32", "lines_float64",
    "long_float32", "long_float64", "long_float16", "long_tf32", "long_fp32x3", "tiny_float32",
    "tiny_float64", "tiny_float16",
])  # fmt: skip
def test_shipped_models_predict_times_to_which_they_were_not_fitted(shapes):
    """Of our kernels: half of them within a tenth, and few far off."""
    held_out = json.loads((ROOT / f"docs/results/heldout_{shapes}_h200.json").read_text())
    model, off = model_files.model(MACHINE, held_out["mode"]), []
    for row in held_out["rows"]:
        sides = row["m"], row["n"], row["k"]
        us = model.times_us(sides, row["layout"], MACHINE)
        named = {str(variant): us[variant] for variant in us}
        if row["own"] in named:  # and no variant of before
            off.append(abs(math.log(named[row["own"]] / row["own_us"])))
    assert np.median(off) < 0.1 and np.quantile(off, 0.9) < 0.3, len(off)
