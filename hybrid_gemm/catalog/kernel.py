"""A kernel and its variants, as its header describes them; pure, knows no device.

A kernel file describes itself in a TOML header between `/*---` and `---*/`, which `files` reads,
so the host's checks and the compiler's (`static_assert`) come from the same lines.
`docs/kernels.md` documents the keys.
"""

from __future__ import annotations

import functools
import math
import zlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..errors import KernelError, UsageError, nearest
from ..host.kept import cached_property
from ..problem import NARROW, is_long
from .expressions import evaluate, evaluate_all

C_TYPES = {"float32": "float", "float64": "double", "int32": "int", "int64": "long long"}
# What operands of tensor-core kernels hold; tfloat32 is float32 whose low 13 bits are zero.
TENSOR_TYPES = {"float16": 2, "bfloat16": 2, "tfloat32": 4}
RESIDUES = {"int8": 1}  # of float64, which they are multiplied as
ITEM_SIZE = {"float32": 4, "float64": 8, "int32": 4, "int64": 8, **TENSOR_TYPES, **RESIDUES}
DTYPES = (*C_TYPES, *NARROW)  # of the matrices that kernels multiply
LAYOUTS = ("nn", "nt", "tn", "tt")
MAX_THREADS = 1024  # a block, on every CUDA GPU
MAX_GRID = (2**31 - 1, 65535, 65535)
LISTED_FOR = 132  # multiprocessors, an H200's: for these headers list what `scales` names


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
    tile: tuple[str, ...] = ()
    step: str = "1"
    cluster: str = "1"
    persistent: bool = False
    early: bool = False
    in_place: bool = False
    tma: tuple[Mapping[str, Any], ...] = ()
    scales: tuple[str, ...] = ()
    space: Mapping[str, Sequence[int]] = field(default_factory=dict)

    def __hash__(self) -> int:
        return hash(self.name)

    def __repr__(self) -> str:
        return f"<Kernel {self.name}: {self.summary}>"

    def variants(self) -> list[Variant]:
        """The variants that the header lists; the first is the default."""
        return [Variant(self, dict(params)) for params in self.params]

    def variant(self, params: Mapping[str, int] | None = None) -> Variant:
        """The default variant with `params` replaced; checked against the header's rules.

        Raises `UsageError` for a parameter the kernel does not have, or a combination that
        breaks one of its rules.
        """
        return self._variant(tuple((params or {}).items()))

    @functools.lru_cache(maxsize=4096)  # noqa: B019  (kernels live as long as the process)
    def _variant(self, given: Sequence[tuple[str, int]]) -> Variant:
        chosen = dict(self.params[0])
        for name, value in given:
            if name not in chosen:
                raise UsageError(
                    f"kernel {self.name} has no parameter {name!r}"
                    f"{nearest(name, chosen)}; it has "
                    f"{', '.join(chosen) if chosen else 'none'}"
                )
            chosen[name] = value
        variant = Variant(self, chosen)
        variant.check()
        return variant

    def min_arch(self) -> int:
        """The lowest compute capability, as 70 for 7.0."""
        return int(self.arch.removeprefix(">=").removeprefix("==").rstrip("a"))

    def runs_at(self, arch: int) -> bool:
        """Whether GPUs of a compute capability, as 90 for 9.0, run it."""
        lowest = self.min_arch()
        return arch == lowest if self.arch.startswith("==") else arch >= lowest

    def target(self, arch: str) -> str:
        """What the compiler calls an architecture ("sm_90") for this kernel: "sm_90a" where it
        uses instructions that this architecture alone has."""
        return arch + "a" * self.arch.endswith("a")

    @cached_property
    def of_launch(self) -> tuple[str, ...]:
        """The expressions of a launch: grid, block, shared memory, workspace, flags."""
        return (*self.grid, *self.block, self.shared, self.workspace, self.flags)

    @property
    def turns(self) -> bool:
        """Whether the first side of its tile lies along the longer side of C."""
        return any("min(m, n)" in limit for limit in self.limits)

    @property
    def shares_k(self) -> bool:
        """Whether blocks share the k of a tile and leave their sums in a workspace."""
        return self.workspace != "0"


