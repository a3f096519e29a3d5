"""Numbers for float64 products by int8 (`compute="fp64x"`): the moduli, and what kernels know of
each (`kernels/residues.cuh`). Exact, in Python's integers. Pure."""

from __future__ import annotations

import functools
import math

import numpy as np

from ..planning.plan import MODULI

LEAST, MOST = 10, MODULI  # moduli of a product
BITS = 42  # of a part of P / p: sums of 16 parts times residues, below 2^7, are exact in float64
_MODULUS = np.dtype([
    ("part", np.float64, 3), ("a", np.uint32, 2), ("b", np.uint32, 2), ("a_start", np.int32),
    ("b_start", np.int32), ("sum", np.uint32), ("sum_start", np.int32), ("p", np.float32),
    ("inverse", np.float32),
])  # fmt: skip
_WHOLE = 0x4B400000  # the bits of 1.5 * 2^23


@functools.cache
def moduli() -> tuple[int, ...]:
    """The largest pairwise coprime numbers up to 256, from the top."""
    found: list[int] = []
    for x in range(256, 1, -1):
        if len(found) < MOST and all(math.gcd(x, y) == 1 for y in found):
            found.append(x)
    return tuple(found)


def product_of(count: int) -> int:
    """P: the product of the first `count` moduli."""
    return math.prod(moduli()[:count])


def cut(count: int) -> int:
    """The power of two at which the highest of the three parts of P / p begins."""
    longest = product_of(count) // moduli()[count - 1]
    return max(0, longest.bit_length() - BITS)


def parts(x: int, count: int) -> list[int]:
    """x in three parts, the highest first: multiples of 2^cut, of 2^(cut - 42), and the rest."""
    high = cut(count)
    middle = max(0, high - BITS)
    return [x >> high << high, x % 2**high >> middle << middle, x % 2**middle]


def _weights(p: int, times: int, count: int) -> int:
    """`count` residues of 256^i * times modulo p of least magnitude, as signed bytes of a word."""
    residues = [256**i * times % p for i in range(count)]
    return int.from_bytes(bytes((r - p if 2 * r >= p else r) % 256 for r in residues), "little")


@functools.cache
def table() -> np.ndarray:
    """`Modulus` for each count of moduli, 0 to `MOST`, and each modulus: `MOST` a row."""
    made = np.zeros((MOST + 1, MOST), _MODULUS)
    for count in range(1, MOST + 1):
        whole = product_of(count)
        for row, p in zip(made[count], moduli()[:count], strict=False):
            inverse = pow(whole // p, -1, p) if p > 1 else 0
            row["part"] = [float(x) for x in parts(whole // p, count)]
            for name, times in (("a", 1), ("b", inverse)):
                word = _weights(p, times, 8)
                row[name] = word % 2**32, word >> 32
                row[f"{name}_start"] = _WHOLE - _signed(2**63 * times % p, p)
            row["sum"] = _weights(p, 1, 4)
            row["sum_start"] = _WHOLE - _signed(2**31 % p, p)
            row["p"], row["inverse"] = p, 1 / p
    return made


def _signed(r: int, p: int) -> int:
    return r - p if 2 * r >= p else r


@functools.cache
def wholes() -> np.ndarray:
    """For each count of moduli, 0 to `MOST`: P in three parts, and 1 / P."""
    made = np.zeros((MOST + 1, 4))
    for count in range(1, MOST + 1):
        whole = product_of(count)
        made[count] = *map(float, parts(whole, count)), 1 / whole
    return made


@functools.cache
def budgets() -> np.ndarray:
    """For each count of moduli, 0 to `MOST`: how large the norm of a row of integers times that of
    a column may be, in eighths of log2. Below P / 2 by one part in 500, which is more than rounding
    to integers adds to a norm."""
    bits = [math.log2(product_of(count)) - 1 - 2**-9 for count in range(1, MOST + 1)]
    return np.array([0, *(math.floor(8 * x) for x in bits)], np.int32)
