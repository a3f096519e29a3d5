"""The arrays of one call over ranks: who has what of them, what that makes together, and how parts
get to where a plan wants them."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..arrays.caller_arrays import (
    as_array,
    broadcast_c,
    check_out,
    is_device_array,
    module_of,
)
from ..arrays.on_gpus import copy_into, empty_beside
from ..arrays.operand import Operand
from ..arrays.strides import layout
from ..devices.base import Device
from ..errors import DTypeError, UsageError, shown
from ..host.derivatives import check_untracked
from ..option_checks import one_of
from ..planning.partition import Span
from ..problem import Problem, are_numbers, make_problem, op_of, promoted, shape_of
from ..programs.program import Call
from . import launch
from .on_device import fetch
from .peer_memory import PeerMemory
from .redistribution import NOTHING, Part, move, moves, rows_of
from .replicas import Look, look

NO_ARRAYS = Call(None, None)
_CHOICES = "alpha", "beta", "distribution", "result", "root"
DISTRIBUTIONS = ("replicated", "root", "rows", "cols")
_check_distribution = one_of("distribution", DISTRIBUTIONS)
_check_result = one_of("result", DISTRIBUTIONS[:3])
PARTS = {"rows": ("rows", 0), "cols": ("columns", 1)}  # which follow each other along a dimension


def dtype_of(out: Any) -> np.dtype | None:
    """The dtype of what may be an `out`, in native byte order, in which other ranks may be told it:
    what unpickles a swapped bfloat16 swaps that of the whole process. None of what is no array."""
    dtype = getattr(out, "dtype", None)
    return dtype.newbyteorder("=") if isinstance(dtype, np.dtype) else None


class DistributedOperands:
    """The arrays of one call as they lie over ranks, checked together. This rank's `call` has None
    for each matrix of which it has nothing; `into` is the dtype of what C comes into, where that is
    no `out`. With `stacks` A and B may be vectors and stacks. Raises `UsageError` for what makes no
    array, and for a `root` that is no rank; `OptionTypeError` for choices of a wrong type."""

    text: bytes | None = None  # all of what other ranks are told that does not change
    seen: tuple[str, ...] = ()  # matrices that all ranks pass, and that are read

    # Many parameters: the arrays of a product, and how they lie.
    def __init__(
        self, comm: Any, call: Call, distribution: str, result: str | None, root: int,
        into: str | None = None, *, stacks: bool = False,
    ) -> None:  # fmt: skip
        self.comm, self.root = comm, launch.check_root(comm, root)
        a, b, c, self.out = call.arrays
        self.alpha, self.beta = call.alpha, call.beta
        self.out_dtype = dtype_of(self.out) if into is None else np.dtype(into)
        self.have: dict[str, list[Part]] = {}
        self.dtypes: dict[str, np.dtype] = {}
        self.distribution = _check_distribution("distribution", distribution)
        if result is None:
            result = "rows" if distribution == "cols" else distribution
        self.result = _check_result("result", result)
        self.arrays: dict[str, Any] = {
            x: None if v is None else as_array(v, x) for x, v in zip("ABC", (a, b, c), strict=True)
        }
        self.stacked = stacks and any(x is not None and x.ndim != 2 for x in self.arrays.values())
        trans = op_of(call.trans_a, "trans_a"), op_of(call.trans_b, "trans_b")
        self.conj = [op == "c" for op in trans]  # as all ranks have to say it
        self.turned = tuple(map(bool, trans))
        self._see()

    def _see(self) -> None:
        """Has op(A) and op(B), and C as large as this rank's rows of the product, where they are
        known here."""
        a, b, c = (
            x if x is None or not turned else x.T
            for x, turned in zip(self.arrays.values(), (*self.turned, False), strict=True)
        )
        if not (a is None or b is None or c is None or self.distribution == "cols"):
            (m, _k), (_k, n) = shape_of(a, "A"), shape_of(b, "B")
            c = broadcast_c(c, m, n)
        self.arrays = {"A": a, "B": b, "C": c}

    def again(self, call: Call) -> DistributedOperands:
        """Those of another call with the same choices, whose arrays are alike."""
        found = copy.copy(self)
        *arrays, found.out = call.arrays
        found.arrays = dict(zip("ABC", arrays, strict=True))
        found._see()
        return found

    @property
    def xp(self):
        """The module of this rank's arrays."""
        on_gpu = [x for x in self.arrays.values() if x is not None and is_device_array(x)]
        return module_of(on_gpu[0]) if on_gpu else np

    def empty(self, shape: tuple[int, int], dtype: str) -> Any:
        """A new array where this rank's lie: on the GPU of the first that lies on one."""
        return empty_beside(self.arrays.values(), shape, dtype)

    def holds(self, rank: int) -> bool:
        """Whether a rank passes all of A and B, where they are replicated or at root."""
        return self.distribution == "replicated" or rank == self.root

    def gets_c(self, rank: int) -> bool:
        """Whether a rank's caller gets C, or some of it."""
        return self.result != "root" or rank == self.root

    def told(self) -> dict:
        """What the other ranks have to know of this one's arrays. Raises `UsageError` or
        `DTypeError` for what can be seen to be wrong from here."""
        alpha, beta = self.alpha, self.beta
        for name, value in (("alpha", alpha), ("beta", beta)):
            if not (are_numbers(value) or hasattr(value, "ndim")):
                raise DTypeError(f"{name} must be a number, not {shown(value)}")
            check_untracked(value, name)  # here: a tangent does not travel
        factors = {"A": alpha, "B": alpha, "C": beta}
        self.seen = tuple(
            x for x, by in factors.items()
            if not (are_numbers(by) and by == 0) and self._distribution_of(x) == "replicated"
        )  # fmt: skip
        arrays: dict[str, Any] = {
            # In native byte order, as `dtype_of`.
            x: None if v is None else (self._shape_of(x), np.dtype(v.dtype).newbyteorder("="))
            for x, v in self.arrays.items()
        }
        choices = alpha, beta, self.distribution, self.result, self.root
        orders = [
            None if v is None or v.ndim != 2 else (layout(v) or "-")[0]
            for v in self.arrays.values()
        ]
        return {
            **arrays, **dict(zip(_CHOICES, choices, strict=True)), "conjugates": tuple(self.conj),
            "out": self.out_dtype,
            "orders": orders,  # on which kernels depend, so that products differ that differ in it
        }  # fmt: skip

    def _shape_of(self, operand: str) -> tuple[int, ...]:
        x = self.arrays[operand]
        return tuple(x.shape) if self.stacked else shape_of(x, operand)

    def replicas(self) -> dict[str, Look]:
        """What this rank sees of the matrices that all ranks pass, and that are read."""
        return {x: look(self.arrays[x]) for x in self.seen}

    def joined(self, everyone: Sequence[dict]) -> dict[str, Any]:
        """Stand-ins for the whole A, B and C, from what every rank `told`, with None for a C that
        none has; where one raises, all do."""
        launch.check_alike(everyone, (*_CHOICES, "conjugates"))
        whole: dict[str, Any] = {}
        for operand in "ABC":
            found = [rank[operand] for rank in everyone]
            distribution = self._distribution_of(operand)
            if distribution == "root":
                found = [found[self.root]]
            if operand == "C" and all(f is None for f in found):
                whole["C"] = None
                continue
            if any(f is None for f in found):
                missing = self.root if distribution == "root" else found.index(None)
                raise UsageError(
                    f"{operand} is missing on rank {missing}; with distribution="
                    f"{self.distribution!r} it takes one there"
                )
            whole[operand] = self._join(operand, distribution, found)
        return whole

    def problem(self, everyone: Sequence[dict]) -> Problem:
        """The whole problem of matrices, from what every rank `told`."""
        whole, alpha, beta = self.joined(everyone), everyone[0]["alpha"], everyone[0]["beta"]
        least = self.least_out(everyone)
        out = None if least is None else np.empty((0, 0), least)
        try:
            problem = make_problem(*whole.values(), alpha=alpha, beta=beta, out=out)
        except UsageError as error:
            raise UsageError(f"{error}{self._how_joined(everyone)}") from None
        conj_a, conj_b = (
            x and whole[y].dtype.kind == "c" for x, y in zip(self.conj, "AB", strict=True)
        )
        return dataclasses.replace(problem, conj_a=conj_a, conj_b=conj_b)

    def least_out(self, everyone: Sequence[dict]) -> np.dtype | None:
        """The smallest dtype of every rank's `out`, of the ranks that get C; None if one of these
        gives none."""
        of_those = [told["out"] for rank, told in enumerate(everyone) if self.gets_c(rank)]
        given = [dtype for dtype in of_those if dtype is not None]
        return min(given, key=lambda x: x.itemsize) if len(given) == len(of_those) else None

    def _how_joined(self, everyone: Sequence[dict]) -> str:
        """How the matrices came about that ranks have parts of, where they do not fit."""
        found = []
        for operand in "ABC":
            distribution, first = self._distribution_of(operand), everyone[0][operand]
            if distribution in PARTS and first:
                (rows, cols), words = first[0], PARTS[distribution][0]
                found.append(
                    f"{operand} of the ranks' {words}, of which rank 0 has {rows} x {cols}"
                )
        joined = f"distribution={self.distribution!r} joins {'; '.join(found)}"
        return f" ({joined})" if found else ""

    def _distribution_of(self, operand: str) -> str:
        """How one operand is distributed: B is whole everywhere where A is cut by rows, and C
        comes in rows where K is cut."""
        if self.distribution == "rows" and operand == "B":
            return "replicated"
        if self.distribution == "cols":
            return {"A": "cols", "B": "rows", "C": "rows"}[operand]
        return self.distribution

    def _join(self, operand: str, distribution: str, found: list):
        """A stand-in for the whole matrix; notes which rank has which part, and the dtype that
        holds all of them."""
        self.dtypes[operand] = dtype = promoted(*(d for _shape, d in found))
        if distribution == "replicated":  # each rank would multiply other numbers
            dtypes = [dtype for _shape, dtype in found]
            if other := next((i for i, d in enumerate(dtypes) if d != dtypes[0]), None):
                raise DTypeError(
                    f"ranks do not agree on the dtype of {operand}: rank 0 has {dtypes[0]}, rank "
                    f"{other} has {dtypes[other]}"
                )
        shapes = [shape for shape, _dtype in found]
        words, along = PARTS.get(distribution, ("", None))
        fixed = [shape if along is None else shape[1 - along] for shape in shapes]
        if other := next((rank for rank, x in enumerate(fixed) if x != fixed[0]), None):
            takes = "all ranks pass the same"
            if along is not None:
                takes = f"ranks pass {words} of one matrix, all as {('long', 'high')[along]}"
            raise UsageError(
                f"{operand} does not fit together: rank 0 has shape {shapes[0]}, rank {other} "
                f"{shapes[other]}; with distribution={self.distribution!r} {takes}"
            )
        if along is None:
            matrix = len(shapes[0]) == 2  # parts of stacks are found by `DistributedStacks`
            whole = Part(*(Span(0, side) for side in shapes[0])) if matrix else NOTHING
            self.have[operand] = [
                whole if distribution == "replicated" or self.holds(rank) else NOTHING
                for rank in range(self.comm.size)
            ]
            return np.broadcast_to(np.empty((), dtype), shapes[0])
        lengths, (rows, cols) = [shape[along] for shape in shapes], shapes[0]
        edges = [0, *itertools.accumulate(lengths)]
        spans = [Span(*edges[i : i + 2]) for i in range(len(lengths))]
        rows, cols = (edges[-1], cols) if along == 0 else (rows, edges[-1])
        self.have[operand] = [
            Part(s, Span(0, cols)) if along == 0 else Part(Span(0, rows), s) for s in spans
        ]
        return np.broadcast_to(np.empty((), dtype), (rows, cols))

    def spans(self, split: str, grid, problem: Problem):
        """The cuts that the data lies in already, where the plan is free to follow them."""
        if grid is not None or split not in ("auto", self.distribution):
            return None
        m, n, k = (([Span(0, size)]) for size in (problem.m, problem.n, problem.k))
        if self.distribution == "rows":
            return [part.rows for part in self.have["A"]], n, k
        if self.distribution == "cols":
            return m, n, [part.cols for part in self.have["A"]]
        return None

    def stay(self, spans) -> bool:
        """Whether each rank multiplies A and B where they lie, given what `spans` said."""
        return spans is not None or self.distribution == "replicated"

    def here(self, operand: str, want: Sequence[Part]) -> tuple[slice, slice] | None:
        """Where this rank's part of an operand is in its own array, if no rank wants others."""
        have, rank = self.have[operand], self.comm.rank
        stays = have == want or self._distribution_of(operand) == "replicated"
        return want[rank].within(have[rank]) if stays and have[rank] & have[rank] else None

    def brought(self, operand: str, want: Sequence[Part], peers: PeerMemory | None) -> Any:
        """This rank's part of an operand, by `peers` to this rank's GPU. Collective."""
        array, dtype = self.arrays[operand], self.dtypes[operand]
        return self._moved(array, self.have[operand], want, dtype, peers)

    def _moved(
        self, array: Any, have: Sequence[Part], want: Sequence[Part], dtype: np.dtype,
        peers: PeerMemory | None,
    ) -> Any:  # fmt: skip
        moved = peers.move(array, have, want, dtype) if peers else None
        return move(self.comm, array, have, want, dtype) if moved is None else moved

    def wanted(self, problem: Problem) -> list[Part]:
        """What of C each rank's caller gets."""
        size = self.comm.size
        whole = Part(Span(0, problem.m), Span(0, problem.n))
        if self.result != "rows":
            everyone = self.result == "replicated"
            return [whole if everyone or rank == self.root else NOTHING for rank in range(size)]
        if self.distribution == "rows":
            return [Part(part.rows, whole.cols) for part in self.have["A"]]
        return rows_of(problem.m, problem.n, size)

    def held_bytes(
        self, want: Mapping[str, list[Part]], wanted: list[Part], problem: Problem
    ) -> int:
        """The most that a rank's GPU holds where all that it multiplies is brought there, and goes
        from there."""
        cases = [(self.have[x], want[x], self.dtypes[x]) for x in "AB"]
        if problem.beta:
            cases.append((self.have["C"], want["C"], self.dtypes["C"]))
        cases.append((want["C"], wanted, np.dtype(problem.out_dtype)))
        held = [0] * self.comm.size
        for have, then, dtype in cases:
            for rank, parts in enumerate(zip(have, then, strict=True)):
                kept = parts if moves(have, then) else parts[1:]
                held[rank] += sum(math.prod(part.shape) for part in kept) * dtype.itemsize
        return max(held)

    def check_out(self, shape: tuple[int, ...], dtype: str, rows: Span | None = None) -> None:
        """Raises `UsageError` or `DTypeError` for an `out` that does not take what this rank's
        caller gets, which are `rows` of C where all ranks get some."""
        if self.out is None or not self.gets_c(self.comm.rank):
            return
        what = "this product"
        if self.result == "rows":
            what = f"this rank's part of the product, rows {rows},"
        check_out(self.out, shape, dtype, *self.arrays.values(), what=what)

    def returned(
        self, strip: Any, strips: list[Part], wanted: list[Part], problem: Problem, device: Device,
        peers: PeerMemory | None,
    ) -> Any:  # fmt: skip
        """C as the caller wants it: this rank's rows, all of it, or all of it on `root`, from this
        rank's `device` if it lies on one. `peers` move it from GPU to GPU."""
        c = strip
        if strips != wanted:
            c = self._moved(strip, strips, wanted, np.dtype(problem.out_dtype), peers)
        if not self.gets_c(self.comm.rank):
            return None
        out, on_host = self.out, self.xp is np
        if out is None:
            if on_host != is_device_array(c):
                return c
            out = self.empty(c.shape, problem.out_dtype)
        if is_device_array(c) and type(out) is np.ndarray:
            fetch(Operand.of(c, device), out)
        else:
            copy_into(out, c)
        return out
