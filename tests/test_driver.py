"""Kernel arguments as the CUDA driver is given them."""

import ctypes
import shutil
import threading
from types import SimpleNamespace

import numpy as np
import pytest

from hybrid_gemm.devices.cuda import cublas, driver, launch_list
from hybrid_gemm.devices.cuda.tensor_maps import TensorMap

MAP = np.arange(16, dtype=np.uint64).view([("words", np.uint64, 16)])


@pytest.mark.parametrize(
    "args",
    [
        [np.int32(-3)],
        [MAP, MAP[::-1], np.int32(7), np.float32(-0.0), np.int64(2**40)],
        [np.int32(1), np.float64(np.inf), np.int32(2), np.uint64(2**63), np.float32(1.5)],
    ],
    ids=["one", "maps", "mixed"],
)
def test_arguments_lie_where_it_is_said(args):
    values, offsets = driver.packed(args)
    assert len(offsets) == len(args) and all(offset % 8 == 0 for offset in offsets)
    ends = [*offsets[1:], ctypes.sizeof(values)]
    for arg, start, end in zip(args, offsets, ends, strict=True):
        assert start + arg.nbytes <= end
        assert bytes(values)[start : start + arg.nbytes] == arg.tobytes()


def test_matrices_are_given_by_their_address():
    matrix = SimpleNamespace(data=SimpleNamespace(ptr=0x7F0012345600))
    values, offsets = driver.packed([np.int32(5), matrix, np.int32(6)])
    assert bytes(values)[offsets[1] : offsets[2]] == (0x7F0012345600).to_bytes(8, "little")
    assert bytes(values)[offsets[2] :][:4] == (6).to_bytes(4, "little")


def test_an_argument_that_no_kernel_takes_is_an_error():
    with pytest.raises(KeyError):
        driver.packed([np.complex64(1)])


@pytest.mark.parametrize("early", [False, True])
def test_a_launch_hands_over_pointers_to_arguments(monkeypatch, early):
    """Through a C function pointer, as the driver's is."""
    seen, name = [], "cuLaunchKernelEx" if early else "cuLaunchKernel"

    def launched(*given):
        *numbers, arguments, extra = given
        if early:
            config, function = given[0].contents, given[1]
            first = config.attributes[0]
            assert (config.count, first.id, first.value) == (1, 6, 1)
            names = [name for name, _ in driver._Config._fields_[:8]]
            numbers = [function, *(getattr(config, name) for name in names)]
        places = ctypes.cast(arguments, ctypes.POINTER(ctypes.c_void_p))
        first = ctypes.cast(places[0], ctypes.POINTER(ctypes.c_int32))[0]
        second = ctypes.cast(places[1], ctypes.POINTER(ctypes.c_double))[0]
        third = ctypes.string_at(places[2], MAP.nbytes)
        seen.extend([tuple(numbers), first, second, third, extra])
        return 0

    c_function = ctypes.CFUNCTYPE(ctypes.c_int, *driver.SIGNATURES[name])(launched)
    monkeypatch.setattr(driver, "function", {name: c_function}.get)
    args = [np.int32(-5), np.float64(2.5), MAP]
    driver.launch(0x1234, (1, 2, 3), (4, 5, 6), args, 7, 0x88, early=early)
    assert seen == [(0x1234, 1, 2, 3, 4, 5, 6, 7, 0x88), -5, 2.5, MAP.tobytes(), None]


# --- lists of launches --------------------------------------------------------------------


def matrix(address):
    return SimpleNamespace(data=SimpleNamespace(ptr=address))


def tensor_map(address):
    made = MAP.copy().view(TensorMap)
    made["words"][0, 0] = made.address = address
    return made


def launches_of(a, b, c):
    """(function, grid, block, arguments, bytes of shared memory, early) of a product."""
    workspace = 0x990000
    return [
        (0x11, (1, 2, 3), (32, 1, 1), [matrix(a + 64), np.int32(7), matrix(workspace)], 0, False),
        (0x22, (4, 1, 1), (64, 2, 1),
         [np.float32(0.5), tensor_map(a), tensor_map(b + 256), tensor_map(workspace), np.int64(-1),
          matrix(c), matrix(b), np.float64(2.5)], 4096, True),
    ]  # fmt: skip


