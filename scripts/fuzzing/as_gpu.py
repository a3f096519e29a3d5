"""The emulator in the place of an H200: kernels are chosen as one would by its models of times, and
every second product is of arrays that lie on it, as `programs/on_gpu.py` makes them."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

import hybrid_gemm
from hybrid_gemm.arrays.caller_arrays import is_cast_to
from hybrid_gemm.arrays.strides import layout, leading
from hybrid_gemm.devices.emulator.device import EmulatorDevice
from hybrid_gemm.execution import plan_maker
from hybrid_gemm.kernel_choice.choose import choose
from hybrid_gemm.kernel_choice.tables import Machine
from hybrid_gemm.problem import Problem, make_problem

from .cases import Case
from .judge import Call, Outcome, judge, product

CAPABILITY, PROCESSORS, SHARED_BYTES = 90, 132, 227 << 10
PEAK_TFLOPS = {"float32": 67, "float64": 34, "int32": 33, "int64": 8}
# Options of products that are cut, which those of one GPU's arrays are not.
CUT = ("threads", "grid", "split", "reduce", "emulate_devices", "max_device_memory")


class Gpu:
    """What the choice asks of an H200; the rest is the emulator's."""

    kind, processors = "cuda", PROCESSORS

    def machine(self, dtype: str) -> Machine:
        return Machine("NVIDIA H200", PROCESSORS, CAPABILITY, PEAK_TFLOPS[dtype], SHARED_BYTES)

    def library_launch(self, problem: Problem, layout: str) -> None:
        return None


def choose_as_gpu(
    problem: Problem, products: Any, facts: Any, *, chosen: Any, own: bool, **how: Any
) -> tuple[Any, str]:
    """As `choose` on a GPU without libraries; where its kernel needs a GPU, as on the emulator."""
    if chosen is None and products:
        found = choose(problem, products, Gpu(), chosen=None, own=True, **how)
        if facts.kind in found[0].kernel.runs_on:
            return found
    return choose(problem, products, facts, chosen=chosen, own=own, **how)


def begin() -> None:
    """Has this process choose so from now on."""
    EmulatorDevice.capability, EmulatorDevice.processors = CAPABILITY, PROCESSORS
    plan_maker.choose = choose_as_gpu


def judged(case: Case) -> Outcome:
    """As `judge`; of every second case the product of arrays that lie on the device."""
    if case.number % 2 == 0:
        return judge(case)
    options = tuple(x for x in case.options if x[0] not in CUT)
    return judge(dataclasses.replace(case, options=options), alone)


def alone(case: Case, call: Call) -> Any:
    """The product as one GPU makes it of its own arrays, without a plan. What takes a plan there
    takes one here."""
    given = dict(case.options)
    if case.mistake or given.get("checked") or "algorithm" in given:
        return product(case, call)
    runner = hybrid_gemm.Runner(device=case.device, **given)
    device, plans, keywords = runner.devices[0], runner.plans, dict(call.keywords)
    problem = plans.settle(make_problem(call.a, call.b, call.c, **keywords))
    out = keywords["out"]
    if problem.is_complex or not (problem.m * problem.n * problem.k and problem.alpha):
        return product(case, call)
    if out is not None and not is_cast_to(out.dtype, problem.out_dtype):
        return product(case, call)  # which refuses it
    a, b = (
        _readable(np.asarray(x).T if trans else np.asarray(x), problem.operands)
        for x, trans in ((call.a, case.trans_a), (call.b, case.trans_b))
    )
    variant = plans.alone(problem, "".join((layout(x) or "n")[0] for x in (a, b)), device)
    scale = {"alpha": problem.alpha, "beta": problem.beta}
    c = _written(problem, out)
    _check_prepared(device, variant, a, b, c, problem)
    if problem.beta and call.c is not None and call.c is not c:
        c[...] = call.c
    make = device.loading_together(lambda d: d.bind(variant, a, b, c, **scale))
    with device.streams(1) as (stream,):
        make(a, b, c, stream)
        stream.synchronize()
    if c is out:
        return out
    with np.errstate(all="ignore"):
        made = c.astype(problem.out_dtype, copy=False)
        if out is None:
            return made
        out[...] = made
    return out


def _lies(x: np.ndarray, dtype: str) -> bool:
    """Whether it is an array as GPUs have: native, and on a whole element."""
    return x.dtype == dtype and x.dtype.isnative and x.flags.aligned


def _readable(x: np.ndarray, dtype: str) -> np.ndarray:
    """An operand where it lies, or a copy of it, if no kernel reads it there."""
    if _lies(x, dtype) and (leading(x, "n") or leading(x, "t")):
        return x
    turned = abs(x.strides[0]) < abs(x.strides[1])
    return x.T.astype(dtype, order="C").T if turned else x.astype(dtype, order="C")


def _written(problem: Problem, out: Any) -> np.ndarray:
    """What the kernel writes: `out`, or C beside it, in rows with a gap."""
    made = problem.dtype, problem.operands
    lies = type(out) is np.ndarray and leading(out, "n") and any(_lies(out, x) for x in made)
    if lies and problem.out_dtype in made:
        return out
    dtype = problem.out_dtype if problem.out_dtype in made else problem.dtype
    return np.full((problem.m, problem.n + 3), -7).astype(dtype)[:, : problem.n]


def _check_prepared(device: Any, variant: Any, a: Any, b: Any, c: Any, problem: Problem) -> None:
    """Raises `AssertionError` where runs and `warm` would compile less than is needed. A single
    row or column with steps is taken for one without."""
    if min(a.shape + b.shape) == 1:
        return
    prepared = device.kernels_of(lambda d: d.prepare(variant, a, b, problem.operands))
    needed = device.kernels_of(lambda d: d.bind(variant, a, b, c, alpha=2, beta=problem.beta))
    if missing := [x for x in needed if x not in prepared]:
        raise AssertionError(f"not prepared: {', '.join(map(str, missing))}")
    device.compile_all(prepared)
