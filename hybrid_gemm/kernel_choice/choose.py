"""Which kernel multiplies a plan's products, and why. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from .. import catalog
from ..catalog import Kernel, Variant
from ..errors import UsageError
from ..problem import Problem
from . import on_gpu, residues
from .compute_modes import Arithmetic
from .costs import Sides
from .library_kernels import Launched
from .tables import Machine
from .time_model import has_room, runs

# What `kernel="auto"` takes on devices without tables of measured times: the first that can
# multiply the problem.
AUTO = {"cpu": ("blas",), "emulator": ("double_buffered", "shared_tile", "naive")}
AUTO_ELSEWHERE = ("naive",)

_NONE: Mapping[Sides, int] = {}


class Facts(Protocol):
    """What the choice asks of a device; every `Device` answers."""

    kind: str  # cuda, cpu or emulator, as kernels' headers name it in `runs_on`
    processors: int  # multiprocessors

    def machine(self, dtype: str) -> Machine | None:
        """The GPU, for tables of measured times; None where there are none."""

    def library_launch(self, problem: Problem, layout: str) -> Launched | None:
        """What the library would launch for a problem of operands in a layout, if it tells."""


def named(
    kernel: Kernel, params: Mapping[str, int], problem: Problem, products: Sequence[Sides],
    machine: Machine | None,
) -> Variant:  # fmt: skip
    """The variant of a kernel that was named: with `params`, if any were given, the default one
    with these; otherwise the first listed one that is possible in the dtype of the operands, whose
    limits take all products, and for which a block of such a GPU has the shared memory. What
    counts blocks of the whole GPU is for its multiprocessors, unless it was given."""
    listed = [kernel.variant(params)] if params else kernel.variants()
    if machine:
        listed = [v.for_multiprocessors(machine.multiprocessors, params) for v in listed]
    dtype = problem.operands
    able = [
        v for v in listed
        if v.suits(dtype) and all(v.takes(*sides, dtype) for sides in products)
    ]  # fmt: skip
    parts = [problem.having(m=m, n=n, k=k) for m, n, k in products]
    fitting = (
        v for v in able
        if not machine or all(has_room(v, machine, p) for p in parts if runs(v, p))
    )  # fmt: skip
    return next(fitting, (able or listed[-1:])[0])


def choose(
    problem: Problem, products: Sequence[Sides], facts: Facts, *, chosen: Variant | None, own: bool,
    arithmetic: Arithmetic, layout: str = "nn", panels: Mapping[Sides, int] = _NONE,
) -> tuple[Variant, str]:  # fmt: skip
    """The kernel for a plan's products, and why it is this one, in a few words.

    `problem` is settled (`Arithmetic.settle`). `products` are m, n and k of all that the plan
    multiplies, the largest first (`Plan.products`); none if nothing is multiplied. `panels` says
    how many of each are started (`Plan.multiplied`), where one kernel is to be fastest for all of
    them together. `chosen` is the kernel that was named, `own` leaves libraries out, `layout` are
    the storage orders of op(A) and op(B), such as "nt". Raises `UsageError` with every reason if no
    kernel can multiply them.
    """
    largest = problem
    if products:
        m, n, k = products[0]
        largest = problem.having(m=m, n=n, k=k)
    scales_c = arithmetic.variant and not problem.k  # A and B are not read
    if chosen and scales_c and problem.dtype not in chosen.kernel.dtypes:
        chosen = None  # one for tensor cores or 16 bits scales no C
    machine = facts.machine(problem.dtype) if products and not chosen else None
    ask = facts.library_launch
    if problem.compute == "fp64x" and arithmetic.variant and not chosen:
        return residues.choose(machine, arithmetic.variant, largest, layout, own=own, ask=ask)
    as_named = chosen is not None and chosen.kernel.role == "gemm"  # that may read 16 bits
    on_tensor_cores = arithmetic.takes(problem) and not as_named
    if machine:
        fastest = on_gpu.on_tensor_cores if on_tensor_cores else on_gpu.strict
        if found := fastest(machine, largest, layout, own=own, ask=ask):
            return on_gpu.for_panels(machine, largest, layout, panels, found, own=own)
    if on_tensor_cores:
        why = "asked for" if chosen else "the one for tensor cores here"
        variant = arithmetic.variant_for(largest, facts.processors)
        if variant.kernel.library:  # which has limits of its own
            variant = _first_able([variant], problem, products, facts)
        return variant, why
    if chosen:
        return _first_able([chosen], problem, products, facts), "asked for"
    names = AUTO.get(facts.kind, AUTO_ELSEWHERE)
    candidates = [catalog.get(name).variant() for name in names]
    return _first_able(candidates, problem, products, facts), f"the default on the {facts.kind}"


def _first_able(
    candidates: Sequence[Variant], problem: Problem, products: Sequence[Sides], facts: Facts
) -> Variant:
    """The first that multiplies all products; `UsageError` with the reasons if there is none."""
    reasons = []
    for variant in candidates:
        refusals = (
            variant.refusal(device=facts.kind, dtype=problem.operands, m=m, n=n, k=k)
            for m, n, k in products
        )
        reason = next(filter(None, refusals), None)
        if reason is None:
            return variant
        reasons.append(reason)
    raise UsageError("; ".join(reasons))
