"""`compute=`: how float32 is multiplied, and which kernel multiplies on tensor cores. Pure,
but for the variable of the environment by which cuBLAS uses TF32 whatever it is told.

docs/tensor-cores.md says how accurate each way is. float16 and bfloat16 operands, whose products
are exact in float32, go to tensor cores as they are, where there are any, whatever `compute` says.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .. import catalog
from ..catalog import Kernel, Variant
from ..errors import UnavailableError, UsageError
from ..options import COMPUTES
from ..planning.plan import MODULI
from ..problem import CONVERT, NARROW, Problem
from . import tensor_cores

ON_TENSOR_CORES = ("fp32x3", "tf32", "fp64x")  # and refused where there are none
# Where "auto" means fp32x3: the emulator, and GPUs whose tensor cores multiply 16 bits 15 times as
# fast as float32 is multiplied outside them, or faster (data sheets of A100, H100, B200 and B300).
# Of the others that were looked up (RTX 3090, 4090 and 5090, A40, L40S) they do so two or four
# times as fast, and fp32x3 takes three products and the packing.
_PAYING = (0, 80, 90, 100, 103)
OVERRIDE = "NVIDIA_TF32_OVERRIDE"
# How the device multiplied a product of fp32x3, which it decides by the data.
VERDICTS = ("fp16 split", "tf32 split", "strict fp32")


def kernel_for(kind: str, arch: int, role: str = "tensor") -> str | None:
    """The fastest of our kernels that multiplies on a device's tensor cores, the one on the
    highest rung; None where there are none. `arch` is 90 for compute capability 9.0, and 0 for
    devices that have none. With the role `residues` it multiplies those of float64."""
    if kind == "cpu":  # which has libraries alone
        return None
    here = (
        kernel
        for kernel in catalog.kernels().values()
        if kernel.role == role
        and not kernel.library
        and _runs(kernel, kind, arch)
        and not kernel.in_place  # which has not all arithmetics
    )
    fastest = max(here, key=lambda kernel: kernel.rung, default=None)
    return fastest.name if fastest else None


def _able(variant: Variant) -> tuple[str, ...]:
    """How a kernel on tensor cores can multiply float32 or float64."""
    if variant.kernel.role == "residues":
        return ("fp64x",)
    return ("fp32x3", "tf32") if "TERMS" in variant.params else ("tf32",)


def _runs(kernel: Kernel, kind: str, arch: int) -> bool:
    """Whether a kernel's header says that it runs there."""
    return kind in kernel.runs_on and (not arch or kernel.runs_at(arch))


@dataclass(frozen=True)
class Arithmetic:
    """How a runner multiplies: `compute`, and its kernel on tensor cores, if there are any, or a
    kernel that was named and reads 16 bits without them. `asked` says that the user named a kernel
    on tensor cores."""

    compute: str
    variant: Variant | None
    asked: bool = False

    def settle(self, problem: Problem) -> Problem:
        """The problem with `compute` and `operands` as they will be multiplied.

        Raises `UsageError` where the arithmetic asked for is not this dtype's, or not the
        kernel's.
        """
        plain = problem.having(operands=problem.dtype, compute="fp32")
        if problem.operands in NARROW and self._reads_narrow:
            return problem if problem.k else plain
        if self.compute == "fp64x":
            return self._settle_fp64x(problem, plain)
        if problem.dtype != "float32":
            if self.compute not in ("fp32", "auto"):
                other = "" if self.asked else "leave compute out, or "
                raise UsageError(
                    f"compute {self.compute} is for float32; this product is in {problem.dtype}, "
                    f"which has its own arithmetic: {other}{CONVERT}"
                )
            return plain
        compute = self.compute
        if compute == "auto":
            compute = "fp32" if self.variant is None else "fp32x3"
        if self.asked and compute not in (able := _able(self._kernel)):
            raise UsageError(
                f"kernel {self._kernel.name} multiplies on tensor cores, and not in "
                f"{compute}; give compute {' or '.join(able)} too"
            )
        return plain.having(compute=compute) if problem.k else plain

    def _settle_fp64x(self, problem: Problem, plain: Problem) -> Problem:
        if plain.dtype != "float64":
            given = problem.operands if problem.operands in NARROW else plain.dtype
            other = "fp32x3 is its like" if given == "float32" else "leave compute out"
            raise UsageError(
                f"compute fp64x is for float64; this product is in {given}: "
                + (CONVERT if self.asked else f"{other}, or {CONVERT}")
            )
        return plain.having(compute="fp64x") if plain.k else plain

    @property
    def params(self) -> Mapping[str, int]:
        """Those of the kernel on tensor cores; none without one."""
        return self.variant.params if self.variant else {}

    @property
    def _reads_narrow(self) -> bool:
        """Whether the kernel reads operands of 16 bits as they are."""
        if self.variant is None:
            return False
        return "TERMS" in self.params or set(NARROW) <= set(self.variant.kernel.dtypes)

    @property
    def _kernel(self) -> Variant:
        if self.variant is None:
            raise UsageError("there are no tensor cores to multiply on")
        return self.variant

    def takes(self, problem: Problem) -> bool:
        """Whether a settled problem goes to tensor cores."""
        return problem.operands in NARROW or problem.compute != "fp32"

    def variant_for(self, problem: Problem, processors: int, out_bytes: int = 4) -> Variant:
        """The kernel for a problem that goes to tensor cores, of a device with so many
        multiprocessors; `out_bytes` is the size of C's elements there."""
        if problem.compute == "fp64x":
            return self._kernel
        narrow, terms = problem.operands in NARROW, _terms(problem)
        if self._kernel.kernel.library or self._kernel.kernel.role == "gemm":
            return self._kernel
        if not self.asked:
            dtype = problem.operands if narrow else ("tfloat32", "float16")[terms == 3]
            sides = problem.m, problem.n, problem.k
            return tensor_cores.fastest(
                self._kernel.kernel, *sides, terms=terms, dtype=dtype, out_bytes=out_bytes,
                processors=processors,
            )  # fmt: skip
        return with_out(with_terms(self._kernel, terms), out_bytes)


