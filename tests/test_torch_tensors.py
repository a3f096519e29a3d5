"""PyTorch's tensors: what comes back, where, on which stream, and in which graph."""

import contextlib
import functools
import sys
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
from support.arrays import integers
from support.devices import needs

import hybrid_gemm
from hybrid_gemm import Runner, gemm, matmul
from hybrid_gemm.arrays import guests as of_guests
from hybrid_gemm.arrays import other_libraries
from hybrid_gemm.errors import DTypeError, UsageError

on_cuda = needs("cuda")
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


@pytest.mark.parametrize(
    "dtype", ["float16", "bfloat16", "float32", "float64", "int8", "int32", "int64", "uint8"]
)
def test_tensors_give_a_tensor(torch, dtype, rng, device):
    if device == "cuda":
        pytest.skip("tensors on the CPU")
    a, b = (torch.from_numpy(integers(rng, s, "f4")).to(getattr(torch, dtype))
            for s in ((5, 7), (7, 3)))  # fmt: skip
    expected = (a.double() @ b.double()).to(a.dtype)
    got = gemm(a, b, device=device)
    assert type(got) is torch.Tensor and got.dtype == a.dtype and got.device.type == "cpu"
    assert torch.equal(got, expected)
    assert torch.equal(gemm(a.T.contiguous().T, b[:, ::2], device=device), expected[:, ::2])
    assert torch.equal(gemm(a, b.T, trans_b=True, device=device), expected)
    out = torch.zeros_like(expected)
    version = out._version
    assert gemm(a, b, out=out, device=device) is out and torch.equal(out, expected)
    assert out._version > version  # so that autograd notices
    assert gemm(a, b, out, beta=1, out=out, device=device) is out
    assert torch.equal(out, 2 * expected)
    result = Runner(device=device).run(a, b)
    assert torch.equal(result.c, expected)


def test_tensors_beside_numpys_arrays(torch, rng):
    a, b = integers(rng, (5, 7)), integers(rng, (7, 3))
    x, y = torch.from_numpy(a), torch.from_numpy(b)
    for pair in (x, b), (a, y):
        got = gemm(*pair, device="cpu")
        assert type(got) is torch.Tensor
        np.testing.assert_array_equal(got.numpy(), a @ b)
    out = np.empty((5, 3), "f4")
    assert gemm(x, y, out=out, device="cpu") is out
    there = torch.empty(5, 3)
    assert gemm(a, b, out=there, device="cpu") is there
    np.testing.assert_array_equal(there.numpy(), out)
    got = gemm(x, y, torch.ones(3), beta=2, device="cpu")
    np.testing.assert_array_equal(got.numpy(), a @ b + 2)


def test_scalars_that_are_tensors_may_change(torch, device):
    a, alpha = np.ones((4, 4), "f4"), torch.tensor(2.0)
    here = Runner(device=device)
    for factor in 2.0, 3.0:
        alpha.fill_(factor)
        assert (here.gemm(a, a, alpha=alpha) == 4 * factor).all()


def test_stacks_of_tensors(torch, rng):
    a, b = (torch.from_numpy(integers(rng, s)) for s in ((2, 5, 7), (2, 7, 3)))
    assert torch.equal(matmul(a, b, device="cpu"), a @ b)
    assert torch.equal(matmul(a[0], b[0, :, 0], device="cpu"), a[0] @ b[0, :, 0])
    number = matmul(a[0, 0], b[0, :, 0], device="cpu")
    assert type(number) is torch.Tensor and number.ndim == 0
    assert float(number) == float(a[0, 0] @ b[0, :, 0])
    out = torch.empty(2, 5, 3)
    assert Runner(device="cpu").matmul(a, b, out=out) is out and torch.equal(out, a @ b)


