"""Which kernel for a plan, and why: a pure function of the problem and the device's facts."""

import functools
from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest

from hybrid_gemm import Runner, catalog, devices
from hybrid_gemm.bench import search, selection
from hybrid_gemm.devices.emulator.device import EmulatorDevice
from hybrid_gemm.errors import UsageError
from hybrid_gemm.experiments.lab import Lab
from hybrid_gemm.kernel_choice import compute_modes, model_files
from hybrid_gemm.kernel_choice.choose import choose
from hybrid_gemm.kernel_choice.tables import Machine
from hybrid_gemm.problem import Problem

SQUARE = Problem(4096, 4096, 4096)


@dataclass
class Facts:
    kind: str
    capability: int = 0
    processors: int = 1

    def machine(self, dtype):
        name = "NVIDIA H200" if self.capability == 90 else "Some GPU"
        return Machine(name, 132, self.capability, 66.9) if self.kind == "cuda" else None

    def library_launch(self, problem, layout):
        return None


HOPPER, EMULATOR, CPU = Facts("cuda", 90, 132), Facts("emulator"), Facts("cpu")


def chosen(
    facts, problem=SQUARE, *, kernel=None, compute="fp32", own=False, products=None, panels=None
):
    variant = catalog.get(kernel).variant() if kernel else None
    arithmetic = compute_modes.arithmetic_for(
        compute, variant, kind=facts.kind, arch=facts.capability
    )
    settled = arithmetic.settle(problem)
    products = [(problem.m, problem.n, problem.k)] if products is None else products
    return choose(
        settled, products, facts, chosen=variant, own=own, arithmetic=arithmetic,
        panels=panels or {},
    )  # fmt: skip


def test_a_named_kernel_is_taken_because_it_was_asked_for():
    for facts, kernel in ((CPU, "blas"), (EMULATOR, "naive"), (HOPPER, "shared_tile")):
        variant, why = chosen(facts, kernel=kernel)
        assert (variant.name, why) == (kernel, "asked for")


def named_on(monkeypatch, gpu, dtype, kernel, **params):
    """The variant that a runner takes for a kernel that is named, on such a GPU."""
    monkeypatch.setattr(EmulatorDevice, "machine", lambda *_: gpu)
    runner = Runner(device="emulator", kernel=kernel, params=params or None)
    return runner.variant(runner.plan(Problem(1000, 900, 800, dtype)))


@pytest.mark.parametrize("multiprocessors", [108, 114, 128, 132, 148])
def test_a_named_kernel_has_blocks_for_the_multiprocessors_there_are(multiprocessors, monkeypatch):
    """A few more than a GPU has would start a second round of blocks."""
    gpu = Machine("Some GPU", multiprocessors, 80, 20.0, 163 << 10)
    on = functools.partial(named_on, monkeypatch, gpu, "float32", "tuned")
    with Runner(device="emulator", kernel="tuned", params={"STAGES": 4}) as runner:
        assert runner.plan(SQUARE).kernel == "tuned STAGES=4", "what was asked for, and no more"
    default = catalog.get("tuned").params[0]
    scaled = {"BLOCKS": multiprocessors, "SPLIT": multiprocessors}
    assert on().params == default | scaled
    assert on(STAGES=4).params == default | scaled | {"STAGES": 4}
    assert on(BLOCKS=132).params == default | scaled | {"BLOCKS": 132}, "what is given stays"
    monkeypatch.setattr(devices, "choose", lambda *_: ("cuda", ""))
    monkeypatch.setattr(devices, "open_first", lambda *_: Facts("cuda", 80, multiprocessors))
    (timed,) = selection.select(["tuned"], False, {"SPLIT": 4}, "cuda")
    assert timed.params == default | {"BLOCKS": multiprocessors, "SPLIT": 4}
    space = search.space(catalog.get("tuned"), count=multiprocessors)
    assert space[0].params == default | scaled
    lab = object.__new__(Lab)
    lab.device = SimpleNamespace(on_gpu=True, processors=multiprocessors)
    assert lab.variant("tuned", {"SPLIT": 4}) == timed


