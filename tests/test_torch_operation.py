"""The operation of PyTorch's: gradients, transforms, compiled programs."""

import itertools
import warnings
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
from support.arrays import integers
from support.devices import needs

import hybrid_gemm as hg
from hybrid_gemm.errors import DTypeError, HybridGemmWarning, UnavailableError, UsageError
from hybrid_gemm.problem import FLOATS
from hybrid_gemm.programs.program import Call
from hybrid_gemm.ranks.distributed_operands import DistributedOperands

on_cuda = needs("cuda")
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


@pytest.fixture(params=["PyTorch's", "ours"])
def op(torch, request, monkeypatch):
    """The operation, whose products of tensors on the CPU are PyTorch's own; and as it follows
    gradients on a GPU."""
    import hybrid_gemm.torch as operation

    if request.param == "ours":
        monkeypatch.setattr(operation, "_lie_on_the_cpu", lambda *tensors: False)
        monkeypatch.setattr(operation, "_on_gpu", operation._on_cpu)
    return operation.gemm


DTYPES = [
    *FLOATS, "complex64", "complex128", *(f"{u}int{b}" for u in ("", "u") for b in (8, 16, 32, 64))
]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
def test_tensors_on_the_cpu_are_pytorchs_own_products(torch, rng, monkeypatch, dtype):
    """Whose threads NumPy's BLAS would hold up; with this package's dtypes and factors."""
    import hybrid_gemm.torch as operation

    a, b, c = (integers(rng, s, "i8") for s in ((5, 7), (7, 3), (1, 3)))
    a = abs(a)
    x, y, z = (torch.from_numpy(v).to(getattr(torch, dtype)) for v in (a, b, c))
    monkeypatch.setattr(operation, "_untracked", None)
    for beta, alpha in itertools.product((0, 1, -2), (0, 1, -3, 300)):
        if dtype == "float16" and alpha == 300:
            continue
        made = operation.gemm(x.T, y, z if beta else None, alpha=alpha, beta=beta, trans_a="t")
        expected = torch.from_numpy(alpha * a @ b + beta * c).to(x.dtype)
        assert made.dtype == x.dtype and torch.equal(made, expected), (alpha, beta)
    if x.is_floating_point():  # as in BLAS, what is not read may be NaN
        bad = torch.full_like(x, torch.nan)
        assert not operation.gemm(bad, y, alpha=0).count_nonzero()
        with pytest.warns(HybridGemmWarning, match="C is not read"):
            assert operation.gemm(x, y, bad[:, :1], beta=-0.0).isfinite().all()
    for other in ("float64", "int64")[: 1 if dtype == "bfloat16" else 2]:
        wider = torch.from_numpy(b).to(getattr(torch, other))
        made, numpys = operation.gemm(x, wider), np.dtype(dtype)
        assert made.dtype == getattr(torch, np.result_type(numpys, other).name)
        assert torch.equal(made, torch.from_numpy(a @ b).to(made.dtype))


def test_options_and_modes_mean_the_same_for_tensors_on_the_cpu(torch, op):
    a = torch.ones(4, 4)
    for given, says in (
        ({"compute": "tf32"}, "compute tf32 needs tensor cores"),
        ({"kernel": "cublas"}, "kernel cublas does not run on the cpu device"),
        ({"kernel": "nope"}, "no kernel is called 'nope'"),
        ({"alpha": 1e39}, "alpha=1e.39 does not fit float32"),
        ({"beta": 1.0}, "beta=1.0 scales C, and no C was given"),
    ):
        with pytest.raises((ValueError, UnavailableError), match=says):
            op(a, a, **given)
    assert torch.equal(op(a, a, compute="auto"), 4 * a)
    with torch.autocast("cpu"):
        assert op(a, a).dtype == torch.float32
        assert op(a + 2**-20, a)[0, 0] > 4
    with pytest.raises(UsageError, match=r"A is a sparse_coo tensor .*\.to_dense\(\)"):
        op(a.to_sparse(), a)


