"""Launches that are prepared as lists, cuBLAS's own among them, and started by native calls."""

import ctypes
import functools
import shutil
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest

from hybrid_gemm.devices.cuda import cublas, driver, launch_list, library_launches
from hybrid_gemm.devices.cuda.launch_list import Recorded
from hybrid_gemm.devices.cuda.tensor_maps import TensorMap

MAP = np.arange(16, dtype=np.uint64).view([("words", np.uint64, 16)])


# --- lists of launches --------------------------------------------------------------------


def matrix(address):
    return SimpleNamespace(data=SimpleNamespace(ptr=address))


def tensor_map(address):
    made = MAP.copy().view(TensorMap)
    made["words"][0, 0] = made.address = address
    return made


def launches_of(a, b, c):
    """(function, grid, block, arguments, bytes of shared memory, attributes) of a product."""
    workspace = 0x990000
    return [
        (0x11, (1, 2, 3), (32, 1, 1), [matrix(a + 64), np.int32(7), matrix(workspace)], 0, ()),
        (0x22, (4, 1, 1), (64, 2, 1),
         [np.float32(0.5), tensor_map(a), tensor_map(b + 256), tensor_map(workspace), np.int64(-1),
          matrix(c), matrix(b), np.float64(2.5)], 4096, [driver.Attribute(4, 0, (2, 1, 1))]),
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
        first = config.count and (config.attributes[0].id, *config.attributes[0].value[:3])
        numbers = [getattr(config, name) for name, _ in driver._Config._fields_[:8]]
        texts = [ctypes.string_at(places[i], size) for i, size in enumerate(values)]
        found.append((function, numbers, first, extra, texts))
        return 700 if numbers[-1] == 0xBAD else 0

    def replaced(at, address):
        if at % 64:
            return 1
        ctypes.cast(at, ctypes.POINTER(ctypes.c_uint64))[0] = address or 0
        return 0

    def cleared(*what):
        found.append(what)
        return 0

    made = {
        name: ctypes.CFUNCTYPE(ctypes.c_int, *driver.SIGNATURES[name])(call)
        for name, call in (
            ("cuLaunchKernelEx", launched), ("cuTensorMapReplaceAddress", replaced),
            ("cuMemsetD8Async", cleared),
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
                (function, [*grid, *block, shared, 0x88], (4, 2, 1, 1) if attributes else 0, None,
                 [x.tobytes() if hasattr(x, "tobytes") else x.data.ptr.to_bytes(8, "little")
                  for x in args])
                for function, grid, block, args, shared, attributes in launches_of(*at)
            ]  # fmt: skip
            assert seen == expected
            seen.clear()


def test_a_list_for_large_matrices_is_made_at_once(seen):
    """Numbers among the arguments were looked for in all bytes of A, B and C once: a minute."""
    starts = (1 << 40, 2 << 40, 3 << 40)
    whole = [range(start, start + (1 << 39)) for start in starts]
    prepared = launch_list.LaunchList(launches_of(*starts), 0x88, whole)
    assert prepared.start(*starts) == 0 and seen


def test_a_list_clears_and_launches_in_order_with_matrices_that_it_does_not_keep(seen):
    """What runs alike start: all addresses are theirs again, and their memory is not kept."""

    class Watched(SimpleNamespace):
        """One of which it is known when it goes."""

    kept, passing = matrix(0x990000), Watched(data=matrix(0x10040).data)
    gone = weakref.ref(passing)
    with driver.noted() as noted:
        driver.clear(0x10000, 64, 0x77)
        driver.launch(0x11, (1, 2, 3), (32, 1, 1), [passing, np.int32(7), kept], 0, 0x77)
    assert not seen
    noted[:] = [driver.without(x, spans(0x10000)) for x in noted]
    prepared = launch_list.LaunchList(noted, 0x88, ())
    del noted[:], passing
    assert gone() is None
    for _ in "ab":
        assert prepared.start(0, 0, 0) == 0
        assert seen[0] == (0x10000, 0, 64, 0x88)
        texts = [x.to_bytes(size, "little") for x, size in ((0x10040, 8), (7, 4), (0x990000, 8))]
        assert seen[1][0] == 0x11 and seen[1][-1] == texts
        seen.clear()


def test_a_list_of_more_matrices_starts_the_same_launches_too(seen):
    """Of operands that were split before, which have exponents and more beside them."""
    first = 0x10000, 0x20000, 0x30000, 0x80000, 0x90000
    prepared = launch_list.LaunchList(launches_of(*first[:3]), 0x88, spans(*first))
    for at in first, (0x50000, 0x40000, 0x60000, 0xA0000, 0xB0000):
        assert prepared.start(*at) == 0
        assert [call[1] for call in seen] == [
            [*grid, *block, shared, 0x88]
            for _function, grid, block, _args, shared, _early in launches_of(*at[:3])
        ]
        found = [value for call in seen for value in call[4]]
        for address in at[:3]:
            assert any(address.to_bytes(8, "little") == value[:8] for value in found)
        seen.clear()


def test_threads_start_a_list_one_after_the_other(seen, monkeypatch):
    """By calls that let Python's lock go, since Python may have none."""
    name, of = "cuLaunchKernelEx", driver.function
    slow = ctypes.CFUNCTYPE(ctypes.c_int, *driver.SIGNATURES[name])(
        lambda *given: time.sleep(0.005) or of(name)(*given)
    )
    monkeypatch.setattr(driver, "function", lambda asked: slow if asked == name else of(asked))
    bases = [0x100000 * i for i in range(1, 4)]
    prepared = launch_list.LaunchList(launches_of(16, 8192, 16384), 0x88, spans(16, 8192, 16384))
    address, whole = prepared.native
    kinds = ctypes.c_int, ctypes.c_void_p, *[ctypes.c_uint64] * 3
    start = ctypes.CFUNCTYPE(*kinds)(address)

    together = threading.Barrier(len(bases))

    def repeat(base):
        together.wait(30)
        return {start(whole, base, base + 0x1000, base + 0x2000) for _ in range(5)}

    with ThreadPoolExecutor(len(bases)) as pool:
        assert list(pool.map(repeat, bases)) == [{0}] * len(bases)
    started = [(call[0], call[4][0 if call[0] == 0x11 else 6]) for call in seen]
    firsts = [int.from_bytes(text, "little") - 64 for kernel, text in started if kernel == 0x11]
    assert sorted(firsts) == sorted(bases * 5)
    assert started == [
        each for base in firsts
        for each in ((0x11, (base + 64).to_bytes(8, "little")),
                     (0x22, (base + 0x1000).to_bytes(8, "little")))
    ]  # fmt: skip


def test_what_the_driver_says_of_a_list_comes_back(seen):
    prepared = launch_list.LaunchList(launches_of(16, 8192, 16384), 0xBAD, spans(16, 8192, 16384))
    assert prepared.start(16, 8192, 16384) == 700
    assert len(seen) == 1  # the launches after it are not started


def test_launches_are_noted_by_the_thread_that_asks(monkeypatch):
    started = []
    monkeypatch.setattr(driver, "call", lambda name, *given: started.append(name))
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
@pytest.mark.parametrize("stack", [False, True])
def test_a_prepared_product_of_cublas_is_the_call_from_python(
    seen, monkeypatch, dtype, tf32, stack
):
    """With the same arguments, but for A, B and C."""
    given = []

    def function(name):
        kind = ctypes.CFUNCTYPE(ctypes.c_int, *cublas._SIGNATURES[name])
        return made.setdefault(name, kind(lambda *x: given.append((name, *x)) or len(given) % 2))

    made = {}
    monkeypatch.setattr(cublas, "_function", function)
    a, b, c = np.ones((5, 7), dtype), np.ones((3, 7), dtype).T, np.ones((5, 3), dtype)
    if stack:
        product = cublas.bind_stack(a, b, c, 11, (16 * a.itemsize, 0, 24 * c.itemsize))
    else:
        product = cublas.bind(a, b, c, alpha=2, beta=0.5, tf32=tf32)
    stream = SimpleNamespace(prepare_cublas=lambda: SimpleNamespace(value=0x77))
    prepared = cublas.Prepared(product, stream)
    for start in product.on_stream(stream), prepared.start:
        assert start(0x1000, 0x2000, 0x3000) == len(given) % 2
    assert given[0] == given[1] and {0x77, 0x1000, 0x2000, 0x3000} <= set(given[0])
    assert ({16, 24, 11} <= set(given[0])) == stack


@pytest.mark.parametrize("failing", [False, True])
def test_there_is_a_launch_for_each_part_of_a_stack_until_one_fails(seen, monkeypatch, failing):
    given = []

    def function(name):
        kind = ctypes.CFUNCTYPE(ctypes.c_int, *cublas._SIGNATURES[name])
        return made.setdefault(name, kind(lambda *x: given.append(x) or 13 * failing))

    made = {}
    monkeypatch.setattr(cublas, "_function", function)
    a, b, c = np.ones((5, 7), "f4"), np.ones((7, 3), "f4"), np.ones((5, 3), "f4")
    starts = [(0, 0, 0), (0x100, 0, 0x300), (0x200, 0x40, 0x600)]
    product = cublas.bind_stack(a, b, c, 11, (140, 84, 60), starts=starts)
    stream = SimpleNamespace(prepare_cublas=lambda: SimpleNamespace(value=0x77))
    prepared = cublas.Prepared(product, stream)
    for start in product.on_stream(stream), prepared.start:
        given.clear()
        assert start(0x1000, 0x2000, 0x3000) == 13 * failing
        at = [{0x1000 + x, 0x2000 + y, 0x3000 + z} for x, y, z in starts[: 1 if failing else 3]]
        assert len(given) == len(at)
        assert all(x <= set(y) for x, y in zip(at, given, strict=True))


# --- launches of a library ----------------------------------------------------------------


class Graphs:
    """A driver that records what `launch` is told, as far as `library_launches` asks: nodes are
    numbers from 1 on, each after the one before."""

    def __init__(self):
        self.nodes, self.graphs, self.recording = [], 0, False
        self.kind, self.buffered = 0, False

    def launch(self, function, grid, args, cluster=0):
        assert self.recording
        self.nodes.append((function, grid, [bytes(x) for x in args], cluster))

    def __call__(self, name):
        return functools.partial(getattr(self, name), name)

    def cuStreamBeginCapture_v2(self, _name, stream, mode):
        self.nodes, self.recording = [], True
        return 0

    def cuStreamEndCapture(self, _name, stream, graph):
        self.recording = False
        self.graphs += 1
        graph._obj.value = 0x600D
        return 0

    def cuGraphDestroy(self, _name, graph):
        self.graphs -= 1
        return 0

    def cuGraphGetNodes(self, _name, graph, nodes, count):
        if nodes is not None:
            order = [*range(2, len(self.nodes) + 1), 1]  # in no order
            nodes[:] = order[: len(nodes)]
        count._obj.value = len(self.nodes)
        return 0

    def cuGraphNodeGetDependencies(self, _name, node, before, count):
        before[0] = node - 1
        count._obj.value = node > 1
        return 0

    def cuGraphNodeGetType(self, _name, node, kind):
        kind._obj.value = self.kind
        return 0

    def cuGraphKernelNodeGetParams_v2(self, _name, node, made):
        function, grid, args, _cluster = self.nodes[node - 1]
        self.kept = [ctypes.create_string_buffer(x, len(x)) for x in args]
        places = (ctypes.c_void_p * len(args))(*map(ctypes.addressof, self.kept))
        self.kept.append(places)
        made = made._obj
        made.function, made.shared = function, 48
        if self.buffered:
            buffer = b"".join(x + bytes(-len(x) % 8) for x in args)
            whole, size = ctypes.create_string_buffer(buffer), ctypes.c_size_t(len(buffer))
            listed = (2, ctypes.addressof(size), 1, ctypes.addressof(whole), 0)
            extra = (ctypes.c_void_p * 5)(*listed)
            self.kept += [whole, size, extra]
            made.extra = ctypes.cast(extra, ctypes.POINTER(ctypes.c_void_p))
        else:
            made.arguments = ctypes.cast(places, ctypes.POINTER(ctypes.c_void_p))
        made.grid_x, made.grid_y, made.grid_z = grid
        made.block_x = made.block_y = made.block_z = 1
        return 0

    def cuFuncGetParamInfo(self, _name, function, place, offset, size):
        args = next(args for known, _grid, args, _c in self.nodes if known == function)
        if place >= len(args):
            return 1
        size._obj.value = len(args[place])
        offset._obj.value = sum(-(-len(x) // 8) * 8 for x in args[:place])
        return 0

    def cuGraphKernelNodeGetAttribute(self, _name, node, number, at):
        if number == 4:
            ctypes.c_int.from_address(at).value = self.nodes[node - 1][3]
        return 0


@pytest.fixture
def graphs(monkeypatch):
    made = Graphs()
    monkeypatch.setattr(driver, "function", made)
    return made


def words(*numbers):
    return b"".join(x.to_bytes(8, "little") for x in numbers)


@pytest.mark.parametrize("buffered", [False, True])
def test_what_a_library_launches_is_recorded_with_its_addresses(graphs, buffered):
    graphs.buffered = buffered

    def start(a, b, c):
        graphs.launch(0x11, (3, 2, 1), [words(5, a, b + 64), b"abc", words(c)], cluster=2)
        graphs.launch(0x22, (1, 1, 1), [words(c, 77, c + 8) + b"tail"])

    at = 0x7000, 0x7100, 0x7200  # nearer to each other than they are moved
    first, second = library_launches.recorded(start, at, 0x88)
    assert (first[:3], first[4]) == ((0x11, (3, 2, 1), (1, 1, 1)), 48)
    assert [(x.value, x.places) for x in first[3]] == [
        (words(5, 0x7000, 0x7140), [(8, 0, 0), (16, 1, 64)]), (b"abc", []),
        (words(0x7200), [(0, 2, 0)]),
    ]  # fmt: skip
    assert [(x.id, x.value[0]) for x in first[5]] == [(4, 2)] and not second[5]
    assert [x.places for x in second[3]] == [[(0, 2, 0), (16, 2, 8)]]
    assert graphs.graphs == 0


@pytest.mark.parametrize("what", ["argument", "tail", "grid", "count", "kind", "nothing", "raised"])
def test_what_cannot_be_told_is_not_recorded(graphs, what):
    turns = []

    def start(a, b, c):
        turns.append(1)
        other = len(turns) > 1
        if what == "raised":
            raise library_launches.Unrecorded("it failed")
        if what == "nothing":
            return
        graphs.kind = 2 * (what == "kind")  # sets memory
        number = (a >> 4) if what == "argument" else 3
        grid = (1 + (other and what == "grid"), 1, 1)
        tail = bytes([other and what == "tail"])
        for _ in range(1 + (other and what == "count")):
            graphs.launch(0x11, grid, [words(a, number), words(c) + tail])

    with pytest.raises(library_launches.Unrecorded):
        library_launches.recorded(start, (0x7000, 0x8000, 0x9000), 0x88)
    assert graphs.graphs == 0


def test_a_list_of_recorded_launches_starts_them_for_other_matrices(seen):
    recorded = [
        (0x11, (1, 2, 3), (32, 1, 1),
         [Recorded(words(0x1040), [(0, 0, 64)]), np.int32(7), Recorded(words(0x3000), [(0, 2, 0)])],
         0, ()),
    ]  # fmt: skip
    prepared = launch_list.LaunchList(recorded, 0x88, ())
    assert prepared.start(0xA000, 0xB000, 0xC000) == 0
    assert seen[0][4] == [words(0xA040), np.int32(7).tobytes(), words(0xC000)]
