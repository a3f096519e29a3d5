"""Multiplies one case and says what came of it: right, refused, wrong or an exception."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

import hybrid_gemm
from hybrid_gemm import catalog
from hybrid_gemm.arrays.caller_arrays import is_cast_to
from hybrid_gemm.errors import (
    DTypeError,
    HybridGemmError,
    HybridGemmWarning,
    OutOfMemoryError,
    UnavailableError,
    UsageError,
)
from hybrid_gemm.kernel_choice.compute_modes import ON_TENSOR_CORES
from hybrid_gemm.planning.plan import CHECKING_BYTES, SPLIT_STEP
from hybrid_gemm.problem import NARROW, REAL_OF, compute_dtype

from .cases import Case
from .kernels import reads_narrow, variant_of
from .matrices import Matrices, as_dtype, make, result_dtype

RIGHT, REFUSED, WRONG, EXCEPTION = "right", "refused", "wrong", "exception"


@dataclass(frozen=True)
class Outcome:
    """`kind` is one of the four; `words` is one line on what was found."""

    kind: str
    words: str = ""

    @property
    def failed(self) -> bool:
        return self.kind in (WRONG, EXCEPTION)


@dataclass(frozen=True)
class Refusal:
    """An error that a case may raise, or must (`certain`)."""

    error: type[HybridGemmError]
    why: str
    certain: bool = True


@dataclass
class Call:
    """What is passed to `gemm`, the mistake included."""

    a: Any
    b: Any
    c: Any
    keywords: dict[str, Any]


def call_of(case: Case, made: Matrices) -> Call:
    call = Call(made.a, made.b, made.c, {
        "alpha": case.alpha, "beta": case.beta, "trans_a": case.trans_a, "trans_b": case.trans_b,
        "out": made.out,
    })  # fmt: skip
    shape = case.m, case.n
    match case.mistake:
        case "k differs":
            longer = (case.n, case.k + 1) if case.trans_b else (case.k + 1, case.n)
            call.b = np.zeros(longer, as_dtype(case.dtypes[1]))
        case "vector":
            call.a = np.zeros(case.k, as_dtype(case.dtypes[0]))
        case "bool":
            call.a = np.zeros(made.a.shape, bool)
        case "no c":
            call.c, call.keywords["beta"] = None, 1
            call.keywords["out"] = None
        case "half alpha":
            call.keywords["alpha"] = 0.5
        case "large alpha":
            call.keywords["alpha"] = 2**70
        case "out shape":
            call.keywords["out"] = np.zeros((case.m + 1, case.n), as_dtype(case.dtypes[0]))
        case "out dtype":
            call.keywords["out"] = np.zeros(shape, bool)
        case "out read-only" if made.out is not None:
            made.out.flags.writeable = False
        case "out is a":
            call.keywords["out"] = np.asarray(made.a)[: case.m, : case.n]
    return call


def expected_refusals(case: Case, call: Call) -> list[Refusal]:
    """What may be refused; nothing else may."""
    result = result_dtype(case)
    if result is None or case.mistake == "bool":
        others = [Refusal(error, "", False) for error in (UsageError, UnavailableError)]
        return [Refusal(DTypeError, "no dtype holds the product"), *others]
    return [
        *_of_shapes(case), *_of_scalars(case, result), *_of_out(case, call, result),
        *_of_options(case), *_of_kernel(case, result), *_of_memory(case, call, result),
        *([Refusal(UnavailableError, "", False)] if case.option("reduce") == "nccl" else []),
    ]  # fmt: skip


def _of_shapes(case: Case) -> list[Refusal]:
    wrong = case.mistake in ("k differs", "vector", "no c")
    return [Refusal(UsageError, case.mistake)] if wrong else []


def _of_scalars(case: Case, result: np.dtype) -> list[Refusal]:
    if result.kind not in "iu":
        return []
    return {
        "half alpha": [Refusal(DTypeError, "alpha is not whole")],
        "large alpha": [Refusal(UsageError, "alpha does not fit")],
    }.get(case.mistake, [])


def _of_out(case: Case, call: Call, result: np.dtype) -> list[Refusal]:
    out, found = call.keywords["out"], []
    if out is None:
        return []
    if out.shape != (case.m, case.n):
        found.append(Refusal(UsageError, "the shape of out"))
    if not is_cast_to(out.dtype, result.name):
        found.append(Refusal(DTypeError, "the dtype of out"))
    if not out.flags.writeable:
        found.append(Refusal(UsageError, "out is read-only"))
    others = [call.a, call.b, *([call.c] if call.c is not None and call.c is not out else [])]
    if any(np.shares_memory(out, x) for x in others):
        found.append(Refusal(UsageError, "out overlaps"))
    return found


def _of_options(case: Case) -> list[Refusal]:
    found = []
    grid, threads = case.option("grid"), case.option("threads")
    one_process = case.option("distribution") is None  # over ranks the grid is theirs
    if one_process and grid and threads and math.prod(grid) != threads:
        found.append(Refusal(UsageError, "the grid is not so many threads"))
    if grid and case.option("split", "auto") != "auto":
        found.append(Refusal(UsageError, "a grid beside a split"))
    reduce = case.option("reduce")
    if reduce == "critical" and (grid or case.option("split") != "cols"):
        found.append(Refusal(UsageError, "critical sums a split by cols"))
    if case.option("checked"):
        if case.option("algorithm") == "strassen":
            found.append(Refusal(UsageError, "sums of Strassen's algorithm are not checked"))
        if reduce not in (None, "ordered"):
            found.append(Refusal(UsageError, f"{reduce} sums are not checked"))
    if reduce == "nccl":
        found.append(Refusal(UsageError, "nccl sums between GPUs", certain=False))
    return found


def _of_kernel(case: Case, result: np.dtype) -> list[Refusal]:
    """Refusals by the kernel that was named, and the arithmetic. They need a product: where none
    is left to make they may not come."""
    name, compute = case.option("kernel", "auto"), case.option("compute", "fp32")
    dtype, product = compute_dtype(result), bool(case.m and case.n and case.k and case.alpha)
    dtype = REAL_OF.get(dtype, dtype)  # whose real product is multiplied
    mistaken = case.mistake in ("half alpha", "large alpha")
    narrow = case.dtypes[0] == case.dtypes[1] and case.dtypes[0] in NARROW
    found = []
    if compute in ON_TENSOR_CORES:
        if case.device == "cpu":
            found.append(Refusal(UnavailableError, "no tensor cores here"))
        wanted = "float64" if compute == "fp64x" else "float32"
        if dtype != wanted:
            certain = compute == "fp64x" or not narrow
            found.append(Refusal(UsageError, f"{compute} is for {wanted}", certain=certain))
    if name in ("auto", "own"):
        return found
    kernel = catalog.get(name)
    if case.device not in kernel.runs_on:
        found.append(Refusal(UsageError, "the kernel is not for the device", product))
        found.append(Refusal(UnavailableError, "the kernel needs tensor cores", False))
    elif kernel.role in ("tensor", "residues"):
        if product or case.option("params"):  # which may not suit the arithmetic
            found.append(Refusal(UsageError, "tensor cores do not multiply that", False))
    else:
        if compute in ON_TENSOR_CORES:
            found.append(Refusal(UsageError, "the kernel does not use tensor cores"))
        halves = narrow and dtype == "float32" and reads_narrow(kernel, dict(case.options))
        if dtype not in kernel.dtypes and not halves:
            found.append(Refusal(UsageError, f"the kernel has no {dtype}", product))
        if not _possible(case, case.dtypes[0] if halves else dtype):
            found.append(Refusal(UsageError, f"the kernel's tile is too large for {dtype}", False))
        if kernel.limits:
            found.append(Refusal(UsageError, "the kernel has limits", False))
    return [] if mistaken and not found else found


def _possible(case: Case, dtype: str) -> bool:
    """Whether the kernel's variant can be compiled for a dtype; without parameters, any of them."""
    variant = variant_of(dict(case.options))
    if variant is None:
        return False
    named = case.option("params")
    return any(each.suits(dtype) for each in ([variant] if named else variant.kernel.variants()))


