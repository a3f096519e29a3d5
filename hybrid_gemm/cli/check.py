"""`hybrid-gemm run --check`: kernels on the emulator, each access and each barrier watched."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from ..devices.emulator import program as emulation
from ..devices.emulator.device import EmulatorDevice
from ..errors import KernelError
from ..execution.result import Result
from ..host.libraries import Library
from ..reporting.console import line
from ..verify import Verdict
from .alone import Alone
from .inputs import Inputs
from .job import Wanted

# Sides of generated input that are not given. They differ, so that a kernel that takes one for
# another makes a wrong C; they are short, since checked kernels are slow.
SIDES = {"m": 200, "n": 184, "k": 168}


def restart_checked() -> None:
    """Starts this command again in a process that AddressSanitizer watches, unless it is one.

    Raises `UnavailableError` where g++ has none.
    """
    if hasattr(Library(None), "__asan_init"):
        return
    watched = emulation.sanitized_environment()
    # This package, and no module of that name in the folder where the command runs (-P).
    folders = [str(Path(__file__).resolve().parents[2]), watched.get("PYTHONPATH", "")]
    watched["PYTHONPATH"] = os.pathsep.join(filter(None, folders))
    sys.stdout.flush()
    os.execve(sys.executable, [sys.executable, "-P", "-m", "hybrid_gemm", *sys.argv[1:]], watched)


class Checked(Alone):
    """A site of `job.Job`: as alone, on the emulator, in every order of threads.

    A read or a write outside the matrices, a misaligned one, and threads that do not meet at a
    barrier raise `KernelError` with the kernel's line; writes to A, to B and between the rows of C
    raise it, too. So do products that depend on the order in
    which threads run: then the kernel has a race, or reads what was not written. Rows of matrices
    lie apart (`row_gap` of the devices), so that the product of a kernel that takes them for
    contiguous is wrong.
    """

    def open(self, inputs: Inputs, *, resident: bool) -> str:
        super().open(inputs, resident=resident)
        return (
            "checking on the emulator: addresses, alignment, barriers, and the orders of threads "
            f"{', '.join(emulation.ORDERS)}"
        )

    def run(self, inputs: Inputs, out: Any, wanted: Wanted, progress: Callable) -> Result:
        found: dict[str, np.ndarray] = {}
        for order in reversed(emulation.ORDERS):  # the last is what is shown
            for device in (x.unwrapped for x in self.runner.devices):
                assert isinstance(device, EmulatorDevice)
                device.options = emulation.Options(order, sanitize=True)
            result = super().run(inputs, out, wanted, progress)
            found[order] = np.array(result.c)
        bits = {order: c.tobytes() for order, c in found.items()}
        for order in emulation.ORDERS[1:]:
            if bits[order] != bits["forward"]:
                rows, cols = np.nonzero(~_same(found[order], found["forward"]))
                raise KernelError(
                    f"kernel {self.variant.name} has a race: {len(rows)} elements of C, the first "
                    f"at row {rows[0]}, column {cols[0]}, change when threads run in the order "
                    f"{order} instead of forward; a barrier is missing, or a variable has no value "
                    "when it is read"
                )
        return result

    def print_result(self, result: Result, verdict: Verdict | None) -> None:
        super().print_result(result, verdict)
        line(
            "checked: every access is inside an array and aligned, threads meet at barriers, and C "
            f"has the same bits in {len(emulation.ORDERS)} orders of threads"
        )


def _same(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Where two matrices have the same bits."""
    x, y = (np.ascontiguousarray(z)[..., None].view(np.uint8) for z in (x, y))
    return (x == y).all(axis=2)
