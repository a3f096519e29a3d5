"""C with a thin side, by kernels that make no other, on any device that runs kernels."""

import itertools
from collections import defaultdict

import numpy as np

from hybrid_gemm import catalog
from hybrid_gemm.catalog import Kernel, Variant

from .arrays import fetch, integers, padded
from .devices import open_device
from .kernels import Emulated, in_layout, on_devices, with_anything_new

GEMV, DOTS, TALL, OUTER = (
    (catalog.get(name), catalog.get(f"{name}_narrow")) for name in ("gemv", "dots", "tall", "outer")
)
SKINNY = (catalog.get("skinny"),)
# m, n or the other way round, k, and what rows have beyond their length: rows on 16 bytes, on 4, on
# neither.
ROWS = [
    (1, 70, 300, 0), (1, 64, 520, 8), (1, 301, 34, 2), (1, 33, 1031, 1), (1, 1, 4096, 0),
    (1, 700, 1, 4),
]  # fmt: skip
# Lines that begin anywhere: shorter than 16 bytes, few, long, on the way through several tiles.
ANYWHERE = [
    (1, 3, 5, 0), (1, 2, 1031, 0), (1, 70, 600, 1), (1, 301, 34, 2), (1, 33, 1031, 3),
    (1, 1, 515, 0), (1, 261, 1, 0), (1, 201, 300, 0), (1, 9, 256, 5),
]  # fmt: skip
SMALL = [(3, 5, 1700, 0), (8, 4, 2048, 0), (1, 2, 3001, 1), (7, 6, 513, 2), (2, 1, 1, 0)]
SHORT = [(65, 130, 3, 0), (129, 64, 1, 1), (3, 300, 1, 2), (200, 33, 2, 4), (17, 1025, 16, 0)]
FEW = [
    (3, 70, 300, 0), (8, 64, 520, 8), (16, 301, 34, 2), (5, 133, 1031, 1), (2, 700, 7, 4),
    (11, 130, 1300, 3), (1, 129, 513, 5), (16, 16, 2000, 0), (7, 3, 15, 0), (4, 200, 256, 0),
]  # fmt: skip
LONG = [(1, 2100, 3, 0), (3, 1031, 5, 0), (4, 1024, 8, 0), (2, 2049, 16, 4), (1, 5, 30, 1)]


def cases(kernels: tuple[Kernel, ...]) -> list[tuple[Variant, str]]:
    """The variants of a kernel, and of that for 16 bits, each in two dtypes."""
    narrow = ("float16", "bfloat16")
    dtypes = (("float32", "float64"), narrow)[-len(kernels) :]
    return [
        (v, dtype)
        for kernel, some in zip(kernels, dtypes, strict=True)
        for v, dtype in itertools.product(kernel.variants(), some)
        if not v.refusal(device="cuda", dtype=dtype, m=1, n=1, k=1)
    ]


def few_blocks(variant: Variant) -> Variant:
    """The variant where blocks share k as soon as they can."""
    return variant.kernel.variant(variant.params | ({"KIB": 1} if "KIB" in variant.params else {}))


# The variants of all, and the shapes of each kernel.
THIN = [case for kernels in (GEMV, DOTS, TALL, OUTER, SKINNY) for case in cases(kernels)]
THIN_SHAPES = {
    kernel.name: shapes
    for kernels, shapes in (
        (GEMV, ROWS), (DOTS, SMALL), (TALL, LONG), (OUTER, SHORT), (SKINNY, FEW),
    )
    for kernel in kernels
}  # fmt: skip


