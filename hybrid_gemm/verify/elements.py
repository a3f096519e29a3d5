"""Elements of C against their references in float64, within bounds that their own partial sums
give; and a second look at those that are beyond."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..devices.native_passes import SIDE, Pass, filled
from . import rounding, sampling
from .infinite import Infinite
from .sampling import doubles, some, spans
from .scaled import LEAST, compact, moved, on_host, within

SQUARED = 256  # of k, of which squares are summed at least; of more, one in EVERY
EVERY = 8
SUMS = 16  # of each order, whose elements are looked at one by one
LOOKED = 64  # elements of each order, that are held against what their own products allow
THIN_BYTES = 12 << 20  # of thin matrices, by which some of k are multiplied at a time


class Elements(Infinite):
    """`every_square`: squares are summed of all k."""

    every_square = False
    deviations: float  # of bounds
    offenders: list[tuple]

    def _step(self) -> int:
        """So much of k lies between the partial sums that are squared."""
        step = -(-self.part.k // rounding.PARTIAL_SUMS)
        return max(1, min(-(-step // SIDE) * SIDE if step > SIDE else step, self.part.side))

    def _every(self) -> int:
        """Squares are those of so few parts of k where they are a small part of a bound."""
        if not self.native or self.every_square or self.rounding.operands or self.spread:
            return 1
        return min(EVERY, max(1, self.part.k // SQUARED))

    def _depth(self, width: int) -> int:
        """As much of k, in whole steps, as is summed at a time, where of each there are so many
        numbers of thin matrices."""
        step = self._step()
        return max(1, THIN_BYTES // (np.dtype(self.kind).itemsize * width) // step) * step

    def _make_whole(self, sums: Sequence, scale: Any) -> None:
        """Scales what native sums are not scaled by, and makes squares those of all k, and `walk`,
        which the last columns have, the squares of all partial sums."""
        product, squares, walk = sums
        chunk, every, k = min(SIDE, self._step()), self._every(), self.part.k
        share = np.count_nonzero(np.arange(k) // chunk % every == 0) / k if every > 1 else 1.0
        if self.native:
            product *= scale[:, None]
            squares *= scale[:, None] ** 2 / share
            walk *= scale[:, None] ** 2
        walk += squares[:, squares.shape[1] - walk.shape[1] :] / 2
        walk *= self._step()

    def _pass(self, x: Any, ks: slice, blocks: list[slice]) -> Pass:
        """A native reading of some of k."""
        steps = spans(ks.stop - ks.start, self._step())
        made = Pass(x, self.kind, self.team.threads)
        made.cut(blocks, [moved(at, ks.start) for at in steps])
        made.square_one_in(self._every(), min(SIDE, self._step()))
        return made

    def _multiply(self, reading: Pass, thin: Any, squares: Any, made: Sequence) -> None:
        reading.multiply(thin, made[0], made[2])
        reading.multiply(squares, made[1], squares=True)

    # --- references -----------------------------------------------------------------------

    def _elements(self, rows: np.ndarray, cols: np.ndarray, weights=None) -> None:
        """Holds each element of these rows and columns of the block; those of one row or column
        against `weights` together."""
        side = self.part.side if weights is None else max(len(rows), len(cols))
        for down, across in sampling.square_tiles(len(rows), len(cols), side):
            self._hold_elements(rows[down], cols[across], weights)

    def _hold_elements(self, rows, cols, weights) -> None:
        part, at = self.part, (compact(rows), compact(cols))
        native = [self.native and isinstance(x, slice) for x in at]
        if not (part.reads_product and part.k):
            found = [self.xp.zeros((len(rows), len(cols))) for _ in range(3)]
        elif native[1] and (len(rows) < len(cols) or not native[0]):
            found = self._products_natively(
                part.b.T, self.col_scale, at[1], len(rows), lambda ks: self._a(at[0], ks).T
            )
            found = [x.T for x in found]
        elif native[0]:
            found = self._products_natively(
                part.a, self.row_scale, at[0], len(cols), lambda ks: self._b(ks, at[1])
            )
        else:
            found = self._products(rows, cols)
        product, squares, walk = (self.group.sum(x) for x in found)
        if weights is not None:
            self._judge(rows, cols, weights, product, squares, walk)
            return
        self._judge_all(rows, cols, product, squares, walk)
        self.team.tell(len(rows) * len(cols) / (part.m * part.n))

    # Many parameters: a matrix and the scale of its rows; the width of another, and its rows.
    def _products_natively(self, x, scale, rows: slice, width: int, thin: Callable) -> list:
        """Of the products of each element of some rows: their sum, that of squares, and of the
        squares of partial sums."""
        made = [np.zeros((rows.stop - rows.start, filled(width))) for _ in range(3)]
        for ks in spans(self.part.k, self._depth(4 * filled(width))):
            wide = np.zeros((ks.stop - ks.start, filled(width)), self.kind)
            wide[:, :width] = thin(ks)
            reading = self._pass(x, ks, within(rows, SIDE))
            self._multiply(reading, wide, wide**2, made)
            reading.run()
        self._make_whole(made, scale[rows])
        return [x[:, :width] for x in made]

    def _products(self, rows, cols) -> list:
        """The same, of any arrays."""
        part, step = self.part, self._step()
        found = product, squares, walk = [self.xp.zeros((len(rows), len(cols))) for _ in range(3)]
        down, deep = compact(cols), min(self._step(), max(1, part.chunk // max(product.shape)))

        def some_rows(at: slice) -> None:
            for slab in spans(part.k, step):
                for inner in spans(slab.stop - slab.start, deep):
                    ks = moved(inner, slab.start)
                    x, y = self._a(compact(rows[at]), ks), self._b(ks, down)
                    product[at] += x @ y
                    squares[at] += (x * x) @ (y * y)
                walk[at] += product[at] ** 2
            walk[at] = step * (walk[at] + squares[at] / 2)

        high = max(16, -(-len(rows) // self.team.threads))
        self.team.each(some_rows, spans(len(rows), high))
        return found

    def _judge_all(self, rows, cols, product, squares, walk) -> None:
        for at in spans(len(rows), self.part.chunk // 32 // max(1, len(cols))):
            self._judge(rows[at], cols, None, product[at], squares[at], walk[at])

    def _judge(self, rows, cols, weights, product, squares, walk) -> None:
        """Holds elements against their bounds. `walk` has the squares of their partial sums."""
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
        errors = np.sort(on_host(error[error != 0]))
        if (errors[1:] == errors[:-1]).any():
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
        for order, keys in enumerate(orders(ratio, self.xp)):
            by_row, at = on_host(keys.max(axis=1)), on_host(keys.argmax(axis=1))
            for i in np.argsort(by_row)[::-1][:SUMS]:
                if not by_row[i]:
                    break
                place = int(rows[i]), int(cols[at[i]])
                here = place[0] - part.top, place[1] - part.left
                before = float(part.c_in[here]) * part.problem.beta if part.problem.beta else 0.0
                found = float(ratio[i, at[i]]), *place, float(part.result[here]), before
                self.offenders.append((order, float(by_row[i]), *found))
        self.offenders = [x for order in range(2) for x in first_of(self.offenders, order, LOOKED)]

    def _judged(self) -> tuple[float, str]:
        """The worst error of all, after a second look at what is beyond its bound."""
        part, p = self.part, self.part.problem
        worst, where = self.worst, ""
        found = self.group.gather(self.offenders)
        for ratio, i, j, got, before in first(found, LOOKED):
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


def orders(ratio: Any, xp: Any) -> tuple[Any, Any]:
    """Numbers that begin with the largest and are 0 for what is within its bound: the worst first;
    and first those that are most alone in their row and column. Data that round alike have many
    such sums, which hide no other."""
    beyond = ratio > 1
    company = beyond.sum(axis=1)[:, None] * beyond.sum(axis=0)
    return xp.where(beyond, ratio, 0), xp.where(beyond, 1 / xp.maximum(company, 1), 0)


def first(found: list[tuple], count: int) -> list[tuple]:
    """What comes first in either order, `count` of each. Of (order, place in it, ...) the rest."""
    return list(dict.fromkeys(x[2:] for order in range(2) for x in first_of(found, order, count)))


def first_of(found: list[tuple], order: int, count: int) -> list[tuple]:
    """The same of one order, whole."""
    return heapq.nlargest(count, {x for x in found if x[0] == order})
