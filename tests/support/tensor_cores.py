"""Products on tensor cores: matrices of every kind, the product, and how wrong it may be."""

from unittest import mock

import numpy as np

from hybrid_gemm import catalog
from hybrid_gemm.devices import tensor_core_products
from hybrid_gemm.kernel_choice import compute_modes
from hybrid_gemm.problem import Problem

from .arrays import fetch, padded, poison

FP16, TF32, STRICT = range(3)  # verdicts: which split of fp32 was taken, if any
LEAST_K = 512  # of the TF32 split
SPLIT_PROBLEM = Problem(1, 1, 1, compute="fp32x3")


def put(device, host, order="n", pad=0):
    """Copies a matrix to the device in that storage order, its rows longer by `pad` elements."""
    stored = host if order == "n" else host.T.copy()
    there = padded(device, stored, pad, poison(host.dtype))[1]
    return there if order == "n" else there.T


def multiply(
    place,
    a,
    b,
    *,
    terms=3,
    layout="nn",
    pad=0,
    alpha=1,
    beta=0,
    c=None,
    out="float32",
    variant=None,
):
    """Multiplies at a `place`, which is a device and the name of a kernel for its tensor cores, by
    its first variant or the one given. Returns C within its poisoned surroundings, and how many
    products got each verdict."""
    device, name = place
    variant = variant or compute_modes.with_terms(catalog.get(name).variant(), terms)
    stream = device.stream()
    with device.using(stream):
        x, y = (put(device, m, o, pad) for m, o in zip((a, b), layout, strict=True))
        old = np.full((a.shape[0], b.shape[1]), poison(out), out) if c is None else c
        whole, there = padded(device, old, pad, poison(out))
        before = tensor_core_products.verdicts(device, SPLIT_PROBLEM)
        with mock.patch.object(tensor_core_products, "LEAST_WORK_TF32", 0):
            device.gemm(variant, x, y, there, alpha=alpha, beta=beta, stream=stream)
        stream.synchronize()
        verdicts = tensor_core_products.verdicts(device, SPLIT_PROBLEM) - before
    return fetch(device, whole), verdicts


def cutting(name, terms, out_bytes=4):
    """The variants of a kernel that may cut k."""
    wanted = {"TERMS": terms, "OUT": out_bytes}
    return [
        v
        for v in catalog.get(name).variants()
        if v.most_shares > 1 and wanted.items() <= v.params.items()
    ]


def framed(expected, pad, out="float32"):
    """A matrix within the surroundings that `multiply` gives its C."""
    whole = np.full((expected.shape[0] + 2, expected.shape[1] + pad), poison(out), out)
    whole[1:-1, : expected.shape[1]] = expected
    return whole


def to_tf32(x):
    """float32 rounded to the nearest number that TF32 holds, to even where there are two."""
    bits = x.view("u4")
    return ((bits + 0xFFF + (bits >> 13 & 1)) & np.uint32(0xFFFFE000)).astype("u4").view("f4")


KINDS = ["normal", "uniform", "ill-scaled", "cancelling", "sparse", "wide", "huge", "huge in B",
         "tiny rows", "subnormal", "overflow", "Inf", "NaN", "widest"]  # fmt: skip


def operands(kind, m, n, k, seed=0):
    """A and B of that kind, and the verdict that the rules in docs/tensor-cores.md give."""
    rng = np.random.default_rng(seed)
    a, b = rng.standard_normal((m, k)), rng.standard_normal((k, n))
    verdict = FP16
    if kind == "uniform":
        a, b = rng.random((m, k)), rng.random((k, n))
    elif kind == "ill-scaled":
        a *= 2.0 ** rng.integers(-30, 31, (m, 1))
        b *= 2.0 ** rng.integers(-30, 31, n)
    elif kind == "cancelling":
        a[:, k // 2 : k // 2 * 2], b[k // 2 : k // 2 * 2] = a[:, : k // 2], -b[: k // 2]
    elif kind == "sparse":  # small elements and zeros, but none is cut short
        a, b = (np.where(rng.random(x.shape) < 0.9, 0, np.rint(9 * x) + 1) for x in (a, b))
    elif kind == "wide":
        a, b = (x * 2.0 ** rng.uniform(-30, 30, x.shape) for x in (a, b))
        verdict = TF32
    elif kind == "huge":
        a[:, 0], b[0] = 1e8, 0
        verdict = TF32
    elif kind == "huge in B":
        b[-1], a[:, -1] = -1e8, 0
        verdict = TF32
    elif kind == "tiny rows":
        a[m // 2] *= 1e-30
        verdict = STRICT
    elif kind == "subnormal":
        a *= 1e-40
        verdict = STRICT
    elif kind == "overflow":
        a *= 1e25
        b *= 1e14
        verdict = STRICT
    elif kind == "Inf":
        a[m // 2, k // 3] = np.inf
        verdict = STRICT
    elif kind == "NaN":
        b[k // 3, n // 2] = np.nan
        verdict = STRICT
    elif kind == "widest":  # beyond what even TF32's exponents hold
        a[:, :2], b[:2, :] = (1e20, 1e-30), np.array([[1e-30], [1e20]])
        a[:, 2:], b[2:] = 0, 0
        verdict = STRICT
    if verdict == TF32 and k < LEAST_K:
        verdict = STRICT
    with np.errstate(over="ignore"):
        return a.astype("f4"), b.astype("f4"), verdict


def error_bound(name, verdict, k):
    """The most that a split product may be wrong by, as a fraction of |A||B|.

    The split leaves out 3 x 2^-22. An instruction over `step` of k adds its products to the sum
    so far: tensor cores align all these with the largest, keep two bits below fp32's last of it
    (measured: 1 + 3 x 2^-24 is one ulp more than 1, 1 + 2^-26 + ... is 1) and cut the total to
    24 bits. That loses less than (step + 1) / 4 ulp and 1 ulp of |A||B| so far, an ulp being
    2^-23. Sums stay there for a chunk, of a stage at most; those of small terms are 2^-10 of it.
    Chunks, of a step at least, are added in fp32, for half an ulp each.
    """
    size, step = ((2, 16), (4, 8))[verdict]
    p = compute_modes.with_terms(catalog.get(name).variant(), 3).params
    chunk = p["SPAN"] // size if name == "wgmma" else step
    instructions = chunk / step * (1 + 2.0**-9)
    return 2.0**-23 * (6 + instructions * ((step + 1) / 4 + 1) + -(-k // step) / 2)


def check_split_products(place):
    """Split, rounded and narrow products of some kinds of matrices: what a checker of memory
    accesses should watch."""
    long = operands("normal", 33, 66, 1300)[:2]
    for kind, layout in (("normal", "nn"), ("wide", "tt"), ("NaN", "nt")):
        shape = (33, 66, 515) if kind == "wide" else (67, 130, 71)
        a, b, _verdict = operands(kind, *shape)
        for terms in (1, 3):
            multiply(place, a, b, terms=terms, layout=layout, pad=3)
        narrow = a.astype("float16"), b.astype("float16")
        multiply(place, *narrow, terms=1, layout=layout, pad=3, out="float16")
    for i, variant in enumerate(cutting(place[1], 1) + cutting(place[1], 3)):
        multiply(place, *long, layout=("nn", "tt", "nt")[i % 3], pad=3, variant=variant)
