"""What `hybrid-gemm run` multiplies: matrices of .npy files, or made from a seed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from ..arrays import generator, npy_files
from ..errors import OutOfMemoryError, UsageError, counted, in_words
from ..host.resources import cores, memory_available
from ..planning.partition import Span
from ..problem import Problem, compute_dtype, make_problem
from ..verify import host_bytes
from .asked import InputRequest

DEFAULT_SIZE = 2048
LARGEST = 2**63  # bytes of a matrix, as NumPy counts them


@dataclass
class Inputs:
    """A, B and C: `arrays` of files, or None where they are to be generated in `shapes`."""

    request: InputRequest
    shapes: dict[str, tuple[int, int]]
    problem: Problem
    arrays: dict[str, Any] = field(default_factory=dict)
    files: dict[str, npy_files.NpyFile] = field(default_factory=dict)

    @classmethod
    def of(cls, request: InputRequest) -> Inputs:
        """Opens the files, or looks at what is to be generated. Raises `UsageError`."""
        return _from_files(request) if request.files else _to_generate(request)

    @property
    def generated(self) -> bool:
        return not self.arrays

    def facts(self) -> dict[str, Any]:
        """What ranks have to agree on. Raises `OSError` where a file cannot be read."""
        request, files = self.request, self.files.values()
        return {
            "shapes": self.shapes, "dtype": self.problem.out_dtype, "fill": request.fill,
            "seed": request.seed, "alpha": request.alpha, "beta": request.beta,
            "trans_a": request.trans_a, "trans_b": request.trans_b,
            "files": [(file.name, file.size) for file in files],
            **{f"the content of {file.name}": f"CRC-32 {file.sampled():08x}" for file in files},
        }  # fmt: skip

    def check_unchanged(self) -> None:
        """Raises `HybridGemmError` if a file was written to since it was opened."""
        for file in self.files.values():
            file.check_unchanged()

    def sha256(self) -> dict[str, str | None]:
        """The SHA-256 of the files as they were read; None for what was generated."""
        found = {x: self.files[x].sha256() if x in self.files else None for x in ("A", "B")}
        self.check_unchanged()
        return found

    def asked(self, settled: Problem) -> Problem:
        """The problem as a site settled it, to be shown: one without k has an alpha of 0 there."""
        return settled if settled.k else settled.having(alpha=self.problem.alpha)

    def block(self, operand: str, rows: Span, cols: Span) -> Any:
        """Some rows and columns of op(A), op(B) or C ("A", "B", "C")."""
        request = self.request
        transposed = {"A": request.trans_a, "B": request.trans_b, "C": False}[operand]
        if transposed:
            rows, cols = cols, rows
        if not self.generated:
            found = self.arrays[operand][rows.slice, cols.slice]
        else:
            ranges = (rows.start, rows.stop), (cols.start, cols.stop)
            found = self._generate(operand, row_range=ranges[0], col_range=ranges[1])
        return found.T if transposed else found

    def whole(self, operand: str) -> Any:
        """A, B or C as it lies: not transposed."""
        return self._generate(operand) if self.generated else self.arrays[operand]

    def _generate(self, operand: str, **ranges: Any) -> np.ndarray:
        return generator.generate(
            *self.shapes[operand], self.problem.out_dtype, seed=self.request.seed,
            operand=operand, fill=self.request.fill, threads=cores(), **ranges,
        )  # fmt: skip


def check_request(request: InputRequest) -> None:
    """Raises `UsageError` as `Inputs.of` would, without opening a file."""
    if request.files:
        _check_files(request)
    else:
        _to_generate(request)


def _check_files(request: InputRequest) -> None:
    files = request.files
    if len(files) != 2:
        third = "; C.npy goes with -c" if len(files) == 3 else ""
        which = f" ({files[0]})" if len(files) == 1 else ""
        raise UsageError(
            f"{counted(len(files), 'file')} given{which}; give A.npy and B.npy, or neither{third}"
        )
    if request.beta and request.c_file is None:
        raise UsageError(f"--beta {request.beta} scales C, and no C was given; -c C.npy gives it")
    generated = request.m, request.n, request.k, request.size, request.dtype
    if any(x is not None for x in generated):
        raise UsageError("sizes and --dtype are for generated input; the files have their own")


def _from_files(request: InputRequest) -> Inputs:
    _check_files(request)
    files = request.files
    names = {"A": files[0], "B": files[1], "C": request.c_file}
    opened = {x: npy_files.NpyFile(name) for x, name in names.items() if name is not None}
    arrays = {x: opened[x].array if x in opened else None for x in names}
    problem = _problem(request, arrays)
    shapes = {x: array.shape for x, array in arrays.items() if array is not None}
    return Inputs(request, shapes, problem, arrays, opened)


def _to_generate(request: InputRequest) -> Inputs:
    dtype = request.dtype or "float32"
    if request.c_file is not None:
        raise UsageError("-c goes with A.npy B.npy; generated input makes its own C")
    sides = request.m, request.n, request.k
    if request.size is not None and any(x is not None for x in sides):
        raise UsageError("--size sets m, n and k; give it or -m -n -k")
    size = DEFAULT_SIZE if request.size is None else request.size
    m, n, k = (size if x is None else x for x in sides)
    if min(m, n, k) < 0:
        raise UsageError(f"m={m} n={n} k={k}: sizes are 0 or more")
    compute_dtype(np.dtype(dtype))
    shapes = {
        "A": (k, m) if request.trans_a else (m, k),
        "B": (n, k) if request.trans_b else (k, n),
        "C": (m, n),
    }
    size = np.dtype(dtype).itemsize
    if any(max(rows, 1) * max(cols, 1) * size >= LARGEST for rows, cols in shapes.values()):
        raise UsageError(f"m={m} n={n} k={k}: too large; no matrix has 2^63 bytes or more")
    views: dict[str, Any] = {
        x: np.broadcast_to(np.empty((), dtype), shape) for x, shape in shapes.items()
    }
    if not request.beta:
        views["C"] = None
    return Inputs(request, shapes, _problem(request, views))


def _problem(request: InputRequest, arrays: dict[str, Any]) -> Problem:
    return make_problem(
        arrays["A"], arrays["B"], arrays["C"], alpha=request.alpha, beta=request.beta,
        trans_a=request.trans_a, trans_b=request.trans_b,
    )  # fmt: skip


class HostMemory(NamedTuple):
    """Bytes of A, B and C, those that their verification takes besides at most, and those of the
    host's memory. `fits` is None for files, which are read in parts."""

    bytes: int
    verification_bytes: int
    available_bytes: int
    fits: bool | None


