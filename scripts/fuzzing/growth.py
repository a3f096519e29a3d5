"""What a process keeps: its memory while it makes ever other products, and what is left of runners
that were dropped."""

from __future__ import annotations

import ctypes
import gc
import itertools
import os
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

import hybrid_gemm
from hybrid_gemm.execution import staging

from .cases import draw
from .judge import REFUSED, RIGHT, judge

PAGE = os.sysconf("SC_PAGE_SIZE")
MIB = 1 << 20
M_ARENA_MAX = -8  # of malloc.h
MOST_GROWTH_MIB = 16
EVERY_S = 2.0  # between readings
WARM_RUNNERS = 20


def resident_mib() -> float:
    """The process's memory, with what malloc has free given back to the system, and without pages
    of files, such as the code of kernels: the system takes these back where it needs them."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/status") as file:
        kib = {line.split(":")[0]: line.split()[1] for line in file if line.startswith("Rss")}
    return (int(kib["RssAnon"]) + int(kib["RssShmem"])) / 1024


class _Heap(ctypes.Structure):
    """struct mallinfo2 of malloc.h."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in ("arena", "ordblks", "smblks", "hblks", "mapped", "usmblks", "fsmblks",
                     "in_use", "free", "keepcost")
    ]  # fmt: skip


def given_out_mib() -> float:
    """What malloc has given out and not got back, in MiB."""
    libc = ctypes.CDLL(None)
    libc.mallinfo2.restype = _Heap
    heap = libc.mallinfo2()
    return (heap.in_use + heap.mapped) / MIB


def touch_slots() -> None:
    """Every page of the slots that host arrays are copied through. On a GPU they are resident as
    soon as they are made; elsewhere a page is when a piece first is so large, however late."""
    for link in list(staging._links.values()):
        for ring in (link.up, link.down):
            for slot in [ring.slots.get() for _ in range(ring.slots.qsize())]:
                slot.memory[::PAGE] = 0
                ring.slots.put(slot)


def touch_stacks() -> None:
    """The stacks of a GPU's threads. CUDA keeps memory for the largest that any kernel has had, for
    as many threads as the GPU holds: 9 GB for the 33 KB of this one, whenever it is drawn."""
    one = np.ones((1, 1), np.int64)
    hybrid_gemm.gemm(
        one, one, device="cuda", kernel="register_tile", params={"TILE": 64, "BLOCK": 16}
    )


