"""Matrices in .npy files: mapped for reading, and written whole or not at all. NumPy only."""

from __future__ import annotations

import contextlib
import difflib
import errno
import os
import secrets
import stat
from collections.abc import Iterable
from types import TracebackType
from typing import BinaryIO, Literal

import numpy as np
from numpy.lib import format as npy
from numpy.typing import DTypeLike

from ..errors import HybridGemmError, UsageError
from ..problem import check_dtype, shape_of

Path = str | os.PathLike[str]

# --- reading ------------------------------------------------------------------------------


def open_npy(path: Path) -> np.ndarray:
    """The matrix in a .npy file, as a read-only map: nothing is read or copied yet.

    Byte order and C or Fortran order stay as the file has them. Raises `UsageError` for a file
    that is not a whole 2-D .npy file and `DTypeError` for a dtype that is not multiplied; both
    messages name the file and say what would work.
    """
    name = os.fspath(path)
    try:
        # Asked before opening: opening a named pipe would wait for a writer.
        if reason := _not_a_file(os.stat(name).st_mode):
            raise UsageError(f"{name} {reason}; give a .npy file")
        with open(name, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            shape, fortran, dtype = _read_header(file, name, size)
            offset = file.tell()
    except FileNotFoundError:
        raise UsageError(f"{name}: no such file{_nearest_file(name)}") from None
    except PermissionError:
        raise UsageError(f"{name} cannot be read: permission denied (see ls -l {name})") from None
    except OSError as error:
        raise UsageError(f"{name} cannot be read: {error.strerror}") from None

    if dtype == "V2":  # what numpy.save makes of bfloat16, for which .npy has no name
        dtype = np.dtype("bfloat16")
    check_dtype(dtype, name)
    rows, cols = shape_of(np.broadcast_to(np.empty((), dtype), shape), name)
    expected = offset + rows * cols * dtype.itemsize
    if size < expected:
        raise UsageError(
            f"{name} is truncated: {expected} bytes expected for {rows} x {cols} {dtype}, "
            f"{size} found; write or copy it again"
        )
    order: Literal["C", "F"] = "F" if fortran else "C"
    if rows * cols == 0:  # mmap has no empty mappings
        empty = np.empty((rows, cols), dtype, order)
        empty.flags.writeable = False
        return empty
    return np.memmap(name, dtype, "r", offset, (rows, cols), order)


def _read_header(file: BinaryIO, name: str, size: int) -> tuple[tuple[int, ...], bool, np.dtype]:
    """Shape, whether the order is Fortran's, and dtype; `size` is the file's, in bytes."""
    start = file.read(6)
    file.seek(0)
    if start != npy.MAGIC_PREFIX:
        kind = "is empty"
        if size:
            kind = "is not a .npy file"
        if start[:4] == b"PK\x03\x04":
            kind = "is a .npz or zip archive, not a .npy file"
        if start[:1] == b"\x80":
            kind = "is a Python pickle, not a .npy file"
        raise UsageError(f"{name} {kind}; write the matrix with numpy.save")
    try:
        version = npy.read_magic(file)
        if version not in ((1, 0), (2, 0), (3, 0)):
            raise ValueError(f"version {version[0]}.{version[1]} is unknown")
        # 3.0 differs from 2.0 in the encoding of field names, and we take no fields.
        read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
        shape, fortran, dtype = read(file)
        # An array of that shape must be possible, even where none of it is in the file.
        np.broadcast_to(np.empty((), dtype), shape)
    except OSError:
        raise
    except Exception as error:  # the header is a Python literal: it can fail in many ways
        lines = str(error).splitlines() or [type(error).__name__]
        raise UsageError(
            f"{name} has a damaged .npy header ({lines[0]}); write it again with numpy.save"
        ) from None
    return shape, fortran, dtype


def _not_a_file(mode: int) -> str | None:
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


def _nearest_file(name: str) -> str:
    """The end of a message about a file that is not there: the name that was perhaps meant."""
    folder, last = os.path.split(name)
    if folder and not os.path.isdir(folder):
        return f": there is no directory {folder}"
    with contextlib.suppress(OSError):
        if close := difflib.get_close_matches(last, os.listdir(folder or "."), n=1):
            return f"; did you mean {os.path.join(folder, close[0])}?"
    return ""


# --- writing ------------------------------------------------------------------------------


def check_output(path: Path, inputs: Iterable[Path] = ()) -> str:
    """The path of the file that writing to `path` makes or replaces, links followed.

    Only checks: nothing is written. Raises `UsageError` if `path` cannot be written as a file,
    or is one of the files in `inputs`, be it by another name.
    """
    name = os.fspath(path)
    try:
        found = os.stat(name)
    except FileNotFoundError:
        found = None
    except OSError as error:
        raise UsageError(f"cannot write {name}: {error.strerror}") from None
    target = os.path.realpath(name)
    folder = os.path.dirname(target)

    if found and (reason := _not_a_file(found.st_mode)):
        raise UsageError(f"cannot write {name}: it {reason}; give a file name")
    if not os.path.basename(name):
        raise UsageError(f"cannot write {name!r}: it names no file")
    if not os.path.isdir(folder):
        raise UsageError(f"cannot write {name}: there is no directory {folder} (mkdir -p makes it)")
    for given in inputs:
        if found and os.path.exists(given) and os.path.samefile(target, given):
            raise UsageError(f"cannot write {name}: it is the input {given}; give another name")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UsageError(f"cannot write {name}: no permission to make files in {folder}")
    if found and not os.access(target, os.W_OK):
        raise UsageError(f"cannot write {name}: it is write-protected (chmod u+w allows it)")
    if found and _only_owner_renames(folder, found):
        raise UsageError(f"cannot write {name}: in {folder} only its owner may replace it")
    return target


def _only_owner_renames(folder: str, found: os.stat_result) -> bool:
    """Whether the folder is sticky, as /tmp is, and the file in it another user's."""
    parent, me = os.stat(folder), os.geteuid()
    return bool(parent.st_mode & stat.S_ISVTX) and me not in (0, found.st_uid, parent.st_uid)


WRITE_BYTES = 64 << 20  # what one call to the system writes


class NpyWriter:
    """Writes an m x n matrix to a .npy file in C order, whole or not at all.

    Fill `.array`, a writable map of a temporary file beside the target, then `commit`. A
    `with` block commits at its end and aborts on any exception:

        with NpyWriter("C.npy", (m, n), "float32", inputs=["A.npy", "B.npy"]) as writer:
            writer.array[...] = c

    Other processes fill their parts with `write_part`, given `.temporary` and `.offset`.

    All the space is reserved at once, so that a full disk is known before anything is computed.
    Raises `UsageError` as `check_output` does, and if the file does not fit.
    """

    array: np.ndarray

    def __init__(
        self, path: Path, shape: tuple[int, int], dtype: DTypeLike, *, inputs: Iterable[Path] = ()
    ) -> None:
        self.path = os.fspath(path)
        self._target = check_output(path, inputs)
        dtype = check_dtype(dtype, self.path)
        folder = os.path.dirname(self._target)
        self.temporary = os.path.join(folder, f".hybrid-gemm-{secrets.token_hex(8)}.tmp")
        try:
            # Made by open, not mkstemp, so that the umask gives the usual permissions.
            with open(self.temporary, "xb") as file:
                if os.path.exists(self._target):
                    os.fchmod(file.fileno(), stat.S_IMODE(os.stat(self._target).st_mode))
                header = {"descr": dtype.str, "fortran_order": False, "shape": tuple(shape)}
                npy.write_array_header_1_0(file, header)
                self.offset = offset = file.tell()
                file.flush()
                self._reserve(file.fileno(), offset + shape[0] * shape[1] * dtype.itemsize)
            if shape[0] * shape[1]:
                self.array = np.memmap(self.temporary, dtype, "r+", offset, tuple(shape))
            else:
                self.array = np.empty(shape, dtype)  # mmap has no empty mappings
        except BaseException as error:
            self.abort()
            if isinstance(error, OSError):
                raise UsageError(f"cannot write {self.path}: {error.strerror}") from None
            raise

    def _reserve(self, descriptor: int, size: int) -> None:
        """Reserves `size` bytes for the file. Raises `UsageError` if they are not to be had."""
        disk = os.fstatvfs(descriptor)
        free = disk.f_bavail * disk.f_frsize
        try:
            # Asked first, not to fill a disk that others use too. (Some report no sizes.)
            if disk.f_blocks and size > free:
                raise OSError(errno.ENOSPC, "")
            os.posix_fallocate(descriptor, 0, size)
        except OSError as error:
            limits = {
                errno.ENOSPC: f"{free} are free there",
                errno.EDQUOT: "more than the disk quota leaves",
                errno.EFBIG: "more than one file may have here (ulimit -f)",
            }
            if error.errno not in limits:
                raise
            raise UsageError(
                f"cannot write {self.path}: it needs {size} bytes, {limits[error.errno]}; "
                "free some space or give another place"
            ) from None

    def commit(self) -> None:
        """Puts the file in its place once its bytes are on the disk.

        Raises `HybridGemmError` if that fails; then there is no file.
        """
        try:
            if isinstance(self.array, np.memmap):
                self.array.flush()
            _sync(self.temporary)
            os.replace(self.temporary, self._target)
        except OSError as error:
            self.abort()
            raise HybridGemmError(f"could not write {self.path}: {error.strerror}") from None
        with contextlib.suppress(OSError):  # some network filesystems cannot sync a directory
            _sync(os.path.dirname(self._target))

    def abort(self) -> None:
        """Removes what was written; does nothing after `commit`."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.temporary)

    def __enter__(self) -> NpyWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind:
            self.abort()
        elif os.path.exists(self.temporary):  # neither committed nor aborted inside
            try:
                self.commit()
            except BaseException:
                self.abort()
                raise


def write_part(path: str, offset: int, cols: int, part: np.ndarray, row: int, col: int) -> None:
    """Writes a part of a matrix into a file, and returns when its bytes are on the disk.

    The matrix is row-major with `cols` columns and begins at byte `offset` of the file; the
    part's first element is that of (`row`, `col`). These are positioned writes and not a map,
    because on a network filesystem two hosts may write parts of one page. Raises
    `HybridGemmError` if the disk refuses.
    """
    size = part.dtype.itemsize
    whole_rows = col == 0 and part.shape[1] == cols
    descriptor = os.open(path, os.O_WRONLY)
    try:
        step = max(1, WRITE_BYTES // max(1, cols * size)) if whole_rows else 1
        for i in range(0, part.shape[0], step):
            data = np.ascontiguousarray(part[i : i + step]).reshape(-1).view(np.uint8).data
            at = offset + ((row + i) * cols + col) * size
            while len(data):
                written = os.pwrite(descriptor, data, at)
                data, at = data[written:], at + written
        os.fsync(descriptor)
    except OSError as error:
        raise HybridGemmError(f"could not write {path}: {error.strerror}") from None
    finally:
        os.close(descriptor)


def _sync(path: str) -> None:
    """Returns when a file's or a folder's bytes are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
