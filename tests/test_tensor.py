"""Products on tensor cores: how operands are split and which split is taken, odd shapes, what
strict fp32 keeps, and `compute=` from Python, over threads and from the command."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import REASONS, integers
from test_kernels import fetch, open_device, padded

from hybrid_gemm import catalog
from hybrid_gemm.devices import tensor_core_products as products
from hybrid_gemm.devices.cuda import tensor_maps
from hybrid_gemm.devices.emulator import program as emulation
from hybrid_gemm.errors import UnavailableError
from hybrid_gemm.kernel_choice import compute_modes
from hybrid_gemm.problem import Problem

FP16, TF32, STRICT = range(3)
LEAST_K = 512  # of the TF32 split
SPLIT = Problem(1, 1, 1, compute="fp32x3")
SHAPES = [(1, 1, 1), (5, 7, 3), (33, 65, 17), (130, 133, 71), (129, 2, 200), (64, 128, 64)]


@pytest.fixture(params=[("emulator", "mma"), ("cuda", "mma"), ("cuda", "wgmma")], ids=" ".join)
def place(request):
    """A device and a kernel for its tensor cores."""
    kind, name = request.param
    if REASONS[kind]:
        pytest.skip(REASONS[kind])
    device = open_device(kind)
    try:
        compute_modes.choose("tf32", catalog.get(name).variant(), kind=kind, arch=device.capability)
    except UnavailableError as error:
        pytest.skip(str(error))
    return device, name


def put(device, host, order="n", pad=0):
    """On the device in that order, its rows so much longer."""
    stored = host if order == "n" else host.T.copy()
    there = padded(device, stored, pad, poison(host.dtype))[1]
    return there if order == "n" else there.T


def poison(dtype):
    return np.asarray(np.nan, dtype)[()]


def multiply(place, a, b, *, terms=3, layout="nn", pad=0, alpha=1, beta=0, c=None, out="float32"):
    """C within its poisoned surroundings, and the verdicts on the product."""
    device, name = place
    variant = compute_modes.with_terms(catalog.get(name).variant(), terms)
    stream = device.stream()
    with device.using(stream):
        x, y = (put(device, m, o, pad) for m, o in zip((a, b), layout, strict=True))
        old = np.full((a.shape[0], b.shape[1]), poison(out), out) if c is None else c
        whole, there = padded(device, old, pad, poison(out))
        before = products.verdicts(device, SPLIT)
        device.gemm(variant, x, y, there, alpha=alpha, beta=beta, stream=stream)
        stream.synchronize()
        verdicts = products.verdicts(device, SPLIT) - before
    return fetch(device, whole), verdicts


def framed(expected, pad, out="float32"):
    whole = np.full((expected.shape[0] + 2, expected.shape[1] + pad), poison(out), out)
    whole[1:-1, : expected.shape[1]] = expected
    return whole


def to_tf32(x):
    bits = x.view("u4")
    return ((bits + 0xFFF + (bits >> 13 & 1)) & np.uint32(0xFFFFE000)).astype("u4").view("f4")


# --- data of all kinds ----------------------------------------------------------------------


def data(kind, m, n, k, seed=0):
    """A and B, and the verdict that the rules in docs/tensor-cores.md give."""
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


KINDS = ["normal", "uniform", "ill-scaled", "cancelling", "sparse", "wide", "huge", "huge in B",
         "tiny rows", "subnormal", "overflow", "Inf", "NaN", "widest"]  # fmt: skip


# --- products -------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", catalog.LAYOUTS)
@pytest.mark.parametrize("terms", [1, 3])
def test_whole_numbers_are_exact_at_odd_shapes(place, terms, layout):
    for i, (m, n, k) in enumerate(SHAPES):
        rng = np.random.default_rng(i)
        a, b = integers(rng, (m, k)), integers(rng, (k, n))
        alpha, beta, pad = (1, -2)[i % 2], (0, 3)[i // 2 % 2], (0, 4, 3)[i % 3]
        c = integers(rng, (m, n)) if beta else None
        got, verdicts = multiply(
            place, a, b, terms=terms, layout=layout, pad=pad, alpha=alpha, beta=beta, c=c
        )
        expected = alpha * (a @ b) + (beta * c if beta else 0)
        np.testing.assert_array_equal(got, framed(expected, pad), err_msg=f"{m} {n} {k}")
        assert verdicts.sum() == (terms == 3)


@pytest.fixture
def hopper():
    if REASONS["cuda"]:
        pytest.skip(REASONS["cuda"])
    device = open_device("cuda")
    if device.capability != 90:
        pytest.skip("wgmma is of compute capability 9.0")
    return device, "wgmma"


@pytest.fixture
def packings(monkeypatch):
    """How many rows of A and columns of B each product packed."""
    seen, parts = [], products.PackedProduct.parts

    def recorded(self, room, count, size, rows=None):
        seen.append(tuple(rows or (self.m, self.n)))
        return parts(self, room, count, size, rows)

    monkeypatch.setattr(products.PackedProduct, "parts", recorded)
    return seen


@pytest.mark.parametrize("layout", catalog.LAYOUTS)
def test_tf32_operands_are_packed_only_where_they_must_be(hopper, packings, layout):
    for i, (m, n, k) in enumerate([(36, 132, 68), (516, 260, 1000), (300, 2500, 8), (4, 4, 4)]):
        rng = np.random.default_rng(i)
        a, b = integers(rng, (m, k)), integers(rng, (k, n))
        for pad, beta in ((0, 0), (4, 2), (3, 0)):
            c = integers(rng, (m, n)) if beta else None
            packings.clear()
            got, _ = multiply(
                hopper, a, b, terms=1, layout=layout, pad=pad, alpha=-1, beta=beta, c=c
            )
            expected = beta * c - a @ b if beta else -(a @ b)
            np.testing.assert_array_equal(got, framed(expected, pad), err_msg=f"{m} {n} {k}")
            both_across = [(0, n) if m > n else (m, 0)]
            where = both_across if layout == "tn" else []
            assert packings == ([(m, n)] if pad == 3 else where)


def test_tiles_of_wgmma_are_there_for_operands_across_k():
    across = catalog.helper("across").kernel
    for variant in catalog.get("wgmma").variants():
        if variant.params["TERMS"] == 1 and variant.params["OUT"] == 4:
            taken = tensor_maps._alike(across, variant.params)
            for name in ("BM", "BN", "CLUSTER"):
                assert taken.params[name] == variant.params[name]


@pytest.mark.parametrize("layout", catalog.LAYOUTS)
def test_one_tf32_operand_is_packed_where_it_begins_off_16_bytes(hopper, packings, layout):
    rng = np.random.default_rng(5)
    a, b = integers(rng, (130, 67)), integers(rng, (67, 132))
    if layout[0] == "t":
        a = integers(rng, (132, 67))
    got, _ = multiply(hopper, a, b, terms=1, layout=layout)
    np.testing.assert_array_equal(got, framed(a @ b, 0))
    aligned = layout[0] == "t", layout[1] == "n"
    rows = [0 if x else s for x, s in zip(aligned, (len(a), 132), strict=True)]
    if all(aligned):
        rows = [132, 0]
    assert packings == [tuple(rows)]


@pytest.mark.parametrize("layout", catalog.LAYOUTS)
def test_tf32_is_rounded_to_the_nearest_wherever_that_happens(hopper, layout):
    """Packed, by the copy engine, from registers: the bits are the same."""
    rng = np.random.default_rng(0)
    x = rng.integers(0, 2**32, (200, 160), dtype=np.uint32)
    x[::3] = (x[::3] & 0xFFFFE000) | 0x1000  # halfway
    x = x.view("f4")
    x = np.where(np.abs(np.nan_to_num(x, nan=0)) < 2.0**127, np.nan_to_num(x, nan=0), 1)
    x[np.abs(x) < 2.0**-126] = 0
    one = np.eye(160, dtype="f4")
    for pad in (0, 3):
        got, _ = multiply(hopper, x, one, terms=1, layout=layout, pad=pad)
        np.testing.assert_array_equal(got[1:-1, :160], to_tf32(x))
        got, _ = multiply(hopper, one, x.T.copy(), terms=1, layout=layout, pad=pad)
        np.testing.assert_array_equal(got[1:-1, :200], to_tf32(x).T)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("layout", catalog.LAYOUTS)
def test_narrow_whole_numbers_are_exact(place, dtype, layout):
    for i, (m, n, k) in enumerate(SHAPES):
        rng = np.random.default_rng(i)
        a, b = (rng.integers(-1, 2, s).astype(dtype) for s in ((m, k), (k, n)))
        pad, beta = (0, 8, 3)[i % 3], (0, 2)[i % 2]
        for out in ("float32", dtype):
            c = integers(rng, (m, n), out) if beta else None
            got, _ = multiply(place, a, b, terms=1, layout=layout, pad=pad, beta=beta, c=c, out=out)
            exact = a.astype("f8") @ b.astype("f8") + (beta * c.astype("f8") if beta else 0)
            wanted = framed(exact.astype(out), pad, out)
            np.testing.assert_array_equal(
                got.astype("f4"), wanted.astype("f4"), err_msg=f"{m} {n} {k} {out}"
            )


def bound(name, verdict, k):
    """What a split product may be wrong by, of |A||B|, at the very worst.

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


