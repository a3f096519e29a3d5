"""Models of times of GPUs that are like others. Pure."""

import dataclasses
import math

import numpy as np
import pytest
from support.fitted import MACHINE, invented

from hybrid_gemm.bench import drawing, fitting
from hybrid_gemm.kernel_choice import choices, model_files, on_gpu
from hybrid_gemm.kernel_choice.tables import Machine
from hybrid_gemm.problem import Problem


def test_where_a_gpu_timed_nothing_so_long_another_s_model_is_asked(monkeypatch):
    """An H200 that has timed no m and n above 16384; the H100 has."""
    long, square = (1, 4, 7_741_249), (4096, 4096, 4096)
    whole = model_files.model(MACHINE, "float32")
    assert model_files.knowing(MACHINE, "float32", long) is whole
    own = dataclasses.replace(whole)
    own.__dict__["_longest"] = [2.5 * 16384] * 3
    read = model_files.model
    monkeypatch.setattr(model_files, "model", lambda m, x: own if m is MACHINE else read(m, x))
    choices.fastest.cache_clear()
    assert model_files.knowing(MACHINE, "float32", square) is own and not own.knows(long)
    other = model_files.knowing(MACHINE, "float32", long)
    assert "H100" in other.lent and other.knows(long)
    choice = choices.fastest(MACHINE, "float32", long, "nt", own=False)
    # As fast there; others take six times as long.
    assert choice.variant.name in ("dots", "gemv", "cublas")
    assert "H100" in choice.why
    h100 = dataclasses.replace(MACHINE, model="NVIDIA H100 80GB HBM3")
    assert not model_files.knowing(h100, "float32", long).lent
    for sides in ((2**26, 2, 2), (2, 2, 2**26)):  # nobody's
        assert model_files.knowing(MACHINE, "float32", sides) is own
    choices.fastest.cache_clear()


def test_a_model_of_another_gpu_like_it_asks_for_twice_the_lead(tmp_path, monkeypatch):
    monkeypatch.setenv("HYBRID_GEMM_CACHE", str(tmp_path))
    on_gpu.forget()
    like, smaller = Machine("NVIDIA H999", 132, 90, 66.9), Machine("NVIDIA H998", 114, 90, 50.0)
    model = model_files.model(like, "float32")
    assert model is not None and model.lent == "NVIDIA H200"
    for sides in ((3001, 1111, 77), (1, 3001, 77)):
        assert model.lead(sides) == 2 * model_files.model(MACHINE, "float32").lead(sides)
    variant, why = on_gpu.strict(like, Problem(3001, 1111, 77))
    assert "by times of NVIDIA H200" in why and variant
    assert model_files.model(smaller, "float32") is None
    assert on_gpu.strict(smaller, Problem(3001, 1111, 77))[0].name == "cublas"
    on_gpu.forget()


@pytest.mark.parametrize("adds", [False, True])
def test_times_of_another_gpu_are_never_below_what_this_one_s_memory_takes(adds):
    """The H100's reaches 3352 GB/s; float64 on it goes by times of the H200, whose reaches 4800."""
    sides, layout = (3, 8192, 8192), "nn"
    moved = 8 * (3 * 8192 + 8192 * 8192 + (1 + adds) * 3 * 8192)
    h100 = Machine("NVIDIA H100 80GB HBM3", 132, 90, 66.9)
    model = model_files.model(h100, "float64")
    assert model.lent
    before = model.times_us(sides, layout, h100, adds=adds)
    known = dataclasses.replace(h100, memory_gbps=3352.0)
    times = model.times_us(sides, layout, known, adds=adds)
    assert min(before.values()) < moved / 3352e3 <= min(times.values())
    assert sorted(times, key=times.get) == sorted(before, key=before.get)
    own = model_files.model(known, "float32")  # of its own times it knows better
    assert own.times_us(sides, layout, known) == own.times_us(sides, layout, h100)


def off_costs(measured, factor=1.0):
    """Times that depend on layouts and on m in ways of their own, and all of them on the clock."""
    m, a, b = measured.places[:, [0]], measured.places[:, [3]], measured.places[:, [4]]
    times = measured.times * factor * np.exp(0.08 * (m - 9) + 0.3 * a - 0.2 * b)
    return dataclasses.replace(measured, times=times)


