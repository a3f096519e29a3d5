"""C of floats against float64, within bounds that its own partial sums give."""

from __future__ import annotations

import dataclasses
import itertools
import math
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from . import looks, rounding, sampling
from .sampling import CLASSES, NARROWEST, Found, Group, Part, Samples, doubles, some, spans
from .scaled import EXACT_FLOPS, LEAST, Scaled, compact, indices, moved, on_host, shared, within
from .team import Team

LARGE = 2.0**500  # of C, scaled, and its squares: their sums may be beyond float64
MOST = 2.0**100  # of squares of C in float32
ENDS = 16  # elements of each row of A by which it is scaled before it is read
FAR = 64.0  # from 1 that a row's largest element may be then
EVERY, RUN = 16, 64  # the first sums of squares are those of one in so many runs of k
FIRST = 0.75  # of its bound: what is within it in the first look is surely within all of it
FEW = rounding.PARTIAL_SUMS // 2  # places along k where the first partial sums are squared


@dataclasses.dataclass
class Sums:
    """Of products, of their squares, and of the squares of partial sums. Sums over blocks come
    first, and then elements, which alone have the last."""

    product: Any
    squares: Any
    walk: Any

    @staticmethod
    def zeros(xp: Any, rows: int, cols: int, walks: tuple[int, int]) -> Sums:
        return Sums(xp.zeros((rows, cols)), xp.zeros((rows, cols)), xp.zeros(walks))

    def scale(self, by: Any) -> None:
        """Multiplies all sums by factors of their operands."""
        self.product *= by
        self.squares *= by * by


