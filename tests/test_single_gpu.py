"""Which way a repeated product of one GPU's arrays takes, with a GPU that is played."""

import contextlib
import sys
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
from hybrid_gemm.execution.found import Found
from hybrid_gemm.execution.single_gpu import SingleGpuExecutor
from hybrid_gemm.execution.tensors_on_gpu import TensorsOnGpu

from hybrid_gemm.arrays.strides import Reach
from hybrid_gemm.devices.cuda.stream import CudaStream

A, B, C = 0x100000, 0x200000, 0x300000
SIZE = 64 * 64 * 4


class Array:
    """As CuPy's: 64 x 64 float32 at an address of GPU `device`."""

    __module__ = "cupy"
    shape, strides, dtype = (64, 64), (256, 4), np.dtype("f4")

    def __init__(self, at=C, dtype="float32", device=0):
        if isinstance(at, tuple):  # as the executor makes a new one
            at = C
        self.data = SimpleNamespace(ptr=at, device_id=device)

    @property
    def T(self):
        return self


class Tensor:
    """As PyTorch's."""

    __module__ = "torch"
    device, layout = "cuda:0", "strided"
    shape, dtype = (64, 64), "float32"

    tangent = None

    def __init__(self, at=C, device=0, requires_grad=False, negative=False, strides=(64, 1)):
        self.at, self.ordinal, self.requires_grad = at, device, requires_grad
        self.negative, self.version, self.strides, self.copied = negative, 0, strides, []

    def stride(self):
        return self.strides

    def dim(self):
        return 2

    def numel(self):
        return 64 * 64

    def untyped_storage(self):
        return self

    def contiguous(self):
        return Tensor(self.at + 65536)

    def is_conj(self):
        return False

    def copy_(self, other):
        if other.shape[-1] != 64:
            raise RuntimeError("does not broadcast")
        self.copied.append(other)
        return self

    def get_device(self):
        return self.ordinal

    def is_neg(self):
        return self.negative

    def new_empty(self, shape, dtype=None):
        return Tensor(C)

    def is_inference(self):
        return False

    def data_ptr(self):
        return self.at


@pytest.fixture
def gpu():
    """An executor on GPU 0 that notes how products are started: `started` by a prepared product's
    addresses, `called` from Python; and which GPU and stream are current."""
    made = SingleGpuExecutor.__new__(SingleGpuExecutor)
    made.started, made.called, made.status, made.here, made.stream_at = [], [], 0, 0, 7

    def check(status):
        raise RuntimeError(f"status {status}")

    def prepared(call, a, b, c, stream):
        at = stream.cupy.ptr
        start = lambda *addresses: made.started.append((at, *addresses)) or made.status  # noqa: E731
        return SimpleNamespace(start=start, check=check)

    def work_out(*given, **more):
        return Found(
            lambda a, b, c, stream: made.called.append((a.data.ptr, b.data.ptr, c.data.ptr)),
            (64, 64), "float32", (Reach(SIZE, 0, SIZE),) * 3, True,
        )  # fmt: skip

    @contextlib.contextmanager
    def used(ordinal):
        before, made.here = made.here, ordinal
        yield
        made.here = before

    cp = SimpleNamespace(cuda=SimpleNamespace(Device=used))
    made.device = SimpleNamespace(
        ordinal=0, prepared=prepared, is_current=lambda: made.here == 0, cp=cp
    )
    made.plans = SimpleNamespace(options=SimpleNamespace(max_device_memory=None))
    made.array, made.ordinal, made.known = Array, 0, {}
    made.tensors = TensorsOnGpu(made.device, made.plans)
    made.current = lambda ordinal: SimpleNamespace(ptr=made.stream_at)
    made.recording, made.checked = False, None
    made.stream = lambda: SimpleNamespace(
        cupy=made.current(0), capturing=lambda: made.recording,
        unrestricted=contextlib.nullcontext,
        start=lambda launches: launches(),
    )  # fmt: skip
    made._work_out = work_out
    return made


def test_the_third_call_on_a_stream_is_the_prepared_product(gpu):
    for turn in range(3):
        out = Array(C + 4096 * turn)
        assert gpu.gemm(Array(A), Array(B), out=out) is out
    assert gpu.called == [(A, B, C), (A, B, C + 4096)]
    assert gpu.started == [(7, A, B, C + 8192)]
    assert gpu.gemm(Array(A), Array(A)).data.ptr == C  # a new one
    assert gpu.started[1:] == []  # another signature's first call
    gpu.stream_at = 8
    gpu.gemm(Array(A), Array(B), out=Array(C))
    assert len(gpu.called) == 4 and len(gpu.started) == 1


