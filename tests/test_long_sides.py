"""Sides near 2^31, which kernels count in `int`: launches take less, and products are cut."""

import dataclasses
from types import SimpleNamespace

import ml_dtypes  # noqa: F401 - NumPy knows bfloat16 by it
import numpy as np
import pytest
from support.arrays import fetch, integers, padded, poison
from support.devices import open_device

import hybrid_gemm as hg
from hybrid_gemm import catalog, problem
from hybrid_gemm.arrays.complex_numbers import RealProduct
from hybrid_gemm.devices.checksums import words
from hybrid_gemm.devices.emulator.device import EmulatorDevice
from hybrid_gemm.devices.packed_product import room_of
from hybrid_gemm.errors import UsageError
from hybrid_gemm.execution.checked_device import CheckedDevice
from hybrid_gemm.kernel_choice import on_gpu
from hybrid_gemm.kernel_choice.choose import choose
from hybrid_gemm.kernel_choice.compute_modes import arithmetic_for
from hybrid_gemm.kernel_choice.tables import Machine
from hybrid_gemm.options import Options
from hybrid_gemm.problem import INT_LIMIT, MAX_SIDE
from hybrid_gemm.programs import small_checks
from hybrid_gemm.programs.on_gpu import OneGpu, made_dtypes

KERNELS = [
    kernel
    for kernel in catalog.kernels().values()
    if "emulator" in kernel.runs_on
    and (kernel.role == "gemm" or kernel.in_place)
    and kernel.name != "one_block"
]
LONG = (MAX_SIDE, MAX_SIDE + 1, 2**31 - 65_536, 2**31 - 64, INT_LIMIT)


class Noting(EmulatorDevice):
    """An emulator whose launches are noted and not made."""

    def __init__(self):
        super().__init__()
        self.launched = []

    def load(self, variant, dtype, layouts):
        return variant.kernel

    def launch(self, function, launch, args, stream):
        self.launched.append((function, launch, args))


def matrix(rows, cols, dtype):
    """A row-major matrix of one element's memory, which nobody may read."""
    size = np.dtype(dtype).itemsize
    return np.lib.stride_tricks.as_strided(
        np.zeros(1, dtype), (rows, cols), (cols * size, size), writeable=True
    )


def fits(launch):
    return all(x <= most for x, most in zip(launch.grid, catalog.MAX_GRID, strict=True))


def sides_of(kernel, args):
    """m, n and k of a launch, and its beta."""
    first = 4 if kernel.in_place else 0
    return [int(x) for x in args[first : first + 3]], args[8]


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
@pytest.mark.parametrize("side", range(3), ids="mnk")
def test_no_launch_takes_a_longer_side(kernel, side):
    """And together they take all of it, each element of k once: beta is of the first."""
    dtype = kernel.dtypes[-1]
    for length in LONG:
        m, n, k = sides = [length if i == side else 1 for i in range(3)]
        variant = next((v for v in kernel.variants() if v.takes(*sides, dtype)), None)
        if variant is None:
            pytest.skip(f"{kernel.name} has limits: {', '.join(kernel.limits)}")
        held = {"tfloat32": "float32"}.get(dtype, dtype)
        device, c = Noting(), matrix(m, n, held)
        device.gemm(
            variant, matrix(m, k, held), matrix(k, n, held), c, alpha=1, beta=3,
            stream=device.stream(),
        )  # fmt: skip
        assert all(fits(launch) for _kernel, launch, _args in device.launched)
        made = [sides_of(kernel, args) for x, _launch, args in device.launched if x is kernel]
        assert all(max(x) <= MAX_SIDE for x, _beta in made)
        assert sum(x[side] for x, _beta in made) == length
        if not kernel.in_place:  # whose shares of k are added up by another kernel
            later = [1 if side == 2 else 3] * (len(made) - 1)
            assert [int(beta) for _sides, beta in made] == [3, *later]


@pytest.mark.parametrize("k", [2**26, 65535 * 1024 + 1, INT_LIMIT])
def test_packing_a_long_k_takes_no_more_blocks_than_there_may_be(k):
    device, variant = Noting(), catalog.get("mma").variant()
    a, b, c = matrix(1, k, "float16"), matrix(k, 1, "float16"), matrix(1, 1, "float32")
    device.gemm(variant, a, b, c, alpha=1, beta=0, stream=device.stream())
    packs = [launch for kernel, launch, _args in device.launched if kernel.role == "pack"]
    assert packs and all(map(fits, packs))