def test_tensors_of_three_dimensions_are_told_what_works(torch, op):
    x, w = torch.ones(2, 3, 4, requires_grad=True), torch.ones(4, 5)
    for multiply in op, hg.gemm, hg.matmul:
        with pytest.raises(UsageError, match=r"x\.flatten\(0, -2\)"):
            multiply(x, w)
    made = op(x.flatten(0, -2), w).unflatten(0, x.shape[:-1])
    made.sum().backward()
    assert made.shape == (2, 3, 5) and (x.grad == 5).all()


@pytest.mark.parametrize("trans_a", [False, True])
@pytest.mark.parametrize("trans_b", [False, True])
def test_gradients(torch, op, trans_a, trans_b):
    """First and second ones, of A, B and a C that broadcasts."""
    torch.manual_seed(0)

    def leaf(*shape):
        return torch.randn(*shape, dtype=torch.float64, requires_grad=True)

    a, b = leaf(*(3, 2)[:: -1 if trans_a else 1]), leaf(*(2, 4)[:: -1 if trans_b else 1])

    def product(a, b, c):
        return op(a, b, c, alpha=1.5, beta=-0.5, trans_a=trans_a, trans_b=trans_b)

    for shape in (3, 4), (4,), (3, 1):
        c = leaf(*shape)
        x, y = (v.T if t else v for v, t in ((a, trans_a), (b, trans_b)))
        torch.testing.assert_close(product(a, b, c), 1.5 * x @ y - 0.5 * c)
        assert torch.autograd.gradcheck(product, (a, b, c))
        assert torch.autograd.gradgradcheck(product, (a, b, c))


@pytest.mark.parametrize("trans_a", [False, True])
def test_transforms_of_functions_follow_it(torch, op, trans_a):
    torch.manual_seed(0)

    def leaf(*shape):
        return torch.randn(*shape, dtype=torch.float64)

    a, b, c = leaf(*(3, 2)[:: -1 if trans_a else 1]), leaf(2, 4), leaf(3, 4)
    stack, others = leaf(5, *a.shape), leaf(5, *b.shape)

    def mine(a, b, c):
        return op(a, b, c, alpha=1.5, beta=-0.5, trans_a=trans_a)

    def theirs(a, b, c):
        return 1.5 * (a.T if trans_a else a) @ b - 0.5 * c

    def alone(a, b):
        return op(a, b, trans_a=trans_a)

    func, vmap = torch.func, torch.vmap

    def squares(f):
        return lambda *x: (f(*x) ** 2).sum()

    first, second, both = (0, None, None), (None, 0, None), (0, 0)
    for transformed in (
        lambda f: func.grad(squares(f), (0, 1, 2))(a, b, c),
        lambda f: func.jacrev(f)(a, b, c),
        lambda f: func.jacrev(func.grad(squares(f)))(a, b, c),
        lambda f: vmap(f, first)(stack, b, c),
        lambda f: vmap(f, second, 1)(a, others, c),
        lambda f: vmap(func.grad(squares(f)), first)(stack, b, c),
        lambda f: func.grad(lambda x: vmap(squares(f), first)(x, b, c).sum())(stack),
    ):
        torch.testing.assert_close(transformed(mine), transformed(theirs))
    for x, y, dims in (
        (stack, b, first[:2]), (stack.movedim(0, 1), b, (1, None)), (a, others, second[:2]),
        (stack, others, both),
    ):  # fmt: skip
        wanted = vmap(lambda x, y: theirs(x, y, 0 * c) / 1.5, dims)(x, y)
        torch.testing.assert_close(vmap(alone, dims)(x, y), wanted)


