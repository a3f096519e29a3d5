"""A random product as plain data: what is asked, and how its matrices lie.

`draw(device, seed, number)` gives the same case each time. Eight neighbours share their options,
so that `gemm` takes the runner that it kept for the one before.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from .kernels import dtype_for, named, sides_for, variant_of

GROUP = 8  # neighbours with the same options
FLOATS = ("float32", "float32", "float64", "float16", "bfloat16", "complex64", "complex128")
INTEGERS = ("int32", "int64", "int8", "uint8", "int16", "uint16", "uint32", "uint64")
MOST_LONG, MOST_WORK = 2000, 1 << 21  # a side, and mnk, of products that are long or thin
EDGES = (31, 32, 33, 63, 64, 65, 127, 128, 129)
LAYOUTS = (
    "c", "f", "padded", "padded f", "odd ld", "strided", "reversed", "upside down", "mirrored",
    "field", "shifted",
)  # fmt: skip
TRANSPOSES = (False, False, False, True, "c")
BROADCASTS = ("broadcast rows", "broadcast cols", "broadcast")
# What a caller may do wrong; `judge.refusals` says which error each must raise.
MISTAKES = (
    "k differs", "vector", "bool", "no c", "half alpha", "large alpha", "out shape",
    "out dtype", "out read-only", "out is a",
)  # fmt: skip
KERNELS = {
    "cpu": ("auto",) * 16 + ("blas",) * 3 + ("naive",),
    "emulator": ("auto",) * 8 + ("own", "blas"),
    "cuda": ("auto",) * 9 + ("own",),
}
NAMED = {"cpu": 0.0, "emulator": 0.5, "cuda": 0.4}  # how often any kernel of the device is named


@dataclass(frozen=True)
class Case:
    """One product. `dtypes` and `layouts` are of A, B, C and out; `dtypes[2]` is "" where no C is
    given, and `dtypes[3]` where the product's own dtype is taken. `out` is none, new, or c;
    `alias` says what A and B, or A and out, have in common."""

    device: str
    seed: int
    number: int
    m: int
    n: int
    k: int
    dtypes: tuple[str, str, str, str]
    layouts: tuple[str, str, str, str] = ("c", "c", "c", "c")
    trans_a: bool | str = False
    trans_b: bool | str = False
    alpha: complex = 1
    beta: complex = 0
    out: str = "none"
    alias: str = "none"
    values: str = "small"
    poisoned: bool = False
    resident: bool = False
    mistake: str = ""
    options: tuple[tuple[str, Any], ...] = ()

    def option(self, name: str, default: Any = None) -> Any:
        return dict(self.options).get(name, default)

    @property
    def label(self) -> str:
        """What is not plain about it, on one line."""
        said = [f"{self.m} x {self.n} x {self.k}", "/".join(x or "-" for x in self.dtypes)]
        said += [f"alpha={self.alpha} beta={self.beta} out={self.out}"]
        ops = "".join({False: "n", True: "t"}.get(x, x) for x in (self.trans_a, self.trans_b))
        said += [f"trans={ops}", f"lie {'/'.join(self.layouts)}"]
        for name in ("alias", "values", "poisoned", "resident", "mistake"):
            if getattr(self, name) not in ("none", "small", "", False):
                said.append(f"{name}={getattr(self, name)}")
        return ", ".join([*said, *(f"{name}={value}" for name, value in self.options)])


class Draw:
    """Random choices that a seed repeats."""

    def __init__(self, *seeds: int) -> None:
        self.rng = np.random.default_rng(seeds)

    def of(self, things: Any) -> Any:
        return things[int(self.rng.integers(len(things)))]

    def chance(self, share: float) -> bool:
        return bool(self.rng.random() < share)

    def whole(self, low: int, high: int) -> int:
        return int(self.rng.integers(low, high + 1))


def options(device: str, draw: Draw) -> tuple[tuple[str, Any], ...]:
    """Options of a group; now and then some that exclude each other."""
    made: dict[str, Any] = {}
    if draw.chance(0.3):
        made["grid"] = tuple(draw.of((1, 1, 2, 3)) for _ in range(3))
        if draw.chance(0.5):
            made["threads"] = math.prod(made["grid"]) + draw.chance(0.05)
        if draw.chance(0.05):
            made["split"] = draw.of(("rows", "cols"))
    else:
        made["threads"] = draw.of((None, 1, 2, 3, 4, 5, 7))
        made["split"] = draw.of(("rows", "cols", "auto"))
        if made["split"] == "cols" or draw.chance(0.02):
            made["reduce"] = draw.of(("ordered", "ordered", "critical"))
    if draw.chance(0.02):
        made["reduce"] = "nccl"
    made["emulate_devices"] = draw.of((None, None, 1, 2, 3))
    made["kernel"] = draw.of(KERNELS[device])
    if draw.chance(0.02 if device == "cpu" else 0.2):
        made["compute"] = draw.of(("auto", "fp32x3", "tf32", "fp64x"))
    if draw.chance(0.12):
        made["algorithm"], made["levels"] = "strassen", draw.of((0, 1, 1, 2, 3))
    if draw.chance(0.2):
        made["max_device_memory"] = 1 << draw.whole(9, 22)
    if device != "cpu":
        if draw.chance(NAMED[device]):
            made |= named(device, draw)
        if draw.chance(0.1):
            made["checked"] = True
    return tuple((name, value) for name, value in made.items() if value is not None)


def _side(draw: Draw) -> int:
    kind = draw.rng.random()
    if kind < 0.14:
        return int(kind < 0.08)  # 0 or 1
    if kind < 0.8:
        return draw.whole(2, 40)
    return draw.of(EDGES) if kind < 0.95 else draw.whole(41, 200)


def _sides(draw: Draw) -> list[int]:
    sides = [_side(draw) for _ in range(3)]
    if draw.chance(0.04):  # one is long, for turns and chunks
        sides = [min(side, 24) for side in sides]
        sides[draw.whole(0, 2)] = draw.whole(500, 2100)
    return sides


def _long_and_thin(draw: Draw) -> list[int]:
    """Sides of about as many operations as others, of any proportions: lines, few columns, a short
    or a long k, for which GPUs have kernels of their own."""
    while True:
        sides = [int(math.exp(draw.rng.uniform(0, math.log(MOST_LONG)))) for _ in range(3)]
        if math.prod(sides) <= MOST_WORK:
            return sides


def _dtypes(draw: Draw, first: str = "") -> list[str]:
    pool = FLOATS if draw.chance(0.7) else INTEGERS
    first = first or draw.of(pool)
    made = [first] * 3
    if draw.chance(0.15):
        made[draw.whole(0, 2)] = draw.of((*FLOATS, *INTEGERS))
    return [*made, ""]


def _layout(draw: Draw, dtype: str, *, written: bool = False) -> str:
    made = draw.of(LAYOUTS if written or draw.chance(0.9) else BROADCASTS)
    if draw.chance(0.1) and dtype != "bfloat16":  # which NumPy does not swap
        made += "+swapped"
    if not written and draw.chance(0.1):
        made += "+read-only"
    return made + "+matrix" * draw.chance(0.02)


def draw(device: str, seed: int, number: int) -> Case:
    """Case `number` of a seed."""
    one = Draw(seed, number, 0)
    given = dict(options(device, Draw(seed, number // GROUP, 1)))
    sides, group = _sides(one), Draw(seed, number // GROUP, 4)
    if device != "cpu" and one.chance(0.4):
        sides = _long_and_thin(one)
    variant = variant_of(given)
    first = dtype_for(variant, group) if variant and one.chance(0.9) else ""
    if variant and one.chance(0.9):
        sides = sides_for(variant, sides, one)
    m, n, k = sides
    dtypes = _dtypes(one, first)
    alias = one.of(("none",) * 12 + ("b is a", "overlap", "out beside a"))
    if alias != "none":
        dtypes[1] = dtypes[0]
    fractions = (0.5,) if dtypes[0] in FLOATS else ()
    if any("complex" in dtype for dtype in dtypes[:2]):
        fractions += (1j, 2 - 1j)
    beta = one.of((0, 0, 1, -2, *fractions))
    if not beta and one.chance(0.7):
        dtypes[2] = ""
    out = one.of(("none", "new", "new", "c" if dtypes[2] else "new"))
    if out == "new" and one.chance(0.2):
        dtypes[3] = one.of((*FLOATS, "int64", "uint8"))
    mistake = one.of(MISTAKES) if one.chance(0.03) else ""
    return Case(
        device, seed, number, m, n, k, tuple(dtypes),
        tuple(_layout(one, dtype, written=i == 3 or (i == 2 and out == "c"))
              for i, dtype in enumerate(dtypes)),
        one.of(TRANSPOSES), one.of(TRANSPOSES), one.of((1, 1, 2, -3, 0, *fractions)),
        beta, out, alias, one.of(("small", "small", "large")), one.chance(0.5),
        one.chance(0.1) and "max_device_memory" not in given, mistake, tuple(given.items()),
    )  # fmt: skip