def in_all_layouts(of: list[tuple[Variant, str]]) -> list:
    """Parameters of a test: these variants in each layout. On the emulator default variants have
    each layout once, and each dtype with both orders of A and of B; others, which have a new value
    of a parameter, one layout and one dtype in turn. The rest is for campaigns."""
    dtypes, new = defaultdict(list), set(with_anything_new(variant for variant, _dtype in of))
    for variant, dtype in of:
        dtypes[variant].append(dtype)

    def emulated(number: int, variant: Variant, dtype: str, layout: str) -> Emulated:
        turn, place = catalog.LAYOUTS.index(layout), variant.kernel.variants().index(variant)
        if place == 0:
            place = turn in (1, 2)  # nt and tn in the one dtype, nn and tt in the other
        elif (number // 4 + turn) % 4:
            return Emulated.NOWHERE
        taken = variant in new and dtype == dtypes[variant][place % len(dtypes[variant])]
        return Emulated.ALWAYS if taken else Emulated.IN_CAMPAIGNS

    return on_devices([(*case, layout) for case in of for layout in catalog.LAYOUTS], emulated)


def check_lines(
    device, variant, dtype: str, layout: str, shapes, rng, skip: int = 0, rows_around: int = 1
) -> None:  # fmt: skip
    """Products of odd sides by a variant: exact, and nothing outside C written. Those that it
    cannot make are left out, of which there may not be many. A and B begin `skip` elements after
    the row of memory that they lie in, and have `rows_around` more rows on both sides."""
    stream = device.stream()
    out = "float32" if variant.params.get("OUT") == 4 else dtype
    made = 0
    for i, (*sides, k, pad) in enumerate(shapes):
        m, n = sides if (i + len(dtype)) % 2 else sides[::-1]
        if variant.refusal(device="cuda", dtype=dtype, m=m, n=n, k=k):
            continue
        made += 1
        a, b = integers(rng, (m, k)), integers(rng, (k, n))
        if variant.params.get("OUT"):
            a, b = a.clip(-1, 1), b.clip(-1, 1)
        old = np.full((m, n), np.nan if i % 3 else 2, out)
        views = lying(device, (a.astype(dtype), b.astype(dtype)), layout, pad, skip, rows_around)
        whole, c = padded(device, old, pad, np.nan)
        beta = 0 if i % 3 else 3
        with device.using(stream):
            device.gemm(variant, *views, c, alpha=-1, beta=beta, stream=stream)
            stream.synchronize()
        expected = np.full(whole.shape, np.nan)
        product = (-a.astype("f4") @ b.astype("f4") + (6 if beta else 0)).astype(out)
        expected[1:-1, :n] = product
        got = fetch(device, whole).astype("f8")
        np.testing.assert_array_equal(got, expected, err_msg=str((m, n, k, pad)))
    assert made >= 2


def check_case(kind: str, variant, dtype: str, layout: str, rng) -> None:
    """As `check_lines`, of the kernel's own shapes, on a device of this kind; on the emulator
    variants beside the default one are compiled for one layout each."""
    if kind == "emulator" and variant != variant.kernel.variant():
        variant = in_layout(variant, layout)
    check_lines(open_device(kind), variant, dtype, layout, THIN_SHAPES[variant.name], rng)


def check_one_order(device, variant, shape, layout: str, rng, dtype: str = "float32") -> None:
    """Blocks share k, and the same product has the same bits, whichever of them comes last."""
    m, n, k = shape
    assert np.prod(variant.launch(m, n, k, dtype).grid) > 2 * 3
    stream, results = device.stream(), []
    a, b = (rng.standard_normal(s).astype(dtype) for s in ((m, k), (k, n)))
    views = lying(device, (a, b), layout, 0)
    for _ in range(5):
        _whole, c = padded(device, np.full((m, n), np.nan, dtype), 0, np.nan)
        with device.using(stream):
            device.gemm(variant, *views, c, alpha=1, beta=0, stream=stream)
            stream.synchronize()
        results.append(fetch(device, c))
    exact = a.astype("f8") @ b.astype("f8")
    np.testing.assert_allclose(results[0], exact, rtol=0, atol=0.1 if dtype == "float16" else 1e-3)
    for again in results[1:]:
        np.testing.assert_array_equal(again, results[0])


ENDS = ((1, 37, 29), (45, 1, 21), (1, 3, 7), (2, 1, 523), (1, 71, 515))
FEW_ENDS = (*ENDS, (5, 67, 131), (131, 8, 257), (8, 9, 3))


def check_ends(device, variant, dtype: str, layout: str, rng, shapes=ENDS) -> None:
    """Exact products of matrices that begin and end where their memory does."""
    stream = device.stream()
    for i, (m, n, k) in enumerate(shapes):
        a, b = (x.clip(-1, 1).astype(dtype) for x in (integers(rng, (m, k)), integers(rng, (k, n))))
        c = device.empty(m, n, dtype)
        views = []
        for x, order in zip((a, b), layout, strict=True):
            stored = np.ascontiguousarray(x if order == "n" else x.T)
            there = device.empty(*stored.shape, dtype)
            device.copy(there, stored, stream)
            views.append(there if order == "n" else there.T)
        with device.using(stream):
            device.gemm(variant, *views, c, alpha=1, beta=0, stream=stream)
            stream.synchronize()
        product = (a.astype("f4") @ b.astype("f4")).astype(dtype)
        np.testing.assert_array_equal(fetch(device, c), product, err_msg=str((i, m, n, k)))


def lying(
    device, matrices, layout: str, pad: int, skip: int = 0, rows_around: int = 1
) -> list:  # fmt: skip
    """Matrices on the device, stored as the layout says, in rows that are `pad` elements longer,
    and begin `skip` elements earlier; with `rows_around` rows of NaN on both sides."""
    views = []
    for x, order in zip(matrices, layout, strict=True):
        stored = x if order == "n" else x.T
        wider = np.full((stored.shape[0], skip + stored.shape[1]), np.nan, x.dtype)
        wider[:, skip:] = stored
        there = padded(device, wider, pad, np.nan, rows_around)[1][:, skip:]
        views.append(there if order == "n" else there.T)
    return views
