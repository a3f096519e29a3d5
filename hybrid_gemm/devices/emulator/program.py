"""Runs a kernel's text on the CPU: compiles it with g++, keeps the library, launches it.

`cuda_words.h` gives the text CUDA's words; `runtime.cpp` says how threads run. Programs
are compiled with FMA contraction, as CUDA compilers do: a product and a sum round once where
the CPU has the instruction.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import re
import shutil
import sys
import threading
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ...catalog import MAX_THREADS, Launch
from ...errors import (
    HybridGemmError,
    KernelError,
    OutOfMemoryError,
    UnavailableError,
    in_one_line,
)  # fmt: skip
from ...host.compiler import build_text, run_tool, toolchain
from ...host.libraries import Library

ORDERS = ("forward", "reverse", "shuffle")
MAX_SHARED_BYTES = 227 * 1024  # a block, on any GPU so far; as in cuda_threads.h

_NO_COMPILER = "g++ is not installed, and the emulator compiles kernels with it"
_HERE = Path(__file__).resolve().parent
_HEADER = _HERE / "cuda_words.h"
_RUNTIME = _HERE / "runtime.cpp"
_STACK_BYTES = 256 * 1024  # as in cuda_threads.h
_FLAGS = (
    # -O3 takes g++ twice as long, which products up to some 1000^3 do not win back, and adds
    # vectors of products, which are rounded before. Contraction is an expensive optimization.
    "-std=c++20", "-O1", "-fexpensive-optimizations", "-ffp-contract=fast", "-fwrapv",
    "-fno-math-errno", "-fno-strict-aliasing", "-fno-exceptions", "-fno-rtti",
    "-fno-stack-protector", "-fPIC", "-fvisibility=hidden",
    # Stacks have no guard pages: a frame that takes more than half of one does not compile.
    f"-Werror=frame-larger-than={_STACK_BYTES // 2}",
    # Shared memory changes while a thread waits, whatever a function seems to touch.
    "-fno-ipa-reference",
    "-fmax-errors=5", "-pipe",
)  # fmt: skip
_CPU_FLAGS = {
    # A switch of stacks pushes, so no red zone. On CPUs of AMD, GCC leaves chains of sums in two
    # steps, unless it is told not to.
    "x86_64": ("-march=native", "-mno-red-zone", "--param=avoid-fma-max-bits=0"),
    # Where return addresses are signed, GCC 12 for the native CPU takes the signature off twice.
    "aarch64": ("-march=native", "-mbranch-protection=none"),
}
_SANITIZE_FLAGS = (
    # -Og compiles in 0.6 of the time of -O1, and runs 1.15 times as long. In DWARF 5, addr2line of
    # binutils 2.40 names the first file of a text, and not the one whose line it is, for what
    # comes before the first change of files.
    "-Og", "-g1", "-gdwarf-4", "-fno-omit-frame-pointer",
    "-fsanitize=address,alignment,bounds,integer-divide-by-zero", "-fno-sanitize-recover=all",
)  # fmt: skip


@dataclass(frozen=True)
class Options:
    """How a kernel runs: the order of blocks, and of threads between barriers.

    `order` is forward, reverse, or shuffle (by `seed`): results that differ show a race. In
    reverse a warp goes on until it waits for its block; otherwise warps go in step.
    `sanitize` checks each access; it needs a process started in `sanitized_environment()`.
    """

    order: str = "forward"
    seed: int = 0
    sanitize: bool = False

    def __post_init__(self) -> None:
        if self.order not in ORDERS:
            raise ValueError(f"no order is called {self.order!r}; there are {', '.join(ORDERS)}")


@functools.cache
def unavailable() -> str | None:
    """Why kernels are not compiled and loaded here, in one line; None if they are."""
    if sys.platform != "linux":
        return "the emulator needs Linux, be it in a container or a virtual machine"
    if shutil.which("g++") is None:
        return _NO_COMPILER
    try:
        text = _text('extern "C" __global__ void nothing() {}', "nothing")
        Library(str(_build(text, (), _HERE, "nothing")))
    except HybridGemmError as error:
        return f"g++ does not compile kernels here: {in_one_line(error)}"
    except OSError as error:
        return (
            f"the system does not load what was compiled here: {error}; HYBRID_GEMM_CACHE names "
            "another place"
        )
    return None


def sanitized_environment() -> dict[str, str]:
    """The environment in which a Python process can run kernels with `sanitize=True`.

    Raises `UnavailableError` where g++ comes without AddressSanitizer.
    """
    if reason := unavailable():
        raise UnavailableError(reason)
    libraries = []
    # The C++ library too: AddressSanitizer looks up its exceptions when it starts.
    for name in ("libasan.so", "libstdc++.so"):
        found = run_tool(["g++", f"-print-file-name={name}"]).stdout.strip()
        if not Path(found).is_absolute():
            raise UnavailableError(f"g++ has no {name} here; checked kernels need it")
        libraries.append(found)
    return {
        **os.environ,
        "LD_PRELOAD": ":".join(libraries),
        # New memory is NaN, so that what is read before it is written shows in C.
        "ASAN_OPTIONS": "detect_leaks=0:detect_stack_use_after_return=0"
        ":max_malloc_fill_size=1000000000000:malloc_fill_byte=255",
        "PYTHONMALLOC": "malloc",
    }


# --- compiling ----------------------------------------------------------------------------

_EXTERN_SHARED = re.compile(
    r"extern\s+__shared__\s+(?:(?:__align__|alignas)\s*\([^()]*\)\s*)?"
    r"(?P<type>[\w:]+(?:\s+[\w:]+)*)\s+(?P<name>\w+)\s*\[\s*\]\s*;"
)


def _text(source: str, entry: str) -> str:
    # The one declaration that C++ has no words for: an array whose size the launch gives. It
    # becomes a pointer; the lambda keeps it out of namespace scope, where it would have no block.
    source = _EXTERN_SHARED.sub(
        r"auto* const \g<name> = [&] { return (\g<type>*)emulator::worker->shared; }();", source
    )
    return f'{source}\n#line 1 "entry"\nEMULATOR_ENTRY({entry})\n'


# Of what a kernel may call, and no more: to read the C++ library takes the linker longer than all
# else. Where AddressSanitizer is, its libraries are among g++'s own.
_LIBRARIES = ("-nodefaultlibs", "-lm", "-lc", "-lgcc")


def _build(text: str, extra: Sequence[str], include: Path, label: str) -> Path:
    """The library made from a kernel's text and the emulator's runtime."""
    flags = [*_FLAGS, *_CPU_FLAGS.get(platform.machine(), ()), *extra]
    common = [toolchain(), *flags, _texts(_HERE, ".h", ".cpp")]
    runtime = build_text(
        "emulator", [*flags, "-c"], ["-I", str(_HERE)], _RUNTIME.read_text(), _RUNTIME.name,
        common, suffix=".o",
    )  # fmt: skip
    libraries = () if extra else _LIBRARIES
    depends = [*common, *libraries, text, _texts(include, ".cuh")]
    where = ["-I", str(include), "-include", str(_HEADER), str(runtime), *libraries]
    flags += ["-shared", "-Wl,-z,defs"]
    return build_text("emulator", flags, where, text, f"kernel {label}", depends)


def _texts(folder: Path, *suffixes: str) -> str:
    """Changes when a text of a folder, with one of these suffixes, changes."""
    found = []
    for file in os.scandir(folder):
        if file.name.endswith(suffixes):
            status = file.stat()
            found.append((file.name, status.st_mtime_ns, status.st_size, status.st_ino))
    return _read_texts(folder, tuple(sorted(found)))


@functools.lru_cache(maxsize=8)
def _read_texts(folder: Path, files: tuple[tuple[str, int, int, int], ...]) -> str:
    digest = hashlib.sha256()
    for name, *_stamps in files:
        digest.update(name.encode() + b"\0" + (folder / name).read_bytes() + b"\0")
    return digest.hexdigest()


def compile(
    source: str, entry: str, *, include: Path, options: Options = Options(), label: str
) -> Program:
    """The program made of `source`, whose kernel is `extern "C" __global__ void entry(...)`.

    `include` is the folder of its `.cuh` files; `label` names it in errors. Raises
    `KernelError` with g++'s message, and `UnavailableError` where g++ or what
    `options.sanitize` needs is not here. Calls g++ only for what the cache does not have.
    """
    if shutil.which("g++") is None:
        raise UnavailableError(_NO_COMPILER)
    if options.sanitize and not hasattr(Library(None), "__asan_init"):
        raise UnavailableError(
            f"kernel {label} cannot run checked in this process; "
            "start one in emulation.sanitized_environment()"
        )
    extra = _SANITIZE_FLAGS if options.sanitize else ()
    path = _build(_text(source, entry), extra, Path(include), label)
    return Program(label, path, options.sanitize)


# --- launching ----------------------------------------------------------------------------

_checked_turn = threading.Lock()


class _Index(ctypes.Structure):
    _fields_ = [(axis, ctypes.c_uint) for axis in "xyz"]

    def __str__(self) -> str:
        return f"({self.x}, {self.y}, {self.z})"


class _Launch(ctypes.Structure):
    _fields_ = [
        ("grid", _Index), ("block", _Index), ("shared_bytes", ctypes.c_uint),
        ("workers", ctypes.c_uint), ("order", ctypes.c_uint), ("seed", ctypes.c_ulonglong),
    ]  # fmt: skip


class _Report(ctypes.Structure):
    _fields_ = [
        ("what", ctypes.c_uint), ("written", ctypes.c_uint),
        ("block", _Index), ("thread", _Index), ("other", _Index),
        ("line", ctypes.c_int), ("other_line", ctypes.c_int),
        ("file", ctypes.c_char_p), ("other_file", ctypes.c_char_p),
        ("address", ctypes.c_ulonglong), ("bytes", ctypes.c_ulonglong),
        ("region", ctypes.c_ulonglong), ("region_bytes", ctypes.c_ulonglong),
        ("code", ctypes.c_ulonglong),
    ]  # fmt: skip


class _Parameter(ctypes.Structure):
    _fields_ = [("kind", ctypes.c_char), ("pointer", ctypes.c_byte), ("bytes", ctypes.c_uint)]

    @property
    def dtype(self) -> np.dtype | None:
        """Of the value or what is pointed to; None for structures and void."""
        kind = self.kind.decode()
        return None if kind == "V" else np.dtype(f"{kind}{self.bytes}")


class Program:
    """A compiled kernel. Several Python threads may launch it at once."""

    def __init__(self, label: str, path: Path, sanitize: bool):
        self.label = label
        self.path = path
        self.sanitize = sanitize
        library = Library(str(path))
        self._launch = library.emulator_launch
        count = ctypes.c_uint()
        library.emulator_parameters.restype = ctypes.POINTER(_Parameter)
        parameters = library.emulator_parameters(ctypes.byref(count))
        self._parameters = parameters[: count.value]
        # Checked kernels keep shared memory in statics: one launch, on one OS thread, at a time.
        self._turn = _checked_turn if sanitize else nullcontext()

    def launch(
        self, launch: Launch, args: Sequence, *, threads: int = 1, options: Options = Options()
    ) -> None:
        """Runs the grid on `threads` OS threads and returns when it is done.

        `args` are NumPy scalars, passed by value, and NumPy arrays, passed as the address of
        their first element; their dtypes must be the kernel's. Only order and seed of
        `options` matter here. Raises `KernelError` for a launch that no GPU takes, threads
        that do not meet at a barrier or in a warp operation, and what a checked program finds.
        """
        self._check(launch)
        cells = self._cells(args)
        base = ctypes.addressof(cells)
        pointers = (ctypes.c_void_p * len(args))(*(base + 8 * i for i in range(len(args))))
        given = _Launch(
            launch.grid, launch.block, launch.shared_bytes, 1 if self.sanitize else threads,
            ORDERS.index(options.order), options.seed % 2**64,
        )  # fmt: skip
        report = _Report()
        with self._turn:
            failed = self._launch(ctypes.byref(given), pointers, ctypes.byref(report))
        if failed:
            raise self._error(report)

    def _check(self, launch: Launch) -> None:
        x, y, z = launch.block
        if min(launch.grid) < 1 or min(launch.block) < 1 or x * y * z > MAX_THREADS:
            raise KernelError(
                f"kernel {self.label}: no GPU takes grid {launch.grid} with block {launch.block}"
            )
        if not 0 <= launch.shared_bytes <= MAX_SHARED_BYTES:
            raise KernelError(
                f"kernel {self.label}: {launch.shared_bytes} bytes of dynamic shared memory; "
                f"a block has at most {MAX_SHARED_BYTES}"
            )

    def _cells(self, args: Sequence) -> ctypes.Array:
        """The arguments as the kernel takes them, 8 bytes each."""
        if len(args) != len(self._parameters):
            raise KernelError(
                f"kernel {self.label} takes {len(self._parameters)} arguments; a launch gives it "
                f"{len(args)} (docs/kernels.md lists them, by the header's role and workspace)"
            )
        cells = (ctypes.c_uint64 * len(args))()
        for i, (value, wanted) in enumerate(zip(args, self._parameters, strict=True)):
            kind, dtype = (np.ndarray if wanted.pointer else np.generic), wanted.dtype
            if not isinstance(value, kind) or (dtype is not None and value.dtype != dtype):
                raise KernelError(
                    f"kernel {self.label}: argument {i} must be a NumPy "
                    f"{'array' if wanted.pointer else 'scalar'} of {dtype or 'any dtype'}; "
                    f"got {type(value).__name__} {getattr(value, 'dtype', '')}".rstrip()
                )
            if wanted.pointer == 2 and not value.flags.writeable:
                raise ValueError(
                    f"kernel {self.label}: argument {i} is read-only; the kernel may write it"
                )
            if isinstance(value, np.ndarray):
                cells[i] = value.ctypes.data
            else:
                ctypes.memmove(ctypes.addressof(cells) + 8 * i, value.tobytes(), wanted.bytes)
        return cells

    def _error(self, report: _Report) -> HybridGemmError:
        """What a report of `runtime.cpp` says, in words."""
        who = f"kernel {self.label}: block {report.block}, thread {report.thread}"
        at = f"at {(report.file or b'').decode()}:{report.line}"
        match report.what:
            case 1 | 2:
                whom = "all threads of its block" if report.what == 1 else "lanes of its warp"
                other = "has returned"
                if report.other_line:
                    other = f"waits at {(report.other_file or b'').decode()}:{report.other_line}"
                return KernelError(f"{who} waits for {whom} {at}; thread {report.other} {other}")
            case 3:
                return KernelError(f"{who} is not in the mask of its warp operation {at}")
            case 4:
                return KernelError(f"{who} {_access(report)} at {_line(self.path, report.code)}")
            case 5:
                return KernelError(
                    f"{who} uses address {report.address:#x} as a multiple of {report.bytes} {at}"
                )
            case 6:
                index = ctypes.c_longlong(report.address).value
                return KernelError(f"{who} has index {index}, outside the array, {at}")
            case 7:
                return KernelError(f"{who} divides an integer by zero {at}")
            case 8:
                return KernelError(f"{who} finds that an assert does not hold, {at}")
        return OutOfMemoryError(
            f"kernel {self.label}: the system refuses {report.bytes} bytes for threads' stacks"
        )


def _access(report: _Report) -> str:
    if not report.bytes:
        return f"accesses address {report.address:#x}, where nothing is,"
    verb = f"{'writes' if report.written else 'reads'} {report.bytes} bytes"
    past = report.address - report.region - report.region_bytes
    freed = report.region <= report.address and past + report.bytes <= 0
    if not report.region or freed:
        return f"{verb} outside all arrays"
    if past >= 0:
        return f"{verb}, {past} past the end of an array of {report.region_bytes} bytes,"
    if report.address < report.region:
        before = report.region - report.address
        return f"{verb}, {before} before an array of {report.region_bytes} bytes,"
    return f"{verb} across the end of an array of {report.region_bytes} bytes"


def _line(library: Path, code: int) -> str:
    """file:line of an instruction, by addr2line, which comes with the assembler g++ needs; with the
    line of the kernel that called a helper in a shared file, where that is inlined."""
    found = run_tool(["addr2line", "-s", "-i", "-e", str(library), hex(code)]).stdout
    frames = [line.partition(" (")[0] for line in found.splitlines()] or ["??:0"]
    caller = next((frame for frame in frames if ".cu:" in frame), frames[0])
    return frames[0] if caller == frames[0] else f"{frames[0]}, called at {caller}"
