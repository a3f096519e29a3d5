"""What the signatures of calls tell apart, by both makers, and the native play of kept programs.
Memory of the host plays that of GPUs, for CuPy and for PyTorch."""

import itertools
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from support.native_calls import CONTEXT, Prepared, There, aligned, play, there

import hybrid_gemm
from hybrid_gemm.arrays.strides import reach
from hybrid_gemm.devices.cuda.launch_list import BUSY
from hybrid_gemm.programs.launch import Launches
from hybrid_gemm.programs.program import OUT, A, B, C, Program
from hybrid_gemm.programs.signature import MATMUL, Programs, native_launch, phase, signature


@pytest.fixture
def gpu(monkeypatch):
    return play(monkeypatch)


@pytest.fixture
def tensors(torch, gpu, monkeypatch):
    """PyTorch, whose CPU is a GPU: 0, or what a tensor's `ordinal` says."""
    stream = lambda ordinal: gpu.stream  # noqa: E731
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", stream, raising=False)
    monkeypatch.setattr(torch.Tensor, "get_device", lambda x: getattr(x, "ordinal", 0))
    return torch


@pytest.fixture(params=["cupy", "torch"])
def library(request, gpu):
    return request.param


@pytest.fixture
def new(library, request):
    """What makes matrices of a library."""
    if library == "cupy":
        return there
    torch = request.getfixturevalue("tensors")
    return lambda *shape, dtype="f4": torch.from_numpy(aligned(shape, dtype))


@pytest.fixture
def made(gpu):
    """The signature of a call, of which both makers say the same."""
    programs = Programs()
    programs._open()

    def of(function, *args, **keywords):
        programs._know_libraries()
        mine = signature(function, args, keywords)
        native = programs._signature(function, args, keywords)
        assert native == mine and list(map(type, native or ())) == list(map(type, mine or ()))
        return mine

    return of


def address(x):
    return x.ctypes.data if isinstance(x, np.ndarray) else x.data_ptr()


# --- signatures ---------------------------------------------------------------------------

ARRAY = {
    "of": ["numpy", "gpu", "gpu"], "ordinal": [0, 1],
    "shape": [(4, 6), (6, 4), (3, 8), (24,), (2, 3, 4)],
    "lies": [np.s_[:], np.s_[:], np.s_[::2], np.s_[..., ::2], np.s_[:0], np.s_[..., :0]],
    "dtype": ["f4", "i4", "f8"], "shift": [0, 4, 8],
}  # fmt: skip
CALL = {
    "function": ["gemm", MATMUL], "c": [None, "out", "same", "other"], "out": [True, False],
    "keywords": [{}, {"beta": 1}, {"beta": True}, {"beta": 1.0}, {"alpha": 1}, {"kernel": "1"}],
    "stream": [12, 13],
}  # fmt: skip
DRAWN = CALL | {(i, name): some for i in range(4) for name, some in ARRAY.items()}


class Drawn:
    """A call as it was drawn. Each time it is `made`, its arrays are others."""

    def __init__(self, rng, torch):
        self.rng, self.torch = rng, torch
        self.choices = {name: self.draw(name) for name in DRAWN}
        if rng.random() < 0.8:  # all of the GPU, or none
            of = DRAWN[0, "of"][rng.integers(2)]
            self.choices |= {(i, "of"): of for i in range(4)}

    def draw(self, name):
        return DRAWN[name][self.rng.integers(len(DRAWN[name]))]

    def array(self, i):
        """An array, and how it lies: without gaps, CuPy's matrices have one way."""
        of, ordinal, shape, lies, dtype, shift = (self.choices[i, name] for name in ARRAY)
        x = aligned(shape, dtype, shift)[lies]
        if of == "numpy":
            return x, (None, x.shape, x.strides, dtype)
        made = self.torch.from_numpy(x) if self.torch else x.view(There)
        made.ordinal = ordinal
        whole = x.flags.c_contiguous and x.ndim == 2
        return made, (ordinal, x.shape, "whole" if whole else x.strides, dtype)

    def made(self):
        """The function, the arguments, the keywords, and all that such calls have in common; None
        where nothing is kept of them."""
        function, how, given, keywords, stream = (self.choices[name] for name in CALL)
        (a, of_a), (b, of_b), (c, of_c), (out, of_out) = map(self.array, range(4))
        options, given = repr(keywords), given or how in ("out", "same")
        if how == "same":  # an array of the same memory
            c, of_c = out.view(out.dtype), of_out
            if not isinstance(c, np.ndarray):
                c.ordinal = out.ordinal
        args = a, b, *([out if how == "out" else c] if how else [])
        keywords = keywords | ({"out": out} if given else {})
        if function == MATMUL and how:  # whose third is `out`
            if given:
                return function, args, keywords, None
            given, out, of_out, how = True, c, of_c, None
        arrays = a, b, *([c] if how in ("same", "other") else []), *([out] if given else [])
        there = [x for x in arrays if type(x) is not np.ndarray]
        without = len(there) < len(arrays) or not all(map(address, there))
        if self.torch and there and without:
            return function, args, keywords, None
        if how == "same" and type(out) is np.ndarray:
            how = "other"
        at = [type(x) is not np.ndarray and address(x) % 16 for x in (a, b, *[out] * given)]
        lies = of_a, of_b, how in ("same", "other") and of_c, given and of_out
        alike = function, options, how, stream if there else None, at, lies
        return function, args, keywords, repr(alike)


