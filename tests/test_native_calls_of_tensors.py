"""Calls with tensors that one native function finds and starts, with PyTorch's CPU for a GPU."""

import weakref
from ctypes import c_double
from types import SimpleNamespace

import pytest
from hybrid_gemm.execution.native_calls import NativeCalls, Started, copied_by, note
from support.native_calls import Prepared, play

import hybrid_gemm
from hybrid_gemm.arrays.strides import reach
from hybrid_gemm.arrays.tensors import copying
from hybrid_gemm.errors import UsageError


@pytest.fixture
def gpu(monkeypatch):
    return play(monkeypatch)


@pytest.fixture
def tensors(torch, gpu, monkeypatch):
    """A product of tensors, which lie on the CPU, and whose number as a GPU is -1."""
    monkeypatch.setattr(
        torch._C, "_cuda_getCurrentRawStream", lambda ordinal: gpu.stream, raising=False
    )
    look = lambda a, b, _c: (c_double.from_address(a + 8).value, c_double.from_address(b).value)  # noqa: E731
    calls, prepared, here = NativeCalls(), Prepared(look), SimpleNamespace(ordinal=-1)
    gpu.device = -1

    @calls.served
    def gemm(a, b, c=None, /, *, out=None):
        assert all(x is None or x.data_ptr() for x in (a, b, out)), "no memory"
        gemm.slow += 1
        a, b = map(copied_by, copying(a, b, out), (a, b))
        out = a.new_empty((len(a), b.shape[1])) if out is None else out
        at, size = tuple(x.data_ptr() for x in (a, b, out)), out.itemsize
        of = tuple(reach(x.shape, [size * s for s in x.stride()], size) for x in (a, b, out))
        dtype = str(out.dtype).removeprefix("torch.")
        note(Started(prepared, here, gpu.stream, at, of, dtype))
        return out

    gemm.slow, gemm.started, gemm.torch, gemm.seen = 0, prepared.started, torch, prepared.seen
    return gemm


def test_tensors_are_found_as_arrays_are(tensors):
    torch = tensors.torch
    a, b, out = (torch.ones(s) for s in ((8, 4), (4, 16), (8, 16)))
    tensors(a, b, out=out)
    before = out._version
    assert tensors(a, b, out=out) is out and tensors.slow == 1 and out._version == before + 1
    assert tensors.started == [(a.data_ptr(), b.data_ptr(), out.data_ptr())]
    tensors(a, torch.ones(16, 4).T, out=out)
    tensors(a[:6], b, out=out[:6])
    assert tensors.slow == 3
    tensors.slow = 1
    tensors(a, b)
    fresh = tensors(a, torch.nn.Parameter(b, requires_grad=False))
    assert tensors.slow == 2 and fresh.shape == (8, 16) and fresh.dtype == torch.float32
    assert fresh._version == 0
    assert tensors.started[1][2] == fresh.data_ptr()
    row = torch.arange(16.0)
    tensors(a, b, row)
    fresh = tensors(a, b, row)  # a copy of C, to which the product is added
    assert tensors.slow == 3 and torch.equal(fresh, torch.arange(16.0).expand(8, 16))
    assert torch.equal(row, torch.arange(16.0))


def test_known_calls_copy_what_no_kernel_reads(tensors, gpu):
    """Tensors with steps, and of two dtypes, anew in each call; into PyTorch's graphs too."""
    torch, gpu.capturing = tensors.torch, True
    wide, b = torch.zeros(8, 8, dtype=torch.float64), torch.ones(4, 16, dtype=torch.float64)
    turned = torch.ones(32, 8, dtype=torch.float64).T[:4, ::2]
    one, half = b[0, 0].expand(8, 4), b.half()
    pairs = (wide[:, ::2], b), (wide[:, ::2].float(), b), (b.T[:8], turned), (one, half)
    for known, (x, y) in enumerate(pairs):
        tensors(x, y)
        for value in 2, 3:
            with torch.no_grad():
                wide[0, 2] = b[0, 1] = value
                x[0, 1], y[0, 0] = value, value + 1
            made = tensors(x, y)
            assert tensors.seen[-1] == (value, value + 1)
            assert made.dtype == torch.float64 and made.shape == (len(x), 16)
        assert tensors.slow == known + 1 and len(tensors.started) == 2 * (known + 1)
    out = torch.zeros(8, 32, dtype=torch.float64)
    for _ in range(2):
        tensors(wide[:, ::2], b, out=out[:, :16])
    assert tensors.slow == 5
    tensors(out[:, 8:16:2], b, out=out[:, :16])  # which it meets
    assert tensors.slow == 6


def test_copies_that_a_product_did_not_read_are_not_made_again(tensors, gpu):
    calls, one, prepared = NativeCalls(), tensors.torch.ones(4, 4), Prepared()
    of = reach((4, 4), (16, 4), 4)

    @calls.served
    def gemm(a, b, *, out):
        gemm.slow += 1
        copy = copied_by(tensors.torch.clone, a)
        at = copy.data_ptr(), b.data_ptr(), out.data_ptr()
        if gemm.gone:
            del copy  # and what lies there now is something else
        device = SimpleNamespace(ordinal=-1)
        note(Started(prepared, device, gpu.stream, at, (of,) * 3, "float32"))
        return out

    gemm.slow, gemm.gone = 0, True
    for _ in range(2):
        gemm(one, one.clone(), out=one.clone())
    assert gemm.slow == 2
    gemm.gone = False
    for _ in range(2):
        gemm(one, one.clone(), out=one.clone())
    assert gemm.slow == 3


