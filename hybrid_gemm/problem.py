"""The problem: shapes, dtypes, alpha and beta of one product, checked once. Pure."""

from __future__ import annotations

import functools
import math
import numbers
from dataclasses import dataclass, replace
from typing import Any, Protocol

import ml_dtypes
import numpy as np
from numpy.typing import DTypeLike

from .errors import DTypeError, OptionTypeError, UsageError, shown
from .host.derivatives import check_untracked

INT_LIMIT = 2**31 - 1  # of m, n and k, as in BLAS
# Of a launch: kernels count sides in `int`, and with them what lies a tile or a few steps beyond.
# Longer ones are cut (`devices/long_sides.py`).
MAX_SIDE = 2**30
NARROW = ("float16", "bfloat16")  # tensor cores read them as they are; bfloat16 is ml_dtypes'
FLOATS = (*NARROW, "float32", "float64")
# An alpha of less may scale parts of a sum, as of chunks of K. Times a larger one, which may be
# Inf, they may be Inf of either sign.
USUAL_ALPHA = 2.0**32
REAL_OF = {"complex64": "float32", "complex128": "float64"}  # the dtype of each part
WORK = (
    "float16, bfloat16, float32, float64, complex64, complex128 and integers of 8 to 64 bits work"
)
CONVERT = "convert with .astype, or tensors with .to"

# A factor: an int or a float, or a complex of complex matrices; planning and kernels see real ones.
Scalar = Any


class Described(Protocol):
    """Anything with a shape and a dtype: an array, or the header of a file."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> np.dtype: ...


@dataclass(frozen=True)
class Problem:
    """`C = alpha * op(A) @ op(B) + beta * C`; op(A) is m x k, op(B) is k x n, C is m x n.

    `dtype` is the dtype of the arithmetic and `out_dtype` that of C. They differ where NumPy's
    promotion gives C a narrow dtype: float16 and bfloat16 are multiplied in float32, integers
    below 32 bits in int32, which wraps around to the same result. `compute` names the arithmetic
    for float32: fp32, fp32x3 or tf32; or for float64: fp32 (its own) or fp64x. `operands` is the
    dtype that A and B have on a device: `dtype`, or float16 or bfloat16 where both matrices have it
    and tensor cores read it.
    `conj_a` and `conj_b` say that op() conjugates too; of a complex problem, whose `as_real` is
    what is planned and multiplied.

        Problem(1024, 512, 2048).flops == 2 * 1024 * 512 * 2048
    """

    m: int
    n: int
    k: int
    dtype: str = "float32"
    alpha: Scalar = 1
    beta: Scalar = 0
    out_dtype: str = ""
    compute: str = "fp32"
    operands: str = ""
    conj_a: bool = False
    conj_b: bool = False

    def __post_init__(self) -> None:
        for name in ("out_dtype", "operands"):
            if not getattr(self, name):
                object.__setattr__(self, name, self.dtype)

    @property
    def flops(self) -> int:
        """Floating-point operations: 2mnk, the count that every source document uses; 8mnk of
        complex matrices."""
        return self.step_flops * self.m * self.n * self.k

    @property
    def step_flops(self) -> int:
        """Operations of one multiply-add."""
        return 8 if self.is_complex else 2

    @property
    def itemsize(self) -> int:
        """Bytes of one element of C in the dtype of the arithmetic."""
        return np.dtype(self.dtype).itemsize

    @property
    def operand_size(self) -> int:
        """Bytes of one element of A or B on a device."""
        return np.dtype(self.operands).itemsize

    @property
    def is_integer(self) -> bool:
        """Whether the arithmetic is that of integers, which wrap around."""
        return np.dtype(self.dtype).kind == "i"

    @property
    def is_complex(self) -> bool:
        """Whether the matrices are complex."""
        return self.dtype in REAL_OF

    @property
    def scaled_at_last(self) -> bool:
        """Whether alpha may scale whole sums over k alone, and no parts of them."""
        return not (abs(self.alpha) < USUAL_ALPHA or self.is_integer)  # NaN is not less

    def having(self, **fields: Any) -> Problem:
        """The same with these fields; itself where it has them."""
        differs = any(getattr(self, name) != value for name, value in fields.items())
        return replace(self, **fields) if differs else self

    def as_blas(self) -> Problem:
        """The same, with k and alpha 0 where one of them, m or n is: A and B are not read then.
        Beside a beta, alpha is -0.0: kernels add it times an empty sum, which leaves -0.0 in C as
        it is."""
        if 0 not in (self.m, self.n, self.k, self.alpha):
            return self
        floats = not self.dtype.startswith("int")
        return replace(self, k=0, alpha=-0.0 if self.beta and floats else 0)

    def as_real(self) -> Problem:
        """The real product, of m x 2k and 2k x 2n, that a complex one is multiplied as
        (`arrays/complex_numbers.py`); a real problem itself. A complex beta is applied beforehand,
        and is 1 here, as is all of a complex alpha but a power of two."""
        if not self.is_complex:
            return self
        dtype, (_near_one, alpha) = REAL_OF[self.dtype], split_alpha(self.alpha, self.dtype)
        beta = 1 if isinstance(self.beta, complex) else self.beta
        return Problem(self.m, 2 * self.n, 2 * self.k, dtype, alpha, beta, compute=self.compute)

    def as_third(self) -> Problem:
        """One of the three real products that a complex one can be multiplied as
        (`arrays/three_products.py`)."""
        return Problem(self.m, self.n, self.k, REAL_OF[self.dtype], compute=self.compute)

    def __str__(self) -> str:
        sums = "" if self.out_dtype == self.dtype else f" (summed in {self.dtype})"
        return f"m={self.m} n={self.n} k={self.k} {self.out_dtype}{sums}"


def split_alpha(alpha: Scalar, dtype: str) -> tuple[complex | None, float | int]:
    """Of an alpha of complex matrices what is multiplied into B first, if anything, and what is
    left for the real product: of a complex one a number whose larger part is in (1/2, 1], or below
    2 of the largest, and a power of two. So 1j is left as it is, and rounds nothing of B."""
    if not isinstance(alpha, complex):
        return None, alpha
    limits = finfo(REAL_OF[dtype])
    fraction, power = math.frexp(max(abs(alpha.real), abs(alpha.imag)))
    power -= fraction == 0.5
    power = max(int(limits.minexp), min(power, int(limits.maxexp) - 1))
    return complex(*(math.ldexp(x, -power) for x in (alpha.real, alpha.imag))), 2.0**power


def op_of(trans: bool | str, name: str) -> bool | str:
    """`trans_a` or `trans_b` as False, True, or "c" for the conjugate transpose. BLAS's letters
    n, t and c are known. Raises `UsageError` for other text and numbers (SciPy's BLAS calls the
    conjugate transpose 2), `OptionTypeError` for what is neither."""
    if trans is False or trans is True:  # in a third of the time
        return trans
    found: bool | str | None
    wrong: type[UsageError] | type[OptionTypeError] = UsageError
    if isinstance(trans, str):
        letters: dict[str, bool | str] = {"n": False, "t": True, "c": "c"}
        found = letters.get(trans.lower())
    elif isinstance(trans, numbers.Integral | np.bool_):
        found = bool(trans) if trans in (0, 1) else None
    else:
        found, wrong = None, OptionTypeError
    if found is None:
        raise wrong(f"{name}={shown(trans)}: it takes False, True, 'n', 't' or 'c'")
    return found


def is_float(dtype: DTypeLike) -> bool:
    """Whether `dtype` is one of the four floating-point dtypes that are multiplied."""
    return np.dtype(dtype).name in FLOATS


def finfo(dtype: DTypeLike) -> ml_dtypes.finfo:
    """The limits of a floating-point dtype, as NumPy's `finfo` gives them; bfloat16 too."""
    return ml_dtypes.finfo(np.dtype(dtype))


