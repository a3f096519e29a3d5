"""The matrices of a case, with values whose product is exact, and the product that must come.

A float of dtype d, or a part of a complex number, holds every whole number up to `EXACT[d]`, and
quarters of those up to a fourth of it. Values are so small that no product and no sum of any
algorithm passes that. Integers may have any value: they wrap around, as NumPy's do.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import ml_dtypes
import numpy as np

from .cases import Case

EXACT = {
    "bfloat16": 2**8, "float16": 2**11, "float32": 2**24, "float64": 2**53, "complex64": 2**24,
    "complex128": 2**53,
}  # fmt: skip
POISON = 0xC7  # bytes around matrices; as elements, no value of a case
SPARE = 5  # elements beside each row of padded matrices


def as_dtype(name: str) -> np.dtype:
    return np.dtype(getattr(ml_dtypes, name) if name == "bfloat16" else name)


def result_dtype(case: Case) -> np.dtype | None:
    """NumPy's dtype for C; None where there is none."""
    try:
        return np.result_type(*(as_dtype(x) for x in case.dtypes[:3] if x))
    except TypeError:
        return None


@dataclasses.dataclass
class Matrices:
    """`memory` has the bytes around and in the matrices, by name, of which `out` lies in
    `out_in`; `expected` is C."""

    a: Any
    b: Any
    c: Any
    out: Any
    memory: dict[str, np.ndarray]
    expected: Any = None
    out_in: str = ""

    def frozen(self) -> dict[str, bytes]:
        return {name: memory.tobytes() for name, memory in self.memory.items()}

    def around_out(self) -> bytes:
        """The bytes that no product may change where `out` lies: all but its elements."""
        memory = self.memory[self.out_in]
        kept = memory.copy()
        self.out[...] = 0
        bytes_around = memory.tobytes()
        memory[...] = kept
        return bytes_around


def _strides(layout: str, rows: int, cols: int, size: int) -> tuple[int, int, int]:
    """Strides in bytes, with their signs, and the offset in bytes of the memory's used part."""
    wide, tall = (cols + SPARE) * size, (rows + SPARE) * size
    return {
        "c": (cols * size, size, 0), "f": (size, rows * size, 0),
        "padded": (wide, size, 16), "padded f": (size, tall, 16),
        "odd ld": (cols * size + 1, size, 0), "strided": (3 * wide, 2 * size, 0),
        "reversed": (-cols * size, -size, 0), "upside down": (-wide, size, 8),
        "mirrored": (tall, -size, 0) if rows >= cols else (wide, -size, 0),
        "field": (cols * (size + 1), size + 1, 1), "shifted": (cols * size, size, 1),
        "broadcast rows": (0, size, 0), "broadcast cols": (size, 0, 0), "broadcast": (0, 0, 0),
    }[layout]  # fmt: skip


def place(values: np.ndarray, layout: str) -> tuple[Any, np.ndarray]:
    """The values as a matrix that lies as `layout` says, and the memory that it lies in. What is
    broadcast has the values of its first row, column or element throughout."""
    kind, *more = layout.split("+")
    dtype = values.dtype.newbyteorder("S") if "swapped" in more else values.dtype
    (rows, cols), size = values.shape, dtype.itemsize
    row, col, offset = _strides(kind, rows, cols, size)
    reach = [max(0, count - 1) * stride for count, stride in ((rows, row), (cols, col))]
    start = offset + sum(-x for x in reach if x < 0)
    memory = np.full(start + sum(x for x in reach if x > 0) + size + 24, POISON, np.uint8)
    view = np.ndarray((rows, cols), dtype, memory, start, (row, col))
    if kind.startswith("broadcast"):
        values = values[: rows if row else 1, : cols if col else 1]
        view[: values.shape[0], : values.shape[1]] = values
    else:
        view[...] = values
    if "read-only" in more:
        view.flags.writeable = False
    return (view.view(np.matrix) if "matrix" in more else view), memory


