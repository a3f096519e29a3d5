"""The cache folder: compiled code and measured times, kept from one run to the next.

Code from the cache runs as the user, so its folders must be the user's own, and each compiled
file is compared with its SHA-256 before it is used. SECURITY.md says what that guards against.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import hashlib
import json
import os
import secrets
import shutil
import stat
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from ..errors import UnavailableError
from . import forks
from .notes import note

T = TypeVar("T")
_HINT = "HYBRID_GEMM_CACHE names another place"

# --- folders ------------------------------------------------------------------------------


def directory(kind: str, *, lasting: bool = False, loaded: bool = False) -> Path:
    """The folder for one kind of file ("tuned", "host", ...), made if it is not there.

    It lies in `$HYBRID_GEMM_CACHE`, else `$XDG_CACHE_HOME/hybrid-gemm`, else
    `~/.cache/hybrid-gemm`. Where that cannot be made, belongs to another user or may be written
    by others, a note says so, and a temporary folder of this process is used; with `lasting`,
    `UnavailableError` is raised instead. With `loaded`, for code that the system loads, so it is
    where the folder is mounted noexec.
    """
    try:
        base = _base()
        _own(base)
        path = _own(base / kind)
        if loaded:
            _check_loads(path, _HINT)
        return path
    except UnavailableError as error:
        if lasting:
            raise
        note(f"{error}; until this process ends, a temporary folder is used instead")
    return _temporary(kind, loaded)


def _base() -> Path:
    if given := os.environ.get("HYBRID_GEMM_CACHE"):
        return Path(given)
    # A relative path would mean another folder in each working directory.
    caches = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(caches):
        return Path(caches, "hybrid-gemm")
    home = os.path.expanduser("~")
    if not os.path.isabs(home):
        raise UnavailableError(f"there is no home folder to keep a cache in; {_HINT}")
    return Path(home, ".cache", "hybrid-gemm")


def _own(path: Path) -> Path:
    """The folder, made with mode 0700 if it is not there; `UnavailableError` if it is not this
    user's alone to write."""
    try:
        _make(path)
        status = path.stat()
    except OSError as error:
        raise UnavailableError(
            f"cannot make the cache folder {path}: {error.strerror}; {_HINT}"
        ) from error
    if status.st_uid != os.geteuid():
        raise UnavailableError(f"the cache folder {path} belongs to another user; {_HINT}")
    mode = stat.S_IMODE(status.st_mode)
    if mode & 0o022:
        raise UnavailableError(
            f"others may write to the cache folder {path} (mode {mode:03o}), and may have put "
            f"files there: remove it; {_HINT}"
        )
    return path


def _check_loads(path: Path, hint: str) -> None:
    """Raises `UnavailableError` where the system loads no code from a folder."""
    if os.statvfs(path).f_flag & getattr(os, "ST_NOEXEC", 0):  # macOS does not tell
        raise UnavailableError(f"{path} is mounted noexec, and no compiled code runs there; {hint}")


def _make(path: Path) -> None:
    if path.is_dir():
        return
    if not path.parent.exists():
        _make(path.parent)
    with contextlib.suppress(FileExistsError):  # another process was faster
        path.mkdir(mode=0o700)
    if not path.is_dir():
        raise NotADirectoryError(20, "it is no folder")


temporary_folders: list[Path] = []  # the process's temporary folder, once there is one


def _temporary(kind: str, loaded: bool) -> Path:
    try:
        if not temporary_folders:
            made = Path(tempfile.mkdtemp(prefix="hybrid-gemm-"))  # mode 0700
            temporary_folders.append(made)
        path = temporary_folders[0] / kind
        path.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise UnavailableError(
            f"cannot make a temporary folder in place of the cache: {error}"
        ) from error
    if loaded:
        _check_loads(path, "TMPDIR names another place")
    return path


_scratch_folders: set[Path] = set()


@contextlib.contextmanager
def scratch_folder() -> Iterator[str]:
    """A temporary folder that goes with the block, or with the command that a signal ends."""
    with tempfile.TemporaryDirectory() as folder:
        _scratch_folders.add(Path(folder))
        try:
            yield folder
        finally:
            _scratch_folders.discard(Path(folder))


@atexit.register
def remove_temporary_folders() -> None:
    """Removes the process's temporary folders. The command calls it where a signal ends it, too."""
    for folder in (*temporary_folders, *_scratch_folders):
        shutil.rmtree(folder, ignore_errors=True)


# --- what was measured --------------------------------------------------------------------


def measured_file(kind: str, name: str) -> Path | None:
    """The file for what is measured on this host. None, and a note, where no folder takes one: a
    product needs none of it."""
    try:
        return directory(kind) / name
    except UnavailableError as error:
        note(str(error))
        return None


def read_measured(file: Path | None, read: Callable[[Any], T], damaged: str) -> T | None:
    """What `read` makes of a file's JSON. None where there is no file, and where it or `read` finds
    it damaged, which a note says in these words after the file's name."""
    if file is None:
        return None
    try:
        return read(json.loads(file.read_text()))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        note(f"{file} {damaged}")
        return None


def is_figure(x: object) -> bool:
    """Whether what a file says is a rate or a time: a number above 0 that float64 holds."""
    return isinstance(x, int | float) and 0 < x <= sys.float_info.max