@pytest.mark.parametrize("dtype", ["complex64", "complex128"])
def test_complex_tensors(torch, dtype, rng):
    a, b = (
        torch.complex(*(torch.from_numpy(integers(rng, s, "f8")) for _ in "ri")).to(
            getattr(torch, dtype)
        )
        for s in ((5, 7), (7, 3))
    )
    got = gemm(a, b.conj(), alpha=1 - 2j, device="cpu")
    assert got.dtype == a.dtype and torch.equal(got, (1 - 2j) * (a @ b.conj()))
    assert torch.equal(gemm(a, a, trans_a="c", device="cpu"), a.mH @ a)


def test_lists_of_tensors(torch, rng):
    pairs = [
        tuple(torch.from_numpy(integers(rng, s)) for s in ((m, 4), (4, m + 1))) for m in (2, 3)
    ]
    made = hybrid_gemm.gemm_many(*map(list, zip(*pairs, strict=True)), device="cpu")
    for got, (a, b) in zip(made, pairs, strict=True):
        assert torch.equal(got, a @ b)


def test_tensors_that_are_refused(torch):
    a = torch.ones(4, 4)
    tracked = torch.ones(4, 4, requires_grad=True)
    with pytest.raises(UsageError, match=r"B is a tensor that requires gradients.*\.detach\(\)"):
        gemm(a, tracked, device="cpu")
    with pytest.raises(UsageError, match="out is a tensor that requires gradients"):
        gemm(a, a, out=tracked, device="cpu")
    with torch.no_grad():
        assert torch.equal(gemm(a, tracked, device="cpu"), a @ a)
    for x, words in (
        (a.to_sparse(), "sparse_coo tensor on the device cpu"),
        (a.to("meta"), "strided tensor on the device meta"),
    ):
        says = f"A is a {words}; strided tensors on cpu and cuda work"
        says += r" \(\.to_dense\(\) makes one\)$" if "sparse" in words else "$"
        with pytest.raises(UsageError, match=says):
            gemm(x, a, device="cpu")
    with pytest.raises(TypeError, match="bool"):
        gemm(a.bool(), a.bool(), device="cpu")
    with pytest.raises(DTypeError, match=r"A has dtype torch.float8_e4m3fn"):
        gemm(a.to(torch.float8_e4m3fn), a, device="cpu")
    with pytest.raises(UsageError, match="out overlaps A"):
        gemm(a, torch.ones(4, 4), out=a, device="cpu")


@pytest.mark.parametrize("name", ["alpha", "beta"])
def test_a_factor_to_which_gradients_are_followed_is_refused(torch, name):
    import hybrid_gemm.torch as with_gradients

    a, factor = torch.ones(2, 2), torch.tensor(2.0, requires_grad=True)
    for product in (functools.partial(gemm, device="cpu"), with_gradients.gemm):
        with pytest.raises(UsageError, match=f"^{name} is a tensor that requires gradients"):
            product(a, a, a, **{name: factor})
        with torch.no_grad():
            assert torch.equal(product(a, a, alpha=factor), 2 * a @ a)


def test_a_lazily_negated_view_is_read_and_not_written(torch):
    z = torch.view_as_complex(torch.arange(32.0).reshape(4, 4, 2))
    lazy = z.conj().imag  # its elements lie in memory with the other sign
    assert lazy.is_neg()
    assert torch.equal(gemm(lazy, torch.eye(4), device="cpu"), -z.imag)
    with pytest.raises(UsageError, match="negated view"):
        gemm(torch.eye(4), torch.eye(4), out=lazy, device="cpu")