def with_terms(variant: Variant, terms: int) -> Variant:
    """The first listed variant with so many TERMS, or this one with them if it was chosen."""
    kernel = variant.kernel
    if kernel.library:
        return variant
    if variant.params == kernel.params[0]:
        listed = [v for v in kernel.variants() if v.params["TERMS"] == terms]
        variant = listed[0] if listed else variant
    return kernel.variant({**variant.params, "TERMS": terms})


def with_out(variant: Variant, out_bytes: int) -> Variant:
    """A variant for C of elements of so many bytes, if it has the parameter OUT."""
    if "OUT" not in variant.params:
        return variant
    return variant.kernel.variant({**variant.params, "OUT": out_bytes})


def arithmetic_for(compute: str, chosen: Variant | None, *, kind: str, arch: int) -> Arithmetic:
    """How a device multiplies when `compute` was asked for, and the kernel `chosen`, if one was.
    `kind` and `arch` are the device's, as for `kernel_for`.

    Raises `UsageError` for names that do not go together, and `UnavailableError` where tensor
    cores are asked for and there are none.
    """
    if compute not in COMPUTES:
        raise UsageError(f"no compute is called {compute!r}; there are {', '.join(COMPUTES)}")
    role = "residues" if compute == "fp64x" else "tensor"
    here = kernel_for(kind, arch, role)
    if chosen is not None and chosen.kernel.role in ("tensor", "residues"):
        if role != chosen.kernel.role and "residues" in (role, chosen.kernel.role):
            theirs, other = "float32", "float64"
            if chosen.kernel.role == "residues":
                theirs, other = other, theirs
            able = " or ".join(_able(chosen))
            works = f"give {theirs} and compute {able}"
            if here and compute in ON_TENSOR_CORES:
                works = f"kernel {here} multiplies {other} in that"
            raise UsageError(
                f"kernel {chosen.name} multiplies {theirs} in {able}, and compute is {compute}: "
                f"{works}"
            )
        if not here or not _runs(chosen.kernel, kind, arch):
            lowest = chosen.kernel.min_arch()
            raise UnavailableError(
                f"kernel {chosen.name} needs tensor cores of compute capability "
                f"{lowest // 10}.{lowest % 10}; the device is {_where(kind, arch)}"
                + (f": {here} works here" if here else "")
            )
        return Arithmetic(compute, chosen, True)
    if chosen is not None:
        if compute in ON_TENSOR_CORES:
            does = "residues or residues_mma" if compute == "fp64x" else "wgmma or mma"
            raise UsageError(
                f"compute {compute} is multiplied on tensor cores, and kernel {chosen.name} does "
                f"not use them; {here or does} does"
            )
        narrow = set(NARROW) <= set(chosen.kernel.dtypes)
        if narrow and here and _runs(chosen.kernel, kind, arch):
            return Arithmetic("fp32", chosen)
        return Arithmetic("fp32", None)
    if compute in ON_TENSOR_CORES and not here:
        works = "leave compute out" if compute == "fp64x" else "fp32 works here, and auto takes it"
        raise UnavailableError(
            f"compute {compute} needs tensor cores of compute capability 8.0 or later, and the "
            f"device is {_where(kind, arch)}; {works}"
        )
    if compute == "auto" and arch not in _PAYING:
        compute = "fp32"
    return Arithmetic(compute, catalog.get(here).variant() if here else None)


