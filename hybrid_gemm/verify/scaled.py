"""A part's A, B and C in float64, scaled.

Rows of A and columns of B are scaled by powers of two to a largest magnitude near 1, and C with
them, so that a block has no rows or columns that drown the others.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from ..devices.native_passes import SIDE, Pass
from ..problem import NARROW
from . import rounding
from .sampling import Group, Part, Samples, doubles, some, spans
from .team import Team

NEAR = 50  # exponents of scales with which float32 holds squares that are not scaled
LEAST = np.finfo("f8").tiny  # of a bound: where squares vanish, the largest errors are still first


class Scaled:
    """`native`: native threads read matrices; `by_numpy` says why not."""

    native, by_numpy = False, ""

    # Many parameters: what is checked, and who does it.
    def __init__(
        self, part: Part, group: Group, samples: Samples, team: Team, growth: float, spread: float
    ) -> None:  # fmt: skip
        """Errors are `growth` times those of sums of an element's own products, and of Strassen's
        algorithm also `spread` times those of products of the largest elements of A and B."""
        self.part, self.group, self.samples, self.xp = part, group, samples, part.xp
        self.team, self.spread = team, spread
        self.rounding = rounding.of(part.problem, part.result.dtype, growth, part.alpha_rounds)
        alpha = part.problem.alpha
        finite = alpha != 0 and math.isfinite(alpha)
        self.alpha_exponent = max(-1022, math.frexp(alpha)[1] - 1) if finite else 0
        self.by_alpha = max(1.0, abs(alpha)) if finite else 1.0
        self.worst, self.uncovered, self.where_infinite = 0.0, "", ""

    def _scale(self, ks: slice) -> None:
        """Scales rows of A and columns of B by their elements in `ks`."""
        part = self.part
        of_rows = self._extremes(part.a, part.m, ks)
        self.row_nan, self.row_inf, self.row_ends = of_rows
        self.col_nan, self.col_inf, self.col_ends = self._extremes(part.b.T, part.n, ks)
        if part.reads_product and math.isnan(part.problem.alpha):
            self.row_nan[:], self.row_inf[:] = True, False
        self.row_top, self.col_top = (x.max(axis=0) for x in (self.row_ends, self.col_ends))
        dead = self.row_nan | self.row_inf, self.col_nan | self.col_inf
        self.infinite = bool(dead[0].any() or dead[1].any())
        self.dead_rows, self.dead_cols = (self._there(x) for x in dead)
        rows, cols = (x.astype("i4") for x in self._exponents())
        self.alpha = math.ldexp(part.problem.alpha, -self.alpha_exponent)
        self.row_scale, self.col_scale = (self._there(np.ldexp(1.0, x)) for x in (rows, cols))
        self.most = most = max(abs(x).max(initial=0) for x in (rows, cols))
        dtypes = {x.dtype.name for x in (part.a, part.b)}
        takes_float32 = part.problem.dtype == "float32" and dtypes <= {"float32", *NARROW}
        self.kind = "f4" if most <= NEAR and takes_float32 else "f8"
        # Of C, which is `alpha` times the scaled product; the exponent of the problem's is here.
        rows = rows - np.int32(self.alpha_exponent)
        self.row_exponents, self.col_exponents = self._there(rows), self._there(cols)
        self.row_factors, self.col_factors = (self._there(np.ldexp(1.0, x)) for x in (rows, cols))
        ends = [abs(x).max(initial=0) for x in (rows, cols)]
        self.factors = bool(max(ends) <= 1000 >= sum(ends))  # both, and their products, are exact

    def _allow_spread(self) -> None:
        """What Strassen's algorithm adds to bounds."""
        r = self.rounding
        self.tiny, self.of_others = r.tiny, 0.0  # of weighted sums
        if self.spread and self.part.reads_product:
            found, self.of_others = self._spread_errors()
            self.rounding = dataclasses.replace(r, tiny=r.tiny + found)

    def _spread_errors(self) -> tuple[float, float]:
        """The bound on what rounding of other elements' products leaves in an element where
        quarters are added, by the largest elements and norms of A and B; and what stands for it in
        random sums, where errors that are no random ones need as many standard deviations."""
        part, p, r = self.part, self.part.problem, self.rounding
        count = rounding.deviations(p.m * p.n)
        down, across = self._norm(part.m, of_rows=True), self._norm(part.n, of_rows=False)
        terms = min(float(self.row_top.max()) * across, float(self.col_top.max()) * down)

        def of_sums(walk: float, squares: float, times: float) -> float:
            return float(r.sums(walk, squares, count) + times * r.lost(walk, p.k))

        def bound(times: float) -> float:
            # Of sums of both signs, and of one sign, which do not grow so.
            most = self.spread * terms * of_sums(p.k / 2, 1, times)
            most += self.spread ** (1 / 3) * down * across * of_sums(p.k / 3, 0, times)
            return most * (abs(p.alpha) if math.isfinite(p.alpha) else 1.0)

        return bound(1), bound(count)

    def _norm(self, count: int, *, of_rows: bool) -> float:
        """The largest Euclidean norm of a row of A or a column of B."""
        found = np.zeros(count)
        for lines, ks in tiles(count, self.part.k, self.part.chunk):
            x = self._a(lines, ks) if of_rows else self._b(ks, lines)
            x *= x
            found[lines] += on_host(x.sum(axis=int(of_rows)))
        scale = on_host(self.row_scale if of_rows else self.col_scale)
        return float((np.sqrt(self.group.sum(found)) / scale).max())

    def _exponents(self) -> list[np.ndarray]:
        """Of the scales of rows and of columns: with them beta C stays within float64 too."""
        part, most = self.part, 0
        rows, cols = (
            -np.clip(np.frexp(top)[1], -1000, 1000) for top in (self.row_top, self.col_top)
        )
        if part.problem.beta and part.problem.dtype == "float64":
            by_beta = math.frexp(part.problem.beta)[1]
            for at in spans(part.height, part.chunk // max(1, part.width)):
                size = abs(doubles(part.c_in[at]))
                size = float(self.xp.where(self.xp.isfinite(size), size, 0).max())
                most = max(most, math.frexp(size)[1] + by_beta)
            most = int(self.group.largest(np.array([float(most)]))[0])
            room = 1000 - most - int(rows.max() + cols.max())
            # A small alpha takes no more of it than there is: C is above its product then.
            self.alpha_exponent = max(self.alpha_exponent, min(0, -room))
            beyond = max(0, -room - self.alpha_exponent)
            rows = np.minimum(rows, rows.max() - beyond // 2)
            cols = np.minimum(cols, cols.max() - (beyond - beyond // 2))
        return [rows, cols]

    def _extremes(self, matrix, count: int, ks: slice):
        """Of each row: whether it has a NaN, an Inf and no NaN; the largest magnitudes of its
        finite positive and negative elements."""
        xp, chunk, size = self.xp, self.part.chunk, ks.stop - ks.start
        found = np.zeros((4, count))

        def some_rows(rows: slice) -> None:
            for columns in spans(size, 4 * chunk // (rows.stop - rows.start)):
                x = doubles(matrix[rows, moved(columns, ks.start)])
                finite = xp.where(xp.isfinite(x), x, 0)
                ends = [
                    some(xp.isnan(x), axis=1), some(xp.isinf(x), axis=1),
                    finite.max(axis=1), -finite.min(axis=1),
                ]  # fmt: skip
                np.maximum(found[:, rows], on_host(xp.stack(ends)), out=found[:, rows])

        if not (self.part.reads_product and self.part.k):
            pass
        elif not (self.native and self._finite_ends(matrix, ks, found[2:])):
            high = min(-(-count // self.team.threads), 4 * chunk // max(1, size))
            self.team.each(some_rows, spans(count, high))
        nan, inf, *ends = self.group.largest(found)
        return nan > 0, (inf > 0) & (nan == 0), np.stack(ends)

    def _finite_ends(self, matrix, ks: slice, ends: np.ndarray) -> bool:
        """Whether there is no Inf or NaN. If so, learns the `ends` of rows by native threads."""
        made = np.zeros((ends.shape[1], 3))
        reading = Pass(matrix, "f8", self.team.threads)
        reading.cut(spans(len(made), SIDE), [ks])
        reading.find_ends(made)
        reading.run()
        ends[:] = made[:, :2].T
        return not made[:, 2].any()

    def _there(self, x):
        return self.xp.asarray(x)

    def _a(self, rows, ks=slice(None)):
        x = doubles(self.part.a[rows, ks])
        x *= self.row_scale[rows][:, None]
        if self.infinite:
            x[self.dead_rows[rows]] = 0
        return x

    def _b(self, ks, cols=slice(None)):
        x = doubles(self.part.b[ks, cols])
        x *= self.col_scale[cols]
        if self.infinite:
            x[:, self.dead_cols[cols]] = 0
        return x

    def _c(self, rows, cols):
        """C after, and beta C before, of some of the strip; rows and columns are the block's."""
        part = self.part
        here = moved(rows, -part.top), moved(cols, -part.left)
        got = self._scaled(doubles(picked(part.result, *here)), rows, cols)
        if not part.problem.beta:
            return got, None
        c, beta = doubles(picked(part.c_in, *here)), part.problem.beta
        before = self._scaled(c * beta, rows, cols)
        if part.problem.dtype == "float64" and 1 < abs(beta) < math.inf:
            # What is beyond float64 until it is scaled: C may be finite where the product meets it.
            fraction, exponent = math.frexp(beta)
            beyond = self._scaled(c * fraction, rows, cols, by=exponent)
            before = self.xp.where(self.xp.isinf(c * beta), beyond, before)
        return got, before

    def _scaled(self, x, rows, cols, sign: int = 1, by: int = 0):
        """Elements of C by the scales of their row and column at once, and 2^`by`: by one alone
        they may leave float64's range. With a `sign` of -1 back."""
        if self.factors and sign == 1 and not by:
            return x * (self.row_factors[rows][:, None] * self.col_factors[cols])
        both = self.row_exponents[rows][:, None] + self.col_exponents[cols]
        return self.xp.ldexp(x, sign * both + np.int32(by))

    def _size(self, before, rows, cols):
        """The magnitudes by which beta C before, `before`, was rounded."""
        part = self.part
        if part.c_size is None:
            return abs(before)
        size = picked(part.c_size, moved(rows, -part.top), moved(cols, -part.left))
        return self._scaled(size, rows, cols)

    def _besides(self) -> tuple[list[tuple], list[tuple]]:
        """What the bounds of weighted sums have beside their own products, as factors of rows and
        columns: for the sums of rows, and of columns. What is lost below the normal numbers adds
        up; the weights' signs are random, so that errors of other elements' products do not."""
        xp, s = self.xp, self.samples
        of_right, of_left = [], []
        for most, added in (self.tiny, xp.sum), (self.of_others, self._root):
            if most:
                rows = xp.ldexp(xp.float64(2 * most), self.row_exponents)  # weights are up to 2
                across = xp.stack([added(self.col_scale[b]) for b in s.col_blocks])
                down = xp.stack([added(rows[b]) for b in s.row_blocks])
                of_right.append((rows[:, None], across))
                of_left.append((down[:, None], self.col_scale))
        return of_right, of_left

    def _root(self, x):
        """Of a sum of squares, each of which may be beyond float64."""
        top = x.max() + LEAST
        return top * self.xp.sqrt(((x / top) ** 2).sum())


def on_host(x) -> np.ndarray:
    return x if isinstance(x, np.ndarray) else x.get()


def moved(index, by: int):
    return slice(index.start + by, index.stop + by) if isinstance(index, slice) else index + by


def indices(index) -> np.ndarray:
    return np.arange(index.start, index.stop) if isinstance(index, slice) else index


def compact(index: np.ndarray):
    """A slice in place of an index whose numbers follow one another: no copy is made."""
    if len(index) and index[-1] - index[0] == len(index) - 1:
        return slice(int(index[0]), int(index[-1]) + 1)
    return index


def picked(matrix, rows, cols):
    if isinstance(rows, slice) or isinstance(cols, slice):
        return matrix[rows, cols]
    return matrix[rows][:, cols]


def shared(blocks: list[slice], span: slice):
    """What blocks have in common with a span, numbered."""
    for i, block in enumerate(blocks):
        common = slice(max(block.start, span.start), min(block.stop, span.stop))
        if common.start < common.stop:
            yield i, common


def within(block: slice, step: int):
    return [moved(s, block.start) for s in spans(block.stop - block.start, step)]


def tiles(rows: int, cols: int, size: int):
    """Tiles of about so many elements, as wide as may be."""
    for r in spans(rows, max(256, size // max(1, cols))):
        for c in spans(cols, size // (r.stop - r.start)):
            yield r, c
