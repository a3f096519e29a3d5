"""The emulator: what it runs, and what it reports."""

import platform
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
from support.devices import open_device
from support.emulation import Compiler, compiled, needs_emulator, run_kernel

from hybrid_gemm import Runner, catalog
from hybrid_gemm.catalog import Launch, Variant
from hybrid_gemm.devices.emulator import program as emulation
from hybrid_gemm.devices.emulator.program import Options
from hybrid_gemm.errors import KernelError, UnavailableError

pytestmark = needs_emulator

NAIVE = """
extern "C" __global__ void __launch_bounds__(256)
    kernel(int n, T alpha, const T* __restrict__ A, const T* __restrict__ B, T* C) {
    const int row = blockIdx.y * blockDim.y + threadIdx.y;
    const int col = blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= n || col >= n) return;
    T sum = 0;
    for (int p = 0; p < n; ++p) sum += A[row * n + p] * B[p * n + col];
    C[row * n + col] = alpha * sum;
}
"""
TILED = """
extern "C" __global__ void kernel(int n, T alpha, const T* A, const T* B, T* C) {
    __shared__ T As[16][16], Bs[16][16];
    const int x = threadIdx.x, y = threadIdx.y;
    const int row = blockIdx.y * 16 + y, col = blockIdx.x * 16 + x;
    T sum = 0;
    for (int p = 0; p < n; p += 16) {
        As[y][x] = row < n && p + x < n ? A[row * n + p + x] : T(0);
        Bs[y][x] = p + y < n && col < n ? B[(p + y) * n + col] : T(0);
        __syncthreads();
#pragma unroll
        for (int q = 0; q < 16; ++q) sum += As[y][q] * Bs[q][x];
        __syncthreads();
    }
    if (row < n && col < n) C[row * n + col] = alpha * sum;
}
"""


# --- what it runs -------------------------------------------------------------------------


def fused():
    """Whether this CPU multiplies and adds in one instruction."""
    words = Path("/proc/cpuinfo").read_text().split() if Path("/proc/cpuinfo").exists() else ()
    return platform.machine() == "aarch64" or "fma" in words


@pytest.mark.skipif(not fused(), reason="this CPU has no instruction that multiplies and adds")
@pytest.mark.parametrize("kernel", ["naive", "shared_tile", "tuned"])
def test_a_product_and_a_sum_round_once(kernel):
    """As on GPUs. Products of float32 and these sums are exact in float64."""
    rng = np.random.default_rng(2)
    a, b = ((1 + rng.random(shape)).astype("f4") for shape in ((40, 8), (8, 50)))
    expected, twice = (np.zeros((40, 50), "f4") for _ in range(2))
    for k in range(8):
        expected = (a[:, [k]].astype("f8") * b[k].astype("f8") + expected).astype("f4")
        twice += a[:, [k]] * b[k]
    assert (expected != twice).any()
    with Runner(device="emulator", kernel=kernel) as runner:
        np.testing.assert_array_equal(runner.run(a, b).c, expected)


