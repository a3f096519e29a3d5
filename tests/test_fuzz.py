"""scripts/fuzz: what it finds, what it lets pass, and a short run of it."""

import json
import subprocess
import sys
import threading

import numpy as np
import pytest
from support.scripts import SCRIPTS, loaded

import hybrid_gemm
from hybrid_gemm import catalog
from hybrid_gemm.devices.cpu import CpuDevice
from hybrid_gemm.devices.emulator import program
from hybrid_gemm.devices.emulator.device import EmulatorDevice
from hybrid_gemm.errors import UsageError
from hybrid_gemm.kernel_choice.choose import choose
from hybrid_gemm.kernel_choice.compute_modes import Arithmetic
from hybrid_gemm.problem import NARROW, Problem

sys.path.insert(0, str(SCRIPTS))

from fuzzing import as_gpu, campaign, cases, judge, kernels, matrices

SEED = 20261122
COUNT = {"cpu": 150, "emulator": 12, "cuda": 300}  # .ci/run has thousands


def test_a_short_campaign_finds_nothing(device):
    count = COUNT[device]
    said = []
    report = campaign.campaign(device, SEED, range(count), say=said.append)
    assert report.exit_code == 0, said
    assert report.outcomes.total() == count and not report.failures
    assert report.outcomes[judge.RIGHT] > count / 2 and report.outcomes[judge.REFUSED]


# --- what it would find -------------------------------------------------------------------

right_gemm = CpuDevice.gemm


def without_a_slab(self, variant, a, b, c, **more):
    right_gemm(self, variant, a[:, :-1], b[:-1], c, **more)


def with_another_sign(self, variant, a, b, c, *, alpha, **more):
    right_gemm(self, variant, a, b, c, alpha=-alpha, **more)


def without_the_last_row(self, variant, a, b, c, **more):
    right_gemm(self, variant, a[:-1], b, c[:-1], **more)


def reading_c(self, variant, a, b, c, *, beta, **more):
    right_gemm(self, variant, a, b, c, beta=beta or 1e-30, **more)


def changing_a(self, variant, a, b, c, **more):
    right_gemm(self, variant, a, b, c, **more)
    if a.size and a.flags.writeable:
        a[0, 0] += 1


def writing_past_c(self, variant, a, b, c, **more):
    right_gemm(self, variant, a, b, c, **more)
    if c.size and c.strides[0] > c.shape[1] * c.itemsize:
        np.lib.stride_tricks.as_strided(c, (1, c.shape[1] + 1), c.strides)[0, -1] = 3


def breaking(self, variant, a, b, c, **more):
    if c.shape[1] % 3 == 2:
        raise IndexError("planted")
    right_gemm(self, variant, a, b, c, **more)


def refusing(self, variant, a, b, c, **more):
    if c.shape[1] % 3 == 2:
        raise UsageError("planted: too few columns of this kind")
    right_gemm(self, variant, a, b, c, **more)


