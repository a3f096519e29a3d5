"""Plans and kernels for GPUs that are not here: products drawn at random, empty and thin ones among
them, go through all that a call decides before it touches a GPU. No GPU needed."""

import dataclasses
import math
from collections import Counter

import numpy as np
import pytest
from support import late_gpus
from support.devices import KERNEL_DEVICES

from hybrid_gemm import Runner
from hybrid_gemm.errors import OutOfMemoryError
from hybrid_gemm.kernel_choice import choices, compute_modes, on_gpu, stacks
from hybrid_gemm.kernel_choice.choose import choose
from hybrid_gemm.kernel_choice.library_kernels import Launched
from hybrid_gemm.kernel_choice.tables import Machine
from hybrid_gemm.planning import link_rates
from hybrid_gemm.planning.hardware import DeviceSpec
from hybrid_gemm.planning.planner import make_plan
from hybrid_gemm.problem import Problem
from hybrid_gemm.reporting import thread_report

# The rates of a host of four H200s, about.
RATES = {"h2d": 50.0, "d2h": 50.0, "both": 80.0, "ring": 300.0, "memcpy": 40.0}
LINKS = link_rates.from_data({
    "measured": "2026-01-01",
    "rows": [
        {"link": link, "memory": "device" if link == "ring" else "pinned", "at_once": count,
         "gbps": count * gbps}
        for link, gbps in RATES.items()
        for count in (1, 2, 4)
    ],
})  # fmt: skip
GPU = DeviceSpec(
    "gpu:0", "cuda", 0, 130 << 30, tflops=50, memory_gbps=4200, link_gbps=50, peer_gbps=300,
    best_tflops=55, links=LINKS, rated=True,
    mode_tflops=(("fp32x3", 230.0), ("tf32", 420.0), ("narrow", 780.0)),
)  # fmt: skip
ARITHMETICS = (
    ("float32", "fp32"), ("float32", "fp32x3"), ("float32", "tf32"), ("float32", "auto"),
    ("float64", "fp32"), ("float64", "fp64x"), ("float16", "fp32"), ("bfloat16", "fp32"),
    ("int32", "fp32"), ("int64", "fp32"),
)  # fmt: skip
LITTLE = 2 << 30  # bytes of memory, with which large products take turns
CASES = 400


# The H200 and the H100 have models of times of their own, others of compute capability 9.0 lend
# them, and the rest have none.
NAMES = {"NVIDIA H200": 90, "NVIDIA H100 80GB HBM3": 90, "NVIDIA GH200": 90, "NVIDIA A100": 80}


@dataclasses.dataclass(frozen=True)
class Facts:
    """Of a device, and what its library would launch, if it is asked."""

    name: str
    launched: Launched | None
    kind = "cuda"
    processors = 132

    @property
    def capability(self):
        return NAMES[self.name]

    def machine(self, dtype):
        peak = 33.5 if dtype == "float64" else 66.9
        return Machine(self.name, self.processors, self.capability, peak)

    def library_launch(self, problem, layout):
        return self.launched


@dataclasses.dataclass(frozen=True)
class Drawn:
    """What a caller asks for."""

    problem: Problem
    facts: Facts
    specs: tuple[DeviceSpec, ...]
    workers: int | list[int]
    options: dict
    own: bool
    layout: str


def drawn(random: np.random.Generator) -> Drawn:
    def side() -> int:
        if random.random() < 0.3:
            return int(random.choice([0, 1, 2, 3, 15, 17, 64, 128]))
        return int(np.exp(random.uniform(0, np.log(40_000))))

    dtype, compute = ARITHMETICS[random.integers(len(ARITHMETICS))]
    beta = float(random.choice([0, 1]))
    problem = Problem(side(), side(), side(), dtype, 1.0, beta, compute=compute)
    gpus = int(random.choice([1, 2, 4, 8]))
    workers = gpus * int(random.choice([1, 1, 2]))
    spec = dataclasses.replace(
        GPU, links=None if random.random() < 0.2 else LINKS, checked=bool(random.random() < 0.2),
        memory_bytes=GPU.memory_bytes if random.random() < 0.7 else LITTLE,
    )  # fmt: skip
    emulated = random.random() < 0.2  # one GPU plays all
    specs = [dataclasses.replace(spec, unit=0 if emulated else i) for i in range(gpus)]
    ways = [{}, {"split": "rows"}, {"split": "cols"}, {"grid": (workers, 1, 1)},
            {"grid": (1, workers, 1)}, {"grid": (1, 1, workers)}]  # fmt: skip
    options = dict(ways[random.integers(len(ways))])
    if not options:
        workers = [x for x in (1, 2, 4, 8) if x <= workers]
    options["page_locked"] = bool(random.integers(2))
    options["resident"] = bool(random.random() < 0.2)
    layout = str(random.choice(["nn", "nt", "tn", "tt"]))
    blocks = int(random.integers(0, 2000))
    launched = Launched("some kernel", *map(int, random.choice([1, 64, 256], 2)), blocks, 1)
    facts = Facts(str(random.choice(list(NAMES))), launched if random.integers(2) else None)
    return Drawn(
        problem, facts, tuple(specs), workers, options, bool(random.integers(2)), layout
    )  # fmt: skip


def decided(case: Drawn):
    """The plan, and the kernel with the reason for it, as a call makes them (`PlanMaker`)."""
    problem, facts = case.problem, case.facts
    arithmetic = compute_modes.arithmetic_for(
        problem.compute, None, kind=facts.kind, arch=facts.capability
    )
    settled = arithmetic.settle(dataclasses.replace(problem, alpha=1.0 if problem.k else 0.0))
    plan = make_plan(settled, case.specs, case.workers, kernel="auto", **case.options)
    choice = choose(
        plan.problem, plan.products, facts, chosen=None, own=case.own, arithmetic=arithmetic,
        layout=case.layout, panels=plan.multiplied,
    )  # fmt: skip
    return plan, *choice


