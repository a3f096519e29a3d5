"""Products on tensor cores over any kernel device: pack the operands, decide, multiply.

The kernel that multiplies (role `tensor`) says by its TERMS what is multiplied. float32 operands
are packed first: with TERMS = 3 each is split in two, and which split, or strict fp32 where
neither holds, is decided on the device (`kernels/split_pack.cu`): the products of all three are
launched, and two of them return at once. Operands of 16 bits are multiplied as they are.
docs/tensor-cores.md has the arithmetic.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from .. import catalog
from ..arrays.strides import layout
from ..catalog import Variant
from ..errors import UsageError
from ..problem import NARROW, Problem
from .base import Stream

if TYPE_CHECKING:
    from .kernel_device import KernelDevice

STRICT = 2  # of tensor.VERDICTS, which the kernels count from 0
_STEP = 64  # packed rows are whole multiples of it, in elements
_rooms: weakref.WeakKeyDictionary[Stream, _Room] = weakref.WeakKeyDictionary()


class _Room:
    """What products on one stream keep on the device between calls.

    A larger buffer never replaces a smaller one, with which a recorded graph may still launch.
    """

    def __init__(self, device: KernelDevice):
        self._device = weakref.ref(device)  # which has the stream that this is kept for
        self.state = device.empty(1, 6, "int32")  # the kernels' State
        self.state[...] = 0
        self._kept: dict[tuple[str, str], list] = {}

    @property
    def device(self) -> KernelDevice:
        return self._device()

    def array(self, name: str, count: int, dtype: str):
        """`count` elements, flat."""
        kept = self._kept.setdefault((name, dtype), [])
        for flat in kept:
            if flat.size >= count:
                return flat[:count]
        kept.append(self.device.empty(1, max(1, count), dtype)[0])
        return kept[-1][:count]


def _room(device: KernelDevice, stream: Stream) -> _Room:
    if stream not in _rooms:
        _rooms[stream] = _Room(device)
    return _rooms[stream]


def verdicts(device: KernelDevice, problem: Problem) -> np.ndarray:
    """How many split products on a device came to each verdict so far; waits for them.
    Zeros, at once, if products of this problem are not split."""
    total = np.zeros(3, int)
    if problem.compute != "fp32x3":
        return total
    for stream, room in list(_rooms.items()):
        if room.device is getattr(device, "device", device):  # where Strassen's is over it
            host = np.zeros((1, 6), np.int32)
            with room.device.using(stream):
                room.device.copy(host, room.state, stream)
                stream.synchronize()
            total += host[0, 1:4]
    return total


def prepare(device: KernelDevice, variant: Variant, a, b, dtype: str) -> None:
    """Compiles what a product of such operands needs, brought to the device in `dtype`."""
    shapes = [(x.shape, (layout(x) or "n")[0]) for x in (a, b)]
    a, b = (np.empty(s, dtype) if o == "n" else np.empty(s[::-1], dtype).T for s, o in shapes)
    if a.shape[1] and a.shape[0] and b.shape[1]:
        outs = {"float32", dtype if dtype in NARROW else "float32"}
        for out in outs:  # made, never written
            bind(device, variant, a, b, np.empty((a.shape[0], b.shape[1]), out), alpha=1, beta=0)


def bind(device: KernelDevice, variant: Variant, a, b, c, *, alpha, beta) -> Callable:
    """A call that multiplies matrices laid out as these; see `KernelDevice.bind`.

    `a` and `b` are float32, or both float16 or bfloat16; `c` is float32, or of their dtype.
    """
    dtype = a.dtype.name
    if b.dtype != a.dtype or dtype not in ("float32", *NARROW):
        raise UsageError(
            f"kernel {variant.name} multiplies float32, or float16 or bfloat16 alike; "
            f"these are {dtype} and {b.dtype}"
        )
    if c.dtype.name not in ("float32", dtype):
        raise UsageError(f"kernel {variant.name} makes {dtype} or float32, not {c.dtype}")
    if not a.shape[1] or alpha == 0:
        return _scaled(device, c, beta)
    make = _split if dtype == "float32" and variant.params["TERMS"] == 3 else _rounded
    return make(device, variant, a, b, c, alpha, beta)


def _scaled(device, c, beta) -> Callable:
    """C = beta C, by a kernel that multiplies no k, or in narrow numbers by the arrays' own."""

    def narrow(a, b, c, stream):
        c[...] = 0 if beta == 0 else (c.astype(np.float32) * np.float32(beta)).astype(c.dtype)

    if c.dtype != np.float32:
        return narrow
    nothing = device.empty(c.shape[0], 0, "float32"), device.empty(0, c.shape[1], "float32")
    plain = device.bind(
        catalog.get("double_buffered").variant(), *nothing, c, alpha=0, beta=beta
    )  # fmt: skip
    return lambda a, b, c, stream: plain(*nothing, c, stream)