def compute_dtype(result: np.dtype) -> str:
    """The dtype of the arithmetic for a product whose C has dtype `result`.

    Raises `DTypeError` for dtypes that are not multiplied: bool, longdouble, strings.
    """
    match result.kind, result.itemsize:  # before the name, which NumPy takes long to make
        case "f", 2 | 4:
            return "float32"
        case "c", 8 | 16:
            return f"complex{8 * result.itemsize}"
        case "f", 8:
            return "float64"
        case "i" | "u", 1 | 2 | 4:
            return "int32"
        case "i" | "u", 8:
            return "int64"
    if result.name in NARROW:
        return "float32"
    raise DTypeError(f"cannot multiply matrices of dtype {result}; {WORK} ({CONVERT})")


def check_dtype(dtype: DTypeLike, name: str) -> np.dtype:
    """`dtype` in native byte order. Raises `DTypeError` if it is not one that is multiplied;
    `name` says in the message which matrix or file has it."""
    try:
        dtype = np.dtype(dtype)
    except TypeError:
        raise DTypeError(f"{name} has dtype {dtype!r}, which NumPy does not know; {WORK}") from None
    try:
        return _native(dtype)
    except DTypeError:
        how = f"[{dtype.names[0]!r}] is its first field" if dtype.names else CONVERT
        if dtype == "V2":  # what numpy.load gives where bfloat16 was saved
            how = ".view(ml_dtypes.bfloat16) if these are bfloat16, for which .npy has no name"
        raise DTypeError(f"{name} has dtype {dtype}; {WORK} ({how})") from None