def host_memory(inputs: Inputs, verify: str) -> HostMemory:
    """What A, B and C, and `verify`, take of this host's memory; complex ones with B as it is
    multiplied."""
    p = inputs.problem
    size = np.dtype(p.out_dtype).itemsize
    shapes = [*inputs.shapes.values(), *expansion(p, p.k, p.n)]
    shapes += [] if "C" in inputs.shapes else [(p.m, p.n)]
    need, have = sum(rows * cols for rows, cols in shapes) * size, memory_available()
    more = host_bytes(p, verify, p.m, p.n)
    return HostMemory(need, more, have, need + more <= have if inputs.generated else None)


def expansion(problem: Problem, k: int, n: int) -> list[tuple[int, int]]:
    """The shape of what a product makes of k x n elements of B beside them, if it does."""
    return [(2 * k, n)] if problem.is_complex else []


def check_host_memory(shapes: Any, itemsize: int, verification: int) -> None:
    """Raises `OutOfMemoryError` where matrices of these shapes, and so many bytes for their
    verification, do not fit in host memory."""
    need = sum(rows * cols for rows, cols in shapes) * itemsize
    have = memory_available()
    if need > have:
        raise OutOfMemoryError(
            f"A, B and C need {in_words(need)} of host memory and {in_words(have)} is available; "
            "smaller sizes fit, or .npy files, which are read in parts"
        )
    if need + verification > have:
        matrices = f"A, B and C need {in_words(need)} of host memory and " if need else ""
        raise OutOfMemoryError(
            f"{matrices}verification needs up to {in_words(verification)}"
            f"{' more' if need else ' of host memory'}, and {in_words(have)} is available; "
            f"--verify off leaves it out{', and smaller sizes fit' if need else ''}"
        )
