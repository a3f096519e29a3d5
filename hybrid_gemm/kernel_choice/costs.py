"""What a product costs a kernel, counted: the terms that a fitted time model weighs. Pure.

A time in microseconds is predicted as a sum of these counts, each times a constant that was fitted
to measured times (`bench/fitting.py`): the launch, the steps of k that the busiest multiprocessor
takes, the tiles that it writes, bytes from and to memory, partial sums that pass through memory,
and what packing an operand costs.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np

from ..catalog import ITEM_SIZE, Variant
from ..planning.plan import LINE_BYTES
from . import tensor_cores
from .side_by_side import Floats, SideBySide, Sides, alone, ceil_of

MB = 1e-6
_MFLOP = 1e-6
_WARP = 32  # threads
# Of a kernel on tensor cores: where its counts have that another launch adds something up, and how
# many MB; and microseconds of both, read off fp32x3 at 1536, 2304 and 3072 on one H100. Models of
# before the last tiles were cut have none.
ADDED, _ADDED_US = slice(8, 10), (3.0, 0.3)
# GB/s of C that is read where beta scales it, by the time which that adds: about the medians of
# shapes drawn at random and round ones, on an H200 (docs/notes/tensor-cores.md, What beta scales).
# Of 16 bits, our kernels on tensor cores reach less.
_OLD_GBPS, _OLD_NARROW_GBPS, _OLD_LIBRARY_GBPS = 4000.0, 1700.0, 3000.0


def adding_us(variant: Variant, sides: Sides, size: int) -> float:
    """What a product takes longer in microseconds where it adds to C, whose elements have `size`
    bytes. Models are fitted to products that do not."""
    m, n, _k = sides
    rate = _OLD_NARROW_GBPS if size == 2 and variant.kernel.role == "tensor" else _OLD_GBPS
    if variant.kernel.library:
        rate = _OLD_LIBRARY_GBPS
    return m * n * size / (rate * 1e3)


def counts(
    variant: Variant, sides: Sides, layout: str, dtype: str, multiprocessors: int
) -> tuple[float, ...]:
    """The counts of one product, as many for all variants of a kernel; zeros where the variant does
    not take it.

    `layout` are the storage orders of op(A) and op(B), such as "nt"; `dtype` what the operands hold
    in memory, and a kernel on tensor cores with three TERMS packs as 16 bits.
    """
    if variant.kernel.library:
        return tuple(map(float, _library(None, sides, layout, dtype, multiprocessors)))
    those = alone(variant)
    taken = bool(those.take(sides, dtype)[0])
    counted = counts_of(those, sides if taken else (1, 1, 1), layout, dtype, multiprocessors)
    return tuple((counted[:, 0] * taken).tolist())


def counts_of(
    variants: SideBySide, sides: Sides, layout: str, dtype: str, multiprocessors: int
) -> np.ndarray:
    """As `counts`, of variants that are `alike`: an array with a row for each count, and a column
    for each variant, which means nothing where that does not take the product."""
    m, n, k = map(float, sides)
    count = _formula(variants.variants[0])
    found = count(variants, (m, n, k), layout, dtype, multiprocessors)
    made = np.empty((len(found), len(variants.variants)))
    for row, each in zip(made, found, strict=True):
        row[:] = each
    return made


def alike(variant: Variant) -> Hashable:
    """What variants have in common that are counted together."""
    return _formula(variant), variant.params.get("TERMS")


def _formula(variant: Variant) -> Callable[[SideBySide, Floats, str, str, int], Sequence[Any]]:
    if variant.kernel.library:
        return _library
    if variant.kernel.role == "tensor":
        return _tensor
    return _OF_THIN.get(variant.name.removesuffix("_narrow"), _strict)


def with_parts(variant: Variant, constants: Sequence[float]) -> list[float]:
    """A variant's constants with what adding parts of the last tiles costs, where it cuts these and
    no time in the model has that."""
    made = list(constants)
    if variant.cuts_last and not any(made[ADDED]):
        made[ADDED] = _ADDED_US
    return made


def leading(sides: Floats, layout: str) -> tuple[float, float]:
    """The leading dimensions of A and B that are stored whole."""
    m, n, k = sides
    return m if layout[0] == "t" else k, k if layout[1] == "t" else n


def off_line(sides: Floats, layout: str, dtype: str) -> tuple[bool, bool]:
    """Whether rows of A, and of B, begin elsewhere than on 16 bytes."""
    size = ITEM_SIZE[dtype]
    a, b = (bool(ld * size % LINE_BYTES) for ld in leading(sides, layout))
    return a, b


@functools.lru_cache(maxsize=16)  # the same for all variants
def _matrices(sides: Floats, layout: str, dtype: str) -> tuple[float, float, bool, bool]:
    """Megabytes of A and B, and of C, and `off_line`."""
    (m, n, k), size = sides, ITEM_SIZE[dtype]
    return (m * k + k * n) * size * MB, m * n * size * MB, *off_line(sides, layout, dtype)


def _library(
    _variants: SideBySide | None, sides: Floats, layout: str, dtype: str, multiprocessors: int
) -> Sequence[Any]:
    """Of a library, which does not say what it does: work, bytes, and rounds of two tiles."""
    m, n, k = sides
    read, written, *off_lines = _matrices(sides, layout, dtype)
    work, off = m * n * k * _MFLOP, sum(off_lines)
    large = math.ceil(math.ceil(m / 128) * math.ceil(n / 256) / multiprocessors)
    small = math.ceil(math.ceil(m / 64) * math.ceil(n / 64) / multiprocessors)
    return 1, work, read, written, large * k, small * k, work * off, read * off, k


def _strict(
    variants: SideBySide, sides: Floats, layout: str, dtype: str, multiprocessors: int
) -> Sequence[Any]:
    """Of a kernel on ordinary cores, whose blocks may share a tile's steps of k (shares.cuh)."""
    m, n, k = sides
    read, out, *off_lines = _matrices(sides, layout, dtype)
    bm, bn = variants.tile
    tiles = ceil_of(m, bm) * ceil_of(n, bn)
    steps = ceil_of(k, variants.param("BK", 8))
    blocks = variants.blocks(sides, dtype)
    loaded = ceil_of(blocks, multiprocessors)  # blocks of the busiest multiprocessor
    of_block = ceil_of(tiles, blocks)  # tiles that it takes in turn, or has a part of
    cuts = variants.of("cuts k", lambda v: v.kernel.shares_k) > 0  # parts of a tile
    shares, even = blocks / tiles, blocks % tiles == 0
    each = np.where(even | cuts, ceil_of(tiles * steps, blocks), of_block * steps)
    written = loaded * of_block
    apart = cuts & ((shares > variants.cluster) | (tiles % blocks > 0))
    parts = apart * blocks * (bm * bn * ITEM_SIZE[dtype] * MB)
    pairs = ceil_of(blocks, 2 * multiprocessors)  # of blocks side by side on a multiprocessor
    waves = ceil_of(blocks, variants.param("RESIDENT", 1) * multiprocessors)
    off = sum(off_lines)
    off_c = float(n * ITEM_SIZE[dtype] % LINE_BYTES > 0)
    return (
        1, loaded * each, pairs * each, written, read, out, apart, parts, loaded * each * off,
        apart * shares, waves * each, waves, out * off_c, waves * each * off,
        blocks * each / multiprocessors,
    )  # fmt: skip


