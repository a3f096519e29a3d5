"""Tensor-core kernels of Hopper: exact with whole numbers whatever the shape, layout and place of
C; and what is refused."""

import numpy as np
import pytest
from support.devices import on

from hybrid_gemm import catalog, devices
from hybrid_gemm.catalog import TENSOR_TYPES
from hybrid_gemm.devices.cuda import nvrtc, tensor_maps
from hybrid_gemm.errors import KernelError, UnavailableError, UsageError
from hybrid_gemm.kernel_choice import tensor_cores
from hybrid_gemm.kernel_choice.tensor_cores import cut

SHAPES = [(1, 1, 1), (64, 64, 16), (130, 70, 0), (300, 333, 100), (129, 257, 65), (2500, 1700, 300)]
WGMMA = catalog.get("wgmma")
VARIANTS = WGMMA.variants()
PLAIN = [v for v in VARIANTS if v.params["TERMS"] == 1]
SPLIT = [v for v in VARIANTS if v.params["TERMS"] == 3]
NARROW = [v for v in VARIANTS if v.params["OUT"] == 2]
CUTTING = [v for v in VARIANTS if v.most_shares > 1]
LAST = [v for v in VARIANTS if v.cuts_last]
OF_EACH_KIND = [PLAIN[0], NARROW[0], SPLIT[0]]


@pytest.fixture
def last_cut(monkeypatch):
    """The last tiles are cut wherever that shortens the busiest block's work at all."""
    monkeypatch.setattr(tensor_cores, "_PARTS_US", -1e9)
    tensor_cores.cut.cache_clear()
    yield
    tensor_cores.cut.cache_clear()


@pytest.fixture(params=[on("cuda")], scope="module")
def hopper(request):
    device = devices.open_devices(request.param, 1, gpus=[0])[0]
    if device.arch != "sm_90":
        pytest.skip(f"wgmma is sm_90a's; this is {device.arch}")
    return device