@pytest.mark.parametrize("trans_a", [False, True])
def test_many_gradients_at_once(torch, op, trans_a):
    """As `jacobian` and `hessian` ask for them with `vectorize`, from stacks that no transform of
    `torch.func` makes; also of gradients."""
    torch.manual_seed(0)
    given = [
        torch.randint(-3, 4, shape, dtype=torch.float64, requires_grad=True)
        for shape in ((3, 2)[:: -1 if trans_a else 1], (2, 4), (4,))
    ]

    def product(a, b, c):
        return op(a, b, c, alpha=2.0, beta=-1.0, trans_a=trans_a)

    made, stack = product(*given), torch.randint(-3, 4, (5, 3, 4), dtype=torch.float64)
    at_once = torch.autograd.grad(made, given, stack, retain_graph=True, is_grads_batched=True)
    each = [torch.autograd.grad(made, given, x, retain_graph=True) for x in stack]
    for found, one_by_one in zip(at_once, zip(*each, strict=True), strict=True):
        assert torch.equal(found, torch.stack(one_by_one))

    def squares(*given):
        return product(*given).square().sum()

    jacobian, hessian = torch.autograd.functional.jacobian, torch.autograd.functional.hessian
    for ask, function in (jacobian, product), (hessian, squares):
        found, want = (ask(function, tuple(given), vectorize=x) for x in (True, False))
        torch.testing.assert_close(found, want, rtol=0, atol=0)


def test_gradients_of_what_a_transform_left_behind_end_there(torch, op):
    kept = []
    torch.func.grad(lambda x: (kept.append(x), x.sum())[1])(torch.ones(2, 2))
    assert kept[0].requires_grad and not op(kept[0], torch.ones(2, 2)).requires_grad
    weights = torch.ones(2, 2, requires_grad=True)
    op(kept[0], weights).sum().backward()
    assert weights.grad.tolist() == [[2.0, 2.0], [2.0, 2.0]]


def test_transforms_of_empty_stacks(torch, op):
    a, none = torch.ones(3, 2), torch.ones(0, 2, 4)
    for dims, given in (((None, 0), (a, none)), ((0, 0), (torch.ones(0, 3, 2), none))):
        made = torch.vmap(op, dims)(*given)
        assert made.shape == (0, 3, 4) and made.dtype == torch.float32
        summed = torch.func.grad(lambda x, y, dims=dims: torch.vmap(op, dims)(x, y).sum())
        assert summed(*given).count_nonzero() == 0


def test_functions_without_writing_in_place_hold_the_operation(torch, op):
    from torch.fx.experimental.proxy_tensor import make_fx

    a, b = torch.randn(3, 2), torch.randn(2, 4)
    function = torch.func.functionalize(lambda a: op(a, b))
    torch.testing.assert_close(function(a), a @ b)
    torch.testing.assert_close(torch.vmap(function)(torch.stack([a, a])), torch.stack([a @ b] * 2))
    targets = [x.target for x in make_fx(function)(a).graph.nodes]
    assert torch.ops.hybrid_gemm.gemm.default in targets


def test_tangents_are_refused_and_not_lost(torch, op):
    from torch.autograd import forward_ad

    a, b = torch.ones(3, 2), torch.ones(2, 4)
    with pytest.raises(UsageError, match="A is a tensor with a tangent"):
        torch.func.jvp(lambda a: op(a, b), (a,), (a,))
    with forward_ad.dual_level():
        with pytest.raises(UsageError, match="A is a tensor with a tangent"):
            op(forward_ad.make_dual(a, a), b)
        factor = forward_ad.make_dual(torch.tensor(2.0), torch.tensor(1.0))
        for multiply, name in itertools.product((op, hg.gemm), ("alpha", "beta")):
            with pytest.raises(UsageError, match=f"{name} is a tensor that .* has a tangent"):
                multiply(a, b, torch.ones(4), **{"beta": 1.0, name: factor})
        call = Call(np.ones((3, 3)), np.ones((3, 3)), alpha=factor)
        one = SimpleNamespace(rank=0, size=1)
        with pytest.raises(UsageError, match=r"alpha is a tensor that .* has a tangent"):
            DistributedOperands(one, call, "replicated", None, 0).told()  # which would drop it
        torch.testing.assert_close(op(a, b), a @ b)
    with pytest.raises(UsageError, match=r"backward gradients alone, .* jacrev\(jacrev\("):
        torch.func.hessian(lambda a: op(a, b).sum())(a)
    # What PyTorch calls without `op`: it would give derivatives of 0.
    with pytest.raises(UsageError, match="B is a tensor with a tangent"):
        torch.func.jvp(lambda b: torch.ops.hybrid_gemm.gemm(a, b), (b,), (b,))
    compiled = torch.compile(
        lambda a: torch.func.jvp(lambda x: op(x, b), (a,), (a,)), backend="eager"
    )
    with pytest.raises(RuntimeError, match="A is a tensor with a tangent"):
        compiled(a)


