"""`Runner`: products with the same choices again and again, on one machine."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Sequence
from typing import Any, Unpack

from . import devices
from .arrays.caller_arrays import as_lists, naming_pairs
from .arrays.guests import Guests
from .arrays.operand import CallerArrays
from .arrays.tensors import not_traced
from .catalog import Variant
from .devices.base import Device
from .devices.strassen import Strassen
from .errors import OptionTypeError, UsageError
from .execution.checked_device import checked_devices
from .execution.plan_maker import PlanMaker
from .execution.result import Result
from .host.notes import warn
from .option_checks import check_yes_or_no
from .options import CHOICES, DEFAULTS, Options, OptionsAlone, named_keywords, with_options
from .planning.plan import NOWHERE, Homes, Plan
from .problem import Problem, Scalar, check_complex_sides, op_of
from .programs.program import Call
from .programs.signature import MATMUL, Written, played
from .programs.writers import Writers, as_arrays

# What a `Runner` keeps between products, and gives back when it is closed.
_KEPT = "devices", "plans", "_writers", "_programs"


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
        self._writers = Writers(self.devices, self.plans, options)
        self._programs = self._writers.programs
        if options.tune == "first-calls" and not self._writers.gpus:
            warn("tune has no effect: first calls choose kernels for arrays on one GPU")

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
        if programs := self.__dict__.get("_programs"):
            programs.forget()  # which refer to what writes them
        for name in _KEPT:
            self.__dict__.pop(name, None)

    def __del__(self) -> None:
        if sys is not None and not sys.is_finalizing():  # None: modules are taken apart already
            self.close()

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
        by_three = self._writers.planned.by_three(problem)
        if problem.is_complex and not by_three:
            check_complex_sides(problem.m, problem.n, problem.k)
        real = problem.as_third() if by_three else problem.as_real()
        return self.plans.plan(real, resident=resident, homes=homes, page_locked=page_locked)

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
            return self._writers.planned.run(arrays, problem, resident, progress)

    @played("gemm", "_programs")
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
        return self._written(Call(a, b, c, alpha, beta, trans_a, trans_b, out))

    def _written(self, call: Call) -> Written:
        """The program of a call, and the call."""
        call = as_arrays(call)
        return self._writers.write(call), call

    @played(MATMUL, "_programs")
    def matmul(self, a: Any, b: Any, /, out: Any = None) -> Any:
        """A @ B as NumPy's `matmul`; see `hybrid_gemm.matmul`."""
        return self._written_matmul(a, b, out)

    def _written_matmul(self, a: Any, b: Any, out: Any) -> Written:
        call = as_arrays(Call(a, b, out=out))
        return self._writers.matmul(call), call

    @not_traced
    def gemm_many(self, a: Sequence[Any], b: Sequence[Any], /) -> list[Any]:
        """A @ B for all pairs of two lists; see `hybrid_gemm.gemm_many`."""
        a, b = as_lists(a, b)
        with naming_pairs(a, b):
            return list(map(self._writers.multiply, a, b))

    def _home_of(self, array: Any) -> Any:
        """The device in whose memory an array lies; None is the host's."""
        return self._writers.planned.home_of(array)

    def describe(self, plan: Plan | None = None) -> str:
        """The devices, or those of a plan, in a few words."""
        return self.plans.describe(plan)