def _where(kind: str, arch: int) -> str:
    return f"a GPU of compute capability {arch // 10}.{arch % 10}" if arch else kind


def as_asked(variant: Variant, problem: Problem) -> Variant:
    """A variant with the TERMS that a settled problem takes, if it has any."""
    return with_terms(variant, _terms(problem)) if "TERMS" in variant.params else variant


def refusal(variant: Variant, problem: Problem) -> str | None:
    """Why a kernel for tensor cores does not multiply a settled problem of float32; None if it
    does, or has no form for another dtype (`Variant.refusal`)."""
    strict = problem.compute == "fp32" and problem.operands == "float32"
    if variant.kernel.role != "tensor" or not strict:
        return None
    return f"kernel {variant.name} multiplies on tensor cores: give compute fp32x3 or tf32"


def _terms(problem: Problem) -> int:
    return 3 if problem.compute == "fp32x3" and problem.operands not in NARROW else 1


def dtype_for(variant: Variant, problem: Problem) -> str:
    """The dtype, as kernels' headers name them, in which a variant multiplies a settled problem's
    operands."""
    if problem.operands in NARROW:
        return problem.operands
    if variant.kernel.role == "residues":
        return "int8"
    own = variant.kernel.role == "tensor" and not variant.kernel.library
    return "tfloat32" if own and problem.operands == "float32" else problem.dtype


def rounding(problem: Problem) -> float:
    """The most that rounding the operands changes a product, relative to |A||B|."""
    return 1.01 * 2.0**-10 if problem.compute == "tf32" else 0.0


def ways(problem: Problem) -> Sequence[str]:
    """In which ways the device makes products whose arithmetic depends on the data, in the order
    in which it counts them."""
    if problem.compute == "fp64x":
        return ("native float64", *(f"{x} moduli" for x in range(1, MODULI + 1)))
    return VERDICTS


def words(problem: Problem, taken: Sequence[int] = ()) -> str:
    """What was computed, in words. `taken` counts the products by `ways`."""
    if problem.operands in NARROW:
        return f"{problem.operands} on tensor cores, sums in float32"
    if problem.compute in ("fp32x3", "fp64x"):
        found = [(n, name) for n, name in zip(taken, ways(problem), strict=True) if n]
        if not found:
            return problem.compute
        if len(found) == 1:
            return f"{problem.compute} ({found[0][1]})"
        return f"{problem.compute} ({', '.join(f'{n} x {name}' for n, name in found)})"
    return problem.compute if problem.compute != "fp32" else f"strict {problem.dtype}"


def is_overridden() -> bool:
    """Whether cuBLAS multiplies strict float32 through TF32."""
    return os.environ.get(OVERRIDE, "0") not in ("", "0")


def ran(variant: Variant | None, problem: Problem, taken: Sequence[int] = ()) -> str:
    """As `words`, for a kernel that need not be for tensor cores; None if there was none."""
    tensor = variant is None or variant.kernel.role in ("tensor", "residues")
    if variant and problem.operands in NARROW and not (tensor or variant.kernel.library):
        return f"{problem.operands}, products and sums in float32"
    if tensor or problem.operands in NARROW or any(taken):
        return words(problem, taken)
    library = variant.kernel.library if variant else ""
    if library == "cublas" and problem.dtype == "float32" and is_overridden():
        return f"float32 through TF32 ({OVERRIDE} is set)"
    other = problem.compute in ON_TENSOR_CORES
    faster = f", expected to be faster here than {problem.compute}" if other else ""
    return f"strict {problem.dtype}{faster}"