@functools.lru_cache(maxsize=256)
def _native(dtype: np.dtype) -> np.dtype:
    """A dtype that is multiplied, in native byte order; `DTypeError` as `compute_dtype`."""
    compute_dtype(dtype)
    return dtype.newbyteorder("=")


def _check_scalar(value: object, name: str, dtype: str, out_dtype: str) -> Scalar:
    """alpha or beta as a Python number that the arithmetic's dtype can hold; a complex one only
    where its imaginary part is not 0. NaN and Inf are numbers here, as in BLAS; what the dtype
    holds with few bits, or as 0, is what it is there. Of integers without sign one that only
    they hold is the negative number that is the same to arithmetic that wraps around."""
    item = getattr(value, "item", None)
    if item is not None and getattr(value, "ndim", None) == 0:  # of NumPy or CuPy
        if getattr(value, "mask", False):  # of a masked array
            raise DTypeError(f"{name} is masked; it must be a number")
        check_untracked(value, name)
        value = item()
    if dtype in REAL_OF and isinstance(value, numbers.Complex) and not isinstance(value, bool):
        factor = complex(_fitting(value, name, dtype, complex))
        return factor if factor.imag else factor.real
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        has_parts = isinstance(value, numbers.Complex) and not isinstance(value, numbers.Real)
        more = ": the matrices are real" if has_parts else ""
        raise DTypeError(f"{name} must be a real number, not {shown(value)}{more}")
    if np.dtype(dtype).kind != "i":
        return _fitting(value, name, dtype, float)
    limits = np.iinfo(dtype)
    whole: int | None
    try:
        whole = int(value)  # type: ignore[call-overload]
    except (OverflowError, ValueError):  # Inf and NaN
        whole = None
    if whole is None or whole != value:
        raise DTypeError(f"{_shown(name, value)} with integer matrices; it must be whole")
    if out_dtype.startswith("uint") and limits.max < whole <= np.iinfo(f"u{dtype}").max:
        whole -= 1 << limits.bits
    if not limits.min <= whole <= limits.max:
        fitting = f"{dtype} or {out_dtype}" if out_dtype.startswith("uint") else dtype
        raise UsageError(f"{_shown(name, value)} does not fit {fitting}")
    return whole


@functools.cache
def _largest(dtype: str) -> float:
    """The largest finite number of a floating-point dtype, or of a complex one's parts."""
    return float(finfo(REAL_OF.get(dtype, dtype)).max)


@functools.cache
def _smallest(dtype: str) -> tuple[float, float]:
    """The smallest normal number of such a dtype, and the smallest of all."""
    limits = finfo(REAL_OF.get(dtype, dtype))
    return float(limits.tiny), float(limits.smallest_subnormal)


def _fitting(value: Any, name: str, dtype: str, kind: type) -> Any:
    """alpha or beta as a float or complex number, parts below the dtype's normal numbers as they
    are there. Raises `UsageError` for a finite one that is Inf in the arithmetic's dtype."""
    largest = _largest(dtype)
    try:
        factor = kind(value)
    except OverflowError:  # a whole number or a fraction beyond float64
        factor = None
    parts = () if factor is None else ((factor.real, value.real), (factor.imag, value.imag))
    # A longdouble beyond float64 is Inf there.
    if not parts or any(largest < abs(x) and (x != y or abs(x) < math.inf) for x, y in parts):
        raise UsageError(
            f"{_shown(name, value)} does not fit {dtype}, whose largest number is {largest:.3g}"
        )
    if kind is complex:
        return complex(_in_range(factor.real, dtype), _in_range(factor.imag, dtype))
    return _in_range(factor, dtype)


def _in_range(x: float, dtype: str) -> float:
    """A number that is below the dtype's normal ones as it is there, or 0: kernels, NumPy and
    verification have the same factor then. Larger ones may be rounded by whoever multiplies."""
    normal, step = _smallest(dtype)
    return round(x / step) * step if abs(x) < normal else x


def _shown(name: str, value: object) -> str:
    """alpha or beta with its value, where that is short."""
    try:
        text = repr(value)
    except ValueError:  # a whole number of more digits than Python prints
        return name
    return f"{name}={text}" if len(text) < 40 else name


def is_long(*sides: int) -> bool:
    """Whether one of these sides is more than a launch takes."""
    return max(sides) > MAX_SIDE


def check_sides(m: int, n: int, k: int, what: str = "the product") -> None:
    """Raises `UsageError` where one of these sides is more than an int holds."""
    if max(m, n, k) > INT_LIMIT:
        raise UsageError(
            f"{what} has m={m} n={n} k={k}; each is at most {INT_LIMIT}: cut the matrices, and add "
            "what parts of k make to C by beta=1"
        )


def check_complex_sides(m: int, n: int, k: int) -> None:
    """As `check_sides`, of the real product (`Problem.as_real`) of complex matrices."""
    check_sides(m, 2 * n, 2 * k, "the real product of this complex one")


