"""cuBLAS, which our kernels are compared with: CuPy's library, called directly.

CuPy refuses cuBLAS calls while a stream is captured, and a graph of launches is how small
products are timed. The calls keep Python's lock, as `driver`'s do and for its reason.

Each stream has a handle of its own: cuBLAS promises the same bits every time only to a handle
that one stream uses, and a workspace is in use until the product that has it is done.
"""

from __future__ import annotations

import ctypes
import functools
from collections import defaultdict
from collections.abc import Callable, Sequence
from ctypes import c_int, c_int64, c_size_t, c_void_p
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...arrays.strides import layout, leading, stand_in, stored
from ...errors import HybridGemmError
from ...host.notes import note
from ...kernel_choice import compute_modes, library_kernels
from ...kernel_choice.library_kernels import Launched
from ...problem import NARROW, Problem, Scalar
from ..roles import Array
from . import launch_list, library_launches
from .launch_list import LaunchList
from .library_launches import Unrecorded

Start = Callable[[int, int, int], int]  # of the addresses of A, B and C: 0 or cuBLAS's status
WORKSPACE_BYTES = 32 << 20  # what cuBLAS asks for on Hopper
_OPERATION = {"n": 0, "t": 1}
_CONJUGATED = 2
_COMPUTE = {False: 68, True: 77}  # cublasComputeType: float32, float32 through TF32
_COMPUTE_DOUBLE = 70
_ANY_ALGORITHM = -1
_ALLOC_FAILED = 3
# CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION: by default cuBLAS may round the sums of parts of
# k to 16 bits. No TF32 either, unless the environment has it so (`compute_modes.OVERRIDE`).
_MATH_MODE = 16
_OPERATIONS, _MATRIX = (c_void_p, c_int, c_int, *[c_int64] * 3, c_void_p), (c_void_p, c_int64)
_TYPED = (c_void_p, c_int, c_int64)
_STACK = (*_TYPED, c_int64)
_TYPES = {  # cudaDataType
    "float16": 2, "bfloat16": 14, "float32": 0, "float64": 1, "complex64": 4, "complex128": 5,
}  # fmt: skip
_PLAIN = {
    "float32": "cublasSgemm_v2_64", "float64": "cublasDgemm_v2_64",
    "complex64": "cublasCgemm_v2_64", "complex128": "cublasZgemm_v2_64",
}  # fmt: skip
_WIDE = ("float64", "complex128")
_SIGNATURES = {
    "cublasSetStream_v2": (c_void_p, c_void_p),
    "cublasSetWorkspace_v2": (c_void_p, c_void_p, c_size_t),
    **dict.fromkeys(
        _PLAIN.values(), (*_OPERATIONS, *_MATRIX, *_MATRIX, c_void_p, *_MATRIX)
    ),
    "cublasGemmEx_64": (*_OPERATIONS, *_TYPED, *_TYPED, c_void_p, *_TYPED, c_int, c_int),
    "cublasGemmStridedBatchedEx_64": (
        *_OPERATIONS, *_STACK, *_STACK, c_void_p, *_STACK, c_int64, c_int, c_int,
    ),
}  # fmt: skip


@functools.cache
def library(kind: type[ctypes.CDLL] = ctypes.CDLL) -> ctypes.CDLL:
    """CuPy's own cuBLAS; `ctypes.PyDLL` keeps Python's lock during calls."""
    import cupy

    major = cupy.cuda.cublas.getVersion(cupy.cuda.device.get_cublas_handle()) // 10000
    return kind(f"libcublas.so.{major}")  # CuPy has loaded it already


@functools.cache
def _function(name: str) -> Any:
    function = getattr(library(ctypes.PyDLL), name)
    function.argtypes = _SIGNATURES[name]
    return function


def check(status: int, name: str = "a product") -> None:
    """Raises `HybridGemmError` for a status that is not 0."""
    if status == _ALLOC_FAILED:
        raise MemoryError("CUBLAS_STATUS_ALLOC_FAILED")
    if status:
        raise HybridGemmError(f"{name} failed with cuBLAS status {status}")


def _call(name: str, *args: Any) -> None:
    check(_function(name)(*args), name)


_spare: dict[int, list[int]] = defaultdict(list)  # handles without a stream, by GPU


