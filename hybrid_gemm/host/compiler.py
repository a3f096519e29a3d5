"""Compiles C++ with g++ into a shared library in the cache."""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path

from ..errors import KernelError, UnavailableError
from . import cache


@functools.cache
def _toolchain() -> str:
    """What a library depends on besides its text: the compiler and, for -march=native, the CPU."""
    compiler = os.path.realpath(shutil.which("g++") or "g++")
    status = os.stat(compiler)
    keys = ("model name", "flags", "CPU implementer", "CPU part", "Features")
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    except OSError:
        lines = []
    cpu = [line for line in lines if line.startswith(keys)] or [platform.processor()]
    return "\n".join([compiler, str(status.st_size), str(status.st_mtime_ns), *cpu])


_locks: dict[Path, threading.Lock] = {}


def build_library(source: Path) -> Path:
    """A library for the host made of a C++ file, by g++ if the cache does not have it.

    Raises `UnavailableError` where g++ is not here, `KernelError` with its message.
    """
    if shutil.which("g++") is None:
        raise UnavailableError(f"g++ is not installed, and {source.name} is compiled with it")
    flags = ["-std=c++17", "-O3", "-fPIC", "-shared", "-pthread"]
    text = source.read_text()
    return _made("host", flags, [], text, source.name, [_toolchain(), *flags, text])


def _made(
    kind: str, flags: Sequence[str], where: Sequence[str], text: str, what: str,
    depends: Sequence[str],
) -> Path:  # fmt: skip
    """The library that g++ makes of a text, from the cache if it is there."""
    digest = hashlib.sha256("\0".join(depends).encode()).hexdigest()
    path = cache.directory(kind) / f"{digest[:32]}.so"
    with _locks.setdefault(path, threading.Lock()):
        if not path.exists():
            with tempfile.TemporaryDirectory() as folder:
                made = Path(folder) / "made.so"
                ran = _tool(["g++", *flags, *where, "-x", "c++", "-", "-o", str(made)], text)
                if ran.returncode:
                    raise KernelError(f"{what} does not compile:\n{ran.stderr.strip()}")
                cache.atomic_write(path, made.read_bytes())
    return path


def _tool(command: Sequence[str], text: str = "") -> subprocess.CompletedProcess[str]:
    # Tools run without the sanitizer that this process may have been given.
    environment = {k: v for k, v in os.environ.items() if k not in ("LD_PRELOAD", "ASAN_OPTIONS")}
    environment["LC_ALL"] = "C"
    return subprocess.run(command, input=text, capture_output=True, text=True, env=environment)
