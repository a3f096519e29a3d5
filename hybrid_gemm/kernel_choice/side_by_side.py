"""Variants side by side: what each is counted by, as arrays with an element for each. Pure."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from ..catalog import ITEM_SIZE, Variant
from ..catalog.expressions import evaluate, evaluate_all, with_values
from ..host.kept import cached_property

Sides = tuple[int, int, int]  # m, n, k
Floats = tuple[float, float, float]  # the same, which go with arrays more quickly


class SideBySide:
    """Some variants, in their order. Arrays are of float64: whole numbers are exact there up to
    2^53, and larger ones do not wrap around."""

    def __init__(self, variants: Sequence[Variant]) -> None:
        self.variants = tuple(variants)
        self._of: dict[object, np.ndarray] = {}
        self._known: dict[tuple[str, str], tuple[tuple[str, ...], np.ndarray]] = {}

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
        """As `Variant.blocks`; 1 of a variant that does not take the sides."""
        texts, places = self._texts("grid", dtype)
        taken, names = self.take(sides, dtype), _named(sides)
        try:
            values = evaluate_all(texts, names)
        except ValueError:  # a grid may have no value beyond its kernel's limits
            needed = {*places[taken].flat}
            values = tuple(evaluate(x, names) if i in needed else 1 for i, x in enumerate(texts))
        return np.where(taken, np.array(values, float)[places].prod(1), 1.0)

    def take(self, sides: Floats, dtype: str) -> np.ndarray:
        """As `Variant.takes`."""
        texts, places = self._texts("limits", dtype)
        return (np.array(evaluate_all(texts, _named(sides)))[places] != 0).all(1)

    def _texts(self, of: str, dtype: str) -> tuple[tuple[str, ...], np.ndarray]:
        """The expressions that kernels have in one of their fields, with the variants' parameters:
        each once, since several variants have the same; and a row for each variant with the places
        of its own, filled up with that of 1."""
        if (of, dtype) not in self._known:
            each = [
                [
                    with_values(x, {**v.params, "SIZE": ITEM_SIZE[dtype]})
                    for x in getattr(v.kernel, of)
                ]
                for v in self.variants
            ]
            texts = tuple(dict.fromkeys(["1", *(x for row in each for x in row)]))
            places = np.zeros((len(each), max(map(len, each))), int)
            for line, row in zip(places, each, strict=True):
                line[: len(row)] = [texts.index(x) for x in row]
            self._known[of, dtype] = texts, places
        return self._known[of, dtype]


@functools.lru_cache(maxsize=4096)
def alone(variant: Variant) -> SideBySide:
    """One variant."""
    return SideBySide([variant])


def ceil_of(x: Any, y: Any) -> Any:
    """x / y, rounded up, of numbers or of arrays."""
    return np.ceil(x / y)


def _named(sides: Floats) -> dict[str, int]:
    return dict(zip("mnk", map(int, sides), strict=True))


def _array(values: Iterable[float]) -> np.ndarray:
    return np.array(list(values), float)