def _of_memory(case: Case, call: Call, result: np.dtype) -> list[Refusal]:
    """A product may lack memory only where the limit is not far above what it is made of."""
    limit = case.option("max_device_memory")
    if limit is None:
        return []
    elements = case.m * case.k + 2 * case.k * case.n + case.m * case.n
    workers = case.option("threads") or math.prod(case.option("grid", (8,)))
    enough = 4 * workers * elements * np.dtype(compute_dtype(result)).itemsize + (1 << 16)
    if case.option("compute") == "fp64x":  # residues of whole tiles, however small the matrices
        enough += workers << 19
    if case.option("compute") in ("fp32x3", "auto"):  # which packs rows to whole steps
        enough += 16 * workers * (case.m + case.n) * (case.k + SPLIT_STEP)
    if case.option("checked"):
        enough += 2 * workers * CHECKING_BYTES * (case.m + case.n + case.k)
    return [Refusal(OutOfMemoryError, "little memory", False)] if limit < enough else []


Multiply = Callable[[Case, Call], Any]


def product(case: Case, call: Call) -> Any:
    """The product by the package's public functions."""
    given = dict(case.options)
    if not case.resident:
        return hybrid_gemm.gemm(
            call.a, call.b, call.c, device=case.device, **given, **call.keywords
        )
    runner = hybrid_gemm.Runner(device=case.device, **given)
    return runner.run(call.a, call.b, call.c, resident=True, **call.keywords).c


