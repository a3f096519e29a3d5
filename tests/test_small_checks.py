"""Small checked products on a GPU, whose checks are native calls that were prepared."""

import math
import threading

import ml_dtypes
import numpy as np
import pytest
from support.devices import marks

import hybrid_gemm as hg
from hybrid_gemm.devices.checksums import KernelChecksums
from hybrid_gemm.errors import VerificationError
from hybrid_gemm.execution import checked_device, checked_work
from hybrid_gemm.programs.launch import Launch
from hybrid_gemm.programs.small_checks import SmallProduct

DTYPES = "float32", "float64", "float16", "bfloat16", "int32", "int64"
SHAPES = [(70, 90, 50), (1, 200, 33), (129, 1, 600), (300, 7, 1), (128, 256, 2000)]
LAYOUTS = {"rows": lambda x: x, "columns": lambda x: x.T.copy().T, "a block": lambda x: x[:, :-1]}
pytestmark = marks("cuda")


def drawn(rng, *shape, dtype):
    import cupy

    dtype = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    bits = cupy.asarray(
        rng.integers(-2, 3, shape).astype("f4").astype(dtype).view(f"u{dtype.itemsize}")
    )
    return bits.view(dtype)


def look(view, x):
    return LAYOUTS[view](x.view(f"u{x.itemsize}")).view(x.dtype)


@pytest.fixture
def runner():
    with hg.Runner(device="cuda", gpus=0, checked=True) as made:
        yield made


@pytest.fixture
def no_alarm(monkeypatch):
    """None of the products is looked at again, which leaves nothing in the tally."""
    monkeypatch.setattr(
        checked_work.CheckedWork, "run", lambda *x, **y: pytest.fail("a false alarm")
    )


