"""How fast this host multiplies and adds: measured in a fraction of a second, and kept.

Plans are made with assumed rates, so that the same call makes the same plan on every day;
what is measured here is for the times that people are told to expect.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import platform
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from .. import catalog
from ..errors import in_words, is_of_threads
from ..host import cache
from ..host.resources import OthersTime, cores, memory_available
from ..planning import cost_model
from ..planning.plan import Plan
from ..planning.repeated import kinds
from .cpu import CpuDevice

SIZE = 768  # of the product that is timed
LEAST_SIDE = 512  # below which the rate of `SIZE` says little
LEAST_RUNS = 3
BUDGET_S = 0.1  # for further runs of one rate
BYTES = 64 << 20  # of each array that is added
MOST_OF_OTHERS = 0.1  # of the cores' time that other processes may have

_during: list[OthersTime] = []  # what is predicted


def watch() -> None:
    """A product begins whose time is to be compared with what is predicted."""
    _during[:] = [OthersTime()]


class Busy(Exception):
    """Other processes have so much of this host that times do not hold."""


def predicted(plan: Plan) -> Plan | str:
    """The plan of the cpu device with the time that this host should take; or, in words, why that
    is not known.

    Measures the host where that was not done before: once for each dtype, and for one worker and
    for several. That holds where nothing else runs, so nothing is known where other processes had
    much of the host: since `watch`, or while it was measured; nor of thin products.
    """
    boxes = [box for worker in plan.workers for box, _ in kinds(worker.boxes)]
    if any(min(len(box.rows), len(box.cols), len(box.ks)) < LEAST_SIDE for box in boxes):
        return f"thin products are not predicted: a side is below {LEAST_SIDE}"
    try:
        for others in _during:
            _check_idle(others)
        tflops = rate(plan.problem.dtype, several=len(plan.workers) > 1)
        gbps = memory_gbps()
    except Busy as busy:
        return str(busy)
    except (MemoryError, RuntimeError) as error:
        if not (isinstance(error, MemoryError) or is_of_threads(error)):
            raise
        return f"this host cannot be measured: {error}"
    specs = tuple(
        dataclasses.replace(spec, tflops=tflops, memory_gbps=gbps) for spec in plan.devices
    )
    measured = dataclasses.replace(plan, devices=specs)
    return dataclasses.replace(measured, predicted_ms=cost_model.predict_ms(measured))


def _check_idle(others: OthersTime) -> None:
    """Raises `Busy`, unless this process had the host for itself."""
    share = others.share()
    if share is None:
        raise Busy("the system does not tell whether this host is busy")
    if share > MOST_OF_OTHERS:
        raise Busy(f"other processes had {100 * share:.0f} % of the cores' time")


@functools.cache
def rate(dtype: str, *, several: bool) -> float:
    """TFLOP/s of products in a dtype on all cores: by one worker, or by `several`."""
    return _kept(f"{dtype}-{'workers' if several else 'worker'}", lambda: _tflops(dtype, several))


@functools.cache
def memory_gbps() -> float:
    """GB/s (10^9 bytes) of adding arrays that are in no cache, reads and writes together."""
    return _kept("memory", _memory_gbps)


def _kept(name: str, measure: Callable[[], float]) -> float:
    """A rate from the cache; measured and put there where it is not, or is no rate."""
    host = f"{platform.node() or 'host'}-{cores()}-cores"
    file = cache.measured_file("rates", f"{host}-{name}-idle.json")
    known = cache.read_measured(file, _checked, "is damaged; the rate is measured again")
    if known is not None:
        return known
    others = OthersTime()
    found = measure()
    _check_idle(others)
    cache.keep_measured(file, json.dumps({"rate": found}).encode())
    return found


def _checked(data: dict[str, Any]) -> float:
    if not cache.is_figure(data["rate"]):
        raise ValueError(data)
    return float(data["rate"])


def _tflops(dtype: str, several: bool) -> float:
    """Of one product on all cores, or of one on each core at once."""
    count = cores() if several else 1
    device = CpuDevice(count)
    stream, kernel = device.stream(), catalog.get("blas").variant()
    rng = np.random.default_rng(0)
    a, b = (rng.integers(-4, 5, (SIZE, SIZE)).astype(dtype) for _ in "ab")
    places = [np.empty((SIZE, SIZE), dtype) for _ in range(count)]

    def multiply(out: np.ndarray) -> None:
        device.gemm(kernel, a, b, out, alpha=1, beta=0, stream=stream)

    with device.session(), ThreadPoolExecutor(count) as pool:
        seconds = _fastest(lambda: list(pool.map(multiply, places)))
    return 2 * SIZE**3 * count / seconds / 1e12


def _memory_gbps() -> float:
    if (left := memory_available()) < 2 * BYTES:  # a container would end the process
        raise MemoryError(
            f"that takes {in_words(2 * BYTES)} of memory, and {in_words(left)} is left"
        )
    x, y = (np.ones(BYTES // 4, "f4") for _ in "xy")
    return 3 * BYTES / _fastest(lambda: np.add(x, y, out=x)) / 1e9


def _fastest(work: Callable[[], object]) -> float:
    """Seconds of the fastest of some runs; what else the machine does only makes them slower."""
    work()
    found: list[float] = []
    until = time.perf_counter() + BUDGET_S
    while len(found) < LEAST_RUNS or time.perf_counter() < until:
        before = time.perf_counter()
        work()
        found.append(time.perf_counter() - before)
    return min(found)