class Floats(Scaled):
    # Many parameters: what is checked, and who does it.
    def __init__(
        self, part: Part, group: Group, samples: Samples, team: Team, growth: float, spread: float
    ) -> None:  # fmt: skip
        super().__init__(part, group, samples, team, growth, spread)
        self.offenders: list[tuple] = []
        self.lock = threading.Lock()

    def check(self, full: bool) -> Found:
        part = self.part
        p = part.problem
        self.deviations = rounding.deviations(p.m * p.n if full else 64 * (p.m + p.n))
        with np.errstate(all="ignore"):
            if full:
                self._scale(slice(part.k))
                self._allow_spread()
                self._infinite()
                self._look_first(lambda: self._elements(np.arange(part.m), np.arange(part.n)))
                how = "every element against float64"
            else:
                self._sampled()
                how = self._how()
            worst, where = self._judged()
        return Found(worst, how + self.uncovered, self._power(full), where)

    # --- sums over blocks -----------------------------------------------------------------

    def _sampled(self) -> None:
        """Every element of C in two sums: with its row's in a block of columns, and with its
        column's in a block of rows; and all of the sampled rows and columns."""
        part, samples = self.part, self.samples
        self.right = self._there(sampling.weights(samples.random, part.n))
        self.left = self._there(sampling.weights(samples.random, part.m)[:1])
        middle = part.k // 2
        self._scale(slice(middle, middle + min(ENDS, part.k - middle)))
        self._look_first(self._hold_all)

    def _look_first(self, check: Callable[[], None]) -> None:
        """Runs `check`, first with sums in float32 where the product is made in it, and with the
        squares of some of k in bounds, which makes these smaller. Where anything is beyond FIRST of
        its bound then, all is decided by sums in float64 and by all squares."""
        worst, self.beyond = self.worst, False
        self.final = bool(self.rounding.operands or self.spread)
        check()
        if not self.final and float(self.group.largest(np.array([float(self.beyond)]))[0]):
            self.worst, self.final = math.inf if self.where_infinite else worst, True
            check()
        self.final = True

    def _hold_all(self) -> None:
        """Whether C is within all bounds."""
        of_a, of_b = self._read()
        if self.beyond and not self.final:
            return
        self._allow_spread()
        self._infinite()
        part, s = self.part, self.samples
        down, across = len(s.row_blocks), len(s.col_blocks)
        (right, right2), (left, left2) = ((x.product, x.squares) for x in (of_a, of_b))
        self._judge_all(s.rows, np.arange(part.n), left[down:], left2[down:], of_b.walk)
        self._judge_all(np.arange(part.m), s.cols, right[:, across:], right2[:, across:], of_a.walk)
        ratios = self._hold(right[:, :across], right2[:, :across], left[:down], left2[:down])
        self.beyond |= any(x.size and float(x.max()) > self._allowed() for x, *_where in ratios)
        if self.final or not float(self.group.largest(np.array([float(self.beyond)]))[0]):
            self.final = True  # what is looked at now has all squares
            self._look(*(self._worst_sums(*x) for x in ratios))
            self._hold_mixed(self.mixed)

    def _read(self) -> tuple[Sums, Sums]:
        """The sums. Reads A and B again where their rows were scaled wrongly, by the elements that
        had been looked at."""
        found = np.zeros((4, self.part.m))
        sums = self._summed(found)
        nan, inf, ends = self._of_all(found)
        by_row = self.row_scale if self.final else self._factors()[0]
        top = ends.max(axis=0, initial=0) * on_host(by_row)
        wrong = (top != 0) & ((top > FAR) | (top < 1 / FAR))
        wrong |= (nan | inf) & ~on_host(self.dead_rows)
        if not self.final:
            self.beyond = bool(self.infinite or wrong.any())
        elif wrong.any():
            self._scale_rows(nan, inf, ends)
            sums = self._summed(found)
        if self.final:
            self.row_ends, self.row_top = ends, ends.max(axis=0, initial=0)
        return sums

    def _summed(self, ends: np.ndarray) -> tuple[Sums, Sums]:
        """What is summed through A, by its rows, and through B, by its columns."""
        xp, part, s = self.xp, self.part, self.samples
        high = -(-part.m // CLASSES) * CLASSES
        rows, cols = len(s.rows), len(s.cols)
        of_a = Sums.zeros(xp, high, len(s.col_blocks) + cols, (high, cols))
        of_b = Sums.zeros(xp, len(s.row_blocks) + rows, part.n, (rows, part.n))
        step = min(self._step(), part.side)
        if part.reads_product and part.k:
            for ks in spans(part.k, max(1, self._depth() // step) * step):
                self._add_sums(ks, step, of_a, of_b, ends)
        by_row, by_col = self._factors()
        of_a.product, of_a.squares, of_a.walk = (
            x[: part.m] for x in (of_a.product, of_a.squares, of_a.walk)
        )
        of_a.scale(by_row[:, None])
        of_b.scale(by_col)
        of_b.product[-rows:] *= by_row[s.rows, None]
        of_b.squares[-rows:] *= by_row[s.rows, None] ** 2
        of_a.walk *= by_row[:, None] ** 2
        of_b.walk *= (by_row[s.rows, None] * by_col) ** 2
        of_a.walk = self._all_walk(
            step, of_a.walk, of_a.product[:, -cols:], of_a.squares[:, -cols:]
        )
        of_b.walk = self._all_walk(step, of_b.walk, of_b.product[-rows:], of_b.squares[-rows:])
        for found in of_a, of_b:
            found.product, found.squares, found.walk = (
                self.group.sum(x) for x in (found.product, found.squares, found.walk)
            )
        return of_a, of_b

    def _add_sizes(self, found: np.ndarray, x) -> None:
        """Root mean squares in place of extremes, and whether any is not finite: for less."""
        squares = on_host(self.xp.einsum("ij,ij->i", x, x)) / x.shape[1]
        found[0] = np.maximum(found[0], ~np.isfinite(squares))
        found[2] = np.maximum(found[2], np.sqrt(squares))

    def _allowed(self) -> float:
        """Of a bound: less in the first look, so that what float32 rounds hides nothing. C's own
        rounding, where C is narrower, may take all of it."""
        return 1.0 if self.final or self.rounding.out else FIRST

    def _step(self) -> int:
        """So much of k lies between the partial sums that are squared."""
        return max(1, -(-self.part.k // (rounding.PARTIAL_SUMS if self.final else FEW)))

    def _every(self) -> int:
        return 1 if self.final else EVERY

    def _all_walk(self, step: int, walk, product, squares):
        """The squares of all partial sums, from those of one in `step`."""
        walk = walk + squares / 2
        if not self.final:
            walk -= product**2 / 2
        return step * walk

    def _depth(self) -> int:
        """As much of k as is summed at a time: B there, and its sums, take the room of pieces."""
        part, s = self.part, self.samples
        width = len(s.col_blocks) + len(s.cols)
        return max(part.side, 5 * self._chunk() // (part.n + CLASSES * width))

    # Many parameters: what is read, how, and what learns of it.
    # Long: three passes that share what the one before made.
    def _add_sums(self, ks: slice, step: int, of_a: Sums, of_b: Sums, ends: np.ndarray) -> None:
        """Adds the shares of some of k."""
        xp, part, s, team = self.xp, self.part, self.samples, self.team
        count, down, across = ks.stop - ks.start, len(s.row_blocks), len(s.col_blocks)
        by_row, by_col = self._factors()
        slabs = list(_slabs(ks, step, self._every()))
        few, kind = slabs[-1][2].stop, self._kind()
        y, y2 = xp.empty((count, part.n), kind), xp.empty((few, part.n), kind)
        weights = (self.right * by_col).astype(kind)
        through_a = xp.empty((CLASSES, across + len(s.cols), count), kind)
        through_a2 = xp.empty((across + len(s.cols), few), kind)

        def sum_b(blocks: slice) -> None:
            mine = s.col_blocks[blocks]
            cols = slice(mine[0].start, mine[-1].stop)
            y[:, cols] = self._raw_b(ks, cols)
            for slab, chosen, at in slabs:
                xp.square(y[slab, cols][chosen], out=y2[at, cols])
            for i, block in enumerate(mine, blocks.start):
                through_a[:, i] = weights[:, block] @ y[:, block].T
                through_a2[i] = y2[:, block] @ weights[0, block] ** 2

        team.each(sum_b, spans(across, self._each(across)))
        through_a[:, across:] = (y[:, s.cols] * by_col[s.cols]).T
        through_a2[across:] = (y2[:, s.cols] * by_col[s.cols] ** 2).T
        through_b, through_b2 = (xp.zeros((down + len(s.rows), x), kind) for x in (count, few))
        through_b[down:] = x_rows = self._raw_a(s.rows, ks)
        for slab, chosen, at in slabs:
            through_b2[down:, at] = x_rows[:, slab][:, chosen] ** 2

        def sum_a(rows: slice) -> None:
            if self.final:
                self._add_extremes(ends[:, rows], part.a[rows, ks])
            blocks = [
                (i, moved(mine, -rows.start), (self.left[0, mine] * by_row[mine]).astype(kind))
                for i, mine in shared(s.row_blocks, rows)
            ]
            high = -(-(rows.stop - rows.start) // CLASSES) * CLASSES
            product, walk = (x[rows.start : rows.start + high] for x in (of_a.product, of_a.walk))
            by_class = product.reshape(-1, CLASSES, product.shape[1]).transpose(1, 0, 2)
            for slab, chosen, at in slabs:
                x = self._raw_a(rows, moved(slab, ks.start))
                if not self.final:
                    self._add_sizes(ends[:, rows], x)
                squares = x[:, chosen] ** 2
                for i, here, u in blocks:
                    of_block, of_block2 = u @ x[here], u**2 @ squares[here]
                    with self.lock:
                        through_b[i, slab] += of_block
                        through_b2[i, at] += of_block2
                of_a.squares[rows] += squares @ through_a2[:, at].T
                if len(x) < high:
                    x = xp.concatenate([x, xp.zeros((high - len(x), x.shape[1]), kind)])
                x = x.reshape(-1, CLASSES, x.shape[1]).transpose(1, 0, 2)
                by_class += xp.matmul(x, through_a[:, :, slab].transpose(0, 2, 1))
                walk += product[:, across:] ** 2

        high = self._chunk() // min(step, count)
        high = max(1, min(high, self._each(part.m)) // CLASSES) * CLASSES
        team.each(sum_a, spans(part.m, high))

        def add_through_b(cols: slice) -> None:
            for slab, _chosen, at in slabs:
                of_b.product[:, cols] += through_b[:, slab] @ y[slab, cols]
                of_b.squares[:, cols] += through_b2[:, at] @ y2[at, cols]
                of_b.walk[:, cols] += of_b.product[down:, cols] ** 2

        team.each(add_through_b, spans(part.n, self._each(part.n)))
        team.tell((part.m + part.n) * count / self._whole())

    def _whole(self) -> int:
        """Elements that are read."""
        part = self.part
        return (part.m + part.n) * part.k + part.m * part.n

    def _each(self, count: int) -> int:
        """So many of `count` in a piece that no thread waits long for the last one."""
        return -(-count // (4 * self.team.threads))

    def _hold(self, right, right2, left, left2) -> tuple:
        """The weighted sums of C by those of the product, as parts of their bounds: of both sides
        these, and which rows and columns, or blocks of them, they are of."""
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

        self.mixed = of_right[2]
        in_right = ratios(of_right, right, right2, more_right)
        in_left = ratios(of_left, left, left2, more_left)
        there, numbers = ([i for i, _block in x] for x in (mine, blocks))
        rows, cols = (range(x.start, x.stop) for x in (part.rows, part.cols))
        return (
            (in_right[part.rows][:, numbers], rows, numbers),
            (in_left[there][:, part.cols], there, cols),
        )

    def _sums_of_c(self, row_blocks, col_blocks, like_right, like_left, variances):
        """The weighted sums of C in these numbered blocks, by rows and by columns, C being read
        once: for both the sums, the noise that C's rounding leaves in them (`variances` are those
        of sums, C and C before), and where they miss an Inf or NaN."""
        xp, part = self.xp, self.part
        got_right, noise_right = xp.zeros_like(like_right), xp.zeros_like(like_right)
        got_left, noise_left = xp.zeros_like(like_left), xp.zeros_like(like_left)
        mixed_right, mixed_left = (np.zeros(x.shape, bool) for x in (like_right, like_left))
        of_sums, of_c, of_before = variances
        numbers = slice(col_blocks[0][0], col_blocks[-1][0] + 1) if col_blocks else slice(0)
        runs = _runs([moved(block, -part.left) for _i, block in col_blocks])
        kind = self._kind()
        weights, by_square = self.right[:, part.cols].astype(kind), of_c or part.problem.beta

        def some_rows(piece: tuple) -> None:
            r, rows = piece
            c, before = self._c(rows, part.cols)
            product = c if before is None else c - before
            noise = product * product
            if self.infinite or not float(noise.sum()) < (LARGE if noise.dtype == "f8" else MOST):
                if not self.final:  # which knows no extremes of A
                    self.beyond = True
                    return
                self._without_infinite(c, before, r, rows, mixed_right, mixed_left)
                product = c if before is None else c - before
                noise = product * product
            if by_square:
                noise *= of_sums
                if of_c:
                    noise += c * c * of_c
                if before is not None:
                    size = self._size(before, rows, part.cols)
                    noise += size * size * of_before
            of_rows = self.left[0, rows].astype(kind)
            down, more = of_rows @ product, of_rows**2 @ noise
            with self.lock:
                got_left[r, part.cols] += down
                noise_left[r, part.cols] += more
            turned = xp.roll(weights, -rows.start, axis=0) if rows.start % CLASSES else weights
            got_right[rows, numbers] = _block_sums(xp, product, turned, runs)
            noise_right[rows, numbers] = _block_sums(xp, noise, weights[:1] ** 2, runs)
            if not by_square:
                noise_right[rows, numbers] *= of_sums

        high = min(self._chunk() // max(1, part.width), self._each(max(1, part.height)))
        high = max(1, high // CLASSES) * CLASSES
        pieces = [(r, at) for r, block in row_blocks for at in within(block, high)]
        self.team.each(some_rows, pieces)
        if not by_square:
            noise_left *= of_sums
        self.team.tell(part.height * part.width / self._whole())
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
                    self._elements(rows, cols, weights=self.left[0, rows])

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
        shape, down, kind = (len(rows), len(cols)), compact(cols), self._kind()
        product, squares, walk = (xp.zeros(shape, kind) for _ in range(3))
        step = max(1, min(self._step(), self._chunk() // max(shape)))
        by_row, by_col = (x.astype(kind) for x in self._factors())

        def some_rows(at: slice) -> None:
            p, s, w = product[at], squares[at], walk[at]
            for slab, chosen, _at in _slabs(slice(0, part.k), step, self._every()):
                x, y = self._raw_a(compact(rows[at]), slab), self._raw_b(slab, down)
                for ks in spans(slab.stop - slab.start, part.side):
                    p += x[:, ks] @ y[ks]
                w += p * p
                x, y = x[:, chosen], y[chosen]
                s += (x * x) @ (y * y) if len(y) else 0
            w[:] = self._all_walk(step, w, p, s)
            factors = by_row[rows[at]][:, None] * by_col[cols]
            p *= factors
            factors *= factors
            s *= factors
            w *= factors

        if part.reads_product:
            self.team.each(some_rows, spans(shape[0], max(16, -(-shape[0] // self.team.threads))))
        product, squares, walk = (self.group.sum(x) for x in (product, squares, walk))
        if weights is not None:
            self._judge(rows, cols, weights, product, squares, walk)
            return
        self._judge_all(rows, cols, product, squares, walk)
        self.team.tell(shape[0] * shape[1] / (part.m * part.n))

    def _judge_all(self, rows, cols, product, squares, walk) -> None:
        for at in spans(len(rows), self.part.chunk // 8 // max(1, len(cols))):
            self._judge(rows[at], cols, None, product[at], squares[at], walk[at])

    def _judge(self, rows, cols, weights, product, squares, walk) -> None:
        """Holds elements against their bounds. `walk` has the squares of their partial sums."""
        xp, part = self.xp, self.part
        product, squares, walk = (x.astype("f8") for x in (product, squares, walk))
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
        self.beyond |= odd  # in the first look, which knows no extremes of A
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
        if worst <= self._allowed():
            self.worst = max(self.worst, worst)
            return
        self.beyond = True
        if not self.final:
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


def _slabs(ks: slice, step: int, every: int) -> Iterator[tuple[slice, Any, slice]]:
    """Parts of some of k, counted from its start: which of their places have squares in the sums,
    counted from the part's, and where these lie among all that have."""
    stop = 0
    for slab in spans(ks.stop - ks.start, step):
        chosen = np.arange(slab.stop - slab.start)
        chosen = chosen[(chosen + slab.start + ks.start) % (RUN * every) < RUN]
        start, stop = stop, stop + len(chosen)
        yield slab, compact(chosen), slice(start, stop)


def _runs(blocks: list[slice]) -> list[tuple[slice, slice, int]]:
    """Blocks that follow one another and are equally wide: their numbers, columns, and width."""
    found = []
    by_width = itertools.groupby(enumerate(blocks), lambda x: x[1].stop - x[1].start)
    for width, equal in by_width:
        (first, begin), *rest = equal
        last, end = rest[-1] if rest else (first, begin)
        found.append((slice(first, last + 1), slice(begin.start, end.stop), width))
    return found


def _block_sums(xp, x, weights, runs):
    """The weighted sums of each row in each block. Row i has weights i modulo their number."""
    count = len(weights)
    made = xp.empty((len(x), runs[-1][0].stop if runs else 0), x.dtype)
    for numbers, cols, width in runs:
        w = weights[:, cols].reshape(count, -1, width)
        for rows, classes in _by_classes(len(x), count):
            y = x[rows, cols].reshape(-1, classes, w.shape[1], width)
            sums = xp.einsum("gqbj,qbj->gqb", y, w[:classes])
            made[rows, numbers] = sums.reshape(-1, w.shape[1])
    return made


def _by_classes(rows: int, count: int) -> list[tuple[slice, int]]:
    """Rows that are so many times all classes, and the rest; how many classes they are of."""
    whole = rows // count * count
    parts = (slice(whole), count), (slice(whole, rows), rows - whole)
    return [x for x in parts if x[0].stop > (x[0].start or 0)]