@pytest.mark.parametrize("kind", KINDS)
def test_no_kind_of_data_is_worse_than_strict_fp32(place, kind):
    """Within the bound above; on the whole within an ulp, which sums that stay in the tensor cores
    too long are not (measured on uniform data: 2.3 ulp, 12 instructions a chunk); the strict
    kernel's own bits where no split is taken."""
    k = 530 if kind in ("wide", "huge", "huge in B") else 300
    for layout, shape in (("nn", (65, 70, k)), ("tt", (40, 33, 129))):
        a, b, verdict = data(kind, *shape)
        got, verdicts = multiply(place, a, b, layout=layout)
        got = got[1:-1, : b.shape[1]]
        assert list(verdicts) == [v == verdict for v in range(3)]
        if verdict == STRICT:
            strict = strict_product(place[0], a, b, layout)
            np.testing.assert_array_equal(got, strict)
            continue
        exact = a.astype("f8") @ b.astype("f8")
        size = np.abs(a).astype("f8") @ np.abs(b).astype("f8")
        most = bound(place[1], verdict, shape[2])
        assert most < shape[2] * 2.0**-24  # a fraction of fp32's own
        assert (np.abs(got - exact) <= most * size).all()
        rms = np.linalg.norm(got - exact) / np.linalg.norm(size)
        assert rms <= 2.0**-23


