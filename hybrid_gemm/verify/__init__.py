"""Is C right? Random sums over blocks of all of C, and rows and columns of it element by element.

docs/notes/verification.md derives the bounds and says what is found and how surely.
"""

from __future__ import annotations

import dataclasses
import os
import time

import numpy as np

from ..errors import UsageError
from ..host.resources import cores
from ..problem import Problem
from .complex_parts import real_part
from .floats import Floats
from .integers import Integers
from .sampling import ALONE, BLOCKS, CLASSES, Group, Part, draw
from .team import Progress, no_progress, team

FULL_FLOPS = 2 * 400**3  # `auto` computes the whole reference up to here: 20 ms on two cores
FULL_K = 400**3 // 64**2  # for longer sums, of up to 64 x 64 floats: random sums take longer there
SAMPLED = 16  # rows, and columns, that larger products are checked in element by element
MODES = ("auto", "full", "off")
PIECES = 20 << 20, 4 << 20  # bytes that pieces of matrices in float64 take, and each thread's
GROWTH = 8.0  # of rounding errors by a level of Strassen's algorithm
THREE_GROWTH = 4.0  # where sums of parts are rounded, then multiplied, and C's parts subtracted


def growth_of(algorithm: str, levels: int) -> float:
    """How much larger rounding errors of real products are by an `Options.algorithm`."""
    return GROWTH**levels if algorithm == "strassen" else 1.0


@dataclasses.dataclass(frozen=True)
class Verdict:
    """`worst` is the largest error as a fraction of its bound (integers: 0 or inf), and `time_ms`
    what verifying took.

    `power` says what would have been found, and how surely; `where` the element that is wrong.
    `seed` repeats the check: it chose rows, columns and random vectors.
    """

    passed: bool
    how: str
    worst: float
    power: str = ""
    where: str = ""
    seed: int | None = None
    time_ms: float = dataclasses.field(default=0.0, compare=False)

    def as_data(self) -> dict:
        """For JSON."""
        return {
            "passed": self.passed, "how": self.how, "worst": self.worst, "power": self.power,
            "where": self.where, "seed": self.seed, "time_ms": self.time_ms,
        }  # fmt: skip

    def __str__(self) -> str:
        word = "passed" if self.passed else "FAILED"
        where = f"; {self.where}" if self.where else ""
        return f"{word}: {self.how}, largest error {self.worst:.2g} of its bound{where}"


# Many parameters: the product that was asked for, its matrices, and how they are judged.
def verify(
    problem: Problem, a, b, c_in, result, *, mode: str = "auto", seed: int | None = None,
    growth: float = 1.0, by_three: bool = False, progress: Progress = no_progress,
) -> Verdict | None:  # fmt: skip
    """The verdict on `result` for op(A) `a` (m x k), op(B) `b` (k x n) and C `c_in`.

    Works where the arrays are (NumPy or CuPy, all of one kind). `full` computes the whole
    reference; `auto` does so for small problems and otherwise checks random sums over blocks of
    all of C, and 16 rows and 16 columns in full; `off` gives None. `seed` is that of an earlier
    verdict to be repeated; a fresh one is drawn without it. `growth` is how much larger the
    rounding errors of the algorithm are than those of sums of products (Strassen's); `by_three`
    says that a complex product was made of three real ones; `progress` is told the shares of the
    work that are done.
    """
    check_mode(mode)
    if mode == "off":
        return None
    part = Part(problem, a, b, c_in, result)
    return judge(
        part, ALONE, mode=mode, seed=fresh(seed), growth=growth, by_three=by_three,
        progress=progress,
    )  # fmt: skip


def check_mode(mode: str) -> None:
    if mode not in MODES:
        raise UsageError(f"no verification is called {mode!r}; there are {', '.join(MODES)}")


def fresh(seed: int | None) -> int:
    return int.from_bytes(os.urandom(4)) if seed is None else seed


def whole(problem: Problem, mode: str) -> bool:
    """Whether every element is held against its reference."""
    longer = 1.0 if problem.is_integer else max(1.0, problem.k / FULL_K)
    return mode == "full" or problem.flops <= FULL_FLOPS * longer or problem.alpha == 0


def host_bytes(problem: Problem, mode: str, m: int, n: int) -> int:
    """At most so much host memory the check of an m x n block of C takes beside A, B and C."""
    if mode == "off" or not (m and n):
        return 0
    m *= 2 if problem.is_complex else 1
    pieces = PIECES[0] + PIECES[1] * cores()
    if problem.is_integer or whole(problem, mode):
        return pieces + (256 if whole(problem, mode) else 640) * (m + n)  # or weights and sums
    # Of each row weights, and sums in every block of columns; of each column likewise.
    down, across = (min(BLOCKS, -(-size // CLASSES)) for size in (m, n))
    return pieces + m * (384 + 64 * across) + n * (384 + 64 * down + 8 * across)


# Many parameters: what is judged, how, and by whom.
def judge(
    part: Part, group: Group, *, mode: str, seed: int, growth: float = 1.0, by_three: bool = False,
    threads: int | None = None, progress: Progress = no_progress,
) -> Verdict:  # fmt: skip
    """The verdict on one part of C; `group` are those who have other parts of its k. `threads` do
    the work on the host, by default one for each core."""
    started, problem = time.perf_counter(), part.problem
    if not problem.m or not problem.n:
        return Verdict(part.result.shape == (problem.m, problem.n), "empty", 0.0)
    full = whole(problem, mode)
    if not problem.k and problem.alpha != 0:  # as in BLAS, an alpha of NaN multiplies nothing
        part = dataclasses.replace(part, problem=dataclasses.replace(problem, alpha=0))
    if problem.is_complex:
        part = real_part(part, by_three)
        growth = 1.0 if by_three else growth
    if part.n > part.m:  # B is read twice
        part = part.turned()
    samples = draw(part, np.random.default_rng([seed, group.color]), 0 if full else SAMPLED)
    kind = Integers if problem.is_integer else Floats
    own, others = THREE_GROWTH if by_three else 1.0, growth if growth > 1 else 0.0
    with team((threads or cores()) if part.xp is np else 0, progress) as workers:
        found = kind(part, group, samples, workers, own, others).check(full)
    how = found.how if full else f"{found.how}, seed {seed}"
    power = found.power
    if others and kind is Floats:
        power += (
            f"; the rounding noise of Strassen's algorithm is {growth:g} times that of products "
            "of the largest elements of A and B"
        )
    return Verdict(
        bool(found.worst <= 1), how, float(found.worst), power, found.where,
        None if full else seed, (time.perf_counter() - started) * 1e3,
    )  # fmt: skip
