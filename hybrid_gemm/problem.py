"""What is asked: shapes, dtypes, alpha and beta, checked once. Pure."""

from __future__ import annotations

import math
import numbers
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from .errors import DTypeError, UsageError

INT_LIMIT = 2**31 - 1  # m, n and k are ints in the kernels, as in BLAS
NARROW = ("float16", "bfloat16")  # which tensor cores take as they are; bfloat16 is ml_dtypes'
FLOATS = (*NARROW, "float32", "float64")


@dataclass(frozen=True)
class Problem:
    """`C = alpha * op(A) @ op(B) + beta * C` with op(A) of m x k and op(B) of k x n.

    `dtype` is what is computed in, `out_dtype` what C is returned in (NumPy's promotion:
    float16 and bfloat16 are computed in float32, small integers in int32 or int64, which wraps
    alike). `compute` says how float32 is multiplied (`tensor.COMPUTES`). `operands` is the dtype
    in which A and B come to a device: `dtype`, or the narrow one that both have where tensor
    cores multiply it as it is.
    """

    m: int
    n: int
    k: int
    dtype: str = "float32"
    alpha: float | int = 1
    beta: float | int = 0
    out_dtype: str = ""
    compute: str = "fp32"
    operands: str = ""

    def __post_init__(self):
        for name in ("out_dtype", "operands"):
            if not getattr(self, name):
                object.__setattr__(self, name, self.dtype)

    @property
    def flops(self) -> int:
        """2mnk, the count that every source document uses."""
        return 2 * self.m * self.n * self.k

    @property
    def itemsize(self) -> int:
        """Bytes of an element of C while it is computed."""
        return np.dtype(self.dtype).itemsize

    @property
    def operand_size(self) -> int:
        """Bytes of an element of A or B on a device."""
        return np.dtype(self.operands).itemsize

    @property
    def is_integer(self) -> bool:
        return np.dtype(self.dtype).kind == "i"

    def __str__(self) -> str:
        return f"m={self.m} n={self.n} k={self.k} {self.dtype}"


def is_float(dtype) -> bool:
    return np.dtype(dtype).name in FLOATS


def finfo(dtype):
    """NumPy's finfo, of bfloat16 too."""
    return ml_dtypes.finfo(np.dtype(dtype))


def compute_dtype(result: np.dtype) -> str:
    """The dtype that a product with this result dtype is computed in."""
    if result.name in NARROW:
        return "float32"
    match result.kind, result.itemsize:
        case "f", 4:
            return "float32"
        case "f", 8:
            return "float64"
        case "i" | "u", 1 | 2 | 4:
            return "int32"
        case "i" | "u", 8:
            return "int64"
    raise DTypeError(
        f"cannot multiply matrices of dtype {result}; float16, bfloat16, float32, float64 and "
        "integers up to 64 bits work (convert with .astype)"
    )


def check_dtype(dtype, name: str) -> np.dtype:
    """`dtype` in native byte order, or `DTypeError` if it is not one we multiply."""
    dtype = np.dtype(dtype)
    try:
        compute_dtype(dtype)
    except DTypeError:
        raise DTypeError(
            f"{name} has dtype {dtype}; float16, bfloat16, float32, float64 and integers up to "
            "64 bits work (convert with .astype)"
        ) from None
    return dtype.newbyteorder("=")


def _check_scalar(value, name: str, dtype: str) -> float | int:
    if isinstance(value, np.generic) or (hasattr(value, "ndim") and value.ndim == 0):
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise DTypeError(f"{name} must be a real number, not {value!r}")
    if np.dtype(dtype).kind == "i":
        limits = np.iinfo(dtype)
        if not (math.isfinite(value) and value == int(value)):
            raise DTypeError(f"{name}={value!r} with integer matrices; it must be whole")
        if not limits.min <= value <= limits.max:
            raise UsageError(f"{name}={value!r} does not fit {dtype}")
        return int(value)
    return float(value)


def shape_of(array, name: str) -> tuple[int, int]:
    if len(array.shape) != 2:
        raise UsageError(
            f"{name} has shape {tuple(array.shape)}; matrices are 2-D "
            "(reshape a vector to (n, 1) or (1, n))"
        )
    return tuple(int(s) for s in array.shape)


def make_problem(a, b, c=None, *, alpha=1.0, beta=0.0, trans_a=False, trans_b=False) -> Problem:
    """The problem that these arrays pose; `a`, `b`, `c` need only `.shape` and `.dtype`.

    Raises `UsageError` (a `ValueError`) on shapes, `DTypeError` (a `TypeError`) on dtypes.
    """
    dtypes = [check_dtype(a.dtype, "A"), check_dtype(b.dtype, "B")]
    (m, k), (k2, n) = shape_of(a, "A"), shape_of(b, "B")
    if trans_a:
        m, k = k, m
    if trans_b:
        k2, n = n, k2
    if k != k2:
        op_a, op_b = "A^T" if trans_a else "A", "B^T" if trans_b else "B"
        raise UsageError(
            f"shapes do not match: {op_a} is {m} x {k} and {op_b} is {k2} x {n}; "
            f"the {k} columns of {op_a} must equal the {k2} rows of {op_b}"
        )
    if c is not None:
        dtypes.append(check_dtype(c.dtype, "C"))
        if shape_of(c, "C") != (m, n):
            raise UsageError(f"C is {c.shape[0]} x {c.shape[1]}; this product is {m} x {n}")
    try:
        result = np.result_type(*dtypes)
    except TypeError:
        raise DTypeError(
            f"no dtype holds both {' and '.join(dict.fromkeys(map(str, dtypes)))}; "
            "convert one (.astype('float32'))"
        ) from None
    compute = compute_dtype(result)
    alpha = _check_scalar(alpha, "alpha", compute)
    beta = _check_scalar(beta, "beta", compute)
    if beta != 0 and c is None:
        raise UsageError(f"beta={beta} scales C, and no C was given")
    if max(m, n, k) > INT_LIMIT:
        raise UsageError(f"m={m} n={n} k={k}: each must be at most {INT_LIMIT}")
    names = {dtype.name for dtype in dtypes[:2]}
    operands = names.pop() if len(names) == 1 and names <= set(NARROW) else compute
    return Problem(m, n, k, compute, alpha, beta, result.name, operands=operands)
