"""Files that appear whole or not at all, and what killed processes left of theirs.

Until it is whole, a file has no name (O_TMPFILE), so that nothing is left of it however the
process ends. Where the filesystem has no such files, or other processes write too, it has a
temporary name that says whose it is: host, process and when that started. The process holds a
lock (flock) on it, and the next one that writes to the folder removes what nobody holds. A file
that a later process takes up (`kept`) is called after its target instead, and is never removed.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import os
import re
import socket
import stat
import weakref
from collections.abc import Iterable, Mapping

from ..errors import HybridGemmError, UsageError

Path = str | os.PathLike[str]
UNFINISHED = ".unfinished"  # what the name of a file that is kept ends in
_FOLDER = os.O_DIRECTORY | getattr(os, "O_PATH", os.O_RDONLY)  # O_PATH is Linux's alone
_temporaries: set[str] = set()  # the named ones that this process would leave behind


def not_a_file(mode: int) -> str | None:
    """What a path with this mode is, if it is no regular file: "is a directory, not ..."."""
    if stat.S_ISREG(mode):
        return None
    kinds = {
        stat.S_IFDIR: "a directory",
        stat.S_IFIFO: "a pipe",
        stat.S_IFCHR: "a character device",
        stat.S_IFBLK: "a block device",
        stat.S_IFSOCK: "a socket",
    }
    return f"is {kinds.get(stat.S_IFMT(mode), 'special')}, not a regular file"


def check_output(path: Path, inputs: Iterable[Path] = ()) -> str:
    """The path of the file that writing to `path` makes or replaces, links followed.

    Only checks: nothing is written. Raises `UsageError` if `path` cannot be written as a file,
    or is one of the files in `inputs`, or that of a standard stream, be it by another name.
    """
    name = os.fspath(path)
    if name == "-":
        raise UsageError(
            "cannot write to standard output: a file is written whole or not at all; give a file "
            "name (./- is a file called -)"
        )
    try:
        found = os.stat(name)
    except FileNotFoundError:
        found = None
    except OSError as error:
        raise UsageError(f"cannot write {name}: {error.strerror}") from None
    try:
        target = os.path.realpath(name)
    except FileNotFoundError:
        raise UsageError(f"cannot write {name}: the working directory was removed") from None
    if why := _hindrance(name, target, found, inputs):
        names_none = not found and os.path.basename(name) in ("", ".")
        raise UsageError(f"cannot write {repr(name) if names_none else name}: {why}")
    return target


def _hindrance(
    name: str, target: str, found: os.stat_result | None, inputs: Iterable[Path]
) -> str | None:
    """Why a file cannot be made or replaced, and what would work; `found` is what is there."""
    folder = os.path.dirname(target)
    if found and (reason := not_a_file(found.st_mode)):
        return f"it {reason}; give a file name"
    if found and not os.path.exists(target):  # by a link of /proc, as /dev/stdout is
        return "it leads to a file that was removed; give another"
    if os.path.basename(name) in ("", "."):  # a folder's name, be there such a folder or not
        return "it names no file"
    if not os.path.isdir(folder):
        return f"there is no directory {folder} (mkdir -p makes it)"
    for given in inputs:
        if found and os.path.exists(given) and os.path.samefile(target, given):
            return f"it is the input {given}; give another name"
    if found and (stream := _stream_into(found)):
        return f"{stream} goes there; give another name"
    if not os.access(folder, os.W_OK | os.X_OK):
        protected = os.statvfs(folder).f_flag & os.ST_RDONLY
        why = "is on a read-only filesystem" if protected else "lets this user make no files"
        return f"{folder} {why}; give another place"
    if found and not os.access(target, os.W_OK):
        return "it is write-protected (chmod u+w allows it)"
    if found and _only_owner_renames(folder, found):
        return f"in {folder} only its owner may replace it"
    if found and _is_mount_point(target):
        return (
            "a file that is mounted alone cannot be replaced; mount its folder, or give another "
            "name"
        )
    return None


def _stream_into(found: os.stat_result) -> str | None:
    """The standard stream that this file takes, which would be lost with the file of before."""
    for descriptor, stream in ((1, "standard output"), (2, "standard error")):
        with contextlib.suppress(OSError):  # it may be closed
            if os.path.samestat(os.fstat(descriptor), found):
                return stream
    return None


def _only_owner_renames(folder: str, found: os.stat_result) -> bool:
    """Whether the folder is sticky, as /tmp is, and the file in it another user's."""
    parent, me = os.stat(folder), os.geteuid()
    return bool(parent.st_mode & stat.S_ISVTX) and me not in (0, found.st_uid, parent.st_uid)


