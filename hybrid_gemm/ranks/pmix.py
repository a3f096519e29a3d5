"""What Slurm's PMIx needs around MPI's start."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping

from ..host.libraries import Library

_PMIX_BOOL = 1  # the type of a pmix_value_t


def of_srun(variables: Mapping[str, str] = os.environ) -> bool:
    """Whether `srun --mpi=pmix` started this process, and not an mpirun inside it."""
    return variables.get("PMIX_NAMESPACE", "").startswith("slurm.pmix")


def until_all_have_started() -> None:
    """Under srun: waits until every rank has left MPI's start.

    Open MPI's start ends with a fence of PMIx, and a rank that is still in it dies by the first
    message of one that has left (open-mpi/ompi 12495). The fence without data of Slurm's plugin
    does not hold ranks back (22.05: all of 100 fences were left before the last rank came); its
    fence that collects data does.
    """
    if not of_srun():
        return
    try:
        library = Library("libpmix.so.2", mode=os.RTLD_NOLOAD | os.RTLD_NOW)
        load, fence = library.PMIx_Info_load, library.PMIx_Fence
    except (OSError, AttributeError):  # another MPI, or one with a PMIx of its own inside
        return
    collect = ctypes.create_string_buffer(4096)  # one pmix_info_t, which has fewer than 600 bytes
    load(collect, b"pmix.collect", ctypes.byref(ctypes.c_bool(True)), ctypes.c_uint16(_PMIX_BOOL))
    fence(None, 0, collect, ctypes.c_size_t(1))  # a fence that fails is the launcher's to report
