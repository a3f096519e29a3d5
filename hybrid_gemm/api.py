"""The Python surface: `gemm` and `matmul`; `plan` is in `plans.py`, `Runner` in `runner.py`."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Unpack

import numpy as np

from .arrays.caller_arrays import as_lists, naming_pairs
from .arrays.other_libraries import gpu_of
from .arrays.tensors import not_traced
from .errors import OptionTypeError
from .host import forks, gpu_context
from .host.kept import is_key
from .options import (
    CHOICES,
    DEFAULTS,
    Options,
    OptionsAlone,
    OptionsOverRanks,
    named_keywords,
    refuse_unknown,
    with_options,
)
from .problem import Scalar, op_of
from .programs.program import Call, over_ranks
from .programs.signature import MATMUL, Programs, played

if TYPE_CHECKING:  # otherwise imported by the first product, while the GPU's context is made
    from .runner import Runner

_DEVICE = list(CHOICES).index("device")
_OVER_RANKS = "comm", "distribution", "result", "root"
_NEEDS_COMM = "distribution, result and root are for products over ranks: pass comm too"

__all__ = ["free_memory", "gemm", "gemm_many", "matmul"]


programs = Programs()  # of `gemm`, of `matmul`, and of PyTorch's operation


def _refused_by_all(_args: tuple, keywords: Mapping[str, Any], error: TypeError) -> None:
    """Over ranks: raises on all of them what may be wrong on this one alone."""
    if (comm := keywords.get("comm")) is not None:
        from .ranks import kept_runners

        kept_runners.refuse(comm, error)


# Many parameters: every option is named here, for editors and type checkers.
# Long: half of the lines name them.
@played("gemm", programs)
@functools.partial(named_keywords, refused=_refused_by_all)
@with_options()
def gemm(
    a: Any,
    b: Any,
    c: Any = None,
    /,
    *,
    alpha: Scalar = 1.0,
    beta: Scalar = 0.0,
    trans_a: bool | str = False,
    trans_b: bool | str = False,
    out: Any = None,
    split: str = Options.split,
    threads: int | None = Options.threads,
    device: str = Options.device,
    gpus: int | Sequence[int] | None = Options.gpus,
    emulate_devices: int | None = Options.emulate_devices,
    kernel: str = Options.kernel,
    params: Mapping[str, int] | Sequence[tuple[str, int]] | None = Options.params,
    reduce: str = Options.reduce,
    algorithm: str = Options.algorithm,
    levels: int = Options.levels,
    compute: str = Options.compute,
    tune: str = Options.tune,
    grid: Sequence[int] | None = Options.grid,
    max_device_memory: int | str | None = Options.max_device_memory,
    checked: bool = Options.checked,
    transport: str = Options.transport,
    rounds: int | None = Options.rounds,
    rank_timeout: float = Options.rank_timeout,
    comm: Any = None,
    distribution: str = "replicated",
    result: str | None = None,
    root: int = 0,
) -> Any:
    """alpha * op(A) @ op(B) + beta * C, split over workers.

    `a` (m x k, or k x m with trans_a), `b` (k x n, or n x k with trans_b) and `c` (m x n) are
    2-D arrays of float16, bfloat16 (ml_dtypes), float32, float64, complex64, complex128 or
    integers, in any strides or byte order: of NumPy, CuPy, PyTorch, JAX or Numba, or with DLPack or
    the CUDA array interface. The result is a new array of the same library, of NumPy's promoted
    dtype, or `out`, which may be `c` itself; gradients are followed by `hybrid_gemm.torch.gemm`
    alone. As in BLAS, C is not read where beta is 0, nor A and B where alpha is 0. `trans_a` and
    `trans_b` are False, True, or "c" for the conjugate transpose (also "n" and "t"); alpha and beta
    may be complex where the product is. The other keywords are options, listed at the end.

    With `comm`, an mpi4py communicator, the product is split over its ranks, which all call
    this; `threads` then counts each rank's. `distribution` says where the arrays are:
    "replicated" (each rank passes all of A, B, C), "root" (rank `root` does, the others None),
    "rows" (each rank passes its rows of op(A) and C, and all of B) or "cols" (its columns of
    op(A) and rows of op(B), and its rows of C). `result` says where C is wanted: "replicated",
    "root" or "rows"; default as A came, and rows for "cols". `grid` then cuts the product over
    ranks; `transport`, `rounds` and `rank_timeout` are for ranks alone. Ranks that wait
    `rank_timeout` seconds for one that is stopped, or whose call raised, end the job. What ranks
    keep between calls, `free_memory` gives back.

    Raises ValueError on shapes and choices that do not fit, TypeError on dtypes and on options of
    a wrong type or name, and of `hybrid_gemm.errors` `UnavailableError` if a device, library or
    compiler that was asked for is not here, `OutOfMemoryError` (a MemoryError) if memory is short.

    >>> import numpy as np
    >>> gemm(np.ones((2, 3)), np.ones((3, 2)), device="cpu", threads=2, split="cols").tolist()
    [[3.0, 3.0], [3.0, 3.0]]
    """
    # In the order of `Options`, which a test compares; building it otherwise takes longer than the
    # rest of the call.
    given = (
        split, threads, device, gpus, emulate_devices, kernel, params, reduce, algorithm, levels,
        compute, tune, grid, max_device_memory, checked, transport, rounds, rank_timeout,
    )  # fmt: skip
    if comm is not None:
        from .ranks import kept_runners

        runner = kept_runners.kept_runner(comm, given)
        return over_ranks(
            runner.gemm, Call(a, b, c, alpha, beta, trans_a, trans_b, out),
            alpha=alpha, beta=beta, trans_a=trans_a, trans_b=trans_b,
            distribution=distribution, result=result, root=root,
        )  # fmt: skip
    if result is not None or root != 0 or distribution != "replicated":
        raise OptionTypeError(_NEEDS_COMM)
    if trans_a.__class__ is not bool or trans_b.__class__ is not bool:
        trans_a, trans_b = op_of(trans_a, "trans_a"), op_of(trans_b, "trans_b")
    return kept_runner(given, a, b)._written(Call(a, b, c, alpha, beta, trans_a, trans_b, out))


def kept_runner(given: tuple, a: Any, b: Any) -> Runner:
    """The runner for these values of the options, kept for the next call: where no device is
    named, of the GPU that has A or B."""
    ordinal = None
    if given[_DEVICE] == "auto":
        places = (gpu_of(x) for x in (a, b) if type(x) is not np.ndarray)
        ordinal = next((x for x in places if x >= 0), None)
    # A list or a dict among them is no key, and (True,) equals (1,).
    plain = is_key(given) and not any(type(x) is tuple for x in given)
    return _kept((_chosen if plain else _chosen.__wrapped__)(ordinal, *given))


@functools.lru_cache(maxsize=64, typed=True)  # to check options takes longer than many a product
def _chosen(ordinal: int | None, *given: Any) -> Options:
    """The options of arrays that lie on this GPU, or on none."""
    options = Options(*given).alone()
    if options.device != "auto" or ordinal is None:
        return options
    return dataclasses.replace(options, device="cuda", gpus=options.gpus or (ordinal,))


_MOST_RUNNERS = 8


@functools.lru_cache(maxsize=_MOST_RUNNERS)
def _kept(options: Options) -> Runner:
    if _kept.cache_info().currsize == _MOST_RUNNERS:  # one goes, and its programs with it
        programs.forget()
    if options.device in ("auto", "cuda"):
        gpu_context.begin(options.gpus[0] if options.gpus else 0)
    from .runner import Runner

    return Runner.of(options)


forks.forget_in_child(_kept.cache_clear)
forks.forget_in_child(programs.forget)


def free_memory() -> None:
    """Gives back what `gemm` and `matmul` keep for their next calls: memory of GPUs, plans and
    loaded kernels, buffers of copies, and connections between ranks (where ranks are at work it
    is collective, and a `UsageError` where others make another call). A `Runner` gives its own back
    when nothing refers to it any more. Kernel files are read anew after it: so call it after a
    change to one."""
    import sys

    from .execution import staging

    programs.forget()
    _kept.cache_clear()
    staging.drop_links()
    if catalog := sys.modules.get(f"{__package__}.catalog"):
        catalog.forget_changed()
    if f"{__package__}.ranks.kept_runners" in sys.modules:
        from .ranks import kept_runners  # waits for another thread that is importing it

        kept_runners.close_kept_runners()
    time.sleep(0)  # a thread in a loop of these calls would keep Python's lock from the others


def _given(options: Mapping[str, Any]) -> tuple:
    """The values of all options, in the order of `Options`."""
    return tuple({**DEFAULTS, **options}.values()) if options else _DEFAULTS


_DEFAULTS = tuple(DEFAULTS.values())


@played(MATMUL, programs)
@with_options()
def matmul(
    a: Any, b: Any, /, out: Any = None, *, comm: Any = None, distribution: str = "replicated",
    result: str | None = None, root: int = 0, **options: Unpack[OptionsOverRanks],
) -> Any:  # fmt: skip
    """a @ b as NumPy's `matmul`: matrices, vectors, and stacks of matrices, which broadcast.

    The last two dimensions are a matrix's. A stack times one matrix is one product where it lies
    in memory as one; on one GPU small products of floats are one launch; otherwise there
    is a product for each pair, one after the other. What arrays may be, `gemm` says; alpha, beta
    and transposes are `gemm`'s alone. `out`, of the product's shape, gets the result. Raises
    ValueError on shapes that do not fit, TypeError on dtypes.

    With `comm` a stack is shared out over the ranks, each of which multiplies whole matrices; those
    left over, and fewer matrices than ranks, are split over all ranks if that is faster. Stacks and
    vectors are "replicated" or lie at "root" (`distribution`, `result`), matrices as in `gemm`.

    >>> import numpy as np
    >>> matmul(np.ones((5, 2, 3)), np.ones(3), device="cpu").shape
    (5, 2)
    """
    if not options.keys() <= CHOICES.keys():
        try:
            refuse_unknown("matmul", options, (*CHOICES, *_OVER_RANKS))
        except TypeError as error:
            _refused_by_all((), {"comm": comm}, error)
            raise
    if comm is not None:
        from .ranks import kept_runners

        runner, how = kept_runners.kept_runner(comm, _given(options)), {"root": root}
        return over_ranks(
            runner.matmul, Call(a, b, out=out), distribution=distribution, result=result, **how
        )
    if result is not None or root != 0 or distribution != "replicated":
        raise OptionTypeError(_NEEDS_COMM)
    if getattr(a, "ndim", 0) == getattr(b, "ndim", 0) == 2:
        return gemm.__wrapped__(a, b, out=out, **options)  # type: ignore[attr-defined]
    return kept_runner(_given(options), a, b)._written_matmul(a, b, out)


@not_traced
@with_options(alone=True)
def gemm_many(
    a: Sequence[Any], b: Sequence[Any], /, **options: Unpack[OptionsAlone]
) -> list[Any]:  # fmt: skip
    """A @ B for all pairs of two lists of matrices, of any sides: a list of new arrays.

    Each is a product of its own, in the order of the lists. What arrays may be, `gemm` says.
    Raises ValueError on lists of different lengths and on shapes that do not fit, TypeError on
    dtypes; both name the pair.

    >>> import numpy as np
    >>> a, b = np.ones((2, 3)), np.ones((3, 4))
    >>> [c.shape for c in gemm_many([a, b], [b, b.T], device="cpu")]
    [(2, 4), (3, 3)]
    """
    refuse_unknown("gemm_many", options, CHOICES)
    a, b = as_lists(a, b)
    if not a:
        kept_runner(_given(options), None, None)  # which refuses what is not here
    with naming_pairs(a, b):
        return [gemm(x, y, **options) for x, y in zip(a, b, strict=True)]
