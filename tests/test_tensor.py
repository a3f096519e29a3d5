"""Products on tensor cores: how operands are split and which split is taken, odd shapes, what
strict fp32 keeps, and `compute=` from Python, over threads and from the command."""

from types import SimpleNamespace

import numpy as np
import pytest
from support.arrays import fetch, integers
from support.devices import needs, on, open_device
from support.kernels import with_anything_new
from support.launches import recording_device
from support.tensor_cores import (
    FP16,
    KINDS,
    STRICT,
    cutting,
    error_bound,
    framed,
    multiply,
    operands,
    put,
    to_tf32,
)

from hybrid_gemm import catalog
from hybrid_gemm.devices import tensor_core_products
from hybrid_gemm.devices.cuda import tensor_maps
from hybrid_gemm.devices.rounded_products import RoundedProduct
from hybrid_gemm.errors import UnavailableError
from hybrid_gemm.kernel_choice import compute_modes
from hybrid_gemm.kernel_choice.tensor_cores import cut

SHAPES = [(1, 1, 1), (5, 7, 3), (33, 65, 17), (130, 133, 71), (129, 2, 200), (64, 128, 64)]


PLACES = [("emulator", "mma"), ("cuda", "mma"), ("cuda", "wgmma")]


@pytest.fixture(params=[on(kind, (kind, kernel)) for kind, kernel in PLACES], ids=" ".join)
def place(request):
    """A device and a kernel for its tensor cores."""
    kind, name = request.param
    device = open_device(kind)
    try:
        compute_modes.arithmetic_for(
            "tf32", catalog.get(name).variant(), kind=kind, arch=device.capability
        )
    except UnavailableError as error:
        pytest.skip(str(error))
    return device, name


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
def several(place, monkeypatch):
    """The place, where k may be cut: the emulator plays a device of some multiprocessors."""
    if place[0].kind == "emulator":
        monkeypatch.setattr(place[0], "processors", 8)
    return place


def long_k(place) -> int:
    """A k of many shares; the emulator, which multiplies slowly, cuts the shorter one, too."""
    return 1111 if place[0].kind == "emulator" else 2111


@pytest.mark.parametrize("layout", catalog.LAYOUTS)
@pytest.mark.parametrize("terms", [1, 3])
def test_whole_numbers_are_exact_where_k_is_cut(several, terms, layout):
    longer = long_k(several)
    for turn, variant in enumerate(cutting(several[1], terms)):
        if several[0].kind == "emulator" and (turn + catalog.LAYOUTS.index(layout)) % 4:
            continue  # each has to be compiled there: in one layout
        for i, (m, n, k) in enumerate([(5, 7, 1300), (130, 34, longer), (1, 4, 4096)]):
            rng = np.random.default_rng(i)
            shares = cut(variant, m, n, k, "tfloat32", several[0].processors)
            assert shares.shares > 1
            a, b = integers(rng, (m, k)), integers(rng, (k, n))
            alpha, beta, pad = (1, -2, 1)[i], (0, 3, -1)[i], (0, 3, 4)[i]
            c = integers(rng, (m, n)) if beta else None
            got, verdicts = multiply(
                several, a, b, terms=terms, layout=layout, pad=pad, alpha=alpha, beta=beta, c=c,
                variant=variant,
            )  # fmt: skip
            expected = alpha * (a @ b) + (beta * c if beta else 0)
            np.testing.assert_array_equal(
                got, framed(expected, pad), err_msg=f"{variant} {m} {n} {k} {shares}"
            )
            assert verdicts.sum() == (terms == 3)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_narrow_whole_numbers_are_exact_where_k_is_cut(several, dtype):
    for out in ("float32", dtype):
        for variant in cutting(several[1], 1, np.dtype(out).itemsize):
            for (m, n, k), pad in (((33, 130, 3000), 3), ((64, 20, 2048), 4)):
                rng = np.random.default_rng(k)
                assert cut(variant, m, n, k, dtype, several[0].processors).shares > 1
                a, b = (rng.integers(-1, 2, s).astype(dtype) for s in ((m, k), (k, n)))
                c = integers(rng, (m, n), out)
                got, _ = multiply(
                    several, a, b, terms=1, layout="tn", pad=pad, alpha=-1, beta=2, c=c, out=out,
                    variant=variant,
                )  # fmt: skip
                exact = 2 * c.astype("f8") - a.astype("f8") @ b.astype("f8")
                wanted = framed(exact.astype(out), pad, out)
                np.testing.assert_array_equal(
                    got.astype("f4"), wanted.astype("f4"), err_msg=f"{variant} {m} {n} {k} {out}"
                )


