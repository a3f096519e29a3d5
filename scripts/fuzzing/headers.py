"""Damaged headers of .npy and kernel files: only the package's own errors may come of them.

`check_npy` and `check_kernel` take the bytes of one file and raise `Fault` for anything else. Both
readers take a path, so the bytes go through a file, which is best in a filesystem in memory.
"""

from __future__ import annotations

import contextlib
import io
import random
import re
import struct
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from hybrid_gemm.arrays.npy_files import NpyFile
from hybrid_gemm.catalog.files import read_kernel
from hybrid_gemm.errors import DTypeError, UsageError
from hybrid_gemm.problem import check_dtype

SLOW_S = 5


class Fault(Exception):
    """A reader did with some bytes what it must not do."""


@contextlib.contextmanager
def _only(*expected: type[Exception]) -> Iterator[list[str]]:
    """Any error but these is a fault; of these the message is put into the list."""
    messages: list[str] = []
    try:
        yield messages
    except expected as error:
        messages.append(str(error))
        if "\n" in messages[0]:
            raise Fault(f"a message of several lines: {messages[0]!r}") from error
    except Exception as error:
        raise Fault(f"{type(error).__name__}: {error}") from error


# --- .npy ---------------------------------------------------------------------------------


def open_npy(path: Path) -> np.ndarray:
    """The matrix in a file, as products read it."""
    return NpyFile(path).array


def check_npy(data: bytes, path: Path) -> bool:
    """Whether `open_npy` takes the file; `Fault` unless NumPy's reader agrees."""
    path.write_bytes(data)
    ours, theirs = None, _numpys(data)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with _only(UsageError, DTypeError) as refused:
            ours = open_npy(path)
    if ours is None:
        if theirs is not None and theirs.ndim == 2 and _multiplied(theirs.dtype):
            raise Fault(f"NumPy reads {theirs.dtype} {theirs.shape}, and it was refused: {refused}")
        return False
    if theirs is None:
        raise Fault(f"{ours.dtype} {ours.shape} was read, and NumPy refuses it")
    dtype = ours.dtype if theirs.dtype == "V2" else theirs.dtype
    if ours.shape != theirs.shape or ours.dtype != dtype:
        raise Fault(f"{ours.dtype} {ours.shape}; NumPy reads {theirs.dtype} {theirs.shape}")
    if ours.tobytes() != theirs.tobytes() or ours.flags.fnc != theirs.flags.fnc:
        raise Fault(f"{ours.dtype} {ours.shape}: other elements than NumPy's")
    return True


def _numpys(data: bytes) -> np.ndarray | None:
    """What NumPy reads; None for what it refuses, and for elements that are arrays themselves."""
    if not data.startswith(b"\x93NUMPY"):
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            file = io.BytesIO(data)
            old = np.lib.format.read_magic(file) == (1, 0)
            read = (
                np.lib.format.read_array_header_1_0 if old else np.lib.format.read_array_header_2_0
            )
            if read(file)[2].subdtype:
                return None
            return np.lib.format.read_array(io.BytesIO(data), allow_pickle=False)
    except Exception:  # its readers raise what they like
        return None


def _multiplied(dtype: np.dtype) -> bool:
    try:
        check_dtype(dtype, "it")
    except DTypeError:
        return dtype == "V2"
    return True


def npy_file(descr: str, shape: str, fortran: str = "False", *, version: int = 1,
             size: int = 96) -> bytes:  # fmt: skip
    """A .npy file as its parts are written in it."""
    text = f"{{'descr': {descr}, 'fortran_order': {fortran}, 'shape': {shape}, }}".encode()
    text += b" " * (-(len(text) + 11) % 64) + b"\n"
    length = struct.pack("<H" if version == 1 else "<I", len(text))
    return b"\x93NUMPY" + bytes([version, 0]) + length + text + bytes(range(size))


NPY_SEEDS = [
    npy_file("'<f4'", "(4, 6)"), npy_file("'>f8'", "(3, 4)", "True"), npy_file("'|V2'", "(6, 8)"),
    npy_file("'<f2'", "(6, 8)", version=2), npy_file("'<i8'", "(2, 6)", version=3),
    npy_file("'|u1'", "(0, 5)", size=0), npy_file("'<c8'", "(3, 4)"), npy_file("'<i2'", "(48,)"),
    npy_file("[('a', '<f4'), ('b', '<i4')]", "(12,)"), npy_file("'|O'", "(2, 2)"),
    npy_file("'<f4'", "(2, 3, 4)"), npy_file("'<f4'", "(4L, 6L)"),
]  # fmt: skip
NPY_WORDS = (
    "'<f4'", "'>f8'", "'|V2'", "'|O'", "'<U9'", "'|S999999999'", "'<M8[ns]'", "'|b1'", "'<f16'",
    "(4, 6)", "(-1, 6)", "(1e3, 2)", "(True, 2)", "()", "(9223372036854775807, 2)", "(0, 2, 3)",
    "[2, 3]", "None", "True", "'fortran_order'", "'descr'", "'shape'", "{", "}", "(", ")", ",", ":",
    "\\x00", "4L", "'<f4'*9", "-", "[]", "('<f4', (3,))", "[('x', '<f4', (2,))]", "1_0", "0x2",
)  # fmt: skip


