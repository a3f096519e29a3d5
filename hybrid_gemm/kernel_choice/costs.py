"""What a product costs a kernel, counted: the terms that a fitted time model weighs. Pure.

A time in microseconds is predicted as a sum of these counts, each times a constant that was fitted
to measured times (`bench/fitting.py`): the launch, the steps of k that the busiest multiprocessor
takes, the tiles that it writes, bytes from and to memory, partial sums that pass through memory,
and what packing an operand costs.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

from ..catalog import ITEM_SIZE, Variant
from . import tensor_cores

Sides = tuple[int, int, int]  # m, n, k
MB = 1e-6
_MFLOP = 1e-6
_WARP = 32  # threads
_LINE = 16  # bytes on which rows begin that can be read as vectors, or by TMA
# Of a kernel on tensor cores: where its counts have that another launch adds something up, and how
# many MB; and microseconds of both where models have none, for they were fitted before the last
# tiles were cut: read off fp32x3 at 1536, 2304 and 3072 on one H100.
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
    """The counts of one product, as many for all variants of a kernel.

    `layout` are the storage orders of op(A) and op(B), such as "nt"; `dtype` what the operands hold
    in memory, and a kernel on tensor cores with three TERMS packs as 16 bits.
    """
    if variant.kernel.library:
        return _library(sides, layout, dtype, multiprocessors)
    count = _OF_THIN.get(variant.name.removesuffix("_narrow"), _strict)
    if variant.kernel.role == "tensor":
        count = _tensor
    if not variant.takes(*sides, dtype):
        return (0.0,) * len(count(variant, (1, 1, 1), layout, dtype, multiprocessors))
    return count(variant, sides, layout, dtype, multiprocessors)


def with_parts(variant: Variant, constants: Sequence[float]) -> list[float]:
    """A variant's constants with what adding parts of the last tiles costs, where it cuts these and
    no time in the model has that."""
    made = list(constants)
    if variant.cuts_last and not any(made[ADDED]):
        made[ADDED] = _ADDED_US
    return made


def leading(sides: Sides, layout: str) -> tuple[int, int]:
    """The leading dimensions of A and B that are stored whole."""
    m, n, k = sides
    return m if layout[0] == "t" else k, k if layout[1] == "t" else n


def off_line(sides: Sides, layout: str, dtype: str) -> tuple[bool, bool]:
    """Whether rows of A, and of B, begin elsewhere than on 16 bytes."""
    size = ITEM_SIZE[dtype]
    a, b = (bool(ld * size % _LINE) for ld in leading(sides, layout))
    return a, b


def _ceil(x: int, y: int) -> int:
    return -(-x // y)


@functools.lru_cache(maxsize=16)  # the same for all variants
def _matrices(sides: Sides, layout: str, dtype: str) -> tuple[float, float, bool, bool]:
    """Megabytes of A and B, and of C, and `off_line`."""
    (m, n, k), size = sides, ITEM_SIZE[dtype]
    return (m * k + k * n) * size * MB, m * n * size * MB, *off_line(sides, layout, dtype)


def _library(sides: Sides, layout: str, dtype: str, multiprocessors: int) -> tuple[float, ...]:
    """Of a library, which does not say what it does: work, bytes, and rounds of two tiles."""
    m, n, k = sides
    read, written, *off_lines = _matrices(sides, layout, dtype)
    work, off = m * n * k * _MFLOP, sum(off_lines)
    large = _ceil(_ceil(m, 128) * _ceil(n, 256), multiprocessors)
    small = _ceil(_ceil(m, 64) * _ceil(n, 64), multiprocessors)
    return 1, work, read, written, large * k, small * k, work * off, read * off, k


def _strict(
    variant: Variant, sides: Sides, layout: str, dtype: str, multiprocessors: int
) -> tuple[float, ...]:
    """Of a kernel on ordinary cores, whose blocks may share a tile's steps of k (shares.cuh)."""
    m, n, k = sides
    read, out, *off_lines = _matrices(sides, layout, dtype)
    bm, bn = variant.tile
    tiles = _ceil(m, bm) * _ceil(n, bn)
    steps = _ceil(k, variant.params.get("BK", 8))
    blocks = variant.blocks(m, n, k, dtype)
    loaded = _ceil(blocks, multiprocessors)  # blocks of the busiest multiprocessor
    apart = variant.kernel.shares_k and variant.params.get("SPLIT", 2) > 1  # parts of a tile
    shares = blocks / tiles
    if blocks % tiles == 0:  # as many blocks for every tile
        each, written = _ceil(steps, blocks // tiles), loaded
    else:  # each block takes tile after tile
        each = _ceil(tiles * steps, blocks) if apart else _ceil(tiles, blocks) * steps
        written = loaded * _ceil(tiles, blocks)
    apart = apart and (shares > variant.cluster or tiles % blocks != 0)
    parts = blocks * bm * bn * ITEM_SIZE[dtype] * MB if apart else 0.0
    pairs = _ceil(blocks, 2 * multiprocessors)  # of blocks side by side on a multiprocessor
    resident = variant.params.get("RESIDENT", 1)
    waves = _ceil(blocks, resident * multiprocessors)
    off = sum(off_lines)
    off_c = float(n * ITEM_SIZE[dtype] % _LINE > 0)
    return (
        1, loaded * each, pairs * each, written, read, out, float(apart), parts,
        loaded * each * off, shares if apart else 0.0, waves * each, waves, out * off_c,
        waves * each * off, blocks * each / multiprocessors,
    )  # fmt: skip


def _line(
    variant: Variant, sides: Sides, layout: str, dtype: str, multiprocessors: int
) -> tuple[float, ...]:
    """Of `gemv`, by how the matrix lies: the counts of one way are those of the other, moved."""
    m, n, k = sides
    params, size = variant.params, ITEM_SIZE[dtype]
    wide, threads, fly = params["WIDE"], params["THREADS"], params["FLY"]
    along = layout[0] == "n" if n == 1 else layout[1] == "t"
    length = m if n == 1 else n
    blocks = variant.blocks(m, n, k, dtype)
    shares = blocks // max(1, _ceil(length, wide))
    taken = threads * fly * _LINE // size  # elements of a step of a block
    steps = _ceil(_ceil(k, max(1, shares)), max(1, taken // wide))
    loaded = _ceil(blocks, multiprocessors)
    # Blocks of so many registers that a multiprocessor has at a time.
    waves = _ceil(blocks, max(1, multiprocessors * 6144 // (threads * fly)))
    pitch = (k if along else length) * size
    busiest = loaded * steps * taken * size * multiprocessors * MB
    short = max(0.0, 128 / (wide * size) - 1)  # of a line of 128 bytes, what others read
    counted = (
        shares > 1, math.log2(max(1, shares)), m * n * k * size * MB, busiest, waves * steps, waves,
        busiest * (pitch % _LINE > 0), busiest * (pitch % 4 > 0),
        0.0 if along else short * m * n * k * size * MB,
    )  # fmt: skip
    found = tuple(map(float, counted))
    nothing = (0.0,) * len(found)
    return (1.0, *(found + nothing if along else nothing + found))


def _tall(
    variant: Variant, sides: Sides, layout: str, dtype: str, multiprocessors: int
) -> tuple[float, ...]:
    """Of `tall`: lines of the long operand, read once, and of C, with those that the busiest
    multiprocessor makes beyond the last."""
    m, n, k = sides
    params, size = variant.params, ITEM_SIZE[dtype]
    thin, width, of_block = params["THIN"], min(m, n), params["THREADS"] * params["LINES"]
    out = params.get("OUT", size)
    blocks = variant.blocks(m, n, k, dtype)
    loaded = _ceil(blocks, multiprocessors)
    lines = loaded * of_block * multiprocessors
    high = m >= n
    along = layout[0] == "n" if high else layout[1] == "t"
    reading = lines * (_requests(k, size) if along else k / _WARP)
    if not high:
        storing = width / _WARP
    elif width * out % _LINE:  # through shared memory, where an even width has conflicts
        storing = width * math.gcd(width, _WARP) / _WARP
    else:
        storing = _requests(width, out)
    return (
        1, loaded, loaded * k * thin, lines * k * size * MB, lines * width * out * MB,
        lines * k * thin * _MFLOP, reading * _MFLOP, lines * storing * _MFLOP,
    )  # fmt: skip


def _dots(
    variant: Variant, sides: Sides, layout: str, dtype: str, multiprocessors: int
) -> tuple[float, ...]:
    """Of `dots`: A and B as often as tiles read them, for the k of the busiest multiprocessor."""
    m, n, k = sides
    (bm, bn), threads, size = variant.tile, variant.params["THREADS"], ITEM_SIZE[dtype]
    tiles = _ceil(m, bm) * _ceil(n, bn)
    blocks = variant.blocks(m, n, k, dtype)
    shares = blocks // tiles
    loaded = _ceil(blocks, multiprocessors)
    taken = loaded * _ceil(_ceil(k, threads), max(1, shares)) * threads * multiprocessors
    requests = sum(
        tile / side * _requests(side, size) if across else tile / _WARP
        for tile, side, across in ((bm, m, layout[0] == "t"), (bn, n, layout[1] == "n"))
    )
    return (
        1, float(shares > 1), math.log2(max(1, shares)) * tiles, (m + n) * k * size * MB,
        taken * (bm + bn) * size * MB, taken * bm * bn * _MFLOP, taken * requests * _MFLOP, loaded,
    )  # fmt: skip


def _outer(
    variant: Variant, sides: Sides, layout: str, dtype: str, multiprocessors: int
) -> tuple[float, ...]:
    """Of `outer`: what is written of C, with tiles beyond its edges, and what is taken for it."""
    m, n, k = sides
    (rows, columns), size = variant.tile, ITEM_SIZE[dtype]
    depth, out = variant.params["DEPTH"], variant.params.get("OUT", size)
    loaded = _ceil(variant.blocks(m, n, k, dtype), multiprocessors)
    elements = loaded * multiprocessors * rows * columns
    off = float(n * out % 128 > 0)  # warps write parts of two lines of 128 bytes
    return (
        1, loaded, loaded * depth * (rows + columns), elements * _MFLOP, m * n * out * MB,
        m * n * out * off * MB, elements * depth * _MFLOP,
    )  # fmt: skip


def _requests(length: int, size: int) -> float:
    """Lines of 128 bytes that are asked for a row of `length` elements, of rows one after another
    in memory: a warp's lanes read one each, by the largest pieces that rows are made of."""
    pieces = length * size / math.gcd(length * size, _LINE)
    return pieces * min(_WARP, _ceil(_WARP * length * size, 128)) / _WARP


_OF_THIN = {"gemv": _line, "tall": _tall, "dots": _dots, "outer": _outer}


def _tensor(
    variant: Variant, sides: Sides, layout: str, dtype: str, multiprocessors: int
) -> tuple[float, ...]:
    """Of a kernel on tensor cores, of adding shares of k, and of packing what it cannot read as it
    lies."""
    m, n, k = sides
    (bm, bn), cluster = variant.tile, variant.cluster
    read, written, *off_lines = _matrices(sides, layout, dtype)
    split = variant.params["TERMS"] == 3
    operands = "float16" if split else {"float32": "tfloat32"}.get(dtype, dtype)
    cut = tensor_cores.cut(variant, m, n, k, operands, multiprocessors)
    tiles, shares = _ceil(m, bm * cluster) * _ceil(n, bn), cut.shares
    busy = tensor_cores.busiest(cut, tiles, tensor_cores.slots(variant, multiprocessors))
    steps, rounds = busy
    summed = tensor_cores.summed_bytes(cut, variant, m, n) * MB
    size = ITEM_SIZE[dtype] * MB
    packed = [
        x * size if split or off else 0.0 for x, off in zip((m * k, k * n), off_lines, strict=True)
    ]
    loads = tiles * shares * cut.steps / multiprocessors
    out_off = written * (n * (variant.params["OUT"]) % _LINE > 0)
    if variant.kernel.in_place:  # it copies by words, and packs nothing
        words = steps * sum(off_lines)
        return (
            1, steps, rounds, read, written, 0.0, 0.0, words, float(summed > 0), summed,
            0.0, out_off, loads,
        )  # fmt: skip
    wide = ITEM_SIZE[dtype] == 4 and not split
    if wide and layout == "tn" and not any(packed):  # of two across k, one is packed
        packed[m > n] = (m * k, k * n)[m > n] * size
    across = [layout[0] == "t", layout[1] == "n"]  # how A and B lie
    turned = wide and any(x and not y for x, y in zip(across, packed, strict=True))
    turning = sum(x for x, y in zip(packed, across, strict=True) if y)
    return (
        1, steps, rounds, read, written, float(any(packed)), sum(packed) - turning,
        steps * float(turned), float(summed > 0), summed, turning, out_off, loads,
    )  # fmt: skip