def test_signatures_are_equal_where_calls_are_alike(library, gpu, made, rng, request):
    """Of calls of which one thing was drawn anew, and their arrays."""
    torch = request.getfixturevalue("tensors") if library == "torch" else None
    equal, several = 0, 1500
    for _ in range(several):
        drawn, found = Drawn(rng, torch), []
        changed = list(DRAWN)[rng.integers(len(DRAWN))]
        for _ in range(2):
            gpu.stream = drawn.choices["stream"]
            function, args, keywords, alike = drawn.made()
            found.append((made(function, *args, **keywords), alike, args))  # which stay alive
            drawn.choices[changed] = drawn.draw(changed)
        (mine, alike, _), (other, other_alike, _) = found
        assert (mine is None) == (alike is None), alike
        assert (mine == other) == (alike == other_alike), (alike, other_alike)
        equal += mine is not None and mine == other
    assert several / 10 < equal < several


def test_calls_that_have_no_signature(gpu, made):
    x = there(4, 4)
    of_others = np.zeros((4, 4)).view(type("Mine", (np.ndarray,), {}))
    for args in (x,), (x, x, x, x), (x, [[1.0]]), (of_others, x), (x, of_others), (x, x, [1.0]):
        assert made("gemm", *args) is None
    assert made("gemm", x, x, out=[[1.0]]) is None
    for given in x, None:
        assert made(MATMUL, x, x, given, out=x) is None  # Python refuses it
        assert made(MATMUL, x, x, x, out=given) is None
    whole = made(MATMUL, x, x, x)
    assert whole == made(MATMUL, x, x, out=x) == made(MATMUL, x, x, **{"".join(("o", "ut")): x})


def test_the_third_of_matmul_is_out():
    """The first time as ever after."""
    a, out = np.ones((3, 3)), np.empty((3, 3))
    for matmul in hybrid_gemm.Runner(device="cpu").matmul, hybrid_gemm.matmul:
        for _ in range(2):
            assert matmul(a, a, out) is out and matmul(a, a, out=out) is out
            for third, given in (None, out), (out, None):
                with pytest.raises(TypeError):
                    matmul(a, a, third, out=given)


def test_tensors_that_are_followed_or_lie_otherwise_have_no_signature(tensors, made):
    torch, forward = tensors, tensors.autograd.forward_ad
    a, b, out = (torch.ones(4, 4) for _ in range(3))
    plain = made("gemm", a, b, a.clone(), out=out)
    assert plain is not None
    followed, parameter = torch.ones(4, 4, requires_grad=True), torch.nn.Parameter(torch.ones(4, 4))
    host, freed, complex_ = torch.ones(4, 4), torch.ones(4, 4), torch.ones(4, 4) + 0j
    host.ordinal = -1
    freed.untyped_storage().resize_(0)
    mine = torch.Tensor._make_subclass(type("Mine", (torch.Tensor,), {}), torch.ones(4, 4))
    refused = {
        "followed": followed, "a parameter": parameter, "of the host": host, "freed": freed,
        "negated": torch._neg_view(a), "conjugated": complex_.conj(), "a subclass": mine,
        "sparse": a.to_sparse(), "NumPy's": np.ones((4, 4), "f4"), "CuPy's": there(4, 4),
    }  # fmt: skip
    for name, x in refused.items():
        for i in range(4):
            args = [a, b, a.clone(), out]
            args[i] = x
            assert made("gemm", *args[:3], out=args[3]) is None, (name, i)
    with torch.no_grad():
        for x in followed, parameter:
            assert made("gemm", x, b, x, out=out) == plain
    assert made("gemm", complex_, complex_) is not None
    with forward.dual_level():
        assert made("gemm", a, forward.make_dual(b, b)) is None
        assert made("gemm", a, b) is None
    assert made("gemm", a, b) is not None


