"""Products and passes of one kernel device, compared with NumPy; whole numbers make them exact."""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from enum import Enum

import numpy as np
import pytest

from hybrid_gemm import catalog
from hybrid_gemm.catalog import Variant

from .arrays import fetch, integers, padded, poison
from .devices import KERNEL_DEVICES, marks

GEMMS = [v for k in catalog.gemm_kernels() if not k.library for v in k.variants()]


class Emulated(Enum):
    """Where the emulator runs a case, for which g++ compiles a kernel: always, in campaigns alone,
    or nowhere, since another case stands for it."""

    ALWAYS = 0
    IN_CAMPAIGNS = 1
    NOWHERE = 2


def on_devices(cases: Sequence[tuple], emulated: Callable[..., Emulated]) -> list:
    """Parameters of a test, `kernel_device` and those of a case: all on a GPU, on the emulator
    those that `emulated(number, *case)` names."""
    made = []
    for kind in (parameter.values[0] for parameter in KERNEL_DEVICES):
        for number, case in enumerate(cases):
            where = emulated(number, *case) if kind == "emulator" else Emulated.ALWAYS
            if where is Emulated.NOWHERE:
                continue
            also = [pytest.mark.campaign] if where is Emulated.IN_CAMPAIGNS else []
            name = "-".join(map(str, (kind, *case)))
            made.append(pytest.param(kind, *case, marks=[*marks(kind), *also], id=name))
    return made


def with_anything_new(variants: Iterable[Variant]) -> list[Variant]:
    """Those that have a value of a parameter that none of their kernel's before has; the first, its
    default, is one of them."""
    found, seen = [], set()
    for variant in variants:
        has = {(variant.name, name, value) for name, value in variant.params.items()}
        if variant == variant.kernel.variant() or has - seen:
            found.append(variant)
            seen |= has
    return found


def usual_dtype(kernel):
    """float32 where a kernel has that."""
    return "float32" if "float32" in kernel.dtypes else kernel.dtypes[0]


def in_layout(variant, layout):
    """The variant of a kernel that has this layout alone, where it has it at all. A single row or
    column lies in several, of which a device takes the first: the emulator would compile the
    variant for that, too."""
    if layout not in variant.kernel.layouts:
        return variant
    return Variant(dataclasses.replace(variant.kernel, layouts=(layout,)), variant.params)


def multiply(device, variant, shape, layout, dtype, pad, alpha, beta, seed=0, rows_around=1):
    """Runs the variant; returns C within its poisoned surroundings, and what NumPy makes of the
    same whole numbers. A and B have `rows_around` poisoned rows above and below them."""
    m, n, k = shape
    rng = np.random.default_rng(seed)
    around = poison(dtype)
    stored = [integers(rng, s, dtype) for s in ((m, k), (k, n))]
    a, b = (
        padded(device, x if order == "n" else x.T.copy(), pad, around, rows_around)[1]
        for x, order in zip(stored, layout, strict=True)
    )
    old = integers(rng, (m, n), dtype) if beta else np.full((m, n), around, dtype)
    whole, c = padded(device, old, pad, around)
    stream = device.stream()
    with device.using(stream):
        device.gemm(
            variant, a if layout[0] == "n" else a.T, b if layout[1] == "n" else b.T, c,
            alpha=alpha if k else 0, beta=beta, stream=stream,
        )  # fmt: skip
        stream.synchronize()
    expected = np.full(whole.shape, around, dtype)
    product = alpha * (stored[0].astype("i8") @ stored[1].astype("i8"))
    expected[1:-1, :n] = product + beta * old.astype("i8") if beta else product
    return fetch(device, whole), expected


def check_passes(device):
    """Transpose, slab copy, add and ordered sum, with odd sizes and leading dimensions."""
    rng = np.random.default_rng(3)
    stream = device.stream()
    with device.using(stream):
        for rows, cols, pad in ((1, 1, 0), (33, 70, 1), (64, 128, 0), (130, 3, 2), (7, 301, 4)):
            host = integers(rng, (rows, cols))
            _whole, there = padded(device, host, pad, np.nan)
            turned = device.transposed(there, "t", stream)
            again = device.transposed(turned, "n", stream)
            stream.synchronize()
            assert turned.strides[0] == 4
            np.testing.assert_array_equal(fetch(device, turned.T), host.T)
            np.testing.assert_array_equal(fetch(device, again), host)
            whole, copy = padded(device, np.full_like(host, np.nan), pad + 1, 9)
            device.copy_here(copy, there, stream)
            device.add(copy, there, stream)
            stream.synchronize()
            got = fetch(device, whole)
            np.testing.assert_array_equal(got[1:-1, :cols], 2 * host)
            assert (got[0] == 9).all() and (got[1:-1, cols:] == 9).all()
            for parts in (1, 2, 5, 9):
                hosts = [integers(rng, (rows, cols)) for _ in range(parts)]
                views = [padded(device, x, pad, np.nan)[1] for x in hosts]
                for beta, start in ((0, np.nan), (2, 3)):
                    whole, out = padded(device, np.full_like(host, start), pad, 9)
                    device.sum(views, out, alpha=3, beta=beta, stream=stream)
                    stream.synchronize()
                    got = fetch(device, whole)
                    np.testing.assert_array_equal(got[1:-1, :cols], 3 * sum(hosts) + 3 * beta)
                    assert (got[0] == 9).all() and (got[1:-1, cols:] == 9).all()


def check_every_kernel(device, variants):
    """Multiplies by each variant at an odd shape, and runs the passes: what a checker of memory
    accesses should watch. A and B end where their memory does. Variants with a fixed number of
    blocks run with fewer blocks than tiles too, and `vector`, which reads a matrix that lies along
    k by another text, with both; its C is thin, and of a long k blocks have shares. Returns how
    many variants ran."""
    both = [(v, layout) for v in variants if v.name == "vector" for layout in ("nn", "nt")]
    turns = [(v, catalog.LAYOUTS[-1 - i % 4]) for i, v in enumerate(variants) if v.name != "vector"]
    for variant, layout in turns + both:
        if variant.kernel.limits and variant.name != "one_block":  # `lines.check_lines`
            continue
        cases = [(variant, (29, 33, 35) if variant.kernel.limits else (131, 137, 21))]
        few = Variant(variant.kernel, {**variant.params, "BLOCKS": 2})
        if variant.name == "vector":
            sides = (5, 137) if variant.params["BM"] < variant.params["BN"] else (137, 5)
            cases = [(variant, (*sides, 600)), (few, (*sides, 600))]
        elif "BLOCKS" in variant.kernel.scales:
            cases.append((few, (301, 300, 20)))
        for case, shape in cases:
            dtype = usual_dtype(variant.kernel)
            for pad in (3, 0):  # lines that are aligned, and that are not
                got, expected = multiply(
                    device, case, shape, layout, dtype, pad, 1, 1, rows_around=0
                )
                np.testing.assert_array_equal(got, expected, err_msg=f"{case} {shape}")
    check_passes(device)
    return len(variants)
