"""On the PYTHONPATH of a run it tells when a phase begins, and makes it last: a file
$FAULT_MARKS/PHASE.RANK with the process id of each rank that came there."""

import functools
import os
import time

FOLDER = os.environ.get("FAULT_MARKS", "")
LAST_S = float(os.environ.get("FAULT_LAST_S", "0.4"))
RANK = next((os.environ[x] for x in ("OMPI_COMM_WORLD_RANK", "PMIX_RANK") if x in os.environ), "0")


def mark(phase: str) -> bool:
    """Whether this is the first time that this rank came to the phase."""
    path = os.path.join(FOLDER, f"{phase}.{RANK}")
    if os.path.exists(path):
        return False
    with open(path + ".new", "w") as file:
        file.write(str(os.getpid()))
    os.replace(path + ".new", path)
    return True


def marked(owner, name: str, phase: str) -> None:
    """Lets owner.name say that the phase has begun, and wait, before it does its work."""
    work = getattr(owner, name)

    @functools.wraps(work)
    def call(*arguments, **options):
        if mark(phase):
            time.sleep(LAST_S)
        return work(*arguments, **options)

    setattr(owner, name, call)


class Finder:
    """Marks the phases of a module once it is loaded."""

    AFTER = "hybrid_gemm.cli.job"

    def find_spec(self, name, path=None, target=None):
        if name == self.AFTER:
            import sys

            sys.meta_path.remove(self)
            mark_phases()
        return None


def mark_phases() -> None:
    from hybrid_gemm.arrays import file_bytes, npy_files
    from hybrid_gemm.cli.inputs import Inputs
    from hybrid_gemm.devices.cpu import CpuDevice
    from hybrid_gemm.devices.kernel_device import KernelDevice

    marked(Inputs, "block", "generating")
    marked(Inputs, "whole", "generating")
    for device in CpuDevice, KernelDevice:
        marked(device, "gemm", "multiplying")
        marked(device, "sum", "reducing")
    marked(file_bytes, "write_part", "writing")
    marked(npy_files.NpyWriter, "commit", "writing")


if FOLDER:
    import sys

    mark("starting")
    sys.meta_path.insert(0, Finder())