@pytest.mark.parametrize("seed", range(8))
def test_every_product_gets_a_plan_and_a_kernel(seed):
    random, seen = np.random.default_rng(seed), Counter()
    for _ in range(CASES // 8):
        case = drawn(random)
        try:
            plan, variant, why = decided(case)
        except OutOfMemoryError as error:  # of what may take no turns, or of panels of one row
            assert case.specs[0].memory_bytes == LITTLE or case.options["resident"], (case, error)
            seen["refused"] += 1
            continue
        problem = case.problem
        seen["empty" if not problem.m * problem.n * problem.k else "planned"] += 1
        seen["in turns"] += plan.turns_in_memory
        multiplied = sum(math.prod(sides) * count for sides, count in plan.multiplied.items())
        assert multiplied == problem.m * problem.n * problem.k, case
        assert why, case
        sides = problem.m, problem.n, problem.k
        machine = case.facts.machine(problem.dtype)
        if all(sides):  # what first calls would compare it with
            others = on_gpu.next_fastest(
                machine, plan.problem, case.layout, variant, own=case.own
            )  # fmt: skip
            assert len(others) <= 2 and variant not in others, case
            assert not any(case.own and x.kernel.library for x in others), case
        of_stack = stacks.faster(1000, sides, case.layout, problem.dtype)
        assert of_stack is None or of_stack == stacks.own(sides, problem.dtype), case
        assert not (case.own and variant.kernel.library), case
        if variant.kernel.role == "gemm" and not variant.kernel.library:
            ways = plan.problem.operands, plan.problem.dtype
            dtype = next(x for x in ways if x in variant.kernel.dtypes)
            for m, n, k in plan.products:
                options = {"device": "cuda", "dtype": dtype, "m": m, "n": n, "k": k}
                assert variant.refusal(**options) is None, (case, variant)
        said = thread_report.expected(plan)
        assert 0 <= plan.predicted_ms < math.inf, case
        assert (said["predicted_ms"] is None) == bool(said["unpredicted"]), case
        assert all(0 <= ms < math.inf for ms in said["bounds_ms"].values()), case
    assert seen["planned"] > seen["refused"] and seen["empty"], seen


@pytest.mark.parametrize("device", KERNEL_DEVICES)
def test_a_plan_asks_for_the_rates_of_its_own_arithmetic_alone(device, monkeypatch):
    """To read a model of times takes 20 ms or more, which first calls would wait for."""
    asked, read = [], []
    with Runner(device=device, gpus=[0] if device == "cuda" else None) as runner:
        kind, best = type(runner.devices[0]), choices.best_tflops
        spec = kind.spec

        def noted(self, *what):
            asked.append(what)
            return spec(self, *what)

        monkeypatch.setattr(kind, "spec", noted)
        monkeypatch.setattr(choices, "best_tflops", lambda *x: read.append(x[1]) or best(*x))
        for compute, mode, model in (
            ("fp32", "fp32", []), ("tf32", "tf32", ["tf32"]), ("fp32x3", "fp32x3", ["fp32x3"]),
        ):  # fmt: skip
            del asked[:], read[:]
            plan = runner.plans.plan(Problem(640, 640, 640, compute=compute))
            assert asked == [("float32", mode)]
            assert read == (model if device == "cuda" else [])
            assert {name for name, _ in plan.devices[0].mode_tflops} <= {mode}


@pytest.mark.parametrize("untold", ["MemoryClockRate", "memoryBusWidth"])
def test_a_gpu_that_tells_nothing_of_its_memory_has_plans(untold, monkeypatch):
    """As Jetson Thor, whose driver gives 0 for both."""
    if untold == "memoryBusWidth":
        monkeypatch.setitem(late_gpus.PROPERTIES, untold, 0)
    else:
        clocks = {"ClockRate": 1_500_000, untold: 0}
        monkeypatch.setattr(late_gpus.Device, "attributes", clocks)
    late_gpus.play(monkeypatch, np.random.default_rng(0), 2)
    runner = Runner(device="cuda")
    assert 0 < runner.plans.specs()[0].memory_gbps < math.inf
    for resident in (False, True):
        plan = runner.plans.plan(Problem(700, 800, 900), resident=resident)
        assert 0 < plan.predicted_ms < math.inf


@pytest.mark.parametrize("capability", [(7, 0), (8, 0), (8, 6), (8, 9), (10, 0), (12, 0)])
def test_no_more_is_expected_of_an_unknown_gpu_than_its_peak(capability, monkeypatch):
    """float64 runs at a 64th of float32's rate on some, and float32 at half of others'."""
    for name, number in zip(("major", "minor"), capability, strict=True):
        monkeypatch.setitem(late_gpus.PROPERTIES, name, number)
    late_gpus.play(monkeypatch, np.random.default_rng(0))
    with Runner(device="cuda") as runner:
        for dtype in ("float32", "float64", "int32"):
            spec = runner.devices[0].spec(dtype)
            assert 0.5 < spec.tflops / spec.best_tflops < 1, (dtype, spec)
            plan = runner.plans.plan(Problem(4096, 4096, 4096, dtype))
            said = thread_report.expected(plan)
            assert said["phases_ms"]["multiply"] > said["bounds_ms"]["compute"], dtype
