"""Complex products: as one real product, or as three, each a product by itself."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from ..arrays.caller_arrays import Multiplier, wait_for_streams
from ..arrays.complex_numbers import RealProduct
from ..arrays.operand import CallerArrays
from ..arrays.three_products import ThreeProducts, computed, progress_of_one
from ..problem import Problem
from .result import Result
from .timeline import Timeline

Progress = Callable[[int], None] | None
T = TypeVar("T")


class Alone:
    """Who makes a product: this process. Ranks make C by rows, and raise the same."""

    by_rows = False

    def together(self, call: Callable[[], T]) -> T:
        """What `call()` gives; where it raises here or elsewhere, an error."""
        return call()

    def slowest_ms(self, start: float) -> float:
        """The time since `start`, of those that make the product."""
        return 1e3 * (time.perf_counter() - start)


ALONE = Alone()


@dataclass(frozen=True)
class ComplexProduct:
    """The product of a caller's complex arrays, or of a rank's blocks; `device` is one of those
    that multiply."""

    arrays: CallerArrays
    problem: Problem
    device: Multiplier
    makers: Alone = ALONE

    def by_four(self, multiply: Callable[..., Any]) -> Any:
        """C by one real product (`arrays/complex_numbers.py`), which `Runner._multiply` makes."""
        real = self._real()
        multiply(real.a, real.b, real.c, real.alpha, real.beta, False, False, real.out)
        return self.arrays.result(real.made)

    def by_three(self, multiply: Callable[[Any, Any], Any]) -> Any:
        """C by three real products (`arrays/three_products.py`) of two matrices each."""
        return self.arrays.result(self._three().multiply(multiply, self.arrays.c, self.arrays.out))

    def run_by_four(
        self, run: Callable[..., Result], resident: bool, progress: Progress
    ) -> Result:  # fmt: skip
        """`Runner.run` of the real product. The clock counts what makes its operands, unless they
        are to be resident."""
        start = time.perf_counter()

        def made() -> RealProduct:
            found = self._real()
            wait_for_streams(found.a, found.b)
            return found

        real = self.makers.together(made)
        ms = 0 if resident else self.makers.slowest_ms(start)
        done = run(
            real.a, real.b, real.c, alpha=real.alpha, beta=real.beta, out=real.out,
            resident=resident, progress=progress,
        )  # fmt: skip
        return dataclasses.replace(
            done, c=self.arrays.result(real.made), problem=self.problem,
            total_ms=done.total_ms + ms, compute=f"{done.compute}, four real products",
        )  # fmt: skip

    def run_by_three(
        self, run: Callable[..., Result], resident: bool, progress: Progress
    ) -> Result:
        """`Runner.run` of three real products, one after the other. The clock counts what makes
        their operands and C, unless all is to be resident."""
        start = time.perf_counter()

        def parts() -> ThreeProducts:
            found = self._three()
            wait_for_streams(*found.a, *found.b)
            return found

        three = self.makers.together(parts)
        done: list[Result] = [
            run(a, b, resident=resident, progress=progress_of_one(progress))
            for a, b in zip(three.a, three.b, strict=True)
        ]

        def combined() -> Any:
            found = three.combined([x.c for x in done], self.arrays.c, self.arrays.out)
            wait_for_streams(found)
            return found

        made, runs = self.makers.together(combined), [x.total_ms for x in done]
        total_ms = sum(runs) if resident else self.makers.slowest_ms(start)
        return dataclasses.replace(
            done[-1], c=self.arrays.result(made), problem=self.problem, total_ms=total_ms,
            timeline=Timeline.after_each_other([x.timeline for x in done], runs),
            compute=computed([x.compute for x in done]),
        )  # fmt: skip

    def _real(self) -> RealProduct:
        """The real product, with operands of its own."""
        arrays = self.arrays
        arrays.check(self.problem, self.device)
        return RealProduct.of(
            self.problem, arrays.op_a, arrays.op_b, arrays.c, arrays.out,
            by_rows=self.makers.by_rows,
        )  # fmt: skip

    def _three(self) -> ThreeProducts:
        self.arrays.check(self.problem, self.device)
        return ThreeProducts.of(self.problem, self.arrays.op_a, self.arrays.op_b)
