"""C of integers: equal, modulo 2^bits as the kernels and NumPy wrap."""

from __future__ import annotations

import itertools
import math

import numpy as np

from ..devices import native_passes
from ..devices.native_passes import SIDE, Pass, filled
from .elements import THIN_BYTES
from .sampling import Found, Group, Part, Samples, some, spans, square_tiles
from .team import Team

PIECE = {True: 2**18, False: 2**23}  # elements as int64 at a time: on the host, on a GPU
VECTORS = 11  # of random weights, from either side: one is odd, and of the others each leaves out
# half of all errors at most, be they in the highest bit alone; together 2^-20


class Integers:
    # Many parameters: as of `Floats`.
    def __init__(
        self, part: Part, group: Group, samples: Samples, team: Team, growth: float, spread: float
    ) -> None:  # fmt: skip
        self.team = team
        self.part, self.group, self.samples, self.xp = part, group, samples, part.xp
        self.bits = 8 * part.result.dtype.itemsize
        self.where = ""

    def check(self, full: bool) -> Found:
        part, group = self.part, self.group
        self.by_numpy = native_passes.why_not([part.a, part.b, part.result, part.c_in])
        if full:
            how = "every element, exactly"
            same = [self._equal(*tile) for tile in square_tiles(part.m, part.n, part.side)]
        else:
            how = f"{VECTORS} random sums of every row and column, modulo 2^{self.bits}"
            how += native_passes.said(self.by_numpy if self.xp is np else "")
            same = [self._sums()]
        some_wrong = float(group.largest(np.array([0.0 if all(same) else 1.0]))[0])
        power = (
            "finds any wrong element" if full else
            "finds any single wrong element, and with probability above 1 - 1e-6 any others; a "
            "right product never fails"
        )  # fmt: skip
        return Found(math.inf if some_wrong else 0.0, how, power, self.where)

    def _expected(self, product, rows, cols):
        """alpha product + beta C, of some of the strip, modulo 2^64."""
        p = self.part.problem
        expected = self.xp.asarray(p.alpha, "i8") * product
        if p.beta:
            expected = expected + self.xp.asarray(p.beta, "i8") * _wide(self.part.c_in[rows, cols])
        return expected

    def _equal(self, rows: slice, cols: slice) -> bool:
        """Every element of these rows and columns of the block that is the strip's."""
        part = self.part
        if part.reads_product:
            product = self.group.sum(self._product(part.a[rows], part.b[:, cols]))
        else:
            product = self.xp.zeros((rows.stop - rows.start, cols.stop - cols.start), "i8")
        top, stop = max(rows.start, part.top), min(rows.stop, part.rows.stop)
        left, end = max(cols.start, part.left), min(cols.stop, part.cols.stop)
        if top >= stop or left >= end:
            return True
        product = product[
            top - rows.start : stop - rows.start, left - cols.start : end - cols.start
        ]
        here = slice(top - part.top, stop - part.top), slice(left - part.left, end - part.left)
        expected = self._expected(product, *here)
        got = part.result[here]
        return self._none(expected.astype(got.dtype) != got, top, left)

    def _sums(self) -> bool:
        """Every row and every column of the strip in random sums."""
        part, random = self.part, self.samples.random
        right, left = _weights(random, part.n), _weights(random, part.m)
        same = [self._rows_sums(part, right)]
        same.append(self._rows_sums(part.turned(), left))
        return all(same)

    def _rows_sums(self, part: Part, weights: np.ndarray) -> bool:
        """The random sums of each row of a strip, between edges of columns."""
        xp, p, same = self.xp, part.problem, True
        edges = [*part.col_edges, part.n]
        for cut in (slice(i, j) for i, j in itertools.pairwise(edges) if i < j):
            of_cut = xp.asarray(weights[cut])
            product = self.group.sum(self._product(part.a, self._product(part.b[:, cut], of_cut)))
            if not (part.left <= cut.start < part.cols.stop and part.height):
                continue
            inner = slice(cut.start - part.left, cut.stop - part.left)
            expected = xp.asarray(p.alpha, "i8") * product[part.rows]
            sums = self._product(part.result[:, inner], of_cut)
            if p.beta:
                before = self._product(part.c_in[:, inner], of_cut)
                expected = expected + xp.asarray(p.beta, "i8") * before
            wrong = self._differ(expected, sums)
            if part.is_turned != self.part.is_turned:
                same &= self._none(wrong.T, None, part.top)
            else:
                same &= self._none(wrong, part.top, None)
        return same

    def _product(self, x, y):
        """x @ y modulo C's range."""
        if self.by_numpy:
            return multiply(self.xp, x, y)
        (rows, k), width = x.shape, filled(y.shape[1])
        kind = np.dtype("u4" if self.bits <= 32 else "u8")
        made = np.zeros((rows, width), kind)
        for ks in spans(k if rows else 0, THIN_BYTES // (kind.itemsize * width)):
            wide = np.zeros((ks.stop - ks.start, width), kind)
            wide[:, : y.shape[1]] = y[ks].astype(kind)
            reading = Pass(x, kind, self.team.threads)
            reading.cut(spans(rows, SIDE), [ks])
            reading.multiply(wide, made)
            reading.run()
        return _wide(made[:, : y.shape[1]])

    def _differ(self, x, y):
        """Where two sums differ modulo C's own range."""
        difference = x - y
        return difference % 2**self.bits != 0 if self.bits < 64 else difference != 0

    def _none(self, wrong, top: int | None, left: int | None) -> bool:
        if not some(wrong):
            return True
        i, j = (int(x) for x in np.argwhere(wrong if self.xp is np else wrong.get())[0])
        down, across = self.part.origin
        at = [f"row {i + top + down}"] if top is not None else []
        at += [f"column {j + left + across}"] if left is not None else []
        self.where = f"{', '.join(at)} is wrong"
        return False


def _weights(random: np.random.Generator, count: int) -> np.ndarray:
    """Columns of weights. Odd ones leave no single error out, whatever its bits; of two errors in
    the highest bit they leave out both, and even ones are needed."""
    found = random.integers(-(2**14), 2**14, (count, VECTORS))
    found[:, 0] = 2 * found[:, 0] + 1
    return found


def _wide(x):
    return x.astype("i8")


def multiply(xp, x, y):
    """x @ y modulo 2^64, as int64."""
    total = xp.zeros((len(x), y.shape[1]), "i8")
    size = PIECE[xp is np]
    for ks in spans(len(y), size // max(1, y.shape[1])):
        right = _wide(y[ks])
        for at in spans(len(x), size // len(right)):
            total[at] += _wide(x[at, ks]) @ right
    return total
