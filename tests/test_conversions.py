"""Products on one GPU of arrays that no kernel reads or writes as they lie, with NumPy in the place
of a GPU, and on one."""

import contextlib
import itertools
from types import SimpleNamespace

import numpy as np
import pytest
from hybrid_gemm.execution.single_gpu import SingleGpuExecutor
from hypothesis import given
from hypothesis import strategies as st
from support.arrays import LIES, PARTS_OF_C, integers
from support.devices import needs

import hybrid_gemm as hg

SIDES = 5, 7, 6
DTYPES = "float32", "float64", "float16", "int8", "int16", "int32", "int64"
WAYS = {
    **LIES, "steps in columns": lambda x: np.repeat(np.asfortranarray(x), 2, 0)[::2],
}  # fmt: skip


class Gpu(np.ndarray):
    """A CuPy array of GPU 0, as far as products ask."""

    @property
    def data(self):
        return SimpleNamespace(ptr=self.ctypes.data, device_id=0)


def there(x, how):
    """An array equal to `x` that lies so."""
    made = WAYS[how](x).view(Gpu)
    np.testing.assert_array_equal(made, x)
    return made


@pytest.fixture(scope="module")
def gpu():
    """An executor on that GPU. A product that is started takes operands of one dtype in rows or
    columns, and an `out` in rows."""
    made = SingleGpuExecutor.__new__(SingleGpuExecutor)
    made.started = 0

    def bound(variant, a, b, c, problem):
        def call(a, b, c, stream):
            made.started += 1
            for x in (a, b):
                assert x.dtype == problem.operands and (x.strides[0] == x.itemsize or
                                                        x.strides[1] == x.itemsize)  # fmt: skip
            assert c.strides[1] == c.itemsize and c.dtype.name in (problem.dtype, problem.operands)
            product = a.astype(problem.dtype) @ b.astype(problem.dtype)
            added = c * c.dtype.type(problem.beta) if problem.beta else 0
            c[...] = problem.alpha * product + added

        return call

    made.plans = SimpleNamespace(
        options=SimpleNamespace(max_device_memory=None, algorithm="ordinary"),
        settle=lambda problem: problem,
        alone=lambda *given: True,
        rivals=lambda *given: [],
        most_hosted=32 << 20,
    )
    made.device = SimpleNamespace(
        is_current=lambda: True, preparable=lambda *given: False,
        cp=SimpleNamespace(
            asarray=lambda x: x.view(Gpu),
            cuda=SimpleNamespace(Device=lambda ordinal: contextlib.nullcontext()),
        ),
    )  # fmt: skip
    made.array, made.ordinal, made.known, made.checked = Gpu, 0, {}, None
    made.current = lambda ordinal: SimpleNamespace(ptr=7)
    made.stream = lambda: SimpleNamespace(
        cupy=SimpleNamespace(ptr=7),
        capturing=lambda: False,
        unrestricted=contextlib.nullcontext,
        start=lambda launches: launches(),
    )
    made._bound = bound
    return made


def place(data, dtype):
    """Where the product goes: None or an array that lies so."""
    how = data.draw(st.sampled_from((None, *WAYS)))
    return how and there(np.full((SIDES[0], SIDES[1]), 99).astype(dtype), how)


@given(st.data())
def test_any_arrays_of_one_gpu_are_multiplied_there(gpu, data):
    """In the dtype that NumPy gives them, without a plan."""
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    (m, n, k), kinds = SIDES, st.sampled_from(DTYPES)
    ways = st.sampled_from([*WAYS])
    a, b = (
        there(rng.integers(-3, 4, sides).astype(data.draw(kinds)), data.draw(ways))
        for sides in ((m, k), (k, n))
    )
    trans_a, trans_b = data.draw(st.booleans()), data.draw(st.booleans())
    dtype = np.result_type(a, b)
    out, beta, c = place(data, dtype), 0, None
    if data.draw(st.booleans()):
        beta = 2
        c = out if out is not None and data.draw(st.booleans()) else there(
            rng.integers(-3, 4, (m, n)).astype(dtype), data.draw(ways)
        )  # fmt: skip
        if c is not out:
            c = c[data.draw(st.sampled_from(PARTS_OF_C))]
    wanted = 3 * (a.astype(float) @ b.astype(float)) + (beta * c.astype(float) if beta else 0)
    started, before = gpu.started, [x.copy() for x in (a, b)]
    got = gpu.gemm(
        a.T if trans_a else a, b.T if trans_b else b, c, 3, beta, trans_a, trans_b, out
    )  # fmt: skip
    if got is None:  # out meets C: never here
        raise AssertionError((a.strides, b.strides, out is not None and out.strides))
    assert gpu.started == started + 1
    assert got is out if out is not None else type(got) is Gpu
    assert got.dtype == dtype
    np.testing.assert_array_equal(got, wanted.astype(dtype))
    np.testing.assert_array_equal(before[0], a)
    np.testing.assert_array_equal(before[1], b)