class Handle:
    """What cuBLAS needs for the products of one stream, made on the current GPU; with a `workspace`
    of another's."""

    def __init__(self, stream: int, workspace: Any = None):
        import cupy

        if compute_modes.is_overridden():
            note(
                f"{compute_modes.OVERRIDE} is set: cuBLAS multiplies float32 through TF32; unset "
                'it, or take kernel "own"'
            )
        # A handle is never destroyed: that waits for the GPU, which ends any graph being captured.
        self.spare = _spare[cupy.cuda.runtime.getDevice()]
        try:
            self.value = self.spare.pop()
        except IndexError:
            self.value = cupy.cuda.cublas.create()
        cupy.cuda.cublas.setMathMode(self.value, _MATH_MODE)
        self.workspace = workspace or cupy.cuda.Memory(WORKSPACE_BYTES)
        _call("cublasSetStream_v2", self.value, stream)
        _call("cublasSetWorkspace_v2", self.value, self.workspace.ptr, WORKSPACE_BYTES)

    def __del__(self) -> None:
        if hasattr(self, "value"):
            self.spare.append(self.value)


def bind(
    a: Array, b: Array, c: Array, *, alpha: Scalar, beta: Scalar, tf32: bool = False,
    conjugated: tuple[bool, bool] = (False, False),
) -> LibraryProduct:  # fmt: skip
    """A call that multiplies CuPy matrices laid out as these, in any order: float32 (strict, or
    through TF32), float64, complex64 or complex128, or float16 or bfloat16 with sums in float32 and
    C of their dtype or float32. Complex A or B that are to be `conjugated` have contiguous columns.

    Row-major C is column-major C^T = op(B)^T op(A)^T, so the operands change places.
    """
    (m, n), k = c.shape, a.shape[1]
    (la, lda), (lb, ldb) = (
        ("t", leading(x, "t")) if conj else layout(x) or ("n", 1)
        for x, conj in zip((a, b), conjugated, strict=True)
    )
    ldc = stored(c)[1]
    mixed = tf32 or a.dtype.itemsize == 2
    scalars = np.array([alpha, beta], np.float32 if mixed else c.dtype)
    alpha_at, beta_at = scalars.ctypes.data, scalars.ctypes.data + scalars.itemsize
    op_a, op_b = (
        _CONJUGATED if conj else _OPERATION[order]
        for order, conj in zip((la, lb), conjugated, strict=True)
    )
    name = "cublasGemmEx_64" if mixed else _PLAIN.get(c.dtype.name, "")
    kinds = [_TYPES[x.dtype.name] for x in (b, a, c)] if mixed else (0, 0, 0)
    native = _Native(
        0, 0, n, m, k, ldb, lda, ldc, alpha_at, beta_at, op_b, op_a, mixed, *kinds, _COMPUTE[tf32],
        _ANY_ALGORITHM,
    )  # fmt: skip
    return LibraryProduct(name, native, scalars)


class _Native(ctypes.Structure):
    """What `launch_list.cpp` takes of a product; call and handle are set for each stream."""

    _fields_ = [
        ("call", c_void_p), ("handle", c_void_p),
        *((name, c_int64) for name in ("n", "m", "k", "ldb", "lda", "ldc")),
        ("alpha", c_void_p), ("beta", c_void_p),
        *((name, ctypes.c_int32) for name in ("op_b", "op_a", "typed", "type_b", "type_a", "type_c",
                                              "compute", "algorithm")),
        *((name, c_int64) for name in ("count", "step_b", "step_a", "step_c")),
        ("starts", c_void_p), ("start_count", c_int64),
    ]  # fmt: skip


@dataclass(frozen=True)
class LibraryProduct:
    """A product that is worked out: which function of cuBLAS makes it, with what."""

    function: str
    native: _Native
    scalars: np.ndarray  # that are read at each call: alpha and beta
    starts: np.ndarray | None = None  # bytes from A, B and C to the first ones of each stack

    def __call__(self, a: Array, b: Array, c: Array, stream: Any) -> None:
        check(self.on_stream(stream)(a.data.ptr, b.data.ptr, c.data.ptr))

    def on_stream(self, stream: Any) -> Start:
        """What starts it on a stream, as `start_library_product` in launch_list.cpp does."""
        p, function = self.native, _function(self.function)
        head = stream.prepare_cublas().value, p.op_b, p.op_a, p.n, p.m, p.k, p.alpha
        ldb, lda, ldc, beta, how = p.ldb, p.lda, p.ldc, p.beta, (p.compute, p.algorithm)
        if not p.typed:
            return lambda x, y, z: function(*head, y, ldb, x, lda, beta, z, ldc)
        kind_b, kind_a, kind_c = p.type_b, p.type_a, p.type_c
        if self.starts is None:
            return lambda x, y, z: function(
                *head, y, kind_b, ldb, x, kind_a, lda, beta, z, kind_c, ldc, *how
            )
        starts = self.starts.tolist()

        def start(x: int, y: int, z: int) -> int:
            for at_a, at_b, at_c in starts:
                if status := function(
                    *head, y + at_b, kind_b, ldb, p.step_b, x + at_a, kind_a, lda, p.step_a, beta,
                    z + at_c, kind_c, ldc, p.step_c, p.count, *how,
                ):  # fmt: skip
                    return int(status)
            return 0

        return start


