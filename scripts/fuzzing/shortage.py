"""Runs products of which the n-th large allocation fails, for every n:

    python -m fuzzing.shortage CONFIGURATION      (in the environment of `environment()`)

It prints one JSON object: how many allocations there are, and what came of each. The runner, its
devices and all buffers are made anew for each product. Every array of the host and of the cpu and
emulator devices is made by malloc, so the malloc that fails (failing_malloc.c) stands under all of
them.

`on_device` is the same for the memory of a device, and for page-locked memory (`Allocations`), on
the emulator and on GPUs, in this process.
"""

from __future__ import annotations

import builtins
import ctypes
import gc
import json
import os
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).resolve().parent
SIDE = 230  # of A and B: above what failing_malloc.c takes for a large block
MOST = 400  # allocations of one product; more means that a loop does not end
MOST_FIRST, SAME = 40, 5  # products before the first failure, of which the last keep as much
SETTLE_S = 5  # in which a copying thread lets its last block go

# Options, the dtypes of A, B and `out` ("" for none), and beta.
CONFIGURATIONS: dict[str, tuple[dict[str, Any], str, str, float]] = {
    "cpu rows, beta": ({"device": "cpu", "threads": 3, "split": "rows"}, "f4", "f4", 2),
    "cpu cols, int8": ({"device": "cpu", "threads": 3, "split": "cols"}, "i1", "", 0),
    "cpu critical": (
        {"device": "cpu", "threads": 2, "split": "cols", "reduce": "critical"}, "f8", "f4", 1,
    ),
    "emulator cols": (
        {"device": "emulator", "threads": 2, "split": "cols", "emulate_devices": 2}, "f4", "f8", 1,
    ),
    "emulator rows, float16": (
        {"device": "emulator", "threads": 2, "split": "rows", "emulate_devices": 2}, "f2", "", 0,
    ),
    "emulator critical": (
        {"device": "emulator", "threads": 2, "split": "cols", "reduce": "critical"}, "f4", "f4", 1,
    ),
    # In turns: with less memory, there are more of them.
    "emulator turns": ({"device": "emulator", "threads": 1}, "f4", "f4", 2),
    "strassen": ({"device": "cpu", "algorithm": "strassen", "levels": 2}, "f4", "f4", 1),
}  # fmt: skip

# The same of shortages on a device: sums over two, casts on the way, and packed operands.
ON_DEVICES: dict[str, tuple[dict[str, Any], str, str, float]] = {
    "cols": ({"threads": 2, "split": "cols", "emulate_devices": 2}, "f4", "f8", 1),
    "rows, float16": ({"threads": 2, "split": "rows", "emulate_devices": 2}, "f2", "", 0),
    "fp32x3": ({"threads": 1, "compute": "fp32x3"}, "f4", "f4", 2),
}
MEMORIES = ("device", "page-locked")


def environment(folder: Path) -> dict[str, str]:
    """Compiles the malloc into a folder, and gives the environment that loads it."""
    library = folder / "failing_malloc.so"
    subprocess.run(
        ["g++", "-x", "c", "-O1", "-fPIC", "-shared", "-o", library, HERE / "failing_malloc.c"],
        check=True, timeout=120,
    )  # fmt: skip
    paths = [str(HERE.parent), str(HERE.parent.parent), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ, "LD_PRELOAD": str(library), "OPENBLAS_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
    }  # fmt: skip