FAULTS = {
    without_a_slab: 3, with_another_sign: 3, without_the_last_row: 3, reading_c: 3, changing_a: 3,
    writing_past_c: 3, breaking: 1, refusing: 1,
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_planted_fault_is_found_and_shrunk(fault, monkeypatch):
    monkeypatch.setattr(CpuDevice, "gemm", fault)
    said = []
    report = campaign.campaign("cpu", SEED, range(14), say=said.append)
    assert report.exit_code == FAULTS[fault], said
    assert report.failures
    repeat, shrunk = said[0].rpartition(" | ")[2], said[1]
    assert shrunk.startswith("    shrunk: ") and repeat.startswith(
        "scripts/fuzz --device cpu --seed"
    )
    again = cases.draw("cpu", SEED, int(repeat.split()[-1]))
    # What is read of a new partial is what lay in that memory before: zeros do no harm.
    assert judge.judge(again).failed or fault is reading_c
    monkeypatch.undo()
    assert not judge.judge(again).failed


def test_what_should_be_refused_and_is_not_is_wrong():
    def lenient(case, call):
        call.keywords["out"] = None
        try:
            return judge.product(case, call)
        except hybrid_gemm.errors.HybridGemmError:
            return np.zeros((case.m, case.n))

    drawn = (cases.draw("cpu", SEED, number) for number in range(300))
    chosen = [x.number for x in drawn if x.mistake in ("k differs", "out shape", "out read-only")]
    report = campaign.campaign(
        "cpu", SEED, chosen, judged=lambda case: judge.judge(case, lenient), say=lambda line: None
    )
    assert any(x["found"].startswith("not refused") for x in report.failures)


def test_the_same_seed_makes_the_same_case():
    one, two = (matrices.make(cases.draw("cpu", SEED, 11)) for _ in range(2))
    assert one.frozen() == two.frozen()
    assert cases.draw("cpu", SEED, 11) != cases.draw("cpu", SEED + 1, 11)


# --- kernels that are named ---------------------------------------------------------------


def test_cases_of_the_emulator_name_its_kernels_and_give_them_what_they_take():
    named = taken = 0
    met, dtypes = set(), set()
    for number in range(0, 4000, 3):
        case = cases.draw("emulator", SEED, number)
        variant = kernels.variant_of(dict(case.options))
        if variant is None or "emulator" not in variant.kernel.runs_on:
            continue
        named += 1
        met.add(variant.name)
        dtypes |= {(variant.name, name) for name in case.dtypes[:2]}
        taken += variant.takes(case.m, case.n, case.k, variant.kernel.dtypes[0])
    able = [x for x in catalog.kernels().values() if "emulator" in x.runs_on]
    able = [x for x in able if x.role in ("gemm", "tensor", "residues")]
    assert met == {x.name for x in able}
    assert named > 400 and taken > 0.9 * named
    halves = [x.name for x in able if x.dtypes == NARROW]
    assert halves and all((name, dtype) in dtypes for name in halves for dtype in NARROW)


def test_some_named_kernels_have_parameters_that_their_headers_allow_and_do_not_list():
    listed, others = 0, set()
    for number in range(0, 8000, 8):
        options = dict(cases.draw("emulator", SEED, number).options)
        if "params" not in options:
            continue
        variant = kernels.variant_of(options)
        assert variant is not None, options  # one that rules allow
        if variant.params in variant.kernel.params:
            listed += 1
        else:
            others.add(str(variant))
    assert len({x.split()[0] for x in others}) > 10
    assert listed > 2 * len(others)  # each of which is compiled anew


# --- the script ---------------------------------------------------------------------------


@pytest.fixture
def module():
    """scripts/fuzz, imported."""
    return loaded("fuzz")


@pytest.fixture
def script(module, monkeypatch):
    """Runs scripts/fuzz with arguments; its exit code."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["fuzz", *map(str, arguments)])
        try:
            return module.main()
        finally:
            # What ends a process whose product hangs would end this one, minutes later.
            assert not any("watch" in thread.name for thread in threading.enumerate())

    return run


def test_a_product_that_hangs_ends_the_process(module, monkeypatch, capfd):
    codes = []
    monkeypatch.setattr(module.os, "_exit", codes.append)
    with module.Watch("scripts/fuzz --seed 1") as watch:
        watch.started(7)
    assert not watch.thread.is_alive() and not codes
    monkeypatch.setattr(module, "HANGS_S", 0)
    with module.Watch("scripts/fuzz --seed 1") as watch:
        watch.thread.join(60)
    out, err = capfd.readouterr()
    assert codes == [1] and "(most recent call first)" in err
    assert "hangs for 0 s | scripts/fuzz --seed 1 --only -1" in out


def test_the_script_counts_what_it_did(script, tmp_path, capsys):
    result = tmp_path / "fuzz.json"
    assert script("--seed", 5, "--count", 40, "--json", result) == 0
    data = json.loads(result.read_text())
    assert data["products"] == 40 == data["right"] + data["refused"]
    assert data["wrong"] == data["exception"] == 0 and data["failures"] == []
    assert sum(data["choices"]["dtype of A"].values()) == 40
    assert {"seed", "command", "environment", "refusals"} <= set(data)
    assert "--seed 5" in capsys.readouterr().out


def test_several_processes_make_the_same_cases(script, tmp_path):
    alone, together = tmp_path / "alone.json", tmp_path / "together.json"
    assert script("--seed", 5, "--count", 40, "--json", alone) == 0
    assert script("--seed", 5, "--count", 40, "--at-once", 2, "--json", together) == 0
    one, two = (json.loads(x.read_text()) for x in (alone, together))
    kept = ("products", "right", "refused", "wrong", "exception", "refusals", "choices")
    assert {x: one[x] for x in kept} == {x: two[x] for x in kept}


def of_its_own(*arguments):
    """What the script prints and its exit code, in a process of its own."""
    words = [sys.executable, str(SCRIPTS / "fuzz"), *map(str, arguments)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=600)
    return done.stdout + done.stderr, done.returncode


def test_small_products_are_cut_as_large_ones():
    said, code = of_its_own("--small-pieces", "--seed", SEED, "--count", 40)
    assert code == 0, said


def test_the_emulator_takes_what_an_h200_would(tmp_path):
    if reason := program.unavailable():
        pytest.skip(reason)
    said, code = of_its_own("--device", "emulator", "--as-gpu", "--seed", SEED, "--count", 8)
    assert code == 0, said
    said, code = of_its_own("--device", "cpu", "--as-gpu")
    assert code == 2 and "--as-gpu is for --device emulator" in said


@pytest.mark.parametrize("sides", [(2000, 8, 8), (8, 2000, 8), (1, 300, 300)])
def test_as_on_an_h200_other_kernels_are_chosen_than_on_the_emulator(sides):
    how = {"chosen": None, "own": False, "arithmetic": Arithmetic("fp32", None)}
    problem, facts = Problem(*sides), EmulatorDevice()
    here, there = (
        each(problem, [sides], facts, **how)[0] for each in (choose, as_gpu.choose_as_gpu)
    )
    assert here.name == "double_buffered" != there.name and "emulator" in there.kernel.runs_on


@pytest.mark.parametrize("fault, code", [(without_a_slab, 3), (breaking, 1)])
def test_its_exit_code_says_what_was_found(script, fault, code, monkeypatch, capsys):
    monkeypatch.setattr(CpuDevice, "gemm", fault)
    assert script("--seed", SEED, "--count", 14) == code
    line = next(x for x in capsys.readouterr().out.splitlines() if " | " in x)
    number = line.split()[-1]
    assert script("--seed", SEED, "--only", number) == code