def _limits(case: Case, result: np.dtype) -> tuple[int, int, int]:
    """How many columns of op(A) may have values, the largest of these, and the largest of C."""
    largest = [EXACT.get(x) or int(np.iinfo(x).max) for x in case.dtypes[:3] if x]
    most = min(1 << 20, *largest[:2])
    if case.option("compute", "fp32") != "fp32" or most < 2**24:
        most = min(most, EXACT["float16"])  # what one half of a split holds
    if result.name not in EXACT:
        return case.k, 4 if case.values == "small" else most, min(100, largest[-1])
    own, most_c = EXACT[result.name] // 8, min(EXACT[result.name] // 16, largest[-1], 50)
    steps = EXACT["float64" if result.name in ("float64", "complex128") else "float32"] // 8
    if result.kind == "c":  # of four products and a complex alpha
        own, steps = own // 4, steps // 4
    if case.option("algorithm") == "strassen":
        steps >>= 5 * case.option("levels", 1)
    room = max(1, int(min(own, steps) / max(1, abs(case.alpha))))
    highest = min(most, math.isqrt(room // max(1, case.k)))
    if highest < 1:
        return room, 1, most_c
    return case.k, highest if case.values == "large" else min(3, highest), most_c


def _numbers(rng: Any, shape: tuple[int, int], name: str, most: int, case: Case) -> np.ndarray:
    dtype = as_dtype(name)
    if dtype.kind in "iu":
        info = np.iinfo(dtype)
        result = result_dtype(case)
        if case.values == "large" and result is not None and result.kind in "iu":
            return rng.integers(info.min, info.max, shape, dtype, endpoint=True)
        return rng.integers(max(info.min, -most), most, shape, endpoint=True).astype(dtype)
    made = rng.integers(-most, most, shape, endpoint=True).astype(dtype)
    if dtype.kind == "c":
        made.imag = rng.integers(-most, most, shape, endpoint=True)
    return made


def make(case: Case) -> Matrices:
    """The matrices of a case. Where no dtype holds the product, all values are small."""
    rng = np.random.default_rng([case.seed, case.number, 2])
    result = result_dtype(case) or np.dtype("complex128")
    live, most, most_c = _limits(case, result)
    shape_a = (case.k, case.m) if case.trans_a else (case.m, case.k)
    shape_b = (case.n, case.k) if case.trans_b else (case.k, case.n)
    apart = case.alias == "none" or live < case.k
    if apart:
        made = _apart(case, rng, shape_a, shape_b, (live, most))
    else:
        made = _related(case, rng, shape_a, shape_b, most)
    if case.dtypes[2]:
        values = _numbers(rng, (case.m, case.n), case.dtypes[2], most_c, case)
        made.c, made.memory["c"] = place(values, case.layouts[2])
    made.expected = expected(case, made, result)
    _place_out(case, made, result)
    _poison(case, made)
    return made


def _apart(
    case: Case, rng: Any, shape_a: tuple[int, int], shape_b: tuple[int, int],
    limits: tuple[int, int],
) -> Matrices:  # fmt: skip
    live, most = limits
    a = _numbers(rng, shape_a, case.dtypes[0], most, case)
    b = _numbers(rng, shape_b, case.dtypes[1], most, case)
    layouts = list(case.layouts[:2])
    if live < case.k:
        dead = rng.permutation(case.k)[live:]
        (a.T if not case.trans_a else a)[dead] = 0
        layouts = ["c" if "broadcast" in x else x for x in layouts]
    placed = [place(values, layout) for values, layout in zip((a, b), layouts, strict=True)]
    (a, a_memory), (b, b_memory) = placed
    return Matrices(a, b, None, None, {"a": a_memory, "b": b_memory})


def _related(
    case: Case, rng: Any, shape_a: tuple[int, int], shape_b: tuple[int, int], most: int
) -> Matrices:
    """A and B, or A and later out, as parts of one matrix; B is A itself where shapes allow it."""
    dtype = case.dtypes[0]
    rows = max(shape_a[0], shape_b[0]) + 1
    cols = max(shape_a[1], shape_b[1]) + 1
    whole = _numbers(rng, (rows, 2 * cols), dtype, most, case)
    memory = whole.view(np.uint8).reshape(-1)
    a = whole[: shape_a[0], : 2 * shape_a[1] : 2]
    b = whole[rows - shape_b[0] :, 1 : 2 * shape_b[1] + 1 : 2]
    if case.alias == "overlap":
        a, b = whole[: shape_a[0], : shape_a[1]], whole[1 : shape_b[0] + 1, 1 : shape_b[1] + 1]
    elif case.alias == "out beside a":
        b = b.copy()
    elif case.alias == "b is a" and shape_a in (shape_b, shape_b[::-1]):
        a = whole[: shape_a[0], : shape_a[1]]
        b = a if shape_a == shape_b else a.T
    return Matrices(a, b, None, None, {"ab": memory})


def _parts(x: Any, trans: bool | str) -> tuple[np.ndarray, np.ndarray]:
    """The parts of op(x) in whole numbers."""
    x = np.asarray(x).T if trans else np.asarray(x)
    re, im = (np.ascontiguousarray(part).astype(np.int64) for part in (x.real, x.imag))
    return re, -im if trans == "c" else im


def _times(factor: complex, re: np.ndarray, im: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Four times a complex number, in whole numbers."""
    x, y = int(4 * complex(factor).real), int(4 * complex(factor).imag)
    return x * re - y * im, x * im + y * re


def _complex_expected(case: Case, made: Matrices, result: np.dtype) -> np.ndarray:
    re, im = (np.zeros((case.m, case.n), np.int64) for _ in range(2))
    if case.alpha and case.k:
        (ar, ai), (br, bi) = _parts(made.a, case.trans_a), _parts(made.b, case.trans_b)
        re, im = _times(case.alpha, ar @ br - ai @ bi, ar @ bi + ai @ br)
    if case.beta and made.c is not None:
        more = _times(case.beta, *_parts(made.c, False))
        re, im = re + more[0], im + more[1]
    return (re / 4 + 1j * (im / 4)).astype(result)


def expected(case: Case, made: Matrices, result: np.dtype) -> np.ndarray:
    """C, in whole numbers of 64 bits; floats in quarters, so that alpha = 0.5 is whole."""
    with np.errstate(all="ignore"):
        if result.kind == "c":
            return _complex_expected(case, made, result)
        scale = 1 if result.kind in "iu" else 4
        total = np.zeros((case.m, case.n), np.int64)
        if case.alpha and case.k:
            a, b = (np.asarray(x).astype(np.int64) for x in (made.a, made.b))
            a, b = a.T if case.trans_a else a, b.T if case.trans_b else b
            total = int(scale * case.alpha) * (np.ascontiguousarray(a) @ np.ascontiguousarray(b))
        if case.beta and made.c is not None:
            total = total + int(scale * case.beta) * np.asarray(made.c).astype(np.int64)
        return (total / 4 if scale == 4 else total).astype(result)


def _place_out(case: Case, made: Matrices, result: np.dtype) -> None:
    if case.out == "none":
        return
    if case.out == "c" and made.c is not None:
        made.out, made.out_in = made.c, "c"
        return
    dtype = as_dtype(case.dtypes[3]) if case.dtypes[3] else result
    values = np.full((case.m, case.n), 77).astype(dtype)
    if case.alias == "out beside a" and "ab" in made.memory and case.dtypes[0] == dtype.name:
        # Every other element, between those of A: no byte of them is the same.
        whole = made.memory["ab"].view(dtype).reshape(-1, made.a.strides[0] // dtype.itemsize)
        room = whole[: case.m, 1 : 2 * case.n + 1 : 2]
        if room.shape == (case.m, case.n):
            made.out, made.out_in = room, "ab"
            return
    swaps = dtype.name != "bfloat16"
    layout = case.layouts[3] if swaps else case.layouts[3].replace("+swapped", "")
    made.out, made.memory["out"] = place(values, layout)
    made.out_in = "out"


def _poison(case: Case, made: Matrices) -> None:
    """NaN where nothing may be read: C where beta is 0, A and B where alpha is 0."""
    if not case.poisoned:
        return
    unread = [made.c] if not case.beta else []
    if not case.alpha and "ab" not in made.memory:
        unread += [made.a, made.b]
    for x in unread:
        if x is not None and x.dtype.name in EXACT and x.flags.writeable and x.size:
            x[...] = np.nan
