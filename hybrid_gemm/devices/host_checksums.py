"""Weighted sums of matrices in the host's memory, as `checksums.py` says: by native threads
(`native_sums.py`), or by NumPy where there are none, or little to add up."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from ..host.resources import cores
from ..planning.partition import Span, cut
from . import native_passes, native_sums
from .base import Device, Stream
from .checksums import GROUPS, Sums, Weights, is_exact, width
from .cpu import CpuDevice

LEAST = 1 << 16  # elements that native threads add up: NumPy takes about as long for fewer
CHUNK_BYTES = 8 << 20  # of float64 that NumPy makes at a time
CACHED_BYTES = 256 << 10  # that stay in a core's cache
THREADED_BYTES, THREADS = 8 << 20, max(1, min(8, cores()))  # for sums of words


def _is_native(x: np.ndarray) -> bool:
    """Whether native threads add a matrix up. Of one size and storage order they always do or never
    do: NumPy rounds sums otherwise, and some are compared bit by bit."""
    return x.size >= LEAST and native_sums.takes(x) and not native_sums.unavailable()


class HostChecksums:
    """What `KernelChecksums` makes, of matrices in any storage order."""

    judge = None

    def __init__(self, device: Device) -> None:
        self.device, self.weights = device, Weights(device)

    def prepare(self, a: np.ndarray, b: np.ndarray, dtype: str) -> None:
        """Compiles native sums, where there are matrices for them: in a product its time counts."""
        if max(a.size, b.size, a.shape[0] * b.shape[1]) >= LEAST:
            native_sums.unavailable(), native_passes.unavailable()

    def sums(self, x: np.ndarray, stream: Stream) -> Sums:
        if _is_native(x):
            weights = self.weights.of(x.shape[1], exact=is_exact(x.dtype))
            return Sums(*native_sums.weighted(x, weights, width(x.shape[1]), self._threads()))
        if is_exact(x.dtype):
            weights = self.weights.of(x.shape[1], exact=True)
            return Sums(_exact(x, weights), _exact(x, weights >> np.uint64(32)))
        rows, cols = x.shape
        weights = self.weights.of(cols, exact=False)[:cols]
        sums, squares = np.empty((rows, GROUPS)), np.empty((rows, GROUPS))
        step, wide = max(1, CHUNK_BYTES // 8 // max(1, cols)), width(cols)
        groups = [slice(group * wide, (group + 1) * wide) for group in range(GROUPS)]
        with np.errstate(all="ignore"):
            for i in range(0, rows, step):
                part = x[i : i + step].astype("f8")
                for group, own in enumerate(groups):
                    np.matmul(part[:, own], weights[own], out=sums[i : i + step, group])
                part *= part
                for group, own in enumerate(groups):
                    np.matmul(part[:, own], weights[own] ** 2, out=squares[i : i + step, group])
        return Sums(sums, squares)

    def product(self, a: np.ndarray, b: np.ndarray, stream: Stream) -> Sums:
        of_b = self.sums(b, stream)
        if _is_native(a) and not native_passes.unavailable():
            return Sums(*native_sums.product(a, *of_b, self._threads()))
        if is_exact(a.dtype):
            wide = a.astype("u8")
            return Sums(wide @ of_b.of, wide @ of_b.second)
        rows, k = a.shape
        sums, squares = np.zeros((rows, GROUPS)), np.zeros((rows, 1))
        step = max(1, CHUNK_BYTES // 8 // max(1, k))
        with np.errstate(all="ignore"):
            most = of_b.second.max(axis=1, keepdims=True)
            for i in range(0, rows, step):
                part = a[i : i + step].astype("f8")
                sums[i : i + step] = part @ of_b.of
                part *= part
                squares[i : i + step] = part @ most
        return Sums(sums, squares)

    def _threads(self) -> int:
        """As many as BLAS has, or those that multiply together beside other workers."""
        return self.device.share if isinstance(self.device, CpuDevice) else cores()

    def bits(self, x: np.ndarray, stream: Stream) -> np.ndarray:
        words = np.ascontiguousarray(x).view(f"u{x.dtype.itemsize}")
        return _exact(words, self.weights.of(x.shape[1], exact=True), of=_squares)

    def lines(self, x: np.ndarray, stream: Stream) -> np.ndarray:
        return line_sums(x)


def _exact(
    x: np.ndarray, weights: np.ndarray, of: Callable[[np.ndarray], np.ndarray] | None = None
) -> np.ndarray:
    """Weighted sums modulo 2^64 of the groups of each row: of integers, or of what `of` makes of
    them."""
    rows, cols = x.shape
    sums = np.zeros((rows, GROUPS), np.uint64)
    step = max(1, CHUNK_BYTES // 8 // max(1, cols))
    for i in range(0, rows, step):
        part = of(x[i : i + step]) if of else x[i : i + step].astype("u8")
        _add_up(part * weights[:cols], sums[i : i + step])
    return sums


def _add_up(x: np.ndarray, groups: np.ndarray) -> None:
    """The sums of the groups' columns, into `groups`."""
    if x.size:
        starts = range(0, x.shape[1], width(x.shape[1]))
        np.add.reduceat(x, list(starts), axis=1, out=groups[:, : len(starts)])


def _squares(x: np.ndarray) -> np.ndarray:
    """Words as the kernels sum bits: equal changes of several do not cancel."""
    if x.dtype.itemsize < 8:
        wide = x.astype(np.uint64)
        wide *= wide
        return wide
    low, high = x & np.uint64(0xFFFFFFFF), x >> np.uint64(32)
    return low * low + high * high * np.uint64(0x9E3779B97F4A7C15)


def line_sums(x: np.ndarray) -> np.ndarray:
    """The sum of the squares of each row of unsigned words, modulo 2^64, by some threads."""
    if x.size >= LEAST and native_sums.takes_lines(x) and not native_sums.unavailable():
        return native_sums.lines(x, THREADS)
    made = np.empty(len(x), np.uint64)
    step = max(1, CACHED_BYTES // 8 // max(1, x.shape[1]))

    def some(rows: Span) -> None:
        for i in range(rows.start, rows.stop, step):
            own = slice(i, min(i + step, rows.stop))
            np.add.reduce(_squares(x[own]), axis=1, out=made[own])

    if x.nbytes < THREADED_BYTES:
        some(Span(0, len(x)))
    else:
        with ThreadPoolExecutor(THREADS) as pool:
            list(pool.map(some, cut(len(x), THREADS)))
    return made