def test_copies_keep_to_the_memory_given(gpu, rng):
    a, b = (there(integers(rng, s), "steps") for s in ((5, 6), (6, 7)))
    options = gpu.plans.options
    for most, taken in ((4 * (30 + 2 * 42 + 35), True), (4 * (30 + 2 * 42 + 35) - 1, False)):
        options.max_device_memory = most
        gpu.known.clear()
        assert (gpu.gemm(a, b) is not None) == taken
    options.max_device_memory = None
    gpu.known.clear()


@pytest.mark.parametrize("of_host", ["A", "B"])
def test_a_small_array_of_the_host_is_brought(gpu, of_host, rng):
    a, b = integers(rng, (5, 6)), integers(rng, (6, 7))
    x, y = (v if name == of_host else there(v, "steps") for name, v in (("A", a), ("B", b)))
    got = gpu.gemm(x, y, None, 1, 0, False, False, None)
    assert type(got) is Gpu
    np.testing.assert_array_equal(got, a @ b)
    assert gpu.gemm(x, y, None, 1, 0, False, False, np.ones((5, 7), "f4")) is None
    wide = a.astype("longdouble"), there(b, "rows")  # which CuPy has not
    assert gpu.gemm(*wide, None, 1, 0, False, False, None) is None
    large = np.broadcast_to(np.float32(1), (6, 2 << 20)) if of_host == "B" else None
    if large is not None:
        assert gpu.gemm(x, large, None, 1, 0, False, False, None) is None


@pytest.mark.parametrize("dtype", ["f8", "f2", "c8"])
@pytest.mark.parametrize("how", WAYS)
def test_a_place_of_another_dtype_gets_the_product_cast(gpu, dtype, how, rng):
    a, b = integers(rng, (5, 6)), integers(rng, (6, 7))
    out = there(np.full((5, 7), 9).astype(dtype), how)
    assert gpu.gemm(there(a, "rows"), there(b, how), None, 2, 0, False, False, out) is out
    np.testing.assert_array_equal(out, 2 * (a @ b))


@pytest.mark.parametrize("sides", [(5, 6, 0), (0, 6, 3), (5, 0, 3), (0, 0, 0), (5, 6, 3)])
@pytest.mark.parametrize("beta", [0, 1, -3])
@pytest.mark.parametrize("how", WAYS)
def test_what_is_not_read_is_not_multiplied(gpu, sides, beta, how, rng):
    """With k = 0, and with alpha = 0."""
    m, n, k = sides
    a, b, c = (np.full(s, np.nan, "f4").view(Gpu) for s in ((m, k), (k, n), (m, n)))
    alpha, started, plain = 0 if k else 1, gpu.started, integers(rng, (m, n))
    c[...] = plain if beta else np.nan
    given = c if beta else None
    if m * n:
        out = there(plain if beta else np.full((m, n), np.nan, "f4"), how)
        got = gpu.gemm(a, b, out if beta else None, alpha, beta, False, False, out)
        if how != "backwards":  # of which a run looks whether it overlaps
            assert got is out and gpu.started == started
            np.testing.assert_array_equal(out, beta * plain)
    got = gpu.gemm(a, b, given, alpha, beta, False, False, None)
    assert gpu.started == started
    np.testing.assert_array_equal(got, beta * plain)


def test_an_inf_of_c_stays_in_its_part(gpu):
    a, c = np.ones((2, 0), "c8").view(Gpu), np.array([[np.inf + 1j, 2]] * 2, "c8").view(Gpu)
    assert gpu.gemm(a, a.T, c, 1, 2.0, False, False, None) is None  # a run multiplies parts
    np.testing.assert_array_equal(gpu.gemm(a, a.T, c, 1, 1.0, False, False, None), c)