# --- kernels ------------------------------------------------------------------------------


def check_kernel(data: bytes, path: Path) -> bool:
    """Whether the file is a kernel. Of one that is, each variant is launched, or refused."""
    path.write_bytes(data)
    with _only(UsageError):
        kernel = read_kernel(path)
        for variant in kernel.variants():
            for dtype in ("float32", "int64"):
                for device in ("cuda", "cpu", "emulator"):
                    variant.refusal(device=device, dtype=dtype, m=33, n=65, k=7)
        kernel.min_arch()
        return True
    return False


_HEADER = """/*---
summary  = "each thread owns an element"
entry    = "gemm"
params   = [{BM = 16, BN = 16}, {BM = 8, BN = 32}]
block    = ["BN", "BM", "1"]
grid     = ["ceil(n / BN)", "ceil(m / BM)", "1"]
require  = ["BM * BN <= 1024"]
tile     = ["BM", "BN"]
source   = "a test"
---*/
extern "C" __global__ void gemm() {}
"""
_MORE = """role     = "tensor"
limits   = ["k % 2 == 0"]
dtypes   = ["float32"]
layouts  = ["nt"]
arch     = "==90a"
runs_on  = ["cuda"]
shared   = "SIZE * (BM + BN)"
workspace = "min(m, n) * max(1, k)"
flags    = "4"
rung     = 7
cluster  = "2"
persistent = true
early    = true
scales   = ["BM"]
tma      = [{operand = "A", along_k = ["BM", "8"], across_k = ["8", "BM"], where = "1"}]
source"""
KERNEL_SEEDS = [
    _HEADER.encode(), _HEADER.replace("source", _MORE, 1).encode(),
    b'/*---\nsummary="s"\nsource="x"\nlibrary="blas"\n---*/\n',
    b'/*---\nsummary="s"\nsource="x"\nrole="sum"\nblock=["32","1","1"]\n---*/',
]  # fmt: skip
KERNEL_WORDS = (
    '"BM"', '"BN"', '"1"', '"0"', '"1 / 0"', '"m % 0"', '"ceil(1 / 3)"', '"((((1))))"', '"min()"',
    '"ceil(m, n)"', '"BM" * 3', '"-1"', '"1.5"', '"x"', '""', '"BM <= 1 <= 2"', '"9" ', "[]", "{}",
    "[{}]", '[["BM"]]', "{BM = 16}", "{BM = true}", "{BM = 0}", "{BM = -3}", "{BM = 1.0}", "true",
    "false", "0", "-1", "1e400", "nan", "1979-05-27", '["x", 1]', '"sm_90"', '">=999999999999"',
    "params", "tile", "tma", "block", "grid", "scales", "role", "entry", "---*/", "/*---", "\\n",
    "[a.b]", "[[tma]]", "9223372036854775808", '"\\u0000"', '"("', '"--1"', "'''", '"""',
    '{operand = "A", box = 3}', '"BM if 1 else 2"', '"m * n * k"', '"min(*m)"', '"lambda: 1"',
)  # fmt: skip

# --- without a fuzzer ---------------------------------------------------------------------

WHAT: dict[str, tuple[Callable[[bytes, Path], bool], list[bytes], tuple[str, ...]]] = {
    "npy": (check_npy, NPY_SEEDS, NPY_WORDS),
    "kernel": (check_kernel, KERNEL_SEEDS, KERNEL_WORDS),
}
_TOKEN = re.compile(rb"'[^']*'|\"[^\"\n]*\"|[\w.]+|\S")


def mutated(what: str, draw: random.Random) -> bytes:
    """A seed with some of its words or bytes changed; the length in a .npy file follows half of
    the time, so that the text behind it is read."""
    _check, seeds, words = WHAT[what]
    data = draw.choice(seeds)
    for _ in range(draw.choice((1, 1, 2, 3, 5))):
        tokens = list(_TOKEN.finditer(data, 10 if what == "npy" else 0)) or [None]
        token = draw.choice(tokens)
        start, stop = token.span() if token else (0, 0)
        match draw.randrange(6):
            case 0 | 1 | 2:
                data = data[:start] + draw.choice(words).encode() + data[stop:]
            case 3:
                data = data[:start] + data[stop:]
            case 4:
                data = data[:stop] + data[start:]
            case 5 if data:
                at = draw.randrange(len(data))
                data = data[:at] + bytes([draw.randrange(256)]) + data[at + draw.randrange(3) :]
    if what == "npy" and draw.random() < 0.5 and (end := data.find(b"\n")) > 10:
        if data[6:7] == b"\x01":
            data = data[:8] + struct.pack("<H", min(end - 9, 65535)) + data[10:]
        elif end > 12:
            data = data[:8] + struct.pack("<I", end - 11) + data[12:]
    return data[: draw.randrange(len(data) + 1)] if draw.random() < 0.05 else data
