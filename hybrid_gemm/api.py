"""The Python surface: `gemm`, `matmul` and `plan`; `Runner` is in `runner.py`."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

import numpy as np

from .arrays.caller_arrays import as_matrix, is_device_array
from .problem import make_problem
from .runner import Runner

__all__ = ["free_memory", "gemm", "matmul", "plan"]


def gemm(
    a,
    b,
    c=None,
    /,
    *,
    alpha=1.0,
    beta=0.0,
    trans_a: bool = False,
    trans_b: bool = False,
    out=None,
    split: str = "auto",
    threads: int | None = None,
    device: str = "auto",
    gpus: Sequence[int] | None = None,
    emulate_devices: int | None = None,
    kernel: str = "auto",
    params: Mapping[str, int] | None = None,
    reduce: str = "ordered",
    algorithm: str = "ordinary",
    levels: int = 1,
    compute: str = "fp32",
    grid: Sequence[int] | None = None,
    max_device_memory: int | None = None,
    comm=None,
    **across,
):
    """alpha * op(A) @ op(B) + beta * C, split over workers.

    `a` (m x k, or k x m with trans_a), `b` (k x n, or n x k with trans_b) and `c` (m x n) are
    2-D arrays of float16, bfloat16 (ml_dtypes), float32, float64 or integers, in any strides or
    byte order: NumPy
    arrays, or arrays on a GPU (`__cuda_array_interface__` or DLPack). The result is a new
    array of NumPy's promoted dtype, or `out`, which may be `c` itself. As in BLAS, C is not
    read where beta is 0, nor A and B where alpha is 0. The other options are `Runner`'s.

    With `comm`, an mpi4py communicator, the product is split over its ranks, which all call
    this; `threads` then counts each rank's. `distribution` says where the arrays are:
    "replicated" (each rank passes all of A, B, C), "root" (rank `root` does, the others None),
    "rows" (each rank passes its rows of op(A) and C, and all of B) or "cols" (its columns of
    op(A) and rows of op(B), and its rows of C). `result` says where C is wanted: "replicated",
    "root" or "rows"; default as A came, and rows for "cols". `grid` then cuts the product over
    ranks; `transport` and `rounds` are `RankRunner`'s, which is for repeated products.

    Raises ValueError on shapes and choices that do not fit, TypeError on dtypes.
    """
    a, b = (None if comm is not None and x is None else as_matrix(x) for x in (a, b))
    if device == "auto" and (there := [x for x in (a, b) if is_device_array(x)]):
        device, gpus = "cuda", gpus or (there[0].device.id,)
    if across and comm is None:
        raise TypeError(f"{next(iter(across))} is for products over ranks: pass comm too")
    if comm is not None:
        from .ranks import runner as over_ranks

        return over_ranks.gemm(
            a, b, c, comm=comm, across=across,
            product={"alpha": alpha, "beta": beta, "trans_a": trans_a, "trans_b": trans_b,
                     "out": out},
            runner={"split": split, "threads": threads, "device": device, "gpus": gpus,
                    "emulate_devices": emulate_devices, "kernel": kernel, "params": params,
                    "reduce": reduce, "algorithm": algorithm, "levels": levels,
                    "compute": compute, "grid": grid, "max_device_memory": max_device_memory},
        )  # fmt: skip
    runner = _runner(
        device, threads, split, reduce, None if gpus is None else tuple(gpus), emulate_devices,
        kernel, tuple(sorted((params or {}).items())), algorithm, levels, compute,
        None if grid is None else tuple(grid), max_device_memory,
    )  # fmt: skip
    return runner.gemm(a, b, c, alpha=alpha, beta=beta, trans_a=trans_a, trans_b=trans_b, out=out)


@functools.lru_cache(maxsize=8)
def _runner(
    device, threads, split, reduce, gpus, emulate_devices, kernel, params, algorithm, levels,
    compute, grid, max_device_memory,
) -> Runner:  # fmt: skip
    return Runner(
        device=device, threads=threads, split=split, reduce=reduce, gpus=gpus,
        emulate_devices=emulate_devices, kernel=kernel, params=dict(params),
        algorithm=algorithm, levels=levels, compute=compute, grid=grid,
        max_device_memory=max_device_memory,
    )  # fmt: skip


def free_memory() -> None:
    """Gives back what `gemm` and `matmul` keep for their next calls: memory of GPUs, plans and
    loaded kernels. A `Runner` gives its own back when nothing refers to it any more."""
    _runner.cache_clear()


def matmul(a, b, /, out=None, **options):
    """a @ b for 2-D arrays; `options` are those of `gemm`."""
    return gemm(a, b, out=out, **options)


def plan(m: int, n: int, k: int, *, dtype="float32", alpha=1.0, beta=0.0, **options):
    """The plan that `gemm` would follow for these sizes; `options` are `Runner`'s."""
    a, b, c = (np.broadcast_to(np.empty((), dtype), s) for s in ((m, k), (k, n), (m, n)))
    problem = make_problem(a, b, c, alpha=alpha, beta=beta)
    runner = Runner(**options)
    return runner.plan(runner.settle(problem))