@pytest.mark.parametrize("case", ["A", "C", "whole", "itself", "bool", "beta", "vector"])
def test_what_is_wrong_or_warned_of_is_left_to_a_run(gpu, case):
    a, b = (there(np.ones(s, "f4"), "steps") for s in ((5, 6), (6, 7)))
    out, c, factors = there(np.ones((5, 7), "f4"), "columns"), None, (1, 0)
    if case == "A":
        whole = there(np.ones((10, 20), "f4"), "rows")
        a, out = whole[:5, :12:2], whole[:5, 1:15:2]
        assert gpu.gemm(a, b, None, 1, 0, False, False, out) is out  # between the elements of A
        out = whole[:5, 2:16:2]
    elif case == "C":
        whole = there(np.ones((10, 14), "f4"), "rows")
        c, out, factors = whole[:5, ::2], whole[1:6, ::2], (1, 1)
    elif case == "whole":
        out = out.astype("i4")
    elif case == "itself":
        out = np.lib.stride_tricks.as_strided(out, strides=(4, 4), subok=True)
    elif case == "bool":
        b = b.astype(bool)
    elif case == "beta":
        c, out = out, None
    else:
        b = b[:, 0]
    started = gpu.started
    try:
        assert gpu.gemm(a, b, c, *factors, False, False, out) is None
    except (hg.errors.UsageError, hg.errors.DTypeError):
        assert case in ("bool", "vector")
    assert gpu.started == started


DTYPES_OF_TWO = [
    ("float32", "float32"), ("float16", "float32"), ("int8", "int8"), ("float64", "float32"),
    ("float16", "float16"), ("bfloat16", "bfloat16"), ("complex64", "complex64"),
    ("complex64", "float32"),
]  # fmt: skip


@needs("cuda")
@pytest.mark.parametrize("options", [{}, {"kernel": "own"}, {"compute": "fp32x3"}])
@pytest.mark.parametrize("dtypes", DTYPES_OF_TWO)
def test_on_a_gpu(dtypes, options, rng, monkeypatch):
    """All ways to lie, in turns with the places of C; nothing takes a plan."""
    import cupy

    if "compute" in options and dtypes[0] != "float32":
        pytest.skip("fp32x3 is for float32")
    m, n, k = 70, 90, 50
    one, other = [np.dtype(x) for x in dtypes]
    dtype = np.result_type(one, other)

    def drawn(dtype, *sides):
        x = integers(rng, sides)
        return (x + 1j * integers(rng, sides) if dtype.kind == "c" else x).astype(dtype)

    a, b, c = drawn(one, m, k), drawn(other, k, n), drawn(dtype, m, n)
    wide = complex if dtype.kind == "c" else float
    product = a.astype(wide) @ b.astype(wide)
    wanted = (2 * product + 3 * c.astype(wide)).astype(dtype)

    def lying(x, how):
        bits = np.dtype(f"u{x.itemsize}")
        view = cupy.asarray(x.view(bits))
        if how == "columns":
            view = cupy.asfortranarray(view)
        elif how == "steps":
            whole = cupy.zeros((2 * x.shape[0], 3 * x.shape[1]), bits)
            whole[::2, ::3] = view
            view = whole[::2, ::3]
        elif how == "steps in columns":
            whole = cupy.zeros((2 * x.shape[0], x.shape[1]), bits, order="F")
            whole[::2] = view
            view = whole[::2]
        elif how == "backwards":
            view = view[::-1, ::-1].copy()[::-1, ::-1]
        return view.view(x.dtype)

    with hg.Runner(device="cuda", gpus=[0], **options) as runner:
        monkeypatch.setattr(runner, "_run", None)
        for i, how in enumerate(WAYS):
            x, y, z = lying(a, how), lying(b, [*WAYS][-1 - i]), lying(c, how)
            got = runner.gemm(x, y, z, alpha=2, beta=3)
            np.testing.assert_array_equal(got.get(), wanted)
            got = runner.gemm(x, y, z, alpha=2, beta=3, out=z)
            assert got is z and got.dtype == dtype
            np.testing.assert_array_equal(got.get(), wanted)
            assert runner.gemm(x, y, out=z) is z
            np.testing.assert_array_equal(z.get(), product.astype(dtype))
            if dtype.name != "bfloat16" and dtype.kind != "c":
                for pair in (x.get(), y), (x, y.get()):
                    got = runner.gemm(*pair)
                    assert type(got) is cupy.ndarray
                    np.testing.assert_array_equal(got.get(), z.get())


