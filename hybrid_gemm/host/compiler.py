"""Compiles C++ for this host: g++ makes a shared library, which the cache keeps."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import platform
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ..errors import HybridGemmError, KernelError, UnavailableError, in_one_line
from . import cache

LIMIT_S = 300  # for one call of a tool; the longest kernel takes g++ a tenth of that
_tools: set[int] = set()  # processes of those at work
_ending = False  # whether this process is


@functools.cache
def toolchain() -> str:
    """What a library depends on besides its source: the compiler and, for -march=native, the
    CPU."""
    compiler = os.path.realpath(shutil.which("g++") or "g++")
    status = os.stat(compiler)
    keys = ("model name", "flags", "CPU implementer", "CPU part", "Features")
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    except OSError:
        lines = []
    cpu = [line for line in lines if line.startswith(keys)] or [platform.machine()]
    return "\n".join([compiler, str(status.st_size), str(status.st_mtime_ns), *cpu])


def build_library(
    source: Path, *headers: Path, flags: Sequence[str] = (), only_cached: bool = False
) -> Path:
    """The path of the shared library that g++ makes of the C++ file `source`, which includes these
    headers of ours, with `flags` beside those that all have.

    Compiles only if the cache has no library of this text, these flags and this compiler.
    Raises `UnavailableError` where g++ is not installed, or would have to compile and `only_cached`
    is set, and `KernelError` with the compiler's message where the file does not compile.
    """
    if shutil.which("g++") is None:
        raise UnavailableError(f"g++ is not installed, and {source.name} is compiled with it")
    flags = ["-std=c++17", "-O3", "-fPIC", "-shared", "-pthread", *flags]
    text, included = source.read_text(), [header.read_text() for header in headers]
    where = [f"-I{header.parent}" for header in headers]
    depends = [toolchain(), *flags, text, *included]
    return build_text("host", flags, where, text, source.name, depends, only_cached=only_cached)


def reason(load: Callable[[], object]) -> str | None:
    """Why what `load` compiles and loads is not here, in one line; None where it is."""
    try:
        load()
    except (HybridGemmError, OSError, AttributeError) as error:  # it may lack a function
        return in_one_line(error)
    return None


def build_text(
    kind: str,
    flags: Sequence[str],
    where: Sequence[str],
    text: str,
    what: str,
    depends: Sequence[str],
    suffix: str = ".so",
    only_cached: bool = False,
) -> Path:
    """The path of the library that g++ makes of a C++ text, from the cache if it is there.

    `kind` names the cache's folder, `what` the text in an error message. `where` are flags that
    say where headers lie, and objects and libraries to link; they are no part of the key, for
    `depends` holds their texts beside all else that the library depends on. With `suffix` .o, and a
    flag -c, it is an object and no library. Raises `KernelError` with the compiler's message.
    """
    digest = hashlib.sha256("\0".join(depends).encode()).hexdigest()

    if only_cached and not cache.is_kept(kind, f"{digest[:32]}{suffix}", loaded=True):
        raise UnavailableError(f"{what} is not compiled yet")

    def make() -> bytes:
        with cache.scratch_folder() as folder:
            # A file in a folder of its own, for what a text includes is looked for beside it first;
            # of a text by stdin that is the working directory, which may be anyone's.
            source, made = Path(folder) / "text.cpp", Path(folder) / f"made{suffix}"
            try:
                source.write_bytes(text.encode())
            except OSError as error:
                raise KernelError(
                    f"{what} cannot be written to {tempfile.gettempdir()}: {error.strerror}; "
                    "TMPDIR names another place"
                ) from None
            try:
                ran = run_tool(["g++", *flags, str(source), *where, "-o", str(made)], folder)
            except KernelError as error:
                raise KernelError(f"{what}: {error}") from None
            if ran.returncode or not made.exists():
                raise KernelError(f"{what} does not compile:{_why(ran)}")
            return made.read_bytes()

    return cache.kept(kind, f"{digest[:32]}{suffix}", make, loaded=True)[0]


def _why(ran: subprocess.CompletedProcess[str]) -> str:
    """What a compiler that made nothing said; how it ended where it said nothing, and whether
    there was room for its files and its words."""
    code, said = ran.returncode, ran.stderr.strip()
    if said:
        why = f"\n{said}"
    elif code < 0:
        why = f" {ran.args[0]} was ended by {signal.Signals(-code).name}, and said nothing"
    else:
        why = f" {ran.args[0]} ended with code {code}, made nothing and said nothing"
    folder = tempfile.gettempdir()
    if shutil.disk_usage(folder).free < 1 << 20:
        why += f"\nthe disk of {folder} is full; TMPDIR names another place"
    return why


def run_tool(command: Sequence[str], folder: str | None = None) -> subprocess.CompletedProcess[str]:
    """Runs a tool of the compiler's, which gets no input; its messages are in English. Its
    temporary files lie in `folder`, where one is given: they stay there if it is stopped.

    Raises `KernelError` where it does not start, or takes longer than `LIMIT_S`.
    """
    if _ending:
        raise KernelError(f"{command[0]} does not start: this process ends")
    # Without the sanitizer that this process may have been started with.
    environment = {k: v for k, v in os.environ.items() if k not in ("LD_PRELOAD", "ASAN_OPTIONS")}
    environment["LC_ALL"] = "C"
    # Without one, as `env -i` starts a process, g++ is found, and does not find its own parts.
    environment.setdefault("PATH", os.defpath)
    if folder is not None:
        environment["TMPDIR"] = folder
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as messages:
        files = [
            (os.POSIX_SPAWN_DUP2, out.fileno(), 1), (os.POSIX_SPAWN_DUP2, messages.fileno(), 2),
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
        ]  # fmt: skip
        process, before = 0, _children()
        try:
            process = _start(command, environment, files)
            _tools.add(process)
            if _ending:  # since it was asked above: `stop_tools` may not have seen this one
                raise KernelError(f"{command[0]} was stopped: this process ends")
            code = _exit_code(process)
        except BaseException as error:
            # Ctrl-C may come when it has started and its number is not known here yet.
            for child in {process} if process else _children() - before:
                _kill(child, os.getpid())
                with contextlib.suppress(ChildProcessError):  # it had ended meanwhile
                    os.waitpid(child, 0)
            if isinstance(error, TimeoutError):
                raise KernelError(
                    f"{command[0]} did not end within {LIMIT_S} s and was stopped"
                ) from None
            raise
        finally:
            _tools.discard(process)
        texts = []
        for file in out, messages:
            file.seek(0)
            texts.append(file.read().decode(errors="backslashreplace"))
    return subprocess.CompletedProcess(command, code, *texts)


def _start(command: Sequence[str], environment: dict[str, str], files: list[Any]) -> int:
    # A rank's threads have signals blocked, and `subprocess` would leave them so in the tool.
    try:
        return os.posix_spawnp(
            command[0], [*command], environment, file_actions=files, setsigmask=[],
            setsigdef=[signal.SIGPIPE],
        )  # fmt: skip
    except OSError as error:
        raise KernelError(f"{command[0]} does not start: {error.strerror}") from None


def _children() -> set[int]:
    """The processes that this thread has started and that are still there; none where the system
    does not tell."""
    with contextlib.suppress(OSError):
        return {*map(int, Path("/proc/thread-self/children").read_text().split())}
    return set()


def stop_tools() -> None:
    """Ends tools that other threads wait for, and has none started any more: this process ends by a
    signal, which they do not get."""
    global _ending
    _ending = True
    for process in tuple(_tools):
        _kill(process, os.getpid())


def _exit_code(process: int) -> int:
    """What a child ends with; 0, as of `subprocess`, where the system does not tell, since this
    process ignores SIGCHLD. Raises `TimeoutError` where it takes longer than `LIMIT_S`."""
    until, pause_s = time.monotonic() + LIMIT_S, 0.001
    while True:
        try:
            ended, status = os.waitpid(process, os.WNOHANG)
        except ChildProcessError:
            return 0
        if ended:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > until:
            raise TimeoutError
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 0.02)


def _kill(process: int, parent: int) -> None:
    """Ends a child of `parent` and its descendants. A group of their own would not see Ctrl-C.

    Numbers of processes that ended are given again, soon where many compile: one that has another
    parent is another process, and is left alone.
    """
    children: list[str] = []
    with contextlib.suppress(OSError):
        stat = Path(f"/proc/{process}/stat").read_text(errors="replace")
        if int(stat.rpartition(")")[2].split()[1]) != parent:
            return
        children = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    for child in children:  # first: without their parent they would have another
        _kill(int(child), process)
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, signal.SIGKILL)
