"""Calls that one native function finds and starts, with memory of the host in place of a GPU's."""

import gc
import itertools
import sys
import weakref
from ctypes import c_float
from types import SimpleNamespace

import numpy as np
import pytest
from hybrid_gemm.execution.native_calls import NativeCalls, Started, copied_by, note
from support.native_calls import STREAM, Prepared, There, play, reach_of, there

import hybrid_gemm
from hybrid_gemm import api
from hybrid_gemm.devices.cuda.launch_list import BUSY
from hybrid_gemm.execution import native_calls

GPU = SimpleNamespace(ordinal=0)


@pytest.fixture
def gpu(monkeypatch):
    return play(monkeypatch)


@pytest.fixture
def call(gpu):
    """A product of two matrices of which Python starts the first call, with `slow` counting."""
    calls, prepared = NativeCalls(), Prepared()

    @calls.served
    def gemm(a, b, c=None, /, *, alpha=1.0, beta=0.0, out=None, kernel="auto"):
        gemm.slow += 1
        out = there(len(a), b.shape[1]) if out is None else out
        arrays = a, b, out
        at, of = tuple(x.ctypes.data for x in arrays), tuple(map(reach_of, arrays))
        for _ in range(gemm.products):
            note(Started(prepared, GPU, gpu.stream, at, of, "float32"))
        return out

    gemm.slow, gemm.products, gemm.prepared, gemm.calls = 0, 1, prepared, calls
    return gemm


def test_a_call_that_came_before_is_started_at_once(call):
    a, b, out = there(8, 4), there(4, 12), there(8, 12)
    assert call(a, b, out=out) is out and call.slow == 1
    x, y, z = there(8, 4), there(4, 12), there(8, 12)
    assert call(x, y, out=z) is z and call.slow == 1
    assert call.prepared.started == [(x.ctypes.data, y.ctypes.data, z.ctypes.data)]
    fresh = call(x, y)
    assert call.slow == 2 and fresh.shape == (8, 12)
    fresh = call(x, y)
    assert call.slow == 2 and type(fresh) is There and (fresh.shape, fresh.dtype) == ((8, 12), "f4")
    assert call.prepared.started[-1] == (x.ctypes.data, y.ctypes.data, fresh.ctypes.data)


def test_a_stream_on_which_another_thread_starts_a_product_is_left_to_python(call):
    a, b, out = there(8, 4), there(4, 12), there(8, 12)
    call(a, b, out=out)
    call.prepared.status = BUSY
    assert call(a, b, out=out) is out and call.slow == 2
    call.prepared.status = 0
    assert call(a, b, out=out) is out and call.slow == 2


def test_what_differs_is_left_to_python(call, gpu):
    a, b, out = there(8, 4), there(4, 12), there(8, 12)

    def known(*args, **keywords):
        before, started = call.slow, len(call.prepared.started)
        call(*args, **keywords)
        assert (call.slow > before) != (len(call.prepared.started) > started)
        return call.slow == before

    assert not known(a, b, out=out)
    assert known(a, b, out=out)
    for keywords in (
        {"alpha": 2.0}, {"beta": 2.0}, {"beta": True}, {"beta": 1}, {"kernel": "own"},
    ):  # fmt: skip
        assert not known(a, b, out=out, **keywords)
        assert known(a, b, out=out, **keywords), keywords
    with pytest.raises(TypeError):
        call(a, b, None, out, out=out)
    assert not known(a, b, out=out, alpha=np.array(2.0))  # which is no key
    assert not known(a, b, out=out, alpha=np.array(2.0))
    assert not known(a, b, out, beta=1, out=out)
    assert known(a, b, out, beta=1, out=out)
    assert not known(a, b, out[:], beta=1, out=out) and known(a, b, out[:], beta=1, out=out)
    assert not known(a, b, there(8, 12), beta=1, out=out)  # not where the product is added to it
    assert not known(a, b, there(8, 12), beta=1) and known(a, b, there(8, 12), beta=1)
    assert not known(a, b, there(12), beta=1) and known(a, b, there(12), beta=1)
    wide = there(8, 24)
    assert not known(a, b, out=wide[:, :12]) and known(a, b, out=wide[:, 12:])
    assert not known(a, b, out=there(8, 36)[:, :12])
    assert not known(a, there(4, 20), out=there(8, 20))
    assert not known(*(there(*x.shape, dtype="f8") for x in (a, b)), out=there(8, 12, dtype="f8"))
    assert not known(there(8, 5)[:, 1:], b, out=out)
    assert not known(there(4, 8).T, b, out=out) and known(there(4, 8).T, b, out=out)
    assert not known(there(2, 16), there(16, 12), out=there(2, 12))
    for i, shape in enumerate([(8, 4), (4, 12), (8, 12)]):
        arrays = [a, b, out]
        arrays[i] = there(*shape)
        arrays[i].ordinal = 1
        assert known(a, b, out=out) and not known(*arrays[:2], out=arrays[2])
    gpu.stream = 99
    assert not known(a, b, out=out) and known(a, b, out=out)
    gpu.context = 0
    assert not known(a, b, out=out)