@needs("cuda")
@pytest.mark.parametrize("library", ["cupy", "torch"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "float64", "complex64"])
@pytest.mark.parametrize("part", PARTS_OF_C, ids=str)
def test_a_c_that_broadcasts_is_added_on_a_gpu(part, dtype, library, rng, monkeypatch):
    """As a bias of columns or rows is, again and again."""
    module = pytest.importorskip(library)
    m, n, k = 70, 90, 50
    drawn = [integers(rng, s).astype(dtype) for s in ((m, k), (k, n), (m, n))]
    there = module.asarray if library == "cupy" else lambda x: module.asarray(x, device="cuda")
    a, b, c = map(there, drawn)
    wanted = 2 * (drawn[0] @ drawn[1]) + 3 * drawn[2][part]
    hg.gemm(a, b)
    monkeypatch.setattr(hg.Runner, "_run", None)
    for _ in range(4):
        got = hg.gemm(a, b, c[part], alpha=2, beta=3)
        assert type(got) is type(a)
        np.testing.assert_array_equal(got.tolist(), wanted.tolist())
    out = module.empty_like(c)
    assert hg.gemm(a, b, c[part], alpha=2, beta=3, out=out) is out
    np.testing.assert_array_equal(out.tolist(), wanted.tolist())
    with pytest.raises(ValueError, match="does not broadcast"):
        hg.gemm(a, b, c[:, :2], beta=1)


