"""Many cases, counted, with the failures shrunk."""

from __future__ import annotations

import collections
import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from .cases import Case, draw
from .judge import EXCEPTION, REFUSED, RIGHT, WRONG, Outcome, judge

TRIES = 80  # products to shrink one failure
MOST_KEPT = 50  # failures that the result names
Judge = Callable[[Case], Outcome]
GOES_WITH = {"kernel": "params", "algorithm": "levels"}  # which is refused without it
EXIT = {WRONG: 3, EXCEPTION: 1}


@dataclasses.dataclass
class Report:
    """What came of the cases: how many of each outcome, of each choice, and the failures."""

    outcomes: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    choices: dict[str, collections.Counter] = dataclasses.field(
        default_factory=lambda: collections.defaultdict(collections.Counter)
    )
    refusals: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    failures: list[dict[str, str]] = dataclasses.field(default_factory=list)

    @property
    def exit_code(self) -> int:
        """3 if a product was wrong, else 1 if something was raised that should not be, else 0."""
        return next((EXIT[x] for x in (WRONG, EXCEPTION) if self.outcomes[x]), 0)

    def count(self, case: Case, outcome: Outcome) -> None:
        self.outcomes[outcome.kind] += 1
        if outcome.kind == REFUSED:
            self.refusals[outcome.words.split(":")[0]] += 1
        for name, value in _choices(case):
            self.choices[name][str(value)] += 1

    def data(self) -> dict[str, Any]:
        """Plain data, for a result file."""
        return {
            "products": self.outcomes.total(),
            **{name: self.outcomes[name] for name in (RIGHT, REFUSED, WRONG, EXCEPTION)},
            "refusals": dict(self.refusals.most_common()),
            "failures": self.failures,
            "choices": {x: dict(sorted(y.items())) for x, y in sorted(self.choices.items())},
        }


def _choices(case: Case) -> Iterator[tuple[str, Any]]:
    for name, value in (("A", 0), ("B", 1), ("C", 2)):
        yield f"dtype of {name}", case.dtypes[value] or "none"
        if value < 2 or case.dtypes[2]:
            yield f"layout of {name}", case.layouts[value].split("+")[0]
            for more in case.layouts[value].split("+")[1:]:
                yield f"{name} is", more
    if case.out == "new":
        yield "layout of out", case.layouts[3].split("+")[0]
        yield "dtype of out", case.dtypes[3] or "the product's"
    for name in ("alpha", "beta", "trans_a", "trans_b", "out", "alias", "values", "resident"):
        yield name, getattr(case, name)
    yield "mistake", case.mistake or "none"
    yield "smallest side", min(min(case.m, case.n, case.k), 2)
    for name, value in case.options:
        if name == "params":  # which are as many as kernels list
            continue
        kept = value if name != "max_device_memory" else f"2^{value.bit_length() - 1}"
        yield name, "x".join(map(str, value)) if name == "grid" else kept


# Many parameters: who draws, judges and reports differs between products, ranks and tests.
def campaign(
    device: str, seed: int, numbers: Iterable[int], *, until: float | None = None,
    drawn: Callable[[str, int, int], Case] = draw, judged: Judge = judge,
    say: Callable[[str], None] = print, started: Callable[[int], None] = lambda number: None,
    flags: str = "",
) -> Report:  # fmt: skip
    """Multiplies these cases, until `time.monotonic()` is past `until`. Each failure is said on
    one line that repeats it, and on another as far as it was shrunk. `started` is told each
    number before its product; `flags` only say how the failure is repeated."""
    report = Report()
    for number in numbers:
        if until is not None and time.monotonic() > until:
            break
        started(number)
        case = drawn(device, seed, number)
        outcome = judged(case)
        report.count(case, outcome)
        if not outcome.failed:
            continue
        repeat = f"scripts/fuzz --device {device} --seed {seed} --only {number}"
        repeat += flags
        say(f"{outcome.kind}: {outcome.words} | {repeat}")
        smaller, found = shrunk(case, outcome, judged)
        say(f"    shrunk: {smaller.label}: {found.words}")
        if len(report.failures) < MOST_KEPT:
            report.failures.append({
                "outcome": outcome.kind, "found": outcome.words, "repeat": repeat,
                "case": case.label, "shrunk": smaller.label,
            })  # fmt: skip
    return report


def shrunk(case: Case, outcome: Outcome, judged: Judge = judge) -> tuple[Case, Outcome]:
    """A plainer case with an outcome of the same kind. One that fails only after others may not
    fail again alone: then the case itself."""
    tries, found = TRIES, outcome
    plainer = True
    while plainer:
        plainer = False
        for other in _plainer(case):
            tries -= 1
            if tries < 0:
                return case, found
            now = judged(other)
            if now.kind == outcome.kind:
                case, found, plainer = other, now, True
                break
    return case, found


def _plainer(case: Case) -> Iterator[Case]:
    """The case with one thing made plain."""
    change = dataclasses.replace
    for name, _value in case.options:
        left_out = {name, GOES_WITH.get(name)}
        yield change(case, options=tuple(x for x in case.options if x[0] not in left_out))
    plain: dict[str, Any] = {
        "alias": "none", "resident": False, "poisoned": False, "mistake": "", "trans_a": False,
        "trans_b": False, "alpha": 1, "out": "none", "values": "small",
    }  # fmt: skip
    for name, value in plain.items():
        if getattr(case, name) != value:
            yield change(case, **{name: value})
    if case.beta or case.dtypes[2]:
        yield change(case, beta=0, dtypes=(*case.dtypes[:2], "", case.dtypes[3]))
    for i, layout in enumerate(case.layouts):
        if layout != "c":
            yield change(case, layouts=(*case.layouts[:i], "c", *case.layouts[i + 1 :]))
    for name in "mnk":
        side = getattr(case, name)
        for less in dict.fromkeys((1, side // 2, side - 1)):
            if 0 <= less < side:
                yield change(case, **{name: less})