@pytest.mark.parametrize("deterministic", [False, True])
def test_memory_is_lent_where_streams_are_joined(torch, monkeypatch, deterministic):
    """On other GPUs CuPy's work is on a stream that PyTorch's allocator does not know."""
    done, empty = [], torch.empty

    @contextlib.contextmanager
    def using_allocator(allocate):
        cuda.allocate, before = allocate, cuda.allocate
        yield
        cuda.allocate = before

    class Stream:
        def __init__(self, at):
            self.at = at

        def record(self):
            return self.at

        def wait_event(self, event):
            done.append((self.at, event))

    cuda = SimpleNamespace(
        allocate=lambda size: "CuPy's", using_allocator=using_allocator,
        get_allocator=lambda: cuda.allocate, runtime=SimpleNamespace(getDevice=lambda: cuda.here),
        UnownedMemory=lambda *x: x, MemoryPointer=lambda memory, offset: memory,
        get_current_stream=lambda: Stream(5),
    )  # fmt: skip
    monkeypatch.setattr(other_libraries, "_cupy", lambda: SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(other_libraries, "external_stream", lambda cp, at, ordinal: Stream(at))
    monkeypatch.setattr(other_libraries.TORCH, "stream", lambda ordinal: 7, raising=False)
    monkeypatch.setattr(torch, "empty", lambda size, dtype, device: empty(size, dtype=dtype))
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: deterministic)
    with other_libraries.TORCH.lending({1: None}):
        cuda.here = 0
        assert cuda.allocate(64) == "CuPy's" and not done
        cuda.here = 1
        _at, size, memory, ordinal = cuda.allocate(64)
        assert (size, ordinal, memory.numel()) == (64, 1, 64)
        assert done == ([(5, 7)] if deterministic else [])  # it fills it with what shows misuse
    assert cuda.allocate(64) == "CuPy's"


@pytest.mark.parametrize("on_gpu", [False, True])
def test_memory_is_lent_where_the_library_has_an_array(monkeypatch, on_gpu):
    """A tensor on the CPU beside CuPy's array says nothing of PyTorch's stream, nor that it has
    CUDA."""

    class Array:
        __module__ = "cupy"
        device, data = SimpleNamespace(id=1), SimpleNamespace(device_id=1)

    class Lender(other_libraries.Library):
        def stream(self, ordinal):
            return 7

        def lets_go(self, x):
            return False

        def lending(self, gpus):
            lent.append([*gpus])
            return contextlib.nullcontext()

    lent, nothing = [], lambda *given: contextlib.nullcontext()
    cuda = SimpleNamespace(Device=nothing)
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=cuda, ndarray=Array))
    monkeypatch.setattr(of_guests, "_working", nothing)
    guests = of_guests.Guests.__new__(of_guests.Guests)
    guests.a, guests.b, guests.c, guests.out = (
        Array() if on_gpu else np.ones(2),
        Array(),
        None,
        None,
    )
    guests.libraries, guests.given = [Lender(), None, None, None], (None,) * 4
    with guests.on_their_streams():
        assert lent == [[1] if on_gpu else []]


@on_cuda
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("compute", ["fp32", "fp32x3"])
def test_tensors_on_a_gpu(there, dtype, compute, rng):
    torch = there
    if compute != "fp32" and dtype != "float32":
        pytest.skip("of float32 alone")
    a, b = (
        torch.from_numpy(integers(rng, s)).to(getattr(torch, dtype)).cuda()
        for s in ((70, 90), (90, 50))
    )
    expected = (a.double() @ b.double()).to(a.dtype)
    for _ in range(3):
        got = gemm(a, b, compute=compute)
        assert type(got) is torch.Tensor and got.is_cuda and got.dtype == a.dtype
        assert torch.equal(got, expected)
    assert torch.equal(gemm(a.T, b.T, trans_a=True, trans_b=True, compute=compute), expected)
    out = torch.full_like(expected, -1)
    version = out._version
    for _ in range(3):
        assert gemm(a, b, out=out, compute=compute) is out and torch.equal(out, expected)
    assert out._version > version
    assert gemm(a, b, out, beta=1, out=out, compute=compute) is out
    assert torch.equal(out, 2 * expected)
    assert torch.equal(matmul(a, b, compute=compute), expected)
    assert torch.equal(Runner(device="cuda", compute=compute).run(a, b).c, expected)