def _is_mount_point(path: str) -> bool:
    """Whether something is mounted there, be it a single file, as containers have them."""
    escaped = path.translate({ord(x): f"\\{ord(x):03o}" for x in " \t\n\\"})
    with contextlib.suppress(OSError), open("/proc/self/mountinfo", "rb") as mounts:
        return any(line.split(b" ")[4] == os.fsencode(escaped) for line in mounts)
    return False


class OutputFile:
    """A new file for `target`, a path without links: write to `descriptor`, sync, `commit`.

    `named` gives it a temporary name at once, `temporary`, by which other processes open it.
    `kept` opens what an earlier process left of it, and leaves it for a later one. Raises
    `OSError` if the folder takes no file.
    """

    def __init__(self, target: str, *, named: bool = False, kept: bool = False) -> None:
        self.target = target
        self.folder, self.name = os.path.split(target)
        remove_stale(self.folder)
        name = self.name + UNFINISHED if kept else _temporary_name()
        self.temporary = os.path.join(self.folder, name)
        self._folder = os.open(self.folder, _FOLDER)
        opened = [self._folder]
        self._close = weakref.finalize(self, _close, self.temporary, opened, os.getpid())
        self.named = named or kept or not _takes_nameless_files(self._folder)
        if kept:
            self.descriptor = open_kept(self.temporary)
        elif self.named:
            remember(self.temporary)  # first: a signal may come between
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
            self.descriptor = os.open(name, flags, 0o666, dir_fd=self._folder)
        else:
            self.descriptor = _open_nameless(self._folder)
        opened.append(self.descriptor)
        with contextlib.suppress(OSError):  # some filesystems have no locks
            fcntl.flock(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with contextlib.suppress(FileNotFoundError):
            os.fchmod(self.descriptor, stat.S_IMODE(os.stat(target).st_mode))

    @property
    def open(self) -> bool:
        """Whether it was neither committed nor aborted."""
        return self._close.alive

    def write(self, data: bytes) -> None:
        """Appends to it."""
        left = memoryview(data)
        while left:
            left = left[os.write(self.descriptor, left) :]

    def commit(self) -> None:
        """Puts the file in its place; its bytes have to be on the disk already (fsync).

        Raises `HybridGemmError` if that fails, or if the folder or the temporary file is no longer
        where it was; then the file of before is still there. It raises one that says so, too, where
        the file took its place and the disk fails then.
        """
        try:
            self._put_in_place()
        except OSError as error:
            raise self._failure(error.strerror or str(error)) from None
        finally:
            self.abort()
        try:
            sync_folder(self.folder)
        except OSError as error:
            raise self._uncertain("its folder was not written to the disk", error) from None

    def _put_in_place(self) -> None:
        if not is_same(self.folder, os.fstat(self._folder)):
            raise self._failure(f"{self.folder} was removed or moved meanwhile")
        temporary = os.path.basename(self.temporary)
        written = os.fstat(self.descriptor)
        if not self.named:
            remember(self.temporary)
            _link(self.descriptor, temporary, self._folder)
        elif not is_same(temporary, written, self._folder):
            raise self._failure(f"{self.temporary} was removed or replaced meanwhile")
        os.replace(temporary, self.name, src_dir_fd=self._folder, dst_dir_fd=self._folder)
        try:
            placed = os.path.samestat(os.stat(self.target, follow_symlinks=False), written)
        except (FileNotFoundError, NotADirectoryError):
            placed = False
        except OSError as error:
            raise self._uncertain("it could not be looked at", error) from None
        if not placed:
            if is_same(self.name, written, self._folder):  # in a folder that was just moved
                os.unlink(self.name, dir_fd=self._folder)
            raise self._failure("it was removed or replaced as soon as it was written")

    def _failure(self, reason: str) -> HybridGemmError:
        return HybridGemmError(f"could not write {self.target}: {reason}")

    def _uncertain(self, what: str, error: OSError) -> HybridGemmError:
        return HybridGemmError(
            f"{self.target} was written and took its place, and then {what}: {error.strerror}; "
            "see whether it is there, and what the system says of the disk"
        )

    def abort(self) -> None:
        """Removes what was written, unless it is kept; does nothing after `commit`."""
        self._close()


def open_kept(path: str) -> int:
    """A descriptor of the file at `path`, which is made where there is none. Raises `UsageError`
    if it is no regular file of this user, and `OSError`."""
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        descriptor = os.open(path, flags, 0o666)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise UsageError(f"{path} is a link; remove it, or give another place") from None
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
        os.close(descriptor)
        raise UsageError(f"{path} is no regular file of yours; remove it, or give another place")
    return descriptor


def write_file(target: str, data: bytes) -> None:
    """Writes a whole file or nothing. Raises `HybridGemmError` where the disk is full, say."""
    write_files({target: data})


def write_files(contents: Mapping[str, bytes]) -> None:
    """Writes files, each whole or not at all: all are on the disk before the first takes its
    place. Raises `HybridGemmError`, which names the file."""
    with contextlib.ExitStack() as stack:
        files = []
        for target, data in contents.items():
            try:
                file = OutputFile(target)
                stack.callback(file.abort)
                file.write(data)
                os.fsync(file.descriptor)
            except OSError as error:
                raise HybridGemmError(f"could not write {target}: {error.strerror}") from None
            files.append(file)
        for file in files:
            file.commit()


def sync_folder(path: str) -> None:
    """Returns when a folder's names are on the disk, where it may be asked: some network
    filesystems cannot sync a folder. Raises `OSError` if the disk fails."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        if error.errno == errno.EIO:
            raise


def sync_data(descriptor: int) -> None:
    """Returns when a file's bytes are on the disk, and what is needed to read them."""
    getattr(os, "fdatasync", os.fsync)(descriptor)  # macOS has fsync alone


def _close(temporary: str, opened: list[int], process: int) -> None:
    """The end of an `OutputFile`, at the latest when Python exits. `opened` is its folder and,
    if it came so far, its file."""
    if os.getpid() == process:  # a forked child leaves its parent's file alone
        _remove(temporary, opened[0])
    for descriptor in opened:
        os.close(descriptor)


def is_same(path: str, file: os.stat_result, folder: int | None = None) -> bool:
    """Whether a path, taken from a folder or not, leads to this file."""
    try:
        found = os.stat(path, dir_fd=folder, follow_symlinks=False)
    except OSError:
        return False
    return os.path.samestat(found, file)


# --- files without a name -----------------------------------------------------------------


def _open_nameless(folder: int) -> int:
    return os.open(".", os.O_RDWR | os.O_TMPFILE, 0o666, dir_fd=folder)


def _link(descriptor: int, name: str, folder: int) -> None:
    """Gives a nameless file a name. With folders given, link(2) follows the link in /proc."""
    os.link(f"/proc/self/fd/{descriptor}", name, src_dir_fd=folder, dst_dir_fd=folder)


def _takes_nameless_files(folder: int) -> bool:
    """Whether nameless files can be made here and named later: one is, to be sure of both."""
    name = _temporary_name()
    try:
        descriptor = _open_nameless(folder)
        try:
            _link(descriptor, name, folder)
            os.unlink(name, dir_fd=folder)
        finally:
            os.close(descriptor)
    except (OSError, AttributeError):  # a system without O_TMPFILE
        return False
    return True


# --- temporary names ----------------------------------------------------------------------


def remember(temporary: str) -> None:
    """Has `remove_all` remove this file, whoever made it."""
    _temporaries.add(temporary)


def remove_all() -> None:
    """Removes the temporary files of this process: for signal handlers, which never return."""
    for temporary in tuple(_temporaries):
        _remove(temporary)


def _remove(temporary: str, folder: int | None = None) -> None:
    """Removes a temporary file of this process, from its folder where that may have moved."""
    if temporary in _temporaries:
        with contextlib.suppress(OSError):
            os.unlink(temporary if folder is None else os.path.basename(temporary), dir_fd=folder)
        _temporaries.discard(temporary)


def remove_stale(folder: str) -> None:
    """Removes temporary files that killed processes of this user and host left in a folder."""
    pattern = re.compile(rf"\.hybrid-gemm-{re.escape(_host())}-(\d+)-(\d+)-[0-9a-f]{{16}}\.tmp")
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            found = pattern.fullmatch(entry.name)
            if found and not _runs(int(found[1]), found[2]):
                with contextlib.suppress(OSError):  # it is in use, or another process was faster
                    _remove_unlocked(entry.path)


def _remove_unlocked(path: str) -> None:
    """Removes a file of this user that no process has locked. Processes of another container
    cannot be seen, and their locks can."""
    descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        found = os.fstat(descriptor)
        if stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid():
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.unlink(path)
    finally:
        os.close(descriptor)


def _temporary_name() -> str:
    process = os.getpid()
    started = _started(process) or "0"
    return f".hybrid-gemm-{_host()}-{process}-{started}-{os.urandom(8).hex()}.tmp"


@functools.cache
def _host() -> str:
    return re.sub(r"[^\w.-]", "_", socket.gethostname(), flags=re.ASCII)[:64]


def _runs(process: int, started: str) -> bool:
    """Whether the process that started then still runs; without /proc, one of its number."""
    if os.path.exists("/proc/self/stat"):
        return _started(process) == started
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):  # or no number that processes have
        return False
    except PermissionError:  # another user's
        return True
    return True


def _started(process: int) -> str | None:
    """When a process started, in ticks since the boot; None if it has ended."""
    try:
        # The program's name in it may be any bytes: Linux cuts it after 15.
        with open(f"/proc/{process}/stat", "rb") as file:
            state, *fields = file.read().rpartition(b")")[2].decode().split()
    except OSError:
        return None
    return None if state in "ZX" else fields[18]
