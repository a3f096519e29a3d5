"""Which variant should take the least time, by the models of `fitted.py`, for one product or for
several by one kernel. Pure."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..catalog import Variant
from . import fitted, model_files
from .costs import Sides
from .fitted import Model
from .library_kernels import Launched
from .tables import Machine

DOUBT = 2.0  # errors of the lead within which what the library launches is asked for
LARGE = (4096, 8192, 16384)  # sides of products that reach the best rates
# Of panels, so many shapes are looked at, and the variants that take no more than so many times as
# long as our fastest at the largest: all variants at one shape take milliseconds.
FEW, SLOWER = 6, 2.0


@dataclass(frozen=True)
class Choice:
    """The variant to run, its predicted time in microseconds, the error of that as a share, and
    why it is this one. `doubtful`: what the library launches would tell more."""

    variant: Variant
    us: float
    error: float
    why: str
    doubtful: bool = False


@functools.lru_cache(maxsize=4096)
def fastest(
    machine: Machine, mode: str, sides: Sides, layout: str, *, own: bool,
    launched: Launched | None = None, adds: bool = False,
) -> Choice | None:  # fmt: skip
    """What to run for a shape; None without a model of such a GPU. `own` leaves libraries out;
    `launched` is what the library would launch, if that is known; `adds` says that beta scales C,
    which is read."""
    known = model_files.knowing(machine, mode, sides)
    if known is None:
        return None
    return chosen(known, sides, layout, machine, own=own, launched=launched, adds=adds)


@functools.lru_cache(maxsize=256)
def fastest_of(
    machine: Machine, mode: str, products: tuple[tuple[Sides, int], ...], layout: str,
    first: Variant, *, own: bool, adds: bool = False,
) -> Choice | None:  # fmt: skip
    """As `fastest`, for so many products of each of these sides by one kernel; None, too, where
    none should take less time than `first`."""
    some = few(products)
    (largest, count), *others = some
    known = model_files.knowing(machine, mode, largest)
    if known is None:
        return None
    times = known.times_us(largest, layout, machine, adds=adds)
    fast = SLOWER * min(us for v, us in times.items() if not v.kernel.library)
    total = {v: count * us for v, us in times.items() if us <= fast or v == first}
    for sides, count in others:
        times = known.times_us(sides, layout, machine, among=total, adds=adds)
        total = {v: us + count * times[v] for v, us in total.items() if v in times}
    if all(v.kernel.library for v in total):  # none of ours can multiply all of them
        return None
    work = [count * math.prod(sides) for sides, count in some]
    of_each = zip(*(known.errors_at(sides, layout) for sides, _ in some), strict=True)
    # Of times that take such shares of a sum; those of different shapes are independent.
    library, ours = (math.hypot(*map(operator.mul, x, work)) / sum(work) for x in of_each)
    choice = pick(
        total, (library, ours), own=own, can_ask=False, lead=known.lead(largest), lent=known.lent
    )
    return choice if choice.us < total.get(first, math.inf) else None


def few(products: Sequence[tuple[Sides, int]]) -> list[tuple[Sides, float]]:
    """At most `FEW` of these products, none of which is empty, the largest first. Each stands for
    those of about its size: its number is such that it has as many operations as all of them."""
    groups: list[list[tuple[Sides, int]]] = [[] for _ in range(FEW)]
    whole, before = sum(math.prod(sides) * n for sides, n in products), 0
    for sides, n in sorted(products, key=lambda x: math.prod(x[0])):
        groups[min(FEW - 1, FEW * before // whole)].append((sides, n))
        before += math.prod(sides) * n
    found = []
    for group in filter(None, reversed(groups)):
        sides = group[len(group) // 2][0]
        operations = sum(math.prod(x) * n for x, n in group)
        found.append((sides, operations / math.prod(sides)))
    return found


@functools.lru_cache(maxsize=256)
def best_tflops(machine: Machine, mode: str) -> float | None:
    """The highest rate (10^12 operations a second) that is predicted of large products; None
    without a model of such a GPU."""
    times = ((n, fastest(machine, mode, (n, n, n), "nn", own=False)) for n in LARGE)
    return max((2 * n**3 / choice.us / 1e6 for n, choice in times if choice), default=None)


def chosen(
    known: Model, sides: Sides, layout: str, machine: Machine, *, own: bool,
    launched: Launched | None = None, adds: bool = False,
) -> Choice:  # fmt: skip
    """As `fastest`, by this model."""
    times = known.times_us(sides, layout, machine, launched, adds=adds, within=1)
    errors = known.errors_at(sides, layout, launched)
    can_ask = launched is None and known.read_library is not None
    return pick(times, errors, own=own, can_ask=can_ask, lead=known.lead(sides), lent=known.lent)


def pick(
    times: Mapping[Variant, float], errors: tuple[float, float], *, own: bool, can_ask: bool,
    lead: float, lent: str = "",
) -> Choice:  # fmt: skip
    """What to run by predicted times and the errors of the library's and of ours. `can_ask`: what
    the library launches could be asked for; `lead` and `lent`: as in `Model`."""
    of = f", by times of {lent}" if lent else ""
    ours = min((v for v in times if not v.kernel.library), key=times.__getitem__)
    library = None if own else next((v for v in times if v.kernel.library), None)
    doubtful = False
    if library:
        ahead, error = math.log(times[library] / times[ours]), math.hypot(*errors)
        doubtful = can_ask and abs(ahead) < DOUBT * error < math.inf
        if error == math.inf:
            return Choice(library, times[library], error, "longer than all that was measured")
        if ahead < lead * error:
            why = f"predicted {times[library]:.3g} us{of}; no kernel of ours leads clearly"
            return Choice(library, times[library], errors[0], why, doubtful)
    return Choice(ours, times[ours], errors[1], f"predicted {times[ours]:.3g} us{of}", doubtful)


def may_be_faster(plain: Choice, choice: Choice) -> bool:
    """Whether the first may take no longer than the second, by the errors of both."""
    doubt = DOUBT * math.hypot(plain.error, choice.error)
    return plain.us < choice.us * math.exp(doubt) if doubt < math.inf else True


def strict_is_faster(mode: str, plain: Choice, choice: Choice) -> bool:
    """Whether a choice in strict fp32 is to be preferred to one in fp32x3 or TF32: to fp32x3 unless
    that leads clearly, and to a library in TF32 only where strict fp32 leads clearly, by the errors
    of both. To fp32x3 beyond all that was measured where it is predicted to be faster."""
    if mode == "fp32x3":
        return plain.us < choice.us * (1 + (choice.error if choice.error < math.inf else 0))
    error = math.hypot(plain.error, choice.error) if choice.variant.kernel.library else 0.0
    return plain.us * (1 + fitted.LEAD * error) < choice.us