def test_ctrl_c_while_a_known_call_copies_ends_the_call(tensors, monkeypatch):
    """It was lost: the call was left to Python, as one that fails is."""
    torch, errors = tensors.torch, []

    def copy(x):
        if errors:
            raise errors.pop()
        return x.clone()

    monkeypatch.setitem(globals(), "copying", lambda *given: (copy, None))
    a, b = torch.ones(8, 4), torch.ones(4, 16)
    tensors(a, b)
    errors.append(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        tensors(a, b)
    errors.append(MemoryError())
    tensors(a, b)
    assert tensors.slow == 2 and not tensors.started
    tensors(a, b)
    assert tensors.slow == 2 and len(tensors.started) == 1


def test_tensors_that_autograd_follows_are_left_to_python(tensors):
    torch = tensors.torch
    a, b, out = (torch.ones(s) for s in ((8, 4), (4, 16), (8, 16)))
    for _ in range(2):
        tensors(a, b, out=out)
        tensors(a, b, out)
    assert tensors.slow == 2
    followed = a.clone().requires_grad_()
    tensors(followed, b, out=out)
    tensors(a, b.clone().requires_grad_(), out=out)
    tensors(a, b, out=out.clone().requires_grad_())
    tensors(a, b, out.clone().requires_grad_())
    assert tensors.slow == 6
    tensors.slow = 2
    with torch.no_grad():
        tensors(followed, b, out=out)
    assert tensors.slow == 2
    negated = torch._neg_view(a)  # as imaginary parts of a conjugate are
    assert negated.is_neg() and negated.stride() == a.stride()
    tensors(negated, b, out=out)
    assert tensors.slow == 3
    freed = torch.ones(8, 4)
    freed.untyped_storage().resize_(0)
    with pytest.raises(AssertionError, match="no memory"):
        tensors(freed, b, out=out)
    with torch.inference_mode():
        made = torch.ones(8, 16)
        tensors(a, b, out=made)
    tensors(a, b, out=made)
    assert tensors.slow == 3  # lies alike, and has no version
    with torch.autograd.forward_ad.dual_level():
        tensors(torch.autograd.forward_ad.make_dual(a, a), b, out=out)
    assert tensors.slow == 4


def test_tensors_that_are_conjugated_are_left_to_python(tensors):
    a, b = (tensors.torch.ones(s, dtype=tensors.torch.complex64) for s in ((8, 4), (4, 16)))
    for _ in range(2):
        tensors(a, b)
    assert tensors.slow == 1
    for conjugated in ((a.conj(), b), (a, b.conj())):
        tensors(*conjugated)
    assert tensors.slow == 3


@pytest.fixture
def op(tensors, monkeypatch):
    """The operation of PyTorch's, whose products start nothing; `slow` counts calls to Python's."""
    import hybrid_gemm.torch as operation
    from hybrid_gemm import api

    def gemm(a, b, c, *, trans_a=False, trans_b=False, **given):
        gemm.slow += 1
        x, y = a.T if trans_a else a, b.T if trans_b else b
        out = a.new_zeros(len(x), y.shape[1])
        reaches = [reach(v.shape, [4 * s for s in v.stride()], 4) for v in (a, b, out)]
        at = tuple(v.data_ptr() for v in (a, b, out))
        here = SimpleNamespace(ordinal=-1)
        note(Started(gemm.prepared, here, gemm.stream(-1), at, tuple(reaches), "float32"))
        return out

    gemm.slow, gemm.prepared = 0, Prepared()
    gemm.stream = tensors.torch._C._cuda_getCurrentRawStream
    gemm.op = operation.gemm
    monkeypatch.setattr(operation, "_lie_on_the_cpu", lambda *tensors: False)
    monkeypatch.setattr(operation, "_untracked", SimpleNamespace(__wrapped__=gemm))
    api.operations.forget()
    yield gemm
    api.operations.forget()


def test_known_calls_of_the_operation_are_found_as_others_are(tensors, op):
    """Without a C and with one, and the products that gradients are."""
    torch = tensors.torch
    a, b, bias = torch.ones(8, 4), torch.ones(4, 16), torch.ones(16)
    for known, given in enumerate([(a, b), (a, b, bias)], 1):
        for _ in range(3):
            op.op(*given, beta=1.0)
        assert op.slow == known and len(op.prepared.started) == 2 * known
    x, y, v = (p.clone().requires_grad_() for p in (a, b, bias))
    op.slow = 0
    for _ in range(3):
        op.op(x, y, v, beta=1.0).backward(torch.ones(8, 16))
    assert op.slow == 2 and (v.grad == 24).all()  # each gradient's first product
    assert x.grad.shape == a.shape and y.grad.shape == b.shape
    for _ in range(3):
        op.op(y.detach(), x.detach(), trans_a="c", trans_b=True)
    assert op.slow == 3
    hybrid_gemm.free_memory()
    op.op(a, b)
    assert op.slow == 4


def test_operands_that_were_copied_are_not_held(tensors):
    """By a call of many products, as of a stack."""
    calls, torch, held = NativeCalls(), tensors.torch, []

    @calls.served
    def matmul():
        for _ in range(9):
            one = torch.ones(2, 2)
            held.append(weakref.ref(one))
            copied_by(torch.clone, one)
            del one
        return sum(x() is not None for x in held)

    assert matmul() == 2
    assert not any(x() for x in held)


def test_what_is_refused_or_changes_is_asked_of_known_calls_of_the_operation(tensors, op):
    torch = tensors.torch
    a, b = torch.ones(8, 4), torch.ones(4, 16)
    for _ in range(2):
        op.op(a, b)
    assert op.slow == 1
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(a, a)
        with pytest.raises(UsageError, match="A is a tensor with a tangent"):
            op.op(dual, b)
    alpha = torch.tensor(2)
    for value in 2, 3:  # which is no key, though it is the same object
        alpha.fill_(value)
        op.op(a, b, alpha=alpha)
    assert op.slow == 3
