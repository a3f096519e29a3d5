"""Matrices in .npy files: mapped for reading, and written whole or not at all. NumPy only."""

from __future__ import annotations

import ast
import contextlib
import errno
import hashlib
import io
import mmap
import os
import re
import time
import weakref
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import BinaryIO, Literal, cast

import numpy as np
from numpy.lib import format as npy
from numpy.typing import DTypeLike

from ..errors import HybridGemmError, UsageError, likeliest
from ..problem import check_dtype, shape_of
from .file_bytes import CHECK_BYTES, checksums, checksums_on_disk
from .mapped_files import file_of, mapped, ranges
from .output_files import OutputFile, Path, check_output, not_a_file, sync_data
from .write_behind import WriteBehind

# --- reading ------------------------------------------------------------------------------

SAMPLES, SAMPLE_BYTES = 64, 4096  # of a file, by which it is told from another


_RIGHTS = "st_nlink", "st_mode", "st_uid", "st_gid"  # what else moves a file's ctime


class NpyFile:
    """An open .npy file. `array` is its matrix, as a read-only map: nothing is read or copied
    yet.

    Byte order and C or Fortran order stay as the file has them. Raises `UsageError` for a file
    that is not a whole 2-D .npy file and `DTypeError` for a dtype that is not multiplied; both
    messages name the file and say what would work.
    """

    def __init__(self, path: Path) -> None:
        self.name = name = os.fspath(path)
        try:
            # Asked before opening: opening a named pipe would wait for a writer.
            if reason := not_a_file(os.stat(name).st_mode):
                raise UsageError(f"{name} {reason}; give a .npy file")
            with open(name, "rb") as file:
                self._found = os.fstat(file.fileno())
                shape, fortran, dtype = _read_header(file, name, self._found.st_size)
                self.offset = file.tell()
                self.descriptor = os.dup(file.fileno())
        except FileNotFoundError:
            raise UsageError(_not_there(name)) from None
        except PermissionError:
            raise UsageError(
                f"{name} cannot be read: permission denied (see ls -l {name})"
            ) from None
        except OSError as error:
            raise UsageError(f"{name} cannot be read: {error.strerror}") from None
        weakref.finalize(self, os.close, self.descriptor)
        self.array = self._map(shape, fortran, dtype)
        mapped.add(self)

    def _map(self, shape: tuple[int, ...], fortran: bool, dtype: np.dtype) -> np.ndarray:
        if dtype == "V2":  # what numpy.save makes of bfloat16, for which .npy has no name
            dtype = np.dtype("bfloat16")
        check_dtype(dtype, self.name)
        rows, cols = shape_of(np.broadcast_to(np.empty((), dtype), shape), self.name)
        self.needs = self.offset + rows * cols * dtype.itemsize
        if self._found.st_size < self.needs:
            raise UsageError(
                f"{self.name} is truncated: {self.needs} bytes expected for {rows} x {cols} "
                f"{dtype}, {self._found.st_size} found; write or copy it again"
            )
        order: Literal["C", "F"] = "F" if fortran else "C"
        try:
            data = mmap.mmap(self.descriptor, self.needs, access=mmap.ACCESS_READ)
        except OSError as error:
            limit = " (ulimit -v limits it)" if error.errno == errno.ENOMEM else ""
            raise UsageError(
                f"{self.name} cannot be mapped into {self.needs} bytes of address space{limit}: "
                f"{error.strerror}"
            ) from None
        return np.ndarray((rows, cols), dtype, data, self.offset, order=order)

    def truncated(self) -> str | None:
        """What to say where the file has become shorter than its matrix; else None."""
        size = os.fstat(self.descriptor).st_size
        if size >= self.needs:
            return None
        return (
            f"{self.name} was truncated while it was read: it had {self._found.st_size} bytes "
            f"and has {size}"
        )

    def check_unchanged(self) -> None:
        """Raises `HybridGemmError` if the file was written to since it was opened, be it that its
        time was set back (`touch -r`): that moves its ctime, as new names and rights do, too.

        Where the last page alone is cut, reading it is no fault: the rest of it is zeros.
        """
        if text := self.truncated():
            raise HybridGemmError(text)
        now, then = os.fstat(self.descriptor), self._found
        written = now.st_size, now.st_mtime_ns, now.st_ctime_ns
        known = then.st_size, then.st_mtime_ns, then.st_ctime_ns
        renamed = any(getattr(now, x) != getattr(then, x) for x in _RIGHTS)
        if written[:2] != known[:2] or (written != known and not renamed):
            raise HybridGemmError(
                f"{self.name} was changed while it was read: run it again, or on a copy"
            )

    @property
    def size(self) -> int:
        """In bytes, when it was opened."""
        return self._found.st_size

    def sampled(self) -> int:
        """A CRC-32 of `SAMPLES` parts of the header and the matrix, which lie evenly in the file,
        the first and the last among them."""
        found, last = 0, max(0, self.needs - SAMPLE_BYTES)
        for i in range(SAMPLES):
            part = os.pread(self.descriptor, SAMPLE_BYTES, last * i // (SAMPLES - 1))
            found = zlib.crc32(part, found)
        return found

    def sha256(self) -> str:
        """The SHA-256 of the file's bytes, as sha256sum prints it."""
        with open(os.dup(self.descriptor), "rb", buffering=0) as file:
            file.seek(0)
            return _digest(file, self.name)


def truncated() -> str | None:
    """What to say of a mapped file that has become shorter than its matrix; None if none has."""
    return next(filter(None, (file.truncated() for file in tuple(mapped))), None)


def finished(part: object) -> None:
    """Has a part of a matrix that is final written to the disk, where it lies in an output file
    of this process; does nothing anywhere else."""
    file = file_of(part, NpyWriter)
    if file is not None:
        file.finished(cast(np.ndarray, part))


def sha256(path: Path) -> str:
    """The SHA-256 of a file, as sha256sum prints it."""
    with open(path, "rb", buffering=0) as file:
        return _digest(file, os.fspath(path))


def _digest(file: io.FileIO, name: str) -> str:
    """The SHA-256 of what is left of a file; `HybridGemmError` names one that cannot be read."""
    try:
        return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise HybridGemmError(f"could not read {name}: {error.strerror}") from None


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
        # 3.0 differs from 2.0 in the encoding of names and comments, and we take no fields; and in
        # what Python 2 wrote, such as 4L, for which NumPy looks in older versions alone. It warns
        # of that, so it gets 4; ignoring a warning would hide those of other threads.
        old = version == (1, 0)
        length = file.read(2 if old else 4)
        text = file.read(int.from_bytes(length, "little"))
        header = io.BytesIO(length + re.sub(rb"(?<=\d)L(?=[\s,)])", b" ", text))
        read = npy.read_array_header_1_0 if old else npy.read_array_header_2_0
        shape, fortran, dtype = read(header)
        if version == (3, 0):
            ast.literal_eval(text.decode())
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


def _not_there(name: str) -> str:
    """What to say of a file that is not there, with the name that was perhaps meant."""
    folder, last = os.path.split(name)
    if not last:
        return f"{name!r} names no file; give a .npy file"
    if os.path.islink(name):
        return f"{name} is a link to {os.readlink(name)}, which is not there"
    if folder and not os.path.isdir(folder):
        return f"{name}: no such file: there is no directory {folder}"
    with contextlib.suppress(OSError):
        # All names end alike, which makes none of them likelier.
        known = {
            stem.lower(): stem + end
            for stem, end in map(os.path.splitext, os.listdir(folder or "."))
            if end == ".npy"
        }
        if close := likeliest(os.path.splitext(last)[0], known):
            return f"{name}: no such file; did you mean {os.path.join(folder, known[close])}?"
    return f"{name}: no such file"


# --- writing ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Written:
    """How a file of `bytes` came to the disk: `behind_bytes` in `behind_ms` while others were made,
    those that were made again (`--repeat`) counted each time; the rest in `sync_ms` at the end;
    then it was read back in `read_back_ms`."""

    bytes: int
    behind_bytes: int
    behind_ms: float
    sync_ms: float
    read_back_ms: float


class NpyWriter:
    """Writes an m x n matrix to a .npy file in C order, whole or not at all.

    Fill `.array`, a writable map of the new file, then `commit`. A `with` block commits at its
    end and aborts on any exception:

        with NpyWriter("C.npy", (m, n), "float32", inputs=["A.npy", "B.npy"]) as writer:
            writer.array[...] = c

    With `shared`, other processes fill their parts with `write_part`, given `.temporary` and
    `.offset`, and `array` is empty. With `kept`, a file that an earlier process left is taken up,
    and is left for a later one where it is not committed.

    All the space is reserved at once, so that a full disk is known before anything is computed.
    `finished` gives what is final of `array` to the disk meanwhile, and `written` says in the end
    how long that took.
    Raises `UsageError` as `check_output` does, and if the file does not fit.
    """

    def __init__(
        self, path: Path, shape: tuple[int, int], dtype: DTypeLike, *,
        inputs: Iterable[Path] = (), shared: bool = False, kept: bool = False,
    ) -> None:  # fmt: skip
        self.path = os.fspath(path)
        target = check_output(path, inputs)
        dtype = check_dtype(dtype, self.path)
        header = io.BytesIO()
        npy.write_array_header_1_0(
            header, {"descr": dtype.str, "fortran_order": False, "shape": tuple(shape)}
        )
        self._header, self.offset = header.getvalue(), header.tell()
        self.size = self.offset + shape[0] * shape[1] * dtype.itemsize
        self.array, self._map = np.empty((0, 0), dtype), None
        self._behind: WriteBehind | None = None
        self.written: Written | None = None
        try:
            self._file = OutputFile(target, named=shared, kept=kept)
            self.temporary = self._file.temporary
            self._reserve(self._file.descriptor)
            os.ftruncate(self._file.descriptor, self.size)  # one that was kept may be longer
            self._file.write(self._header)
            if not shared:
                self._map = mmap.mmap(self._file.descriptor, self.size)
                self.array = np.ndarray(tuple(shape), dtype, self._map, self.offset)
                mapped.add(self)
                self._behind = WriteBehind(self._file.descriptor)
        except BaseException as error:
            self.abort()
            if isinstance(error, OSError):
                raise UsageError(f"cannot write {self.path}: {error.strerror}") from None
            raise

    def _reserve(self, descriptor: int) -> None:
        """Reserves the bytes of the file, where the system can. Raises `UsageError` if they are not
        to be had."""
        disk = os.fstatvfs(descriptor)
        free = disk.f_bavail * disk.f_frsize
        has = os.fstat(descriptor).st_blocks * 512  # where an earlier process reserved it
        try:
            # Asked first, not to fill a disk that others use too. (Some report no sizes.)
            if disk.f_blocks and self.size - has > free:
                raise OSError(errno.ENOSPC, "")
            if hasattr(os, "posix_fallocate"):  # not on macOS
                os.posix_fallocate(descriptor, 0, self.size)
        except OSError as error:
            if error.errno == errno.EOPNOTSUPP:  # of musl on such a filesystem; glibc writes zeros
                return
            limits = {
                errno.ENOSPC: f"{free} are free there",
                errno.EDQUOT: "more than the disk quota leaves",
                errno.EFBIG: "more than one file may have here (ulimit -f)",
            }
            if error.errno not in limits:
                raise
            raise UsageError(
                f"cannot write {self.path}: it needs {self.size} bytes, {limits[error.errno]}; "
                "free some space or give another place"
            ) from None

    def sync(self) -> None:
        """Returns when what `array` has is on the disk. Raises `OSError`."""
        if self._map is not None:
            self._map.flush()
        sync_data(self._file.descriptor)

    def commit(self) -> None:
        """Puts the file in its place once its bytes are on the disk and were read back from it.

        Raises `HybridGemmError` if that fails, if the disk has other bytes than were written, or
        if the folder is no longer there; then there is no file, or the one of before.
        """
        try:
            if self._map is None:
                os.fsync(self._file.descriptor)
                self._check_header()
            else:
                expected = checksums(memoryview(self._map))
                began = time.perf_counter()
                self._stop_writing_behind()
                self._map.flush()
                os.fsync(self._file.descriptor)
                on_disk = time.perf_counter()
                self._forget_cached_pages()
                self._check_header()
                self._check_content(expected)
                self._note(began, on_disk)
        except OSError as error:
            self.abort()
            raise HybridGemmError(f"could not write {self.path}: {error.strerror}") from None
        except HybridGemmError:
            self.abort()
            raise
        self._file.commit()

    def finished(self, part: np.ndarray) -> None:
        """Has a part of `array` written to the disk from now on: nothing changes it any more."""
        if self._behind is not None:
            self._behind.give(ranges(part, self))

    def _stop_writing_behind(self) -> None:
        if self._behind is not None:
            self._behind.stop()

    def _note(self, began: float, on_disk: float) -> None:
        assert self._behind is not None
        self.written = Written(
            self.size, self._behind.bytes, self._behind.ms, (on_disk - began) * 1e3,
            (time.perf_counter() - on_disk) * 1e3,
        )  # fmt: skip

    def _forget_cached_pages(self) -> None:
        """Lets reading go to the disk: cached pages can be dropped where no map has them. Both
        are requests; in a filesystem in memory the pages stay."""
        with contextlib.suppress(OSError, AttributeError):
            if self._map is not None:
                self._map.madvise(mmap.MADV_DONTNEED)  # of a shared map: nothing is lost
            os.posix_fadvise(self._file.descriptor, 0, 0, os.POSIX_FADV_DONTNEED)

    def _check_header(self) -> None:
        size = os.fstat(self._file.descriptor).st_size
        if size != self.size:
            raise self._damaged(f"it has {size} bytes instead of {self.size}")
        if os.pread(self._file.descriptor, self.offset, 0) != self._header:
            raise self._damaged("its header is another one")

    def _check_content(self, expected: list[int]) -> None:
        found = checksums_on_disk(self._file.descriptor, self.size)
        for i, (before, after) in enumerate(zip(expected, found, strict=True)):
            if before != after:
                last = min((i + 1) * CHECK_BYTES, self.size) - 1
                raise self._damaged(f"bytes {i * CHECK_BYTES} to {last} are other ones")

    def _damaged(self, reason: str) -> HybridGemmError:
        return HybridGemmError(
            f"could not write {self.path}: read back from the disk, {reason}; was the file "
            "changed meanwhile, or is the disk damaged?"
        )

    def abort(self) -> None:
        """Removes what was written, unless it is kept; does nothing after `commit`."""
        self._stop_writing_behind()
        if hasattr(self, "_file"):
            self._file.abort()

    def truncated(self) -> str | None:
        """What to say where the file that is mapped has become shorter; else None."""
        if not self._file.open or os.fstat(self._file.descriptor).st_size >= self.size:
            return None
        return f"could not write {self.path}: its temporary file was truncated meanwhile"

    def __enter__(self) -> NpyWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            if not kind and self._file.open:  # neither committed nor aborted inside
                self.commit()
        finally:
            self.abort()