@pytest.mark.parametrize("kind", ["normal", "uniform", "wide", "ill-scaled", "NaN", "tiny rows"])
def test_split_products_keep_their_bound_where_k_is_cut(several, kind):
    """The verdict decides for the sums of shares too; the same bits come every time."""
    k = long_k(several)
    a, b, verdict = operands(kind, 70, 90, k)
    for variant in cutting(several[1], 3):
        shares = cut(variant, 70, 90, k, "float16", several[0].processors).shares
        assert shares > 1
        got, verdicts = multiply(several, a, b, variant=variant, alpha=2)
        assert verdicts[verdict] == 1 and verdicts.sum() == 1
        np.testing.assert_array_equal(got, multiply(several, a, b, variant=variant, alpha=2)[0])
        x, y = a.astype("f8"), b.astype("f8")
        if verdict == STRICT:
            np.testing.assert_array_equal(got, multiply(several, a, b, alpha=2)[0])
            continue
        error = np.abs(got[1:-1] - 2 * (x @ y)) / (2 * (np.abs(x) @ np.abs(y)))
        bound = error_bound(several[1], verdict, k) + shares * 2.0**-24
        assert error.max() < bound, (variant, shares, error.max(), bound)


@pytest.fixture(params=[on("cuda")])
def hopper(request):
    """A GPU of compute capability 9.0 which records its launches, and the kernel for it."""
    device = recording_device(request.param)
    if device.capability != 90:
        pytest.skip("wgmma is of compute capability 9.0")
    device.launched.clear()
    return device, "wgmma"


def packings(device):
    """How many rows of A and columns of B each product packed since the last call."""
    found = [tuple(map(int, launch.args[:2])) for launch in device.of("pack")]
    device.launched.clear()
    return found


@pytest.mark.parametrize("layout", catalog.LAYOUTS)
def test_tf32_operands_are_packed_only_where_they_must_be(hopper, layout):
    for i, (m, n, k) in enumerate([(36, 132, 68), (516, 260, 1000), (300, 2500, 8), (4, 4, 4)]):
        rng = np.random.default_rng(i)
        a, b = integers(rng, (m, k)), integers(rng, (k, n))
        for pad, beta in ((0, 0), (4, 2), (3, 0)):
            c = integers(rng, (m, n)) if beta else None
            got, _ = multiply(
                hopper, a, b, terms=1, layout=layout, pad=pad, alpha=-1, beta=beta, c=c
            )
            expected = beta * c - a @ b if beta else -(a @ b)
            np.testing.assert_array_equal(got, framed(expected, pad), err_msg=f"{m} {n} {k}")
            both_across = [(0, n) if m > n else (m, 0)]
            where = both_across if layout == "tn" else []
            assert packings(hopper[0]) == ([(m, n)] if pad == 3 else where)


def test_tiles_of_wgmma_are_there_for_operands_across_k():
    across = catalog.helper("across").kernel
    for variant in catalog.get("wgmma").variants():
        if variant.params["TERMS"] == 1 and variant.params["OUT"] == 4:
            taken = tensor_maps._alike(across, variant, turned=False)
            for name in ("BM", "BN", "CLUSTER", "SHARES"):
                assert taken.params[name] == variant.params[name]
            turned = tensor_maps._alike(across, variant, turned=True)
            assert turned.most_shares == variant.most_shares
            if variant.most_shares > 1 and variant.tile != (128, 256):
                assert turned.tile == variant.tile[::-1]
            assert cut(turned, 88, 16, 770295, "tfloat32", 132).shares <= turned.most_shares