@pytest.mark.parametrize("side", range(2), ids="mn")
@pytest.mark.parametrize(("dtype", "terms"), [("float16", 1), ("float32", 1), ("float32", 3)])
def test_packed_operands_are_multiplied_whatever_the_rows(dtype, terms, side):
    """The kernel for tensor cores before and after Hopper's refused more than 65535 tiles."""
    m, n = (65536 * 128 if i == side else 5 for i in range(2))
    device, variant = Noting(), catalog.get("mma").variant({"TERMS": terms})
    a, b, c = matrix(m, 3, dtype), matrix(3, n, dtype), matrix(m, n, "float32")
    device.gemm(variant, a, b, c, alpha=1, beta=0, stream=device.stream())
    assert all(fits(launch) for _kernel, launch, _args in device.launched)
    made = [launch.grid for kernel, launch, _args in device.launched if kernel.name == "mma"]
    assert made and all(np.prod(grid) >= 65536 for grid in made)


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_what_kernels_count_beyond_a_side_is_an_int(kernel):
    for variant in kernel.variants():
        p = variant.params
        beyond = max(*variant.tile, variant.step(kernel.dtypes[0]), *p.values())
        beyond *= 2 * p.get("FLY", p.get("STAGES", 1))
        assert MAX_SIDE + beyond < 2**31


FIRST = 1024  # of a long side: what the first block of any of these kernels touches


@pytest.mark.parametrize("dtype", ["float16", "tfloat32"])
@pytest.mark.parametrize("layouts", catalog.LAYOUTS)
@pytest.mark.parametrize("side", range(3), ids="mnk")
def test_the_first_block_of_a_longest_side_is_right(kernel_device, side, layouts, dtype):
    """Its bytes are more than an int counts. One block is launched, and of k it is given the first
    step, so the rest of the matrices needs no memory."""
    device = open_device(kernel_device)
    kernel, rng = catalog.get("mma_in_place"), np.random.default_rng(1)
    variant = kernel.variants()[0] if side < 2 else kernel.variants()[4]
    held = "float32" if dtype == "tfloat32" else dtype
    step = variant.step(dtype)
    sides = [MAX_SIDE if i == side else x for i, x in enumerate((3, 5, step))]
    m, n, k = (min(x, FIRST) for x in sides)
    a, b = (integers(rng, s, held) for s in ((m, k), (k, n)))
    stored = [x if order == "n" else x.T for x, order in zip((a, b), layouts, strict=True)]
    a_there, b_there = (padded(device, x, 0, poison(held))[1] for x in stored)
    c = padded(device, np.zeros((m, n), "f4"), 0, np.nan)[1]
    launch = dataclasses.replace(variant.launch(3, 5, step, dtype), grid=(1, 1, 1))
    lda, ldb, ldc = (np.int64(x.shape[1]) for x in (a_there, b_there, c))
    sizes, scales = list(map(np.int32, sides)), [np.float32(1), np.float32(0)]
    args = [a_there, lda, b_there, ldb, *sizes, *scales, c, ldc]
    args += [np.int32(1)] if side == 2 else []  # a share of k is one step
    stream = device.stream()
    with device.using(stream):
        device.launch(device.function(variant, dtype, layouts), launch, args, stream)
        stream.synchronize()
    bm, bn = variant.tile
    wanted = (a[:bm, :step].astype("f8") @ b[:step, :bn].astype("f8"))[:m, :n]
    got = fetch(device, c)[: len(wanted), : wanted.shape[1]]
    np.testing.assert_array_equal(got, wanted)


def test_sides_beyond_an_int_are_refused_before_anything_is_copied():
    for m, n, k in ((1, 1, 2**31), (2**31 + 1, 1, 1), (1, 2**31, 1), (1, 1, 2**32)):
        a, b = (np.broadcast_to(np.float32(1), shape) for shape in ((m, k), (k, n)))
        with pytest.raises(UsageError, match=rf"m={m} n={n} k={k}; each is at most 2147483647"):
            hg.gemm(a, b, device="cpu")
    half = np.broadcast_to(np.complex64(1), (1, 2**30))
    said = "real product of this complex one has m=1 n=2 k=21474836"
    with pytest.raises(UsageError, match=said):
        hg.gemm(half, half.T, device="emulator")
    for device in ("cpu", "emulator"):
        with pytest.raises(UsageError, match=said):
            hg.plan(1, 1, 2**30, dtype="complex64", device=device)


