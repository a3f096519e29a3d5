"""Products on one GPU of arrays that no kernel reads or writes as they lie. The GPUs are played, or
one is there."""

import contextlib
import itertools

import numpy as np
import pytest
from support import late_gpus, played_runs
from support.arrays import LIES, PARTS_OF_C, copied, integers
from support.devices import needs
from support.emulation import needs_emulator

import hybrid_gemm as hg
from hybrid_gemm.arrays.strides import leading
from hybrid_gemm.devices.cuda.device import CudaDevice
from hybrid_gemm.errors import DTypeError, HybridGemmWarning, UsageError
from hybrid_gemm.programs import on_gpu
from hybrid_gemm.programs.planned import Plans

WAYS = {
    **LIES, "steps in columns": lambda x: np.repeat(np.asfortranarray(x), 2, 0)[::2],
}  # fmt: skip
gpus = played_runs.gpus


@pytest.fixture
def there(gpus):
    """Copies a matrix to the first of the played GPUs, to lie so there."""
    return lambda x, how="rows": copied(gpus.module, WAYS[how](x))


def one_gpu(**options):
    return hg.Runner(device="cuda", gpus=[0], kernel="own", **options)


@needs_emulator
@pytest.mark.parametrize("most", [4 * (30 + 2 * 42 + 35), 4 * (30 + 2 * 42 + 35) - 1])
def test_copies_keep_to_the_memory_given(most, there, rng, monkeypatch):
    a, b = (there(integers(rng, s), "steps") for s in ((5, 6), (6, 7)))
    planned = late_gpus.counted(monkeypatch, Plans, "multiply")
    with contextlib.suppress(MemoryError):  # of a plan, which finds even less
        one_gpu(max_device_memory=most).gemm(a, b)
    assert bool(planned) == (most % 2)


@needs_emulator
@pytest.mark.parametrize("of_host", ["A", "B"])
def test_a_small_array_of_the_host_is_brought(of_host, there, gpus, rng, no_plans):
    a, b = integers(rng, (5, 6)), integers(rng, (6, 7))
    x, y = (v if name == of_host else there(v, "steps") for name, v in (("A", a), ("B", b)))
    runner = one_gpu()
    for out in (None, there(np.zeros((5, 7), "f4"), "columns")):
        got = runner.gemm(x, y, out=out)
        assert type(got) is gpus.array and (out is None or got is out)
        np.testing.assert_array_equal(got.get(), a @ b)


@needs_emulator
@pytest.mark.parametrize("dtype", ["f8", "f2", "c8"])
def test_a_place_of_another_dtype_gets_the_product_cast(dtype, there, rng, no_plans):
    a, b = integers(rng, (5, 6)), integers(rng, (6, 7))
    with one_gpu() as runner:
        for how in WAYS:
            out = there(np.full((5, 7), 9).astype(dtype), how)
            assert runner.gemm(there(a), there(b, how), alpha=2, out=out) is out
            np.testing.assert_array_equal(out.get(), 2 * (a @ b))


@needs_emulator
@pytest.mark.parametrize("trans", [False, True, "c"])
@pytest.mark.parametrize("how", WAYS)
def test_complex_matrices_are_copied_for_cublas(
    how, trans, there, gpus, rng, no_plans, monkeypatch
):
    """Which conjugates what it transposes alone, and makes rows of C."""

    def bind(a, b, c, *, alpha, beta, conjugated):
        for x, conj in zip((a, b), conjugated, strict=True):
            assert leading(x, "t") or (leading(x, "n") and not conj)
        assert leading(c, "n") and a.dtype == b.dtype == c.dtype

        def multiply(place, pair):
            place[...] = alpha * (pair[0] @ pair[1]) + (beta * place if beta else 0)

        def call(a, b, c, _stream):
            x, y = (
                v.get().conj() if conj else v.get()
                for v, conj in zip((a, b), conjugated, strict=True)
            )
            c.put(lambda place, _: multiply(place, (x, y)), None)

        return call

    monkeypatch.setattr(on_gpu.cublas, "bind", bind)
    monkeypatch.setattr(CudaDevice, "prepared", lambda *_given: None)
    op = {False: lambda x: x, True: lambda x: x.T, "c": lambda x: x.T.conj()}[trans]
    a, b, c = (integers(rng, s) + 1j * integers(rng, s) for s in ((5, 6), (6, 7), (5, 7)))
    a, b, c = (x.astype("c8") for x in (a, b, c))
    x, y = (there(np.ascontiguousarray(op(v)), how) for v in (a, b))
    factors = {"alpha": 2 - 1j, "beta": 1j, "trans_a": trans, "trans_b": trans}
    with hg.Runner(device="cuda", gpus=[0]) as runner:
        for out in (None, there(c, how)):
            for _ in range(2):
                got = runner.gemm(x, y, there(c, how), **factors, out=out)
                np.testing.assert_array_equal(got.get(), (2 - 1j) * (a @ b) + 1j * c)
        real = there(b.real.copy(), how)
        np.testing.assert_array_equal(runner.gemm(there(a), real).get(), a @ b.real)