@needs("cuda")
@pytest.mark.parametrize("options", [{}, {"kernel": "own"}, {"compute": "fp32x3"}], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64", "complex64"])
def test_parts_off_16_bytes_on_a_gpu(dtype, options, rng):
    """Each place is prepared for itself, and the bits are those of its first call."""
    import cupy

    if "compute" in options and dtype != "float32":
        pytest.skip("fp32x3 is for float32")
    of = np.dtype(dtype)
    bits = np.dtype("u8") if of.kind == "c" else np.dtype(f"u{of.itemsize}")
    m, n, k = 70, 90, 50
    drawn = [integers(rng, s).astype(of) for s in ((m, k), (k, n))]
    wanted = (drawn[0].astype("c16") @ drawn[1].astype("c16")).real.astype("f4")

    def part(x, rows, cols):
        whole = cupy.zeros((x.shape[0] + 9, x.shape[1] + 23), bits)
        view = whole[rows : rows + x.shape[0], cols : cols + x.shape[1]]
        view[...] = cupy.asarray(x.view(bits))
        return view.view(of)

    c = np.zeros((m, n), of)
    for _ in range(12):
        at = rng.integers(0, 8, (3, 2))
        x, y, z = (part(v, *place) for v, place in zip((*drawn, c), at, strict=True))
        for _ in range(4):
            z.view(bits)[...] = 0
            assert hg.gemm(x, y, out=z, **options) is z
            got = z.get().astype("c16").real
            np.testing.assert_array_equal(got, wanted, str(at))
            new = hg.matmul(x, y, **options).get().astype("c16").real
            np.testing.assert_array_equal(new, wanted, str(at))


@needs("cuda")
@pytest.mark.parametrize("dtype", ["complex64", "complex128"])
@pytest.mark.parametrize("options", [{}, {"kernel": "own"}, {"algorithm": "3m"}], ids=str)
def test_complex_matrices_on_a_gpu(options, dtype, rng):
    """In all layouts, with all factors, conjugated or not; with cuBLAS where none is asked for."""
    import cupy

    m, n, k = 33, 47, 29

    def drawn(*sides):
        return (integers(rng, sides) + 1j * integers(rng, sides)).astype(dtype)

    ops = {False: lambda x: x, True: lambda x: x.T, "c": lambda x: x.T.conj()}
    for order_a in "CF":
        for order_b in "CF":
            for trans_a, op_a in ops.items():
                for trans_b, op_b in ops.items():
                    a = drawn(k, m) if trans_a else drawn(m, k)
                    b = drawn(n, k) if trans_b else drawn(k, n)
                    c, alpha, beta = drawn(m, n), 2 - 1j, 1 + 1j
                    x, y = cupy.asarray(a, order=order_a), cupy.asarray(b, order=order_b)
                    given = {"trans_a": trans_a, "trans_b": trans_b, **options}
                    product = op_a(a) @ op_b(b)
                    for _ in range(3):
                        z = cupy.asarray(c)
                        got = hg.gemm(x, y, z, alpha=alpha, beta=beta, **given)
                        np.testing.assert_array_equal(got.get(), alpha * product + beta * c)
                        assert hg.gemm(x, y, z, beta=1, out=z, **given) is z
                        np.testing.assert_array_equal(z.get(), product + c)


@needs("cuda")
def test_gradients_that_were_expanded(rng):
    """As `sum().backward()` leaves them: no kernel reads them as they lie."""
    torch = pytest.importorskip("torch")
    import hybrid_gemm.torch as ours

    a, b = (torch.asarray(integers(rng, s), device="cuda") for s in ((40, 30), (30, 20)))
    for _ in range(4):
        x, y = a.clone().requires_grad_(), b.clone().requires_grad_()
        ours.gemm(x, y).sum().backward()
        np.testing.assert_array_equal(x.grad.cpu(), (torch.ones(40, 20, device="cuda") @ b.T).cpu())
        np.testing.assert_array_equal(y.grad.cpu(), (a.T @ torch.ones(40, 20, device="cuda")).cpu())
    ones = torch.ones((), device="cuda").expand(40, 30)
    for _ in range(4):
        np.testing.assert_array_equal(hg.gemm(ones, b).cpu(), (torch.ones_like(a) @ b).cpu())


@needs("cuda")
@pytest.mark.parametrize("large", [False, True])
def test_places_and_factors_of_the_host_on_a_gpu(large, rng, monkeypatch):
    """Also where arrays take a run."""
    if large:
        monkeypatch.setattr("hybrid_gemm.execution.plan_maker.HOSTED_BYTES", {"pinned": 0})
        monkeypatch.setattr("hybrid_gemm.execution.hosted._CAST_BYTES", 0)
    a, b = integers(rng, (90, 50)), integers(rng, (50, 70))
    with hg.Runner(device="cuda") as runner:
        for _ in range(3):
            for dtype, order in itertools.product(("f4", "f8", "f2", "c8"), "CF"):
                out = np.full((90, 70), 9, dtype, order)
                assert runner.gemm(a, b, alpha=np.array(2.0), out=out) is out
                np.testing.assert_array_equal(out, 2 * (a @ b))
                assert runner.gemm(b.T, a.T, out=out.T).base is not None
                np.testing.assert_array_equal(out, a @ b)
            out = np.asfortranarray(integers(rng, (90, 70)))
            wanted = a @ b + 3 * out
            assert runner.gemm(a.T.copy(), b, out, beta=3, trans_a=True, out=out) is out
            np.testing.assert_array_equal(out, wanted)
            with pytest.raises(ValueError, match="out has shape"):
                runner.gemm(a, b, out=out.T)
            with pytest.raises(ValueError, match="out overlaps"):
                square = np.asfortranarray(integers(rng, (50, 50)))
                runner.gemm(square, b[:, :50], out=square)


@needs("cuda")
def test_products_of_nothing_on_a_gpu(rng, monkeypatch):
    import cupy

    monkeypatch.setattr(hg.Runner, "_run", lambda *x, **y: pytest.fail("by a plan"))
    c = cupy.asarray(integers(rng, (30, 40)))
    a, b = cupy.full((30, 20), np.nan, "f4"), cupy.full((20, 40), np.nan, "f4")
    for x, y, alpha in ((a, b, 0), (a[:, :0], b[:0], 2)):
        for _ in range(3):
            assert not hg.gemm(x, y, alpha=alpha).any()
            np.testing.assert_array_equal(hg.gemm(x, y, c, alpha=alpha, beta=3).get(), 3 * c.get())
            out = c.T.copy().T
            assert hg.gemm(x, y, out, alpha=alpha, beta=-1, out=out) is out
            np.testing.assert_array_equal(out.get(), -c.get())


@needs("cuda")
@pytest.mark.parametrize("bad", [None, np.inf, np.nan])
def test_complex_stacks_of_the_host_on_a_gpu(bad, rng):
    a, b = (rng.integers(-2, 3, (2, *s)).astype("f4") for s in ((6, 30, 20), (6, 20, 40)))
    a, b = ((x[0] + 1j * x[1]).astype("c8") for x in (a, b))
    if bad is not None:
        a[2, 3, 4] = bad
    for _ in range(3):
        got = hg.matmul(a, b, device="cuda")
        each = np.stack([hg.gemm(x, y, device="cuda") for x, y in zip(a, b, strict=True)])
        np.testing.assert_array_equal(got, each)
        if bad is None:
            np.testing.assert_array_equal(got, a @ b)