def test_a_named_kernel_takes_a_variant_that_has_room(monkeypatch):
    """The first of `mma_double` asks for 160 KiB, and a block of an RTX 4090 has 99."""
    first = catalog.get("mma_double").variant()
    for there, kib in ((128, 99), (108, 163)):
        gpu = Machine("Some GPU", there, 89, 1.3, kib << 10)
        found = named_on(monkeypatch, gpu, "float64", "mma_double")
        assert found.launch(1000, 900, 800, "float64").shared_bytes <= kib << 10
        assert (found == first.for_multiprocessors(there)) == (kib == 163)
    given = named_on(monkeypatch, replace(gpu, shared_bytes=9 << 10), "float64", "mma_double")
    assert given == first.for_multiprocessors(108), "none has room, and the launch says so"


def test_gpus_take_what_was_fastest_nearby_and_others_the_first_that_can():
    variant, why = chosen(HOPPER)
    assert why.startswith("fastest measured at 4096 x 4096 x 4096") and variant.name in {
        kernel.name for kernel in catalog.gemm_kernels()
    }
    assert not chosen(HOPPER, own=True)[0].kernel.library
    assert chosen(CPU)[0].name == "blas"
    assert chosen(EMULATOR)[0].name == "double_buffered"
    assert chosen(EMULATOR)[1] == "the default on the emulator"
    assert chosen(CPU)[1] == "the default on the cpu"


def test_the_choice_goes_by_the_largest_product():
    wide = chosen(HOPPER, products=[(4096, 4096, 4096), (1, 8, 4096)])
    assert wide == chosen(HOPPER)
    for sides in ((1, 8192, 8192), (8192, 1, 8192), (8192, 8192, 8)):
        found = chosen(HOPPER, products=[sides])
        assert found == chosen(HOPPER, Problem(*sides)) != wide


def test_tensor_cores_multiply_what_is_theirs():
    variant, why = chosen(HOPPER, compute="tf32", own=True)
    assert variant.name == "wgmma" and why.startswith("predicted ")
    assert chosen(replace(HOPPER, capability=89), compute="tf32", own=True)[0].name == "mma"
    assert chosen(EMULATOR, compute="fp32x3")[0].params["TERMS"] == 3
    assert chosen(EMULATOR, kernel="mma", compute="tf32")[1] == "asked for"


@pytest.mark.parametrize("capability", [80, 86, 89, 100, 120])
def test_on_tensor_cores_of_which_nothing_is_known_the_library_multiplies(capability):
    facts, unknown = Facts("cuda", capability, 108), "no model of times for such a GPU"
    for dtype in ("float16", "bfloat16"):
        for sides in ((4096, 4096, 4096), (1, 8192, 8192), (3, 5, 7)):
            narrow = Problem(*sides, operands=dtype, out_dtype=dtype)
            variant, why = chosen(facts, narrow, panels={sides: 4})
            assert (variant.name, why) == ("cublas", unknown)
            assert chosen(facts, narrow, own=True)[0].name == "mma"
    assert chosen(facts, compute="tf32") == (catalog.get("cublas_tf32").variant(), unknown)
    assert chosen(facts, compute="fp32x3")[0].name == "mma"  # which no library has
    long = replace(SQUARE, m=2**30 + 1, operands="float16", out_dtype="float16")
    assert chosen(facts, long)[0].name == "mma"  # beyond what cuBLAS takes


def test_a_kernel_that_cannot_is_refused_with_its_reason():
    with pytest.raises(UsageError, match="does not run on the cpu device"):
        chosen(CPU, kernel="naive")
    with pytest.raises(UsageError, match="one_block"):
        chosen(EMULATOR, kernel="one_block", products=[(8, 8, 8), (4096, 4096, 8)])


