"""Variants side by side: what each is counted by, as arrays with an element for each. Pure."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from ..catalog import ITEM_SIZE, Variant
from ..catalog.expressions import evaluate_all, product
from ..host.kept import cached_property

Sides = tuple[int, int, int]  # m, n, k
Floats = tuple[float, float, float]  # the same, which go with arrays more quickly


class SideBySide:
    """Some variants, in their order. Arrays are of float64: whole numbers are exact there up to
    2^53, and larger ones do not wrap around."""

    def __init__(self, variants: Sequence[Variant]) -> None:
        self.variants = tuple(variants)
        self._of: dict[object, np.ndarray] = {}
        self._texts: dict[tuple[str, str], tuple[tuple[str, ...], np.ndarray]] = {}

    def of(self, key: object, value: Callable[[Variant], float]) -> np.ndarray:
        """A value of each variant, which is worked out once for a key."""
        if key not in self._of:
            self._of[key] = _array(map(value, self.variants))
        return self._of[key]

    def param(self, name: str, default: int | None = None) -> np.ndarray:
        """A parameter, or the default where a variant has none."""

        def value(v: Variant) -> int:
            return v.params[name] if default is None else v.params.get(name, default)

        return self.of((name, default), value)

    @cached_property
    def tile(self) -> tuple[np.ndarray, np.ndarray]:
        """As `Variant.tile`."""
        return _array(v.tile[0] for v in self.variants), _array(v.tile[1] for v in self.variants)

    @cached_property
    def cluster(self) -> np.ndarray:
        """As `Variant.cluster`."""
        return _array(v.cluster for v in self.variants)

    @cached_property
    def in_place(self) -> np.ndarray:
        """As of their kernels: whether each reads operands where they lie."""
        return np.array([v.kernel.in_place for v in self.variants])

    def steps(self, k: float, dtype: str) -> np.ndarray:
        """As `Variant.steps`."""
        return ceil_of(k, self.of(("step", dtype), lambda v: v.step(dtype)))

    def blocks(self, sides: Floats, dtype: str) -> np.ndarray:
        """As `Variant.blocks`."""
        return self._products("grid", sides, dtype)

    def take(self, sides: Floats, dtype: str) -> np.ndarray:
        """As `Variant.takes`."""
        return self._products("limits", sides, dtype) > 0

    def _products(self, of: str, sides: Floats, dtype: str) -> np.ndarray:
        """Of expressions that kernels have, in one of their fields. Those that are the same for
        several variants are evaluated once."""
        known = self._texts.get((of, dtype))
        if known is None:
            each = [
                product(getattr(v.kernel, of), {**v.params, "SIZE": ITEM_SIZE[dtype]})
                for v in self.variants
            ]
            texts = tuple(dict.fromkeys(each))
            known = self._texts[of, dtype] = texts, np.array([texts.index(x) for x in each])
        texts, places = known
        names = dict(zip("mnk", map(int, sides), strict=True))
        return np.array(evaluate_all(texts, names), float)[places]


@functools.lru_cache(maxsize=4096)
def alone(variant: Variant) -> SideBySide:
    """One variant."""
    return SideBySide([variant])


def ceil_of(x: Any, y: Any) -> Any:
    """x / y, rounded up, of numbers or of arrays."""
    return np.ceil(x / y)


def _array(values: Iterable[float]) -> np.ndarray:
    return np.array(list(values), float)