@pytest.fixture
def damage(monkeypatch):
    """Faults of a C of 4-byte words, each done to one just before it is looked at."""
    import cupy

    faults, real = [], Launch.started

    def started(self, at, stream):
        if faults and getattr(self.call, "__name__", "") == "look" and self._ready:
            shape = self.make[1]
            memory = cupy.cuda.UnownedMemory(at[2], 4 * np.prod(shape), self)
            at_c = cupy.cuda.MemoryPointer(memory, 0)
            faults.pop()(cupy.ndarray(shape, "u4", at_c))
        return real(self, at, stream)

    monkeypatch.setattr(Launch, "started", started)
    return faults


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("view", LAYOUTS)
def test_they_have_the_bits_of_others_and_no_alarm(dtype, shape, view, runner, rng, no_alarm):
    m, n, k = shape
    calls = 0
    for turn in range(4):
        a = look(view, drawn(rng, m, k + 1, dtype=dtype))[:, :k]
        b, c = drawn(rng, k, n, dtype=dtype), drawn(rng, m, n, dtype=dtype)
        for given, beta in ((None, 0), (c, 2)):
            wanted = hg.gemm(a, b, given, alpha=2, beta=beta, gpus=0)
            out = c if turn % 2 else None
            got = runner.gemm(a, b, given, alpha=2, beta=beta, out=out)
            calls += 1
            assert got.view("u1").tobytes() == wanted.view("u1").tobytes()
    tally = runner.devices[0].tally
    assert (tally.products, tally.repeated, tally.confirmed) == (calls, 0, 0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_they_are_judged_without_python(dtype, runner, rng, monkeypatch):
    a, b = drawn(rng, 70, 90, dtype=dtype), drawn(rng, 90, 50, dtype=dtype)
    started, real = [], Launch.begin
    monkeypatch.setattr(Launch, "begin", lambda x, *y: started.append(type(x.call)) or real(x, *y))
    for _ in range(3):
        started.clear()
        runner.gemm(a, b)
    assert started == [SmallProduct]  # and none of what it makes and looks at


@pytest.mark.parametrize("beta", [0, 3])
@pytest.mark.parametrize(
    ("dtype", "bit"),
    [*(("float32", bit) for bit in (22, 24, 30, 31)), *(("int32", bit) for bit in (0, 31))],
)
def test_what_is_damaged_is_made_again(dtype, bit, beta, runner, damage, rng):
    a, b = drawn(rng, 60, 80, dtype=dtype), drawn(rng, 80, 70, dtype=dtype)
    c = drawn(rng, 60, 70, dtype=dtype)

    def flip(words):
        words[33, 44] ^= 1 << bit

    for turn in range(6):
        damage[:] = [flip] * (turn >= 3)
        out = c.copy()
        got = runner.gemm(a, b, out, alpha=1, beta=beta, out=out)
        assert not damage
        np.testing.assert_array_equal(got.get(), (a @ b + beta * c).get())
    tally = runner.devices[0].tally
    assert (tally.products, tally.repeated) == (6, 3)
    fault = tally.faults[0]
    assert fault.what == "product" and fault.rows[0] <= 33 < fault.rows[1]
    assert fault.cols[0] <= 44 < fault.cols[1]


def test_inf_of_the_data_is_confirmed_and_the_next_is_fine(runner, rng):
    a, b = drawn(rng, 50, 60, dtype="float32"), drawn(rng, 60, 40, dtype="float32")
    for _ in range(3):
        runner.gemm(a, b)
    a[3, 4] = np.inf
    np.testing.assert_array_equal(runner.gemm(a, b).get(), (a @ b).get())
    assert runner.devices[0].tally.confirmed == 1
    a[3, 4] = 1
    np.testing.assert_array_equal(runner.gemm(a, b).get(), (a @ b).get())
    assert runner.devices[0].tally.confirmed == 1


def test_wrong_again_and_again_is_an_error(runner, damage, rng, monkeypatch):
    from hybrid_gemm.devices.cuda.device import CudaDevice

    a, b = drawn(rng, 50, 60, dtype="float32"), drawn(rng, 60, 40, dtype="float32")
    real = CudaDevice.bind

    def bind(self, *args, **keywords):
        make = real(self, *args, **keywords)

        def call(a, b, c, stream):
            make(a, b, c, stream)
            c[7, 8] += 1000

        return call

    monkeypatch.setattr(CudaDevice, "bind", bind)
    with pytest.raises(VerificationError, match="again"):
        runner.gemm(a, b)


def test_every_call_is_checked(runner, rng):
    a, b = drawn(rng, 50, 60, dtype="float32"), drawn(rng, 60, 40, dtype="float32")
    made = hg.gemm(a, b, checked=True, gpus=0)
    kept = hg.api.kept_runner(hg.api._given({"checked": True, "gpus": 0}), a, b)
    before = kept.devices[0].tally.products
    for _ in range(10):
        assert (hg.gemm(a, b, checked=True, gpus=0) == made).all()
    assert kept.devices[0].tally.products == before + 10


@pytest.mark.parametrize("alike", [True, False])
def test_threads_on_streams_of_their_own_and_on_one(alike, runner, rng, no_alarm):
    import cupy

    failed = []

    def work(seed, stream):
        random = np.random.default_rng(seed)
        with cupy.cuda.Device(0), stream:
            for turn in range(40):
                n = 70 if alike else 70 + seed + 4 * turn  # each is then started from Python
                a, b = (
                    drawn(random, 90, 80, dtype="float32"),
                    drawn(random, 80, n, dtype="float32"),
                )
                if (runner.gemm(a, b) != a @ b).any():
                    failed.append(seed)

    streams = [cupy.cuda.Stream.null] * 2 + [cupy.cuda.Stream(non_blocking=True) for _ in "12"]
    threads = [threading.Thread(target=work, args=x) for x in enumerate(streams)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    tally = runner.devices[0].tally
    assert (tally.products, tally.repeated) == (160, 0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_copy_of_c_is_checked(dtype, runner, rng, monkeypatch):
    a, b, c = (drawn(rng, 9, 9, dtype=dtype) for _ in "abc")
    wanted = hg.gemm(a, b, c, beta=1, gpus=0)
    for _ in range(3):
        assert (runner.gemm(a, b, c, beta=1) == wanted).all()
    tally = runner.devices[0].tally
    assert tally.copies >= 3 and not tally.repeated
    real, wrong = checked_device.same_bits, [True]
    monkeypatch.setattr(checked_device, "same_bits", lambda x, y: real(x, y) and not wrong.pop())
    wrong[:] = [False] * 50 + [True]
    assert (runner.gemm(a, b, c, beta=1) == wanted).all()
    assert runner.devices[0].tally.repeated == 1 and not runner.devices[0].tally.confirmed
    wrong[:] = [True] * 50
    with pytest.raises(VerificationError, match="copy on cuda:0: rows 0 to 8"):
        runner.gemm(a, b, c, beta=1)


def test_bits_are_compared_as_they_are():
    import cupy

    x = cupy.array([[np.nan, 0.0, 1.0]], "f4")
    assert checked_device.same_bits(x, x.copy())
    assert not checked_device.same_bits(x, -x)
    wide = x.astype("c16")
    assert checked_device.same_bits(wide, wide.copy())
    assert not checked_device.same_bits(wide, wide + 1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("stacks", [((5,), (5,)), ((3, 4), (4,)), ((3, 1), (1, 5)), ((2,), ())])
def test_stacks_are_waited_for_once(dtype, stacks, runner, rng, no_alarm):
    import cupy

    of_a, of_b = stacks
    waited, real = [], cupy.cuda.Stream.synchronize
    count = math.prod(np.broadcast_shapes(of_a, of_b))
    for turn in range(4):
        a = drawn(rng, *of_a, 33, 47, dtype=dtype).swapaxes(-1, -2)[..., 2:, :]
        b = drawn(rng, *of_b, 33, 20, dtype=dtype)
        wanted = hg.matmul(a, b, gpus=0)
        before, waited[:] = runner.devices[0].tally.products, []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                "hybrid_gemm.devices.cuda.stream.CudaStream.synchronize",
                lambda self: waited.append(real(self.cupy)),
            )
            got = runner.matmul(a, b)
        np.testing.assert_array_equal(
            got.view(f"u{got.itemsize}").get(), wanted.view(f"u{got.itemsize}").get()
        )
        assert runner.devices[0].tally.products == before + count
        assert len(waited) == 1 or turn < 2


@pytest.mark.parametrize("together", [True, False])
def test_one_damaged_product_of_a_stack_is_made_again(runner, damage, rng, monkeypatch, together):
    monkeypatch.setattr(KernelChecksums, "worth_stacking", lambda *_: together)

    def flip(words):
        words.reshape(-1, 40, 60)[-1, 13, 14] ^= 1 << 30

    a, b = drawn(rng, 6, 40, 50, dtype="float32"), drawn(rng, 6, 50, 60, dtype="float32")
    for turn in range(4):
        damage[:] = [flip] * (turn >= 2)
        got = runner.matmul(a, b)
        assert not damage
        np.testing.assert_array_equal(got.get(), (a @ b).get())
    tally = runner.devices[0].tally
    assert (tally.products, tally.repeated, len(tally.faults)) == (24, 2, 2)


@pytest.mark.parametrize("kernel", ["auto", "own"])
def test_what_a_product_keeps_is_not_where_sums_are(kernel, rng, no_alarm):
    """float64 sums of k in shares, between the sums of C before and those of C."""
    a, b = drawn(rng, 64, 1024, dtype="float64"), drawn(rng, 1024, 64, dtype="float64")
    c = drawn(rng, 64, 64, dtype="float64")
    with hg.Runner(device="cuda", gpus=0, checked=True, kernel=kernel) as runner:
        for turn in range(8):
            out = c.copy()
            got = runner.gemm(a, b, out if turn % 2 else None, beta=turn % 2 * 2, out=out)
            np.testing.assert_array_equal(got.get(), (a @ b + turn % 2 * 2 * c).get())
