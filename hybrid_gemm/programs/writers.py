"""Which writer writes the program of a call, by where its arrays lie; and the programs of all."""

from __future__ import annotations

import dataclasses
import functools
import math
import sys
from typing import TYPE_CHECKING, Any

import numpy as np

from ..arrays.caller_arrays import as_array, is_device_array
from ..arrays.guests import Guests
from ..arrays.other_libraries import TORCH, gpu_of, library_of
from ..arrays.stacks import Stacks
from ..devices.base import Device
from ..devices.cpu import CpuDevice
from ..execution.checked_device import CheckedDevice
from ..execution.plan_maker import PlanMaker
from ..options import Options
from ..problem import are_numbers
from .on_cpu import OneCpu
from .planned import Planned, Plans
from .program import OUT, Call, Make, NativeLaunches, Program, Unfit, Write
from .signature import Programs

if TYPE_CHECKING:  # what has GPUs imports it
    from .on_gpu import OneGpu
    from .packed import PackedOnGpu
    from .stacks import StacksOnGpu


def _unchecked(device: Device) -> tuple[Device, CheckedDevice | None]:
    """What multiplies, and the device that checks its products, if they are checked."""
    return (device.device, device) if isinstance(device, CheckedDevice) else (device, None)


class Writers:
    """Writes the programs of a runner's calls, and keeps them. Programs refer to it: who has it
    lets them go in the end (`Programs.forget`), and with them a GPU's memory."""

    def __init__(self, devices: list[Device], plans: PlanMaker, options: Options) -> None:
        self.devices, self.plans, self.options = devices, plans, options
        self.programs = Programs()
        alone = options.algorithm != "strassen" and plans.counts[0] == 1
        self.every_gpu = self._gpus(alone)  # whose products one makes, and others make others
        self.gpus = self.every_gpu if alone else {}  # that may work alone, by number
        self.cpu: OneCpu | None = None
        first, checked = _unchecked(devices[0])
        if alone and isinstance(first, CpuDevice):
            self.cpu = OneCpu(first, plans, checked)
        self.hosts: list[PackedOnGpu] = []  # for arrays of the host
        self._stacks: dict[int, StacksOnGpu] = {}
        if self.every_gpu:
            from .packed import PackedOnGpu
            from .stacks import StacksOnGpu

            self._stacks = {i: StacksOnGpu(gpu) for i, gpu in self.every_gpu.items()}
            self.hosts = [PackedOnGpu(gpu, self._stacks[i]) for i, gpu in self.every_gpu.items()]
        self.packed = self.hosts[0] if alone and self.hosts and not options.checked else None
        self.planned = Plans(devices, plans)

    def _gpus(self, alone: bool) -> dict[int, OneGpu]:
        """What writes for each GPU that may multiply alone: for the first where products have one
        worker `alone`, for all where options leave the workers open."""
        each_may = dataclasses.replace(self.options, gpus=None).names_no_workers
        ordinary = self.options.algorithm != "strassen" and self.devices[0].on_gpu
        if not ordinary or not (alone or each_may):
            return {}
        from ..devices.cuda.device import CudaDevice
        from .on_gpu import OneGpu

        found: dict[int, OneGpu] = {}
        for listed in self.devices if each_may else self.devices[:1]:
            device, checked = _unchecked(listed)
            if isinstance(device, CudaDevice):
                found[device.ordinal] = OneGpu(device, self.plans, checked)
        return found

    def write(self, call: Call) -> Program:
        """The program of a call."""
        call = call._replace(alpha=_number(call.alpha), beta=_number(call.beta))
        given = [x for x in call.arrays if x is not None]
        numbers = are_numbers(call.alpha, call.beta)  # others may change, or are refused
        if any(map(library_of, call.arrays)):
            command = OfGuests(self.program, call)
            return Program([command], launch=command, kept=numbers)
        if not numbers:
            return Program([Planned(self.planned, call, self.program)], kept=False)
        if all(type(x) is np.ndarray for x in (call.a, call.b, *given)):
            hosted = self.cpu or self.packed
            return hosted.write(call, self._by_plan) if hosted else self._by_plan(call)
        single = self._single_gpu(call.a, call.b)
        return single.write(call, self._by_plan) if single else self._by_plan(call)

    def program(
        self, call: Call, function: str = "gemm", write: Write | None = None
    ) -> Program:  # fmt: skip
        """The program of a call, which is kept. One of another function is written by `write`."""
        args = (call.a, call.b) if call.c is None else (call.a, call.b, call.c)
        keywords = call._asdict()
        for name in "abc" if call.out is not None else ("a", "b", "c", "out"):
            del keywords[name]
        found = self.programs.get(function, args, keywords)
        if found is None:
            found = (write or self.write)(call)
            if found.kept:
                self.programs.keep(function, args, keywords, found)
        return found

    def multiply(self, a: Any, b: Any, out: Any = None) -> Any:
        """A @ B."""
        return self.program(Call(a, b, out=out)).play(a, b, None, out)

    def _by_plan(self, call: Call) -> Program:
        return Program([Planned(self.planned, call, self.program)], task="a product by a plan")

    def _single_gpu(self, a: Any, b: Any = None) -> OneGpu | None:
        """What writes for a GPU that may work alone: where A lies, where B does, or the only one if
        that is another."""
        if not self.gpus:
            return None
        places = gpu_of(a), gpu_of(b)
        for place in places:
            if place in self.gpus:
                return self.gpus[place]
        if max(places) < 0 or len(self.gpus) != 1:
            return None
        return next(iter(self.gpus.values()))

    def matmul(self, call: Call) -> Program:
        """The program of A @ B as NumPy's `matmul` has it."""
        a, b, out = call.a, call.b, call.out
        if getattr(a, "ndim", 0) == getattr(b, "ndim", 0) == 2:
            return self.program(call)
        if any(map(library_of, (a, b, out))):
            command = OfGuests(self.matmul, call)
            return Program([command], launch=command)
        pairs = Program([Pairs(self)], task=f"A of shape {tuple(a.shape)} times B of {b.shape}")
        if self.cpu and all(x is None or type(x) is np.ndarray for x in (a, b, out)):
            return self.cpu.write_stacks(a, b, out, pairs)
        if is_device_array(a) and (gpu := self.every_gpu.get(a.data.device_id)):
            return self._stacked_on(gpu, a, b, out, pairs)
        return pairs

    def _stacked_on(self, gpu: OneGpu, a: Any, b: Any, out: Any, pairs: Program) -> Program:
        """Of CuPy's stacks: one launch, where they are multiplied so."""
        from .on_gpu import stacked

        if any(x is not None and type(x) is not gpu.array for x in (b, out)) or gpu.checked:
            return pairs
        with gpu.device.current():
            stacks = Stacks.of(a, b, out)
            joined = stacks.joined()
            if joined is not None:
                inner = self.program(Call(*joined[:2], out=joined[2]))
            elif math.prod(stacks.c.shape[:-2]) > 1:  # one may be faster by a kernel of ours
                inner = self._stack(gpu, stacks.a, stacks.b, stacks.c)
            else:
                return pairs
        return stacked(gpu, inner, a, b, stacks, given=out is not None, otherwise=pairs)

    def _stack(self, gpu: OneGpu, a: Any, b: Any, c: Any) -> Program:
        """The program of CuPy's stacks of one length on a GPU, which is kept."""
        return self.program(Call(a, b, out=c), "stack", self._stacks[gpu.ordinal].write)

    def _multiply_stack(self, a: Any, b: Any, c: Any) -> bool:
        """C = A @ B for CuPy's stacks of one length; whether one GPU multiplied them together."""
        gpu = self.every_gpu.get(a.data.device_id)
        if gpu is None or math.prod(c.shape[:-2]) < 2:
            return False
        try:
            self._stack(gpu, a, b, c).play(a, b, None, c)
        except Unfit:
            return False
        return True

    def together(self, a: Any, b: Any, c: Any) -> bool:
        """C = A @ B for stacks, where one GPU multiplies them by few launches, or GPUs take pieces
        of them; otherwise False."""
        if self.cpu:
            return False
        if is_device_array(a):
            return self._multiply_stack(a, b, c)
        if not self.hosts:
            return False
        from .packed import multiply_of_host

        return multiply_of_host(
            self.hosts, self._multiply_stack, a, b, c, self.plans.most_hosted
        )  # fmt: skip