@pytest.mark.parametrize("of_a", [False, True])
@pytest.mark.parametrize("of_b", [False, True])
def test_the_registered_operation_conjugates_without_a_transpose(torch, op, of_a, of_b):
    torch.manual_seed(0)
    a, b = (torch.randn(3, 3, dtype=torch.complex128, requires_grad=True) for _ in "ab")

    def product(a, b):
        return torch.ops.hybrid_gemm.gemm(a, b, conj_a=of_a, conj_b=of_b)

    x, y = (v.conj() if conj else v for v, conj in ((a, of_a), (b, of_b)))
    torch.testing.assert_close(product(a, b), x @ y)
    assert torch.autograd.gradcheck(product, (a, b))


@pytest.mark.parametrize("dtype", ["float64", "complex128"])
@pytest.mark.parametrize("trans_a", [False, True, "c"])
@pytest.mark.parametrize("trans_b", [False, True, "c"])
def test_gradients_of_conjugate_transposes(torch, op, dtype, trans_a, trans_b):
    torch.manual_seed(0)

    def leaf(*shape):
        return torch.randn(*shape, dtype=getattr(torch, dtype), requires_grad=True)

    a, b = leaf(*(3, 2)[:: -1 if trans_a else 1]), leaf(*(2, 4)[:: -1 if trans_b else 1])

    def product(a, b):
        return op(a, b, trans_a=trans_a, trans_b=trans_b)

    ops = {False: lambda x: x, True: lambda x: x.mT, "c": lambda x: x.mH}
    torch.testing.assert_close(product(a, b), ops[trans_a](a) @ ops[trans_b](b))
    assert torch.autograd.gradcheck(product, (a, b))
    assert torch.autograd.gradgradcheck(product, (a, b))


def test_gradients_have_the_dtypes_of_their_tensors(torch, op):
    a = torch.ones(3, 2, requires_grad=True)
    b = torch.ones(2, 4, dtype=torch.float64, requires_grad=True)
    op(a, b).sum().backward()
    assert a.grad.dtype == torch.float32 and b.grad.dtype == torch.float64
    assert torch.equal(a.grad, torch.full((3, 2), 4.0))


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("real", "abc")
def test_gradients_of_a_real_matrix_beside_complex_ones(torch, op, real):
    """They are real, and PyTorch is not asked to drop an imaginary part, of which it warns."""
    torch.manual_seed(0)
    torch.set_warn_always(True)
    dtypes = [torch.float64 if name == real else torch.complex128 for name in "abc"]
    a, b, c = (
        torch.randn(*shape, dtype=dtype, requires_grad=True)
        for shape, dtype in zip([(3, 2), (4, 2), (3, 1)], dtypes, strict=True)
    )

    def product(a, b, c):
        return op(a, b, c, alpha=1.5, beta=-0.5, trans_b="c")

    try:
        assert torch.autograd.gradcheck(product, (a, b, c))
        assert torch.autograd.gradgradcheck(product, (a, b, c))
    finally:
        torch.set_warn_always(False)