def cards_mib(devices: Iterable[str]) -> float:
    """Memory taken on all GPUs, by whichever process; 0 where `devices` has none."""
    if "cuda" not in devices:
        return 0.0
    import cupy

    taken = 0
    for number in range(cupy.cuda.runtime.getDeviceCount()):
        with cupy.cuda.Device(number):
            free, total = cupy.cuda.runtime.memGetInfo()
            taken += total - free
    return round(taken / MIB, 1)


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def mixed(
    seconds: float, seed: int, devices: tuple[str, ...] = ("cpu", "cpu", "cpu", "emulator"),
    say: Callable[[str], None] = print,
) -> dict[str, Any]:  # fmt: skip
    """Products of all kinds for so long. Memory may grow while the first half makes what is kept;
    after that by `MOST_GROWTH_MIB` at most. Judged are the least readings of the tenth after the
    half and of the last tenth: now and then a thread has not yet let a large block go. All threads
    have one heap, since each of theirs would keep pieces that are free."""
    ctypes.CDLL(None).mallopt(M_ARENA_MAX, 1)
    start = time.monotonic()
    counts = {RIGHT: 0, REFUSED: 0}
    failures: list[str] = []
    readings: list[tuple[float, float, float]] = []
    if "cuda" in devices:
        touch_stacks()
    for number in itertools.count():
        now = time.monotonic() - start
        if not readings or now - readings[-1][0] >= min(EVERY_S, seconds / 20):
            touch_slots()
            readings.append((round(now, 1), round(resident_mib(), 1), cards_mib(devices)))
        if now >= seconds:
            break
        device = devices[number // 8 % len(devices)]
        outcome = judge(draw(device, seed, number))
        if outcome.failed:
            failures.append(_again_by(outcome.words, device, seed, number))
            say(failures[-1])
        else:
            counts[outcome.kind] += 1
    settled, last = (_least(readings, seconds, part) for part in (0.5, 0.9))
    grown = [round(y - x, 1) for x, y in zip(settled, last, strict=True)]
    wrong = [f"{len(failures)} products failed"] if failures else []
    wrong += [f"{words} in the second half" for words in _growth(*grown)]
    return {
        "devices": sorted(set(devices)), "seconds": round(seconds), "seed": seed, **counts,
        "failures": failures[:20], "mib_first": readings[0][1], "mib_after_half": settled[0],
        "mib_last": last[0], "grown_mib": grown[0], "cards_grown_mib": grown[1],
        "readings": readings[:: max(1, len(readings) // 60)], "wrong": wrong,
    }  # fmt: skip


def again(
    seconds: float, seed: int, devices: tuple[str, ...] = ("cpu", "cpu", "cpu", "emulator")
) -> dict[str, Any]:
    """As many products of all kinds as half the time takes, and these again for the other half,
    twice at least. Where a product is made for the first time, what it needs is compiled, loaded
    and kept; what grows after the second time was lost. `rounds` has, at the end of each, the
    process's memory, how much of it malloc has given out, and the memory taken on GPUs, in MiB."""
    ctypes.CDLL(None).mallopt(M_ARENA_MAX, 1)
    start = time.monotonic()
    failures: list[str] = []
    rounds: list[tuple[float, ...]] = []
    if "cuda" in devices:
        touch_stacks()
    count = 0
    while len(rounds) < 3 or time.monotonic() - start < seconds:
        for number in range(count) if rounds else itertools.count():
            if not rounds and time.monotonic() - start >= seconds / 2:
                break
            count = max(count, number + 1)
            device = devices[number // 8 % len(devices)]
            outcome = judge(draw(device, seed, number))
            if outcome.failed:
                failures.append(_again_by(outcome.words, device, seed, number))
        touch_slots()
        kept = round(resident_mib(), 1), round(given_out_mib(), 1), cards_mib(devices)
        rounds.append((round(time.monotonic() - start, 1), *kept))
    grown = [round(y - x, 1) for x, y in zip(rounds[1], rounds[-1], strict=True)][1:]
    wrong = [f"{len(failures)} products failed"] if failures else []
    wrong += [f"{words} after the second round" for words in _growth(max(grown[:2]), grown[2])]
    return {
        "devices": sorted(set(devices)), "seconds": round(seconds), "seed": seed,
        "products": count, "failures": failures[:20], "rounds": rounds,
        "grown_mib": grown[0], "given_out_grown_mib": grown[1], "cards_grown_mib": grown[2],
        "wrong": wrong,
    }  # fmt: skip


def _again_by(words: str, device: str, seed: int, number: int) -> str:
    """What was wrong, and the command that makes this product again."""
    return f"{words} | scripts/fuzz --device {device} --seed {seed} --only {number}"


def _least(
    readings: list[tuple[float, float, float]], seconds: float, part: float
) -> tuple[float, float]:
    """The least of a tenth of the readings, or of the first after its beginning if it has none."""
    later = [x for x in readings if x[0] >= part * seconds]
    chosen = [x for x in later if x[0] <= (part + 0.1) * seconds] or later[:1]
    return min(x[1] for x in chosen), min(x[2] for x in chosen)


def dropped(
    count: int, device: str, warm: int = WARM_RUNNERS, *, alone: bool = True
) -> dict[str, Any]:
    """So many runners, each made, used and dropped: threads, descriptors and memory before and
    after. `warm` others before them fill what a process keeps. The memory of GPUs is judged where
    this process is `alone` on them."""
    a = np.ones((90, 110), "f4")
    options = (
        {"threads": 3, "split": "cols"}, {"threads": 2, "split": "rows"}, {"threads": 1},
        {"threads": 2, "split": "cols", "reduce": "critical"},
        {"algorithm": "strassen", "levels": 2},
    )  # fmt: skip
    before: tuple[int, int, float, float] | None = None
    wrong = []
    for number in range(count + warm):
        if number == warm:
            before = _kept(device)
        runner = hybrid_gemm.Runner(device=device, **options[number % len(options)])
        if not (runner.gemm(a, a.T) == 110).all():
            wrong.append(f"runner {number} made a wrong product")
        del runner
    assert before is not None
    gc.collect()
    after = _kept(device)
    names = ("threads", "descriptors")
    wrong += [f"{name}: {x} before, {y} after"
              for name, x, y in zip(names, before, after, strict=False) if y > x]  # fmt: skip
    grown, on_cards = (round(after[i] - before[i], 1) for i in (2, 3))
    wrong += _growth(grown, on_cards if alone else 0)
    return {
        "device": device, "runners": count, "threads": [before[0], after[0]],
        "descriptors": [before[1], after[1]], "grown_mib": grown, "cards_grown_mib": on_cards,
        "wrong": wrong,
    }  # fmt: skip


def _kept(device: str) -> tuple[int, int, float, float]:
    return threading.active_count(), descriptors(), resident_mib(), cards_mib([device])


def _growth(grown: float, on_cards: float) -> list[str]:
    named = {"memory": grown, "memory of GPUs": on_cards}
    return [f"{name} grew by {x} MiB" for name, x in named.items() if x > MOST_GROWTH_MIB]


def new_shapes(count: int, device: str, most: int) -> dict[str, Any]:
    """One runner, and a new shape each time: how much memory grows over the second half, and how
    much of it all is left when the runner is dropped."""
    rng = np.random.default_rng(3)
    a = np.ones((most, most), "f4")
    runner = hybrid_gemm.Runner(device=device, threads=4, split="cols")
    readings, cards = [resident_mib()], [cards_mib([device])]
    for half in range(2):
        for _ in range(count // 2):
            m, n, k = (int(x) for x in rng.integers(1, most + 1, 3))
            if runner.gemm(a[:m, :k], a[:k, :n])[-1, -1] != k:
                return {"device": device, "wrong": [f"a wrong product, {m} x {n} x {k}"]}
        readings.append(resident_mib())
        cards.append(cards_mib([device]))
        del half
    grown, on_cards = (round(x[2] - x[1], 1) for x in (readings, cards))
    del runner
    hybrid_gemm.free_memory()
    return {
        "device": device, "shapes": count, "grown_mib": grown, "cards_grown_mib": on_cards,
        "mib": [round(x, 1) for x in (*readings, resident_mib())],
        "cards_mib": [*cards, cards_mib([device])], "wrong": _growth(grown, on_cards),
    }  # fmt: skip