def as_arrays(call: Call) -> Call:
    """A call with arrays in place of what NumPy makes some of, such as lists."""
    a, b, c = (
        x if (x is None and name == "C") or is_device_array(x) or library_of(x)
        else as_array(x, name)
        for name, x in zip("ABC", call[:3], strict=True)
    )  # fmt: skip
    return call._replace(a=a, b=b, c=c)


class OfGuests:
    """OUT of arrays some of which are of other libraries: the program of their views, which `write`
    writes, on their streams."""

    def __init__(self, write: Write, call: Call) -> None:
        self._write, self._like = write, call._replace(a=None, b=None, c=None, out=None)
        self.native: NativeLaunches | None = None

    def __call__(self, slots: list[Any]) -> None:
        guests = Guests.of(*slots[:4])
        assert guests is not None
        inner: list[Program] = []

        def multiply(a: Any, b: Any, c: Any, out: Any) -> Any:
            call = as_arrays(Call(a, b, c, *self._like[3:7], out))
            inner.append(self._write(call))
            return inner[0].play(*call.arrays)

        slots[OUT] = guests.served(multiply)
        native = inner[0].launch and inner[0].launch.native
        if native and guests.taker[0] is TORCH:
            starts, makes, kept = native
            self.native = starts, tuple(_of_torch(slots[0].dtype, *x) for x in makes), kept


def _of_torch(default: Any, _make: Any, shape: tuple[int, ...], dtype: Any) -> Make:
    """What makes a tensor, given A, of that dtype of PyTorch's, in place of CuPy's array."""
    torch = sys.modules["torch"]
    new, of = torch.Tensor.new_empty, getattr(torch, np.dtype(dtype).name)
    return new if of == default else functools.partial(new, dtype=of), shape, None


class Pairs:
    """OUT = A @ B for stacks, all at once by one GPU or pair by pair."""

    def __init__(self, writers: Writers) -> None:
        self._writers = writers

    def __call__(self, slots: list[Any]) -> None:
        a, b, _c, out = slots
        writers, stacks = self._writers, Stacks.of(a, b, out)
        by_three = writers.options.algorithm == "3m" and stacks.c.dtype.kind == "c"
        stacks.multiply(writers.multiply, (lambda *_: False) if by_three else writers.together)
        slots[OUT] = stacks.result if out is None else out


def _number(factor: Any) -> Any:
    """An array of no dimension as its number."""
    return factor[()] if type(factor) is np.ndarray and not factor.ndim else factor
