"""C of floats against float64, within bounds that its own partial sums give.

Rows of A and columns of B are scaled by powers of two to a largest magnitude near 1, and C with
them, so that a block has no rows or columns that drown the others; all below is in that scale.
"""

from __future__ import annotations

import math

import numpy as np

from . import rounding
from .sampling import NARROWEST, Found, Group, Part, Samples, doubles, spans

LOOKS = 16  # sums, of the worst first, whose elements are looked at one by one
OFFENDERS = 64  # elements that are held against what their own products allow
HEIGHT = 2048  # rows of a rectangle at a time
EXACT_FLOPS = 2**37  # spent on elements that no sum can hold, beside Inf and NaN


class Floats:
    def __init__(self, part: Part, group: Group, samples: Samples, growth: float):
        self.part, self.group, self.samples, self.xp = part, group, samples, part.xp
        self.rounding = rounding.of(part.problem, part.result.dtype, growth)
        self.offenders: list[tuple] = []
        self.worst, self.uncovered = 0.0, ""

    def check(self, full: bool) -> Found:
        part, samples = self.part, self.samples
        p = part.problem
        with np.errstate(all="ignore"):
            self._scale()
            self._infinite()
            self.deviations = rounding.deviations(p.m * p.n if full else 64 * (p.m + p.n))
            if full:
                step = max(1, part.chunk // max(1, part.n))
                for rows in spans(part.m, step):
                    self._elements(_range(rows), np.arange(part.n))
                how = "every element against float64"
            else:
                self._blocks()
                self._elements(samples.rows, np.arange(part.n))
                self._elements(np.arange(part.m), samples.cols)
                how = self._how()
            worst, where = self._judged()
        return Found(worst, how + self.uncovered, self._power(full), where)

    # --- scales ---------------------------------------------------------------------------

    def _scale(self) -> None:
        part = self.part
        self.row_nan, self.row_inf, self.row_top = self._extremes(part.a, part.m, part.k)
        b = part.b.T
        self.col_nan, self.col_inf, self.col_top = self._extremes(b, part.n, part.k)
        self.dead_rows = self._there(self.row_nan | self.row_inf)
        self.dead_cols = self._there(self.col_nan | self.col_inf)
        self.infinite = any(x.any() for x in (self.row_nan, self.row_inf, self.col_nan, self.col_inf))
        self.row_scale, self.col_scale = (
            self._there(np.ldexp(1.0, -np.clip(np.frexp(top)[1], -1000, 1000)))
            for top in (self.row_top, self.col_top)
        )
        self.right, self.left = (self._there(x) for x in (self.samples.right, self.samples.left))

    def _extremes(self, matrix, count: int, k: int):
        """Of each row: whether it has a NaN, an Inf and no NaN; its largest finite magnitude."""
        found = np.zeros((3, count))
        if not self.part.reads_product or not k:
            return found[0] > 0, found[1] > 0, found[2]
        xp = self.xp
        for rows, columns in _tiles(count, k, 2 * self.part.chunk):
            x = matrix[rows, columns]
            x = x if x.dtype.name in ("float32", "float64") else x.astype("f4")
            top = xp.maximum(abs(x.max(axis=1)), abs(x.min(axis=1))).astype("f8")
            if not bool(xp.isfinite(top).all()):
                finite = xp.where(xp.isfinite(x), abs(x), 0).max(axis=1)
                top = xp.stack([xp.isnan(x).any(axis=1), xp.isinf(x).any(axis=1), finite])
            else:
                top = xp.stack([xp.zeros_like(top), xp.zeros_like(top), top])
            found[:, rows] = np.maximum(found[:, rows], _here(top))
        nan, inf, top = self.group.largest(found)
        return nan > 0, (inf > 0) & (nan == 0), top

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
        here = _moved(rows, -part.top), _moved(cols, -part.left)
        scales = self.row_scale[rows][:, None], self.col_scale[cols]
        got = _picked(part.result, *here)
        got = doubles(got) * scales[0] * scales[1]
        if not part.problem.beta:
            return got, None
        before = doubles(_picked(part.c_in, *here)) * part.problem.beta
        return got, before * scales[0] * scales[1]

    # --- sums over blocks -----------------------------------------------------------------

    def _blocks(self) -> None:
        """Every element of C in two sums: with its row's in a block of columns, and with its
        column's in a block of rows."""
        xp, part, s = self.xp, self.part, self.samples
        m, n, k = part.m, part.n, part.k
        ua, ua2 = xp.zeros((len(s.row_blocks), k)), xp.zeros((len(s.row_blocks), k))
        bv, bv2 = xp.zeros((k, len(s.col_blocks))), xp.zeros((k, len(s.col_blocks)))
        right, right2 = xp.zeros((m, len(s.col_blocks))), xp.zeros((m, len(s.col_blocks)))
        left, left2 = xp.zeros((len(s.row_blocks), n)), xp.zeros((len(s.row_blocks), n))
        for r, block in enumerate(s.row_blocks):
            for rows in _within(block, part.chunk // max(1, k)):
                x, weights = self._a(rows), self.left[rows]
                ua[r] += weights @ x
                x *= x
                ua2[r] += (weights * weights) @ x
        for ks in spans(k, part.chunk // n):
            y = self._b(ks)
            for c, block in enumerate(s.col_blocks):
                bv[ks, c] = y[:, block] @ self.right[block]
            left += ua[:, ks] @ y
            y *= y
            for c, block in enumerate(s.col_blocks):
                bv2[ks, c] = y[:, block] @ self.right[block] ** 2
            left2 += ua2[:, ks] @ y
        for rows in spans(m, part.chunk // max(1, k)):
            x = self._a(rows)
            right[rows] = x @ bv
            x *= x
            right2[rows] = x @ bv2
        total = self.group.sum
        self._hold(total(right), total(right2), total(left), total(left2))

    def _hold(self, right, right2, left, left2) -> None:
        xp, part, s = self.xp, self.part, self.samples
        got_right, noise_right = xp.zeros_like(right), xp.zeros_like(right)
        got_left, noise_left = xp.zeros_like(left), xp.zeros_like(left)
        mixed_right = np.zeros(right.shape, bool)
        mixed_left = np.zeros(left.shape, bool)
        blocks = [b for b in enumerate(s.col_blocks) if part.left <= b[1].start < part.cols.stop]
        mine = [b for b in enumerate(s.row_blocks) if part.top <= b[1].start < part.rows.stop]
        width = max([b.stop - b.start for b in (*s.row_blocks, *s.col_blocks)])
        of_products, of_sums, of_c, of_before = self._variances(width)
        for r, block in mine:
            for rows in _within(block, part.chunk // max(1, part.width)):
                c, before = self._c(rows, part.cols)
                self._without_infinite(c, before, r, rows, mixed_right, mixed_left)
                product = c if before is None else c - before
                noise = product * product * of_sums
                if of_c:
                    noise += c * c * of_c
                if before is not None:
                    noise += before * before * of_before
                weights = self.left[rows]
                got_left[r, part.cols] += weights @ product
                noise_left[r, part.cols] += (weights * weights) @ noise
                for i, columns in blocks:
                    inner = _moved(columns, -part.left)
                    got_right[rows, i] = product[:, inner] @ self.right[columns]
                    noise_right[rows, i] = noise[:, inner] @ self.right[columns] ** 2
        alpha = part.problem.alpha
        tiny_right = xp.stack([
            self.row_scale * (self.rounding.tiny * (abs(self.right[b]) * self.col_scale[b]).sum())
            for b in s.col_blocks
        ], axis=1)  # fmt: skip
        tiny_left = xp.stack([
            self.col_scale * (self.rounding.tiny * (abs(self.left[b]) * self.row_scale[b]).sum())
            for b in s.row_blocks
        ])  # fmt: skip
        narrow = {b.stop - b.start for b in (*s.row_blocks, *s.col_blocks)}
        count = self.deviations * rounding.of_block(max(NARROWEST, min(narrow)))
        sides = (
            (got_right, right, right2, noise_right, tiny_right, mixed_right, [i for i, _ in blocks], 1),
            (got_left, left, left2, noise_left, tiny_left, mixed_left, [i for i, _ in mine], 0),
        )
        alarms = []
        for got, product, squares, noise, tiny, mixed, own, axis in sides:
            variance = noise + alpha * alpha * of_products * squares
            ratio = abs(got - alpha * product) / (count * xp.sqrt(variance / 3) + tiny)
            ratio = _positive(xp, ratio)
            ratio[self._there(mixed)] = 0
            if axis:
                ratio = ratio[part.rows][:, own]
            else:
                ratio = ratio[own][:, part.cols]
            alarms.append(self._worst_sums(ratio, own, axis))
        self._look(*alarms)
        self._hold_mixed(mixed_right)

    def _variances(self, width: int):
        """Three times the variance of an element's error, per square of: a product of elements,
        the sum of products, C, beta C before."""
        r, k = self.rounding, self.part.problem.k
        unit, cut = (r.growth * r.unit) ** 2, 3 * (r.cut * k) ** 2
        reference = 2.0**-106 * width
        return (
            unit * k / 2 + cut / 2 + r.operands**2 + reference,
            unit * k / 3 + cut / 3 + 2 * r.last**2 + reference,
            r.out**2 + r.last**2,
            2 * r.last**2,
        )

    def _without_infinite(self, c, before, r, rows, mixed_right, mixed_left) -> None:
        """Zeros in place of what no sum can hold; marks the sums that it is missing from."""
        xp, part = self.xp, self.part
        bad = ~xp.isfinite(c)
        if before is not None:
            bad |= ~xp.isfinite(before)
        bad[self.dead_rows[rows]] = False
        bad[:, self.dead_cols[part.cols]] = False
        for x in (c, before):
            if x is not None:
                x[bad] = 0
                x[self.dead_rows[rows]] = 0
                x[:, self.dead_cols[part.cols]] = 0
        if bool(bad.any()):
            bad = _here(bad)
            mixed_left[r, part.cols] |= bad.any(axis=0)
            for i, columns in enumerate(self.samples.col_blocks):
                inner = _moved(columns, -part.left)
                if 0 <= inner.start < part.width:
                    mixed_right[rows, i] |= bad[:, inner].any(axis=1)

    def _worst_sums(self, ratio, own, axis: int) -> list[tuple]:
        """The worst alarms of one side: (ratio, row or block of rows, block or column)."""
        flat = _here(ratio.ravel())
        if not flat.size:
            return []
        highest = float(flat.max())
        if highest <= 1:
            self.worst = max(self.worst, highest)
            return []
        order = np.argsort(flat)[::-1][:LOOKS]
        found = []
        for at in order[flat[order] > 1]:
            i, j = divmod(int(at), ratio.shape[1])
            where = (i + self.part.top, own[j]) if axis else (own[i], j + self.part.left)
            found.append((float(flat[at]), *where))
        return found

    def _look(self, right: list[tuple], left: list[tuple]) -> None:
        """Element by element at sums that are beyond their bound: which element is wrong, or
        whether the partial sums of these data are larger than was assumed."""
        s = self.samples
        for alarms, rowwise in ((right, True), (left, False)):
            worst = sorted(self.group.gather(alarms), reverse=True)[:LOOKS]
            for _ratio, i, j in worst:
                if rowwise:
                    rows, cols = np.array([i]), _range(s.col_blocks[j])
                    self._elements(rows, cols, weights=self.right[cols])
                else:
                    rows, cols = _range(s.row_blocks[i]), np.array([j])
                    self._elements(rows, cols, weights=self.left[rows])

    def _hold_mixed(self, mixed: np.ndarray) -> None:
        """Elements of the rows of blocks that have Inf or NaN where A and B have none."""
        part, s = self.part, self.samples
        found = np.argwhere(mixed)
        found = np.array(self.group.gather(found.tolist()), int).reshape(-1, 2)
        if not len(found):
            return
        width = max(b.stop - b.start for b in s.col_blocks)
        most = int(EXACT_FLOPS // (6 * width * part.problem.k)) + 1
        if len(found) > most:
            share = most / len(found)
            found = found[s.random.permutation(len(found))[:most]]
            self.uncovered = f", {share:.0%} of the sums that Inf or NaN spoil"
        for i, block in enumerate(s.col_blocks):
            rows = np.unique(found[found[:, 1] == i, 0])
            if len(rows):
                self._elements(rows, _range(block))

    # --- elements -------------------------------------------------------------------------

    def _elements(self, rows: np.ndarray, cols: np.ndarray, weights=None) -> None:
        """Holds each element of these rows and columns of the block."""
        if not (len(rows) and len(cols)):
            return
        for at in spans(len(rows), max(HEIGHT, self.part.chunk // len(cols))):
            of_rows = weights is not None and len(rows) > 1
            self._rectangle(rows[at], cols, weights[at] if of_rows else weights)

    def _rectangle(self, rows, cols, weights) -> None:
        xp, part = self.xp, self.part
        product, squares, walk, square, more = (
            xp.zeros((len(rows), len(cols))) for _ in range(5)
        )  # fmt: skip
        step = min(
            max(1, -(-part.k // rounding.PARTIAL_SUMS)),
            max(1, part.chunk // max(len(rows), len(cols))),
        )
        across, down = _compact(rows), _compact(cols)
        for ks in spans(part.k if part.reads_product else 0, step):
            x, y = self._a(across, ks), self._b(ks, down)
            product += xp.matmul(x, y, out=more)
            walk += xp.multiply(product, product, out=square)
            x *= x
            y *= y
            squares += xp.matmul(x, y, out=more)
        del square, more
        product, squares, walk = (self.group.sum(x) for x in (product, squares, walk))
        sums = product, squares, walk, step
        if weights is not None:
            self._judge(rows, cols, weights, *sums)
            return
        for at in spans(len(rows), part.chunk // 16 // len(cols)):
            self._judge(rows[at], cols, None, *(x[at] for x in sums[:3]), step)

    def _judge(self, rows, cols, weights, product, squares, walk, step: int) -> None:
        """Holds elements against their bounds. `walk` has the squares of the partial sums, one
        in `step` places along k."""
        xp, part = self.xp, self.part
        own_rows, own_cols = part.own(rows, part.rows), part.own(cols, part.cols)
        own = bool(own_rows.any() and own_cols.any())
        ratio = None
        if own:
            if not (own_rows.all() and own_cols.all()):
                pick = np.ix_(own_rows, own_cols)
                product, squares, walk = product[pick], squares[pick], walk[pick]
            rows_here, cols_here = _compact(rows[own_rows]), _compact(cols[own_cols])
            got, before = self._c(rows_here, cols_here)
            walk = step * (walk + squares / 2)
            reference, bound = self._bound(product, squares, walk, before, rows_here, cols_here)
            error = abs(got - reference)
            ratio = _positive(xp, error / bound)
            ratio[error == 0] = 0
            strange = ~xp.isfinite(got)
            if before is not None:
                strange |= ~xp.isfinite(before)
        some = bool(own and strange.any())
        if float(self.group.largest(np.array([float(some)]))[0]):
            size = self._magnitudes(rows, cols)
            if some:
                size = size[np.ix_(own_rows, own_cols)]
                fair = self._fair(got, before, reference, bound, product, size, rows_here, cols_here)
                ratio = xp.where(strange, xp.where(fair, 0, xp.inf), ratio)
        if own:
            if self.infinite:
                ratio[self.dead_rows[rows_here]] = 0
                ratio[:, self.dead_cols[cols_here]] = 0
            if weights is not None:
                pick = own_rows if len(rows) > 1 else own_cols
                self._together(ratio, got - reference, bound, weights[pick])
            self._note(ratio, got, before, bound, rows[own_rows], cols[own_cols])

    def _bound(self, product, squares, walk, before, rows, cols):
        xp, p, r = self.xp, self.part.problem, self.rounding
        reference = p.alpha * product
        bound = r.sums(walk, squares, self.deviations)
        if r.cut:
            bound += r.lost(walk, p.k)
        bound *= abs(p.alpha)
        if before is not None:
            reference = reference + before
        if r.last:
            bound += r.last * (2 * abs(reference) + abs(p.alpha * product))
            if before is not None:
                bound += r.last * abs(before)
        if r.out:
            bound += r.out * (abs(reference) + bound)
        bound += (r.tiny * self.row_scale[rows])[:, None] * self.col_scale[cols]
        return reference, bound

    def _magnitudes(self, rows, cols):
        """|A||B| of these rows and columns."""
        part = self.part
        size = self.xp.zeros((len(rows), len(cols)))
        if part.reads_product:
            for ks in spans(part.k, part.chunk // max(len(rows), len(cols))):
                x, y = self._a(_compact(rows), ks), self._b(ks, _compact(cols))
                size += abs(x) @ abs(y)
        return self.group.sum(size)

    def _fair(self, got, before, reference, bound, product, size, rows, cols):
        """Whether each Inf or NaN is one that some order of summation makes.

        A partial sum lies between minus the sum of the negative products and the sum of the
        positive ones: Inf of a sign is fair where that or the result may pass the largest number,
        NaN where partial sums of both signs may. C before that is not finite decides alone.
        """
        xp, p, r = self.xp, self.part.problem, self.rounding
        scale = self.row_scale[rows][:, None] * self.col_scale[cols]
        limit, out_limit = 0.999 * r.limit * scale, r.out_limit * scale
        early = max(1.0, 1 / abs(p.alpha)) if p.alpha else 1.0  # the sum, before alpha
        high, low = (
            early * (abs(p.alpha) * size + sign * p.alpha * product) / 2 for sign in (1, -1)
        )
        over, under = high > limit, low > limit
        if before is None:
            finite = xp.ones(got.shape, bool)
            plus, minus = over, under
        else:
            finite = xp.isfinite(before)
            plus = (high + xp.maximum(before, 0) > limit) & finite | (before == xp.inf)
            minus = (low - xp.minimum(before, 0) > limit) & finite | (before == -xp.inf)
        plus = plus | (reference + bound > out_limit) & finite
        minus = minus | (reference - bound < -out_limit) & finite
        both = over & under & finite
        if before is not None:
            both |= xp.isnan(before)
            both |= (before == xp.inf) & under | (before == -xp.inf) & over
            plus, minus = plus & ~xp.isnan(before), minus & ~xp.isnan(before)
        return xp.isnan(got) & both | (got == xp.inf) & plus | (got == -xp.inf) & minus

    def _together(self, ratio, error, bound, weights) -> None:
        """Of a sum that is beyond its bound: whether its elements' own bounds allow it."""
        xp = self.xp
        if error.shape[0] > 1:
            weights = weights[:, None]
        fine = xp.isfinite(error)
        total = abs((weights * xp.where(fine, error, 0)).sum())
        allowed = xp.sqrt(((weights * xp.where(fine, bound, 0)) ** 2).sum())
        share = float(total / allowed) if float(allowed) else 0.0
        if share > 1:
            at = divmod(int(ratio.argmax()), ratio.shape[1])
            ratio[at] = max(float(ratio[at]), share)

    def _note(self, ratio, got, before, bound, rows, cols) -> None:
        """Remembers the worst element, and those beyond their bounds."""
        worst = float(ratio.max())
        if worst <= 1:
            self.worst = max(self.worst, worst)
            return
        inside = self.xp.where(ratio <= 1, ratio, 0)
        self.worst = max(self.worst, float(inside.max()))
        by_row, at = _here(ratio.max(axis=1)), _here(ratio.argmax(axis=1))
        order = np.argsort(by_row)[::-1][:LOOKS]
        for i in order[by_row[order] > 1]:
            j = int(at[i])
            scale = float(self.row_scale[int(rows[i])]) * float(self.col_scale[int(cols[j])])
            values = [float(x[i, j]) / scale if x is not None else 0.0 for x in (got, before, bound)]
            self.offenders.append((float(by_row[i]), int(rows[i]), int(cols[j]), *values))

    def _judged(self) -> tuple[float, str]:
        """The worst error of all, after a second look at what is beyond its bound."""
        part, p = self.part, self.part.problem
        offenders = sorted(set(self.group.gather(self.offenders)), reverse=True)[:OFFENDERS]
        worst, where = self.worst, ""
        for ratio, i, j, got, before, bound in offenders:
            a, b = (
                self.group.joined(_here(doubles(x)) if part.reads_product else np.zeros(1))
                for x in (part.a[i], part.b[:, j])
            )
            reference, allowed = rounding.own_bound(self.rounding, p, a, b, before)
            ratio = ratio * bound / allowed if math.isfinite(ratio) else ratio
            if not ratio <= 1 and not where:
                at = f"C[{i + part.origin[0]}, {j + part.origin[1]}]"
                where = f"{at} is {got:.9g}, which is {reference:.9g} to within {allowed:.2g}"
            worst = max(worst, ratio)
        return worst, where or self.where_infinite

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
            at = _moved(i, part.top)
            must = self._there(self.row_nan[at])[:, None] | self._there(self.col_nan[part.cols])
            self._all(~must | xp.isnan(got), at, part.cols, "NaN")
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
            self.uncovered = f", {share:.0%} of the rows where A or B is Inf"
        for at in spans(len(rows), part.chunk // len(cols)):
            self._signs_of(rows[at], cols)

    def _signs_of(self, rows, cols) -> None:
        xp, part, p = self.xp, self.part, self.part.problem
        nan, any_sign, net = (xp.zeros((len(rows), len(cols))) for _ in range(3))
        for ks in spans(part.k, part.chunk // max(len(rows), len(cols))):
            x, y = doubles(part.a[rows, ks]), doubles(part.b[ks, cols])
            x_inf, y_inf = xp.isinf(x).astype("f8"), xp.isinf(y).astype("f8")
            used = _here((x_inf.any(axis=0)) | (y_inf.any(axis=1)))
            if not used.any():
                continue
            x, y, x_inf, y_inf = x[:, used], y[used], x_inf[:, used], y_inf[used]
            x_sign, y_sign = xp.sign(x), xp.sign(y)
            nan += x_inf @ (y_sign == 0) + (x_sign == 0) @ y_inf
            any_sign += x_inf @ abs(y_sign) + abs(x_sign) @ y_inf - x_inf @ y_inf
            net += (x_inf * x_sign) @ y_sign + x_sign @ (y_inf * y_sign)
            net -= (x_inf * x_sign) @ (y_inf * y_sign)
        nan, any_sign, net = (self.group.sum(x) for x in (nan, any_sign, net))
        own_rows, own_cols = part.own(rows, part.rows), part.own(cols, part.cols)
        if not (own_rows.any() and own_cols.any()):
            return
        pick = np.ix_(own_rows, own_cols)
        nan, any_sign, net = nan[pick], any_sign[pick], net[pick] * math.copysign(1, p.alpha)
        rows, cols = rows[own_rows], cols[own_cols]
        here = rows - part.top, cols - part.left
        got = doubles(_picked(part.result, *here))
        plus, minus = net == any_sign, net == -any_sign
        unsure = (nan > 0) | ~(plus | minus)
        # The finite terms alone may pass the largest number, and meet Inf of the other sign.
        size = self._there(self.row_top[rows])[:, None] * self._there(self.col_top[cols])
        may = size * (p.k * max(1.0, abs(p.alpha))) > self.rounding.limit
        if p.beta:
            before = doubles(_picked(part.c_in, *here)) * p.beta
            unsure |= xp.isnan(before)
            unsure |= plus & (before == -xp.inf) | minus & (before == xp.inf)
        fair = xp.where(
            unsure, xp.isnan(got),
            plus & (got == xp.inf) | minus & (got == -xp.inf) | may & xp.isnan(got),
        )  # fmt: skip
        self._all(fair, rows, cols, "Inf or NaN by its terms")

    def _all(self, right, rows, cols, what: str) -> None:
        if bool(right.all()):
            return
        i, j = np.argwhere(~_here(right))[0]
        at = int(_range(rows)[i]), int(_range(cols)[j])
        part = self.part
        got = float(part.result[at[0] - part.top, at[1] - part.left])
        place = f"C[{at[0] + part.origin[0]}, {at[1] + part.origin[1]}]"
        self.where_infinite = f"{place} is {got:.9g}, which must be {what}"
        self.worst = math.inf

    # --- what is said ---------------------------------------------------------------------

    def _how(self) -> str:
        s = self.samples
        widths = sorted({max(b.stop - b.start for b in x) for x in (s.row_blocks, s.col_blocks)})
        return (
            f"{len(s.rows)} rows, {len(s.cols)} columns, and random sums over blocks of "
            f"{' or '.join(map(str, widths))}"
        )

    def _power(self, full: bool) -> str:
        """In multiples of the rounding noise: the standard deviation of an element's error when
        its products are summed one after the other."""
        p, s = self.part.problem, self.samples
        element = math.ceil(math.sqrt(3) * self.deviations + 6)
        fails = f"a right product fails with probability below {rounding.ALARMS:.0e}"
        if full:
            return f"finds any element wrong by {element} times its rounding noise; {fails}"
        width = max(b.stop - b.start for b in (*s.row_blocks, *s.col_blocks))
        block = (self.deviations * rounding.of_block(width) + 6) * math.sqrt(7 / 3 * width)
        share = 1 - (1 - len(s.rows) / p.m) * (1 - len(s.cols) / p.n)
        return (
            f"finds with probability above 1 - 1e-6, anywhere: NaN, Inf, an element wrong by "
            f"{math.ceil(block)} times its rounding noise, a 16 x 16 tile wrong by "
            f"{math.ceil(block / 5)} times in each element; in {share:.2g} of C: an element wrong "
            f"by {element} times; {fails}"
        )


def _here(x) -> np.ndarray:
    return x if isinstance(x, np.ndarray) else x.get()


def _positive(xp, ratio):
    """Fails on NaN."""
    return xp.where(xp.isnan(ratio), xp.inf, ratio)


def _moved(index, by: int):
    return slice(index.start + by, index.stop + by) if isinstance(index, slice) else index + by


def _range(index) -> np.ndarray:
    return np.arange(index.start, index.stop) if isinstance(index, slice) else index


def _compact(index: np.ndarray):
    """A slice in place of an index whose numbers follow one another: no copy is made."""
    if len(index) and index[-1] - index[0] == len(index) - 1:
        return slice(int(index[0]), int(index[-1]) + 1)
    return index


def _picked(matrix, rows, cols):
    if isinstance(rows, slice) or isinstance(cols, slice):
        return matrix[rows, cols]
    return matrix[rows][:, cols]


def _within(block: slice, step: int):
    return [_moved(s, block.start) for s in spans(block.stop - block.start, step)]


def _tiles(rows: int, cols: int, size: int):
    """Tiles of about so many elements, as wide as may be."""
    for r in spans(rows, max(256, size // max(1, cols))):
        for c in spans(cols, size // (r.stop - r.start)):
            yield r, c
