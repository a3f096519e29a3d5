"""Products of arrays that lie on a GPU other than the current one, or on several GPUs."""

import itertools

import numpy as np
import pytest

import hybrid_gemm as hg
from hybrid_gemm.arrays.caller_arrays import module_of
from hybrid_gemm.devices.cuda import device as cuda
from hybrid_gemm.programs import on_gpu

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(cuda.count() < 2, reason=f"{cuda.count()} GPUs are here; this takes 2"),
]

VIEWS = {
    "rows": lambda x: x,
    "columns": lambda x: x.T.copy().T,
    "a block": lambda x: x[1:-1, 2:-3],
    "steps": lambda x: x[::2, ::3],
    "backwards": lambda x: x[::-1, ::-1],
    "a row, broadcast": lambda x: module_of(x).broadcast_to(x[0], x.shape),
}


def _cupy():
    return pytest.importorskip("cupy")


def on(gpu: int, x: np.ndarray, look=VIEWS["rows"]):
    """A view of a copy of an array on a GPU."""
    with _cupy().cuda.Device(gpu):
        return look(_cupy().asarray(x))


def write(out, x):
    """out[...] = x on the GPU that has them."""
    with out.device:
        out[...] = x


def drawn(rng, *shape, dtype="float32"):
    x = rng.integers(-3, 4, shape)
    return (x + 1j * rng.integers(-3, 4, shape) if dtype[0] == "c" else x).astype(dtype)


@pytest.mark.parametrize("options", [
    {}, {"gpus": (1,)}, {"gpus": (0,)}, {"checked": True}, {"gpus": (1,), "checked": True},
    {"gpus": (0, 1)}, {"threads": 2}, {"compute": "tf32"},
], ids=str)  # fmt: skip
@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("large", [False, True])
def test_a_and_b_may_lie_on_any_gpus(options, view, large, rng, monkeypatch):
    if large:  # which takes a plan
        monkeypatch.setattr(on_gpu, "MOVED_BYTES", 0)
    a, b = drawn(rng, 70, 50), drawn(rng, 50, 70)
    look = VIEWS[view]
    wanted = look(a) @ look(b.T).T
    for (x, y), current in itertools.product([(0, 1), (1, 0), (1, 1)], (0, 1)):
        p, q = on(x, a, look), on(y, b.T, look).T
        with _cupy().cuda.Device(current):
            for _ in range(3):
                got = hg.gemm(p, q, **options)
                assert int(got.device.id) == x
                np.testing.assert_array_equal(got.get(), wanted)


@pytest.mark.parametrize("current", [0, 1])
def test_a_small_array_of_the_host_goes_where_the_other_lies(current, rng, no_plans):
    a, b = drawn(rng, 40, 50), drawn(rng, 50, 30)
    for gpu in (0, 1):
        with _cupy().cuda.Device(current):
            for got in (hg.gemm(a, on(gpu, b)), hg.gemm(on(gpu, a), b)):
                assert int(got.device.id) == gpu
                np.testing.assert_array_equal(got.get(), a @ b)


@pytest.mark.parametrize("options", [{}, {"gpus": (1,)}], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "int32", "complex64"])
@pytest.mark.parametrize("place", ["rows", "columns", "steps"])
def test_c_and_out_may_lie_on_any_gpus(options, dtype, place, rng):
    a, b, c = (drawn(rng, 40, 40, dtype=dtype) for _ in "abc")
    bias = drawn(rng, 40, dtype=dtype)
    look = {"rows": lambda x: x[:, :40], "columns": lambda x: x[:, :40].T,
            "steps": lambda x: x[:, ::2]}[place]  # fmt: skip
    for x, y, z in itertools.product((0, 1), repeat=3):
        p, q, added, row = on(x, a), on(x, b), on(y, c), on(y, bias)
        out = on(z, np.zeros((40, 80), dtype), look)
        for given, there in ((added, c), (row, bias)):
            write(out, 7)
            assert hg.gemm(p, q, given, alpha=2, beta=-1, out=out, **options) is out
            np.testing.assert_array_equal(out.get(), 2 * (a @ b) - there)
            got = hg.gemm(p, q, given, beta=1, **options)
            np.testing.assert_array_equal(got.get(), a @ b + there)
        write(out, on(z, c))
        assert hg.gemm(p, q, out, beta=3, out=out, **options) is out
        np.testing.assert_array_equal(out.get(), a @ b + 3 * c)
        with pytest.raises(ValueError, match="overlaps"):
            hg.gemm(out, q, out=out, **options)
        over = on(z, np.zeros((1, 40), dtype), lambda x: module_of(x).broadcast_to(x, (40, 40)))
        with pytest.raises(ValueError, match="overlap"):
            hg.gemm(p, q, out=over, **options)


