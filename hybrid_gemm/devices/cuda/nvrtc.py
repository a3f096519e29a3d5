"""Kernel text to machine code by NVRTC, which needs no card; results stay on disk."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import re
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

from ... import catalog
from ...errors import KernelError, UnavailableError, in_one_line
from ...host import cache
from ...host.installing import pip_install

# ptxas gives up asynchronous tensor-core products, or the registers a warpgroup asked for.
_GIVEN_UP = re.compile(r".*\(C75(?:08|09|1[0-8])\).*")
_importing = threading.Lock()  # CUDA's bindings are not for import by several threads at once


@dataclasses.dataclass(frozen=True)
class Usage:
    """What one thread (registers, stack, spills) and one block (shared memory) occupy.

    Spills are the bytes of load and store instructions that move registers to local memory.
    """

    registers: int
    shared_bytes: int
    stack_bytes: int
    spill_store_bytes: int
    spill_load_bytes: int


@functools.cache
def version() -> str:
    """NVRTC's version, as "13.0"; `UnavailableError` if it is not installed."""
    try:
        with _importing:
            from cuda.bindings import nvrtc

        _status, major, minor = nvrtc.nvrtcVersion()
    except Exception as error:  # no module, no library, or a library of another CUDA
        raise UnavailableError(
            "compiling CUDA kernels needs cuda-core with NVRTC "
            f"({pip_install('compile')}): {in_one_line(error)}"
        ) from error
    return f"{major}.{minor}"


def _loaded_version() -> str:
    """NVRTC's version; from CuPy where that is imported, which takes a tenth of a second less than
    importing CUDA's bindings, of which a kernel from the cache has no need."""
    if cupy := sys.modules.get("cupy"):
        with contextlib.suppress(Exception):  # it has no NVRTC, say
            return "{}.{}".format(*cupy.cuda.nvrtc.getVersion())
    return version()


def compile(source: str, arch: str, name: str, *, quick: bool = False) -> tuple[bytes, Usage]:
    """The cubin of `source` for `arch` ("sm_90", "sm_90a", ...), and what it uses.

    `source` holds one kernel; files it includes are looked for in the kernels' folder. `name`
    is the file name that messages carry. `quick` leaves out most optimizations, for those who only
    ask whether a kernel compiles. Raises `KernelError` with the compiler's log, and
    `UnavailableError` without a compiler.
    """
    more = ("--Ofast-compile=max",) if quick and _is_at_least(12, 9) else ()
    text = "\n".join([_loaded_version(), arch, *more, name, catalog.include_digest(), source])

    def make() -> bytes:
        cubin, log = compiled_by_nvrtc(source, arch, name, more)
        return json.dumps(dataclasses.asdict(_usage(log))).encode() + b"\n" + cubin

    digest = hashlib.sha256(text.encode()).hexdigest()
    header, _, cubin = cache.kept("cubin", f"{digest}.cubin", make)[1].partition(b"\n")
    return cubin, Usage(**json.loads(header))


def compiled_by_nvrtc(
    source: str, arch: str, name: str, more: Sequence[str] = ()
) -> tuple[bytes, str]:
    version()  # says what is missing
    from cuda.bindings import nvrtc

    options = [
        f"-arch={arch}", "--std=c++17", "--generate-line-info", "--ptxas-options=-v",
        "--device-as-default-execution-space",  # lambdas, before NVRTC 13.4
        # What it kept, since 12.9, comes without a word on registers.
        *(["--no-cache"] if _is_at_least(12, 9) else []),
        *more,
    ]  # fmt: skip
    # Not by a path, for NVRTC would look in the working directory first, which may be anyone's.
    texts = catalog.included()
    names = [x.encode() for x in texts]
    program = _asked(
        nvrtc.nvrtcCreateProgram(
            source.encode(), name.encode(), len(names), [*texts.values()], names
        )
    )
    try:
        given = [os.fsencode(option) for option in options]
        (status,) = nvrtc.nvrtcCompileProgram(program, len(given), given)  # lets the lock go
        log = _text(program, nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog)
        words = log.replace(b"\0", b"").decode(errors="replace").strip()
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise KernelError(f"{name} does not compile for {arch}: {words or status.name}")
        cubin = _text(program, nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN)
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    if given_up := _GIVEN_UP.search(words):
        raise KernelError(f"{name} does not compile as meant for {arch}: {given_up[0].strip()}")
    return cubin, words


def _asked(answer: tuple[Any, ...]) -> Any:
    """What a call of NVRTC gave, if anything."""
    status, *given = answer
    if status:
        raise KernelError(f"NVRTC does not answer: {status.name}")
    return given[0] if given else None


def _text(program: Any, size_of: Callable[..., Any], read: Callable[..., Any]) -> bytes:
    """What NVRTC has of a program, of which it tells the size first."""
    text = bytearray(_asked(size_of(program)))
    _asked(read(program, text))
    return bytes(text)


def _is_at_least(major: int, minor: int) -> bool:
    return tuple(map(int, version().split("."))) >= (major, minor)


def _usage(log: str) -> Usage:
    """Reads what `ptxas -v` says of the one kernel."""

    def number(pattern: str) -> int:
        found = re.findall(rf"(\d+) {pattern}", log)
        return int(found[-1]) if found else 0

    return Usage(
        registers=number("registers"),
        shared_bytes=number("bytes smem"),
        stack_bytes=number("bytes stack frame"),
        spill_store_bytes=number("bytes spill stores"),
        spill_load_bytes=number("bytes spill loads"),
    )