@pytest.mark.parametrize("trans_b", [False, True])
def test_gradients_of_complex_products(torch, op, trans_b):
    torch.manual_seed(0)
    a, b = (
        torch.randn(*s, dtype=torch.complex128, requires_grad=True)
        for s in ((3, 2), (4, 2) if trans_b else (2, 4))
    )
    assert torch.autograd.gradcheck(lambda a, b: op(a, b, alpha=1.5, trans_b=trans_b), (a, b))


def test_the_operation_is_whole(torch, op):
    """Schema, fake implementation, autograd and dynamic shapes, as PyTorch checks them."""
    a, b = torch.randn(3, 2, requires_grad=True), torch.randn(2, 4)
    for dtype in torch.float32, torch.float64, torch.bfloat16:
        torch.library.opcheck(torch.ops.hybrid_gemm.gemm, (a.to(dtype), b.to(dtype)))
    c = torch.randn(4, requires_grad=True)
    torch.library.opcheck(torch.ops.hybrid_gemm.gemm, (a, b, c), {"beta": 2.0})
    meta = op(a.to("meta"), b.to("meta").double())
    assert meta.shape == (3, 4) and meta.dtype == torch.float64
    with pytest.raises(ValueError, match="shapes do not match"):
        op(a, a)
    with pytest.raises(RuntimeError, match="shapes do not match"):
        op(a.to("meta"), a.to("meta"))
    with pytest.raises(UsageError, match="lie on cpu and meta; bring them to one device"):
        op(a, b.to("meta"))
    with pytest.raises(TypeError, match="did you mean compute"):
        op(a, b, computes="tf32")