def test_an_interrupted_start_leaves_its_stream_to_other_threads(gpu):
    """Also while the error is held, as an interactive Python holds the last one."""
    stream = CudaStream(SimpleNamespace(ptr=7, is_capturing=lambda: False))
    found = Found(lambda *matrices: None, (64, 64), "float32", (Reach(SIZE, 0, SIZE),) * 3, False)
    left = ended = 0

    def interrupt(_frame, event, _argument):
        nonlocal left
        if event in ("call", "return"):
            left -= 1
            if left < 0:
                raise KeyboardInterrupt
        return interrupt

    with ThreadPoolExecutor(1) as other:
        for ended in range(100):
            left, held = ended, None
            sys.settrace(interrupt)
            try:
                found.start(None, stream, Array(A), Array(B), Array(C))
            except KeyboardInterrupt as error:
                held = error
            finally:
                sys.settrace(None)
            taken = other.submit(stream.lock.acquire, timeout=1).result()
            assert taken and not stream.busy.value
            other.submit(stream.lock.release).result()
            if held is None:
                break
    assert 5 < ended < 99


def test_nothing_is_prepared_while_a_graph_is_made(gpu):
    gpu.recording = True
    for _ in range(4):
        gpu.gemm(Array(A), Array(B), out=Array(C))
    assert len(gpu.called) == 4 and not gpu.started
    gpu.recording = False
    for _ in range(2):
        gpu.gemm(Array(A), Array(B), out=Array(C))
    assert len(gpu.called) == 5 and len(gpu.started) == 1


def test_nothing_that_is_checked_is_started_while_a_graph_is_made(gpu):
    """Not even the copy of C, which would be waited for."""
    gpu.checked = SimpleNamespace(put=lambda out, c: gpu.called.append("put"))
    for gpu.recording in True, False:
        made = gpu.gemm(Array(A), Array(B), Array(A + 65536), 1, 1)
        assert (made is None) is gpu.recording
        assert gpu.called == ([] if gpu.recording else ["put", (A, B, C)])


def test_arrays_of_the_host_are_not_copied_into_a_graph(gpu):
    """Where they are copied from is another's memory when it runs."""
    gpu.plans.most_hosted, gpu.device.cp.asarray = 1 << 20, lambda x: Array(B)
    for gpu.recording in True, False:
        made = gpu.gemm(Array(A), np.ones((64, 64), "f4"), out=Array(C))
        assert (made is None) is gpu.recording and bool(gpu.called) is not gpu.recording


def ready(gpu):
    for _ in range(2):
        gpu.gemm(Array(A), Array(B), out=Array(C))
    gpu.called.clear()


def test_places_off_16_bytes_are_prepared_for_themselves(gpu):
    """Kernels, and maps of tensors, are chosen by what an address leaves when divided by 16."""
    ready(gpu)
    for at in (A + 4, B, C), (A, B + 8, C), (A, B, C + 4), (A + 4, B + 4, C):
        for turn in range(3):
            moved = [x + 4096 * turn for x in at]
            gpu.gemm(*map(Array, moved[:2]), out=Array(moved[2]))
        assert len(gpu.called) == 2
        assert gpu.started == [(7, *moved)]
        ready(gpu)
        gpu.started.clear()


@pytest.mark.parametrize(
    "a, b, out",
    [
        (Array(A), Array(B), Array(A + 256)),
        (Array(A), Array(B), Array(B - 256)),
        (Array(A, device=1), Array(B), Array(C)),
        (Array(A), Array(B, device=1), Array(C)),
        (Array(A), Array(B), Array(C, device=1)),
        (np.ones((64, 64), "f4"), Array(B, device=1), Array(C)),
    ],
    ids=["overlaps A", "overlaps B", "A elsewhere", "B elsewhere", "out elsewhere", "of both"],
)
def test_what_is_more_than_launches_is_left_to_a_run(gpu, a, b, out):
    ready(gpu)
    assert gpu.gemm(a, b, out=out) is None
    assert not gpu.started and not gpu.called


def test_the_gpu_of_the_arrays_becomes_the_current_one_meanwhile(gpu):
    ready(gpu)
    gpu.here = 1
    assert gpu.gemm(Array(A), Array(B), out=Array(C)) is not None
    assert gpu.started == [(7, A, B, C)] and gpu.here == 1


def test_a_launch_that_fails_is_an_error(gpu):
    ready(gpu)
    gpu.status = 700
    with pytest.raises(RuntimeError, match="status 700"):
        gpu.gemm(Array(A), Array(B), out=Array(C))


def test_products_without_native_code_stay_python_s(gpu):
    gpu.device.prepared = lambda *given: None
    for _ in range(4):
        gpu.gemm(Array(A), Array(B), out=Array(C))
    assert len(gpu.called) == 4 and [x.ready for x in gpu.known.values()] == [None]


# --- PyTorch's tensors --------------------------------------------------------------------