class Prepared:
    """A product on one stream, which asks cuBLAS each time; see `roles.Prepared`. `why` it is
    not recorded."""

    def __init__(self, product: LibraryProduct, stream: Any, why: str | None = None) -> None:
        self.why = why
        handle = stream.prepare_cublas()
        self.kept: tuple = product, handle
        self.start: Start
        self.native: tuple[int, int] | None = None
        if launch_list.unavailable():
            self.start = product.on_stream(stream)
            return
        mine = _Native.from_buffer_copy(product.native)
        mine.call = ctypes.cast(_function(product.function), c_void_p).value
        mine.handle = handle.value
        self.kept = product, handle, mine
        name, at = "start_library_product", ctypes.addressof(mine)
        self.start = functools.partial(launch_list.native(name), at)
        self.native = launch_list.address_of(name), at

    def check(self, status: int) -> None:
        check(status)


def recorded(
    product: LibraryProduct, addresses: Sequence[int], stream: Any, aside: Any
) -> LaunchList:
    """What cuBLAS launches for a product on a stream, recorded on another that one thread uses, as
    a list that starts it without cuBLAS. Raises `Unrecorded` where that cannot be."""
    workspace = stream.prepare_cublas().workspace
    # The stream's own handle may have products of other threads to start meanwhile.
    own, aside.cublas = aside.cublas, Handle(aside.cupy.ptr, workspace)
    start = product.on_stream(aside)

    def call(*at: int) -> None:
        check(start(*at))

    try:
        noted = library_launches.recorded(call, addresses, aside.cupy.ptr)
    except HybridGemmError as error:
        raise Unrecorded(str(error)) from error
    finally:
        aside.cublas = own  # whose workspace, freed, would wait for the GPU
    return LaunchList(noted, stream.cupy.ptr, (), kept=(product, workspace))


def launched(problem: Problem, orders: str, aside: Any) -> Launched | None:
    """What cuBLAS would launch for a problem of operands in these storage orders, recorded on a
    stream that one thread uses; None where that cannot be told, or the GPU has no memory for a
    workspace."""
    p = problem
    product = bind(
        stand_in(p.m, p.k, p.operands, orders[0]), stand_in(p.k, p.n, p.operands, orders[1]),
        stand_in(p.m, p.n, p.out_dtype if p.operands in NARROW else p.dtype, "n"),
        alpha=1, beta=0, tf32=p.compute == "tf32",
    )  # fmt: skip
    try:
        at = aside.prepare_cublas().workspace.ptr  # nothing is read or written
        start = product.on_stream(aside)

        def call(*addresses: int) -> None:
            check(start(*addresses))

        places = at, at + WORKSPACE_BYTES // 4, at + WORKSPACE_BYTES // 2
        return library_kernels.read(library_launches.named(call, places, aside.cupy.ptr))
    except (HybridGemmError, Unrecorded, MemoryError, RuntimeError):  # CUDA's are RuntimeErrors
        return None


def bind_stack(
    a: Array, b: Array, c: Array, count: int, steps: Sequence[int], *, tf32: bool = False,
    starts: Sequence[Sequence[int]] = ((0, 0, 0),),
) -> LibraryProduct:  # fmt: skip
    """A product that multiplies `count` pairs of CuPy matrices by one launch: C = A B, all of one
    dtype, real or complex, C with contiguous rows. The first of them lie as these; `steps` are the
    bytes from one A, B and C to the next. There is a launch for each of `starts`, the bytes from
    these A, B and C to the first ones of a stack. `tf32` is for float32."""
    (m, n), k, size = c.shape, a.shape[1], c.itemsize
    (la, lda), (lb, ldb) = layout(a) or ("n", 1), layout(b) or ("n", 1)
    wide = c.dtype.name in _WIDE
    scalars = np.array([1, 0], np.float32 if c.dtype.itemsize == 2 else c.dtype)
    one, zero = scalars.ctypes.data, scalars.ctypes.data + scalars.itemsize
    kind, compute = _TYPES[c.dtype.name], _COMPUTE_DOUBLE if wide else _COMPUTE[tf32]
    (step_a, step_b, step_c), ldc = (step // size for step in steps), stored(c)[1]
    table = np.array(starts, np.int64)
    native = _Native(
        0, 0, n, m, k, ldb, lda, ldc, one, zero, _OPERATION[lb], _OPERATION[la], 1, kind, kind,
        kind, compute, _ANY_ALGORITHM, count, step_b, step_a, step_c, table.ctypes.data, len(table),
    )  # fmt: skip
    return LibraryProduct("cublasGemmStridedBatchedEx_64", native, scalars, table)