def campaign(name: str, folder: Path) -> dict[str, Any]:
    """What came of a configuration, from a process of its own; a crash is `crashed`."""
    done = subprocess.run(
        [sys.executable, "-m", "fuzzing.shortage", name], env=environment(folder),
        capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return {"configuration": name, "wrong": [f"crashed ({done.returncode}): {last}"]}
    return json.loads(done.stdout)


def on_device(device: str, name: str, memory: str, side: int = SIDE) -> dict[str, Any]:
    """What came of a configuration of `ON_DEVICES`, in this process, where `memory` is short, for
    matrices of that side."""
    options, *rest = ON_DEVICES[name]
    options = {**options, "device": device}
    if (device, name) == ("emulator", "fp32x3"):
        options["kernel"] = "mma"
    with Allocations(device, memory) as allocations:
        label = f"{device} {name}: {memory} memory"
        return Shortage(label, (options, *rest), allocations, side).all()


class Malloc:
    """The malloc that fails, of a process in `environment()`."""

    def __init__(self) -> None:
        library = ctypes.CDLL(None)
        library.allocations_live.restype = library.allocations_seen.restype = ctypes.c_long
        library.allocations_arm.argtypes = [ctypes.c_long, ctypes.c_int]
        self.arm, self.disarm = library.allocations_arm, library.allocations_disarm
        self.seen, self.live = library.allocations_seen, library.allocations_live


class Allocations:
    """The same of a device's memory, or of page-locked memory: where devices of a kind allocate,
    allocations are counted, and chosen ones fail with the error that the library raises there."""

    def __init__(self, kind: str, memory: str) -> None:
        from hybrid_gemm.devices.cuda.device import CudaDevice
        from hybrid_gemm.devices.emulator.device import EmulatorDevice

        owner: Any = CudaDevice if kind == "cuda" else EmulatorDevice
        name = "pinned" if memory == "page-locked" else "empty"
        if (kind, name) == ("cuda", "empty"):
            name = "_allocate"  # tables of addresses, too
        self.owner, self.name, self.real = owner, name, getattr(owner, name)
        self.pooled = name == "_allocate"
        self.own = name in vars(owner)
        self.lock = threading.Lock()
        self.made: list[tuple[weakref.ref, int]] = []
        self.pools: dict[int, Any] = {}
        self.count, self.fail_at, self.later, self.armed = 0, 0, False, False

    def __enter__(self) -> Allocations:
        allocations, real = self, self.real

        def allocate(device: Any, *args: Any) -> Any:
            if allocations.fails():
                raise allocations.error()
            made = real(device, *args)
            allocations.note(device, made)
            return made

        setattr(self.owner, self.name, allocate)
        return self

    def __exit__(self, *error: object) -> None:
        if self.own:
            setattr(self.owner, self.name, self.real)
        else:
            delattr(self.owner, self.name)

    def error(self) -> Exception:
        """As CuPy's pool raises it, or the driver for page-locked memory."""
        if self.owner.kind != "cuda":
            return MemoryError("no memory is left, for a test")
        import cupy

        if self.pooled:
            return cupy.cuda.memory.OutOfMemoryError(1 << 20, 0, 0)
        return cupy.cuda.runtime.CUDARuntimeError(2)

    def fails(self) -> bool:
        with self.lock:
            if not self.armed:
                return False
            self.count += 1
            return bool(self.fail_at) and (
                self.count >= self.fail_at if self.later else self.count == self.fail_at
            )

    def note(self, device: Any, made: Any) -> None:
        with self.lock:
            if self.pooled:
                self.pools[id(device.pool)] = device.pool
            else:
                self.made.append((weakref.ref(made), made.nbytes))

    def arm(self, number: int, later: bool) -> None:
        self.count, self.fail_at, self.later, self.armed = 0, number, bool(later), True

    def disarm(self) -> None:
        self.armed = False

    def seen(self) -> int:
        return self.count

    def live(self) -> int:
        """Bytes that are not freed."""
        with self.lock:
            self.made = [x for x in self.made if x[0]() is not None]
            return sum(x[1] for x in self.made) + sum(x.used_bytes() for x in self.pools.values())


class Shortage:
    """One product, again and again with another allocation that fails."""

    def __init__(
        self, name: str, configuration: tuple | None = None,
        allocations: Malloc | Allocations | None = None, side: int = SIDE,
    ) -> None:  # fmt: skip
        import hybrid_gemm

        options, dtype, out, beta = configuration or CONFIGURATIONS[name]
        self.name, self.beta, self.options = name, beta, options
        self.gemm, self.free_memory = hybrid_gemm.gemm, hybrid_gemm.free_memory
        if "turns" in name:
            sys.path.insert(0, str(HERE.parent.parent / "tests"))
            from support.small_sizes import small_turns

            small_turns(builtins)
        rng = np.random.default_rng(5)
        self.a, self.b, self.c = (rng.integers(-2, 3, (side, side)).astype(dtype) for _ in range(3))
        wide = [x.astype("i8") for x in (self.a, self.b, self.c)]
        result = np.result_type(self.a)
        self.right = (wide[0] @ wide[1] + int(beta) * wide[2]).astype(result).astype(out or result)
        self.out = np.full(self.right.shape, 77, out) if out else None
        self.allocations = allocations or Malloc()
        self.counts = {"right": 0, "refused": 0, "incomplete": 0}
        self.wrong: list[str] = []

    def multiply(self) -> np.ndarray:
        c = self.c if self.beta else None
        return self.gemm(self.a, self.b, c, beta=self.beta, out=self.out, **self.options)

    def all(self) -> dict[str, Any]:
        """Without failures until nothing new is kept, then with one at each place, and again where
        more was kept."""
        before, count = self.steady(), self.count()
        for _ in range(3):
            leaked = self.kept_by_failures(before, count)
            if leaked <= 0:
                break
            # What a library or a thread takes once is no leak, nor are the names that Python keeps:
            # their table grows to twice its size now and then.
            before += leaked
        if not np.array_equal(self.multiply(), self.right):
            self.wrong.append("wrong after all failures")
        if leaked > 0:
            self.wrong.append(f"{leaked} bytes leaked")
        return {"configuration": self.name, "allocations": count, **self.counts,
                "bytes_leaked": leaked, "wrong": self.wrong}  # fmt: skip

    def kept_by_failures(self, before: int, count: int) -> int:
        """The bytes more than before, after a failure at each place."""
        for later in (False, True):
            for number in range(1, count + 3):  # threads do not always allocate in one order
                self.one(number, later)
        return self.settled(before)

    def steady(self) -> int:
        """The bytes that are not freed once products keep no more: what is compiled, and what a
        thread gets with its first work."""
        found: list[int] = []
        for _ in range(MOST_FIRST):
            self.multiply()
            found.append(self.live())
            if len(set(found[-SAME:])) == 1 and len(found) >= SAME:
                break
        return max(found[-SAME:])

    def live(self) -> int:
        self.free_memory()
        gc.collect()
        return self.allocations.live()

    def settled(self, before: int) -> int:
        end = time.monotonic() + SETTLE_S
        while (leaked := self.live() - before) > 0 and time.monotonic() < end:
            time.sleep(0.05)
        return leaked

    def count(self) -> int:
        self.free_memory()
        self.allocations.arm(0, 0)
        self.multiply()
        self.allocations.disarm()
        return min(MOST, self.allocations.seen())

    def one(self, number: int, later: bool) -> None:
        from hybrid_gemm.errors import OutOfMemoryError

        self.free_memory()
        if self.out is not None:
            self.out[...] = 77
        where = f"allocation {number}{' and all later' * later}"
        self.allocations.arm(number, later)
        try:
            got = self.multiply()
        except OutOfMemoryError as error:
            self.allocations.disarm()
            self.judge(error, where)
            return
        except BaseException as error:
            self.allocations.disarm()
            self.wrong.append(f"{where}: {type(error).__name__}: {error}")
            return
        finally:
            self.allocations.disarm()
        if np.array_equal(got, self.right):
            self.counts["right"] += 1
        else:
            self.wrong.append(f"{where}: a wrong product")

    def judge(self, error: BaseException, where: str) -> None:
        """A refusal is clear, and says so where some of `out` was written already."""
        noted = any("incomplete" in note for note in getattr(error, "__notes__", []))
        if "\n" in str(error) or len(str(error)) < 20:
            self.wrong.append(f"{where}: not one clear line: {error}")
        elif self.out is None or (self.out == 77).all():
            self.counts["refused"] += 1
        elif noted:
            self.counts["incomplete"] += 1
        else:
            self.wrong.append(f"{where}: out is half written, and the error does not say so")


if __name__ == "__main__":
    print(json.dumps(Shortage(sys.argv[1]).all()))
