"""`hybrid-gemm new-kernel NAME`: a kernel of one's own to start from."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path

from .. import catalog
from ..errors import HybridGemmError, UsageError
from ..host.cache import atomic_write
from ..options import AUTOMATIC_KERNELS

_TEMPLATE = r"""/*---
summary = "SAY IN ONE LINE WHAT NAME DOES"
entry   = "gemm_NAME"
rung    = 99
# TILE  columns of C that a block computes, and k of a step
# PER   rows of C that a thread computes
params  = [{TILE = 16, PER = 2}, {TILE = 16, PER = 1}, {TILE = 16, PER = 4}, {TILE = 8, PER = 2}]
space   = {TILE = [8, 16, 32], PER = [1, 2, 4, 8]}
block   = ["TILE", "TILE", "1"]
grid    = ["ceil(n / TILE)", "ceil(m / (TILE * PER))", "1"]
tile    = ["TILE * PER", "TILE"]
require = ["SIZE * TILE * (TILE * PER + TILE + 1) <= 49152"]
source  = "our own"
---*/
// The header above says all that the host must know; docs/kernels.md lists its keys.
//   params   the variants: TILE and PER are compile-time names below; the first is the default
//   block    threads of a block, by x, y, z        grid    blocks, for C of m x n
//   space    what `hybrid-gemm tune --kernel NAME` tries, in every combination
//   tile     rows and columns of C that a block computes
//   require  what parameters must hold: checked by the host, and by the compiler
// T is the element type and SIZE its bytes; a_at and b_at read op(A) and op(B), store writes C.
#include "common.cuh"

// C = alpha * op(A) @ op(B) + beta * C, all three with leading dimensions. To begin with: a
// block of TILE x TILE threads makes TILE * PER rows by TILE columns of C; a thread owns PER
// elements of one column. Each step of K brings tiles of A and B to shared memory, so that each
// element is read from global memory once a block.
extern "C" __global__ void __launch_bounds__(TILE * TILE)
    gemm_NAME(int m, int n, int k, T alpha, const T* __restrict__ A, long long lda,
              const T* __restrict__ B, long long ldb, T beta, T* C, long long ldc) {
    __shared__ T As[TILE * PER][TILE], Bs[TILE][TILE + 1];
    const int tx = threadIdx.x, ty = threadIdx.y;
    const unsigned row0 = blockIdx.y * (TILE * PER), col0 = blockIdx.x * TILE;
    const unsigned col = col0 + tx;
    T sum[PER] = {};  // lives in registers: every index is known once the loops are unrolled
    for (int left = k, p0 = 0; left > 0; left -= TILE, p0 += TILE) {
        // 1. Load. Threads that are neighbours in x read neighbours in memory. Zeros beyond the
        //    edges add nothing, so the tile need not divide m, n or k.
#pragma unroll
        for (int i = 0; i < PER; ++i) {
            const unsigned row = row0 + i * TILE + ty;
            As[i * TILE + ty][tx] = row < m && tx < left ? a_at(A, lda, row, p0 + tx) : T(0);
        }
        Bs[ty][tx] = col < n && ty < left ? b_at(B, ldb, p0 + ty, col) : T(0);
        __syncthreads();  // the tiles are whole
        // 2. Multiply. One element of B serves PER multiply-adds.
#pragma unroll
        for (int p = 0; p < TILE; ++p) {
            const T b = Bs[p][tx];
#pragma unroll
            for (int i = 0; i < PER; ++i) sum[i] += As[i * TILE + ty][p] * b;
        }
        __syncthreads();  // all are done with the tiles
    }
    // 3. Store. beta == 0 never reads C.
#pragma unroll
    for (int i = 0; i < PER; ++i) {
        const unsigned row = row0 + i * TILE + ty;
        if (row < m && col < n) store(C + row * ldc + col, sum[i], alpha, beta);
    }
}
"""


def text(name: str) -> str:
    """The file's text; `UsageError` unless the name is a C identifier in lower case."""
    if not re.fullmatch(r"[a-z][a-z0-9_]{0,40}", name):
        raise UsageError(
            f"{name!r} cannot name a kernel: use lower-case letters, digits and _, a letter first"
        )
    return _TEMPLATE.replace("NAME", name)


def write(name: str, directory: str | None = None) -> Path:
    """Writes `gemm_NAME.cu`, whole or not at all, where the catalog finds it; returns its path.

    Never overwrites: `UsageError` if a kernel has that name, or the folder cannot be written;
    `HybridGemmError` where the disk is full, say.
    """
    name = name.removeprefix("gemm_")
    content = text(name)
    if name in AUTOMATIC_KERNELS:
        raise UsageError(f"--kernel {name} lets kernels be chosen; give the kernel another name")
    if name in catalog.kernels():
        raise UsageError(f"there is a kernel called {name} already: {catalog.kernels()[name].path}")
    folder = _own_folder() if directory is None else _made(directory)
    path = folder / f"gemm_{name}.cu"
    if os.path.lexists(path):
        raise UsageError(f"{path} exists; give another name")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UsageError(
            f"cannot write {path}: no permission in {folder}; name a folder with --directory"
        )
    try:
        atomic_write(path, content.encode())
    except OSError as error:
        raise HybridGemmError(f"could not write {path}: {error.strerror}") from None
    catalog.kernels.cache_clear()
    return path


def _made(directory: str) -> Path:
    """The folder of --directory, which is made where it is not there."""
    if not directory:
        raise UsageError("--directory '' names no folder")
    folder = Path(directory)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise UsageError(f"--directory {directory} is no folder; name one") from None
    except OSError as error:
        raise UsageError(f"cannot make the folder {directory}: {error.strerror}") from None
    return folder


def _own_folder() -> Path:
    if catalog.own_directories():
        return catalog.own_directories()[0]
    if catalog.directory().parent == Path(__file__).resolve().parents[1]:  # installed
        raise UsageError(
            "the package is installed, and its own folder is not for new kernels: name a folder of "
            f"yours with --directory, or in {catalog.VARIABLE}, which is searched for kernels too"
        )
    return catalog.directory()


def next_steps(name: str, path: Path) -> str:
    """What to do with the new file, as commands."""
    name = name.removeprefix("gemm_")
    known = (catalog.directory(), *catalog.own_directories())
    lines = []
    if path.resolve().parent not in [folder.resolve() for folder in known]:
        folder = shlex.quote(str(path.resolve().parent))
        lines.append(f"export {catalog.VARIABLE}={folder}{os.pathsep}${catalog.VARIABLE}")
    lines += [
        f"hybrid-gemm kernels {name} --compile sm_90        # registers, shared memory, spills",
        f"hybrid-gemm run --kernel {name} --size 200 --verify full --device emulator",
        f"hybrid-gemm run --kernel {name} --check            # every access, barriers, races",
        f"hybrid-gemm run --kernel {name} --check -m 33 -n 65 -k 50 --alpha 2 --beta 1 --trans-a",
        "# and on a GPU:",
        f"hybrid-gemm tune --kernel {name}                   # every combination of parameters",
        f"hybrid-gemm bench --kernels naive,shared_tile,{name},cublas --shapes 1024,4096",
        "hybrid-gemm reproduce ladder --scale full          # your rung among the others",
    ]
    return "\n".join(lines)