@pytest.fixture
def torch(monkeypatch, gpu):
    written = []
    made = SimpleNamespace(
        Tensor=Tensor, nn=SimpleNamespace(Parameter=type("Parameter", (Tensor,), {})),
        is_grad_enabled=lambda: made.grad, grad=True, float32="f4", written=written,
        strided="strided", _is_functional_tensor=lambda x: False,
        autograd=SimpleNamespace(
            graph=SimpleNamespace(increment_version=written.append),
            forward_ad=SimpleNamespace(unpack_dual=lambda x: SimpleNamespace(tangent=x.tangent)),
        ),
        _C=SimpleNamespace(_cuda_getCurrentRawStream=lambda ordinal: gpu.stream_at),
        cuda=SimpleNamespace(is_current_stream_capturing=lambda: gpu.recording),
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "torch", made)
    monkeypatch.setattr("hybrid_gemm.execution.tensors_on_gpu.TORCH", SimpleNamespace(
        view=lambda x, name: Array(x.at),
    ))  # fmt: skip
    return made


def test_tensors_take_the_prepared_product_alone(gpu, torch):
    out = Tensor(C)
    assert gpu.gemm(Tensor(A), Tensor(B), out=out) is None  # their views prepare it
    ready(gpu)
    assert gpu.gemm(Tensor(A), Tensor(B), out=out) is out
    assert gpu.started == [(7, A, B, C)] and torch.written == [out]
    parameter = torch.nn.Parameter(A, requires_grad=True)
    assert gpu.gemm(parameter, Tensor(B), out=out) is None  # gradients are refused elsewhere
    torch.grad = False
    assert gpu.gemm(parameter, Tensor(B), out=out) is out
    for _ in range(2):
        gpu.gemm(Array(A), Array(B))
    made = gpu.gemm(Tensor(A), Tensor(B))
    assert type(made) is Tensor and gpu.started[-1] == (7, A, B, C)


def test_two_tensors_that_are_one_matrix_are_c_and_out(gpu, torch):
    there, out = Array(C), Tensor(C)
    for _ in range(2):
        gpu.gemm(Array(A), Array(B), there, 1, 1, out=there)
    gpu.called.clear()
    assert gpu.gemm(Tensor(A), Tensor(B), Tensor(C), 1, 1, out=out) is out
    assert gpu.started == [(7, A, B, C)] and not gpu.called
    assert gpu.gemm(Tensor(A), Tensor(B), Tensor(C + 256), 1, 1, out=out) is None


def test_c_is_copied_to_a_new_tensor_that_the_product_is_added_to(gpu, torch):
    there = Array(C)
    for _ in range(2):
        gpu.gemm(Array(A), Array(B), there, 1, 1, out=there)
    gpu.called.clear()
    row = Tensor(C + 65536)
    row.shape = (64,)
    made = gpu.gemm(Tensor(A), Tensor(B), row, 1, 1)
    assert made.copied == [row] and gpu.started == [(7, A, B, C)]
    row.shape = (63,)
    assert gpu.gemm(Tensor(A), Tensor(B), row, 1, 1) is None
    row.shape, row.dtype = (64,), "float64"
    assert gpu.gemm(Tensor(A), Tensor(B), row, 1, 1) is None
    assert gpu.gemm(Tensor(A), Tensor(B), Tensor(), 1, 0) is None  # of which a run warns


def test_tensors_that_no_kernel_reads_are_copied(gpu, torch):
    """As `expand` leaves a gradient; not with a limit of memory, nor where `out` may meet them."""
    ready(gpu)
    expanded = Tensor(A, strides=(0, 0))
    gpu.gemm(expanded, Tensor(B), out=Tensor(C))
    assert gpu.started == [(7, A + 65536, B, C)]
    gpu.plans.options.max_device_memory = 1 << 30
    gpu.gemm(expanded, Tensor(B), out=Tensor(C))
    gpu.plans.options.max_device_memory = None
    gpu.gemm(Tensor(C, strides=(0, 1)), Tensor(B), out=Tensor(C))
    assert gpu.started[1:] == [(7, A, B, C)]  # as it is, which nothing is prepared for in truth


def dual(x):
    x.tangent = 1
    return x


@pytest.mark.parametrize(
    "a, out",
    [
        (Tensor(A, device=1), Tensor(C)),
        (Tensor(A, device=-1), Tensor(C)),
        (Tensor(A, negative=True), Tensor(C)),
        (Tensor(A), Tensor(A)),
        (Tensor(A), Tensor(C + 4)),
        (Tensor(A), Array(C)),
        (Tensor(A), Tensor(C, requires_grad=True)),
        (dual(Tensor(A)), Tensor(C)),
    ],
    ids=[
        "GPU 1",
        "host",
        "negated",
        "overlaps",
        "not on 16 bytes",
        "CuPy's",
        "gradients",
        "tangent",
    ],
)
def test_other_tensors_go_by_their_views(gpu, torch, a, out):
    ready(gpu)
    assert gpu.gemm(a, Tensor(B), out=out) is None
    assert not gpu.started
    gpu.stream_at = 9  # where nothing is prepared
    assert gpu.gemm(Tensor(A), Tensor(B), out=Tensor(C)) is None
