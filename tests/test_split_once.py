"""fp32x3 of operands that come in parts: each part is split once, and each product decides by the
parts that it reads."""

import gc
import weakref

import numpy as np
import pytest
from support.arrays import integers
from support.tensor_cores import operands

from hybrid_gemm import Runner
from hybrid_gemm.arrays.strides import layout
from hybrid_gemm.devices.kernel_device import KernelDevice
from hybrid_gemm.execution.kept_products import DeviceProducts
from hybrid_gemm.planning import on_grid, planner
from hybrid_gemm.planning.planner import memory_needs
from hybrid_gemm.problem import make_problem


@pytest.fixture(autouse=True)
def small_parts(monkeypatch, without_models):
    """Parts of 64 rows or columns."""
    monkeypatch.setattr(on_grid, "PART_BYTES", 256)
    monkeypatch.setattr(on_grid, "PART_SIDE", {"A": 64, "B": 64})


@pytest.fixture
def splits(monkeypatch):
    """(operand, rows and k) of what is split."""
    seen, real = [], KernelDevice.split_part

    def split_part(device, operand, layouts, part, stream):
        seen.append((operand, part.shape))
        real(device, operand, layouts, part, stream)

    monkeypatch.setattr(KernelDevice, "split_part", split_part)
    return seen


def laid_out(a, b, layouts):
    return [
        x if order == "n" else np.asfortranarray(x)
        for x, order in zip((a, b), layouts, strict=True)
    ]


@pytest.mark.parametrize(
    "split, emulate, layouts", [("rows", 1, "nn"), ("rows", 2, "tt"), ("cols", 2, "nn")]
)
def test_each_part_is_split_once_on_each_device(
    kernel_device, splits, rng, split, emulate, layouts
):
    m, n, k = 256, 192, 150
    a, b = integers(rng, (m, k)), integers(rng, (k, n))
    options = {"compute": "fp32x3", "split": split, "threads": emulate, "emulate_devices": emulate}
    here = Runner(device=kernel_device, **options)
    plan = here.plan(here.run(*laid_out(a, b, layouts)).problem)
    assert plan.split_once and len(plan.panels) > 1
    assert len(splits) == sum(len(block.parts) for block in plan.blocks)
    assert (here.gemm(*laid_out(a, b, layouts)) == a @ b).all()
    assert (here.gemm(*laid_out(a, b, layouts)) == a @ b).all()  # prepared, where it can be


def test_a_product_decides_by_the_parts_that_it_reads(kernel_device, tf32_split_of_small_products):
    """Rows of one part take strict fp32, or the TF32 split; those of others the fp16 split."""
    a, b, _ = operands("normal", 256, 128, 640)
    a[70, 3] = np.inf
    a[200] *= np.exp2(np.arange(640) % 40 - 20).astype("f4")
    result = Runner(device=kernel_device, compute="fp32x3", threads=1).run(a, b)
    assert all(x in result.compute for x in ("fp16 split", "tf32 split", "strict fp32"))
    wide = a.astype("f8")
    with np.errstate(invalid="ignore"):
        exact, size = wide @ b.astype("f8"), np.abs(wide) @ np.abs(b.astype("f8"))
    rows = np.arange(256) != 70
    assert (np.abs(result.c[rows] - exact[rows]) <= 1e-6 * size[rows]).all()
    np.testing.assert_array_equal(np.isinf(result.c[70]), np.isinf(exact[70]))


def test_the_same_bits_every_time(kernel_device, rng):
    a, b = (rng.standard_normal((200, 200), dtype="f4") for _ in "ab")
    here = Runner(device=kernel_device, compute="fp32x3", threads=1)
    first = here.gemm(a, b)
    for _ in range(3):
        np.testing.assert_array_equal(here.gemm(a, b), first)


def test_turns_split_what_they_bring(kernel_device, splits, rng, monkeypatch):
    for name in ("LEAST_TILE", "WHOLE_SIDE", "CHUNK_SIDE"):
        monkeypatch.setattr(planner, name, 64)
    monkeypatch.setattr(planner, "QUICK_TURNS", 1)
    a, b = integers(rng, (384, 70)), integers(rng, (70, 256))
    whole = Runner(device=kernel_device, compute="fp32x3", threads=1)
    most = memory_needs(whole.plan(make_problem(a, b)))[0] * 6 // 10
    here = Runner(device=kernel_device, compute="fp32x3", threads=1, max_device_memory=most)
    result = here.run(a, b)
    assert result.plan.turns > 2 and result.plan.split_once
    assert (result.c == a @ b).all()
    assert len(splits) == sum(len(block.parts) for block in result.plan.blocks)


def test_beta_and_summed_parts(kernel_device, rng):
    a, b, c = (integers(rng, s) for s in ((192, 260), (260, 128), (192, 128)))
    here = Runner(device=kernel_device, compute="fp32x3", split="cols", threads=2)
    np.testing.assert_array_equal(here.gemm(a, b, c, alpha=2, beta=-1), 2 * (a @ b) - c)


def test_products_that_are_kept_keep_no_array(kernel_device, rng):
    here = Runner(device=kernel_device, compute="fp32x3", threads=1)
    a, b = integers(rng, (128, 100)), integers(rng, (100, 128))
    here.gemm(a, b)
    gone = weakref.ref(a)
    del a
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("options", [{"compute": "tf32"}, {}], ids=["tf32", "float16"])
@pytest.mark.parametrize("layouts", ["nn", "tt"])
def test_lines_of_blocks_begin_where_the_copy_engine_reads_them(
    kernel_device, rng, monkeypatch, options, layouts
):
    """A and B with lines of any length come with padding, and are not packed by each product."""
    dtype = "float32" if options else "float16"
    a, b = integers(rng, (131, 77), dtype), integers(rng, (77, 139), dtype)
    seen, real = [], DeviceProducts.bound

    def bound(products, a, b, c, **factors):
        seen.extend((a, b))
        return real(products, a, b, c, **factors)

    monkeypatch.setattr(DeviceProducts, "bound", bound)
    here = Runner(device=kernel_device, threads=1, **options)
    result = here.run(*laid_out(a, b, layouts))
    np.testing.assert_array_equal(result.c, (a.astype("f4") @ b.astype("f4")).astype(dtype))
    assert seen
    for operand in seen:
        assert layout(operand)[1] * operand.itemsize % 16 == 0