# --- native play --------------------------------------------------------------------------


class Kept:
    """Programs of products, whose launch is `prepared`, after that of a copy of C, `copied`, and,
    with `aside`, of one of A to a slot of its own; `slow` are the slots that Python played."""

    def __init__(self, torch=None, *, turned=False, aside=False):
        self.programs, self.prepared, self.copied, self.slow = (
            Programs(),
            Prepared(),
            Prepared(),
            [],
        )
        self.torch, self.turned, self.aside, self.shift = torch, turned, aside, 0

    def keep(self, function, *args, **keywords):
        """Has a program of calls as this one."""
        a, b = args[:2]
        shape, size = (len(a), b.shape[1]), a.itemsize
        make, out = (self.new, shape, a.dtype), keywords.get("out")
        if self.torch:
            make = self.torch.Tensor.new_empty, shape, None
        arrays = a, b, there(*shape, dtype=f"f{size}") if out is None else out
        steps = [x.strides if isinstance(x, There) else [size * s for s in x.stride()]
                 for x in arrays]  # fmt: skip
        reaches = (reach(x.shape, s, size) for x, s in zip(arrays, steps, strict=True))
        left, right = (B, A) if self.turned else (A, B)
        plan = [(self.prepared, (left, right, OUT))]
        if self.aside:
            plan = [(self.copied, (A, A, 4)), (self.prepared, (4, B, OUT))]
        c = args[2] if len(args) == 3 and function != MATMUL else None
        if c is not None and address(c) != address(arrays[2]):
            plan.insert(0, (self.copied, (C, C, OUT)))
        at = {A: address(a), B: address(b), OUT: address(arrays[2]), C: 0, 4: 0}
        launches = [
            SimpleNamespace(native=(
                native_launch(x.native, CONTEXT, phase(*[at[i] for i in slots]), slots), make, x
            )) for x, slots in plan
        ]  # fmt: skip
        launch = Launches(launches, dict(zip((A, B, OUT), reaches, strict=True)))
        launch.join()
        self.programs.keep(function, args, keywords, Program([self.played], launch=launch))
        if not self.programs._state:
            self.programs._open()

    def new(self, shape, dtype):
        return aligned(shape, dtype, self.shift).view(There)

    def played(self, slots):
        self.slow.append(tuple(slots))
        if slots[OUT] is None:
            slots[OUT] = "played"

    def __call__(self, function, *args, **keywords):
        return self.programs.play(function, args, keywords)


@pytest.fixture(params=[False, True], ids=["", "turned"])
def kept(request, library, new):
    return Kept(sys.modules["torch"] if library == "torch" else None, turned=request.param)