@pytest.mark.parametrize("current", [0, 1])
@pytest.mark.parametrize("dtype", ["float32", "float16", "complex64", "int32"])
@pytest.mark.parametrize("options", [{}, {"checked": True}, {"algorithm": "3m"}], ids=str)
def test_stacks_vectors_and_lists_of_another_gpu(current, dtype, options, rng):
    if "algorithm" in options and dtype != "complex64":
        pytest.skip("3m is for complex products")
    a, b = drawn(rng, 6, 30, 20, dtype=dtype), drawn(rng, 6, 20, 40, dtype=dtype)
    x, y = on(1, a), on(1, b)
    with _cupy().cuda.Device(current):
        for p, q, wanted in (
            (x, y, a @ b), (x[::-1], y[..., ::2], a[::-1] @ b[..., ::2]), (x, y[0], a @ b[0]),
            (x[0], y[0, :, 0], a[0] @ b[0, :, 0]), (x[0, 0], y[0], a[0, 0] @ b[0]),
        ):  # fmt: skip
            for _ in range(3):
                got = hg.matmul(p, q, **options)
                assert int(got.device.id) == 1
                np.testing.assert_array_equal(got.get(), wanted)
        made = hg.gemm_many(list(x), list(y), **options)
        for got, wanted in zip(made, a @ b, strict=True):
            assert int(got.device.id) == 1
            np.testing.assert_array_equal(got.get(), wanted)
        result = hg.Runner(**options).run(x[0], y[0])
        np.testing.assert_array_equal(result.c.get(), a[0] @ b[0])


def test_what_streams_of_both_gpus_do_stays_in_order(rng):
    """B is written on its GPU just before, and written again just after, without a wait."""
    cp = _cupy()
    a, b = on(0, drawn(rng, 300, 3000)), on(1, drawn(rng, 3000, 3000))
    with cp.cuda.Device(1):
        slow, other = b.astype("f8"), cp.zeros_like(b)
    wanted = a.get() @ b.get()
    for _ in range(20):
        with cp.cuda.Device(1):
            other[...] = 0
            for _ in range(3):
                slow @ slow
            other[...] = b
        got = hg.gemm(a, other)
        with cp.cuda.Device(1):
            other[...] = 5
        np.testing.assert_array_equal(got.get(), wanted)


@pytest.mark.parametrize("options", [{}, {"gpus": (1,)}], ids=str)
def test_memory_may_be_for_its_own_gpu_alone(options, rng):
    """As that of CUDA's pools is, until someone gives other GPUs access."""
    cp = _cupy()
    a, b = drawn(rng, 60, 50), drawn(rng, 50, 70)
    pool = cp.cuda.MemoryAsyncPool()
    with cp.cuda.using_allocator(pool.malloc):
        x, y = on(0, a), on(1, b)
    for _ in range(3):
        np.testing.assert_array_equal(hg.gemm(x, y, **options).get(), a @ b)


def test_tensors_of_two_gpus(rng):
    torch = pytest.importorskip("torch")
    a, b = drawn(rng, 60, 50), drawn(rng, 50, 70)
    x, y = torch.from_numpy(a).cuda(0), torch.from_numpy(b).cuda(1)
    out = torch.zeros(60, 70, device="cuda:1")
    for _ in range(3):
        got = hg.gemm(x, y)
        assert got.device.index == 0
        np.testing.assert_array_equal(got.cpu().numpy(), a @ b)
        assert hg.gemm(x, y, out=out) is out
        np.testing.assert_array_equal(out.cpu().numpy(), a @ b)
        np.testing.assert_array_equal(hg.matmul(y.T, x.T).cpu().numpy(), b.T @ a.T)
