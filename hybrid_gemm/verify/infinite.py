"""What Inf and NaN in A and B make of C, and where C may be Inf or NaN by itself."""

from __future__ import annotations

import math

import numpy as np

from .sampling import doubles, some, spans, square_tiles
from .scaled import Scaled, indices, moved, on_host, picked

EXACT_FLOPS = 2**37  # spent on elements that no sum can hold, beside Inf and NaN


class Infinite(Scaled):
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