def test_a_kept_program_is_started_natively(kept, new):
    """With the addresses of this call's arrays; a new C is made, and C is copied there."""
    order = (1, 0, 2) if kept.turned else (0, 1, 2)

    def started(*arrays, c=None):
        assert not kept.slow
        at = [address(x) for x in arrays]
        assert kept.prepared.started.pop() == tuple(at[i] for i in order)
        if c is not None:
            assert kept.copied.started.pop() == (address(c), address(c), at[2])
        assert not kept.prepared.started and not kept.copied.started

    pair, into = lambda: (new(8, 4), new(4, 12)), lambda: new(8, 12)
    assert kept("gemm", *pair(), out=into()) is None
    kept.keep("gemm", *pair(), out=into())
    kept.keep(MATMUL, *pair(), out=into())
    for _ in range(2):
        (a, b), out = pair(), into()
        assert kept("gemm", a, b, out=out) is out
        started(a, b, out)
        assert kept(MATMUL, a, b, out) is out
        started(a, b, out)
    kept.keep("gemm", *pair(), beta=2.0)
    a, b = pair()
    out = kept("gemm", a, b, beta=2.0)
    started(a, b, out)
    assert type(out) is type(a) and tuple(out.shape) == (8, 12) and out.dtype == a.dtype
    c, row = into(), new(12)
    for of in c, c[:]:  # the same array, and one of the same memory
        kept.keep("gemm", *pair(), of, beta=1.0, out=c)
        assert kept("gemm", a, b, of, beta=1.0, out=c) is c
        started(a, b, c)
    for given in {}, {"out": into()}:
        kept.keep("gemm", *pair(), row, beta=1.0, **given)
        out = kept("gemm", a, b, row, beta=1.0, **given)
        started(a, b, out, c=row)
    kept.programs.forget()
    assert kept("gemm", a, b, out=out) is None


def test_what_is_copied_first_takes_memory_of_its_own(library, new, gpu):
    """Not of CuPy's where a graph records the call."""
    torch = sys.modules["torch"] if library == "torch" else None
    kept = Kept(torch, aside=True)
    for given in {}, {"out": new(8, 12)}:
        for gpu.capturing in False, True:
            a, b = new(8, 4), new(4, 12)
            kept.keep("gemm", a, b, **given)
            out = kept("gemm", a, b, **given)
            if gpu.capturing and not torch:
                assert len(kept.slow) == 1 and not kept.copied.started
                kept.slow.clear()
                continue
            assert not kept.slow
            (_a, _b, aside), product = kept.copied.started.pop(), kept.prepared.started.pop()
            assert _a == address(a) and product == (aside, address(b), address(out))
            assert aside not in map(address, (a, b, out))
            assert not kept.copied.started and not kept.prepared.started


def test_what_a_launch_is_not_for_is_played_by_python(kept, new, gpu):
    a, b, out = new(8, 4), new(4, 12), new(8, 12)
    kept.keep("gemm", a, b, out=out)
    kept.keep("gemm", a, b)
    kept.keep("gemm", a, b, out, out=out)

    def by_python(*args, **keywords):
        done = kept("gemm", *args, **keywords)
        (slots,) = kept.slow
        assert all(x is y for x, y in zip(slots, (*args, *[None] * (3 - len(args))), strict=False))
        assert done is keywords.get("out", "played") and not kept.prepared.started
        kept.slow.clear()

    gpu.context = 99
    by_python(a, b, out=out)
    gpu.context = CONTEXT
    for kept.prepared.status in BUSY, 700:
        by_python(a, b, out=out)
        by_python(a, b, out, out=out)
        by_python(a, b)
    kept.prepared.status = 0
    kept.shift = 4
    if not kept.torch:  # a new C that lies otherwise
        by_python(a, b)
    assert kept("gemm", a, b, out=out) is out and not kept.slow


@pytest.mark.parametrize("sides", [(8, 8), (1, 8), (8, 1)], ids=str)
def test_what_may_overlap_is_played_by_python(sides, gpu):
    """Blocks of one matrix, as the updates of a blocked factorization have them: started unless
    they meet, which native code finds as Python does."""
    whole, kept, meeting = there(24, 64), Kept(), 0
    m, k = sides
    a, b = whole[8 : 8 + m, :k], whole[:k, 8:16]
    lies = lambda x: reach(x.shape, x.strides, x.itemsize)  # noqa: E731
    for wide in whole, whole.reshape(12, 128):  # whose rows are as far apart as those of A, and not
        kept.keep("gemm", a, b, out=there(*wide.shape)[:m, :8])
        for row, col in itertools.product(range(0, len(wide) - 7, 4), range(0, 17, 4)):
            out = wide[row : row + m, col : col + 8]
            kept.slow.clear()
            assert kept("gemm", a, b, out=out) is out
            exact = np.shares_memory(a, out) or np.shares_memory(b, out)
            meets = any(lies(x).meets(address(x), lies(out), address(out)) for x in (a, b))
            assert bool(kept.slow) == meets, (row, col)
            assert meets == exact if wide is whole else meets >= exact
            meeting += exact
    assert 5 < meeting < 25