def are_numbers(*values: object) -> bool:
    """Whether these are numbers, and no arrays of one, which may change."""
    return all(isinstance(value, numbers.Number) for value in values)


def shape_of(array: Described, name: str) -> tuple[int, int]:
    """Rows and columns of a matrix. Raises `UsageError` for an array that is not 2-D."""
    if len(array.shape) != 2:
        hint = (
            "a number has none: alpha and beta scale the product",
            "reshape a vector to (n, 1) or (1, n)",
            "hybrid_gemm.matmul takes stacks; x.flatten(0, -2) of a tensor is one, with gradients",
        )[min(len(array.shape), 2)]
        raise UsageError(f"{name} has shape {tuple(array.shape)}; matrices are 2-D ({hint})")
    rows, cols = array.shape
    return int(rows), int(cols)


def make_problem(
    a: Described,
    b: Described,
    c: Described | None = None,
    *,
    alpha: Scalar = 1.0,
    beta: Scalar = 0.0,
    trans_a: bool | str = False,
    trans_b: bool | str = False,
    out: Described | None = None,
) -> Problem:
    """The problem that these arrays pose. Only their `.shape` and `.dtype` are read.

    With `trans_a`, A is stored as k x m; with `trans_b`, B is stored as n x k; "c" conjugates
    too (`op_of`). An `out` that holds float32 keeps the sums of 16-bit A and B. Raises
    `UsageError` (a `ValueError`) on shapes and `DTypeError` (a `TypeError`) on dtypes.

        make_problem(np.ones((3, 5)), np.ones((5, 2))).m == 3
    """
    dtypes = [check_dtype(a.dtype, "A"), check_dtype(b.dtype, "B")]
    m, n, k = sides(a, b, trans_a=trans_a, trans_b=trans_b)
    if c is not None:
        dtypes.append(check_dtype(c.dtype, "C"))
        if shape_of(c, "C") != (m, n):
            raise UsageError(f"C is {c.shape[0]} x {c.shape[1]}; this product is {m} x {n}")
    compute, out_dtype, operands = _promoted(*dtypes)
    if out is not None and c is None and out_dtype in NARROW and np.can_cast("f4", out.dtype):
        out_dtype = "float32"
    alpha = _check_scalar(alpha, "alpha", compute, out_dtype)
    beta = _check_scalar(beta, "beta", compute, out_dtype)
    if beta != 0 and c is None:
        raise UsageError(f"beta={beta} scales C, and no C was given")
    check_sides(m, n, k)
    conj_a, conj_b = (
        trans == "c" and dtype.kind == "c"
        for trans, dtype in zip((trans_a, trans_b), dtypes, strict=False)
    )
    return Problem(
        m, n, k, compute, alpha, beta, out_dtype, operands=operands, conj_a=conj_a, conj_b=conj_b
    )


def promoted(*dtypes: np.dtype) -> np.dtype:
    """NumPy's promoted dtype. Raises `DTypeError` where none holds all."""
    try:
        return np.result_type(*dtypes)
    except TypeError:
        raise DTypeError(
            f"no dtype holds both {' and '.join(dict.fromkeys(map(str, dtypes)))}; "
            f"{CONVERT}, to float32 for instance"
        ) from None


@functools.lru_cache(maxsize=256)  # NumPy takes long for it, and for names of dtypes
def _promoted(*dtypes: np.dtype) -> tuple[str, str, str]:
    """The dtypes of the arithmetic, of C and of operands on devices, of those of A, B and C, if
    one was given. Raises `DTypeError` where none holds all."""
    result = promoted(*dtypes)
    compute = compute_dtype(result)
    names = {dtype.name for dtype in dtypes[:2]}
    # A C of float64 makes the arithmetic float64, which reads no operands of 16 bits.
    narrow = len(names) == 1 and names <= set(NARROW) and compute == "float32"
    return compute, result.name, names.pop() if narrow else compute


def sides(
    a: Described, b: Described, *, trans_a: bool | str = False, trans_b: bool | str = False
) -> tuple[int, int, int]:
    """m, n and k of op(A) and op(B). Raises `UsageError` if their k differ, and for arrays that
    are not 2-D."""
    m, k = shape_of(a, "A")[:: -1 if trans_a else 1]
    k2, n = shape_of(b, "B")[:: -1 if trans_b else 1]
    if k != k2:
        op_a, op_b = "A^T" if trans_a else "A", "B^T" if trans_b else "B"
        raise UsageError(
            f"shapes do not match: {op_a} is {m} x {k} and {op_b} is {k2} x {n}; "
            f"the {k} columns of {op_a} must equal the {k2} rows of {op_b}"
        )
    return m, n, k
