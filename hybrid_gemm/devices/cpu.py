"""The CPU as a device: NumPy's BLAS, on views of the caller's own arrays."""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import numpy as np
import threadpoolctl
from numpy.typing import DTypeLike

from ..arrays.caller_arrays import silent
from ..catalog import Variant
from ..errors import UnavailableError, counted
from ..host import forks
from ..host.resources import cores, memory_available
from ..planning.hardware import DeviceSpec
from ..planning.partition import cut
from .base import Array, Device, Stream

CHUNK_BYTES = 64 << 20  # what a product's temporary may take when beta or dtypes need one
CAST = 1 << 17  # elements that are cast at a time


@functools.cache
def _blas() -> threadpoolctl.ThreadpoolController:
    return threadpoolctl.ThreadpoolController()  # finding the libraries takes 10 ms


def _blas_threads() -> int:
    return max((x.num_threads for x in _blas().select(user_api="blas").lib_controllers), default=1)


def _any_thread_may_limit() -> None:
    """threadpoolctl from 3.8 on lets only the thread that limited OpenBLAS first change that, and
    ignores others without a word: a session that ends last would restore nothing."""
    clear = getattr(threadpoolctl.OpenBLASController, "clear_controlling_thread", None)
    if clear:
        clear(force=True)


class _BlasLimits:
    """The limits that sessions set on BLAS, whose number of threads is the whole process's.

    The lowest of those that last holds, if BLAS had more threads; when none lasts any more, it has
    those that it had before, in whatever order they ended.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a signal's handler that multiplies may come in between
        self._limits: list[int] = []  # of the sessions that last
        self._had = 1  # threads of BLAS before these
        self._before: Any = None  # as threadpoolctl restores it

    @contextlib.contextmanager
    def at_most(self, threads: int) -> Iterator[None]:
        try:
            with self._lock:
                self._change([*self._limits, threads])
            yield
        finally:
            with self._lock:
                if threads in self._limits:  # not in a child that was forked meanwhile
                    rest = self._limits.copy()
                    rest.remove(threads)
                    self._change(rest)

    def _change(self, limits: list[int]) -> None:
        if not self._limits:
            self._had = _blas_threads()
        before, now = (min([self._had, *x]) for x in (self._limits, limits))
        self._limits = limits  # now: who comes in between finds that they are being set
        if before != now:
            _any_thread_may_limit()
            if now == self._had and self._before:
                self._before.restore_original_limits()
            elif before == self._had:
                self._before = _blas().limit(limits=now, user_api="blas")
            else:
                _blas().limit(limits=now, user_api="blas")
            _any_thread_may_limit()

    def forget(self) -> None:
        """Ends the sessions of threads that did not come along to a forked child."""
        self._lock = threading.RLock()
        if self._limits:
            self._change([])


_limits = _BlasLimits()
_with_pools: weakref.WeakSet[CpuDevice] = weakref.WeakSet()


def _forget() -> None:
    _limits.forget()
    for device in list(_with_pools):
        device.start_pool()


forks.forget_in_child(_forget)


class CpuDevice(Device):
    """`workers` threads share the cores evenly.

    A BLAS library runs calls of several threads at once only while each is single-threaded;
    so a lone worker lets BLAS use all cores, and a worker among several cuts its box into as
    many parts as it has cores.
    """

    kind = "cpu"
    host_memory = True
    chunk_flops = 50 * 10**9

    def __init__(self, workers: int = 1):
        if np.__version__ == "2.3.0":  # numpy issue 29164
            raise UnavailableError(
                "NumPy 2.3.0 multiplies wrongly into arrays with steps; any other version works"
            )
        self.name, self.workers = "cpu", workers
        self._pool: ThreadPoolExecutor | None = None
        self.share_cores(1)

    def share_cores(self, processes: int) -> None:
        """Leaves cores to others of so many processes that run on the same ones."""
        self.cores = max(1, cores() // processes)
        self.share = max(1, self.cores // self.workers)
        self.blas_threads = self.cores if self.workers == 1 else 1
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None
        if self.workers > 1 and self.share > 1:
            self.start_pool()
            _with_pools.add(self)

    def start_pool(self) -> None:
        """Gives the device threads, in place of those it may have had."""
        self._pool = ThreadPoolExecutor(self.cores)

    def describe(self) -> str:
        return f"cpu, {counted(self.cores, 'core')}"

    def spec(self, dtype: str = "float32", mode: str | None = None) -> DeviceSpec:
        return DeviceSpec(
            self.name, self.kind, 0, memory_available(),
            tflops=0.05 * self.cores, memory_gbps=10, host_memory=True, on_gpu=False, alignment=1,
            rated=True,  # once `cpu_rates` has measured this host
        )  # fmt: skip

    def limits_blas(self) -> bool:
        """Whether BLAS has more threads than a session lets it have."""
        return _blas_threads() > self.blas_threads

    @contextlib.contextmanager
    def session(self) -> Iterator[None]:
        """Limits BLAS to this device's threads: the whole process's BLAS, while it lasts."""
        with _limits.at_most(self.blas_threads):
            yield

    def empty(self, rows: int, cols: int, dtype: DTypeLike) -> np.ndarray:
        return np.empty((rows, cols), dtype)

    def copy(self, dst: Array, src: Array, stream: Stream) -> None:
        dst[...] = src

    def gemm(
        self, variant: Variant, a: Array, b: Array, c: Array, *,
        alpha: float, beta: float, stream: Stream,
    ) -> None:  # fmt: skip
        if self._pool is None:
            self.multiply(a, b, c, alpha, beta)
            return
        parts = [s.slice for s in cut(c.shape[0], self.share)]
        together(self._pool, lambda s: self.multiply(a[s], b, c[s], alpha, beta), parts)

    def multiply(self, a: Array, b: Array, c: Array, alpha: float, beta: float) -> None:
        """`gemm` by the calling thread; with beta = 0 also of stacks of matrices."""
        if a.shape[-1] == 0:
            scale(c, beta or 0 * alpha)  # as kernels have it, whose empty sum is 0
        elif beta == 0:
            product(a, b, c)
            scale(c, alpha)
        else:
            step = max(1, CHUNK_BYTES // max(1, c.shape[1] * c.itemsize))
            for i in range(0, c.shape[0], step):
                part = product(a[i : i + step], b, np.empty_like(c[i : i + step]))
                scale(part, alpha)
                scale(c[i : i + step], beta)
                with silent():
                    c[i : i + step] += part

    def sum(
        self, partials: Sequence[Array], out: Array, *, alpha: float, beta: float, stream: Stream
    ) -> None:
        step = max(1, (1 << 20) // max(1, out.shape[1] * out.itemsize))  # stays in cache
        for i in range(0, out.shape[0], step):
            rows = slice(i, i + step)
            total = partials[0][rows].copy()
            with silent():
                for partial in partials[1:]:
                    total += partial[rows]
                scale(total, alpha)
                if beta == 0:
                    out[rows] = total
                else:
                    scale(out[rows], beta)
                    out[rows] += total

    def add(self, dst: Array, src: Array, stream: Stream) -> None:
        with silent():
            dst += src

    def combine(
        self, alpha: float, x: Array, beta: float, y: Array, out: Array, stream: Stream
    ) -> None:
        combine(alpha, x, beta, y, out)


def together(pool: ThreadPoolExecutor, work: Callable[[slice], None], parts: list[slice]) -> None:
    """Calls `work` for each part, by threads of the pool. None is at work any more when this
    returns or raises, and none begins later: C may be another product's then."""
    begun: list[Future[None]] = []
    stopped = threading.Event()

    def one(part: slice) -> None:
        over: Future[None] = Future()
        begun.append(over)  # first: who stops waits for what has begun
        try:
            if not stopped.is_set():
                work(part)
        finally:
            over.set_result(None)

    try:
        # A pool keeps, and begins later, what it has raised for: no more threads can be started.
        jobs = [pool.submit(one, part) for part in parts]
        for job in jobs:
            job.result()
    except BaseException:
        stopped.set()
        wait(begun)
        raise