def test_a_rank_has_its_part_of_a_long_complex_product(monkeypatch, rng):
    """Its real product is no longer than an int holds, though that of all ranks would be."""
    monkeypatch.setattr(problem, "INT_LIMIT", 100)
    whole = problem.Problem(3, 2, 90, "complex64")
    a, b = (rng.integers(-3, 4, shape) * (1 + 1j) for shape in ((3, 45), (45, 2)))
    real = RealProduct.of(whole, a, b, None, None)
    np.testing.assert_array_equal((real.a @ real.b).view("c8"), a @ b)
    with pytest.raises(UsageError, match="m=3 n=4 k=180; each is at most 100"):
        RealProduct.of(whole, np.ones((3, 90)), np.ones((90, 2)), None, None)


@pytest.mark.parametrize("side", range(3), ids="mnk")
def test_small_checked_products_are_cut_too(monkeypatch, rng, side):
    """On an H200 a k of 2^31 - 1 was called wrong twice: its check counted k in an int."""
    monkeypatch.setattr(problem, "MAX_SIDE", 64)
    monkeypatch.setattr(small_checks, "SmallProduct", lambda *x, **y: pytest.fail("not in pieces"))
    m, n, k = (150 if i == side else 3 for i in range(3))
    a, b, c = integers(rng, (m, k)), integers(rng, (k, n)), np.empty((m, n), np.float32)
    device = EmulatorDevice()
    checked, variant = CheckedDevice(device), catalog.get("double_buffered").variant()
    stream = checked.stream()
    with checked.using(stream):
        bound = small_checks.bind(checked, device, variant, a, b, c, alpha=1, beta=0)
        bound(a, b, c, stream)
        stream.synchronize()
    np.testing.assert_array_equal(c, a @ b)


WIDE_C = [(INT_LIMIT, 1, 1), (1, INT_LIMIT, 1)]  # at which cuBLAS ended in status 14 on an H200


@pytest.mark.parametrize(("dtype", "size"), [("float64", 8), ("float32", 4), ("float16", 4)])
def test_kernels_count_the_words_of_a_longest_row_that_is_copied(dtype, size):
    """A row of 2^30 numbers of 8 bytes is as many words of 4 as no int counts."""
    for cols in (2**30, INT_LIMIT - 1):
        row = matrix(1, cols, dtype)
        counts = [x.shape[1] for x in words(row, row)]
        assert counts == [cols * np.dtype(dtype).itemsize // size] * 2
        assert max(counts) <= INT_LIMIT


@pytest.mark.parametrize("sides", WIDE_C)
def test_cublas_takes_no_c_whose_sides_it_fails_at(sides):
    """With a model of the GPU, and without one."""
    for machine in (Machine("NVIDIA H200", 132, 90, 66.9), Machine("Another", 108, 80, 19.5)):
        for dtype in ("float32", "float64"):
            variant, _why = on_gpu.strict(machine, problem.Problem(*sides, dtype))
            assert not variant.kernel.library and variant.takes(*sides, dtype)


@pytest.mark.parametrize("sides", WIDE_C)
@pytest.mark.parametrize(("name", "compute"), [("cublas", "fp32"), ("cublas_tf32", "tf32")])
def test_cublas_is_refused_by_name_for_such_a_c(sides, name, compute):
    chosen = catalog.get(name).variant()
    arithmetic = arithmetic_for(compute, chosen, kind="cuda", arch=90)
    whole = arithmetic.settle(problem.Problem(*sides, "float32"))
    gpu = SimpleNamespace(kind="cuda", processors=132, library_launch=None)
    with pytest.raises(UsageError, match=f"kernel {name} cannot take m=.*: it needs [mn] <= 10737"):
        choose(whole, [sides], gpu, chosen=chosen, own=False, arithmetic=arithmetic)


@pytest.mark.parametrize("sides", [(65, 2, 3), (2, 65, 3), (64, 64, 65)])
def test_cublas_is_not_asked_for_a_complex_c_of_such_sides(monkeypatch, sides):
    monkeypatch.setattr(problem, "MAX_SIDE", 64)
    gpu = OneGpu.__new__(OneGpu)
    gpu.checked, gpu.plans = None, SimpleNamespace(options=Options(), counts=(1,))
    takes = gpu.takes_complex(problem.Problem(*sides, "complex64"))
    assert takes == (max(sides[:2]) <= 64)


@pytest.mark.parametrize("checked", [False, True])
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("double_buffered", "float32"), ("dots", "float64"), ("dots_narrow", "float16"),
        ("gemv", "int32"), ("mma_in_place", "float32"), ("transposed_b", "int64"),
    ],
)  # fmt: skip
def test_pieces_make_the_product(kernel_device, monkeypatch, name, dtype, checked):
    monkeypatch.setattr(problem, "MAX_SIDE", 4096)
    device = open_device(kernel_device)
    if kernel_device != "emulator":
        pytest.skip("what is cut is the same everywhere")
    variant, rng = catalog.get(name).variant(), np.random.default_rng(1)
    made = 0
    for m, n, k in ((1, 1, 9001), (4105, 1, 3), (1, 4103, 7), (3, 2, 8194)):
        held = "tfloat32" if variant.kernel.in_place else dtype
        if not variant.takes(m, n, k, held):
            continue
        a, b, c = (integers(rng, s, dtype) for s in ((m, k), (k, n), (m, n)))
        if dtype == "float16":  # whose sums are to be exact
            a[:, 100:-100] = 0
        wide = "f8" if a.dtype.kind == "f" else "i8"
        wanted = a.astype(wide) @ b.astype(wide) - 2 * c.astype(wide)
        one = CheckedDevice(device) if checked else device
        stream = one.stream()
        with one.using(stream):
            one.gemm(variant, a, b, c, alpha=1, beta=-2, stream=stream)
            stream.synchronize()
        np.testing.assert_array_equal(c.astype(wide), wanted.astype(c.dtype).astype(wide))
        made += 1
    assert made > 1


