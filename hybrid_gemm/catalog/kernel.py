"""The kernels: reads `kernels/*.cu` and their headers; pure, knows no device.

A kernel file describes itself in a TOML header between `/*---` and `---*/`. This module is
the only reader of those headers, so the host's checks and the compiler's (`static_assert`)
come from the same lines. `docs/kernels.md` documents the keys.
"""

from __future__ import annotations

import difflib
import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ..errors import UsageError
from .expressions import evaluate

C_TYPES = {"float32": "float", "float64": "double", "int32": "int", "int64": "long long"}
# What operands of tensor-core kernels hold; tfloat32 is float32 whose low 13 bits are zero.
TENSOR_TYPES = {"float16": 2, "bfloat16": 2, "tfloat32": 4}
ITEM_SIZE = {"float32": 4, "float64": 8, "int32": 4, "int64": 8, **TENSOR_TYPES}
LAYOUTS = ("nn", "nt", "tn", "tt")
MAX_THREADS = 1024  # a block, on every CUDA GPU
MAX_GRID = (2**31 - 1, 65535, 65535)

# --- expressions in headers ---------------------------------------------------------------

# --- kernels and variants -----------------------------------------------------------------


@dataclass(frozen=True)
class Kernel:
    """One file of `kernels/`: its name, its header, its text."""

    name: str
    path: Path
    text: str
    summary: str
    source: str
    entry: str = ""
    role: str = "gemm"
    params: tuple[Mapping[str, int], ...] = ({},)
    block: tuple[str, ...] = ("1", "1", "1")
    grid: tuple[str, ...] = ("1", "1", "1")
    shared: str = "0"
    workspace: str = "0"
    flags: str = "0"
    require: tuple[str, ...] = ()
    limits: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ("float32", "float64", "int32", "int64")
    layouts: tuple[str, ...] = LAYOUTS
    arch: str = ">=70"
    runs_on: tuple[str, ...] = ("cuda", "emulator")
    library: str = ""
    rung: int = 99

    def variants(self) -> list[Variant]:
        """The variants that the header lists; the first is the default."""
        return [Variant(self, dict(params)) for params in self.params]

    def variant(self, params: Mapping[str, int] | None = None) -> Variant:
        """The default variant with `params` replaced; checked against the header's rules.

        Raises `UsageError` for a parameter the kernel does not have, or a combination that
        breaks one of its rules.
        """
        chosen = dict(self.params[0])
        for name, value in (params or {}).items():
            if name not in chosen:
                raise UsageError(
                    f"kernel {self.name} has no parameter {name!r}"
                    f"{_nearest(name, chosen)}; it has "
                    f"{', '.join(chosen) if chosen else 'none'}"
                )
            chosen[name] = value
        variant = Variant(self, chosen)
        variant.check()
        return variant

    def min_arch(self) -> int:
        """The lowest compute capability, as 70 for 7.0."""
        return int(self.arch.removeprefix(">=").removeprefix("==").rstrip("a"))


@dataclass(frozen=True)
class Launch:
    """Grid, block and memory (bytes) of one launch: dynamic shared memory a block, and for the
    whole grid a workspace and flags, which are zero before a launch and after it.

    An `early` one's blocks may begin while those of what was launched before end: the kernel
    waits for that itself."""

    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_bytes: int = 0
    workspace_bytes: int = 0
    flag_bytes: int = 0
    early: bool = False