def keep_measured(file: Path | None, data: bytes) -> None:
    """Writes it, or says in a note that the disk refuses."""
    if file is not None:
        try:
            atomic_write(file, data)
        except OSError as error:
            note(f"cannot write to the cache folder {file.parent}: {error.strerror}; {_HINT}")


# --- compiled files -----------------------------------------------------------------------

LONGEST_TURN_S = 60  # twice what the longest kernel takes; who waited so long compiles it, too
# Locks of threads: a signal's handler that multiplies may come in between, and makes the file, too.
_locks: dict[Path, threading.RLock] = {}
# Open files of the turns that this process's threads have, or wait for.
_turns: dict[tuple[Path, int], int] = {}


def kept(
    kind: str, name: str, make: Callable[[], bytes], *, loaded: bool = False
) -> tuple[Path, bytes]:
    """A compiled file of the cache: its path and what is in it. `loaded`: as of `directory`.

    It is made by `make` where it is missing or is not what its SHA-256, in `name`.sha256, says: by
    one thread and one process, for which others that need it, as ranks on this host do, wait.
    """
    folder = directory(kind, loaded=loaded)
    with _locks.setdefault(folder / name, threading.RLock()):
        found = _found(kind, folder, name)
        if found is None:
            with _turn(folder / f"{name}.lock"):
                found = _found(kind, folder, name) or _made(kind, folder, name, make(), loaded)
        return found


def is_kept(kind: str, name: str, *, loaded: bool = False) -> bool:
    """Whether `kept` would make nothing, nor wait for another process that makes it."""
    return _found(kind, directory(kind, loaded=loaded), name) is not None


def _found(kind: str, folder: Path, name: str) -> tuple[Path, bytes] | None:
    for place in (folder, *(made / kind for made in temporary_folders)):
        data = _whole(place / name)
        if data is not None:
            return place / name, data
    return None


def _made(kind: str, folder: Path, name: str, data: bytes, loaded: bool) -> tuple[Path, bytes]:
    try:
        _keep(folder / name, data)
    except OSError as error:
        note(f"cannot write to the cache folder {folder}: {error.strerror}; {_HINT}")
        folder = _temporary(kind, loaded)
        _keep(folder / name, data)
    return folder / name, data


@contextlib.contextmanager
def _turn(path: Path) -> Iterator[None]:
    """Waits until no other process holds a lock (flock) on this file, and holds it meanwhile. The
    file goes with the turn: who waits has it open. It saves time and no more, so where a disk has
    no locks, or the process that holds one is stopped, or this thread has the turn, there is
    none."""
    mine = path, threading.get_ident()
    if mine in _turns:
        yield
        return
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError:
        yield
        return
    _turns[mine] = file
    try:
        _lock(file)
        yield
    finally:
        with contextlib.suppress(OSError):
            path.unlink()
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_UN)  # of forked children, too
        _turns.pop(mine, None)
        os.close(file)


def _lock(file: int) -> None:
    until = time.monotonic() + LONGEST_TURN_S
    while time.monotonic() < until:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(0.01)
        except OSError:
            return
        else:
            return


def _digest_path(path: Path) -> Path:
    return path.with_name(f"{path.name}.sha256")


def _digest(path: Path, data: bytes) -> bytes:
    """As `sha256sum -c` reads it."""
    return f"{hashlib.sha256(data).hexdigest()}  {path.name}\n".encode()


def _whole(path: Path) -> bytes | None:
    """What is in a compiled file; None if it is missing, damaged or others may write it."""
    try:
        if not (_is_own_file(path) and _is_own_file(_digest_path(path))):
            return None
        data, written = path.read_bytes(), _digest_path(path).read_bytes()
    except OSError:
        return None
    if written == _digest(path, data):
        return data
    note(f"{path} is damaged; it is compiled again")
    return None


def _is_own_file(path: Path) -> bool:
    """Whether it is a regular file that this user alone may write."""
    status = path.stat()
    alone = status.st_uid == os.geteuid() and not status.st_mode & 0o022
    return stat.S_ISREG(status.st_mode) and alone


def _keep(path: Path, data: bytes) -> None:
    atomic_write(_digest_path(path), _digest(path, data), private=True)
    atomic_write(path, data, private=True)


def _forget() -> None:
    _locks.clear()  # held by threads that did not come along
    temporary_folders.clear()  # the parent removes them
    _scratch_folders.clear()
    for file in _turns.values():  # the parent's
        os.close(file)
    _turns.clear()


forks.forget_in_child(_forget)


def atomic_write(path: Path, data: bytes, *, private: bool = False) -> None:
    """Writes a whole file or nothing, so that no reader, of any process, sees part of it.

    A file that was there is replaced, and the new one has its permissions; a `private` one is
    its owner's alone. Raises `OSError` if the disk refuses.
    """
    name = path.with_name(f".hybrid-gemm-{secrets.token_hex(8)}.tmp")
    try:
        # Made by open, not mkstemp, so that the umask gives the usual permissions.
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        with open(os.open(name, flags, 0o600 if private else 0o666), "wb") as file:
            if not private and path.exists():
                os.fchmod(file.fileno(), stat.S_IMODE(path.stat().st_mode))
            file.write(data)
        os.replace(name, path)
    except BaseException:
        name.unlink(missing_ok=True)
        raise