def test_what_looks_at_operations_sees_it(torch, op):
    """Tracers and transforms; where there are none, PyTorch's dispatcher is not asked."""
    from torch.fx.experimental.proxy_tensor import make_fx

    a, b = torch.randn(3, 2), torch.randn(2, 4)
    traced = make_fx(lambda a, b: op(a, b, alpha=2.0))(a, b)
    assert any(x.target is torch.ops.hybrid_gemm.gemm.default for x in traced.graph.nodes)
    torch.testing.assert_close(traced(b.T, a.T), 2 * (b.T @ a.T))
    traced = torch.fx.symbolic_trace(lambda a, b: op(a, b, alpha=2, trans_b="c"))  # without values
    torch.testing.assert_close(traced(a, b.T), 2 * a @ b)
    stack = torch.randn(5, 3, 2)
    torch.testing.assert_close(torch.vmap(lambda a: op(a, b))(stack), stack @ b)
    seen = []

    class Seen(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(function)
            return function(*args, **(kwargs or {}))

    class SeenAsFunction(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            seen.append(function)
            return function(*args, **(kwargs or {}))

    with Seen():
        op(a, b)
    assert torch.ops.hybrid_gemm.gemm.default in seen
    with SeenAsFunction(), torch.device("cpu"):
        made = op(a, b.requires_grad_())
    assert torch.ops.hybrid_gemm.gemm in seen
    torch.testing.assert_close(made, a @ b)
    with torch.device("cpu"):  # looks at no product
        assert op(a, b).grad_fn.name() in ("_FollowedBackward", "MmBackward0")
    with pytest.raises(UsageError, match="trans_a='x'"):
        op(a, b, trans_a="x")


@on_cuda
@pytest.mark.slow
def test_compiled_programs_take_graphs(there, rng):
    import hybrid_gemm.torch

    torch = there

    @torch.compile(mode="reduce-overhead", fullgraph=True)
    def layer(x, y):
        return torch.relu(hybrid_gemm.torch.gemm(x, y)) + 1

    for seed in range(6):
        a, b = (torch.from_numpy(integers(rng, s)).cuda() for s in ((70, 90), (90, 50)))
        assert torch.equal(layer(a, b), torch.relu(a @ b) + 1), seed


@pytest.mark.parametrize(
    "backend",
    ["aot_eager", pytest.param("inductor", marks=[pytest.mark.slow, pytest.mark.campaign])],
)
def test_compiled_programs_hold_one_operation(torch, op, backend):
    pytest.importorskip("torch._dynamo")

    @torch.compile(fullgraph=True, backend=backend, dynamic=True)
    def layer(x, w, bias):
        return torch.relu(op(x, w, bias, beta=1.0)).sum()

    torch.manual_seed(0)
    for rows in (4, 6):
        given = [torch.randn(*s, requires_grad=True) for s in ((rows, 5), (5, 3), (3,))]
        layer(*given).backward()
        x, w, bias = (v.detach().clone().requires_grad_() for v in given)
        torch.relu(x @ w + bias).sum().backward()
        for got, expected in zip(given, (x, w, bias), strict=True):
            torch.testing.assert_close(got.grad, expected.grad)
    # The others are called and not traced: NumPy's copies of integers raised as PyTorch's.
    a, b = torch.full((2, 3), 2), torch.full((3, 4), 5)
    runner = hg.Runner(device="cpu", threads=2, split="cols")
    for call in hg.gemm, lambda x, y: runner.run(x, y).c:
        whole = torch.compile(lambda x, y, call=call: call(x + 1, y) - 1, backend="eager")
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert torch.equal(whole(a, b), torch.full((2, 4), 44))


@pytest.mark.parametrize("other", [None, [[1.0]], np.ones((2, 2))])
def test_what_is_no_tensor_is_named(torch, op, other):
    t = torch.ones(2, 2)
    says = f"is of type {type(other).__name__}; a tensor is needed"
    with pytest.raises(DTypeError, match=f"A {says}"):
        op(other, t)
    with pytest.raises(DTypeError, match=f"B {says}"):
        op(t, other)
    if other is not None:
        with pytest.raises(DTypeError, match=f"C {says}"):
            op(t, t, other, beta=1.0)


def test_alpha_and_beta_are_real_numbers(torch, op):
    """NumPy's complex ones would lose their imaginary parts in PyTorch."""
    t = torch.ones(2, 2, dtype=torch.complex64)
    one = torch.tensor(1.0)
    for other in np.complex64(2 + 1j), 2 + 1j, np.array(1j), one * 1j, one > 0, True, "2", None, t:
        with pytest.raises(DTypeError, match="alpha must be a real number here, not"):
            op(t, t, alpha=other)
        with pytest.raises(DTypeError, match="beta must be a real number here, not"):
            op(t.clone().requires_grad_(), t, t, beta=other)
    for two in 2, np.float32(2), np.array(2), 2 * one:
        assert (op(t, t, alpha=two) == 4).all()


def test_whole_factors_beyond_float64_are_exact_or_refused(torch, op):
    """PyTorch passes them to operations as float64."""
    large, one = 2**53 + 1, torch.ones(1, 1, dtype=torch.int64)
    for factor in large, np.int64(large), np.array(large), torch.tensor(large):
        assert op(one, one, alpha=factor).item() == large
        assert op(one, one, one, alpha=0, beta=factor).item() == large
    traced = torch.fx.experimental.proxy_tensor.make_fx(lambda x: op(x, x, alpha=large))
    with pytest.raises(UsageError, match="alpha=9007199254740993 has more than the 53 bits"):
        traced(one)
    assert traced(one.double())(one.double()).item() == 2**53
    even = torch.fx.experimental.proxy_tensor.make_fx(lambda x: op(x, x, x, beta=2**60))(one)
    assert even(one).item() == 2**60 + 1


@on_cuda
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_operation_on_a_gpu(there, op, dtype):
    torch = there
    torch.manual_seed(0)
    a, b = (
        torch.randint(-4, 5, s, device="cuda").to(getattr(torch, dtype)).requires_grad_()
        for s in ((70, 90), (90, 50))
    )
    x, y = (v.detach().clone().double().requires_grad_() for v in (a, b))
    op(a, b).sum().backward()
    (x @ y).sum().backward()
    for got, expected in ((a.grad, x.grad), (b.grad, y.grad)):
        torch.testing.assert_close(got.double(), expected, rtol=1e-2, atol=0)
