"""What a library launches: its kernels' names, and what the GPU's own says of them."""

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.devices import needs, open_device

from hybrid_gemm.devices.cuda import cublas, library_launches
from hybrid_gemm.kernel_choice import library_kernels
from hybrid_gemm.kernel_choice.library_kernels import Launched
from hybrid_gemm.problem import Problem

REDUCE = "_ZN8cublasLt19splitKreduce_kernelILi32ELi16EiffffLb0EfffLb1ELb0ELb0ELb0EEEvNS_18cublas"
side = st.integers(1, 20000)


@pytest.mark.parametrize(
    "found, launched",
    [
        (
            [("sm80_xmma_gemm_f32f32_f32f32_f32_nn_n_tilesize64x128x8_stage3_warpsize1x4x1_ffma"
              "_aligna4_alignc4_execute_kernel__5x_cublas", 738)],
            Launched("sm80_xmma_gemm_f32f32_f32f32_f32_n_tilesize64x128x8_stage3_warpsize1x4x1_ffma",
                     64, 128, 738, 1),
        ),
        (
            [("_ZN7cutlass7Kernel2I41cutlass_80_simt_sgemm_64x64_8x5_nt_align1EEvNT_6ParamsE", 272),
             (REDUCE, 68)],
            Launched("cutlass_80_simt_sgemm_64x64_8x5_align1", 64, 64, 272, 2),
        ),
        (
            [("", 0), ("nvjet_sm90_hsh_128x64_64x5_1x2_h_bz_splitK_NNT", 132)],
            Launched("nvjet_sm90_hsh_128x64_64x5_1x2_h_bz_splitK", 128, 64, 132, 2),
        ),
        (
            [("_Z16gemmSN_TN_kernelIfLi128ELi16ELi2ELi4ELi4ELi4ELb1E", 9)],
            Launched("_Z16gemmSN_TN_kernelIfLi128ELi16ELi2ELi4ELi4ELi4ELb1E", 1, 1, 9, 1),
        ),
        ([("", 0)], None),
        ([], None),
    ],
)  # fmt: skip
def test_names_say_the_kernel_and_its_tile(found, launched):
    read = library_kernels.read(found)
    if launched:
        assert read and read.kernel.startswith(launched.kernel)
        read = Launched(launched.kernel, read.rows, read.cols, read.blocks, read.launches)
    assert read == launched


def test_types_of_16_bits_and_layouts_are_alike():
    names = [
        "nvjet_sm90_hsh_128x64_64x5_1x2_h_bz_NNT", "nvjet_sm90_tst_128x64_64x5_1x2_h_bz_TNT",
    ]  # fmt: skip
    assert len({library_kernels.read([(x, 5)]) for x in names}) == 1
    names = [
        f"_ZN7cutlass7Kernel2I60cutlass_80_tensorop_{x}_s16816gemm_{x}_128x64_64x3_{y}_align2EEv"
        for x, y in (("f16", "tn"), ("bf16", "nn"))
    ]
    assert len({library_kernels.read([(x, 5)]) for x in names}) == 1


@given(side, side, side, st.sampled_from([1, 16, 256]), st.integers(0, 10**6), st.integers(1, 3))
def test_coordinates_are_finite(m, n, k, tile, blocks, launches):
    launched = Launched("any", tile, 2 * tile, blocks, launches)
    assert np.isfinite(library_kernels.coordinates([launched], [(m, n, k)], 132)).all()


@pytest.mark.parametrize(
    "options, kinds",
    [
        ({"dtype": "float32"}, None),
        ({"operands": "bfloat16", "out_dtype": "bfloat16"}, (14, 14, 14, 68)),
        ({"operands": "float16"}, (2, 2, 0, 68)),
        ({"compute": "tf32"}, (0, 0, 0, 77)),
    ],
)
def test_cublas_is_asked_for_the_problem(options, kinds, monkeypatch):
    """With the sides, leading dimensions, dtypes and arithmetic that the product would have."""
    given = []
    stream = SimpleNamespace(
        prepare_cublas=lambda: SimpleNamespace(workspace=SimpleNamespace(ptr=4096), value=5),
        cupy=SimpleNamespace(ptr=7),
    )

    def named(call, addresses, _stream):
        call(*addresses)
        return [("cutlass_80_simt_sgemm_64x64_8x5_nt_align1", 9)]

    monkeypatch.setattr(cublas, "_function", lambda _name: lambda *args: given.append(args) or 0)
    monkeypatch.setattr(library_launches, "named", named)
    for orders, lda, ldb in (("nn", 30, 20), ("nt", 30, 30), ("tn", 10, 20), ("tt", 10, 30)):
        found = cublas.launched(Problem(10, 20, 30, **options), orders, stream)
        assert found == Launched("cutlass_80_simt_sgemm_64x64_8x5_align1", 64, 64, 9, 1)
        handle, op_b, op_a, n, m, k, _alpha, *rest = given.pop()
        assert (handle, n, m, k) == (5, 20, 10, 30)
        assert (op_b, op_a) == (orders[1] == "t", orders[0] == "t")
        if kinds is None:
            assert (rest[1], rest[3], rest[6]) == (ldb, lda, 20)
        else:
            assert (rest[1], rest[4], rest[8], rest[10]) == kinds
            assert (rest[2], rest[5], rest[9]) == (ldb, lda, 20)


@needs("cuda")
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16", "tf32"])
def test_cublas_says_what_it_would_launch(dtype):
    """The same each time, and nothing is computed: a product that runs meanwhile keeps its bits."""
    import cupy

    device = open_device("cuda")
    made = {"tf32": {"dtype": "float32", "compute": "tf32"}}
    if dtype in ("float16", "bfloat16"):
        made[dtype] = {"dtype": "float32", "operands": dtype, "out_dtype": dtype}
    options, told = made.get(dtype, {"dtype": dtype}), 0
    for layout in ("nn", "tn"):
        for shape in ((1000, 77, 333), (64, 64, 70_001), (1, 4096, 4096), (3001, 2003, 17)):
            problem = Problem(*shape, **options)
            first, again = (device.library_launch(problem, layout) for _ in range(2))
            assert first == again
            told += first is not None and first.blocks > 0 and first.launches > 0
    assert told >= 4, told  # of 8: some of 16 bits are no line of at most four launches
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        x = cupy.ones((64, 64), "f4")
        stream.begin_capture()
        y = x + x
        assert device.library_launch(Problem(512, 512, 512), "nn")
        graph = stream.end_capture()
        graph.launch(stream)
        stream.synchronize()
        assert (y.get() == 2).all()
