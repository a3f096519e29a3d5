"""A part's A, B and C in float64, scaled, and what Inf and NaN in A and B make of C.

Rows of A and columns of B are scaled by powers of two to a largest magnitude near 1, and C with
them, so that a block has no rows or columns that drown the others.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from . import rounding
from .sampling import Group, Part, Samples, doubles, singles, some, spans, square_tiles
from .team import Team

EXACT_FLOPS = 2**37  # spent on elements that no sum can hold, beside Inf and NaN
NEARER = 16  # exponents of scales that float32 can do without
NEAR = 60  # exponents of scales that can as well be applied to sums, and to sums of squares
LEAST = np.finfo("f8").tiny  # of a bound: where squares vanish, the largest errors are still first


class Scaled:
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
        self.final = True  # or in the first look, which takes less

    def _scale(self, ks: slice) -> None:
        """Scales rows of A by their elements in `ks`, and columns of B by all of theirs."""
        self.col_nan, self.col_inf, self.col_ends = self._extremes(
            self.part.b.T, self.part.n, slice(self.part.k)
        )
        self._scale_rows(*self._extremes(self.part.a, self.part.m, ks))

    def _scale_rows(self, nan, inf, ends) -> None:
        part = self.part
        self.row_nan, self.row_inf, self.row_ends = nan, inf, ends
        if part.reads_product and math.isnan(part.problem.alpha):
            self.row_nan[:], self.row_inf[:] = True, False
        self.row_top, self.col_top = (x.max(axis=0) for x in (self.row_ends, self.col_ends))
        dead = self.row_nan | self.row_inf, self.col_nan | self.col_inf
        self.infinite = bool(dead[0].any() or dead[1].any())
        self.dead_rows, self.dead_cols = (self._there(x) for x in dead)
        rows, cols = (x.astype("i4") for x in self._exponents())
        self.alpha = math.ldexp(part.problem.alpha, -self.alpha_exponent)
        self.row_scale, self.col_scale = (self._there(np.ldexp(1.0, x)) for x in (rows, cols))
        most = max(abs(x).max(initial=0) for x in (rows, cols))
        self.raw, most = most <= NEAR, max(most, abs(self.alpha_exponent))
        self.narrow = most <= NEARER and part.takes_float32
        # Of C, which is `alpha` times the scaled product; the exponent of the problem's is here.
        rows = rows - np.int32(self.alpha_exponent)
        self.row_exponents, self.col_exponents = self._there(rows), self._there(cols)
        self.row_factors, self.col_factors = (self._there(np.ldexp(1.0, x)) for x in (rows, cols))
        ends = [abs(x).max(initial=0) for x in (rows, cols)]
        self.small_factors = max(ends) <= 2 * NEAR and not part.problem.beta
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
        found = np.zeros((4, count))
        size = max(1, ks.stop - (ks.start or 0))
        down, right = getattr(matrix, "strides", (1, 0))
        # Along what lies together.
        high = 4 * self.part.chunk // (256 if abs(down) < abs(right) else size)

        def some_rows(rows: slice) -> None:
            for columns in spans(size, 4 * self.part.chunk // (rows.stop - rows.start)):
                self._add_extremes(found[:, rows], matrix[rows, moved(columns, ks.start or 0)])

        if self.part.reads_product and self.part.k:
            pieces = spans(count, max(256, min(high, -(-count // self.team.threads))))
            self.team.each(some_rows, pieces)
        return self._of_all(found)

    def _of_all(self, found):
        nan, inf, *ends = self.group.largest(found)
        return nan > 0, (inf > 0) & (nan == 0), np.stack(ends)

    def _add_extremes(self, found: np.ndarray, x) -> None:
        xp = self.xp
        if x.dtype.name not in ("float32", "float64"):
            down, right = getattr(x, "strides", (1, 0))
            x = singles(x.T).T if down < right else singles(x)
        ends = on_host(xp.stack([x.max(axis=1), -x.min(axis=1)]))
        if not np.isfinite(ends).all():
            flags = xp.stack([some(xp.isnan(x), axis=1), some(xp.isinf(x), axis=1)])
            np.maximum(found[:2], on_host(flags), out=found[:2])
            x = xp.where(xp.isfinite(x), x, 0)
            ends = on_host(xp.stack([x.max(axis=1), -x.min(axis=1)]))
        np.maximum(found[2:], ends, out=found[2:])

    def _there(self, x):
        return self.xp.asarray(x)

    def _kind(self) -> np.dtype:
        """What sums are made in: in the first look float32, where the product is."""
        return np.dtype("f4" if self.narrow and not self.final else "f8")

    def _chunk(self) -> int:
        """Elements of a piece."""
        return 8 * self.part.chunk // self._kind().itemsize

    def _factors(self):
        """Of what `_raw_a` and `_raw_b` give, to be scaled."""
        if self.raw:
            return self.row_scale, self.col_scale
        return self.xp.ones_like(self.row_scale), self.xp.ones_like(self.col_scale)

    def _raw_a(self, rows, ks):
        """As `_a`, but not scaled where squares of sums can be held as they are."""
        if not self.raw:
            return self._a(rows, ks)
        x = self._copied(self.part.a[rows, ks])
        if self.infinite:
            x[self.dead_rows[rows]] = 0
        return x

    def _raw_b(self, ks, cols):
        if not self.raw:
            return self._b(ks, cols)
        x = self._copied(self.part.b[ks, cols])
        if self.infinite:
            x[:, self.dead_cols[cols]] = 0
        return x

    def _copied(self, x):
        return singles(x) if self._kind() == "f4" else doubles(x)

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
        got = self._scaled(self._copied(picked(part.result, *here)), rows, cols)
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
            if x.ndim and self.small_factors:
                x *= self.row_factors[rows].astype(x.dtype)[:, None]
                x *= self.col_factors[cols].astype(x.dtype)
                return x
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

    # --- Inf and NaN in A and B -----------------------------------------------------------

    def _infinite(self) -> None:
        """Rows of A and columns of B that have Inf or NaN decide C there, wholly: a NaN makes
        all NaN; Inf times 0, and Infs of both signs, NaN; Infs of one sign that Inf."""
        xp, part = self.xp, self.part
        self.where_infinite = ""
        rows, cols = self.row_nan | self.row_inf, self.col_nan | self.col_inf
        if not (rows.any() or cols.any()):
            return
        for i in spans(part.height, part.chunk // max(1, part.width)):
            got = doubles(part.result[i])
            at = moved(i, part.top)
            must = self._there(self.row_nan[at])[:, None] | self._there(self.col_nan[part.cols])
            fair = ~xp.isfinite(got) if part.mixes else xp.isnan(got)
            self._all(~must | fair, at, part.cols, "NaN")
        all_rows, all_cols = np.arange(part.m), np.arange(part.n)
        self._signs(all_rows[self.row_inf], all_cols[~self.col_nan])
        self._signs(all_rows[~rows], all_cols[self.col_inf])

    def _signs(self, rows, cols) -> None:
        """Elements that have terms which are Inf, and none that has a NaN operand."""
        part, p = self.part, self.part.problem
        if not (len(rows) and len(cols)):
            return
        size = EXACT_FLOPS // (12 * p.k * len(cols)) + 1
        if len(rows) > size:
            share = size / len(rows)
            rows = np.sort(self.samples.random.choice(rows, int(size), replace=False))
            self.uncovered = f", {share:.2%} of the rows where A or B is Inf"
        for down, across in square_tiles(len(rows), len(cols), part.side):
            self._signs_of(rows[down], cols[across])

    def _signs_of(self, rows, cols) -> None:
        xp, part, p = self.xp, self.part, self.part.problem
        nan, any_sign, net, lost = (xp.zeros((len(rows), len(cols))) for _ in range(4))
        least = 2 * self.rounding.below  # of operands that are not rounded to 0
        for ks in spans(part.k, part.chunk // max(len(rows), len(cols))):
            x, y = doubles(part.a[rows, ks]), doubles(part.b[ks, cols])
            x_inf, y_inf = xp.isinf(x).astype("f8"), xp.isinf(y).astype("f8")
            used = np.flatnonzero(on_host(x_inf.max(axis=0) + y_inf.max(axis=1)))
            if not len(used):
                continue
            x, y, x_inf, y_inf = x[:, used], y[used], x_inf[:, used], y_inf[used]
            x_sign, y_sign = xp.sign(x), xp.sign(y)
            nan += x_inf @ (y_sign == 0) + (x_sign == 0) @ y_inf
            any_sign += x_inf @ abs(y_sign) + abs(x_sign) @ y_inf - x_inf @ y_inf
            net += (x_inf * x_sign) @ y_sign + x_sign @ (y_inf * y_sign)
            net -= (x_inf * x_sign) @ (y_inf * y_sign)
            if least:
                lost += x_inf @ (abs(y) < least) + (abs(x) < least) @ y_inf
        nan, any_sign, net, lost = (self.group.sum(x) for x in (nan, any_sign, net, lost))
        own_rows, own_cols = part.own(rows, part.rows), part.own(cols, part.cols)
        if not (own_rows.any() and own_cols.any()):
            return
        pick = np.ix_(own_rows, own_cols)
        nan, any_sign, net = nan[pick], any_sign[pick], net[pick] * math.copysign(1, p.alpha)
        rows, cols = rows[own_rows], cols[own_cols]
        here = rows - part.top, cols - part.left
        got = doubles(picked(part.result, *here))
        plus, minus = net == any_sign, net == -any_sign
        unsure = (nan > 0) | ~(plus | minus)
        # The finite terms alone may pass the largest number, and meet Inf of the other sign.
        size = self._there(self.row_top[rows])[:, None] * self._there(self.col_top[cols])
        may = size * (p.k * max(1.0, abs(p.alpha))) > self.rounding.limit
        may |= self._rounded_to_infinity(rows, cols) | (lost[pick] > 0)
        if p.beta:
            c = doubles(picked(part.c_in, *here))
            before, limit = c * p.beta, self.rounding.limit
            against = plus & (before < -limit) | minus & (before > limit)
            certain = ~xp.isfinite(c) | (not math.isfinite(p.beta))  # no overflow
            unsure |= xp.isnan(before) | certain & against
            may |= against
        fair = xp.where(
            unsure, xp.isnan(got),
            plus & (got == xp.inf) | minus & (got == -xp.inf) | may & xp.isnan(got),
        )  # fmt: skip
        if part.mixes:
            fair |= ~xp.isfinite(got)
        self._all(fair, rows, cols, "Inf or NaN by its terms")

    def _most(self, rows, cols):
        """What positive terms, and negative ones, come to at most, by the largest elements of their
        row and column; before alpha too."""
        xp, p = self.xp, self.part.problem
        (up, down), (right, left) = (
            (self._there(x[0][at]), self._there(x[1][at]))
            for x, at in ((self.row_ends, rows), (self.col_ends, cols))
        )
        up, down = up[:, None], down[:, None]
        high, low = xp.maximum(up * right, down * left), xp.maximum(up * left, down * right)
        if p.alpha < 0:
            high, low = low, high
        return (x * self.by_alpha * p.k for x in (high, low))

    def _rounded_to_infinity(self, rows, cols):
        """Whether an operand of each element's row or column is Inf where operands are rounded."""
        most = self.rounding.operand_limit
        down, across = self._there(self.row_top[rows]), self._there(self.col_top[cols])
        return (down >= most)[:, None] | (across >= most)

    def _below(self, rows, cols):
        """What sums may lose of operands below the normal numbers, by the largest elements."""
        down, across = self._there(self.row_top[rows]), self._there(self.col_top[cols])
        lost = self.rounding.below * self.part.problem.k * (down[:, None] + across)
        return self._scaled(lost, rows, cols)

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

    def _parts_overflow(self, rows, cols):
        """Where Inf mixes: whether what parts make first may be Inf, sums of two or alpha times
        these."""
        xp = self.xp
        down, across = self._there(self.row_top[rows])[:, None], self._there(self.col_top[cols])
        most = xp.maximum(down, across) * self.by_alpha
        for x in self._most(rows, cols):
            most = xp.maximum(most, x)
        return 4 * most > self.rounding.limit  # parts of alpha are up to twice its factor

    def _possible(self, c, before, bad, rows) -> None:
        """Whether each Inf or NaN is one that the largest elements of its row and column allow."""
        xp, p, r = self.xp, self.part.problem, self.rounding
        if math.isinf(p.alpha):  # which leaves nothing finite
            return
        high, low = self._most(rows, self.part.cols)
        fair = ~xp.isfinite(c) & (before is not None and ~xp.isfinite(before))  # looked at
        if before is not None:
            added = self._size(before, rows, self.part.cols)
            added = self._scaled(added, rows, self.part.cols, -1)
            high, low = high + added, low + added
        fair |= xp.isnan(c) & (high > 0.999 * r.limit) & (low > 0.999 * r.limit)
        fair |= (c == xp.inf) & (high > 0.999 * r.out_limit)
        fair |= (c == -xp.inf) & (low > 0.999 * r.out_limit)
        fair |= ~xp.isfinite(c) & self._rounded_to_infinity(rows, self.part.cols)
        if self.part.mixes:
            fair |= ~xp.isfinite(c) & self._parts_overflow(rows, self.part.cols)
        self._all(fair | ~bad, rows, self.part.cols, "finite, or Inf of the other sign")

    def _fair(self, got, before, reference, bound, product, size, rows, cols):
        """Whether each element that is not finite, or must not be, is one that some order of
        summation makes.

        A partial sum lies between minus the sum of the negative terms and the sum of the positive
        ones: Inf of a sign is fair where that or the result may pass the largest number, NaN where
        both may. Terms are products, which may pass it before alpha too, and beta C, alone as well.
        An alpha of Inf makes Inf of the sum's sign, and NaN where it may be 0.
        """
        xp, p, r = self.xp, self.part.problem, self.rounding
        limit, out_limit, tiny = (
            self._scaled(xp.float64(x), rows, cols) for x in (0.999 * r.limit, r.out_limit, r.tiny)
        )
        product = math.copysign(1, p.alpha) * product
        # The smaller of both is lost where the terms of the other sign are 2^52 times as large.
        lost = [p.k * 2.0**-52 * (x > 0.999 * r.limit) for x in self._most(rows, cols)]
        high = (xp.maximum(size + product, 0) + size * lost[0]) / 2
        low = (xp.maximum(size - product, 0) + size * lost[1]) / 2
        first = self._scaled(xp.float64(0.999 * r.limit), rows, cols, by=self.alpha_exponent)
        plus, minus = high > first, low > first
        if math.isinf(p.alpha):
            unsure = xp.where(size > 0, r.worst(size, p.k) + tiny + self._below(rows, cols), 0)
            none = plus & minus | (abs(product) <= unsure)
            plus, minus = plus | (product > -unsure), minus | (product < unsure)
            left = xp.zeros(got.shape, bool)
        else:
            high, low = abs(self.alpha) * high, abs(self.alpha) * low
            plus, minus = plus | (high > limit), minus | (low > limit)
            none, left = plus & minus, xp.ones(got.shape, bool)
        if before is not None:
            finite = xp.isfinite(before)
            more, less = self._signs_of_added(before, rows, cols)
            up, down = ((x > limit) | xp.isinf(x) for x in (more, less))
            none |= xp.isnan(before) | up & (minus | down) | down & plus
            none |= left & (high + more > limit) & (low + less > limit)
            plus |= left & (up | (high + more > limit))
            minus |= left & (down | (low + less > limit))
            plus &= finite | (before == xp.inf)
            minus &= finite | (before == -xp.inf)
            left &= finite
        plus |= left & (reference + bound > out_limit)
        minus |= left & (reference - bound < -out_limit)
        fair = xp.isnan(got) & none | (got == xp.inf) & plus | (got == -xp.inf) & minus
        fair |= ~xp.isfinite(got) & self._rounded_to_infinity(rows, cols)
        if self.part.mixes:
            fair |= ~xp.isfinite(got) & (~left | self._parts_overflow(rows, cols))
        return fair

    def _signs_of_added(self, before, rows, cols):
        """What the positive terms of beta C, `before`, come to, and the negative ones."""
        xp = self.xp
        if self.part.c_size is None:
            return xp.maximum(before, 0), xp.maximum(-before, 0)
        size = self._size(before, rows, cols)  # of two terms; the smaller may be lost in `before`
        return (
            xp.where(xp.isfinite(before), x / 2 + 2.0**-50 * size, size)
            for x in (size + before, size - before)
        )

    def _all(self, right, rows, cols, what: str) -> None:
        if not some(~right):
            return
        i, j = np.argwhere(~on_host(right))[0]
        at = int(indices(rows)[i]), int(indices(cols)[j])
        part = self.part
        got = float(part.result[at[0] - part.top, at[1] - part.left])
        self.where_infinite = f"{part.place(*at)} is {got:.9g}, which must be {what}"
        self.worst = math.inf


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