class _Packer:
    """Launches of the packing kernels for operands laid out as these."""

    def __init__(self, device: KernelDevice, a, b):
        self.device = device
        (self.m, self.k), self.n = a.shape, b.shape[1]
        (order_a, lda), (order_b, ldb) = layout(a), layout(b)
        self.layouts = order_a + order_b
        self.sizes = [np.int32(x) for x in (self.m, self.n, self.k)]
        self.ld = np.int64(lda), np.int64(ldb)
        self.pitch = -(-self.k // _STEP) * _STEP

    def kernel(self, role: str, dtype: str, rows=None, **params) -> tuple:
        """The kernel and its launch, for so many rows of A and columns of B, or for all."""
        variant = catalog.helper(role)
        variant = variant.kernel.variant({**variant.params, **params})
        function = self.device.function(variant, dtype, self.layouts)
        return function, variant.launch(*(rows or (self.m, self.n)), self.k, dtype)

    def parts(self, room: _Room, count: int, size: int, rows=None) -> list:
        """Memory for both operands, (count, rows, pitch) elements of `size` bytes each."""
        out = []
        for name, each in zip("AB", rows or (self.m, self.n), strict=True):
            flat = room.array(name, count * each * self.pitch * size, "uint8")
            out.append(flat.view(f"u{size}").reshape(count, each, self.pitch))
        return out

    def args(self, a, b, sizes=None) -> list:
        return [*(sizes or self.sizes), a, self.ld[0], b, self.ld[1]]


def _split(device, variant, a, b, c, alpha, beta) -> Callable:
    packer = _Packer(device, a, b)
    extremes, grid = packer.kernel("extremes", "float32")
    partials = grid.grid[1]
    packs = [packer.kernel("pack", dtype, PARTS=2) for dtype in ("float16", "tfloat32")]
    rows = packer.m + packer.n
    products = [
        _product(device, variant, dtype, packer, 2, c, alpha, beta)
        for dtype in ("float16", "tfloat32")
    ]
    strict = catalog.helper("strict")
    function = device.function(strict, "float32", packer.layouts)
    pieces = strict.launches(packer.m, packer.n, packer.k, "float32")
    alpha, beta, ldc = np.float32(alpha), np.float32(beta), np.int64(layout(c)[1])

    def call(a, b, c, stream):
        room = _room(device, stream)
        partial = room.array("partial", rows * partials, "uint64")
        whole, tally = (room.array(x, rows, "uint64") for x in ("extremes", "tally"))
        exponent, verdict = room.array("exponent", rows, "int32"), room.state
        matrices = packer.args(a, b)
        device.launch(extremes, grid, [*matrices, partial, tally], stream)
        # The larger first: both share it, for one verdict wants one of them.
        parts = [packer.parts(room, 2, size) for size in (4, 2)][::-1]
        for (pack, launch), made in zip(packs, parts, strict=True):
            given = [*made, exponent, partial, np.int32(partials), whole, tally, verdict]
            device.launch(pack, launch, [*matrices, *given], stream)
        exponents = exponent[: packer.m], exponent[packer.m :]
        for wanted, (product, made) in enumerate(zip(products, parts, strict=True)):
            product(*made, c, stream, exponents, verdict, wanted)
        for r, s, launch in pieces:
            x, y, z = a[r], b[:, s], c[r, s]
            args = [np.int32(z.shape[0]), np.int32(z.shape[1]), packer.sizes[2], alpha,
                    x, packer.ld[0], y, packer.ld[1], beta, z, ldc,
                    verdict, np.int32(STRICT)]  # fmt: skip
            device.launch(function, launch, args, stream)

    return call


def _rounded(device, variant, a, b, c, alpha, beta) -> Callable:
    """float32 rounded to TF32, or 16 bits as they are, packed only where they must be."""
    packer = _Packer(device, a, b)
    size = a.dtype.itemsize
    bound = functools.partial(_packing, device, variant, a, b, c, alpha, beta, packer)
    all_packed = bound((True, True))
    if variant.name != "wgmma":
        return all_packed
    # The copy engine takes operands where they lie, if every line begins on 16 bytes; of two
    # that lie across k in 32 bits, wgmma takes one.
    packed = [ld * size % 16 != 0 for ld in packer.ld]
    if size == 4 and packer.layouts == "tn" and not any(packed):
        packed[packer.m > packer.n] = True
    if all(packed):
        return all_packed
    straight = bound(packed)

    def call(a, b, c, stream):
        begin = [done or x.data.ptr % 16 == 0 for x, done in zip((a, b), packed, strict=True)]
        (straight if all(begin) else all_packed)(a, b, c, stream)

    return call


def _packing(device, variant, a, b, c, alpha, beta, packer, packed) -> Callable:
    """The product where those of A and B are packed that `packed` says."""
    dtype = {"float32": "tfloat32"}.get(a.dtype.name, a.dtype.name)
    rows = [count if x else 0 for count, x in zip((packer.m, packer.n), packed, strict=True)]
    orders = "".join(
        along if x else order for along, order, x in zip("nt", packer.layouts, packed, strict=True)
    )
    if any(packed):
        of = "float16" if a.dtype.itemsize == 2 else dtype
        pack, launch = packer.kernel("pack", of, rows, PARTS=1)

    def stored(a, b, made):
        return [
            parts if x else (v.T if order == "t" else v)[None]
            for v, parts, order, x in zip((a, b), made, packer.layouts, packed, strict=True)
        ]

    shapes = [np.broadcast_to(np.uint8(), (1, count, packer.pitch)) for count in rows]
    views = stored(a, b, shapes)
    product = _product(device, variant, dtype, packer, 1, c, alpha, beta, orders, views)

    def call(a, b, c, stream):
        room, made = _room(device, stream), (None, None)
        if any(packed):
            made = packer.parts(room, 1, a.dtype.itemsize, rows)
            none, state = room.array("extremes", 1, "uint64"), room.state  # not looked at
            sizes = *map(np.int32, rows), packer.sizes[2]
            args = [*packer.args(a, b, sizes), *made, state, none, np.int32(0), none, none, state]
            device.launch(pack, launch, args, stream)
        product(*stored(a, b, made), c, stream)

    return call


def _product(
    device, variant, dtype, packer, parts, c, alpha, beta, orders="nt", views=None
) -> Callable:
    """A call (a, b, c, stream, exponents, verdict, wanted) for operands laid out as `views`, or
    packed: C = alpha 2^exponents A B + beta C, if the verdict is the wanted one."""
    terms, out_bytes = 2 * parts - 1, c.dtype.itemsize
    variant = variant.kernel.variant({**variant.params, "TERMS": terms, "OUT": out_bytes})
    if variant.name != "wgmma":
        return _bind_mma(device, variant, dtype, packer, c, alpha, beta)
    from .cuda import tensor_maps

    if views is None:
        rows = packer.m, packer.n
        views = [np.broadcast_to(np.uint8(), (parts, count, packer.pitch)) for count in rows]
    given = {"k": packer.k, "layouts": orders, "alpha": alpha, "beta": beta}
    if dtype == "tfloat32" and parts == 1 and orders in catalog.helper("across").kernel.layouts:
        return tensor_maps.bind_across(device, variant, *views, c, **given)
    return tensor_maps.bind_tensor(device, variant, dtype, *views, c, **given)


def _bind_mma(device, variant, dtype, packer, c, alpha, beta) -> Callable:
    """The twin of `tensor_maps.bind_tensor` for kernels that take plain pointers to packed operands."""
    if reason := variant.refusal(
        device=device.kind, dtype=dtype, m=packer.m, n=packer.n, k=packer.k
    ):
        raise UsageError(reason)
    function = device.function(variant, dtype, "nt")
    launch = variant.launch(packer.m, packer.n, packer.k, dtype)
    pitch, ldc = np.int64(packer.pitch), np.int64(layout(c)[1])
    sizes = [*packer.sizes[:2], np.int32(packer.pitch)]
    alpha, beta = np.float32(alpha), np.float32(beta)

    def call(a, b, c, stream, exponents=None, verdict=None, wanted=-1):
        if verdict is None:  # never looked at
            verdict = _room(device, stream).state
            exponents = verdict, verdict
        args = [a, pitch, b, pitch, *sizes, alpha, *exponents, beta, c, ldc,
                verdict, np.int32(wanted)]  # fmt: skip
        device.launch(function, launch, args, stream)

    return call