@dataclass(frozen=True)
class Variant:
    """A kernel with its parameters chosen."""

    kernel: Kernel
    params: Mapping[str, int] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.kernel.name

    def __str__(self) -> str:
        given = " ".join(f"{k}={v}" for k, v in self.params.items())
        return f"{self.name} {given}".strip()

    def __hash__(self) -> int:
        return hash((self.kernel.name, tuple(self.params.items())))

    def check(self, dtype: str | None = None) -> None:
        """Raise `UsageError` if the parameters break one of the kernel's rules."""
        for name, value in self.params.items():
            if value < 1:
                raise UsageError(f"{self.name}: {name}={value}; it must be at least 1")
        sizes = [ITEM_SIZE[dtype]] if dtype else sorted({ITEM_SIZE[d] for d in self.kernel.dtypes})
        for rule in self.kernel.require:
            # Without a dtype a variant is good if some dtype of the kernel can run it.
            if not any(self._holds(rule, size) for size in sizes):
                raise UsageError(f"kernel {self} is not possible: it needs {rule}")
        if not self.kernel.library:
            threads = math.prod(self._block(sizes[0]))
            if not 1 <= threads <= MAX_THREADS:
                raise UsageError(
                    f"kernel {self} asks for blocks of {threads} threads; "
                    f"a block has 1 to {MAX_THREADS}"
                )

    def _holds(self, rule: str, size: int) -> bool:
        return bool(evaluate(rule, {**self.params, "SIZE": size}))

    def _block(self, size: int, **names: int) -> tuple[int, int, int]:
        # A block that depends on the problem is checked when there is one.
        names = {"m": 1, "n": 1, "k": 1, **names, **self.params, "SIZE": size}
        return tuple(evaluate(e, names) for e in self.kernel.block)

    @functools.lru_cache(maxsize=4096)  # noqa: B019  (variants live as long as the process)
    def launch(self, m: int, n: int, k: int, dtype: str) -> Launch:
        """Grid, block and shared memory for C of `m` x `n`; raises `UsageError` past a limit."""
        size = ITEM_SIZE[dtype]
        names = {"m": m, "n": n, "k": k, **self.params, "SIZE": size}
        for limit in self.kernel.limits:
            if not evaluate(limit, names):
                raise UsageError(f"kernel {self} cannot take m={m} n={n} k={k}: it needs {limit}")
        grid = tuple(evaluate(e, names) for e in self.kernel.grid)
        memory = (self.kernel.shared, self.kernel.workspace, self.kernel.flags)
        return Launch(grid, self._block(size, m=m, n=n, k=k), *(evaluate(e, names) for e in memory))

    @functools.lru_cache(maxsize=4096)  # noqa: B019
    def launches(
        self, m: int, n: int, k: int, dtype: str
    ) -> tuple[tuple[slice, slice, Launch], ...]:
        """Rows and columns of C with their launch: one, or several where a grid has its limits."""

        def fits(rows, cols):
            grid = self.launch(rows, cols, k, dtype).grid
            return all(g <= limit for g, limit in zip(grid, MAX_GRID, strict=True))

        rows, cols = m, n
        while not fits(rows, cols):
            # Halves that stay multiples of every tile side, so that only edges are ragged.
            if (rows >= cols and rows > 4096) or cols <= 4096:
                rows = -(-rows // 2 // 4096) * 4096
            else:
                cols = -(-cols // 2 // 4096) * 4096
        return tuple(
            (slice(i, i + p), slice(j, j + q), self.launch(p, q, k, dtype))
            for i in range(0, m, rows)
            for j in range(0, n, cols)
            for p, q in [(min(rows, m - i), min(cols, n - j))]
        )

    def refusal(self, *, device: str, dtype: str, m: int, n: int, k: int) -> str | None:
        """Why this variant cannot run that, in one line; None if it can."""
        if device not in self.kernel.runs_on:
            return (
                f"kernel {self.name} does not run on the {device} device; "
                f"it runs on {', '.join(self.kernel.runs_on)}"
            )
        if dtype not in self.kernel.dtypes:
            return f"kernel {self.name} has no {dtype} form; it has {', '.join(self.kernel.dtypes)}"
        try:
            self.check(dtype)
            if not self.kernel.library:
                self.launch(m, n, k, dtype)
        except UsageError as error:
            return str(error)
        return None

    def source(self, dtype: str, layout: str = "nn") -> str:
        """The text for the compiler: defines, checks, then the kernel file itself."""
        trans_a, trans_b = (int(c == "t") for c in layout)
        named = dtype in C_TYPES
        lines = [f"typedef {C_TYPES[dtype]} T;" if named else f"#define DTYPE_{dtype} 1"]
        lines += [f"#define SIZE {ITEM_SIZE[dtype]}"]
        lines += [f"#define TRANS_A {trans_a}", f"#define TRANS_B {trans_b}"]
        lines += [f"#define {name} {value}" for name, value in self.params.items()]
        lines += [
            f'static_assert({rule}, "{self.name} needs {rule}");' for rule in self.kernel.require
        ]
        lines += [f'#line 1 "{self.kernel.path.name}"', self.kernel.text]
        return "\n".join(lines)


def _nearest(word: str, known) -> str:
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.4)
    return f" (did you mean {close[0]!r}?)" if close else ""
