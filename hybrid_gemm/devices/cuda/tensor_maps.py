"""Tensor maps, and launches of the kernels on tensor cores that read and write through them (TMA).

A tensor map tells the GPU's copy engine (TMA) where a matrix lies and in which boxes it is copied.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import numpy as np

from ... import catalog
from ...catalog import ITEM_SIZE, Kernel, Variant
from ...errors import UnavailableError, UsageError
from ..base import Array, Stream
from ..kernel_launcher import KernelLauncher
from ..shares import Shares

MAX_MAPS = 4096  # tensor maps kept
_MAP = np.dtype([("words", np.uint64, 16)])  # passed to kernels by value


class TensorMap(np.ndarray):
    """The 128 bytes of a tensor map, as an array of one element; `address` is where the matrix that
    it describes begins."""

    address: int


@functools.lru_cache(maxsize=MAX_MAPS)
def tensor_map(
    dtype: str, address: int, shape: tuple[int, int, int], pitches: tuple[int, int],
    box: tuple[int, int, int],
) -> TensorMap:  # fmt: skip
    """The tensor map (128 bytes) of elements (x, y, z) at `address`.

    `shape` counts elements along x, which is contiguous, y and z; `pitches` are the bytes from
    one y and one z to the next. A copy moves `box` elements, in rows of 64 or 128 bytes, swizzled
    by that much. What lies outside `shape` is read as zeros and never written. tfloat32 is float32,
    rounded to the nearest TF32 on the way. Raises `UsageError` where the address or a pitch is
    not a multiple of 16 bytes, and `UnavailableError` where the driver makes no such map.
    """
    if address % 16 or any(pitch % 16 for pitch in pitches):
        raise UsageError(
            f"tensor maps need addresses and pitches in multiples of 16 bytes; "
            f"found {address:#x} and {pitches}"
        )
    from cuda.bindings import driver

    types = driver.CUtensorMapDataType
    span = box[0] * ITEM_SIZE[dtype]
    swizzle = driver.CUtensorMapSwizzle
    status, made = driver.cuTensorMapEncodeTiled(
        {
            "float16": types.CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
            "bfloat16": types.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
            "tfloat32": types.CU_TENSOR_MAP_DATA_TYPE_TFLOAT32,
            "int8": types.CU_TENSOR_MAP_DATA_TYPE_UINT8,
        }[dtype],
        3,
        address,
        [driver.cuuint64_t(x) for x in shape],
        [driver.cuuint64_t(x) for x in pitches],
        [driver.cuuint32_t(x) for x in box],
        [driver.cuuint32_t(1)] * 3,
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        {
            64: swizzle.CU_TENSOR_MAP_SWIZZLE_64B,
            128: swizzle.CU_TENSOR_MAP_SWIZZLE_128B,
        }[span],
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    if status != driver.CUresult.CUDA_SUCCESS:
        raise UnavailableError(f"cuTensorMapEncodeTiled({dtype}, {shape}, {pitches}): {status}")
    words = np.array([int(word) for word in made.opaque], np.uint64).view(_MAP).view(TensorMap)
    words.address = address
    return words


def map_of(dtype: str, stored: Array, box: tuple[int, int]) -> np.ndarray:
    """The map of an operand stored (parts, rows, k), or (parts, k, rows), in row-major order,
    with the header's box for one that lies so."""
    parts, height, width = stored.shape
    if not stored.size:  # k is 0: never read, and the engine describes nothing empty
        return np.zeros(1, _MAP)
    # An extent of 1 leaves its stride without a meaning.
    pitch = stored.strides[1] if height > 1 else -(-width * stored.itemsize // 16) * 16
    plane = stored.strides[0] if parts > 1 else pitch * height
    return tensor_map(dtype, stored.data.ptr, (width, height, parts), (pitch, plane), (*box, 1))


def _map_of_c(dtype: str, c: Array, pitch: int, box: tuple[int, int]) -> TensorMap | None:
    """The map of a C of 16 bits; None where its rows do not begin or end on 16 bytes, which the
    kernel decides likewise."""
    m, n = c.shape
    if (c.data.ptr | pitch | 2 * n) % 16:
        return None
    return tensor_map(dtype, c.data.ptr, (n, m, 1), (pitch, pitch * m), (*box, 1))


# Many parameters: a product has so many, as in BLAS.
def bind_tensor(
    device: KernelLauncher, variant: Variant, dtype: str, a: Array, b: Array, c: Array, *,
    k: int, layouts: str = "nt", alpha: float = 1.0, beta: float = 0.0,
) -> Callable[..., None]:  # fmt: skip
    """A call that multiplies packed operands on tensor cores: C = alpha A B + beta C, with arrays
    laid out as these (`packed_product.Multiply`).

    `device` is a `CudaDevice`, `variant` one of a kernel with role `tensor`, `dtype` what the
    operands hold: float16, bfloat16 or tfloat32 (float32, rounded as it is read). `a` and `b` are
    3-D CuPy arrays whose last axis is contiguous; only their bytes and strides count. By
    `layouts` A is stored (parts, m, k) for "n" or (parts, k, m) for "t"; B (parts, n, k) for "t"
    or (parts, k, n) for "n"; tfloat32 takes "nt" alone. Parts are 2 (hi, lo) where the variant's
    TERMS is 3, else 1. Their k may be longer than `k` if what is beyond is zero. Addresses and
    pitches are multiples of 16 bytes. `c` is m x n, row-major with any leading dimension,
    float32 where the variant's OUT is 4, else of `dtype`. The k of each tile is cut where the
    variant's SHARES is above 1 and that should be faster.
    """
    m, n = c.shape
    _check_shapes(variant, a, b, (m, n, k), layouts)
    shares = Shares(device, variant, dtype, c, (m, n, k), alpha=alpha, beta=beta)
    variant, shares.launch = shares.variant, shares.launch.resident(device.processors)
    function = device.function(variant, dtype, layouts)
    boxes = [
        variant.box(operand, dtype, along_k=order == along)
        for operand, order, along in zip("AB", layouts, "nt", strict=True)
    ]
    box_of_c, pitch = variant.box_of_c(dtype), c.strides[0]
    sizes, ldc = [np.int32(x) for x in (m, n, k)], np.int64(pitch // c.itemsize)
    null = np.uint64(0)

    def call(
        a: Array, b: Array, c: Array, stream: Stream,
        exponents: Sequence[Array | None] = (None, None), verdict: Array = None, wanted: int = 0,
    ) -> None:  # fmt: skip
        if not c.size:
            return
        maps = [map_of(dtype, x, box) for x, box in zip((a, b), boxes, strict=True)]
        if box_of_c:
            of_c = _map_of_c(dtype, c, pitch, box_of_c)
            maps.append(maps[0] if of_c is None else of_c)  # which the kernel does not look at
        behind = null if verdict is None else verdict, np.int32(wanted)
        # Sums of shares are scaled when they are added up.
        scales = [null if e is None or not shares.uncut else e for e in exponents]
        shares.start(
            function, [*maps, *sizes], c, ldc, stream, scales=scales, decided=behind,
            exponents=exponents, verdict=verdict, wanted=wanted,
        )  # fmt: skip

    return call


def _check_shapes(
    variant: Variant, a: Array, b: Array, sides: tuple[int, int, int], layouts: str
) -> None:
    """Raises `UsageError` if A or B, stored in these layouts, is not the operand of a product of
    m, n and k = `sides` in the parts that the variant takes."""
    (m, n, k), parts = sides, (variant.params["TERMS"] + 1) // 2
    for name, x, side, along_k in (
        ("A", a, m, layouts[0] == "n"), ("B", b, n, layouts[1] == "t")
    ):  # fmt: skip
        along, across = (2, 1) if along_k else (1, 2)
        if x.shape[0] != parts or x.shape[across] != side or x.shape[along] < k:
            raise UsageError(
                f"kernel {variant}: operand {name} is {x.shape}, layouts {layouts}; it takes "
                f"{parts} parts for m={m} n={n} k={k}"
            )


def _alike(kernel: Kernel, other: Variant, turned: bool) -> Variant:
    """The listed variant with another's tile, cluster and SHARES, or the first, with these SHARES.
    `turned` says that the kernel makes C^T: there the turned tile is preferred."""
    sides = [other.tile[::-1], other.tile] if turned else [other.tile]
    listed = kernel.variants()
    alike = [
        v
        for tile in sides
        for v in listed
        if (v.tile, v.cluster, v.most_shares) == (tile, other.cluster, other.most_shares)
    ]
    found = (alike or listed)[0]
    return kernel.variant({**found.params, "SHARES": other.most_shares})


# Many parameters: a product has so many, as in BLAS.
def bind_across(
    device: KernelLauncher, variant: Variant, a: Array, b: Array, c: Array, *,
    k: int, layouts: str, alpha: float, beta: float,
) -> Callable[..., None]:  # fmt: skip
    """As `bind_tensor` with one term, for float32 operands of which one lies across k.

    `layouts` are the kernel's: A is stored (1, m, k) for "n" or (1, k, m) for "t"; B (1, n, k)
    for "t" or (1, k, n) for "n". k is not 0. `variant` is one of `bind_tensor`'s: a tile like its
    is taken, and turned where B lies across k.
    """
    turned, (m, n) = layouts == "nn", c.shape
    variant = _alike(catalog.helper("across").kernel, variant, turned)
    sides = (n, m, k) if turned else (m, n, k)
    shares = Shares(device, variant, "tfloat32", c, sides, alpha=alpha, beta=beta, turned=turned)
    variant, shares.launch = shares.variant, shares.launch.resident(device.processors)
    function = device.function(variant, "tfloat32", layouts)
    boxes = [variant.box(x, "tfloat32", along_k=along) for x, along in (("A", False), ("B", True))]
    sizes = [np.int32(x) for x in sides]
    ldc = np.int64(c.strides[0] // c.itemsize)

    def call(a: Array, b: Array, c: Array, stream: Stream) -> None:
        if not c.size:
            return
        operands = (b, a) if turned else (a, b)
        maps = [map_of("tfloat32", x, box) for x, box in zip(operands, boxes, strict=True)]
        shares.start(function, [*maps, *sizes], c, ldc, stream)

    return call
