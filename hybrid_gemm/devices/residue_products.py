"""Float64 products by residues on tensor cores (`compute="fp64x"`), over any device that runs
kernels: rows and columns become integers, these residues of int8, and the products of residues C.

The device looks at the data and decides how many moduli are accurate enough
(`kernels/residues_decide.cu`); the host waits for that, since where none are it starts the
device's own float64 product instead. docs/fp64x.md has the arithmetic.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any

import numpy as np

from .. import catalog
from ..arrays.strides import stored
from ..catalog import Variant
from ..errors import UsageError
from ..kernel_choice import residues
from ..planning.plan import RESIDUE_COLUMNS, RESIDUE_STEP
from ..problem import Problem
from . import moduli
from .base import Array, Device, Stream
from .kernel_launcher import KernelLauncher
from .packed_product import Operation, PackedProduct, room_of, unwritten
from .roles import BoundProduct

# Products so far on each device, by the number of moduli; 0 stands for native ones.
_taken: weakref.WeakKeyDictionary[Device, np.ndarray] = weakref.WeakKeyDictionary()
_tables: weakref.WeakKeyDictionary[Device, list[Array]] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def forget(device: Device) -> None:
    """Gives back what is kept for a device."""
    _tables.pop(device, None)


def taken(device: Device) -> np.ndarray:
    """How many products by residues a device made so far, by the number of moduli (0: natively)."""
    with _lock:
        return _taken.get(device.unwrapped, np.zeros(moduli.MOST + 1, int)).copy()


def _note(device: Device, count: int) -> None:
    with _lock:
        _taken.setdefault(device.unwrapped, np.zeros(moduli.MOST + 1, int))[count] += 1


def bind(
    device: KernelLauncher, variant: Variant, a: Array, b: Array, c: Array, *,
    alpha: float, beta: float,
) -> BoundProduct:  # fmt: skip
    """A call that multiplies matrices laid out as these; see `KernelLauncher.bind`.

    All are float64; `UsageError` otherwise. `variant` is of a kernel with role `residues`; its
    MODULI are the most that are taken. The call waits for its stream until it is known how many
    moduli are; `UsageError` where the stream is being captured.
    """
    if not all(x.dtype == np.float64 for x in (a, b, c)):
        raise UsageError(
            f"compute fp64x multiplies float64; these are {a.dtype}, {b.dtype} and {c.dtype}"
        )
    (m, n), k = c.shape, a.shape[1]
    layouts = stored(a)[0] + stored(b)[0]
    strict = residues.native(
        device.machine("float64"), Problem(m, n, k, "float64"), layouts, ask=device.library_launch
    )
    native = device.bind(strict, a, b, c, alpha=alpha, beta=beta)
    if not k or alpha == 0 or residues.too_large(m, k):
        return native
    return ResidueProduct(device, variant, Operation.like(a, b, c, alpha, beta), native).call


def prepare(device: KernelLauncher, variant: Variant, a: Array, b: Array) -> None:
    """Compiles what a product of such operands needs."""
    (m, k), n = a.shape, b.shape[1]
    if m and n and k:
        x, y = unwritten(a, "float64"), unwritten(b, "float64")
        bind(device, variant, x, y, np.empty((m, n)), alpha=1, beta=0)


class ResidueProduct(PackedProduct):
    """A product that is worked out: its kernels, launches and sizes."""

    def __init__(
        self, device: KernelLauncher, variant: Variant, operation: Operation, native: BoundProduct
    ):
        most = variant.kernel.variant({**variant.params, "MODULI": moduli.MOST})
        super().__init__(device, most, operation)
        self.native, self.most = native, variant.params["MODULI"]
        self.ldc = np.int64(stored(operation.c)[1])
        self.alpha, self.beta = np.float64(operation.alpha), np.float64(operation.beta)
        self.pitch = -(-self.k // RESIDUE_STEP) * RESIDUE_STEP
        self.columns = -(-self.n // RESIDUE_COLUMNS) * RESIDUE_COLUMNS
        self.passes = {
            what: self._pass(f"residues_{what}")
            for what in ("largest", "spread", "decide", "pack", "combine")
        }
        self.function = device.function(self.variant, "int8", "nt")
        self.launch = self.variant.launch(self.m, self.n, self.pitch, "int8")

    def _pass(self, role: str) -> tuple[Any, Any]:
        variant = catalog.helper(role)
        layouts = "nn" if role in ("residues_decide", "residues_combine") else self.layouts
        function = self.device.function(variant, "float64", layouts)
        return function, variant.launch(self.m, self.n, self.k, "float64")

    def _start(self, what: str, args: list[Any], stream: Stream) -> None:
        function, launch = self.passes[what]
        self.device.launch(function, launch, args, stream)

    def call(self, a: Array, b: Array, c: Array, stream: Stream) -> None:
        """Multiplies matrices laid out as those that this was made for."""
        if stream.capturing():
            raise UsageError(
                "compute fp64x looks at the data first and waits for what it finds, and this "
                "stream is being captured: leave compute out there"
            )
        count, bits_a, bits_b, norms = self._decide(a, b, stream)
        if count:
            packed = self._pack(a, b, norms, (count, bits_a, bits_b), stream)
            made = self._multiply(*packed, count, stream)
            self._combine(made, norms, (count, bits_a, bits_b), c, stream)
        else:
            self.native(a, b, c, stream)
        _note(self.device, count)

    def _decide(self, a: Array, b: Array, stream: Stream) -> tuple[int, int, int, Array]:
        """How many moduli the data takes, the bounds of norms, and the norms themselves."""
        room, rows = room_of(self.device, stream), self.m + self.n
        partials = self.passes["largest"][1].grid[1]
        partial = room.array("partial", rows * partials, "uint64")
        spread = room.array("spread", rows * 10, "uint64")
        largest = room.array("largest", rows, "uint64")
        norms, decision = room.array("norms", rows, "int32"), room.array("decision", 3, "int32")
        matrices = self.matrices(a, b)
        self._start("largest", [*matrices, partial, spread], stream)
        self._start("spread", [*matrices, partial, np.int32(partials), largest, spread], stream)
        _moduli, _wholes, budgets = self._tables()
        limits = np.int32(moduli.LEAST), np.int32(self.most)
        args = [*self.sizes, largest, spread, norms, budgets, *limits, decision]
        self._start("decide", args, stream)
        host = np.zeros((1, 3), np.int32)
        self.device.copy(host, decision[None], stream)
        stream.synchronize()
        count, bits_a, bits_b = map(int, host[0])
        return count, bits_a, bits_b, norms

    def _pack(
        self, a: Array, b: Array, norms: Array, decision: tuple[int, int, int], stream: Stream
    ) -> tuple[Array, Array]:
        """The residues of A and B: for each row or column those of one modulus after the other."""
        wide = decision[0] * self.pitch
        packed_a, packed_b = (
            self._room(name, rows * self.pitch, decision[0], stream).reshape(rows, wide)
            for name, rows in (("A", self.m), ("B", self.columns))
        )
        args = [
            *self.matrices(a, b), packed_a, packed_b, norms, *map(np.int32, decision),
            self._tables()[0],
        ]  # fmt: skip
        self._start("pack", args, stream)
        return packed_a, packed_b

    def _multiply(self, a: Array, b: Array, count: int, stream: Stream) -> Array:
        """The residues of the product, a plane for each modulus."""
        made = self._room("R", self.m * self.columns, count, stream)
        operands, launch = [a, b], self.launch.cut(count).resident(self.device.processors)
        if self.variant.kernel.tma:
            from .cuda import tensor_maps

            operands = [
                tensor_maps.map_of("int8", x[None], self.variant.box(name, "int8", along_k=True))
                for name, x in zip("AB", (a, b), strict=True)
            ]
        args = [
            *operands, *self.sizes[:2], np.int32(self.pitch // RESIDUE_STEP), made,
            np.int64(self.columns), np.int32(count), self._tables()[0],
        ]  # fmt: skip
        self.device.launch(self.function, launch, args, stream)
        return made

    def _room(self, name: str, each: int, count: int, stream: Stream) -> Array:
        """Memory for so many residues modulo each of `count` moduli, taken for the most that there
        may be: the next product's data may want more."""
        kept = room_of(self.device, stream).array(name, each * self.most, "int8")
        return kept[: each * count]

    def _combine(
        self, made: Array, norms: Array, decision: tuple[int, int, int], c: Array, stream: Stream
    ) -> None:
        table, wholes, _budgets = self._tables()
        args = [
            *self.sizes[:2], self.alpha, made, np.int64(self.columns), norms,
            *map(np.int32, decision), self.beta, c, self.ldc, table, wholes,
        ]  # fmt: skip
        self._start("combine", args, stream)

    def _tables(self) -> list[Array]:
        """What the kernels know of moduli, on the device: `moduli.table`, `wholes`, `budgets`."""
        with _lock:
            if self.device not in _tables:
                _tables[self.device] = [
                    _there(self.device, x)
                    for x in (
                        moduli.table().reshape(-1).view(np.uint8), moduli.wholes().reshape(-1),
                        moduli.budgets(),
                    )
                ]  # fmt: skip
            return _tables[self.device]


def _there(device: KernelLauncher, host: np.ndarray) -> Array:
    """A vector copied into memory of the device that is kept."""
    made = device.empty(1, host.size, host.dtype.name)
    stream = device.allocation_stream
    with device.using(stream):
        device.copy(made, np.ascontiguousarray(host[None]), stream)
        stream.synchronize()
    return made[0]