def test_a_product_of_another_gpu_than_the_current_is_not_learnt(call, gpu):
    a, b, out = there(8, 4), there(4, 12), there(8, 12)
    gpu.device = 1
    for _ in range(2):
        call(a, b, out=out)
    assert call.slow == 2
    gpu.device = 0
    for _ in range(2):
        call(a, b, out=out)
    assert call.slow == 3


def test_c_is_copied_to_where_the_product_is_added_to_it(call, gpu):
    a, b, row = there(8, 4), there(4, 12), there(12)
    row[:] = range(12)
    call(a, b, row, beta=1.0)
    made = call(a, b, row, beta=1.0)
    assert call.slow == 1 and call.prepared.started[-1][2] == made.ctypes.data
    np.testing.assert_array_equal(made, np.broadcast_to(row, (8, 12)))
    elsewhere = there(12)
    elsewhere.ordinal = 1
    call(a, b, elsewhere, beta=1.0)
    call(a, b, there(12).view(np.ndarray), beta=1.0)
    assert call.slow == 3


@pytest.mark.parametrize("shifted", range(3))
def test_what_lies_off_16_bytes_is_another_product(call, shifted):
    whole = there(100)
    for start in (0, 1, 2, 1, 2, 0):
        arrays = [there(8, 4), there(4, 12), there(8, 12)]
        x = arrays[shifted]
        arrays[shifted] = whole[start:][: x.size].reshape(x.shape)
        call(*arrays[:2], out=arrays[2])
    assert call.slow == 3 and len(call.prepared.started) == 3


def test_a_new_c_that_lies_otherwise_is_left_to_python(call, monkeypatch):
    a, b, whole = there(8, 4), there(4, 12), there(100)
    monkeypatch.setitem(globals(), "there", lambda *shape: whole[1:97].reshape(shape))
    for _ in range(2):
        call(a, b)
    assert call.slow == 2 and not call.prepared.started


def test_an_out_that_overlaps_is_left_to_python(call):
    whole = there(40, 4)
    b = there(4, 4)
    for _ in range(2):
        call(whole[:8], b, out=whole[8:16])
    assert call.slow == 1
    call(whole[:8], b, out=whole[4:12])
    assert call.slow == 2


@pytest.mark.parametrize("sides", [(8, 8), (1, 8), (8, 1)], ids=str)
def test_blocks_of_one_matrix_are_started_unless_they_meet(call, sides):
    """As the updates of a blocked factorization have them: by the native function as by Python."""
    whole = there(24, 64)
    m, k = sides
    a, b = whole[8 : 8 + m, :k], whole[:k, 8:16]
    meeting = 0
    for wide in whole, whole.reshape(12, 128):  # whose rows are as far apart as those of A, and not
        call(a, b, out=there(*wide.shape)[:m, :8])
        for row, col in itertools.product(range(0, len(wide) - 7, 4), range(0, 17, 4)):
            out = wide[row : row + m, col : col + 8]
            slow = call.slow
            call(a, b, out=out)
            exact = np.shares_memory(a, out) or np.shares_memory(b, out)
            at, c = out.ctypes.data, reach_of(out)
            meets = any(reach_of(x).meets(x.ctypes.data, c, at) for x in (a, b))
            assert (call.slow > slow) == meets, (row, col)
            assert meets == exact if wide is whole else meets >= exact
            meeting += exact
    assert 5 < meeting < 25


