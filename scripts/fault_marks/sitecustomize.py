"""On the PYTHONPATH of a run it tells when a phase begins: a file $FAULT_MARKS/PHASE.RANK with the
process id of each rank that came there, and when that process started. The phase $FAULT_PHASE is
made to last."""

import functools
import itertools
import os
import threading
import time

FOLDER = os.environ.get("FAULT_MARKS", "")
PHASE = os.environ.get("FAULT_PHASE", "")
LAST_S = float(os.environ.get("FAULT_LAST_S", "0.4"))
PANEL_S = float(os.environ.get("FAULT_PANEL_S", "0"))  # of each panel of --resume
RANKED = [os.environ[x] for x in ("OMPI_COMM_WORLD_RANK", "PMIX_RANK") if x in os.environ]
RANK = next(iter(RANKED), "0")
telling = threading.Lock()


def mark(phase: str) -> bool:
    """Whether this is the first time that this rank came to the phase."""
    name = f"{phase}.{RANK}"
    with telling:
        if os.path.exists(os.path.join(FOLDER, name)):
            return False
        new = os.path.join(FOLDER, f".{name}.new")
        with open(new, "w") as file:
            with open("/proc/self/stat") as stat:
                started = stat.read().rpartition(")")[2].split()[19]
            file.write(f"{os.getpid()} {started}")
        os.replace(new, os.path.join(FOLDER, name))
    return True


def marked(owner, name: str, phase: str) -> None:
    """Lets owner.name say that the phase has begun, and wait, before it does its work."""
    work = getattr(owner, name)

    @functools.wraps(work)
    def call(*arguments, **options):
        if mark(phase) and phase == PHASE:
            time.sleep(LAST_S)
        return work(*arguments, **options)

    setattr(owner, name, call)


def marked_each(owner, name: str, phase: str, first: int) -> None:
    """Lets each call of owner.name wait; the phase begins with call number `first`."""
    work, calls = getattr(owner, name), itertools.count()

    @functools.wraps(work)
    def call(*arguments, **options):
        if next(calls) == first:
            mark(phase)
        time.sleep(PANEL_S)
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
    from hybrid_gemm.arrays import file_bytes, npy_files, unfinished
    from hybrid_gemm.cli.inputs import Inputs
    from hybrid_gemm.devices.cpu import CpuDevice
    from hybrid_gemm.devices.cuda import nccl_group
    from hybrid_gemm.devices.kernel_device import KernelDevice
    from hybrid_gemm.ranks import unfinished_over_ranks

    marked(Inputs, "block", "generating")
    marked(Inputs, "whole", "generating")
    marked(CpuDevice, "gemm", "multiplying")
    marked(CpuDevice, "sum", "reducing")
    marked(KernelDevice, "bind", "multiplying")  # through which all its products go
    marked(KernelDevice, "bound_sum", "reducing")
    marked(nccl_group.Group, "bound_sum", "reducing")
    marked(file_bytes, "write_part", "writing")
    marked(npy_files.NpyWriter, "commit", "writing")
    if RANKED:
        marked_each(unfinished_over_ranks.UnfinishedOverRanks, "finish", "panels", 3)
    else:
        marked_each(unfinished.Unfinished, "finish", "panels", 3)


if FOLDER:
    import sys

    mark("starting")
    sys.meta_path.insert(0, Finder())
