"""Runs experiments: measures their points, adds the published figures, judges the claims."""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ..devices import choose
from ..errors import HybridGemmError, UsageError, nearest
from ..option_checks import check_gpus
from . import declared
from .base import SCALES, Experiment, Point, Row, Rows
from .lab import Lab

SAMPLES = {"small": 5, "full": 3}  # and one of the emulator, whose times say nothing of a GPU


def experiments() -> dict[str, Experiment]:
    """Every experiment by name: one file of `declared/` each, in the order of `ORDER`."""
    found = {}
    for info in pkgutil.iter_modules(declared.__path__):
        module = importlib.import_module(f"{declared.__name__}.{info.name}")
        found[info.name] = dataclasses.replace(module.EXPERIMENT, name=info.name)
    known = [name for name in declared.ORDER if name in found]
    return {name: found[name] for name in [*known, *sorted(found.keys() - set(known))]}


def names() -> list[str]:
    """Those of all experiments, and the one that means all of them."""
    return [*experiments(), "all"]


def choose_experiments(names: Iterable[str]) -> list[Experiment]:
    """The experiments of these names; `all` is every one. Raises `UsageError` for others."""
    known, names = experiments(), list(names)
    for name in names:
        if name not in (*known, "all"):
            raise UsageError(
                f"no experiment is called {name!r}{nearest(name, known)}; there are "
                f"{', '.join(known)} and all"
            )
    chosen = known if "all" in names else dict.fromkeys(names)
    return [known[name] for name in chosen]


def run(
    chosen: Sequence[Experiment], *, device: str = "auto", scale: str = "small",
    gpus: Sequence[int] | None = None, seed: int = 0, samples: int | None = None,
    progress: Callable[[int, str], Callable[[int], None]] | None = None,
    note: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:  # fmt: skip
    """Results as plain data: for each experiment its rows, verdicts and how long it took.

    `samples` are timed for each row, by default those of `SAMPLES` for the scale. A point that
    cannot run is a row whose note says why. Past an experiment's time cap rows get one sample,
    then none, and `cut` says how many. `progress(steps, label)` starts a bar and returns the
    function that moves it on; `note` gets sentences for the user.
    """
    if scale not in SCALES:
        raise UsageError(f"no scale is called {scale!r}; there are {', '.join(SCALES)}")
    if samples is not None and samples < 1:
        raise UsageError(f"{samples} samples asked for; it takes at least 1")
    gpus = check_gpus("gpus", gpus)
    kind, why = choose(device, gpus)
    usual = 1 if kind == "emulator" else SAMPLES[scale]
    lab = Lab(kind, gpus=gpus, seed=seed, samples=samples or usual)
    note(f"device: {lab.device.describe()}" + (f" ({why})" if why else ""))
    planned = {e.name: list(e.points(scale, kind)) for e in chosen}
    advance = progress(sum(map(len, planned.values())), "measuring") if progress else lambda _: None
    results = []
    for experiment in chosen:
        note(f"{experiment.name}: {len(planned[experiment.name])} rows")
        results.append(_run_one(experiment, planned[experiment.name], lab, advance))
        if cut := results[-1]["cut"]:
            note(f"{experiment.name}: {cut} rows were cut short by its time cap")
    return {
        "device": {"kind": kind, "name": lab.device.describe()},
        "machine": dataclasses.asdict(lab.machine) | {"assumed": lab.modelled},
        "scale": scale,
        "seed": seed,
        "seconds": sum(r["seconds"] for r in results),
        "experiments": results,
    }


def _run_one(
    experiment: Experiment,
    points: Sequence[Point],
    lab: Lab,
    advance: Callable[[int], None],
) -> dict[str, Any]:
    """The result of one experiment."""
    began = time.monotonic()
    lab.deadline = began + experiment.cap_s
    lab.cut = skipped = 0
    rows = []
    for point in points:
        row = dict(point.row)
        if time.monotonic() > lab.deadline:
            row["note"] = "not measured: the experiment's time was up"
            skipped += 1
        else:
            try:
                with lab.device.using(lab.stream):
                    row |= point.measure(lab, **point.given)
            except (HybridGemmError, MemoryError) as error:
                row["note"] = str(error) or "out of memory"
        rows.append(row)
        advance(1)
    lab.forget()
    return {
        "name": experiment.name,
        "rows": experiment.beside(rows),
        "verdicts": verdicts(experiment, Rows(rows), lab.kind),
        "cut": lab.cut + skipped,
        "seconds": time.monotonic() - began,
    }


def verdicts(experiment: Experiment, rows: Rows, device: str) -> list[Row]:
    """Each claim with its verdict on rows from this kind of device, as plain data."""
    rows = experiment.beside(rows)
    return [
        {"claim": claim.text, **dataclasses.asdict(claim.judge(rows, device))}
        for claim in experiment.claims
    ]
