"""Which float64 products are made by residues on int8 tensor cores (`compute="fp64x"`): those for
which that should be faster than the device's own float64 product. Pure.

How many moduli a product takes depends on its data; times are those of so many.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from .. import catalog
from ..catalog import Variant
from ..planning.plan import MODULI
from ..problem import Problem
from . import choices, on_gpu
from .tables import Machine

MOST_K = 2**17 - 1  # sums of so many products of residues, at most 2^14 each, are below 2^31
MOST_M = 2**20 - 16  # rows of C that one launch of kernels/residues_combine.cu takes
USUAL = 14  # moduli of normal and uniform data
# Multiply-adds of int8 for each of float64 at the hardware's peak (CUDA Programming Guide, and the
# data sheets of A100, RTX 3090, RTX 4090 and H200), and the share of the former that our kernels
# reach: measured on an H200 (docs/results/fp64x_h200.json); elsewhere assumed.
_INT8 = {80: (32, 0.4), 86: (512, 0.4), 89: (512, 0.4), 90: (32, 0.7), 120: (512, 0.4)}
_NATIVE_SHARE = 0.85  # of float64's peak that cuBLAS reaches, where there is no model: assumed
# Bytes a microsecond of the passes before and after the product, and microseconds that their
# launches and the wait for the decision take.
_MEMORY = {90: 2.6e6}
_MEMORY_ELSEWHERE = 1e6
_FIXED_US = 80.0
# Of native float64's predicted time that residues may take: either prediction was up to a tenth off
# where the other was right (docs/results/fp64x_h200.json).
LEAD = 0.82
_FINISHING_K = 256  # what finishing a tile takes, as so much k: residues of C with a short k
_SIDE = 256  # rows and columns of C that blocks make together


def too_large(m: int, k: int) -> str | None:
    """Why residues do not multiply so many rows, or so long ones; None if they do."""
    if k > MOST_K:
        return f"k is above {MOST_K}"
    return f"m is above {MOST_M}" if m > MOST_M else None


def native(
    machine: Machine | None, problem: Problem, layout: str, *, own: bool = False,
    ask: on_gpu.Ask = on_gpu.never,
) -> Variant:  # fmt: skip
    """What multiplies float64 on a device where residues do not: as `on_gpu.strict`."""
    if machine is None:
        return catalog.get("double_buffered").variant()
    return on_gpu.strict(machine, replace(problem, compute="fp32"), layout, own=own, ask=ask)[0]


def predicted_us(machine: Machine, sides: Sequence[int], moduli: int) -> float:
    """How long a product by so many moduli should take; infinite where nothing is known."""
    (m, n, k), known = sides, _INT8.get(machine.arch)
    if known is None or machine.peak_tflops is None:
        return math.inf
    ratio, share = known
    tiles = math.ceil(m / _SIDE) * math.ceil(n / _SIDE) * moduli
    at_once = machine.multiprocessors * 128 * _SIDE // _SIDE**2  # a block makes 128 rows
    rounds = math.ceil(tiles / max(1, at_once))
    rate = machine.peak_tflops * 1e6 * ratio * share  # operations a microsecond
    multiplied = rounds * at_once * 2 * _SIDE**2 * (math.ceil(k / 128) * 128 + _FINISHING_K) / rate
    moved = (m + n) * k * (3 * 8 + moduli) + m * n * (8 + 2 * moduli)
    return _FIXED_US + multiplied + moved / _MEMORY.get(machine.arch, _MEMORY_ELSEWHERE)


def native_us(machine: Machine, sides: tuple[int, int, int], layout: str) -> float:
    """How long the device's own float64 product should take."""
    choice = choices.fastest(machine, "float64", sides, layout, own=False)
    if choice:
        return choice.us
    if machine.peak_tflops is None:
        return 0.0
    return 2 * math.prod(sides) / (machine.peak_tflops * 1e6 * _NATIVE_SHARE)


def choose(
    machine: Machine | None,
    variant: Variant,
    problem: Problem,
    layout: str,
    *,
    own: bool,
    ask: on_gpu.Ask = on_gpu.never,
) -> tuple[Variant, str]:
    """The kernel for a settled problem in fp64x, and why: `variant`, of a kernel that multiplies
    residues, with the most MODULI that pay, or what multiplies natively."""
    sides = problem.m, problem.n, problem.k
    if reason := too_large(problem.m, problem.k):
        return native(machine, problem, layout, own=own, ask=ask), reason
    if machine is None:
        return variant, "the one for tensor cores here"
    natively = native_us(machine, sides, layout)
    limit = LEAD * natively
    paying = [x for x in range(1, MODULI + 1) if predicted_us(machine, sides, x) < limit]
    most = max(paying, default=0)
    usual = predicted_us(machine, sides, USUAL)
    why = f"predicted {usual:.3g} us with {USUAL} moduli, and {natively:.3g} us natively"
    if most < USUAL:
        return native(machine, problem, layout, own=own, ask=ask), why
    return variant.kernel.variant({**variant.params, "MODULI": most}), why
