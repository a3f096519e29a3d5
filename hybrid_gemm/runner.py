"""`Runner`: products with the same choices again and again, on one machine."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any, Unpack

import numpy as np

from . import devices
from .arrays.caller_arrays import as_array, as_lists, is_device_array, naming_pairs
from .arrays.guests import Guests
from .arrays.on_gpus import refuse_captured
from .arrays.operand import CallerArrays, home_of
from .arrays.other_libraries import TORCH, gpu_of
from .arrays.stacks import Stacks
from .arrays.tensors import not_traced
from .catalog import Variant
from .devices.base import Device
from .devices.cpu import CpuDevice
from .devices.strassen import Strassen
from .errors import OptionTypeError, UsageError, shortage_in_words
from .execution.checked_device import CheckedDevice, checked_devices
from .execution.complex_products import ComplexProduct
from .execution.hosted import Hosted, multiply_of_host
from .execution.kept_programs import NATIVE
from .execution.local import LocalExecutor
from .execution.native_calls import NativeCalls, served_by
from .execution.plan_maker import PlanMaker
from .execution.repeated_calls import RepeatedCalls
from .execution.result import Result
from .execution.single_cpu import SingleCpuExecutor
from .host.notes import warn
from .option_checks import check_yes_or_no
from .options import CHOICES, DEFAULTS, Options, OptionsAlone, named_keywords, with_options
from .planning.plan import NOWHERE, Homes, Plan
from .problem import Problem, Scalar, check_complex_sides, op_of

if TYPE_CHECKING:  # what has GPUs imports it
    from .execution.single_gpu import SingleGpuExecutor

# What a `Runner` keeps between products, and gives back when it is closed.
_KEPT = (
    "devices", "plans", "_single_gpus", "_stack_gpus", "_single_cpu", "_hosts", "_hosted",
    "_executor", "_repeated", "_gemms", "_matmuls",
)  # fmt: skip


def _unchecked(device: Device) -> tuple[Device, CheckedDevice | None]:
    """What multiplies, and the device that checks its products, if they are checked."""
    return (device.device, device) if isinstance(device, CheckedDevice) else (device, None)


class Runner:
    """Repeated products with the same choices; keeps devices, plans and compiled kernels.

    The keywords are options; `help(Runner.__init__)` says what each means.
    In a `with` block it gives back what it keeps at the block's end; otherwise when nothing
    refers to it any more. A copy, or what a pickled one becomes, is another with the same options.

    >>> import numpy as np
    >>> with Runner(device="cpu", threads=2, split="cols") as runner:
    ...     runner.gemm(np.ones((2, 3)), np.ones((3, 2))).tolist()
    [[3.0, 3.0], [3.0, 3.0]]
    """

    @with_options(alone=True)
    def __init__(self, **options: Unpack[OptionsAlone]) -> None:
        """Opens the devices. Raises `UsageError`, `OptionTypeError` or `UnavailableError` for
        choices that cannot be had."""
        self._open(Options.of(options, "Runner").alone())

    @classmethod
    def of(cls, options: Options) -> Runner:
        """A runner for options that are made already."""
        runner = cls.__new__(cls)
        runner._open(options)
        return runner

    def _open(self, options: Options) -> None:
        self.options = options
        self.kind, self.note = devices.choose(options.device, options.gpus)
        workers = options.threads or options.emulate_devices or 1
        opened = devices.open_devices(
            self.kind, workers, gpus=options.gpus, emulate=options.emulate_devices
        )
        idle = {  # without threads, emulated devices say how many workers there are
            "max_device_memory": options.max_device_memory,
            "emulate_devices": options.threads and options.emulate_devices,
        }
        for name in (x for x, given in idle.items() if given and opened[0].host_memory):
            warn(f"{name} has no effect: the cpu device multiplies in the host's memory")
        self.devices: list[Device] = list(opened)
        if options.algorithm == "strassen":
            self.devices = [Strassen(device, options.levels) for device in opened]
        if options.checked:
            self.devices = checked_devices(opened)
        self.plans = PlanMaker(self.devices, options)
        self._open_executors()

    def _open_executors(self) -> None:
        """What carries out plans, and what multiplies without one."""
        alone = self.options.algorithm != "strassen" and self.plans.counts[0] == 1
        self._stack_gpus = self._gpus(alone)  # whose products one GPU makes, and others make others
        self._single_gpus = self._stack_gpus if alone else {}
        if self.options.tune == "first-calls" and not self._single_gpus:
            warn("tune has no effect: first calls choose kernels for arrays on one GPU")
        # The calls of `gemm` and `matmul` that are known.
        self._gemms, self._matmuls = (NativeCalls() if self._stack_gpus else None for _ in "ab")
        self._hosts = [*map(Hosted, self._stack_gpus.values())]
        self._hosted: Callable | None = None  # for arrays of the host
        if alone and self._hosts and not self.options.checked:  # a run checks copies, too
            self._hosted = self._hosts[0].gemm
        self._single_cpu: SingleCpuExecutor | None = None
        first, checked = _unchecked(self.devices[0])
        if alone and isinstance(first, CpuDevice):
            self._single_cpu = SingleCpuExecutor(first, self.plans, checked)
            self._hosted = self._single_cpu.gemm
        self._executor = LocalExecutor(self.plans, self._single_gpus)
        self._repeated: RepeatedCalls | None = None
        if self.devices[0].queues:  # so that native threads may start what it does
            self._repeated = RepeatedCalls(self._executor.threads.kept, self.devices[0])

    def _gpus(self, alone: bool) -> dict[int, SingleGpuExecutor]:
        """What multiplies on one GPU, by the number of each that may: of the first where products
        have one worker `alone`, of all where options leave the workers open."""
        each_may = dataclasses.replace(self.options, gpus=None).names_no_workers
        ordinary = self.options.algorithm != "strassen" and self.devices[0].on_gpu
        if not ordinary or not (alone or each_may):
            return {}
        from .devices.cuda.device import CudaDevice
        from .execution.single_gpu import SingleGpuExecutor

        found: dict[int, SingleGpuExecutor] = {}
        for listed in self.devices if each_may else self.devices[:1]:
            device, checked = _unchecked(listed)
            if isinstance(device, CudaDevice):
                found[device.ordinal] = SingleGpuExecutor(device, self.plans, checked)
        return found

    @property
    def threads(self) -> int:
        """Worker threads, at most: fewer where the planner finds that enough."""
        return self.plans.threads

    def __repr__(self) -> str:
        if "devices" not in self.__dict__:
            return "<Runner, closed>"
        given = (f"{x}={getattr(self.options, x)!r}" for x in CHOICES
                 if getattr(self.options, x) != DEFAULTS[x])  # fmt: skip
        return f"<Runner({', '.join(given)}) on {self.describe()}>"

    def __reduce__(self) -> tuple[Callable[[Options], Runner], tuple[Options]]:
        return type(self).of, (self.options,)  # copies open devices of their own

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Gives back what is kept: memory of devices, plans and loaded kernels. A product after
        this is a `UsageError`."""
        for name in _KEPT:
            self.__dict__.pop(name, None)

    def __getattr__(self, name: str) -> Any:
        if name in _KEPT:
            raise UsageError("this Runner was closed; make another for more products")
        raise AttributeError(f"a Runner has no attribute {name!r}")

    def plan(
        self, problem: Problem, *, resident: bool = False, homes: Homes = NOWHERE,
        page_locked: bool = False,
    ) -> Plan:  # fmt: skip
        """The plan for a problem on these devices; `resident` if A, B and C are there when it
        begins, `homes` the devices whose memory they were given in, `page_locked` if they lie in
        such memory of the host. A complex problem's is that of its real product, or of one of
        three. Raises `UsageError` if `compute` is not for it, or the real one is too large."""
        problem = self.plans.settle(problem)
        if problem.is_complex and not self._by_three(problem):
            check_complex_sides(problem.m, problem.n, problem.k)
        real = problem.as_third() if self._by_three(problem) else problem.as_real()
        return self.plans.plan(real, resident=resident, homes=homes, page_locked=page_locked)

    def _by_three(self, problem: Problem) -> bool:
        """Whether a product is made of three real ones."""
        return problem.is_complex and self.options.algorithm == "3m"

    def variant(self, plan: Plan, layouts: str = "nn") -> Variant:
        """The kernel for a plan. Raises `UsageError` if the one asked for cannot run it."""
        return self.plans.choice(plan, layouts)[0]

    # Many parameters: a product has so many, as in BLAS.
    @not_traced
    @named_keywords
    def run(
        self, a: Any, b: Any, c: Any = None, /, *, alpha: Scalar = 1.0, beta: Scalar = 0.0,
        trans_a: bool | str = False, trans_b: bool | str = False, out: Any = None,
        resident: bool = False,
        progress: Callable[[int], None] | None = None,
    ) -> Result:  # fmt: skip
        """As `gemm`, returning a `Result` with the plan and the timeline beside C.

        With `resident`, the clock runs only from when every block is on its device until every
        strip of C is finished there. `progress(flops)` is called as work is started, from any
        thread.
        """
        resident = check_yes_or_no("resident", resident)
        if progress is not None and not callable(progress):
            raise OptionTypeError(f"progress takes a function of a number; {progress!r} was given")
        if guests := Guests.of(a, b, c, out):
            with guests.on_their_streams():
                result = self.run(
                    guests.a, guests.b, guests.c, alpha=alpha, beta=beta, trans_a=trans_a,
                    trans_b=trans_b, out=guests.out, resident=resident, progress=progress,
                )  # fmt: skip
                return dataclasses.replace(result, c=guests.given_back(result.c))
        arrays = CallerArrays.of(a, b, c, out, trans_a=trans_a, trans_b=trans_b)
        problem = self.plans.settle(arrays.problem(alpha=alpha, beta=beta))
        with arrays.on_their_gpu(self.devices[0]):
            return self._run(arrays, problem, resident, progress)

    def _run(
        self, arrays: CallerArrays, problem: Problem, resident: bool = False,
        progress: Callable[[int], None] | None = None, *, described: bool = True,
    ) -> Result:  # fmt: skip
        refuse_captured(arrays.op_a, arrays.op_b, arrays.c, arrays.out)
        with shortage_in_words(problem):
            if problem.is_complex:
                whole = ComplexProduct(arrays, problem, self.devices[0])
                run = whole.run_by_three if self._by_three(problem) else whole.run_by_four
                return run(self.run, resident, progress)
            operands = arrays.described(problem, self.devices[0], self._home_of)
            ready, done = self._executor.execute(
                operands, resident=resident, progress=progress, described=described
            )
            return Result(
                arrays.result(operands.out.array), done.plan or ready.plan, ready.variant,
                done.timeline, done.total_ms, done.reduction, problem, ready.why, done.compute,
                done.checks, done.executor, done.reading,
            )  # fmt: skip

    @served_by("_gemms")
    @named_keywords
    def gemm(  # as in BLAS
        self, a: Any, b: Any, c: Any = None, /, *, alpha: Scalar = 1.0, beta: Scalar = 0.0,
        trans_a: bool | str = False, trans_b: bool | str = False, out: Any = None,
    ) -> Any:  # fmt: skip
        """alpha * op(A) @ op(B) + beta * C; see `hybrid_gemm.gemm`.

        What one GPU does alone is started without a plan: on the caller's current stream for
        arrays that lie there, and small ones of the host are copied there and back whole.
        """
        trans_a, trans_b = op_of(trans_a, "trans_a"), op_of(trans_b, "trans_b")
        return self._multiply(a, b, c, alpha, beta, trans_a, trans_b, out)

    @served_by("_matmuls")
    def matmul(self, a: Any, b: Any, /, *, out: Any = None) -> Any:
        """A @ B as NumPy's `matmul`; see `hybrid_gemm.matmul`."""
        if getattr(a, "ndim", 0) == getattr(b, "ndim", 0) == 2:
            return self._multiply(a, b, None, 1.0, 0.0, False, False, out)
        if guests := Guests.of(a, b, None, out):
            # What the views start is this call's.
            again = Runner.matmul.__wrapped__  # type: ignore[attr-defined]
            return guests.served(lambda x, y, _c, z: again(self, x, y, out=z))
        return self._matmul(as_array(a, "A"), as_array(b, "B"), out)

    def _matmul(self, a: Any, b: Any, out: Any) -> Any:
        """`matmul` of NumPy's or CuPy's arrays."""
        try:
            return self._matmul_stacks(a, b, out)
        except Exception:
            with shortage_in_words(f"A of shape {tuple(a.shape)} times B of {tuple(b.shape)}"):
                raise

    def _matmul_stacks(self, a: Any, b: Any, out: Any) -> Any:
        if self._single_cpu and all(type(x) in (np.ndarray, type(None)) for x in (a, b, out)):
            made = self._single_cpu.matmul(a, b, out)
            if made is not None:
                return made if out is None else out
        stacks = Stacks.of(a, b, out)
        if self.options.algorithm == "3m" and stacks.c.dtype.kind == "c":
            stacks.multiply(self._product, lambda *_: False)
        elif (self._stack_gpus or is_device_array(stacks.c)) and self.options.kernel != "own":
            stacks.multiply(self._product, self._together)
        else:
            if stacks.c.dtype.kind == "c" and not TORCH.lends:  # B is expanded in a copy
                refuse_captured(stacks.a, stacks.b, stacks.c)
            stacks.as_real().multiply(self._product, self._together)
        return stacks.result if out is None else out

    @not_traced
    def gemm_many(self, a: Sequence[Any], b: Sequence[Any], /) -> list[Any]:
        """A @ B for all pairs of two lists; see `hybrid_gemm.gemm_many`."""
        return self._gemm_many(*as_lists(a, b), self._product)

    def _gemm_many(
        self, a: list[Any], b: list[Any], product: Callable[[Any, Any], Any]
    ) -> list[Any]:
        """As `gemm_many`, by `product`."""
        with naming_pairs(a, b):
            return [product(x, y) for x, y in zip(a, b, strict=True)]

    def _together(self, a: Any, b: Any, c: Any) -> bool:
        """c = a @ b for stacks, where one GPU multiplies them by few launches, or the CPU by one
        call; otherwise False."""
        if self._single_cpu:
            hosted = all(type(x) is np.ndarray for x in (a, b, c))
            return hosted and self._single_cpu.matmul(a, b, c) is not None
        if is_device_array(a):
            single = self._stack_gpus.get(a.device.id)
            return (
                single is not None
                and math.prod(c.shape[:-2]) > 1  # one may be faster by a kernel of ours
                and (single.checked_stack if single.checked else single.stacks.matmul)(a, b, c)
            )
        return multiply_of_host(self._hosts, a, b, c, self.plans.most_hosted)

    def _multiply(
        self, a: Any, b: Any, c: Any, alpha: Scalar, beta: Scalar, trans_a: bool | str,
        trans_b: bool | str, out: Any,
    ) -> Any:  # fmt: skip
        """`gemm` by position, which saves a call of microseconds a tenth of its time; transposes
        as `op_of` gives them."""
        array = np.ndarray
        if type(alpha) is array or type(beta) is array:  # of no dimension: as numbers
            alpha, beta = (x[()] if type(x) is array and not x.ndim else x for x in (alpha, beta))
        hosted = (
            type(a) is array and type(b) is array and (c is None or type(c) is array)
            and (out is None or type(out) is array)
        )  # fmt: skip
        if not hosted:
            if single := self._single_gpu(a, b):
                for way in single.gemm, single.gemm_of_others:
                    done = way(a, b, c, alpha, beta, trans_a, trans_b, out)
                    if done is not None:
                        return done
            if guests := Guests.of(a, b, c, out):
                return guests.served(
                    lambda a, b, c, out: self._multiply(a, b, c, alpha, beta, trans_a, trans_b, out)
                )
            x, y, z = as_array(a, "A"), as_array(b, "B"), None if c is None else as_array(c, "C")
            if not (x is a and y is b and z is c):  # lists, and what else makes arrays
                return self._multiply(x, y, z, alpha, beta, trans_a, trans_b, out)
        elif self._hosted is not None:
            done = self._hosted(a, b, c, alpha, beta, trans_a, trans_b, out)
            if done is not None:
                return done
        key = None
        if hosted and c is None and self._repeated is not None:
            key = self._repeated.key(a, b, alpha, beta, trans_a, trans_b, out)
            done = self._repeated.gemm(key, a, b, out)
            if done is not None:
                return done
        arrays = CallerArrays.of(a, b, c, out, trans_a=trans_a, trans_b=trans_b)
        problem = self.plans.settle(arrays.problem(alpha=alpha, beta=beta))
        if problem.is_complex:
            return self._multiply_complex(arrays, problem)
        turned = arrays.turned() if hosted and self.devices[0].on_gpu else None
        if turned:
            arrays.check(problem, self.devices[0])
            of_turned = dataclasses.replace(problem, m=problem.n, n=problem.m)
            self._run(turned, of_turned, described=False)
            return out
        return self._multiply_real(arrays, problem, key)

    def _multiply_real(self, arrays: CallerArrays, problem: Problem, key: Hashable | None) -> Any:
        """By a run; calls with this `key` repeat it, if native threads carried it out."""
        with arrays.on_their_gpu(self.devices[0]):
            done = self._run(arrays, problem, described=False)
        if (
            self._repeated and key
            and done.executor == NATIVE and done.c.dtype == problem.out_dtype
        ):  # fmt: skip
            self._repeated.note(key, arrays, done.plan, done.variant, done.c)
        return done.c

    def _multiply_complex(self, arrays: CallerArrays, problem: Problem) -> Any:
        """By one real product, or by three."""
        if not TORCH.lends:  # whose graphs keep what is made of A and B
            refuse_captured(arrays.op_a, arrays.op_b, arrays.c, arrays.out)
        whole = ComplexProduct(arrays, problem, self.devices[0])
        with shortage_in_words(problem), arrays.on_their_gpu(self.devices[0]):
            if self._by_three(problem):
                return whole.by_three(self._product)
            return whole.by_four(self._multiply)

    def _product(self, a: Any, b: Any, out: Any = None) -> Any:
        """A @ B."""
        return self._multiply(a, b, None, 1.0, 0.0, False, False, out)

    def _single_gpu(self, a: Any, b: Any = None) -> SingleGpuExecutor | None:
        """What multiplies without a plan, on a GPU that may work alone: where A lies, where B does,
        or on the only one if that is another."""
        if not self._single_gpus:
            return None
        places = gpu_of(a), gpu_of(b)
        for place in places:
            if place in self._single_gpus:
                return self._single_gpus[place]
        if max(places) < 0 or len(self._single_gpus) != 1:
            return None
        return next(iter(self._single_gpus.values()))

    def describe(self, plan: Plan | None = None) -> str:
        """The devices, or those of a plan, in a few words."""
        return self.plans.describe(plan)

    def _home_of(self, array: Any) -> Any:
        """The device in whose memory an array lies; None is the host's."""
        return home_of(array, self.devices)
