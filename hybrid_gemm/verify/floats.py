"""C of floats against float64, within bounds that its own partial sums give."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from . import looks, rounding, sampling
from .sampling import CLASSES, NARROWEST, Found, Group, Part, Samples, doubles, some, spans
from .scaled import EXACT_FLOPS, LEAST, Scaled, compact, indices, moved, on_host, shared, within

LARGE = 2.0**500  # of C, scaled: sums of squares may be beyond float64


class Floats(Scaled):
    def __init__(self, part: Part, group: Group, samples: Samples, growth: float, spread: float):
        super().__init__(part, group, samples, growth, spread)
        self.offenders: list[tuple] = []

    def check(self, full: bool) -> Found:
        part, samples = self.part, self.samples
        p = part.problem
        with np.errstate(all="ignore"):
            self._scale()
            if not full:
                random = samples.random
                self.left, self.right = (
                    self._there(sampling.weights(random, x)) for x in (part.m, part.n)
                )
            self._infinite()
            self.deviations = rounding.deviations(p.m * p.n if full else 64 * (p.m + p.n))
            if full:
                self._elements(np.arange(part.m), np.arange(part.n))
                how = "every element against float64"
            else:
                self._blocks()
                self._elements(samples.rows, np.arange(part.n))
                self._elements(np.arange(part.m), samples.cols)
                how = self._how()
            worst, where = self._judged()
        return Found(worst, how + self.uncovered, self._power(full), where)

    # --- sums over blocks -----------------------------------------------------------------

    def _blocks(self) -> None:
        """Every element of C in two sums: with its row's in a block of columns, and with its
        column's in a block of rows."""
        xp, part, s = self.xp, self.part, self.samples
        right, right2 = (xp.zeros((part.m, len(s.col_blocks))) for _ in range(2))
        left, left2 = (xp.zeros((len(s.row_blocks), part.n)) for _ in range(2))
        for ks in spans(part.k, part.side):  # each element of k has up to 2048 sums
            self._add_sums(ks, (right, right2), (left, left2))
        right, right2 = self.group.sum(right), self.group.sum(right2)
        left, left2 = self.group.sum(left), self.group.sum(left2)
        self._hold(right, right2, left, left2)

    def _add_sums(self, ks: slice, right: tuple, left: tuple) -> None:
        """Adds the shares of some of k to the weighted sums of the product and of squares."""
        xp, part, s = self.xp, self.part, self.samples
        count = ks.stop - ks.start
        ua, ua2 = (xp.zeros((CLASSES, len(s.row_blocks), count)) for _ in range(2))
        bv, bv2 = (xp.zeros((CLASSES, count, len(s.col_blocks))) for _ in range(2))
        for r, block in enumerate(s.row_blocks):
            for rows in within(block, part.chunk // count):
                x, weights = self._a(rows, ks), self.left[:, rows]
                ua[:, r] += weights @ x
                x *= x
                ua2[:, r] += (weights * weights) @ x
        ways = (self.right, bv, ua, left[0]), (self.right * self.right, bv2, ua2, left[1])
        for cols in spans(part.n, part.chunk // count):
            y, classes = self._b(ks, cols), _classes(cols)
            for v, sums, across, total in ways:
                if sums is bv2:
                    y *= y
                for c, mine in shared(s.col_blocks, cols):
                    of_block = y[:, moved(mine, -cols.start)]
                    sums[:, :, c] += v[:, mine] @ of_block.T
                for q, own in enumerate(classes):
                    total[:, cols][:, own] += across[q] @ y[:, own]
        for rows in spans(part.m, part.chunk // count):
            x = self._a(rows, ks)
            for q, own in enumerate(_classes(rows)):
                mine = x[own]
                right[0][rows][own] += mine @ bv[q]
                mine *= mine
                right[1][rows][own] += mine @ bv2[q]

    def _hold(self, right, right2, left, left2) -> None:
        """Holds the weighted sums of C against those of the product."""
        xp, part, s = self.xp, self.part, self.samples
        blocks = [b for b in enumerate(s.col_blocks) if part.left <= b[1].start < part.cols.stop]
        mine = [b for b in enumerate(s.row_blocks) if part.top <= b[1].start < part.rows.stop]
        widths = {b.stop - b.start for b in (*s.row_blocks, *s.col_blocks)}
        of_products, *of_c = self.rounding.variances(part.problem.k, max(widths))
        of_right, of_left = self._sums_of_c(mine, blocks, right, left, of_c)
        alpha = self.alpha
        more_right, more_left = self._besides()
        count = self.deviations * rounding.of_block(max(NARROWEST, min(widths)))

        def ratios(sums, product, squares, besides):
            """In place: these are the largest arrays that a check keeps."""
            got, noise, mixed = sums
            product *= alpha
            got -= product
            squares *= alpha * alpha * of_products
            squares += noise
            squares /= 3
            bound = xp.sqrt(squares, out=squares)
            bound *= count
            for of_row, of_col in besides:
                bound += of_row * of_col
            bound += LEAST
            ratio = xp.abs(got, out=got)
            ratio /= bound
            ratio[xp.isnan(ratio)] = xp.inf
            ratio[self._there(mixed)] = 0
            return ratio

        ratio = ratios(of_right, right, right2, more_right)
        there = [i for i, _block in blocks]
        of_rows = range(part.top, part.rows.stop)
        alarms = self._worst_sums(ratio[part.rows][:, there], of_rows, there)
        ratio = ratios(of_left, left, left2, more_left)
        there = [i for i, _block in mine]
        of_cols = range(part.left, part.cols.stop)
        more = self._worst_sums(ratio[there][:, part.cols], there, of_cols)
        self._look(alarms, more)
        self._hold_mixed(of_right[2])

    def _sums_of_c(self, row_blocks, col_blocks, like_right, like_left, variances):
        """The weighted sums of C in these numbered blocks, by rows and by columns, C being read
        once: for both the sums, the noise that C's rounding leaves in them (`variances` are those
        of sums, C and C before), and where they miss an Inf or NaN."""
        xp, part = self.xp, self.part
        got_right, noise_right = xp.zeros_like(like_right), xp.zeros_like(like_right)
        got_left, noise_left = xp.zeros_like(like_left), xp.zeros_like(like_left)
        mixed_right, mixed_left = (np.zeros(x.shape, bool) for x in (like_right, like_left))
        of_sums, of_c, of_before = variances
        across = xp.arange(part.left, part.cols.stop)
        numbers = slice(col_blocks[0][0], col_blocks[-1][0] + 1) if col_blocks else slice(0)
        to_blocks = xp.zeros((part.width, len(col_blocks)))
        for i, (_number, columns) in enumerate(col_blocks):
            to_blocks[moved(columns, -part.left), i] = 1
        for r, block in row_blocks:
            for rows in within(block, part.chunk // max(1, part.width)):
                c, before = self._c(rows, part.cols)
                self._without_infinite(c, before, r, rows, mixed_right, mixed_left)
                product = c if before is None else c - before
                noise = product * product * of_sums
                if of_c:
                    noise += c * c * of_c
                if before is not None:
                    size = self._size(before, rows, part.cols)
                    noise += size * size * of_before
                weights, own = self.left[:, rows], (across % CLASSES, across - part.left)
                got_left[r, part.cols] += (weights @ product)[own]
                noise_left[r, part.cols] += ((weights * weights) @ noise)[own]
                weights = self.right[xp.arange(rows.start, rows.stop) % CLASSES, part.cols]
                product *= weights
                got_right[rows, numbers] = product @ to_blocks
                weights *= weights
                noise *= weights
                noise_right[rows, numbers] = noise @ to_blocks
        return (got_right, noise_right, mixed_right), (got_left, noise_left, mixed_left)

    def _without_infinite(self, c, before, r, rows, mixed_right, mixed_left) -> None:
        """Zeros in place of what sums or their squares cannot hold; marks the sums that it is
        missing from."""
        xp, part = self.xp, self.part
        bad = ~(abs(c) < LARGE)
        if before is not None:
            bad |= ~(abs(before) < LARGE)
        if self.infinite:
            bad[self.dead_rows[rows]] = False
            bad[:, self.dead_cols[part.cols]] = False
        spoilt = some(bad)
        if spoilt:
            infinite = ~xp.isfinite(c)
            if before is not None:
                infinite |= ~xp.isfinite(before)
            self._possible(c, before, bad & infinite, rows)
        for x in (c, before):
            if x is not None:
                x[bad] = 0
                if self.infinite:
                    x[self.dead_rows[rows]] = 0
                    x[:, self.dead_cols[part.cols]] = 0
        if spoilt:
            bad = on_host(bad)
            mixed_left[r, part.cols] |= bad.any(axis=0)
            for i, columns in enumerate(self.samples.col_blocks):
                inner = moved(columns, -part.left)
                if 0 <= inner.start < part.width:
                    mixed_right[rows, i] |= bad[:, inner].any(axis=1)

    def _worst_sums(self, ratio, rows, cols) -> list[tuple]:
        """The alarms of one side that come first in either order: (order, place in it, row or block
        of rows, block or column)."""
        highest = float(ratio.max()) if ratio.size else 0.0
        if highest <= 1:
            self.worst = max(self.worst, highest)
            return []
        found = []
        for order, keys in enumerate(looks.orders(ratio, self.xp)):
            flat = on_host(keys.ravel())
            for at in np.argsort(flat)[::-1][: looks.SUMS]:
                if flat[at]:
                    i, j = divmod(int(at), ratio.shape[1])
                    found.append((order, float(flat[at]), rows[i], cols[j]))
        return found

    def _look(self, right: list[tuple], left: list[tuple]) -> None:
        """Element by element at sums that are beyond their bound: which element is wrong, or
        whether the partial sums of these data are larger than was assumed."""
        s = self.samples
        for alarms, rowwise in ((right, True), (left, False)):
            for i, j in looks.first(self.group.gather(alarms), looks.SUMS):
                if rowwise:
                    rows, cols = np.array([i]), indices(s.col_blocks[j])
                    self._elements(rows, cols, weights=self.right[i % CLASSES][cols])
                else:
                    rows, cols = indices(s.row_blocks[i]), np.array([j])
                    self._elements(rows, cols, weights=self.left[j % CLASSES][rows])

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
            self.uncovered = f", {share:.2%} of the sums that C's Inf or NaN spoils"
        for i, block in enumerate(s.col_blocks):
            rows = np.unique(found[found[:, 1] == i, 0])
            if len(rows):
                self._elements(rows, indices(block))

    # --- elements -------------------------------------------------------------------------

    def _elements(self, rows: np.ndarray, cols: np.ndarray, weights=None) -> None:
        """Holds each element of these rows and columns of the block; those of one row or column
        against `weights` together."""
        if weights is not None:
            self._rectangle(rows, cols, weights)
            return
        for down, across in sampling.square_tiles(len(rows), len(cols), self.part.side):
            self._rectangle(rows[down], cols[across], None)

    def _rectangle(self, rows, cols, weights) -> None:
        xp, part = self.xp, self.part
        shape = len(rows), len(cols)
        product, squares, walk, square, more = (xp.zeros(shape) for _ in range(5))
        step = max(1, min(-(-part.k // rounding.PARTIAL_SUMS), part.chunk // max(shape)))
        across, down = compact(rows), compact(cols)
        for ks in spans(part.k if part.reads_product else 0, step):
            x, y = self._a(across, ks), self._b(ks, down)
            product += xp.matmul(x, y, out=more)
            walk += xp.multiply(product, product, out=square)
            x *= x
            y *= y
            squares += xp.matmul(x, y, out=more)
        del square, more
        product, squares, walk = (self.group.sum(x) for x in (product, squares, walk))
        if weights is not None:
            self._judge(rows, cols, weights, product, squares, walk, step)
            return
        for at in spans(len(rows), part.chunk // 16 // len(cols)):
            self._judge(rows[at], cols, None, product[at], squares[at], walk[at], step)

    def _judge(self, rows, cols, weights, product, squares, walk, step: int) -> None:
        """Holds elements against their bounds. `walk` has the squares of the partial sums, one
        in `step` places along k."""
        xp, part = self.xp, self.part
        own_rows, own_cols = part.own(rows, part.rows), part.own(cols, part.cols)
        own = bool(own_rows.any() and own_cols.any())
        ratio: Any = None
        if own:
            if not (own_rows.all() and own_cols.all()):
                pick = np.ix_(own_rows, own_cols)
                product, squares, walk = product[pick], squares[pick], walk[pick]
            rows_here, cols_here = compact(rows[own_rows]), compact(cols[own_cols])
            got, before = self._c(rows_here, cols_here)
            walk = step * (walk + squares / 2)
            reference, bound = self._bound(product, squares, walk, before, rows_here, cols_here)
            error = abs(got - reference)
            ratio = error / bound
            ratio = xp.where(xp.isnan(ratio), xp.inf, ratio)  # NaN is wrong
            ratio[error == 0] = 0
            strange = ~xp.isfinite(got)
            if before is not None:
                strange |= ~xp.isfinite(before)
            strange |= math.isinf(part.problem.alpha)
        odd = own and some(strange)
        if float(self.group.largest(np.array([float(odd)]))[0]):
            size = self._magnitudes(rows, cols)
            if odd:
                size = size[np.ix_(own_rows, own_cols)]
                fair = self._fair(
                    got, before, reference, bound, product, size, rows_here, cols_here
                )
                ratio = xp.where(strange, xp.where(fair, 0, xp.inf), ratio)
        if own:
            if self.infinite:
                ratio[self.dead_rows[rows_here]] = 0
                ratio[:, self.dead_cols[cols_here]] = 0
            if weights is not None:
                weighed = own_rows if len(rows) > 1 else own_cols
                self._together(ratio, got - reference, bound, weights[weighed])
            self._note(ratio, rows[own_rows], cols[own_cols])

    def _bound(self, product, squares, walk, before, rows, cols):
        r = self.rounding
        reference = self.alpha * product
        bound = abs(self.alpha) * self._sum_bound(squares, walk)
        if before is not None:
            reference = reference + before
        if r.last:
            bound += r.last * (2 * abs(reference) + abs(self.alpha * product))
            if before is not None:
                bound += r.last * self._size(before, rows, cols)
        if r.out:
            bound += r.out * (abs(reference) + bound)
        bound += self._scaled(self.xp.float64(r.tiny), rows, cols)
        bound += LEAST
        return reference, bound

    def _sum_bound(self, squares, walk):
        """Of the sums, before alpha."""
        bound = self.rounding.sums(walk, squares, self.deviations)
        return bound + self.rounding.lost(walk, self.part.problem.k) if self.rounding.cut else bound

    def _magnitudes(self, rows, cols):
        """|A||B| of these rows and columns."""
        part = self.part
        size = self.xp.zeros((len(rows), len(cols)))
        if part.reads_product:
            for ks in spans(part.k, part.chunk // max(len(rows), len(cols))):
                x, y = self._a(compact(rows), ks), self._b(ks, compact(cols))
                size += abs(x) @ abs(y)
        return self.group.sum(size)

    def _together(self, ratio, error, bound, weights) -> None:
        """Of a sum that is beyond its bound: whether its elements' own bounds allow it. Equal
        errors are those of equal products, no random ones: each is judged alone."""
        xp = self.xp
        if len(np.unique(errors := on_host(error[error != 0]))) < len(errors):
            return
        if error.shape[0] > 1:
            weights = weights[:, None]
        fine = xp.isfinite(error)
        total = abs((weights * xp.where(fine, error, 0)).sum())
        allowed = xp.sqrt(((weights * xp.where(fine, bound, 0)) ** 2).sum())
        if (share := float(total / allowed) if float(allowed) else 0.0) > 1:
            at = divmod(int(ratio.argmax()), ratio.shape[1])
            ratio[at] = max(float(ratio[at]), share)

    def _note(self, ratio, rows, cols) -> None:
        """Remembers the worst element, and those beyond their bounds."""
        worst = float(ratio.max())
        if worst <= 1:
            self.worst = max(self.worst, worst)
            return
        inside = self.xp.where(ratio <= 1, ratio, 0)
        self.worst = max(self.worst, float(inside.max()))
        part = self.part
        for order, keys in enumerate(looks.orders(ratio, self.xp)):
            by_row, at = on_host(keys.max(axis=1)), on_host(keys.argmax(axis=1))
            for i in np.argsort(by_row)[::-1][: looks.SUMS]:
                if not by_row[i]:
                    break
                place = int(rows[i]), int(cols[at[i]])
                here = place[0] - part.top, place[1] - part.left
                before = float(part.c_in[here]) * part.problem.beta if part.problem.beta else 0.0
                found = float(ratio[i, at[i]]), *place, float(part.result[here]), before
                self.offenders.append((order, float(by_row[i]), *found))
        self.offenders = [
            x for order in range(2) for x in looks.first_of(self.offenders, order, looks.ELEMENTS)
        ]

    def _judged(self) -> tuple[float, str]:
        """The worst error of all, after a second look at what is beyond its bound."""
        part, p = self.part, self.part.problem
        worst, where = self.worst, ""
        found = self.group.gather(self.offenders)
        for ratio, i, j, got, before in looks.first(found, looks.ELEMENTS):
            a, b = (
                self.group.joined(on_host(doubles(x)) if part.reads_product else np.zeros(1))
                for x in (part.a[i], part.b[:, j])
            )
            reference, allowed = rounding.own_bound(self.rounding, p, a, b, before)
            rounded = reference
            if abs(reference) > self.rounding.out_limit:
                rounded = math.copysign(math.inf, reference)
            if got == rounded or (math.isnan(got) and math.isnan(rounded)):  # of two infinities
                ratio = 0.0
            elif all(map(math.isfinite, (got, reference, allowed))):
                ratio = abs(got - reference) / allowed
            if not ratio <= 1 and not where:
                at = part.place(i, j)
                where = f"{at} is {got:.9g}, which is {reference:.9g} to within {allowed:.2g}"
            worst = max(worst, ratio)
        return worst, where or self.where_infinite

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
        if self.uncovered:
            fails = f"what Inf hides: in{self.uncovered[1:]} alone; {fails}"
        width = max(b.stop - b.start for b in (*s.row_blocks, *s.col_blocks))
        block = (self.deviations * rounding.of_block(width) + 6) * math.sqrt(7 / 3 * width)
        share = 1 - (1 - len(s.rows) / p.m) * (1 - len(s.cols) / p.n)
        return (
            f"finds with probability above 1 - 1e-6: NaN and Inf; anywhere, in multiples of the "
            f"rounding noise of its row of a block, a 16 x 16 tile (or two swapped) wrong by "
            f"{math.ceil(block / 5)}, a missing slab of k of 16, an element wrong by "
            f"{math.ceil(block)}; in the rows and columns, {share:.2%} of C, an element wrong by "
            f"{element} times its own; {fails}"
        )


def _classes(span: slice) -> list[slice]:
    """The rows or columns of `span`, counted from its start, by their class."""
    return [slice((q - span.start) % CLASSES, None, CLASSES) for q in range(CLASSES)]