@pytest.mark.parametrize("checked", [False, True])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_c_of_16_bits_is_not_rounded_between_pieces(monkeypatch, dtype, checked):
    """The sum of the first piece is beyond float16, or needs more bits than C has; C is not."""
    monkeypatch.setattr(problem, "MAX_SIDE", 4096)
    b = np.full((8192, 2), 8.0)
    b[:2048, 1], b[4096:] = 8 + 1 / 16, -8
    a, b = (x.astype(np.dtype(dtype)) for x in (np.full((3, 8192), 4.0), b))
    c = hg.gemm(a, b, device="emulator", checked=checked)
    np.testing.assert_array_equal(c.astype("f8"), [[0, 512]] * 3)


@pytest.mark.parametrize("checked", [False, True])
@pytest.mark.parametrize("alpha", [np.inf, -1e38])
def test_an_alpha_that_is_huge_scales_sums_of_all_pieces(monkeypatch, alpha, checked):
    """The first piece's sum is of the other sign: Inf of it met Inf, or stayed."""
    monkeypatch.setattr(problem, "MAX_SIDE", 64)
    a, c = np.ones((2, 150), "f4"), np.ones((2, 3), "f4")
    a[0, :64], a[1, 64:] = -1, -1
    made = hg.gemm(
        a, np.ones((150, 3), "f4"), c, alpha=alpha, beta=2, device="emulator", checked=checked
    )
    np.testing.assert_array_equal(made, np.copysign(np.inf, [[alpha] * 3, [-alpha] * 3]))


def test_one_gpu_leaves_a_huge_alpha_and_a_long_k_to_a_plan(monkeypatch):
    monkeypatch.setattr(problem, "MAX_SIDE", 64)
    asked = []
    plans = SimpleNamespace(alone=lambda *x: asked.append(x))
    gpu = SimpleNamespace(plans=plans, checked=None, device=None)
    for k, alpha in ((64, np.inf), (65, 1e9), (65, np.inf), (65, -1e38), (65, np.nan)):
        a, b, c = np.zeros((3, k), "f4"), np.zeros((k, 2), "f4"), np.zeros((3, 2), "f4")
        whole = problem.Problem(3, 2, k, alpha=alpha)
        assert OneGpu._real(gpu, whole, a, b, c) is None
    assert [x[0].k for x in asked] == [64, 65]


def test_one_gpu_makes_no_c_of_16_bits_of_a_long_k(monkeypatch):
    monkeypatch.setattr(problem, "MAX_SIDE", 64)
    for k, dtype, fits in ((64, "f2", True), (65, "f2", False), (65, "f4", True)):
        whole = problem.Problem(3, 2, k, out_dtype=np.dtype(dtype).name, operands="float16")
        assert (np.dtype(dtype).name in made_dtypes(whole)) == fits


def test_room_is_made_for_pieces(monkeypatch):
    monkeypatch.setattr(problem, "MAX_SIDE", 64)
    device, variant = Noting(), catalog.get("mma").variant({"TERMS": 3})
    kept = []
    for k in (64, 150):
        stream = device.stream()
        device.make_room(variant, 3, 2, k, "float32", stream)
        kept.append(room_of(device, stream).array("parts", 1, "uint8").base.nbytes)
    assert kept[0] == kept[1]