@pytest.mark.parametrize("order", emulation.ORDERS)
@pytest.mark.parametrize("n", [1, 16, 45])
@pytest.mark.parametrize("text", [NAIVE, TILED], ids=["naive", "tiled"])
def test_products(text, n, order, tmp_path):
    rng = np.random.default_rng(n)
    a, b = (rng.integers(-4, 5, (n, n)).astype(np.float32) for _ in "ab")
    c = np.full((n, n), np.nan, np.float32)
    tiles = -(-n // 16)
    compiled(text, tmp_path).launch(
        Launch((tiles, tiles, 1), (16, 16, 1)),
        [np.int32(n), np.float32(3), a, b, c],
        threads=2,
        options=Options(order, seed=n),
    )
    assert np.array_equal(c, 3 * (a @ b))


@pytest.mark.parametrize(
    ("dtype", "c_type"), [("float64", "double"), ("int32", "int"), ("int64", "long long")]
)
def test_dtypes(dtype, c_type, tmp_path):
    rng = np.random.default_rng(1)
    a, b = (rng.integers(-(2**30), 2**30, (32, 32)).astype(dtype) for _ in "ab")
    if dtype == "float64":
        a, b = a % 1024, b % 1024
    c = np.zeros_like(a)
    args = [np.int32(32), np.dtype(dtype).type(1), a, b, c]
    compiled(TILED, tmp_path, dtype=c_type).launch(Launch((2, 2, 1), (16, 16, 1)), args)
    assert np.array_equal(c, a @ b)  # integers wrap around


def test_threads_switched_by_ucontext_give_the_same_product(tmp_path, monkeypatch):
    compiler = Compiler(tmp_path, monkeypatch, "-DHYBRID_GEMM_UCONTEXT")
    rng = np.random.default_rng(2)
    a, b = (rng.integers(-4, 5, (40, 40)).astype(np.float32) for _ in "ab")
    c = np.zeros_like(a)
    args = [np.int32(40), np.float32(1), a, b, c]
    compiled(TILED, tmp_path).launch(Launch((3, 3, 1), (16, 16, 1)), args, threads=2)
    assert np.array_equal(c, a @ b)
    assert compiler.calls == 1


@pytest.mark.parametrize("declared", ["", "__align__(16) ", "alignas(16) "])
def test_dynamic_shared_memory(declared, tmp_path):
    text = f"""
    extern "C" __global__ void kernel(float* x) {{
        extern __shared__ {declared}unsigned char dynamic_shared[];
        float4* tile = (float4*)dynamic_shared;
        tile[threadIdx.x] = ((const float4*)x)[threadIdx.x];
        __syncthreads();
        ((float4*)x)[threadIdx.x] = tile[blockDim.x - 1 - threadIdx.x];
    }}"""
    x = np.arange(400, dtype=np.float32)
    run_kernel(text, [x], tmp_path, block=100, shared=1600)
    assert np.array_equal(x.reshape(100, 4), np.arange(400).reshape(100, 4)[::-1])


def test_shared_memory_begins_as_nan(tmp_path):
    text = """
    extern "C" __global__ void kernel(float* x) {
        __shared__ float fixed[4];
        extern __shared__ float dynamic_shared[];
        if (x[0] == 0) fixed[0] = dynamic_shared[0] = 1;  // never
        x[1 + 2 * blockIdx.x] = fixed[threadIdx.x];
        x[2 + 2 * blockIdx.x] = dynamic_shared[threadIdx.x];
        fixed[threadIdx.x] = dynamic_shared[threadIdx.x] = 7;  // the next block's do not hold it
    }"""
    for threads in (1, 2):
        x = np.ones(9, np.float32)
        run_kernel(text, [x], tmp_path, grid=4, shared=16, threads=threads)
        assert np.isnan(x[1:]).all()


def test_shuffles(tmp_path):
    text = """
    extern "C" __global__ void kernel(double* x, int* y) {
        const int t = threadIdx.x;
        double sum = x[t];
        for (int by = 16; by; by /= 2) sum += __shfl_down_sync(0xffffffff, sum, by);
        if (t % 32 == 0) x[t] = sum;
        int all = t;
        for (int bits = 1; bits < 8; bits *= 2) all += __shfl_xor_sync(~0u, all, bits, 8);
        __syncwarp();
        y[t] = all;
        y[t + 64] = __shfl_sync(~0u, t, 3, 16);
        y[t + 128] = __shfl_up_sync(~0u, t, 2);
    }"""
    x, y = np.arange(64.0), np.zeros(192, np.int32)
    run_kernel(text, [x, y], tmp_path, block=64, options=Options("shuffle", seed=5))
    t = np.arange(64)
    assert x[0] == t[:32].sum() and x[32] == t[32:].sum()
    assert np.array_equal(y[:64], t.reshape(8, 8).sum(1).repeat(8))
    assert np.array_equal(y[64:128], t // 16 * 16 + 3)
    assert np.array_equal(y[128:], np.where(t % 32 < 2, t, t - 2))


def test_shuffles_among_some_lanes(tmp_path):
    text = """
    extern "C" __global__ void kernel(int* y) {
        const int t = threadIdx.x;
        if (t < 16) y[t] = __shfl_xor_sync(0x0000ffff, t, 1);
        else y[t] = __shfl_xor_sync(0xffff0000, t, 2) + __shfl_sync(0xffff0000, t, 31);
        y[t] += __shfl_sync(0xffffffff, 100, 0);
    }"""
    y = np.zeros(40, np.int32)  # the second warp has 8 lanes, none of them below 16
    t = np.arange(32)
    run_kernel(text, [y], tmp_path, block=32)
    assert np.array_equal(y[:32], 100 + np.where(t < 16, t ^ 1, (t ^ 2) + 31))


def test_many_blocks_on_two_threads(tmp_path):
    text = """
    extern "C" __global__ void kernel(unsigned* x, uint4* seen) {
        const unsigned b = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
        const unsigned t = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
        x[b * 12 + t] += b + t;
        if (b == 0 && t == 0) *seen = make_uint4(gridDim.x, gridDim.y, blockDim.y, blockDim.z);
    }"""
    for order in emulation.ORDERS:
        x, seen = np.zeros((2000, 12), np.uint32), np.zeros(4, np.uint32)
        launch = Launch((50, 20, 2), (3, 2, 2))
        compiled(text, tmp_path).launch(launch, [x, seen], threads=2, options=Options(order, 9))
        assert np.array_equal(x, np.arange(2000)[:, None] + np.arange(12))
        assert list(seen) == [50, 20, 2, 2]


def test_two_python_threads_at_once(tmp_path):
    tiled = compiled(TILED, tmp_path)
    meet = threading.Barrier(2)

    def product(seed):
        rng = np.random.default_rng(seed)
        a, b = (rng.integers(-4, 5, (64, 64)).astype(np.float32) for _ in "ab")
        for _ in range(10):
            c = np.zeros_like(a)
            meet.wait()
            args = [np.int32(64), np.float32(1), a, b, c]
            tiled.launch(Launch((4, 4, 1), (16, 16, 1)), args, threads=2)
            assert np.array_equal(c, a @ b)
        return True

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(product, [1, 2])) == [True, True]


COUNTED = """
extern "C" __global__ void kernel(int n, T* parts, T* total, unsigned* counter) {
    parts[blockIdx.x] = T(blockIdx.x);
    __threadfence();
    if (atomicAdd(counter, 1u) != gridDim.x - 1u) return;
    T sum = 0;
    for (int i = 0; i < n; ++i) sum += parts[i];
    *total = sum;
    atomicExch(counter, 0u);
}
"""


def test_the_last_block_sees_what_the_others_wrote(tmp_path):
    kernel = compiled(COUNTED, tmp_path)
    parts, total, counter = np.empty(999, "f4"), np.empty(1, "f4"), np.zeros(1, "u4")
    for order in emulation.ORDERS:
        parts[:] = np.nan
        kernel.launch(
            Launch((999, 1, 1), (1, 1, 1)), [np.int32(999), parts, total, counter],
            threads=2, options=Options(order=order),
        )  # fmt: skip
        assert total[0] == 998 * 999 / 2 and counter[0] == 0


# --- what it reports ----------------------------------------------------------------------


def test_a_race_shows_by_order(tmp_path):
    text = """
    extern "C" __global__ void kernel(int* x) {
        __shared__ int tile[64];
        tile[threadIdx.x] = threadIdx.x;
        x[threadIdx.x] = tile[63 - threadIdx.x];  // no barrier before
    }"""
    results = []
    for order in emulation.ORDERS:
        x = np.zeros(64, np.int32)
        run_kernel(text, [x], tmp_path, block=64, options=Options(order, seed=2))
        results.append(x.tobytes())
    assert len(set(results)) == 3


def test_a_race_of_warps_that_go_in_step_shows_in_reverse(tmp_path):
    """Warps that wait for their own lanes alone may be far from each other."""
    text = """
    extern "C" __global__ void kernel(int* x) {
        __shared__ int tile[64];
        tile[threadIdx.x] = threadIdx.x;
        __syncwarp();
        x[threadIdx.x] = tile[63 - threadIdx.x];  // of the other warp
    }"""
    right = [*range(63, -1, -1)]
    for order, seen in (("forward", right), ("reverse", [*right[:32], *[-1] * 32])):
        x = np.zeros(64, np.int32)
        run_kernel(text, [x], tmp_path, block=64, options=Options(order))
        assert x.tolist() == seen


def test_a_race_between_blocks_shows_by_order(tmp_path):
    text = 'extern "C" __global__ void kernel(int* x) { x[0] = blockIdx.x; }'
    x = np.zeros(1, np.int32)
    last = []
    for options in (Options(), Options("reverse"), Options("shuffle", 3), Options("shuffle", 3)):
        run_kernel(text, [x], tmp_path, grid=100, options=options)
        last.append(int(x[0]))
    assert last[:2] == [99, 0] and last[2] == last[3]


@pytest.mark.parametrize("order", emulation.ORDERS)
def test_threads_that_return_before_a_barrier(order, tmp_path):
    text = """
    extern "C" __global__ void kernel(int* x) {
        if (threadIdx.x == 9 && blockIdx.x == 2) return;
        __syncthreads();
        x[threadIdx.x] = 1;
    }"""
    with pytest.raises(KernelError) as error:
        x = np.zeros(64, np.int32)
        run_kernel(text, [x], tmp_path, grid=3, block=64, options=Options(order))
    assert str(error.value) == (
        "kernel test: block (2, 0, 0), thread (0, 0, 0) waits for all threads of its block "
        "at kernel.cu:3; thread (9, 0, 0) has returned"
    )


def test_barriers_at_two_lines(tmp_path):
    text = """
    extern "C" __global__ void kernel(int* x) {
        if (threadIdx.x < 40)
            __syncthreads();
        else
            __syncthreads();
        x[threadIdx.x] = 1;
    }"""
    with pytest.raises(KernelError, match=r"kernel\.cu:3; thread \(40, 0, 0\) waits at kernel"):
        run_kernel(text, [np.zeros(64, np.int32)], tmp_path, block=64)


def test_warp_operations_that_not_all_lanes_reach(tmp_path):
    text = """
    extern "C" __global__ void kernel(int* x, unsigned mask) {
        const int t = threadIdx.x;
        if (t == 37) {
            if (mask == 1) return;
            if (mask == 2) __syncthreads();
            if (mask == 3) x[t] = __shfl_sync(~0u, t, 0);
        }
        x[t] = __shfl_sync(mask < 4 ? ~0u : mask, t, 0);
    }"""
    x = np.zeros(64, np.int32)
    run_kernel(text, [x, np.uint32(0)], tmp_path, block=64)
    for mask, wanted in {
        1: r"lanes of its warp at kernel\.cu:8; thread \(37, 0, 0\) has returned",
        2: r"lanes of its warp at kernel\.cu:8; thread \(37, 0, 0\) waits at kernel\.cu:5",
        3: r"lanes of its warp at kernel\.cu:8; thread \(37, 0, 0\) waits at kernel\.cu:6",
        7: r"thread \(3, 0, 0\) is not in the mask of its warp operation at kernel\.cu:8",
    }.items():
        with pytest.raises(KernelError, match=wanted):
            run_kernel(text, [x, np.uint32(mask)], tmp_path, block=64)


def test_a_failed_launch_leaves_the_program_usable(tmp_path):
    """With what CUDA knows without a header: an assert, and functions of <math.h>."""
    text = """
    extern "C" __global__ void kernel(int* x, int bad) {
        if (bad == 1 && threadIdx.x == 3) return;
        assert(bad != 2 || threadIdx.x != 3);
        __syncthreads();
        x[threadIdx.x] = fmaxf(expf(-2.0f), sqrtf(4.0f)) + fmin(1.0, fabs(-7.0));
    }"""
    x = np.zeros(32, np.int32)
    for bad, says in (
        (1, "has returned"),
        (2, r"thread \(3, 0, 0\) finds that an assert does not hold, at kernel.cu:3"),
        (1, "has returned"),
    ):
        with pytest.raises(KernelError, match=says):
            run_kernel(text, [x, np.int32(bad)], tmp_path, grid=50, block=32, threads=2)
        run_kernel(text, [x, np.int32(0)], tmp_path, grid=50, block=32, threads=2)
    assert (x == 3).all()


def test_a_failed_launch_leaves_no_flags_to_the_next(tmp_path):
    """Blocks had counted themselves in: later products left out shares of k, without a word."""
    text = """
    extern "C" __global__ void kernel(int alone, unsigned* flags) {
        if (threadIdx.x == 0) atomicAdd(flags + blockIdx.x, 1u);
        if (alone && threadIdx.x) return;
        __syncthreads();
    }"""
    program = compiled(text, tmp_path)
    device, needs = open_device("emulator"), Launch((2, 1, 1), (2, 1, 1), 0, 4, 8)
    stream = device.stream()
    for alone, left in ((0, [1, 1]), (1, [0, 0])):
        _workspace, flags = device.scratch(needs, "float32", stream)
        flags[...] = 0
        with pytest.raises(KernelError, match="has returned") if alone else nullcontext():
            device.launch(program, needs, [np.int32(alone), flags], stream)
        _workspace, flags = device.scratch(needs, "float32", stream)
        assert flags.ravel()[:2].tolist() == left


def test_compile_errors_carry_the_message(tmp_path):
    with pytest.raises(KernelError, match=r"kernel test does not compile:\nkernel\.cu: .*\n"):
        compiled('extern "C" __global__ void kernel(int* x) {\n    x[0] = unknown;\n}', tmp_path)
    unchecked = Variant(catalog.get("shared_tile"), {"TILE": 33})
    with pytest.raises(KernelError, match="shared_tile needs TILE <= 32"):
        compiled(unchecked.source("float32"), catalog.directory())
    with pytest.raises(KernelError, match="of floats the sum depends on which thread comes first"):
        compiled('extern "C" __global__ void kernel(float* x) { atomicAdd(x, 1.0f); }', tmp_path)
    with pytest.raises(KernelError, match="frame size"):
        compiled(
            'extern "C" __global__ void kernel(volatile int* x) {\n'
            "    volatile int big[50000];\n    big[x[0]] = 1; x[1] = big[x[2]];\n}",
            tmp_path,
        )


def test_arguments_are_checked(tmp_path):
    text = 'extern "C" __global__ void kernel(int n, const double* a, double* c) { c[n] = a[n]; }'
    one, two = np.arange(4.0), np.zeros(4)
    run_kernel(text, [np.int32(2), one, two], tmp_path)
    assert two[2] == 2
    one.flags.writeable = False
    run_kernel(text, [np.int32(1), one, two], tmp_path)
    with pytest.raises(KernelError, match="argument 0 must be a NumPy scalar of int32; got int64"):
        run_kernel(text, [np.int64(2), one, two], tmp_path)
    with pytest.raises(KernelError, match="argument 1 must be a NumPy array of float64; got ndarr"):
        run_kernel(text, [np.int32(2), one.astype(np.float32), two], tmp_path)
    with pytest.raises(KernelError, match="takes 3 arguments; a launch gives it 2"):
        run_kernel(text, [np.int32(2), one], tmp_path)
    with pytest.raises(ValueError, match="argument 2 is read-only"):
        run_kernel(text, [np.int32(2), one, one], tmp_path)
    with pytest.raises(ValueError, match="no order is called 'random'"):
        Options("random")


def test_launches_that_no_gpu_takes(tmp_path):
    text = 'extern "C" __global__ void kernel() {}'
    for grid, block, shared in [(1, 1025, 0), (0, 1, 0), (1, 0, 0), (1, 1, 2**20)]:
        with pytest.raises(KernelError):
            run_kernel(text, [], tmp_path, grid=grid, block=block, shared=shared)


def test_without_a_compiler(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UnavailableError, match="g\\+\\+ is not installed"):
        compiled(NAIVE, tmp_path)
    assert "g++ is not installed" in emulation.unavailable.__wrapped__()