def test_autograd_is_told_of_what_is_written(tensors, monkeypatch):
    torch, kept, told = tensors, Kept(tensors), []
    tell = torch.autograd.graph.increment_version
    note = lambda x: told.append(x) or tell(x)  # noqa: E731
    monkeypatch.setattr(torch.autograd.graph, "increment_version", note)
    a, b, out = torch.ones(8, 4), torch.ones(4, 12), torch.ones(8, 12)
    kept.keep("gemm", a, b, out=out)
    kept.keep("gemm", a, b)
    before = out._version
    assert kept("gemm", a, b, out=out) is out and out._version == before + 1
    assert kept("gemm", a, b)._version == 0
    with torch.inference_mode():
        made = torch.ones(8, 12)  # which has no version
    assert kept("gemm", a, b, out=made) is made and not kept.slow and len(told) == 1


def test_gradients_of_complex_products_are_conjugated_each_time(tensors):
    """The second came of a program of the conjugate, played with the tensor itself."""
    torch, operation = tensors, pytest.importorskip("hybrid_gemm.torch")
    for _ in range(3):
        a, b, w = (torch.randn(s, dtype=torch.complex128) for s in ((4, 6), (4, 5), (6, 5)))
        operation.gemm(a.requires_grad_(), b.requires_grad_(), trans_a=True).backward(w)
        torch.testing.assert_close((a.grad, b.grad), ((b.conj() @ w.mT), (a.conj() @ w)))


@pytest.mark.parametrize("where", ["data", "get_current_stream", "new"])
def test_ctrl_c_ends_a_call_and_other_errors_leave_it_to_python(where, gpu, monkeypatch):
    """In what native code asks: an address, the stream, a new C."""
    kept, errors = Kept(), []

    def failing(do):
        def call(*given, **more):
            if errors:
                raise errors.pop()
            return do(*given, **more)

        return call

    if where == "data":
        monkeypatch.setattr(There, where, property(failing(There.data.fget)))
    else:
        owner = next(x for x in (kept, sys.modules["cupy"].cuda) if hasattr(x, where))
        monkeypatch.setattr(owner, where, failing(getattr(owner, where)))
    a, b, c = there(8, 4), there(4, 12), there(8, 12)
    kept.keep("gemm", a, b, c)
    errors.append(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        kept("gemm", a, b, c)
    errors.append(MemoryError())
    has_signature = where == "new"
    assert kept("gemm", a, b, c) == ("played" if has_signature else None)
    assert not kept.prepared.started and len(kept.slow) == has_signature


def test_references_are_given_back(kept, new, gpu):
    """By calls that are started, are Python's, have no program, no signature, or fail."""
    a, b, c, out = new(8, 4), new(4, 12), new(8, 12), new(8, 12)
    kept.keep("gemm", a, b, out=out)
    kept.keep("gemm", a, b, c)
    name, value, prepared = "".join(("o", "ut")), 2.5, kept.prepared
    calls = [
        ((a, b), {"out": out}), ((a, b, c), {}), ((a, b), {"alpha": value, "out": out}),
        ((a,), {}), ((a, [1]), {}), ((a, b), {"alpha": [], "out": out}),
        ((a, b), {"alpha": value, name: out}), ((a, b, c), {"out": out, "alpha": value}),
    ]  # fmt: skip
    things = a, b, c, out, value, type(a), a.dtype, kept.programs._state, prepared

    def play_all():
        for prepared.status, gpu.context in itertools.product((0, BUSY, 700), (CONTEXT, 99)):
            for args, keywords in calls:
                kept("gemm", *args, **keywords)
                kept.programs.play("gemm", args, keywords)
                kept.programs._signature("gemm", args, keywords)
        kept.slow.clear()
        prepared.started.clear()
        kept.copied.started.clear()

    play_all()
    before, blocks = [sys.getrefcount(x) for x in things], sys.getallocatedblocks()
    for _ in range(40):
        play_all()
    grown = [sys.getrefcount(x) - y for x, y in zip(things, before, strict=True)]
    assert max(map(abs, grown)) < 20 and sys.getallocatedblocks() - blocks < 200, grown