@needs_emulator
@pytest.mark.parametrize("sides", [(5, 6, 0), (0, 6, 3), (5, 0, 3), (0, 0, 0), (5, 6, 3)])
def test_what_is_not_read_is_not_multiplied(sides, there, rng, monkeypatch):
    """With k = 0, and with alpha = 0."""
    planned = late_gpus.counted(monkeypatch, Plans, "multiply")
    m, n, k = sides
    a, b = (there(np.full(s, np.nan, "f4")) for s in ((m, k), (k, n)))
    alpha, plain = 0 if k else 1, integers(rng, (m, n))
    with one_gpu() as runner:
        for beta, how in itertools.product((0, 1, -3), WAYS if m * n else ["rows"]):
            out = there(plain if beta else np.full((m, n), np.nan, "f4"), how)
            more = {"alpha": alpha, "beta": beta}
            assert runner.gemm(a, b, out if beta else None, **more, out=out) is out
            np.testing.assert_array_equal(out.get(), beta * plain)
            got = runner.gemm(a, b, there(plain, how) if beta else None, **more)
            np.testing.assert_array_equal(got.get(), beta * plain)
            assert not planned or how == "backwards"
            planned.clear()


@needs_emulator
def test_an_inf_of_c_stays_in_its_part(there):
    a, c = np.ones((2, 0), "c8"), np.array([[np.inf + 1j, 2]] * 2, "c8")
    for beta in (1.0, 2.0):
        got = one_gpu().gemm(there(a), there(a.T), there(c), beta=beta).get()
        np.testing.assert_array_equal(got.real, beta * c.real)
        np.testing.assert_array_equal(got.imag, beta * c.imag)


@needs_emulator
def test_what_is_wrong_or_warned_of_is_said(there, gpus):
    cp, runner = gpus.module, one_gpu()
    a, b, c = (there(np.ones(s, "f4"), "steps") for s in ((5, 6), (6, 7), (5, 7)))
    whole = cp.asarray(np.ones((10, 20), "f4"))
    part, between = whole[:5, :12:2], whole[:5, 1:15:2]
    for _ in range(2):
        assert runner.gemm(part, b, out=between) is between
        assert (between.get() == 6).all()
        with pytest.raises(UsageError, match="out overlaps A"):
            runner.gemm(part, b, out=whole[:5, 2:16:2])
        with pytest.raises(UsageError, match="out overlaps C"):
            runner.gemm(a, b, whole[:5, :14:2], beta=1, out=whole[1:6, :14:2])
        with pytest.raises(DTypeError, match="int32"):
            runner.gemm(a, b, out=cp.asarray(np.ones((5, 7), "i4")))
        with pytest.raises(UsageError, match="overlap"):
            runner.gemm(a, b, out=cp.ndarray((5, 7), "f4", whole.data + 0, (4, 4)))
        with pytest.raises(DTypeError, match=r"longdouble|float128"):  # which CuPy has not
            runner.gemm(np.ones((5, 6), "longdouble"), b)
        with pytest.raises(DTypeError, match="bool"):
            runner.gemm(a, cp.asarray(np.ones((6, 7), "?")))
        with pytest.raises(UsageError, match=r"2-D|dimension"):
            runner.gemm(a, b[:, 0])
        with pytest.warns(HybridGemmWarning, match="beta"):
            runner.gemm(a, b, c)


DTYPES_OF_TWO = [
    ("float32", "float32"), ("float16", "float32"), ("int8", "int8"), ("float64", "float32"),
    ("float16", "float16"), ("bfloat16", "bfloat16"), ("complex64", "complex64"),
    ("complex64", "float32"),
]  # fmt: skip


@needs("cuda")
@pytest.mark.parametrize("options", [{}, {"kernel": "own"}, {"compute": "fp32x3"}])
@pytest.mark.parametrize("dtypes", DTYPES_OF_TWO)
def test_on_a_gpu(dtypes, options, rng, request):
    """All ways to lie, in turns with the places of C; nothing takes a plan but complex products by
    other kernels than cuBLAS's."""
    import cupy

    if "kernel" not in options or "complex64" not in dtypes:
        request.getfixturevalue("no_plans")

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

    with hg.Runner(device="cuda", gpus=[0], **options) as runner:
        for i, how in enumerate(WAYS):
            ways = (a, how), (b, [*WAYS][-1 - i]), (c, how)
            x, y, z = (copied(cupy, WAYS[way](v)) for v, way in ways)
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
def test_a_c_that_broadcasts_is_added_on_a_gpu(part, dtype, library, rng, no_plans, monkeypatch):
    """As a bias of columns or rows is, again and again."""
    module = pytest.importorskip(library)
    m, n, k = 70, 90, 50
    drawn = [integers(rng, s).astype(dtype) for s in ((m, k), (k, n), (m, n))]
    there = module.asarray if library == "cupy" else lambda x: module.asarray(x, device="cuda")
    a, b, c = map(there, drawn)
    wanted = 2 * (drawn[0] @ drawn[1]) + 3 * drawn[2][part]
    for _ in range(4):
        got = hg.gemm(a, b, c[part], alpha=2, beta=3)
        assert type(got) is type(a)
        np.testing.assert_array_equal(got.tolist(), wanted.tolist())
    out = module.empty_like(c)
    assert hg.gemm(a, b, c[part], alpha=2, beta=3, out=out) is out
    np.testing.assert_array_equal(out.tolist(), wanted.tolist())
    monkeypatch.undo()  # a plan says what is wrong
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
        monkeypatch.setattr("hybrid_gemm.programs.packed._CAST_BYTES", 0)
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
def test_products_of_nothing_on_a_gpu(rng, no_plans):
    import cupy

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