def combine(alpha: float, x: Array, beta: float, y: Array, out: Array) -> None:
    """out = alpha * x + beta * y in NumPy, as `Products.combine`."""
    scalar = out.dtype.type
    with silent():
        if beta == 0:
            np.multiply(x, scalar(alpha), out=out)
        elif alpha == 1 and beta in (1, -1):
            (np.add if beta == 1 else np.subtract)(x, y, out=out)
        else:
            out[...] = scalar(alpha) * x + scalar(beta) * y


def product(a: Array, b: Array, out: Array) -> Array:
    """out = a @ b, which it returns."""
    if out.dtype.kind == "i":
        integer_product(a, b, out)
        return out
    with np.errstate(all="ignore"):  # as `silent`
        return np.matmul(a, b, out=out)


def scale(matrix: Array, factor: float) -> None:
    """matrix *= factor in its own dtype; 0 overwrites, so NaN does not survive it."""
    if factor == 0:
        matrix[...] = factor  # whose sign counts, as in `Problem.as_blas`
    elif factor != 1:
        with silent():
            matrix *= matrix.dtype.type(factor)


_OF_VECTORS = {(1, 1): "j,j->", (1, 2): "j,jk->k", (2, 1): "ij,j->i", (2, 2): "ij,jk->ik"}