def _line(
    variants: SideBySide, sides: Floats, layout: str, dtype: str, multiprocessors: int
) -> Sequence[Any]:
    """Of `gemv`, by how the matrix lies: the counts of one way are those of the other, moved."""
    (m, n, k), size = sides, ITEM_SIZE[dtype]
    wide, threads, fly = map(variants.param, ("WIDE", "THREADS", "FLY"))
    along = layout[0] == "n" if n == 1 else layout[1] == "t"
    length = m if n == 1 else n
    blocks = variants.blocks(sides, dtype)
    shares = np.maximum(1, blocks // ceil_of(length, wide))
    taken = threads * fly * LINE_BYTES // size  # elements of a step of a block
    steps = ceil_of(ceil_of(k, shares), np.maximum(1, taken // wide))
    loaded = ceil_of(blocks, multiprocessors)
    # Blocks of so many registers that a multiprocessor has at a time.
    waves = ceil_of(blocks, np.maximum(1, multiprocessors * 6144 // (threads * fly)))
    pitch = (k if along else length) * size
    busiest = loaded * steps * taken * size * multiprocessors * MB
    short = np.maximum(0, 128 / (wide * size) - 1)  # of a line of 128 bytes, what others read
    work = m * n * k * size * MB
    found = (
        shares > 1, np.log2(shares), work, busiest, waves * steps, waves,
        busiest * (pitch % LINE_BYTES > 0), busiest * (pitch % 4 > 0), 0 if along else short * work,
    )  # fmt: skip
    return _of_one_way(found, along)


def _of_one_way(found: tuple[Any, ...], along: bool) -> Sequence[Any]:
    """Counts of a launch whose matrix lies along k or across it: those of the other way are 0."""
    nothing = (0,) * len(found)
    return (1, *(found + nothing if along else nothing + found))


def _skinny(
    variants: SideBySide, sides: Floats, layout: str, dtype: str, multiprocessors: int
) -> Sequence[Any]:
    """Of `skinny`, by how the large matrix lies, as `_line`: steps of 128 of k that blocks take."""
    (m, n, k), size = sides, ITEM_SIZE[dtype]
    wide, thin = variants.param("WIDE"), variants.param("THIN")
    along = layout[0] == "n" if n <= m else layout[1] == "t"
    length = max(m, n)
    blocks = variants.blocks(sides, dtype)
    shares = np.maximum(1, blocks // ceil_of(length, wide))
    steps = 2 * ceil_of(ceil_of(k, 256), shares)
    loaded = ceil_of(blocks, multiprocessors)
    waves = ceil_of(blocks, 2 * multiprocessors)
    busiest = loaded * steps * 128 * wide * size * multiprocessors * MB
    off = (k if along else length) * size % LINE_BYTES > 0
    found = (
        shares > 1, np.log2(shares), length * k * size * MB, busiest, waves * steps, waves,
        busiest * off, blocks * thin * wide * 4 * MB,
    )  # fmt: skip
    return _of_one_way(found, along)


def _tall(
    variants: SideBySide, sides: Floats, layout: str, dtype: str, multiprocessors: int
) -> Sequence[Any]:
    """Of `tall`: lines of the long operand, read once, and of C, with those that the busiest
    multiprocessor makes beyond the last."""
    (m, n, k), size = sides, ITEM_SIZE[dtype]
    thin, width = variants.param("THIN"), min(m, n)
    of_block = variants.param("THREADS") * variants.param("LINES")
    out = variants.param("OUT", size)
    loaded = ceil_of(variants.blocks(sides, dtype), multiprocessors)
    lines = loaded * of_block * multiprocessors
    high = m >= n
    along = layout[0] == "n" if high else layout[1] == "t"
    reading = lines * (_requests(k, size) if along else k / _WARP)
    storing: Any = width / _WARP
    if high:  # through shared memory where lines are no vectors: an even width has conflicts
        conflicts = width * math.gcd(int(width), _WARP) / _WARP
        storing = np.where(width * out % LINE_BYTES > 0, conflicts, _requests(width, out))
    return (
        1, loaded, loaded * k * thin, lines * k * size * MB, lines * width * out * MB,
        lines * k * thin * _MFLOP, reading * _MFLOP, lines * storing * _MFLOP,
    )  # fmt: skip


def _dots(
    variants: SideBySide, sides: Floats, layout: str, dtype: str, multiprocessors: int
) -> Sequence[Any]:
    """Of `dots`: A and B as often as tiles read them, for the k of the busiest multiprocessor."""
    (m, n, k), size = sides, ITEM_SIZE[dtype]
    (bm, bn), threads = variants.tile, variants.param("THREADS")
    tiles = ceil_of(m, bm) * ceil_of(n, bn)
    blocks = variants.blocks(sides, dtype)
    shares = np.maximum(1, blocks // tiles)
    loaded = ceil_of(blocks, multiprocessors)
    taken = loaded * ceil_of(ceil_of(k, threads), shares) * threads * multiprocessors
    requests = sum(
        tile / side * _requests(side, size) if across else tile / _WARP
        for tile, side, across in ((bm, m, layout[0] == "t"), (bn, n, layout[1] == "n"))
    )
    return (
        1, shares > 1, np.log2(shares) * tiles, (m + n) * k * size * MB,
        taken * (bm + bn) * size * MB, taken * bm * bn * _MFLOP, taken * requests * _MFLOP, loaded,
    )  # fmt: skip


def _outer(
    variants: SideBySide, sides: Floats, layout: str, dtype: str, multiprocessors: int
) -> Sequence[Any]:
    """Of `outer`: what is written of C, with tiles beyond its edges, and what is taken for it."""
    (m, n, _k), size = sides, ITEM_SIZE[dtype]
    (rows, columns), depth = variants.tile, variants.param("DEPTH")
    out = variants.param("OUT", size)
    loaded = ceil_of(variants.blocks(sides, dtype), multiprocessors)
    elements = loaded * multiprocessors * rows * columns
    off = n * out % 128 > 0  # warps write parts of two lines of 128 bytes
    return (
        1, loaded, loaded * depth * (rows + columns), elements * _MFLOP, m * n * out * MB,
        m * n * out * off * MB, elements * depth * _MFLOP,
    )  # fmt: skip


def _requests(length: float, size: Any) -> Any:
    """Lines of 128 bytes that are asked for a row of `length` elements, of rows one after another
    in memory: a warp's lanes read one each, by the largest pieces that rows are made of."""
    held = np.multiply(length, size).astype(np.int64)
    pieces = held / np.gcd(held, LINE_BYTES)
    return pieces * np.minimum(_WARP, ceil_of(_WARP * held, 128)) / _WARP


_OF_THIN = {
    "gemv": _line, "skinny": _skinny, "tall": _tall, "dots": _dots, "outer": _outer,
}  # fmt: skip


def _tensor(
    variants: SideBySide, sides: Floats, layout: str, dtype: str, multiprocessors: int
) -> Sequence[Any]:
    """Of a kernel on tensor cores, of adding shares of k, and of packing what it cannot read as it
    lies. What reads operands in place copies by words, and packs nothing."""
    m, n, k = sides
    (bm, bn), in_place = variants.tile, variants.in_place
    read, written, *off_lines = _matrices(sides, layout, dtype)
    split = variants.variants[0].params["TERMS"] == 3
    operands = "float16" if split else {"float32": "tfloat32"}.get(dtype, dtype)
    _us, cut, (steps, rounds), summed = tensor_cores.best(
        variants, m, n, k, operands, multiprocessors
    )
    tiles, summed = ceil_of(m, bm * variants.cluster) * ceil_of(n, bn), summed * MB
    size = ITEM_SIZE[dtype] * MB
    packed = [
        x * size if split or off else 0.0 for x, off in zip((m * k, k * n), off_lines, strict=True)
    ]
    loads = tiles * cut.shares * cut.steps / multiprocessors
    out_off = written * (n * variants.param("OUT") % LINE_BYTES > 0)
    wide = ITEM_SIZE[dtype] == 4 and not split
    if wide and layout == "tn" and not any(packed):  # of two across k, one is packed
        packed[m > n] = (m * k, k * n)[m > n] * size
    across = [layout[0] == "t", layout[1] == "n"]  # how A and B lie
    turned = wide and any(x and not y for x, y in zip(across, packed, strict=True))
    turning = sum(x for x, y in zip(packed, across, strict=True) if y)
    packs = ~in_place
    return (
        1, steps, rounds, read, written, packs * any(packed), packs * (sum(packed) - turning),
        steps * np.where(in_place, sum(off_lines), turned), summed > 0, summed, packs * turning,
        out_off, loads,
    )  # fmt: skip