@dataclass(frozen=True)
class Launch:
    """Grid, block and memory (bytes) of one launch: dynamic shared memory a block, and for the
    whole grid a workspace and flags, which are zero before a launch and after it.

    An `early` one's blocks may begin while those of what was launched before end: the kernel
    waits for that itself. A `persistent` one's blocks take tiles in turn, `cluster` blocks
    together: see `resident`."""

    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_bytes: int = 0
    workspace_bytes: int = 0
    flag_bytes: int = 0
    early: bool = False
    persistent: bool = False
    cluster: int = 1

    def cut(self, shares: int) -> Launch:
        """This launch with so many times its blocks: so many shares of k for each tile of C."""
        x, y, z = self.grid
        grid = (x * shares, y, z) if self.persistent else (x, y, z * shares)
        return replace(self, grid=grid)

    def resident(self, multiprocessors: int) -> Launch:
        """This launch on a GPU with so many multiprocessors. Of a persistent kernel it starts one
        block on each at most, in whole clusters; other launches stay as they are."""
        if not self.persistent:
            return self
        here = multiprocessors // self.cluster * self.cluster
        return replace(self, grid=(min(self.grid[0], here), 1, 1))


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

    def __repr__(self) -> str:
        return f"<Variant {self}>"

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:  # the same in every process, since variants are pickled with it
        return zlib.crc32(str(self).encode())

    def check(self, dtype: str | None = None) -> None:
        """Raise `UsageError` if the parameters break one of the kernel's rules."""
        if fault := self._fault(dtype):
            raise UsageError(fault)

    def suits(self, dtype: str | None = None) -> bool:
        """Whether `check` finds nothing."""
        return self._fault(dtype) is None

    @functools.lru_cache(maxsize=4096)  # noqa: B019  (variants live as long as the process)
    def _fault(self, dtype: str | None) -> str | None:
        for name, value in self.params.items():
            if value < 1:
                return f"{self.name}: {name}={value}; it must be at least 1"
        sizes = [ITEM_SIZE[dtype]] if dtype else sorted({ITEM_SIZE[d] for d in self.kernel.dtypes})
        for rule in self.kernel.require:
            # Without a dtype a variant is good if some dtype of the kernel can run it.
            if not any(self._holds(rule, size) for size in sizes):
                return f"kernel {self} is not possible: it needs {rule}"
        if not self.kernel.library:
            threads = math.prod(self._block(sizes[0]))
            if not 1 <= threads <= MAX_THREADS:
                return (
                    f"kernel {self} asks for blocks of {threads} threads; "
                    f"a block has 1 to {MAX_THREADS}"
                )
        return None

    @cached_property
    def tile(self) -> tuple[int, int]:
        """Rows and columns of C that a block computes at a time."""
        rows, columns = (evaluate(e, self.params) for e in self.kernel.tile)
        return rows, columns

    def tile_of(self, m: int, n: int) -> tuple[int, int]:
        """The same of a C of `m` x `n`, along the longer side of which a tile may lie."""
        rows, columns = self.tile
        return (columns, rows) if self.kernel.turns and m < n else (rows, columns)

    @cached_property
    def cluster(self) -> int:
        """Blocks of a cluster; 1 where there are none."""
        return evaluate(self.kernel.cluster, self.params)

    @property
    def most_shares(self) -> int:
        """Shares that the k of a tile is cut into at most, by the host; 1 where it is not."""
        return self.params.get("SHARES", 1)

    @property
    def cuts_last(self) -> bool:
        """Whether the host may have the k of the last tiles cut, where they would leave blocks
        without work: of persistent kernels that cut no other (kernels/tiles.cuh)."""
        return self.kernel.persistent and self.most_shares == 1

    @property
    def uncut(self) -> Variant:
        """This variant where no k is cut."""
        return self.kernel.variant({**self.params, "SHARES": 1}) if self.most_shares > 1 else self

    def step(self, dtype: str) -> int:
        """The k of a step, of which each share has a whole number."""
        return evaluate(self.kernel.step, {**self.params, "SIZE": ITEM_SIZE[dtype]})

    def steps(self, k: int, dtype: str) -> int:
        """Steps of k."""
        return -(-k // self.step(dtype))

    def for_multiprocessors(self, count: int, given: Collection[str] = ()) -> Variant:
        """This variant on a GPU with so many multiprocessors: the parameters that `scales` names,
        where they are listed as blocks of a whole H200 with its 132, are as much larger or
        smaller. Those that a user has `given` stay."""
        params = {
            name: -(-value * count // LISTED_FOR)
            if name in self.kernel.scales and name not in given and value >= LISTED_FOR
            else value
            for name, value in self.params.items()
        }
        return Variant(self.kernel, params)

    @functools.lru_cache(maxsize=4096)  # noqa: B019
    def box(self, operand: str, dtype: str, *, along_k: bool) -> tuple[int, int]:
        """The elements that one TMA copy moves of operand "A" or "B": along memory, and across
        it. `along_k` says how the operand lies.

        Raises `UsageError` where the kernel does not read one that lies so by TMA.
        """
        way = "along_k" if along_k else "across_k"
        for entry in self.kernel.tma:
            if entry["operand"] == operand and way in entry:
                return self._sides(entry[way], dtype)
        raise UsageError(f"kernel {self.name} has no box for an operand {operand} {way}")

    @functools.lru_cache(maxsize=4096)  # noqa: B019
    def box_of_c(self, dtype: str) -> tuple[int, int] | None:
        """As `box`, of what one TMA copy stores of C; None where C is stored otherwise."""
        for entry in self.kernel.tma:
            if entry["operand"] == "C" and self._holds(entry.get("where", "1"), ITEM_SIZE[dtype]):
                return self._sides(entry["box"], dtype)
        return None

    def _sides(self, box: Sequence[str], dtype: str) -> tuple[int, int]:
        names = {**self.params, "SIZE": ITEM_SIZE[dtype]}
        along, across = (evaluate(e, names) for e in box)
        return along, across

    def _holds(self, rule: str, size: int) -> bool:
        return bool(evaluate(rule, {**self.params, "SIZE": size}))

    def _block(self, size: int, **names: int) -> tuple[int, int, int]:
        # A block that depends on the problem is checked when there is one.
        names = {"m": 1, "n": 1, "k": 1, **names, **self.params, "SIZE": size}
        x, y, z = (evaluate(e, names) for e in self.kernel.block)
        return x, y, z

    @functools.lru_cache(maxsize=4096)  # noqa: B019
    def launch(self, m: int, n: int, k: int, dtype: str) -> Launch:
        """Grid, block and shared memory for C of `m` x `n`; raises `UsageError` past a limit."""
        kernel, names = self.kernel, self._names(m, n, k, dtype)
        if reason := self._beyond(names):
            raise UsageError(reason)
        found = evaluate_all(kernel.of_launch, names)
        x, y, z, wide, high, deep, shared, workspace, flags = found
        return Launch(
            (x, y, z), (wide, high, deep), shared, workspace, flags, kernel.early,
            kernel.persistent, self.cluster,
        )  # fmt: skip

    def takes(self, m: int, n: int, k: int, dtype: str) -> bool:
        """Whether the sides are within the kernel's limits."""
        if not self.kernel.limits:
            return True
        return all(evaluate_all(self.kernel.limits, self._names(m, n, k, dtype)))

    def _beyond(self, names: Mapping[str, int]) -> str | None:
        """Which of the kernel's limits sides are beyond, in one line; None if they keep all."""
        for limit in self.kernel.limits:
            if not evaluate(limit, names):
                sides = " ".join(f"{side}={names[side]}" for side in "mnk")
                return f"kernel {self} cannot take {sides}: it needs {limit}"
        return None

    def threads(self, dtype: str) -> int:
        """Threads of a block that makes one tile, whatever limits m, n and k have."""
        m, n = self.tile
        return math.prod(self._block(ITEM_SIZE[dtype], m=m, n=n))

    def blocks(self, m: int, n: int, k: int, dtype: str) -> int:
        """Blocks of `launch`, without its other sizes and limits."""
        return math.prod(evaluate_all(self.kernel.grid, self._names(m, n, k, dtype)))

    def _names(self, m: int, n: int, k: int, dtype: str) -> dict[str, int]:
        """What expressions of a product may name."""
        return {"m": m, "n": n, "k": k, **self.params, "SIZE": ITEM_SIZE[dtype]}

    @functools.lru_cache(maxsize=4096)  # noqa: B019
    def launches(
        self, m: int, n: int, k: int, dtype: str
    ) -> tuple[tuple[slice, slice, Launch], ...]:
        """Rows and columns of C with their launch: one, or several where sides and a grid have
        their limits."""

        def fits(rows: int, cols: int) -> bool:
            if is_long(rows, cols):
                return False
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
        if reason := self._no_form(dtype):
            return reason
        try:
            self.check(dtype)
            if self.kernel.library:
                return self._beyond(self._names(m, n, k, dtype))
            self.launch(m, n, k, dtype)
        except ValueError as error:  # UsageError, or an expression that has no value there
            return str(error)
        return None

    def _no_form(self, dtype: str) -> str | None:
        """Why the kernel has no text for a dtype; None if it has."""
        if dtype in self.kernel.dtypes:
            return None
        return f"kernel {self.name} has no {dtype} form; it has {', '.join(self.kernel.dtypes)}"

    def source(self, dtype: str, layout: str = "nn") -> str:
        """The text for the compiler: defines, checks, then the kernel file itself. Raises
        `KernelError` for a dtype that the kernel has no form for."""
        if reason := self._no_form(dtype):
            raise KernelError(reason)
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