def judge(case: Case, multiply: Multiply = product) -> Outcome:
    """Makes the matrices, multiplies, and compares every byte that may and may not change."""
    made = make(case)
    call = call_of(case, made)
    refusals = expected_refusals(case, call)
    before = made.frozen()
    around = made.around_out() if made.out is not None and made.out.flags.writeable else b""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            warnings.simplefilter("ignore", HybridGemmWarning)  # of what has no effect on the CPU
            got = multiply(case, call)
    except HybridGemmError as error:
        return _refused(error, refusals, made.frozen() == before)
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        return Outcome(EXCEPTION, f"{type(error).__name__}: {' '.join(str(error).split())}")
    certain = [x.why for x in refusals if x.certain]
    if certain:
        return Outcome(WRONG, f"not refused: {certain[0]}")
    if case.mistake:  # that is none here: a right product, but not the expected one
        return Outcome(RIGHT)
    if words := _differs(case, made, got):
        return Outcome(WRONG, words)
    return _untouched(made, before, around)


def _refused(error: HybridGemmError, refusals: list[Refusal], untouched: bool) -> Outcome:
    words = f"{type(error).__name__}: {error}"
    if not any(isinstance(error, x.error) for x in refusals):
        return Outcome(EXCEPTION, f"refused without a reason: {words}")
    if "\n" in words or len(words) < 20:
        return Outcome(WRONG, f"not one clear line: {words!r}")
    if not untouched:
        return Outcome(WRONG, f"refused after writing: {words}")
    return Outcome(REFUSED, words)


def _differs(case: Case, made: Matrices, got: Any) -> str:
    """What is wrong with C; nothing if it is right."""
    if made.out is not None and got is not made.out:
        return "the result is not out"
    dtype = made.expected.dtype if made.out is None else made.out.dtype
    if got.dtype != dtype or got.shape != (case.m, case.n):
        return f"C is {got.dtype} {got.shape}, not {dtype} {(case.m, case.n)}"
    with np.errstate(all="ignore"):
        wanted = made.expected.astype(dtype)
    same = np.asarray(got) == wanted
    same |= (np.asarray(got) != np.asarray(got)) & (wanted != wanted)  # Inf - Inf after a cast
    if same.all():
        return ""
    wrong = np.argwhere(~same)
    i, j = (int(x) for x in wrong[0])
    first = f"C[{i}, {j}] is {got[i, j]}, not {wanted[i, j]}"
    return f"{len(wrong)} of {same.size} elements differ; {first}"


def _untouched(made: Matrices, before: dict[str, bytes], around: bytes) -> Outcome:
    """Whether inputs, and what lies around `out`, are as they were."""
    if around and made.around_out() != around:
        return Outcome(WRONG, "bytes around out changed")
    for name, memory in made.memory.items():
        if name != made.out_in and memory.tobytes() != before[name]:
            return Outcome(WRONG, f"{name.upper()} changed")
    return Outcome(RIGHT)