@on_cuda
def test_calls_that_are_known_copy_what_no_kernel_reads(there, rng):
    """With steps and of two dtypes, as PyTorch's current stream has them by then."""
    torch = there
    wide, b = (torch.from_numpy(integers(rng, s)).cuda() for s in ((140, 180), (90, 50)))
    pairs = (wide[::2, ::2], b), (b.T[:, ::2], wide[:45, ::2]), (b.T.double(), wide[:90])
    for x, y in pairs:
        for _ in range(6):
            wide += 1
            b -= 1
            expected = (x.double() @ y.double()).to(torch.promote_types(x.dtype, y.dtype))
            assert torch.equal(gemm(x, y), expected)
            assert torch.equal(gemm(x, y, out=torch.empty_like(expected)), expected)


@on_cuda
def test_products_follow_pytorchs_current_stream(there, rng):
    """What is queued there before is waited for, and so is the product by what comes after."""
    import cupy

    torch = there
    a, b = (torch.from_numpy(integers(rng, s)).cuda() for s in ((70, 90), (90, 50)))
    expected = a @ b
    late, out = torch.zeros_like(a), torch.zeros_like(expected)
    gemm(late, b, out=out)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    before = cupy.cuda.get_current_stream().ptr
    with torch.cuda.stream(side):
        for given in ({}, {"out": out}):
            late.zero_()
            torch.cuda._sleep(100_000_000)
            late.copy_(a)
            got = gemm(late, b, **given)
            copy = got.clone()
            side.synchronize()
            assert torch.equal(copy, expected)
    assert cupy.cuda.get_current_stream().ptr == before


@on_cuda
def test_streams_of_two_libraries_wait_for_each_other(there, rng):
    import cupy

    torch = there
    a, b = (torch.from_numpy(integers(rng, s)).cuda() for s in ((70, 90), (90, 50)))
    y = cupy.from_dlpack(b)
    expected = (a @ b).cpu()
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()), cupy.cuda.Stream(non_blocking=True):
        late = torch.zeros_like(a)
        torch.cuda._sleep(100_000_000)
        late.copy_(a)
        got = gemm(late, y)  # PyTorch's stream works
        assert type(got) is torch.Tensor
        out = cupy.zeros((50, 70), "f4")
        gemm(y.T, late.T, out=out)  # CuPy's does
        np.testing.assert_array_equal(out.get(), expected.numpy().T)
        assert torch.equal(got.cpu(), expected)


@on_cuda
def test_products_of_tensors_are_recorded_in_graphs(there, rng):
    torch = there
    a, b = (torch.from_numpy(integers(rng, s)).cuda() for s in ((70, 90), (90, 50)))
    expected, out = a @ b, torch.zeros(70, 50, device="cuda")
    for options in ({}, {"compute": "fp32x3"}, {"kernel": "cublas"}):
        graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                gemm(a, b, out=out, **options)
            side.synchronize()
            with torch.cuda.graph(graph, stream=side):
                gemm(a, b, out=out, **options)
        out.zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, expected)


GRAPHS = {
    "strict": lambda a, b: gemm(a, b),
    "tf32": lambda a, b: gemm(a, b, compute="tf32"),
    "fp32x3": lambda a, b: gemm(a, b, compute="fp32x3"),
    "added to": lambda a, b: gemm(a, b, a[:, :1], beta=1),
    "with steps": lambda a, b: gemm(a[::2], b),
    "of two dtypes": lambda a, b: gemm(a.double(), b),
    "integers": lambda a, b: gemm(a.int(), b.int()),
    "bytes": lambda a, b: gemm(a.char(), b.char()),
    "complex": lambda a, b: gemm(a + 1j * a, b),
    "a vector": lambda a, b: matmul(a, b[:, 0]),
    "a stack": lambda a, b: matmul(a.reshape(7, 10, 90), b),
    "an uneven stack": lambda a, b: matmul(
        a.reshape(5, 14, 3, 30).transpose(1, 2), b[:60].reshape(2, 30, 50)[0]
    ),
}


