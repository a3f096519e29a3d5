"""Complex matrices and factors for tests."""

import itertools

DTYPES = ("complex64", "complex128")
OPS = (False, True, "c")
FACTORS = ((1, 0), (2, -1), (1 - 2j, 3), (-1, 1j), (1j, 2 - 1j), (0, 1 + 1j))


def integers(rng, shape, dtype="complex64"):
    """Whole numbers in both parts, whose float32 products are exact."""
    return (rng.integers(-4, 5, shape) + 1j * rng.integers(-4, 5, shape)).astype(dtype)


def normal(rng, shape, dtype="complex64"):
    return (rng.standard_normal(shape) + 1j * rng.standard_normal(shape)).astype(dtype)


def op(x, trans):
    return x.T.conj() if trans == "c" else x.T if trans else x


def stored(rng, m, n, k, trans, dtype):
    """A and B of these sides as they are stored, and C."""
    a = integers(rng, (k, m) if trans[0] else (m, k), dtype)
    b = integers(rng, (n, k) if trans[1] else (k, n), dtype)
    return a, b, integers(rng, (m, n), dtype)


def factored(rng, trans, dtype, shapes):
    """A, B and C as they are stored, the factors and transposes as keywords, and the product, for
    each shape and each pair of factors."""
    for (m, n, k), (alpha, beta) in itertools.product(shapes, FACTORS):
        a, b, c = stored(rng, m, n, k, trans, dtype)
        options = {"alpha": alpha, "beta": beta, "trans_a": trans[0], "trans_b": trans[1]}
        yield a, b, c, options, alpha * (op(a, trans[0]) @ op(b, trans[1])) + beta * c