@pytest.mark.parametrize("layout", catalog.LAYOUTS)
def test_one_tf32_operand_is_packed_where_it_begins_off_16_bytes(hopper, layout):
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
    assert packings(hopper[0]) == [tuple(rows)]


@pytest.mark.parametrize("layout", catalog.LAYOUTS)
def test_large_operands_of_16_bits_keep_their_order_where_they_are_packed(hopper, layout):
    """Unless lines are short, or A would lie across k beside a B along it."""
    for (m, n, k), kept in (((3001, 3003, 1501), "nn tn"), ((9001, 257, 1501), "")):
        rng = np.random.default_rng(m)
        a, b = integers(rng, (m, k), "float16"), integers(rng, (k, n), "float16")
        got, _ = multiply(hopper, a, b, terms=1, layout=layout)
        np.testing.assert_array_equal(got, framed(a.astype("f4") @ b.astype("f4"), 0))
        apart = [(k if layout == "tn" else m, 0), (0, k)]
        assert packings(hopper[0]) == (apart if layout in kept else [(m, n)])


@pytest.mark.parametrize("layout", catalog.LAYOUTS)
def test_orders_of_packed_operands(layout):
    def orders(m, n, k, *, item_bytes=2, tma=True, packed=(True, True), few=False):
        kernel = SimpleNamespace(kernel=SimpleNamespace(tma=tma))
        return RoundedProduct._orders(
            SimpleNamespace(
                m=m,
                n=n,
                k=k,
                layouts=layout,
                item_bytes=item_bytes,
                packed=packed,
                few=few,
                variant=kernel,
            )
        )

    large, turned = (3001, 3003, 1501), {"tt": "nt"}.get(layout, layout)
    assert orders(*large) == turned
    assert orders(*large, item_bytes=4) == orders(*large, tma=False) == "nt"
    assert orders(*large, few=True) == orders(9001, 257, 1501) == "nt"
    assert orders(*large, packed=(False, True))[0] == layout[0]


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