def integer_product(a: np.ndarray, b: np.ndarray, out: np.ndarray) -> None:
    """out = a @ b of integers of any dtypes, exact modulo 2^bits of `out` (32 or 64): by float64's
    BLAS, of the matrices or of digits of theirs, where that takes less time than NumPy's own
    loops."""
    k, bits = a.shape[-1], 8 * out.itemsize
    m, n = (x.shape[i] if x.ndim > 1 else 1 for x, i in ((a, -2), (b, -1)))
    how, matrices = _OF_VECTORS.get((a.ndim, b.ndim)), a.ndim == b.ndim == 2
    if k == 1 and matrices:
        np.multiply(a, b, out=out, dtype=out.dtype, casting="unsafe")
        return
    if how and (m == n == 1 or (min(m, n) == 1 and min(k, m * n) >= 16)):
        # Reads them once, as they are; its loops along short sides are slow.
        made = np.einsum(how, a, b, dtype=np.dtype(f"i{bits // 8}"), casting="unsafe")
    elif a.size and b.size and _largest(a) * _largest(b) * k < 2**53:
        if matrices and not (np.may_share_memory(a, out) or np.may_share_memory(b, out)):
            _in_floats(a, b, out)
            return
        made = (a.astype("f8") @ b.astype("f8")).astype("i8")
    elif matrices and min(m, n, k) >= 64:
        made = _by_digits(a, b, bits)
    else:
        made = a.astype("i8") @ b.astype("i8")
    np.copyto(out, np.asarray(made), casting="unsafe")  # a number, of two vectors


def _in_floats(a: np.ndarray, b: np.ndarray, out: np.ndarray) -> None:
    """out = a @ b where float64 holds all sums, part after part: what is cast stays in cache, and
    in memory that the system has given before."""
    (m, k), n = a.shape, b.shape[1]
    high, deep = max(256, CAST // n), max(2048, CAST // (m + n))
    rows = [slice(i, i + high) for i in range(0, m, high)]
    total = np.zeros((m, n)) if k > deep else None
    for ks in (slice(p, p + deep) for p in range(0, k, deep)):
        factor = b[ks].astype("f8")
        for i in rows:
            part = a[i, ks].astype("f8") @ factor
            if total is not None:
                total[i] += part
            else:
                np.copyto(out[i], part.astype("i8"), casting="unsafe")
    if total is not None:
        for i in rows:
            np.copyto(out[i], total[i].astype("i8"), casting="unsafe")


def _largest(x: np.ndarray) -> int:
    return max(abs(int(x.max())), abs(int(x.min())))


def _by_digits(a: np.ndarray, b: np.ndarray, bits: int) -> np.ndarray:
    """a @ b modulo 2^bits, as sums of exact products of digits: two of 16 bits, or three of 22."""
    width, count = (16, 2) if bits == 32 else (22, 3)
    made = np.zeros((a.shape[0], b.shape[1]), "i8")
    for i in range(0, a.shape[1], 2048):  # 2048 products of two digits are at most 2^53
        ours, theirs = (_digits(x, width, count) for x in (a[:, i : i + 2048], b[i : i + 2048]))
        for (p, x), (q, y) in itertools.product(enumerate(ours), enumerate(theirs)):
            if p + q < count:
                made += (x @ y).astype("i8") << width * (p + q)
    return made


def _digits(x: np.ndarray, width: int, count: int) -> list[np.ndarray]:
    """Digits of `width` bits with signs, the lowest first, as float64, without zeros at the end;
    what is above `count` digits is left out."""
    rest, half = x.astype("i8"), 1 << width - 1
    digits: list[np.ndarray] = []
    while len(digits) < count and rest.any():
        digit = ((rest + half) & (2 * half - 1)) - half
        digits.append(digit.astype("f8"))
        rest = (rest - digit) >> width
    return digits