def test_nothing_to_multiply_needs_no_table():
    variant, why = chosen(HOPPER, replace(SQUARE, m=0), products=[])
    assert (variant.name, why) == ("naive", "the default on the cuda")


def together_us(variant, mode, panels):
    """What a variant should take for so many products of each sides."""
    model, machine = model_files.model(HOPPER.machine("float32"), mode), HOPPER.machine("float32")
    return sum(n * model.times_us(x, "nn", machine)[variant] for x, n in panels.items())


@pytest.mark.parametrize("compute, mode", [("fp32", "float32"), ("tf32", "tf32")])
def test_several_panels_get_what_is_fastest_for_all_of_them(compute, mode):
    better = 0
    for n in (2048, 4096, 6144, 8192, 12288):
        problem = replace(SQUARE, m=n, n=n, k=n, compute=compute)
        for rows, columns in ((n // 4, n), (n // 8, n // 2), (n // 4, n // 4)):
            panels = {(rows, columns, n): 3, (rows // 2, columns, n): 2}
            whole, _why = chosen(HOPPER, problem, compute=compute)
            found, why = chosen(HOPPER, problem, compute=compute, panels=panels)
            if found == whole:
                continue
            better += 1
            assert why.endswith("for 5 panels") and found.kernel.role == whole.kernel.role
            assert together_us(found, mode, panels) < together_us(whole, mode, panels)
    assert better >= 3


@pytest.mark.parametrize("compute", ["fp32", "fp32x3"])
@pytest.mark.parametrize("empty", [(0, 4096, 4096), (2048, 0, 4096), (2048, 4096, 0)])
def test_empty_panels_are_not_looked_at(compute, empty):
    problem = replace(SQUARE, compute=compute)
    full = {(2048, 4096, 4096): 3, (1024, 4096, 4096): 1}
    chosen_for = functools.partial(chosen, HOPPER, problem, compute=compute)
    assert chosen_for(panels={empty: 7, **full}) == chosen_for(panels=full)
    assert chosen_for(panels={empty: 7}) == chosen_for()


def test_one_panel_is_chosen_for_as_ever_and_a_named_kernel_stays():
    whole = chosen(HOPPER, replace(SQUARE, m=2048))
    assert chosen(HOPPER, replace(SQUARE, m=2048), panels={(2048, 4096, 4096): 1}) == whole
    many = {(256, 4096, 4096): 8}
    assert chosen(HOPPER, kernel="shared_tile", panels=many)[1] == "asked for"
    assert not chosen(HOPPER, own=True, panels=many)[0].kernel.library
    assert chosen(EMULATOR, panels=many) == chosen(EMULATOR)


def test_several_shapes_say_more_than_one():
    """Of panels of one of two H200s at 16384. Ours took 168 ms for all of both, with K in two
    chunks, and cuBLAS 175 with K whole (docs/results/chunks2_before_h200.json)."""
    problem = Problem(16384, 8192, 16384)
    panels = {(1024 * i, 2048, 16384): 2 for i in range(2, 16, 2)} | {(1024, 8192, 16384): 8}
    alone = [chosen(HOPPER, Problem(*sides))[0].kernel.library for sides in panels]
    together, why = chosen(HOPPER, problem, panels=panels)
    assert any(alone) and not together.kernel.library and why.endswith("for 22 panels")


@pytest.mark.parametrize("sides", [(4096, 4096, 96), (8192, 8192, 128)])
def test_panels_are_chosen_for_with_what_beta_scales(sides):
    """Our kernels on tensor cores take longer than cuBLAS to read a C of 16 bits."""
    m, n, k = sides
    plain = Problem(*sides, operands="float16", out_dtype="float16")
    panels = {(m // 4, n, k): 4}
    assert not chosen(HOPPER, plain, panels=panels)[0].kernel.library
    assert chosen(HOPPER, replace(plain, beta=0.5), panels=panels)[0].kernel.library
