"""The model of kernels beside which experiments show times: occupancy, traffic, roofline."""

import math

import pytest

from hybrid_gemm import catalog
from hybrid_gemm.devices.cuda.nvrtc import Usage
from hybrid_gemm.experiments import model


def test_occupancy_of_the_article():
    assert model.occupancy(model.V100, 256, 136, 8192) == 0.125
    assert model.resident_blocks(model.V100, 256, 136, 8192) == (1, "registers")


@pytest.mark.parametrize(
    "threads, registers, shared, blocks, why",
    [
        (256, 32, 0, 8, "threads"),
        (32, 32, 0, 32, "blocks"),
        (256, 32, 100 << 10, 2, "shared memory"),
        (1024, 40, 0, 1, "registers"),
        (1024, 64, 0, 1, "registers"),
        (96, 255, 0, 2, "registers"),
    ],
)
def test_resident_blocks(threads, registers, shared, blocks, why):
    assert model.resident_blocks(model.H200, threads, registers, shared) == (blocks, why)


def traffic(kernel, params=None, staged=False):
    kernel = catalog.get(kernel)
    block = model.tile(kernel.variant(params), "float32")
    return model.traffic(block, kernel.layouts[0], "float32", staged)


def test_traffic_of_the_naive_kernel():
    found = traffic("naive", {"BM": 32, "BN": 32})
    assert found.warp_sectors == (1, 4) and found.loads == 2
    assert found.flop_per_byte == pytest.approx(0.4)


def test_traffic_of_transposed_b_is_scattered():
    found = traffic("transposed_b", {"BM": 8, "BN": 32})
    assert found.warp_sectors == (1, 32)


@pytest.mark.parametrize("width", [1, 2, 4, 8, 16, 32])
def test_a_tile_cuts_loads_by_its_width(width):
    found = traffic("shared_tile", {"TILE": width}, staged=True)
    assert 2 / found.loads == width


def test_block_tiles_give_32_flop_a_byte():
    found = traffic("block_tile", staged=True)
    assert found.flop_per_byte == 32


def test_every_kernel_has_a_model():
    usage = Usage(32, 4096, 0, 0, 0)
    for kernel in catalog.gemm_kernels():
        for variant in kernel.variants():
            if not (kernel.library or kernel.limits):
                found = model.describe(variant, kernel.dtypes[0], usage, model.H200, 512, 512, 512)
                assert 0 <= found["occupancy"] <= 1
                assert math.isfinite(found["flop_per_byte"]) and found["blocks"] > 0


def test_tiles_are_read_off_the_grid():
    assert model.tile(catalog.get("naive_row").variant(), "float32").cols == 128
    assert model.tile(catalog.get("register_tile").variant(), "int32").rows == 128
    assert model.tile(catalog.get("one_block").variant(), "int32") is None


def test_roofline():
    assert model.roofline_gflops(model.H200, 1000, "float32") == model.H200.gflops
    assert model.roofline_gflops(model.H200, 1000, "int32") == model.H200.gflops / 2
    assert model.roofline_gflops(model.H200, 1, "float32") == model.H200.gbps
