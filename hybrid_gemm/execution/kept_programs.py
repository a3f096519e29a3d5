"""Who carries out a run that one thread starts: native threads one that came before, Python's
executor any other."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np

from ..arrays.strides import address
from ..host.kept import Kept
from ..planning.plan import Plan
from . import native_executor, single_thread_schedule, staging
from .kept_products import KeptProducts
from .native_executor import Program, Unfit
from .run import Run
from .worker import Worker

NATIVE = "native"
_MOST = 64  # kinds of runs
_NEW = "the first product of its kind"


def python(why: str) -> str:
    """Words for a run that Python's executor carries out."""
    return f"python ({why})"


class KeptPrograms:
    """Those of a runner's runs. Of runs alike the first is Python's; so is the second, which is
    noted; from then on they are a program's. `products` are those that Python's executor starts.
    Both refer to devices, and none refers to them."""

    def __init__(self) -> None:
        self.products = KeptProducts()
        # A program, or why there is none; and the plan, so that no other has its `id` meanwhile.
        self._known: Kept[tuple[Plan, Program | str]] = Kept(_MOST)

    def execute(self, run: Run, workers: list[Worker]) -> str:
        """Carries out a run whose plan holds everything at once; gives who did, in words."""
        hosts = _hosts(run)
        why = _why_not(run, hosts)
        if why is not None:
            single_thread_schedule.execute(run, workers)
            return python(why)
        key = _key(run, workers, hosts)
        _plan, known = self._known.get(key) or (None, "")
        if isinstance(known, Program):
            known.carry_out(run, [x.start for x in hosts])
            return NATIVE
        if known == _NEW:
            run.commands.noted = []
        single_thread_schedule.execute(run, workers)
        if not known:
            self._known.put(key, (run.plan, _NEW))
        return python("noted" if known == _NEW else known or _NEW)

    def keep(self, run: Run, workers: list[Worker]) -> None:
        """Makes a program of a run that was noted, has ended, and has its memory yet."""
        commands = run.commands
        if commands.noted is None:
            return
        hosts = _hosts(run)
        made: Program | str
        try:
            if commands.unfit:
                raise Unfit(commands.unfit)
            made = Program(
                commands.noted, run.clock.marks, {w.index: w.device for w in workers},
                hosts, _taken(run, workers),
            )  # fmt: skip
        except Unfit as why:
            made = str(why)
        self._known.put(_key(run, workers, hosts), (run.plan, made))


def _why_not(run: Run, hosts: list[range]) -> str | None:
    """Why a run is not for a program, before anything is known of its commands."""
    if run.resident:
        return "operands are brought before the clock runs"
    if run.shared is not None:
        return "one of several runs"
    if any(device.calls() is None for device in run.devices):
        return "its devices are not GPUs"
    if any(x.home is not None or not isinstance(x.array, np.ndarray) for x in _operands(run)):
        return "a matrix is not the host's"
    if any(not x.array.size or min(x.array.strides) < 0 for x in _operands(run)):
        return "a matrix is empty, or backwards"
    if any(y.start < x.stop for x, y in pairwise(sorted(hosts, key=lambda x: x.start))):
        return "matrices share memory"
    return native_executor.unavailable()


def _operands(run: Run) -> list[Any]:
    """Those that are read or written."""
    x = run.operands
    read = [x.a, x.b, *([x.c] if x.c is not None and run.plan.problem.beta else [])]
    return [*read, x.out]


def _span(array: np.ndarray) -> range:
    """The addresses of an array."""
    steps = zip(array.shape, array.strides, strict=True)
    size = sum((n - 1) * step for n, step in steps) + array.itemsize
    return range(address(array), address(array) + size)


def _hosts(run: Run) -> list[range]:
    """The addresses of the matrices, each of which may be several operands."""
    return list(dict.fromkeys(_span(x.array) for x in _operands(run)))


def _taken(run: Run, workers: list[Worker]) -> list[range]:
    """The devices' memory that is the run's."""
    return [*run.blocks.taken, *(worker.taken for worker in workers)]


def _key(run: Run, workers: list[Worker], hosts: list[range]) -> tuple:
    """What runs alike have in common: all that their commands have in them, but for the addresses
    of the host's matrices."""
    device = run.devices[0]
    lie = [
        (x.array.shape, x.array.strides, x.dtype.str, device.reads(x.array),
         hosts.index(_span(x.array)))
        for x in _operands(run)
    ]  # fmt: skip
    streams = [stream.pointer for w in workers for stream in (w.copying, *w.multiplying, w.summing)]
    links = [staging.link(w.device) for w in workers]
    rings = [ring.key for link in links for ring in (link.up, link.down)]
    return (
        id(run.plan), run.variant, *lie, *streams, *rings,
        *(x.start for x in _taken(run, workers)),
    )  # fmt: skip