def test_a_model_that_continues_that_of_another_gpu_needs_fewer_shapes():
    """Errors of predictions at shapes that no model has seen; a second GPU, of a slower clock, was
    measured at 20."""
    first, few = off_costs(invented(200)), off_costs(invented(20, seed=8), 1.25)
    unseen = off_costs(invented(60, seed=9), 1.25)
    of_first = fitting.data(first, fitting.fit(first, first.counts(132)), MACHINE)
    base = model_files.from_data(of_first, MACHINE)
    like = dataclasses.replace(MACHINE, model="NVIDIA H999")
    continued = fitting.data(few, fitting.fit(few, few.counts(132), base), like, base=of_first)
    alone = fitting.data(few, fitting.fit(few, few.counts(132)), like)

    def error(data):
        model = model_files.from_data(data, like)
        return np.mean([
            abs(math.log(us / times[few.variants.index(v)]))
            for drawn, times in zip(unseen.drawn, unseen.times, strict=True)
            for v, us in model.times_us(drawn.shape, drawn.layout, like).items()
        ])  # fmt: skip

    errors = error(continued), error(alone), error(of_first)
    assert errors[0] < 0.7 * min(errors[1:]), errors


def test_errors_of_another_gpu_are_not_taken_for_this_ones():
    few = invented(40, seed=8)
    first = written_data(invented(), MACHINE)
    base = model_files.from_data(first, MACHINE)
    for model, known in (("NVIDIA H999", 40), (MACHINE.model, 200)):
        machine = dataclasses.replace(MACHINE, model=model)
        found = fitting.fit(few, few.counts(132), base)
        library = fitting.fit_library(few, machine, base)
        data = fitting.data(few, found, machine, library, first)
        made = model_files.from_data(data, machine)
        assert len(made.places) == 200 and np.isfinite(made.errors[0]).sum() == known


def written_data(measured, machine):
    return fitting.data(measured, fitting.fit(measured, measured.counts(132)), machine)


def test_the_h100_has_models_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setenv("HYBRID_GEMM_CACHE", str(tmp_path))
    on_gpu.forget()
    machine = dataclasses.replace(MACHINE, model="NVIDIA H100 80GB HBM3")
    for mode in ("float32", "tf32", "float16", "fp32x3"):
        model = model_files.model(machine, mode)
        assert model is not None and not model.lent
        apart = []
        for drawn in drawing.draw(9, 20):
            ours, theirs = (
                x.times_us(drawn.shape, drawn.layout, MACHINE)
                for x in (model, model_files.model(MACHINE, mode))
            )
            apart.append(math.log(min(ours.values()) / min(theirs.values())))
        assert 0.95 < math.exp(np.mean(apart)) < 1.3, mode  # of the H100, whose memory is slower
        assert np.ptp(apart) > 0.02, mode
    on_gpu.forget()


@pytest.mark.parametrize(("multiprocessors", "continued"), [(132, True), (114, False)])
def test_tune_continues_a_shipped_model_of_a_gpu_like_it(multiprocessors, continued):
    """Here one that takes twice as long as the H200."""
    from types import SimpleNamespace

    from hybrid_gemm.bench import models

    machine = Machine("NVIDIA H999", multiprocessors, 90, 66.9)
    h200 = model_files.model(MACHINE, "tf32")
    rows, drawn = [], drawing.draw(77, 60)
    for each in drawn[:40]:
        times = h200.times_us(each.shape, each.layout, MACHINE)
        rows.append({
            "mode": "tf32", "shape": each.shape, "layout": each.layout, "kind": each.kind,
            "us": {str(v): 2 * us for v, us in times.items()}, "launched": None,
        })  # fmt: skip
    gpu = SimpleNamespace(
        model=machine.model, processors=multiprocessors, machine=lambda dtype: machine
    )
    bench = SimpleNamespace(
        mode="tf32", problem=lambda shape: shape,
        candidates=lambda shape: [x.variant for x in h200.fitted],
    )  # fmt: skip
    row, data = models._fit(gpu, bench, rows)
    model = model_files.from_data(data, machine)
    assert len(model.places) == 40 + len(h200.places) * continued and row["shapes"] == 40
    off = [
        math.log(us / (2 * known[v]))
        for each in drawn[40:]
        for known in [h200.times_us(each.shape, each.layout, MACHINE)]
        for v, us in model.times_us(each.shape, each.layout, machine).items()
    ]
    assert (np.sqrt(np.mean(np.square(off))) < 0.02) == continued