class Problem:
    """Operands of small whole numbers in poisoned surroundings, and C as NumPy has it."""

    def __init__(self, device, variant, dtype, layouts, shape, *, alpha=1, beta=0, left=0, pad=0):
        self.device, cp = device, device.cp
        m, n, k = shape
        p, rng = variant.params, np.random.default_rng(0)
        parts, most = (p["TERMS"] + 1) // 2, 3 if p["OUT"] == 4 else 1
        x, y = (rng.integers(-most, most + 1, (parts, s, k)).astype("f4") for s in (m, n))
        self.expected = x[0].astype("f8") @ y[0].T.astype("f8")
        self.exponents = None, None
        if parts == 2:
            self.expected += x[0].astype("f8") @ y[1].T + x[1].astype("f8") @ y[0].T
            rows, cols = (rng.integers(-3, 4, s).astype("i4") for s in (m, n))
            self.expected *= 2.0 ** rows[:, None] * 2.0**cols
            self.exponents = cp.asarray(rows), cp.asarray(cols)
        self.a = self.stored(x if layouts[0] == "n" else x.transpose(0, 2, 1), dtype)
        self.b = self.stored(y if layouts[1] == "t" else y.transpose(0, 2, 1), dtype)
        self.out = np.dtype("f4") if p["OUT"] == 4 else np.dtype("u2")
        self.dtype = dtype
        old = rng.integers(-3, 4, (m, n)).astype("f4")
        self.expected = alpha * self.expected + (beta * old if beta else 0)
        poison = 0x7FC1 if self.out == "u2" else np.nan
        self.before = np.full((m + 2, left + n + pad), poison, self.out)
        self.place = np.s_[1:-1, left : left + n]
        if beta:
            self.before[self.place] = self.encoded(old)
        self.whole = cp.asarray(self.before)
        self.c = self.whole[self.place]
        self.call = tensor_maps.bind_tensor(
            device, variant, dtype, self.a, self.b, self.c, k=k, layouts=layouts,
            alpha=alpha, beta=beta,
        )  # fmt: skip

    def encoded(self, x):
        if self.out == "f4":
            return x
        if self.dtype == "float16":
            return x.astype("f2").view("u2")
        return (x.view("u4") >> 16).astype("u2")  # exact for these

    def stored(self, x, dtype):
        """On the device with a pitch of whole 16 bytes and NaN beyond each row."""
        parts, height, width = x.shape
        size = TENSOR_TYPES[dtype]
        pitch = (width * size // 16 + 2) * 16 // size
        if dtype == "bfloat16":
            whole = np.full((parts, height, pitch), 0x7FC0, "u2")
            whole[:, :, :width] = x.astype("f4").view("u4") >> 16
        else:
            whole = np.full((parts, height, pitch), np.nan, "f2" if size == 2 else "f4")
            whole[:, :, :width] = x
        return self.device.cp.asarray(whole)[:, :, :width]

    def run(self, **options):
        stream = self.device.stream()
        self.device.cp.cuda.Device().synchronize()
        self.call(self.a, self.b, self.c, stream, self.exponents, **options)
        stream.synchronize()
        return self.whole.get()

    def check(self):
        whole = self.run()
        got = whole[self.place].copy()
        whole[self.place] = self.before[self.place]
        assert whole.tobytes() == self.before.tobytes()  # nothing around C was written
        if self.out == "u2" and self.dtype == "float16":
            np.testing.assert_array_equal(got.view("f2"), self.expected.astype("f2"))
        elif self.out == "u2":
            wide = (got.astype("u4") << 16).view("f4")
            assert np.all(np.abs(wide - self.expected) <= np.abs(self.expected) * 2.0**-8)
        else:
            np.testing.assert_array_equal(got, self.expected)


def names(variants):
    return [" ".join(map(str, v.params.values())) for v in variants]


@pytest.mark.parametrize("variant", VARIANTS, ids=names(VARIANTS))
def test_every_variant_is_exact(hopper, variant):
    dtypes = TENSOR_TYPES if variant.params["OUT"] == 4 else ("float16", "bfloat16")
    for dtype in dtypes:
        for shape in SHAPES:
            Problem(hopper, variant, dtype, "nt", shape).check()


@pytest.mark.parametrize("variant", NARROW, ids=names(NARROW))
@pytest.mark.parametrize("k", [0, 1, 64, 129, 640])
def test_a_tile_of_c_is_stored_while_the_next_is_multiplied(hopper, variant, k):
    """Two or three tiles a block and more, of fewer steps than there are stages, and of more."""
    Problem(hopper, variant, "float16", "nt", (3000, 2900, k), pad=4).check()


@pytest.mark.parametrize("layouts", catalog.LAYOUTS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_operands_across_k(hopper, dtype, layouts):
    for variant in PLAIN:
        for shape in SHAPES:
            Problem(hopper, variant, dtype, layouts, shape, pad=-shape[1] % 8).check()


# In 16 bits C begins all its lines on 16 bytes, as TMA needs, where it is 512 wide in the first of
# these places, 333 in the third and 70 in the last; nowhere else.
@pytest.mark.parametrize(("left", "pad"), [(0, 0), (1, 2), (8, 3), (8, 2)])
@pytest.mark.parametrize(("alpha", "beta"), [(2, -1), (1, 3), (0, 1), (-1, 0)])
def test_alpha_beta_and_any_place_of_c(hopper, alpha, beta, left, pad):
    for variant in OF_EACH_KIND:
        for shape in ((300, 333, 100), (256, 512, 64), (130, 70, 0)):
            Problem(
                hopper, variant, "float16", "nt", shape,
                alpha=alpha, beta=beta, left=left, pad=pad,
            ).check()  # fmt: skip


# Shapes of few tiles and a long k, off every tile and step, each with alpha, beta and C's place.
LONG = [
    ((1, 1, 5001), (1, 0, 0, 0)),
    ((88, 16, 20011), (-2, 0.5, 1, 2)),
    ((130, 70, 4099), (1, -1, 0, 2)),
    ((300, 333, 6000), (1, 0, 0, 3)),
    ((330, 600, 9000), (2, 1, 8, 0)),
]


@pytest.mark.parametrize("variant", CUTTING, ids=names(CUTTING))
@pytest.mark.parametrize("dtype", TENSOR_TYPES)
def test_shares_of_k_are_exact(hopper, variant, dtype):
    p = variant.params
    if dtype == "tfloat32" and p["OUT"] == 2:
        pytest.skip("C is of float32 there")
    layouts = catalog.LAYOUTS if dtype == "float16" and p["OUT"] == 4 else ["nt"]
    for (m, n, k), (alpha, beta, left, pad) in LONG:
        shares = cut(variant, m, n, k, dtype, hopper.processors)
        assert shares.shares > 1 and (shares.shares - 1) * shares.steps < variant.steps(k, dtype)
        for layout in layouts:
            problem = Problem(
                hopper, variant, dtype, layout, (m, n, k),
                alpha=alpha, beta=beta, left=left, pad=pad,
            )  # fmt: skip
            check_saying(problem, f"{dtype} {layout} {m} {n} {k} {shares} {alpha} {beta} {left}")


def check_saying(problem, what):
    try:
        problem.check()
    except AssertionError as error:
        raise AssertionError(f"{what}: {error}") from None


@pytest.mark.parametrize("most", [2, 3, 7, 61])
def test_any_number_of_shares_is_exact(hopper, most):
    for variant in CUTTING:
        few = WGMMA.variant({**variant.params, "SHARES": most})
        for shape in ((70, 130, 9000), (64, 64, 64 * 61), (200, 20, 8192)):
            said = cut(few, *shape, "float16", hopper.processors)
            assert 1 < said.shares <= most
            check_saying(Problem(hopper, few, "float16", "nt", shape), f"{few} {shape} {said}")


@pytest.mark.parametrize("variant", CUTTING, ids=names(CUTTING))
def test_a_block_makes_several_shares(hopper, variant, monkeypatch):
    """On a device of few multiprocessors: the ring goes on from one share to the next."""
    several = False
    for processors in (5, 7, 11, 13):
        monkeypatch.setattr(hopper, "processors", processors)
        shares = cut(variant, 130, 300, 9000, "float16", processors)
        tiles = -(-130 // variant.tile[0]) * -(-300 // variant.tile[1])
        several |= shares.shares > 1 and tiles * shares.shares > 2 * processors
        problem = Problem(hopper, variant, "float16", "nt", (130, 300, 9000))
        check_saying(problem, f"{processors} {shares}")
    assert several


def test_shares_give_the_same_bits_every_time_and_wait_for_each_other(hopper):
    """Products of two shapes in turn use one workspace, and each starts early."""
    cp, rng = hopper.cp, np.random.default_rng(3)
    stream, made = hopper.stream(), []
    for variant in CUTTING:
        if variant.params["TERMS"] == 3 or variant.params["OUT"] == 2:
            continue
        for m, n, k in ((100, 50, 30000), (260, 140, 5000)):
            a, b = (cp.asarray(rng.standard_normal((1, s, k)).astype("f2")) for s in (m, n))
            results = [cp.full((m, n), np.nan, "f4") for _ in range(6)]
            call = tensor_maps.bind_tensor(hopper, variant, "float16", a, b, results[0], k=k)
            made.append((variant, call, a, b, results))
    cp.cuda.Device().synchronize()
    for i in range(6):
        for _variant, call, a, b, results in made:
            call(a, b, results[i], stream)
    stream.synchronize()
    for variant, _call, a, b, results in made:
        expected = a[0].get().astype("f8") @ b[0].get().T.astype("f8")
        first = results[0].get()
        assert np.abs(first - expected).max() < 1e-5 * np.abs(expected).max(), variant
        assert all(x.get().tobytes() == first.tobytes() for x in results), variant


# Multiprocessors, shapes whose last round is then cut, and alpha, beta and places of C.
RAGGED = [
    (5, (700, 900, 1000), (1, 0, 0, 0)),
    (7, (900, 300, 1099), (-2, 0.5, 1, 2)),
    (13, (2000, 600, 300), (1, -1, 0, 4)),
    (6, (1100, 1100, 640), (2, 1, 8, 3)),
]


@pytest.mark.parametrize("variant", LAST, ids=names(LAST))
@pytest.mark.parametrize("dtype", TENSOR_TYPES)
def test_last_tiles_that_are_cut_are_exact(hopper, variant, dtype, last_cut, monkeypatch):
    if dtype == "tfloat32" and variant.params["OUT"] == 2:
        pytest.skip("C is of float32 there")
    some = False
    for processors, shape, (alpha, beta, left, pad) in RAGGED:
        monkeypatch.setattr(hopper, "processors", processors)
        said = cut(variant, *shape, dtype, processors)
        some |= said.tiles > 0
        problem = Problem(
            hopper, variant, dtype, "nt", shape, alpha=alpha, beta=beta, left=left, pad=pad
        )
        check_saying(problem, f"{dtype} {shape} {said} {alpha} {beta} {left}")
    assert some


@pytest.mark.parametrize("layouts", ["nn", "tt"])
def test_last_tiles_of_operands_across_k_are_exact(hopper, layouts, last_cut, monkeypatch, rng):
    cp = hopper.cp
    for variant in LAST:
        if variant.params["TERMS"] == 3 or variant.params["OUT"] == 2:
            continue
        for processors, (m, n, k), _ in RAGGED:
            monkeypatch.setattr(hopper, "processors", processors)
            m, n, k = (-(-x // 4) * 4 for x in (m, n, k))  # rows on 16 bytes
            x, y = (rng.integers(-3, 4, s).astype("f4") for s in ((m, k), (k, n)))
            a, b = (z if layouts == "nn" else np.ascontiguousarray(z.T) for z in (x, y))
            a, b, c = cp.asarray(a)[None], cp.asarray(b)[None], cp.full((m, n), np.nan, "f4")
            call = tensor_maps.bind_across(
                hopper, variant, a, b, c, k=k, layouts=layouts, alpha=2, beta=0
            )
            stream = hopper.stream()
            cp.cuda.Device().synchronize()
            for _ in range(2):
                call(a, b, c, stream)
                stream.synchronize()
                np.testing.assert_array_equal(c.get(), 2 * x @ y, f"{variant} {m} {n} {k}")


def test_last_tiles_have_the_same_bits_every_time(hopper, last_cut):
    """Products of two shapes in turn use one workspace; each starts early, and some do nothing."""
    cp, rng = hopper.cp, np.random.default_rng(3)
    stream, made = hopper.stream(), []
    verdict = cp.array([2], "i4")
    for variant in LAST:
        if variant.params["TERMS"] == 3:
            continue
        out = "f4" if variant.params["OUT"] == 4 else "f2"
        for m, n, k in ((1900, 2200, 1000), (2900, 3100, 304)):
            a, b = (cp.asarray(rng.standard_normal((1, s, k)).astype("f2")) for s in (m, n))
            results = [cp.full((m, n), np.nan, out) for _ in range(6)]
            call = tensor_maps.bind_tensor(hopper, variant, "float16", a, b, results[0], k=k)
            made.append((variant, call, a, b, results))
    assert any(cut(v, *x[0].shape, 1000, "float16", hopper.processors).tiles
               for v, *_, x in made)  # fmt: skip
    cp.cuda.Device().synchronize()
    for i in range(6):
        for _variant, call, a, b, results in made:
            call(a, b, results[i], stream, verdict=verdict, wanted=1)
            call(a, b, results[i], stream)
    stream.synchronize()
    for variant, _call, a, b, results in made:
        expected = a[0].get().astype("f8") @ b[0].get().T.astype("f8")
        first = results[0].get()
        least = 1e-5 if first.dtype == "f4" else 1e-3
        assert np.abs(first - expected).max() < least * np.abs(expected).max(), variant
        assert all(x.get().tobytes() == first.tobytes() for x in results), variant


@pytest.mark.parametrize("variant", NARROW, ids=names(NARROW))
def test_products_in_a_row_wait_for_each_other(hopper, variant, rng):
    """Each reads what the one before wrote, and writes what that one read."""
    cp, n, times = hopper.cp, 1000, 30
    order, x = rng.permutation(n), rng.integers(-9, 10, (n, n)).astype("f2")
    a = cp.asarray(np.eye(n, dtype="f2")[order])[None]
    here, there = cp.asarray(x), cp.full((n, n), np.nan, "f2")
    call = tensor_maps.bind_tensor(
        hopper, variant, "float16", a, here[None], there, k=n, layouts="nn", alpha=1, beta=0
    )
    stream = hopper.stream()
    cp.cuda.Device().synchronize()
    for _ in range(times):
        call(a, here[None], there, stream)
        here, there, x = there, here, x[order]
    stream.synchronize()
    np.testing.assert_array_equal(here.get(), x)


@pytest.mark.parametrize("shape", [(0, 70, 64), (130, 0, 64), (0, 0, 0)])
def test_an_empty_c_needs_no_launch(hopper, shape):
    for variant in OF_EACH_KIND:
        Problem(hopper, variant, "float16", "nt", shape).check()


@pytest.mark.parametrize("variant", SPLIT, ids=names(SPLIT))
def test_another_verdict_leaves_c_as_it_was(hopper, variant):
    problem = Problem(hopper, variant, "float16", "nt", (300, 333, 3000))
    verdict = hopper.cp.array([2], "i4")
    assert problem.run(verdict=verdict, wanted=0).tobytes() == problem.before.tobytes()
    assert problem.run(verdict=verdict, wanted=2).tobytes() != problem.before.tobytes()
    problem.check()


@pytest.mark.parametrize("variant", SPLIT, ids=names(SPLIT))
@pytest.mark.parametrize("dtype", ["float16", "tfloat32"])
@pytest.mark.parametrize("k", [4096, 32768])
def test_sums_leave_the_tensor_cores_in_time(hopper, variant, dtype, k):
    """On numbers of one sign, whole sums in the tensor cores' accumulators err by 2e-5, and one
    chain of fp32 sums by 3e-7 at the longer k; and the same bits come every time."""
    cp, (m, n) = hopper.cp, (256, 384)
    rng = np.random.default_rng(5)
    x, y = (rng.random((s, k)).astype("f4") for s in (m, n))

    def parts(z):
        if dtype == "float16":
            hi = z.astype("f2")
            return cp.asarray(np.stack([hi, (z - hi).astype("f2")]))
        hi = ((z.view("u4") + 0x1000) & 0xFFFFE000).view("f4")
        return cp.asarray(np.stack([hi, (((z - hi).view("u4") + 0x1000) & 0xFFFFE000).view("f4")]))

    a, b, results = parts(x), parts(y), []
    reference = x.astype("f8") @ y.T.astype("f8")
    for _ in range(3):
        c = cp.full((m, n), np.nan, "f4")
        call = tensor_maps.bind_tensor(hopper, variant, dtype, a, b, c, k=k)
        stream = hopper.stream()
        cp.cuda.Device().synchronize()
        call(a, b, c, stream)
        stream.synchronize()
        results.append(c.get())
    error = np.linalg.norm(results[0] - reference) / np.linalg.norm(reference)
    assert error < 2e-7
    assert results[0].tobytes() == results[1].tobytes() == results[2].tobytes()


# --- without a GPU --------------------------------------------------------------------------


def test_addresses_that_the_copy_engine_cannot_read_are_refused():
    with pytest.raises(UsageError, match="multiples of 16 bytes; found 0x1008"):
        tensor_maps.tensor_map("float16", 0x1008, (64, 64, 1), (128, 8192), (64, 64, 1))
    with pytest.raises(UsageError, match="multiples of 16 bytes"):
        tensor_maps.tensor_map("float16", 0x1000, (63, 64, 1), (126, 8064), (64, 64, 1))


def test_operands_that_do_not_fit_are_refused():
    a, b, c = (np.zeros(s, "f2") for s in ((1, 32, 64), (1, 48, 64), (32, 40)))
    with pytest.raises(UsageError, match=r"operand B is \(1, 48, 64\)"):
        tensor_maps.bind_tensor(None, PLAIN[0], "float16", a, b, c, k=64)
    with pytest.raises(UsageError, match="2 parts for m=32 n=40 k=64"):
        tensor_maps.bind_tensor(None, SPLIT[0], "float16", a, b[:, :40], c, k=64)


def test_products_that_run_one_after_the_other_do_not_compile():
    """ptxas serialises wgmma with a warning alone, where it cannot keep sums in registers."""
    try:
        nvrtc.version()
    except UnavailableError as error:
        pytest.skip(str(error))
    variant = PLAIN[0]
    source = variant.source("float16", "nt")
    begun = "multiply<BK / STEP>(sums, a + stage, b + stage, 0, 0, 0, true);"
    touched = source.replace(begun, begun + " sums[0] += 1;")  # nothing has waited for them
    assert touched != source
    with pytest.raises(KernelError, match=r"does not compile as meant for sm_90a: .*C75"):
        nvrtc.compile(touched, "sm_90a", "gemm_wgmma.cu")