@pytest.fixture
def seen(monkeypatch):
    """What the driver is given: a stand-in for it, of C function pointers."""
    if shutil.which("g++") is None:
        pytest.skip("g++ is not installed")
    found = []

    def launched(config, function, arguments, extra):
        config = config.contents
        values = {0x11: (8, 4, 8), 0x22: (4, 128, 128, 128, 8, 8, 8, 8)}[function]
        places = ctypes.cast(arguments, ctypes.POINTER(ctypes.c_void_p))
        early = config.count and (config.attributes[0].id, config.attributes[0].value)
        numbers = [getattr(config, name) for name, _ in driver._Config._fields_[:8]]
        texts = [ctypes.string_at(places[i], size) for i, size in enumerate(values)]
        found.append((function, numbers, early, extra, texts))
        return 700 if numbers[-1] == 0xBAD else 0

    def replaced(at, address):
        if at % 64:
            return 1
        ctypes.cast(at, ctypes.POINTER(ctypes.c_uint64))[0] = address or 0
        return 0

    made = {
        name: ctypes.CFUNCTYPE(ctypes.c_int, *driver.SIGNATURES[name])(call)
        for name, call in (
            ("cuLaunchKernelEx", launched), ("cuTensorMapReplaceAddress", replaced)
        )
    }  # fmt: skip
    monkeypatch.setattr(driver, "function", made.__getitem__)
    launch_list.unavailable.cache_clear()
    yield found
    launch_list.unavailable.cache_clear()


def spans(*starts):
    return [range(start, start + 4096) for start in starts]


def test_a_list_starts_the_same_launches_for_other_matrices(seen):
    assert launch_list.unavailable() is None
    prepared = launch_list.LaunchList(
        launches_of(0x10000, 0x20000, 0x30000), 0x88, spans(0x10000, 0x20000, 0x30000)
    )
    for at in (0x10000, 0x20000, 0x30000), (0x50000, 0x40000, 0x60000), (0x50000, 0x50000, 0x70000):
        for _ in "ab":
            assert prepared.start(*at) == 0
            expected = [
                (function, [*grid, *block, shared, 0x88], (6, 1) if early else 0, None,
                 [x.tobytes() if hasattr(x, "tobytes") else x.data.ptr.to_bytes(8, "little")
                  for x in args])
                for function, grid, block, args, shared, early in launches_of(*at)
            ]  # fmt: skip
            assert seen == expected
            seen.clear()


def test_a_list_for_large_matrices_is_made_at_once(seen):
    """Numbers among the arguments were looked for in all bytes of A, B and C once: a minute."""
    starts = (1 << 40, 2 << 40, 3 << 40)
    whole = [range(start, start + (1 << 39)) for start in starts]
    prepared = launch_list.LaunchList(launches_of(*starts), 0x88, whole)
    assert prepared.start(*starts) == 0 and seen


def test_what_the_driver_says_of_a_list_comes_back(seen):
    prepared = launch_list.LaunchList(launches_of(16, 8192, 16384), 0xBAD, spans(16, 8192, 16384))
    assert prepared.start(16, 8192, 16384) == 700
    assert len(seen) == 1  # the launches after it are not started


def test_launches_are_noted_by_the_thread_that_asks(monkeypatch):
    started = []
    monkeypatch.setattr(driver, "_call", lambda name, *given: started.append(name))
    args = [np.int32(1)]
    with driver.noted() as noted:
        driver.launch(0x1, (1, 1, 1), (1, 1, 1), args, 0, 0)
        other = threading.Thread(
            target=driver.launch, args=(0x2, (1, 1, 1), (1, 1, 1), args, 0, 0)
        )  # fmt: skip
        other.start()
        other.join()
    driver.launch(0x3, (1, 1, 1), (1, 1, 1), args, 0, 0)
    assert [launch[0] for launch in noted] == [0x1] and started == ["cuLaunchKernel"] * 2


@pytest.mark.parametrize("dtype, tf32", [("float32", False), ("float64", False),
                                         ("float32", True), ("float16", False)])  # fmt: skip
def test_a_prepared_product_of_cublas_is_the_call_from_python(seen, monkeypatch, dtype, tf32):
    """With the same arguments, but for A, B and C."""
    given = []

    def function(name):
        kind = ctypes.CFUNCTYPE(ctypes.c_int, *cublas._SIGNATURES[name])
        return made.setdefault(name, kind(lambda *x: given.append((name, *x)) or len(given) % 2))

    made = {}
    monkeypatch.setattr(cublas, "_function", function)
    a, b, c = np.ones((5, 7), dtype), np.ones((3, 7), dtype).T, np.ones((5, 3), dtype)
    product = cublas.bind(a, b, c, alpha=2, beta=0.5, tf32=tf32)
    stream = SimpleNamespace(prepare_cublas=lambda: SimpleNamespace(value=0x77))
    prepared = cublas.Prepared(product, stream)
    for start in product.on_stream(stream), prepared.start:
        assert start(0x1000, 0x2000, 0x3000) == len(given) % 2
    assert given[0] == given[1] and {0x77, 0x1000, 0x2000, 0x3000} <= set(given[0])
