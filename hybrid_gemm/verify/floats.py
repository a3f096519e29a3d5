"""C of floats: every element in random sums over blocks, and sampled rows and columns."""

from __future__ import annotations

import math
import threading

import numpy as np

from ..devices import native_passes
from ..devices.native_passes import SIDE, VECTOR, Pass
from . import rounding, sampling
from .elements import SUMS, Elements, first, orders
from .infinite import EXACT_FLOPS
from .sampling import CLASSES, Found, Group, Part, Samples, some, spans
from .scaled import LEAST, indices, moved, on_host, shared, within
from .team import Team

LARGE = 2.0**500  # of C, scaled, and its squares: their sums may be beyond float64
ENDS = 16  # elements of each row of A and column of B by which it is scaled before it is read
FAR = 64.0  # from 1 that the largest element may be then
THIN_BYTES = 12 << 20  # of thin matrices, by which some of k are multiplied at a time
FARTHEST = 400  # exponents of scales with which float64 holds squares that are not scaled
WORST = 4  # sums over blocks whose elements are looked at, be they within their bounds


class Floats(Elements):
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
                self._scale(slice(0, part.k))
                self._allow_spread()
                self._infinite()
                self._elements(np.arange(part.m), np.arange(part.n))
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
        part, s = self.part, self.samples
        self.right = self._there(sampling.of_classes(sampling.weights(s.random, part.n)))
        self.left = self._there(sampling.weights(s.random, part.m))
        self.by_numpy = native_passes.why_not([part.a, part.b, part.result, part.c_in, part.c_size])
        self.native = not float(self.group.largest(np.array([float(bool(self.by_numpy))]))[0])
        sums = self._scaled_sums()
        self._allow_spread()
        self._infinite()
        (right, cols), (left, rows) = sums
        self._judge_all(s.rows, np.arange(part.n), *(x.T for x in rows))
        self._judge_all(np.arange(part.m), s.cols, *cols)
        in_right, in_left = self._hold(*right, *(x.T for x in left))
        always = min(WORST, len(s.col_blocks) // 4 + 1)
        self._look(self._worst_sums(*in_right, always), self._worst_sums(*in_left))
        self._hold_mixed(self.mixed)

    def _scaled_sums(self) -> list[tuple]:
        """Sums of A and B, scaled by some of their elements where these are about as large as all."""
        part, middle = self.part, self.part.k // 2
        if self.native:
            self._scale(slice(middle, min(middle + ENDS, part.k)))
            if self._fits():
                sums = self._summed()
                if not self._scaled_wrongly():
                    return sums
        self._scale(slice(0, part.k))
        if self.native and not self._fits():
            self.native, self.by_numpy = False, "they have Inf, NaN or extreme numbers"
        return self._summed()

    def _fits(self) -> bool:
        """Whether A and B may be summed as they are, and the sums scaled."""
        return not self.infinite and self.most <= FARTHEST

    def _scaled_wrongly(self) -> bool:
        """Whether rows or columns have Inf or NaN, or are of another magnitude than the elements by
        which they were scaled. If not, learns their largest elements."""
        ends, wrong = [], False
        for found, scale in (self.of_a, self.row_scale), (self.of_b, self.col_scale):
            found = self.group.largest(found)
            top = found[:, :2].max(axis=1) * scale
            wrong |= bool(found[:, 2].any() or ((top != 0) & ((top > FAR) | (top < 1 / FAR))).any())
            ends.append(found[:, :2].T)
        if not wrong:
            self.row_ends, self.col_ends = ends
            self.row_top, self.col_top = (x.max(axis=0) for x in ends)
        return wrong

    def _summed(self) -> list[tuple]:
        """Of rows, in blocks of columns, the sums of the product, those of squares, and the squares
        of partial sums; the same of sampled columns; both of columns."""
        xp, part, s = self.xp, self.part, self.samples
        self.of_a, self.of_b = np.zeros((part.m, 3)), np.zeros((part.n, 3))  # ends
        by_rows, by_cols = (
            [xp.zeros((size, _filled(len(blocks) + len(places)))) for _ in range(3)]
            for size, blocks, places in (
                (part.m, s.col_blocks, s.cols), (part.n, s.row_blocks, s.rows)
            )
        )  # fmt: skip
        add = self._add_natively if self.native else self._add_sums
        if part.reads_product and part.k:
            for ks in spans(part.k, self._depth()):
                add(ks, by_rows, by_cols)
                self.team.tell((part.m + part.n) * (ks.stop - ks.start) / self._whole())
        found = []
        for sums, scale, blocks, places in (
            (by_rows, self.row_scale, s.col_blocks, s.cols),
            (by_cols, self.col_scale, s.row_blocks, s.rows),
        ):
            count, stop = len(blocks), len(blocks) + len(places)
            self._make_whole(*sums, scale, count)
            product, squares, walk = (self.group.sum(x[:, :stop]) for x in sums)
            of_blocks = product[:, :count], squares[:, :count]
            found.append((of_blocks, tuple(x[:, count:] for x in (product, squares, walk))))
        return found

    def _depth(self) -> int:
        """As much of k, in whole steps, as is summed at a time."""
        s, step = self.samples, self._step()
        width = (CLASSES + 1) * _filled(len(s.col_blocks) + len(s.cols)) + self.part.n
        return max(1, THIN_BYTES // (np.dtype(self.kind).itemsize * width) // step) * step

    def _add_natively(self, ks: slice, by_rows: list, by_cols: list) -> None:
        """Adds the shares of some of k: reads B for its sums over blocks, A, and B again."""
        part, s, threads = self.part, self.samples, self.team.threads
        count, across, down = ks.stop - ks.start, len(s.col_blocks), len(s.row_blocks)
        thin = np.zeros((CLASSES, count, by_rows[0].shape[1]), self.kind)
        squares = np.zeros(thin.shape[1:], self.kind)
        reading = Pass(part.b, self.kind, threads)
        reading.cut([moved(at, ks.start) for at in spans(count, SIDE)], s.col_blocks)
        reading.fold(self.right[:1] * self.col_scale, thin, squares)
        reading.run()
        picked = slice(across, across + len(s.cols))
        thin[:, :, picked] = y = self._b(ks, s.cols)
        squares[:, picked] = y**2
        of_blocks = np.zeros((2, down, count))
        reading = self._pass(part.a, ks, s.row_blocks)
        self._multiply(reading, thin, squares, by_rows)
        reading.add_rows(self.left * self.row_scale, *of_blocks)
        reading.find_ends(self.of_a)
        reading.run()
        thin, squares = (np.zeros((count, by_cols[0].shape[1]), self.kind) for _ in "12")
        thin[:, :down], squares[:, :down] = of_blocks[0].T, of_blocks[1].T
        picked = slice(down, down + len(s.rows))
        thin[:, picked] = x = self._a(s.rows, ks).T
        squares[:, picked] = x**2
        high = max(SIDE, -(-part.n // sampling.BLOCKS // SIDE) * SIDE)
        reading = self._pass(part.b.T, ks, spans(part.n, high))
        self._multiply(reading, thin, squares, by_cols)
        reading.find_ends(self.of_b)
        reading.run()

    def _add_sums(self, ks: slice, by_rows: list, by_cols: list) -> None:
        """The same, of any arrays."""
        xp, part, s, step = self.xp, self.part, self.samples, self._step()
        count, across, down = ks.stop - ks.start, len(s.col_blocks), len(s.row_blocks)
        y, slabs = self._b(ks), spans(count, step)
        thin = xp.zeros((CLASSES, count, by_rows[0].shape[1]))
        squares = xp.zeros(thin.shape[1:])
        for i, block in enumerate(s.col_blocks):
            thin[:, :, i] = self.right[:, block] @ y[:, block].T
            squares[:, i] = y[:, block] ** 2 @ self.right[0, block] ** 2
        thin[:, :, across : across + len(s.cols)] = y[:, s.cols]
        squares[:, across : across + len(s.cols)] = y[:, s.cols] ** 2
        of_cols, of_cols2 = (xp.zeros((count, by_cols[0].shape[1])) for _ in "12")

        def sum_rows(rows: slice) -> None:
            x = self._a(rows, ks)
            for i, block in shared(s.row_blocks, rows):
                here, weights = moved(block, -rows.start), self.left[block]
                sums, of_squares = weights @ x[here], weights**2 @ x[here] ** 2
                with self.lock:
                    of_cols[:, i] += sums
                    of_cols2[:, i] += of_squares
            product, of_squares, walk = (z[rows] for z in by_rows)
            for slab in slabs:
                for i in range(CLASSES):
                    product[i::CLASSES] += x[i::CLASSES, slab] @ thin[i, slab]
                walk += product**2
            of_squares += x**2 @ squares

        high = max(1, part.chunk // count // CLASSES) * CLASSES
        self.team.each(sum_rows, spans(part.m, high))
        of_cols[:, down : down + len(s.rows)] = self._a(s.rows, ks).T
        of_cols2[:, down : down + len(s.rows)] = of_cols[:, down : down + len(s.rows)] ** 2

        def sum_cols(cols: slice) -> None:
            product, of_squares, walk = (z[cols] for z in by_cols)
            for slab in slabs:
                product += y[slab, cols].T @ of_cols[slab]
                walk += product**2
            of_squares += (y[:, cols] ** 2).T @ of_cols2

        self.team.each(sum_cols, spans(part.n, high))

    def _whole(self) -> int:
        """Elements that are read."""
        part = self.part
        return (part.m + part.n) * part.k + part.m * part.n

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
        count = self.deviations * rounding.of_block(max(CLASSES, min(widths)))

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
        numbers = [i for i, _block in col_blocks]
        found = (got_right, noise_right, mixed_right), (got_left, noise_left, mixed_left)
        if not (row_blocks and col_blocks):
            return found
        if self.native:
            sums = self._native_sums_of_c(row_blocks, col_blocks, variances)
            if all(np.isfinite(x).all() for x in sums) and max(x.max() for x in sums[1::2]) < LARGE:
                got_right[part.rows, numbers[0] : numbers[-1] + 1] = sums[0]
                noise_right[part.rows, numbers[0] : numbers[-1] + 1] = sums[1]
                first_row = row_blocks[0][0]
                got_left[first_row : first_row + len(row_blocks), part.cols] = sums[2]
                noise_left[first_row : first_row + len(row_blocks), part.cols] = sums[3]
                return found
        ones = xp.zeros((part.width, len(numbers)))
        for i, block in enumerate(col_blocks):
            ones[moved(block[1], -part.left), i] = 1
        weights = self.right[:, part.cols]

        def some_rows(piece: tuple) -> None:
            r, rows = piece
            c, before = self._c(rows, part.cols)
            product = c if before is None else c - before
            if self.infinite or not float((product * product).sum()) < LARGE:
                self._without_infinite(c, before, r, rows, mixed_right, mixed_left)
                product = c if before is None else c - before
            noise = of_sums * product * product + of_c * c * c
            if before is not None:
                size = self._size(before, rows, part.cols)
                noise += size * size * of_before
            u = self.left[rows]
            with self.lock:
                got_left[r, part.cols] += u @ product
                noise_left[r, part.cols] += u**2 @ noise
            signed = weights[np.arange(rows.start, rows.stop) % CLASSES]
            got_right[rows, numbers[0] : numbers[-1] + 1] = (product * signed) @ ones
            noise_right[rows, numbers[0] : numbers[-1] + 1] = (noise * signed**2) @ ones

        high = max(1, part.chunk // part.width)
        self.team.each(
            some_rows, [(r, at) for r, block in row_blocks for at in within(block, high)]
        )
        self.team.tell(part.height * part.width / self._whole())
        return found

    def _native_sums_of_c(self, row_blocks, col_blocks, variances) -> list:
        part = self.part
        rows, cols = self.row_factors[part.rows], self.col_factors[part.cols]
        right = [np.zeros((part.height, len(col_blocks))) for _ in "12"]
        left = [np.zeros((len(row_blocks), part.width)) for _ in "12"]
        reading = Pass(part.result, "f8", self.team.threads)
        reading.cut(
            [moved(block, -part.top) for _i, block in row_blocks],
            [moved(block, -part.left) for _i, block in col_blocks],
        )
        reading.less(part.problem.beta, part.c_in, part.c_size, variances)
        reading.add_rows(self.left[part.rows] * rows, *left)
        reading.fold(self.right[:, part.cols] * cols, *right, origin=part.top)
        reading.run()
        self.team.tell(part.height * part.width / self._whole())
        return [
            right[0] * rows[:, None], right[1] * rows[:, None] ** 2, left[0] * cols,
            left[1] * cols**2,
        ]  # fmt: skip

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

    def _worst_sums(self, ratio, rows, cols, always: int = 0) -> list[tuple]:
        """The alarms of one side that come first in either order, or as many as `always` within
        their bounds: (order, place in it, row or block of rows, block or column)."""
        highest = float(ratio.max()) if ratio.size else 0.0
        keys, most = (ratio,), always
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


def _filled(width: int) -> int:
    """So many columns that they fill vectors."""
    return -(-width // VECTOR) * VECTOR