@pytest.mark.parametrize("few", [True, pytest.param(False, marks=pytest.mark.campaign)])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("layout", catalog.LAYOUTS)
def test_operands_in_place_are_exact_at_any_alignment(
    kernel_device, monkeypatch, dtype, layout, few
):
    """Whole numbers, by every variant, on the emulator outside campaigns by those that have a new
    value of a parameter; rows that begin on 16 bytes, on 4 and within 4, in matrices
    that begin so, too; what lies around them is NaN."""
    device = open_device(kernel_device)
    kernel = catalog.get("mma_in_place")
    if device.kind == "emulator":
        monkeypatch.setattr(device, "processors", 8)
    if 0 < device.capability < kernel.min_arch():
        pytest.skip("this GPU has no tensor cores that the kernel uses")
    size = np.dtype(dtype).itemsize if dtype != "bfloat16" else 2
    shapes = [(5, 7, 3), (67, 131, 70), (130, 18, 64), (17, 129, 1), (9, 33, 300)]
    new = with_anything_new(kernel.variants())
    for i, variant in enumerate(kernel.variants()):
        if variant.params["OUT"] not in (4, size) or (
            few and device.kind == "emulator" and variant not in new
        ):
            continue
        # Each has to be compiled there: in one layout, and for one of the two dtypes of 16 bits,
        # in turn. On a GPU in two, and for both.
        on_cpu = device.kind == "emulator"
        if (i + catalog.LAYOUTS.index(layout)) % (4 if on_cpu else 2):
            continue
        if on_cpu and dtype == ("float16", "bfloat16")[i // 4 % 2]:
            continue
        out = "float32" if variant.params["OUT"] == 4 else dtype
        rng = np.random.default_rng(i)
        for j, (m, n, k) in enumerate(shapes):
            pad, beta, alpha = (0, 16, 1, 2)[(i + j) % 4], (0, 2)[j % 2], (1, -1)[i % 2]
            a, b = integers(rng, (m, k), dtype), integers(rng, (k, n), dtype)
            c = integers(rng, (m, n), out) if beta else None
            got, _ = multiply(
                (device, "mma_in_place"), a, b, terms=1, layout=layout, pad=pad, alpha=alpha,
                beta=beta, c=c, out=out, variant=variant,
            )  # fmt: skip
            exact = alpha * (a.astype("f8") @ b.astype("f8"))
            exact = exact + (beta * c.astype("f8") if beta else 0)
            np.testing.assert_array_equal(
                got.astype("f4"), framed(exact.astype(out), pad, out).astype("f4"),
                err_msg=f"{variant} {m} {n} {k} pad {pad}",
            )  # fmt: skip


def test_operands_in_place_are_rounded_as_packed_ones(kernel_device):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((37, 50)).astype("f4")
    place = open_device(kernel_device), "mma_in_place"
    got, _ = multiply(place, x, np.eye(50, dtype="f4"), terms=1, layout="nt")
    np.testing.assert_array_equal(got[1:-1, :50], to_tf32(x))


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


@pytest.mark.parametrize("kind", KINDS)
def test_no_kind_of_data_is_worse_than_strict_fp32(place, kind):
    """Within the bound above; on the whole within an ulp, which sums that stay in the tensor cores
    too long are not (measured on uniform data: 2.3 ulp, 12 instructions a chunk); the strict
    kernel's own bits, on a GPU, where no split is taken."""
    k = 530 if kind in ("wide", "huge", "huge in B") else 300
    for layout, shape in (("nn", (65, 70, k)), ("tt", (40, 33, 129))):
        a, b, verdict = operands(kind, *shape)
        got, verdicts = multiply(place, a, b, layout=layout)
        got = got[1:-1, : b.shape[1]]
        assert list(verdicts) == [v == verdict for v in range(3)]
        if verdict == STRICT:
            strict = strict_product(place[0], a, b, layout)
            if place[0].kind == "emulator":  # g++ fuses other additions in another text
                size = np.abs(a).astype("f8") @ np.abs(b).astype("f8")
                with np.errstate(invalid="ignore"):
                    off = np.abs(got.astype("f8") - strict) - 2.0**-149
                same = (off <= 2.0**-23 * shape[2] * size) | (size > 2.0**127)  # may overflow
                got = np.where(same, strict, got)
            np.testing.assert_array_equal(got, strict)
            continue
        exact = a.astype("f8") @ b.astype("f8")
        size = np.abs(a).astype("f8") @ np.abs(b).astype("f8")
        most = error_bound(place[1], verdict, shape[2])
        assert most < shape[2] * 2.0**-24  # a fraction of fp32's own
        assert (np.abs(got - exact) <= most * size).all()
        rms = np.linalg.norm(got - exact) / np.linalg.norm(size)
        assert rms <= 2.0**-23


def strict_product(device, a, b, layout):
    stream = device.stream()
    with device.using(stream):
        x, y = (put(device, m, o) for m, o in zip((a, b), layout, strict=True))
        c = device.empty(a.shape[0], b.shape[1], "float32")
        taken = tensor_core_products.strict_variant(device, *c.shape, tf32=False).params
        variant = catalog.get("tuned").variant({x: y for x, y in taken.items() if x != "WIDE"})
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
    a, b, _verdict = operands(kind, 140, 90, 520)
    first, _ = multiply(place, a, b)
    for _ in range(3):
        np.testing.assert_array_equal(multiply(place, a, b)[0], first)


@needs("emulator")
@pytest.mark.parametrize("order", ["reverse", "shuffle"])
@pytest.mark.parametrize("kind", ["normal", "wide", "NaN"])
def test_thread_order_does_not_matter(kind, order):
    a, b, _verdict = operands(kind, 133, 66, 600)
    plain = multiply((open_device("emulator"), "mma"), a, b, layout="nt")
    other = multiply((open_device("emulator", order=order, seed=5), "mma"), a, b, layout="nt")
    np.testing.assert_array_equal(plain[0], other[0])
    np.testing.assert_array_equal(plain[1], other[1])
