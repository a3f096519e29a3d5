"""Random sums over blocks of C and of the product, and sampled rows and columns of this: by native
threads, which read each matrix once, or by any arrays' own products."""

from __future__ import annotations

import threading

import numpy as np

from ..devices.native_passes import SIDE, Pass, filled
from . import sampling
from .elements import Elements
from .sampling import CLASSES, Group, Part, Samples, some, spans
from .scaled import moved, on_host, shared
from .team import Team

LARGE = 2.0**500  # of C, scaled, and its squares: their sums may be beyond float64
ENDS = 16  # elements of each row of A and column of B by which it is scaled before it is read
FAR = 64.0  # from 1 that the largest element may be then
FARTHEST = 400  # exponents of scales with which float64 holds squares that are not scaled


class Sums(Elements):
    """`right` has a weight of each column for each class of rows, and `left` one of each row."""

    # Many parameters: what is checked, and who does it.
    def __init__(
        self, part: Part, group: Group, samples: Samples, team: Team, growth: float, spread: float
    ) -> None:  # fmt: skip
        super().__init__(part, group, samples, team, growth, spread)
        self.right = self._there(sampling.of_classes(sampling.weights(samples.random, part.n)))
        self.left = self._there(sampling.weights(samples.random, part.m))
        self.lock = threading.Lock()

    # --- of the product -------------------------------------------------------------------

    def _scaled_sums(self) -> list[tuple]:
        """Sums of A and B, which are scaled by some of their elements where that is enough."""
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
            ends.append(found[:, :2].T)
            top = np.maximum(*ends[-1]) * scale
            wrong |= bool(found[:, 2].any() or ((top != 0) & ((top > FAR) | (top < 1 / FAR))).any())
        if not wrong:
            self.row_ends, self.col_ends = ends
            self.row_top, self.col_top = (np.maximum(*x) for x in ends)
        return wrong

    def _summed(self) -> list[tuple]:
        """Of rows, in blocks of columns, the sums of the product, those of squares, and the squares
        of partial sums; the same of sampled columns; both of columns."""
        xp, part, s = self.xp, self.part, self.samples
        self.of_a, self.of_b = np.zeros((part.m, 3)), np.zeros((part.n, 3))  # ends
        sides = (part.m, s.col_blocks, s.cols), (part.n, s.row_blocks, s.rows)
        by_rows, by_cols = (
            [
                xp.zeros((filled(size, CLASSES), filled(len(blocks) + len(places)) - left_out))
                for left_out in (0, 0, len(blocks))
            ]
            for size, blocks, places in sides
        )
        add = self._add_natively if self.native else self._add_sums
        if part.reads_product and part.k:
            width = (CLASSES + 1) * filled(len(s.col_blocks) + len(s.cols))
            for ks in spans(part.k, self._depth(width + (0 if self.native else part.n))):
                add(ks, by_rows, by_cols)
                self.team.tell((part.m + part.n) * (ks.stop - ks.start) / self._whole())
        found = []
        for sums, scale, blocks, places in (
            (by_rows, self.row_scale, s.col_blocks, s.cols),
            (by_cols, self.col_scale, s.row_blocks, s.rows),
        ):
            count, stop = len(blocks), len(blocks) + len(places)
            sums = [x[: len(scale)] for x in sums]
            self._make_whole(sums, scale)
            sums = [*(x[:, :stop] for x in sums[:2]), sums[2][:, : len(places)]]
            product, squares, walk = map(self.group.sum, sums)
            of_blocks = product[:, :count], squares[:, :count]
            found.append((of_blocks, (product[:, count:], squares[:, count:], walk)))
        return found

    def _add_natively(self, ks: slice, by_rows: list, by_cols: list) -> None:
        """Adds the shares of some of k: reads B for its sums over blocks, A, and B again."""
        part, s, threads = self.part, self.samples, self.team.threads
        count, across, down = ks.stop - ks.start, len(s.col_blocks), len(s.row_blocks)
        # Of columns that only fill vectors nothing is read.
        thin = np.empty((CLASSES, count, by_rows[0].shape[1]), self.kind)
        squares = np.empty(thin.shape[1:], self.kind)
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
        thin, squares = (np.empty((count, by_cols[0].shape[1]), self.kind) for _ in "12")
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
            whole = xp.zeros((filled(len(x), CLASSES), count))
            whole[: len(x)] = x
            product, of_squares, walk = (z[rows.start : rows.start + len(whole)] for z in by_rows)
            by_class, x = (  # of each class its rows
                z.reshape(-1, CLASSES, z.shape[1]).transpose(1, 0, 2) for z in (product, whole)
            )
            for slab in slabs:
                by_class += x[:, :, slab] @ thin[:, slab]
                walk += product[:, across:] ** 2
            of_squares += whole**2 @ squares

        high = filled(max(1, part.chunk // count), CLASSES)
        self.team.each(sum_rows, spans(part.m, high))
        of_cols[:, down : down + len(s.rows)] = self._a(s.rows, ks).T
        of_cols2[:, down : down + len(s.rows)] = of_cols[:, down : down + len(s.rows)] ** 2

        def sum_cols(cols: slice) -> None:
            product, of_squares, walk = (z[cols] for z in by_cols)
            for slab in slabs:
                product += y[slab, cols].T @ of_cols[slab]
                walk += product[:, down:] ** 2
            of_squares += (y[:, cols] ** 2).T @ of_cols2

        self.team.each(sum_cols, spans(part.n, high))

    def _whole(self) -> int:
        """Elements that are read."""
        part = self.part
        return (part.m + part.n) * part.k + part.m * part.n

    # --- of C -----------------------------------------------------------------------------

    def _own_blocks(self) -> tuple[slice, slice]:
        """Which blocks of rows and of columns are the strip's."""
        part, s = self.part, self.samples
        rows, cols = (
            slice(*np.searchsorted([b.start for b in blocks], [span.start, span.stop]).tolist())
            for blocks, span in ((s.row_blocks, part.rows), (s.col_blocks, part.cols))
        )
        return rows, cols

    def _sums_of_c(self, variances: tuple) -> tuple[list, list]:
        """The weighted sums of the strip by rows and by columns, C being read once: both with the
        noise that C's rounding leaves in them (`variances` are those of sums, C and C before), and
        where they miss an Inf or NaN."""
        part, s = self.part, self.samples
        down, across = self._own_blocks()
        row_blocks = [moved(block, -part.top) for block in s.row_blocks[down]]
        col_blocks = [moved(block, -part.left) for block in s.col_blocks[across]]
        shapes = (part.height, len(col_blocks)), (len(row_blocks), part.width)
        right, left = ([self.xp.zeros(shape) for _ in "12"] for shape in shapes)
        mixed = [np.zeros(shape, bool) for shape in shapes]
        if row_blocks and col_blocks:
            sums = row_blocks, col_blocks, variances, right, left
            if not (self.native and self._add_c_natively(*sums)):
                self._add_c(*sums, *mixed)
            self.team.tell(part.height * part.width / self._whole())
        return [*right, mixed[0]], [*left, mixed[1]]

    # Many parameters: what is read, how, and the sums.
    def _add_c_natively(self, row_blocks, col_blocks, variances, right, left) -> bool:
        """Whether float64 holds all sums, which are made then."""
        part = self.part
        rows, cols = self.row_factors[part.rows], self.col_factors[part.cols]
        reading = Pass(part.result, "f8", self.team.threads)
        reading.cut(row_blocks, col_blocks)
        reading.less(part.problem.beta, part.c_in, part.c_size, variances)
        reading.add_rows(self.left[part.rows] * rows, *left)
        reading.fold(self.right[:, part.cols] * cols, *right, origin=part.top)
        reading.run()
        for (of, squares), scale in (right, rows[:, None]), (left, cols):
            of *= scale
            squares *= scale**2
        fine = all(np.isfinite(x.sum()) for x in (*right, *left))
        fine &= bool(max(x[1].max() for x in (right, left)) < LARGE)
        for x in (*right, *left) if not fine else ():
            x[:] = 0
        return fine

    # Many parameters: what is read, how, and the sums.
    def _add_c(self, row_blocks, col_blocks, variances, right, left, in_right, in_left) -> None:
        """The same, of any arrays; marks sums without what they cannot hold."""
        xp, part = self.xp, self.part
        of_sums, of_c, of_before = variances
        ones = xp.zeros((part.width, len(col_blocks)))
        for i, block in enumerate(col_blocks):
            ones[block, i] = 1

        def some_rows(piece: tuple) -> None:
            r, here = piece
            rows = moved(here, part.top)
            c, before = self._c(rows, part.cols)
            product = c if before is None else c - before
            if self.infinite or not float((product * product).sum()) < LARGE:
                bad = self._without_infinite(c, before, rows)
                in_left[r] |= bad.any(axis=0)
                for i, block in enumerate(col_blocks):
                    in_right[here, i] |= bad[:, block].any(axis=1)
                product = c if before is None else c - before
            noise = of_sums * product * product + of_c * c * c
            if before is not None:
                size = self._size(before, rows, part.cols)
                noise += size * size * of_before
            u = self.left[rows]
            with self.lock:
                left[0][r] += u @ product
                left[1][r] += u**2 @ noise
            weights = self.right[:, part.cols][np.arange(rows.start, rows.stop) % CLASSES]
            right[0][here] = (product * weights) @ ones
            right[1][here] = (noise * weights**2) @ ones

        high = max(1, part.chunk // part.width)
        self.team.each(
            some_rows,
            [
                (r, moved(at, block.start))
                for r, block in enumerate(row_blocks)
                for at in spans(block.stop - block.start, high)
            ],
        )

    def _without_infinite(self, c, before, rows) -> np.ndarray:
        """Zeros in place of what sums or their squares cannot hold: where, but for what Inf and NaN
        of A and B have made."""
        xp, part = self.xp, self.part
        matrices = [x for x in (c, before) if x is not None]
        bad, dead = xp.zeros(c.shape, bool), xp.zeros(c.shape, bool)
        if self.infinite:
            dead[self.dead_rows[rows]] = True
            dead[:, self.dead_cols[part.cols]] = True
        for x in matrices:
            bad |= ~(abs(x) < LARGE)
        bad &= ~dead
        if some(bad):
            infinite = (
                ~xp.isfinite(c) if before is None else ~(xp.isfinite(c) & xp.isfinite(before))
            )
            self._possible(c, before, bad & infinite, rows)
        for x in matrices:
            x[bad | dead] = 0
        return on_host(bad)