def test_what_a_product_of_tensors_starts_is_learnt(monkeypatch):
    """Their views are multiplied within the call that was made, for `matmul` as for `gemm`."""
    learnt, a, b = [], there(8, 4), there(4, 12)
    started = Started(Prepared(), GPU, STREAM, (0, 0, 0), (reach_of(a),) * 3, "float32")

    class Views:
        def served(self, multiply):
            made = multiply(a.view(np.ndarray), b.view(np.ndarray), None, None)
            note(started)
            return made

    views = iter([Views(), None, None])
    monkeypatch.setattr(api.Guests, "of", lambda *given: next(views))
    monkeypatch.setattr(api._matmuls, "_learn", lambda *given: learnt.append(given[-1]))
    np.testing.assert_array_equal(hybrid_gemm.matmul(a, b, device="cpu"), a @ b)
    assert learnt == [started]


CHANGES = [
    "two products", "part of C", "dtype", "operands made anew", "of the host", "a list",
    "another stream", "another GPU", "not prepared natively",
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_only_a_call_that_is_one_product_is_learnt(gpu, change):
    calls, prepared, slow = NativeCalls(), Prepared(), []
    if change == "not prepared natively":
        prepared.native = None

    @calls.served
    def gemm(a, b, *, out):
        slow.append(1)
        arrays = a, (there(*b.shape) if change == "operands made anew" else b), out
        at, of = [x.ctypes.data for x in arrays], [reach_of(x) for x in arrays]
        if change == "part of C":
            of[2] = of[2]._replace(extent=of[2].extent - 4)
        if change == "a list":
            out = [1]
        dtype = "float64" if change == "dtype" else "float32"
        device = SimpleNamespace(ordinal=gpu.device)
        stream = STREAM + (change == "another stream")
        for _ in range(1 + (change == "two products")):
            note(Started(prepared, device, stream, tuple(at), tuple(of), dtype))
        return out

    a, b, out = there(8, 4), there(4, 12), there(8, 12)
    gpu.device = int(change == "another GPU")  # than that of the arrays
    if change == "of the host":
        a, b, out = (x.view(np.ndarray) for x in (a, b, out))
    for _ in range(3):
        gemm(a, b, out=out)
    assert len(slow) == 3 and not prepared.started


def test_calls_with_arrays_of_the_host_are_not_watched():
    """None of them is learnt, and watching takes a small product on the CPU an eighth longer."""
    calls, watched = NativeCalls(), []

    @calls.served
    def gemm(a, b):
        watched.append(native_calls._here.started is not None)

    gemm(np.ones((2, 3)), np.ones((3, 2)))
    gemm(there(2, 3), there(3, 2))
    assert watched == [False, True]


def test_known_calls_copy_arrays_that_no_kernel_reads(gpu):
    """Not into a graph, which would hold memory that is another array's by then."""

    def copy(x):
        made = there(*x.shape)
        made[...] = x
        return made

    def look(a, b, _c):
        return [c_float.from_address(at).value for at in (a, a + 4, b)]

    calls, prepared = NativeCalls(), Prepared(look)

    @calls.served
    def gemm(a, b, *, out=None):
        gemm.slow += 1
        x, y = (copied_by(None if v.flags.c_contiguous else copy, v) for v in (a, b))
        arrays = x, y, there(len(a), b.shape[1]) if out is None else out
        at, of = tuple(v.ctypes.data for v in arrays), tuple(map(reach_of, arrays))
        note(Started(prepared, GPU, STREAM, at, of, "float32"))
        return arrays[2]

    gemm.slow = 0
    wide, b = there(16, 8), there(4, 12)
    wide[...] = np.arange(128).reshape(16, 8)
    b[-1] = 7
    for x, y, seen in (
        (wide[::2, ::2], b, [0, 2, 0]), (wide[:8, :4], b[::-1], [0, 1, 7]),
        (wide[:8, 3::-1], b, [3, 2, 0]),
    ):  # fmt: skip
        before = gemm.slow
        for _ in range(3):
            assert gemm(x, y).shape == (8, 12)
        assert gemm.slow == before + 1 and prepared.seen[-2:] == [seen] * 2
        for gpu.capturing in True, RuntimeError("not to be asked"):
            gemm(x, y)
        gpu.capturing = False
        assert gemm.slow == before + 3
    gemm.slow, out = 0, there(8, 12)
    for _ in range(2):
        assert gemm(wide[::2, ::2], b, out=out) is out
        gemm(wide[:8, :4], b[::-1], out=out)  # which may lie before its first element
    assert gemm.slow == 3
    whole = there(32, 12)
    gemm(whole[::2, ::3][:8], b, out=whole[1:9])
    assert gemm.slow == 4


def test_a_status_is_raised_and_a_call_that_is_forgotten_is_pythons(call):
    a, b, out = there(8, 4), there(4, 12), there(8, 12)
    call(a, b, out=out)
    call.prepared.status = 2
    with pytest.raises(MemoryError, match="2"):
        call(a, b, out=out)
    call.prepared.status = 0
    call.calls.forget()
    assert call(a, b, out=out) is out and call.slow == 2


def test_arrays_without_an_address_are_left_to_python(call, monkeypatch):
    a, b, out = there(8, 4), there(4, 12), there(8, 12)
    call(a, b, out=out)
    monkeypatch.setattr(call.calls, "_learn", lambda *x: None)
    hidden = SimpleNamespace(device_id=0)  # as within torch.vmap
    monkeypatch.setattr(There, "data", property(lambda self: hidden))
    assert call(a, b, out=out) is out and call.slow == 2
    assert not call.prepared.started


def test_the_third_of_matmul_is_out(gpu):
    calls, prepared, slow = NativeCalls(out_is_third=True), Prepared(), []

    @calls.served
    def matmul(a, b, /, out=None):
        slow.append(1)
        arrays = a, b, out
        at, of = tuple(x.ctypes.data for x in arrays), tuple(map(reach_of, arrays))
        note(Started(prepared, GPU, STREAM, at, of, "float32"))
        return out

    a, b, out = there(3, 8, 4), there(3, 4, 12), there(3, 8, 12)
    for _ in range(2):
        assert matmul(a, b, out) is out
        assert matmul(a, b, out=out) is out
    assert len(slow) == 1 and len(prepared.started) == 3
    with pytest.raises(TypeError):
        matmul(a, b, out, out=out)


def test_a_vector_is_no_matrix_of_one_column(gpu):
    calls, prepared, slow = NativeCalls(out_is_third=True), Prepared(), []

    @calls.served
    def matmul(a, b, /, out=None):
        slow.append(1)
        arrays = a, b, there(*a.shape[:-1], *b.shape[1:])
        at, of = tuple(x.ctypes.data for x in arrays), tuple(map(reach_of, arrays))
        note(Started(prepared, GPU, STREAM, at, of, "float32"))
        return arrays[-1]

    for _ in range(2):
        assert matmul(there(8, 4), there(4)).shape == (8,)
        assert matmul(there(8, 4), there(4, 1)).shape == (8, 1)
    assert len(slow) == 2


def test_the_device_with_the_kernels_is_kept_until_calls_are_forgotten(gpu):
    class Device:
        ordinal = 0

    calls, prepared, device = NativeCalls(), Prepared(), Device()
    held = weakref.ref(device)
    started = [device]

    @calls.served
    def gemm(a, b, *, out):
        arrays = a, b, out
        at, of = tuple(x.ctypes.data for x in arrays), tuple(map(reach_of, arrays))
        note(Started(prepared, started.pop(), STREAM, at, of, "float32"))
        return out

    a, b, out = there(8, 4), there(4, 12), there(8, 12)
    gemm(a, b, out=out)
    del device
    gemm(a, b, out=out)
    assert len(prepared.started) == 1 and held() is not None
    calls.forget()
    gc.collect()
    assert held() is None
    device = Device()
    held = weakref.ref(device)
    note(Started(prepared, device, STREAM, (0, 0, 0), (0, 0, 0), "float32"))  # by a `Runner`
    del device
    assert held() is None


def test_references_are_given_back(call):
    a, b, out = there(8, 4), there(4, 12), there(8, 12)
    things = (a, b, out, call.calls._state)
    for keywords in ({}, {"out": out}, {"out": out, "alpha": 2.0}, {"out": out, "alpha": []}):
        call(a, b, **keywords)
        before = [sys.getrefcount(x) for x in things]
        for _ in range(50):
            call.calls.start((a, b), keywords)
            call.calls.start((a,), keywords)
        after = [sys.getrefcount(x) for x in things]
        assert [y - x for x, y in zip(before, after, strict=True) if abs(x - y) > 20] == []
