"""Plans, and kernels for them, on devices that are open."""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from .. import catalog
from ..arrays.operand import Operands
from ..catalog import Variant
from ..devices import decisions
from ..devices.base import Device
from ..devices.cuda import nccl_group
from ..errors import UnavailableError
from ..host.kept import Kept
from ..kernel_choice import compute_modes, on_gpu
from ..kernel_choice.choose import choose, named
from ..kernel_choice.costs import Sides
from ..options import AUTOMATIC_KERNELS, Options
from ..planning.cost_model import HOSTED_BYTES, mode
from ..planning.hardware import DeviceSpec
from ..planning.plan import NOWHERE, Homes, Plan
from ..planning.planner import make_plan, memory_needs
from ..problem import Problem

MAX_PLANS = 256  # remembered
SMALLER = 0.7  # of what a plan needs, where that much was not there


@dataclass(frozen=True)
class Prepared:
    """A product that can be executed: its plan, its kernel, and why it is this kernel."""

    plan: Plan
    variant: Variant
    why: str


class PlanMaker:
    """Settles problems, plans them over these devices, and chooses kernels, as `options` say.

    Plans are remembered, and made again where they no longer fit the memory that is free.
    """

    def __init__(self, devices: Sequence[Device], options: Options) -> None:
        self.devices, self.options = devices, options
        self.kind = devices[0].kind
        self.kernel: Variant | None = None  # that was asked for
        if options.kernel not in AUTOMATIC_KERNELS:
            self.kernel = catalog.product(options.kernel).variant(dict(options.params) or None)
        self.arithmetic = compute_modes.arithmetic_for(
            options.compute, self.kernel, kind=self.kind, arch=devices[0].capability
        )
        self.threads = options.threads or max(len(devices), options.emulate_devices or 1)
        if options.grid and options.threads is None:
            self.threads = math.prod(options.grid)
        self.counts: tuple[int, ...] = (self.threads,)  # workers that a plan may have
        if devices[0].unwrapped.queues and options.names_no_workers:
            powers = (1 << i for i in range((self.threads - 1).bit_length()))
            self.counts = (*powers, self.threads)
        self._plans: Kept[tuple[Plan, list[int]]] = Kept(MAX_PLANS)
        self._prepared: Kept[Prepared] = Kept(MAX_PLANS)

    @property
    def most_hosted(self) -> int:
        """The bytes of A, B and C of the host that one GPU takes whole, without a plan, at
        most."""
        most = HOSTED_BYTES["pinned"]
        return min(most, self.options.max_device_memory or most)

    @property
    def kernel_name(self) -> str:
        """The kernel that was asked for, with the parameters that were given."""
        name = self.kernel.name if self.kernel else "auto"
        return " ".join([name, *(f"{x}={value}" for x, value in self.options.params)])

    def settle(self, problem: Problem) -> Problem:
        """The problem as it, or a complex one's real product, will be multiplied; `UsageError` if
        `compute` is not for it."""
        problem = problem.as_blas()
        if problem.is_complex:
            return dataclasses.replace(problem, compute=self.settle(problem.as_real()).compute)
        if self.options.algorithm == "strassen":  # its sums of quarters are made in `dtype`
            problem = dataclasses.replace(problem, operands=problem.dtype)
        return self.arithmetic.settle(problem)

    def specs(
        self, problem: Problem | None = None, most: int | None = None
    ) -> tuple[DeviceSpec, ...]:  # fmt: skip
        """What the devices are, with the memory (bytes) that products may take, and the rates that
        matter to a problem; without one, those of float32 in all modes."""
        asked = (problem.dtype, mode(problem)) if problem else ()
        devices_may = None if self.devices[0].host_memory else self.options.max_device_memory
        limits = [x for x in (most, devices_may) if x is not None]
        return tuple(
            dataclasses.replace(spec, memory_bytes=min(spec.memory_bytes, *limits))
            if limits
            else spec
            for spec in (device.spec(*asked) for device in self.devices)
        )

    def plan(
        self, problem: Problem, *, resident: bool = False, homes: Homes = NOWHERE,
        page_locked: bool = False, most: int | None = None,
    ) -> Plan:  # fmt: skip
        """The plan for a settled problem; `resident` if A, B and C are there when it begins,
        `homes` the devices that read or make them where they lie, `page_locked` if those of the
        host are copied without another copy there, `most` the bytes of a device that it may
        take."""
        specs, lie = self.specs(problem, most), (resident, homes, page_locked)
        if known := self._plans.get((problem, lie)):
            plan, needs = known
            if all(x <= s.memory_bytes for x, s in zip(needs, specs, strict=True)):
                return plan  # as good as ever, since it still fits
        options = self.options
        plan = make_plan(
            problem, specs, self.counts, split=options.split, grid=options.grid,
            kernel=self.kernel_name, reduce=options.reduce, resident=resident, homes=homes,
            page_locked=page_locked,
        )  # fmt: skip
        if plan.reduce == "nccl" and plan.summed and (reason := nccl_group.unavailable()):
            raise UnavailableError(
                f"the nccl reduction was asked for: {reason}; the ordered one works here"
            )
        if not plan.turns_in_memory:  # turns are made for the memory that there is now
            self._plans.put((problem, lie), (plan, memory_needs(plan)))
        return plan

    def prepare(self, operands: Operands, *, resident: bool) -> Prepared:
        """The plan and the kernel for described operands of a settled problem."""
        lie = self._lie(operands, resident)
        resident, homes, page_locked, layouts = lie
        plan = self.plan(
            operands.problem, resident=resident, homes=homes, page_locked=page_locked
        )  # fmt: skip
        known = self._prepared.get((operands.problem, lie))
        if known and known.plan is plan:  # a choice may ask a library what it would launch
            return known
        made = Prepared(plan, *self.choice(plan, layouts))
        if not plan.turns_in_memory:
            self._prepared.put((operands.problem, lie), made)
        return made

    def known(self, operands: Operands) -> Prepared | None:
        """What `prepare` gave for operands that lie alike and are not resident; whether it fits the
        memory that is free now, nobody has looked, which takes a driver long."""
        return self._prepared.get((operands.problem, self._lie(operands, resident=False)))

    def _lie(self, operands: Operands, resident: bool) -> tuple[bool, Homes, bool, str]:
        """How operands lie, as far as plans and kernels depend on it."""
        locked = not resident and operands.page_locked(self.devices[0])
        return resident, operands.homes(self.devices), locked, operands.layouts

    def smaller(self, plan: Plan) -> Plan:
        """The same product with less of each device's memory than this plan takes;
        `OutOfMemoryError` where not even the smallest turns fit."""
        most = int(SMALLER * max(memory_needs(plan)))
        return self.plan(
            plan.problem, resident=plan.resident, homes=plan.homes, page_locked=plan.page_locked,
            most=most,
        )  # fmt: skip

    def choice(self, plan: Plan, layouts: str = "nn") -> tuple[Variant, str]:
        """The kernel for a plan of operands in these layouts, and why it is this one. Raises
        `UsageError` if the one asked for cannot run it."""
        return self._choice(plan.problem, plan.products, layouts, plan.multiplied)

    def _choice(
        self, problem: Problem, products: Sequence[Sides], layouts: str, panels: Mapping[Sides, int]
    ) -> tuple[Variant, str]:
        return choose(
            problem, products, self.devices[0], panels=panels,
            chosen=self._asked_for(problem, products),
            own=self.options.kernel == "own", arithmetic=self.arithmetic, layout=layouts,
        )  # fmt: skip

    def _asked_for(self, problem: Problem, products: Sequence[Sides]) -> Variant | None:
        """The kernel that was asked for, as this device runs it."""
        if self.kernel is None or self.kernel.kernel.library:
            return self.kernel
        machine, params = self.devices[0].machine(problem.dtype), dict(self.options.params)
        return named(self.kernel.kernel, params, problem, products, machine)

    def alone(self, problem: Problem, layouts: str, device: Device) -> Variant | None:
        """The kernel for the device that has A, B and C, so that nothing has to fit besides;
        None where several devices together are worth what they cost."""
        if self.counts == (1,):
            whole = problem.m, problem.n, problem.k
            return self._choice(problem, [whole], layouts, {whole: 1})[0]
        home = self.devices.index(device)
        specs = tuple(
            dataclasses.replace(spec, memory_bytes=sys.maxsize) if i == home else spec
            for i, spec in enumerate(self.specs(problem))
        )
        plan = make_plan(
            problem, specs, self.counts, kernel=self.kernel_name, resident=True,
            homes=(home, home, home),
        )  # fmt: skip
        return None if len(plan.workers) > 1 else self.choice(plan, layouts)[0]

    def rivals(self, problem: Problem, layouts: str, device: Device, first: Variant) -> list:
        """The kernels that first calls are to compare with `first`, if they were asked for."""
        machine = device.machine(problem.dtype)
        if self.options.tune != "first-calls" or self.kernel or machine is None:
            return []
        own = self.options.kernel == "own"
        return on_gpu.next_fastest(machine, problem, layouts, first, own=own)

    def verdicts(self, problem: Problem) -> np.ndarray:
        """How products whose arithmetic depends on the data came out so far, on all devices (see
        `decisions.taken`)."""
        found = [decisions.taken(device, problem) for device in self.devices]
        return np.sum(found, axis=0)

    def describe(self, plan: Plan | None) -> str:
        """The devices, or those of a plan, in a few words."""
        used = list(self.devices)
        if plan and len(self.counts) > 1:
            used = [self.devices[i] for i in sorted({w.device for w in plan.workers})]
        idle = len(self.devices) - len(used)
        names = ", ".join(device.describe() for device in used)
        return names + (f" ({idle} more not worth starting)" if idle else "")