@on_cuda
@pytest.mark.parametrize("what", GRAPHS)
@pytest.mark.parametrize("before", [1, 4])
def test_new_tensors_of_a_graph_are_the_graph_s(there, rng, what, before):
    """On PyTorch's own stream for graphs, after as many calls: other products that come later do
    not take their memory, and what is replayed is what was recorded, with other numbers."""
    torch, product = there, GRAPHS[what]
    a, b = (torch.from_numpy(integers(rng, s)).cuda() for s in ((70, 90), (90, 50)))
    for _ in range(before):
        product(a, b)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = product(a, b)
    others = [product(a, b) for _ in range(5)]
    for turn in range(2):
        a.copy_(torch.from_numpy(integers(rng, (70, 90))))
        made.zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(made, product(a, b)), turn
    assert all(x.data_ptr() != made.data_ptr() for x in others)


@on_cuda
@pytest.mark.parametrize("options", [{"checked": True}, {"algorithm": "strassen", "levels": 1}])
def test_what_is_waited_for_is_refused_in_a_graph(there, rng, options):
    torch = there
    a, b = (torch.from_numpy(integers(rng, (64, 64))).cuda() for _ in range(2))
    for _ in range(3):
        gemm(a, b, **options)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = a * 2
        with pytest.raises(UsageError, match="a graph is being captured"):
            gemm(a, b, **options)
    made.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(made, a * 2)


@on_cuda
def test_new_tensors_are_of_pytorch_s_memory(there, rng):
    """From the first call on."""
    torch = there
    a, b = (torch.from_numpy(integers(rng, s)).cuda() for s in ((700, 900), (900, 500)))
    for call in range(4):
        before = torch.cuda.memory_allocated()
        made = gemm(a, b)
        grown = torch.cuda.memory_allocated() - before
        assert 1_400_000 <= grown < 3_000_000, call
        assert not made._is_view() and made.is_contiguous() and made.storage_offset() == 0
        del made
        assert torch.cuda.memory_allocated() == before


@on_cuda
@pytest.mark.parametrize("dtype", ["complex64", "complex128"])
def test_lazily_conjugated_tensors(there, dtype):
    torch = there
    made = [torch.randn(s, dtype=getattr(torch, dtype), device="cuda") for s in ((7, 5), (5, 6))]
    (a, b), c = made, made[0].new_zeros(7, 6)
    for _ in range(4):
        for x, op_a in ((a, False), (a.mH.contiguous(), "c"), (a.mT.contiguous(), True)):
            for y, op_b in ((b, False), (b.mH.contiguous(), "c"), (b.mT.contiguous(), True)):
                # What is conjugated is so twice, lazily and before.
                for p in (x, x.conj().resolve_conj().conj()):
                    for q in (y, y.conj().resolve_conj().conj()):
                        got = gemm(p, q, trans_a=op_a, trans_b=op_b)
                        torch.testing.assert_close(got, a @ b)
        torch.testing.assert_close(gemm(a.mH, a), a.mH @ a)
        torch.testing.assert_close(gemm(a.conj(), b), a.conj() @ b)
        torch.testing.assert_close(gemm(b, b.mH), b @ b.mH)
        torch.testing.assert_close(gemm(a, b, out=c), a @ b)


@on_cuda
def test_a_tensor_whose_storage_was_freed_is_refused_in_each_call(there):
    """The first call of a shape takes another way than later ones; no kernel may read from 0."""
    one = there.ones(64, 64, device="cuda")
    for _ in range(4):
        assert gemm(one, one)[0, 0] == 64
        for place in range(3):
            given = [there.ones(64, 64, device="cuda") for _ in range(3)]
            given[place].untyped_storage().resize_(0)
            with pytest.raises(UsageError, match="is a tensor whose storage has 0 bytes"):
                gemm(*given[:2], out=given[2])
    assert there.cuda.synchronize() is None