def strict_product(device, a, b, layout):
    stream = device.stream()
    with device.using(stream):
        x, y = (put(device, m, o) for m, o in zip((a, b), layout, strict=True))
        c = device.empty(a.shape[0], b.shape[1], "float32")
        variant = catalog.get("double_buffered").variant()
        device.gemm(variant, x, y, c, alpha=1, beta=0, stream=stream)
        stream.synchronize()
    return fetch(device, c)


def test_tf32_keeps_infinities_and_nans(place):
    a, b = integers(np.random.default_rng(0), (9, 40)), np.ones((40, 5), "f4")
    a[1, 3], a[2, 4], a[3, 5] = np.inf, np.nan, np.float32(3.4e38)
    got, _ = multiply(place, a, b, terms=1)
    with np.errstate(invalid="ignore", over="ignore"):
        expected = a @ b
    finite = [i for i in range(9) if i not in (1, 2, 3)]
    np.testing.assert_array_equal(got[1:-1][finite], expected[finite])
    assert np.isposinf(got[2]).all() and np.isnan(got[3]).all()


def test_alpha_and_beta_as_in_blas(place):
    a, b = np.full((3, 40), np.nan, "f4"), np.full((40, 5), np.inf, "f4")
    c = np.full((3, 5), 2, "f4")
    for terms in (1, 3):
        got, _ = multiply(place, a, b, terms=terms, alpha=0, beta=3, c=c)
        np.testing.assert_array_equal(got[1:-1], 6)
    got, _ = multiply(place, a[:, :0], b[:0], beta=0)
    np.testing.assert_array_equal(got[1:-1], 0)


def test_scaling_never_loses_what_the_result_keeps(place):
    """Exponents of rows and columns that alone would overflow or underflow."""
    rng = np.random.default_rng(0)
    a, b = rng.uniform(1, 2, (4, 64)).astype("f4"), rng.uniform(1, 2, (64, 6)).astype("f4")
    plain, _ = multiply(place, a, b)
    for shift in (50, -50):
        scaled = np.ldexp(a, shift).astype("f4"), np.ldexp(b, -shift - 20).astype("f4")
        got, verdicts = multiply(place, *scaled, alpha=2.0**20)
        assert verdicts[FP16] == 1
        np.testing.assert_array_equal(got, plain)


@pytest.mark.parametrize("kind", ["normal", "wide", "NaN"])
def test_the_same_bits_every_time(place, kind):
    a, b, _verdict = data(kind, 140, 90, 520)
    first, _ = multiply(place, a, b)
    for _ in range(3):
        np.testing.assert_array_equal(multiply(place, a, b)[0], first)


@pytest.mark.parametrize("order", ["reverse", "shuffle"])
@pytest.mark.parametrize("kind", ["normal", "wide", "NaN"])
def test_thread_order_does_not_matter(kind, order):
    if REASONS["emulator"]:
        pytest.skip(REASONS["emulator"])
    a, b, _verdict = data(kind, 133, 66, 600)
    plain = multiply((open_device("emulator"), "mma"), a, b, layout="nt")
    other = multiply((open_device("emulator", order=order, seed=5), "mma"), a, b, layout="nt")
    np.testing.assert_array_equal(plain[0], other[0])
    np.testing.assert_array_equal(plain[1], other[1])


SANITIZED = """
import sys
sys.path.insert(0, {here!r})
import numpy as np
from test_tensor import data, multiply, open_device
place = open_device("emulator", sanitize=True), "mma"
for kind, layout in (("normal", "nn"), ("wide", "tt"), ("NaN", "nt")):
    shape = (33, 66, 515) if kind == "wide" else (67, 130, 71)
    a, b, verdict = data(kind, *shape)
    for terms in (1, 3):
        multiply(place, a, b, terms=terms, layout=layout, pad=3)
    narrow = a.astype("float16"), b.astype("float16")
    multiply(place, *narrow, terms=1, layout=layout, pad=3, out="float16")
print("clean")
"""


def test_address_sanitizer_finds_nothing():
    if REASONS["emulator"]:
        pytest.skip(REASONS["emulator"])
    done = subprocess.run(
        [sys.executable, "-c", SANITIZED.format(here=str(Path(__file__).parent))],
        capture_output=True, text=True, env=emulation.sanitized_environment(),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout == "clean\n"
