"""Products by residues in exact integers, as docs/fp64x.md describes them."""

import math
from fractions import Fraction

import numpy as np

from hybrid_gemm.devices import moduli


def draw(kind, rng, shape):
    """A matrix: normal, uniform in [0, 1), or (uniform - 0.5) exp(phi normal) for phi = `kind`."""
    if kind == "normal":
        return rng.standard_normal(shape)
    if kind == "uniform":
        return rng.random(shape)
    assert isinstance(kind, int)
    return (rng.random(shape) - 0.5) * np.exp(kind * rng.standard_normal(shape))


def norms(rows):
    """Of each row 8 log2 of its norm, rounded up to what quarters of log2 of its square give."""
    return np.array([math.ceil(4 * math.log2(math.fsum(x * x for x in row))) for row in rows])


def fit(found):
    """At which eighth the bounds of norms lose least."""
    eighths = set(found % 8)
    return min(range(7, -1, -1), key=lambda e: max((e - x) % 8 for x in eighths))


def bounds(a, b, count):
    """The bounds of the norms of scaled rows of A and columns of B with so many moduli."""
    ends = fit(norms(a)), fit(norms(b.T))
    whole = (moduli.budgets()[count] - sum(ends)) // 8
    return 8 * ((whole + 1) // 2) + ends[0], 8 * (whole // 2) + ends[1]


def product(a, b, count):
    """C from integers of so many moduli: whole numbers, and the powers of two by which rows and
    columns were scaled."""
    bits_a, bits_b = bounds(a, b, count)
    of_rows, of_columns = (bits_a - norms(a)) // 8, (bits_b - norms(b.T)) // 8
    x = _integers(np.ldexp(a, of_rows[:, None]))
    y = _integers(np.ldexp(b, of_columns))
    return x @ y, of_rows[:, None] + of_columns


def _integers(x):
    return np.array([[int(v) for v in row] for row in np.rint(x)], object)


def ulps(got, whole, shift):
    """The largest distance of C from whole numbers times 2^-shift, in units in the last place."""
    return max(
        float(abs(Fraction(float(x)) - Fraction(int(w), 1 << int(s))) / Fraction(math.ulp(x)))
        for x, w, s in zip(got.ravel(), whole.ravel(), shift.ravel(), strict=True)
    )


def errors(got, a, b):
    """The largest error over abs(A) abs(B), in units of 2^-53, against long double."""
    return float(_relative(got, a, b).max())


def typical_error(got, a, b):
    """As `errors`, root mean square."""
    return float(np.sqrt((_relative(got, a, b) ** 2).mean()))


def _relative(got, a, b):
    wide = a.astype(np.longdouble) @ b.astype(np.longdouble)
    return abs(got - wide) / (abs(a) @ abs(b)) * 2.0**53
