"""The driver of played GPUs: what kernels read and write there, which the emulator runs."""

import ctypes
import functools
from typing import NamedTuple

import numpy as np

from hybrid_gemm import catalog
from hybrid_gemm.devices.checksums import GROUPS
from hybrid_gemm.devices.cuda import driver
from hybrid_gemm.devices.emulator import program as emulation
from hybrid_gemm.devices.kernel_device import ELEMENTS

from .late_streams import CONTEXT, bytes_at

_kept = []  # native threads may still be in these functions when a test is over


class Kernel(NamedTuple):
    ptr: int
    program: emulation.Program
    role: str
    layouts: str
    dtype: str  # of elements where the kernel takes any
    params: dict


def _rows(at, ld, count, length, dtype):
    """Runs of elements at an address."""
    size = np.dtype(dtype).itemsize
    return bytes_at(at, ld * size, length * size, count)


def _lines(shape, at, steps, dtype):
    """Elements with any steps between them."""
    size = np.dtype(dtype).itemsize
    first = bytes_at(at, size, size).reshape(size)
    strides = [int(step) * size for step in steps]
    return np.lib.stride_tricks.as_strided(first, (*map(int, shape), size), (*strides, 1))


class Driver:
    """What the package calls of CUDA's driver beside `Late`, by name."""

    def __init__(self, late):
        self.late, self.kernels, self.functions = late, {}, {}

    def function(self, name):
        if name not in self.functions:
            kind = ctypes.CFUNCTYPE(ctypes.c_int, *driver.SIGNATURES[name])
            of = self if hasattr(self, name) else self.late
            self.functions[name] = kind(functools.partial(self.late.native, name, of=of))
            _kept.append(self.functions[name])
        return self.functions[name]

    def cuCtxGetCurrent(self, to):
        ctypes.c_uint64.from_address(to).value = CONTEXT

    def cuStreamIsCapturing(self, stream, to):
        ctypes.c_int.from_address(to).value = (stream or 0) in self.late.captured

    def cuThreadExchangeStreamCaptureMode(self, mode):
        pass

    def cuTensorMapReplaceAddress(self, there, at):
        raise AssertionError("kernels with tensor maps are not played")

    def cuMemsetD8Async(self, at, value, size, stream):
        there = bytes_at(at, size, size)
        self.late.give(stream, "a clearing", functools.partial(there.fill, value), [], [there])

    def cuLaunchKernelEx(self, config, function, args, _extra):
        c = config.contents
        grid, block = ([getattr(c, f"{x}_{axis}") for axis in "xyz"] for x in ("grid", "block"))
        self.cuLaunchKernel(function, *grid, *block, c.shared, c.stream, args, None)

    def cuLaunchKernel(self, function, *given):
        grid, block, shared, stream, args, _extra = given[:3], given[3:6], *given[6:]
        kernel = self.kernels[function]
        parameters = kernel.program._parameters
        cells = (ctypes.c_uint64 * len(parameters))()
        for i, parameter in enumerate(parameters):
            source = ctypes.c_uint64.from_address(args + 8 * i).value
            size = 8 if parameter.pointer else parameter.bytes
            ctypes.memmove(ctypes.addressof(cells) + 8 * i, source, size)
        values = [
            x if p.pointer else np.frombuffer(cells, p.dtype, 1, 8 * i)[0]
            for i, (x, p) in enumerate(zip(cells, parameters, strict=True))
        ]
        launch = catalog.Launch(grid=grid, block=block, shared_bytes=shared)

        def work():
            args = [
                np.ndarray((), p.dtype, (ctypes.c_char * 16).from_address(x)) if p.pointer else x
                for x, p in zip(values, parameters, strict=True)
            ]
            kernel.program.launch(launch, args)

        dtypes = [p.dtype or kernel.dtype for p in parameters]
        reads, writes = self._accesses(kernel, values, dtypes, grid)
        self.late.said.append(("start", stream))
        self.late.give(stream, kernel.program.label, work, reads, writes)

    def _accesses(self, kernel, values, dtypes, grid):
        """What a kernel reads and what it writes, by its role (docs/kernels.md)."""
        v, order = values, kernel.layouts
        if kernel.role == "gemm":
            m, n, k, _alpha, a, lda, b, ldb, _beta, c, ldc, *room = v
            reads = [
                _rows(at, ld, *(shape if x == "n" else shape[::-1]), dtype)
                for at, ld, shape, x, dtype in (
                    (a, lda, (m, k), order[0], dtypes[4]), (b, ldb, (k, n), order[1], dtypes[6]),
                )
                if k
            ]  # fmt: skip
            return reads, [_rows(c, ldc, m, n, dtypes[9]), *map(self.late.block_of, room)]
        if kernel.role in ("transpose", "add", "copy"):
            rows, cols, source, lds, to, ldt = v
            shape = (cols, rows) if kernel.role == "transpose" else (rows, cols)
            reads = [_rows(source, lds, rows, cols, dtypes[2])]
            return reads, [_rows(to, ldt, *shape, dtypes[4])]
        if kernel.role == "cast":
            count, inner, rows, cols, at, *steps = v[:9]
            shape = int(count) // int(inner), inner, rows, cols
            of, made = (ELEMENTS[kernel.params[x] - 1] for x in ("FROM", "TO"))
            return [_lines(shape, at, steps, of)], [_lines(shape, v[9], v[10:], made)]
        if kernel.role == "sum":
            rows, cols, count, _alpha, table, ldp, _beta, c, ldc, out, ldo = v
            dtype = dtypes[7]
            parts = bytes_at(table, 8 * count, 8 * count).view(np.uint64)[0]
            reads = [_rows(int(at), ldp, rows, cols, dtype) for at in parts]
            return [*reads, _rows(c, ldc, rows, cols, dtype)], [_rows(out, ldo, rows, cols, dtype)]
        if kernel.role == "combine":
            rows, cols, _alpha, x, ldx, _beta, y, ldy, to, ldt = v
            reads = [_rows(at, ld, rows, cols, dtypes[3]) for at, ld in ((x, ldx), (y, ldy))]
            return reads, [_rows(to, ldt, rows, cols, dtypes[8])]
        if kernel.role in ("stack", "check_sums", "check_product", "check_judge"):
            return self._accesses_by_groups(kernel.role, v, order, dtypes, grid)
        reads, writes, more = [], [], [p.pointer for p in kernel.program._parameters]
        if kernel.role in ("pack", "halves"):
            (m, n, k), more_of_k = v[:3], v[3 : 3 + (kernel.role == "pack")]
            a, lda, b, ldb = v[3 + len(more_of_k) :][:4]
            dtype = "f4" if kernel.role == "halves" or kernel.dtype == "tfloat32" else "f2"
            reads = _stack((m, k), a, lda, 0, order[0], 1, dtype)
            reads += _stack(([*more_of_k, k][0], n), b, ldb, 0, order[1], 1, dtype)
            more[: 7 + len(more_of_k)] = [0] * (7 + len(more_of_k))
        if kernel.role == "tensor" and kernel.params["SHARES"] == 1:
            at = more.index(2)
            writes, more[at] = [_rows(v[at], v[at + 1], *v[4:6], f"V{kernel.params['OUT']}")], 0
        for x, way in zip(v, more, strict=True):
            if way:  # with what lies beside it
                (writes if way == 2 else reads).append(self.late.block_of(x))
        return reads, writes

    def _accesses_by_groups(self, role, v, order, dtypes, grid):
        """The same of stacks and of checks."""
        if role == "stack":
            m, n, k, a, lda, step_a, b, ldb, step_b, c, ldc, step_c = v
            a, b = ((m, k), a, lda, step_a, order[0]), ((k, n), b, ldb, step_b, order[1])
            c = (m, n), c, ldc, step_c, "n"
            of_a, of_b, of_c = (_stack(*x, grid[2], dtypes[3]) for x in (a, b, c))
            return of_a + of_b, of_c
        if role == "check_sums":
            rows, cols, width, x, ldx, weights, sums, seconds, *room = v
            reads = _stack((rows, cols), x, ldx, 0, order[0], 1, dtypes[3])
            made = [_sums(at, rows) for at in (sums, seconds)]
            return [*reads, _sums(weights, width)], [*made, *map(self.late.block_of, room)]
        if role == "check_product":
            return self._accesses_of_check(v, order, dtypes[2], grid)
        m, shares, wanted, seconds, *of_c = v[:8]
        reads = [_sums(at, m * shares) for at in (wanted, seconds)]
        return reads + [_sums(at, m) for at in of_c], []  # and adds to an alarm

    def _accesses_of_check(self, values, order, dtype, grid):
        """What `check_product` reads and writes, in its three forms."""
        m, k, a, lda, *more, out, out_seconds = values
        count, step_a, step_b = grid[2], 0, 0
        if len(more) == 2:
            reads = [_sums(at, k) for at in more]
        else:
            if len(more) == 7:
                step_a, n, width, b, ldb, step_b, weights = more
            else:
                n, width, b, ldb, weights = more
            of_b = _stack((k, n), b, ldb, step_b, order[1], count, dtype)
            reads = [*of_b, _sums(weights, width)]
        reads += _stack((m, k), a, lda, step_a, order[0], count, dtype)
        return reads, [_sums(at, m * grid[1] * count) for at in (out, out_seconds)]


def _stack(shape, at, ld, step, order, count, dtype):
    """Matrices in this storage order, so many elements one after the other."""
    shape, size = shape if order == "n" else shape[::-1], np.dtype(dtype).itemsize
    return [_rows(at + i * int(step) * size, ld, *shape, dtype) for i in range(count) if all(shape)]


def _sums(at, rows):
    """So many rows of sums, one for each group; or weights, so many for each."""
    return bytes_at(at, GROUPS * 8 * rows, GROUPS * 8 * rows)
