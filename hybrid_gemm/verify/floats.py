"""C of floats: every element in random sums over blocks, and sampled rows and columns."""

from __future__ import annotations

import math

import numpy as np

from ..devices import native_passes
from . import rounding
from .elements import SQUARED, SUMS, first, orders
from .infinite import EXACT_FLOPS
from .sampling import CLASSES, Found
from .scaled import LEAST, indices, on_host
from .sums import Sums

WORST = 4  # sums over blocks whose elements are looked at, be they within their bounds


class Floats(Sums):
    def check(self, full: bool) -> Found:
        part = self.part
        p = part.problem
        self.offenders = []
        self.deviations = rounding.deviations(p.m * p.n if full else 64 * (p.m + p.n))
        self.by_numpy = native_passes.why_not([part.a, part.b, part.result, part.c_in, part.c_size])
        self.native = not float(self.group.largest(np.array([float(bool(self.by_numpy))]))[0])
        with np.errstate(all="ignore"):
            if full:
                self._scale(slice(0, part.k))
                self._allow_spread()
                self._infinite()
                self.native &= self._fits()
                if part.k < SQUARED:
                    self.kind = "f8"
                self._elements(np.arange(part.m), np.arange(part.n))
                how = "every element against float64"
            else:
                self._sampled()
                how = self._how()
            worst, where = self._judged()
        return Found(worst, how + self.uncovered, self._power(full), where)

    def _sampled(self) -> None:
        """Every element of C in two sums: with its row's in a block of columns, and with its
        column's in a block of rows; and all of the sampled rows and columns."""
        part, s = self.part, self.samples
        sums = self._scaled_sums()
        self._allow_spread()
        self._infinite()
        (right, cols), (left, rows) = sums
        self._judge_all(s.rows, np.arange(part.n), *(x.T for x in rows))
        self._judge_all(np.arange(part.m), s.cols, *cols)
        in_right, in_left = self._hold(right, [x.T for x in left])
        always = min(WORST, len(s.col_blocks) // 4 + 1)
        self._look(self._worst_sums(in_right, always), self._worst_sums(in_left))
        self._hold_mixed()

    def _hold(self, right, left) -> tuple:
        """The weighted sums of C by those of the product, as parts of their bounds: of both sides
        these, and which rows and columns, or blocks of them, they are of."""
        part, s = self.part, self.samples
        down, across = self._own_blocks()
        widths = {b.stop - b.start for b in (*s.row_blocks, *s.col_blocks)}
        of_products, *others = self.rounding.variances(part.problem.k, max(widths))
        count = self.deviations * rounding.of_block(max(CLASSES, min(widths)))
        more_right, more_left = self._besides()
        of_right, of_left = self._sums_of_c(tuple(others))
        self.mixed = np.argwhere(of_right[2]) + np.array([part.top, across.start])
        in_right = self._ratios(
            of_right, [x[part.rows, across] for x in right], of_products, count,
            [(x[part.rows], y[across]) for x, y in more_right],
        )  # fmt: skip
        in_left = self._ratios(
            of_left, [x[down, part.cols] for x in left], of_products, count,
            [(x[down], y[part.cols]) for x, y in more_left],
        )  # fmt: skip
        rows, cols = (range(x.start, x.stop) for x in (part.rows, part.cols))
        mine, numbers = (range(x.start, x.stop) for x in (down, across))
        return (in_right, rows, numbers), (in_left, mine, cols)

    # Many parameters: sums of C and of the product, and what their bound is of.
    def _ratios(self, of_c, of_product, variance: float, count: float, besides: list):
        """In place: these are the largest arrays that a check keeps."""
        xp, (got, noise, mixed), (product, squares) = self.xp, of_c, of_product
        got -= self.alpha * product
        noise += self.alpha * self.alpha * variance * squares
        noise /= 3
        bound = xp.sqrt(noise, out=noise)
        bound *= count
        for of_row, of_col in besides:
            bound += of_row * of_col
        bound += LEAST
        ratio = xp.abs(got, out=got)
        ratio /= bound
        ratio[xp.isnan(ratio)] = xp.inf
        ratio[self._there(mixed)] = 0
        return ratio

    def _worst_sums(self, side: tuple, always: int = 0) -> list[tuple]:
        """The alarms of one side that come first in either order, or as many as `always` within
        their bounds: (order, place in it, row or block of rows, block or column)."""
        ratio, rows, cols = side
        highest = float(ratio.max()) if ratio.size else 0.0
        keys: tuple = (ratio,)
        most = always
        if highest <= 1:
            self.worst = max(self.worst, highest)
        else:
            keys, most = orders(ratio, self.xp), SUMS
        found = []
        for order, of_order in enumerate(keys):
            flat = on_host(of_order.ravel())
            most = min(most, flat.size)
            for at in np.argpartition(flat, flat.size - most)[flat.size - most :] if most else ():
                if flat[at]:
                    i, j = divmod(int(at), ratio.shape[1])
                    found.append((order, float(flat[at]), rows[i], cols[j]))
        return found

    def _look(self, right: list[tuple], left: list[tuple]) -> None:
        """Element by element at sums that are beyond their bound: which element is wrong, or
        whether the partial sums of these data are larger than was assumed."""
        s = self.samples
        for alarms, rowwise in ((right, True), (left, False)):
            for i, j in first(self.group.gather(alarms), SUMS):
                if rowwise:
                    rows, cols = np.array([i]), indices(s.col_blocks[j])
                    self._elements(rows, cols, weights=self.right[i % CLASSES][cols])
                else:
                    rows, cols = indices(s.row_blocks[i]), np.array([j])
                    self._elements(rows, cols, weights=self.left[rows])

    def _hold_mixed(self) -> None:
        """Elements of the rows of blocks that have Inf or NaN where A and B have none."""
        part, s = self.part, self.samples
        found = np.array(self.group.gather(self.mixed.tolist()), int).reshape(-1, 2)
        if not len(found):
            return
        width = max(b.stop - b.start for b in s.col_blocks)
        most = int(EXACT_FLOPS // (6 * width * part.problem.k)) + 1
        if len(found) > most:
            share = most / len(found)
            found = found[s.random.permutation(len(found))[:most]]
            self.uncovered = f", {share:.2%} of the sums that C's Inf or NaN spoils"
        for i, block in enumerate(s.col_blocks):
            rows = np.array(sorted(set(found[found[:, 1] == i, 0].tolist())), int)
            if len(rows):
                self._elements(rows, indices(block))

    # --- what is said ---------------------------------------------------------------------

    def _how(self) -> str:
        s = self.samples
        widths = sorted({max(b.stop - b.start for b in x) for x in (s.row_blocks, s.col_blocks)})
        return (
            f"{len(s.rows)} rows, {len(s.cols)} columns, and random sums over blocks of "
            f"{' or '.join(map(str, widths))}"
            + native_passes.said("" if self.native or self.xp is not np else self.by_numpy)
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
        width = max(b.stop - b.start for b in s.col_blocks)
        block = (self.deviations * rounding.of_block(width) + 6) * math.sqrt(7 / 3 * width)
        share = 1 - (1 - len(s.rows) / p.m) * (1 - len(s.cols) / p.n)
        return (
            f"finds with probability above 1 - 1e-6: NaN and Inf; anywhere, in multiples of the "
            f"rounding noise of its row of a block, a 16 x 16 tile (or two swapped) wrong by "
            f"{math.ceil(block / 5)}, a missing slab of k of 16, an element wrong by "
            f"{math.ceil(block)}; in the rows and columns, {share:.2%} of C, an element wrong by "
            f"{element} times its own; {fails}"
        )
