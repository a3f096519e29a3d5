"""A program is what a call does, written once as a list of commands and played ever after.

Each array of a call has a slot: A, B, C and OUT, and behind them what the commands make. A command
reads slots and fills others, so a program knows no array; `signature.py` says which calls it
serves. What may differ between these, such as whether OUT shares memory with A, a command looks at:
it raises `Unfit`, and the program `otherwise` is played, which starts from the same arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from ..errors import shortage_in_words
from ..problem import Scalar

if TYPE_CHECKING:  # what has GPUs imports it
    from ..devices.cuda.device import CudaDevice

A, B, C, OUT = range(4)


class Call(NamedTuple):
    """The arrays and the factors of one call; transposes as `op_of` gives them."""

    a: Any
    b: Any
    c: Any = None
    alpha: Scalar = 1.0
    beta: Scalar = 0.0
    trans_a: bool | str = False
    trans_b: bool | str = False
    out: Any = None

    @property
    def arrays(self) -> tuple[Any, Any, Any, Any]:
        """As `Program.play` takes them."""
        return self.a, self.b, self.c, self.out


class Unfit(Exception):
    """What a program was written for does not hold this time. A, B and C are as they were, unless C
    is not read."""


Command = Callable[[list[Any]], None]  # a step of a program, given its slots
Make = tuple[Callable[..., Any], tuple[int, ...], Any]
NativeLaunches = tuple[bytes, Sequence[Make], Any]


class Launched(Protocol):
    """Commands that native code starts: `native` has the structures that `signature.cpp` reads,
    for each what makes its array with shape and dtype, and what has to live meanwhile; None while
    there is none."""

    native: NativeLaunches | None

    def __call__(self, slots: list[Any], /) -> None: ...


class Program:
    """Commands, played one after the other.

    `launch` is what native code plays in place of all, where the others only look. `kept` is False
    of a program that serves one call. `place` is the GPU that is current while it is played, `task`
    what it does, for errors.
    """

    __slots__ = (
        "commands", "gives_up", "kept", "launch", "otherwise", "place", "room", "task",
    )  # fmt: skip

    def __init__(
        self, commands: Sequence[Command], *, room: int = 0, otherwise: Program | None = None,
        gives_up: tuple[type[Exception], ...] = (Unfit,), launch: Launched | None = None,
        kept: bool = True, place: CudaDevice | None = None, task: object = "a product",
    ) -> None:  # fmt: skip
        self.commands, self.room, self.otherwise = tuple(commands), (None,) * room, otherwise
        self.gives_up, self.launch = gives_up, launch
        self.kept, self.place, self.task = kept, place, task

    def play(self, a: Any, b: Any, c: Any = None, out: Any = None) -> Any:
        """C of these arrays, which is OUT where that is given."""
        if self.place is not None and not self.place.is_current():
            with self.place.current():
                return self.play(a, b, c, out)
        slots = [a, b, c, out, *self.room]
        try:
            for command in self.commands:
                command(slots)
        except self.gives_up:
            if self.otherwise is None:
                raise
        except Exception:
            if self.task is None:
                raise
            with shortage_in_words(self.task):
                raise
        else:
            return slots[OUT]
        return self.otherwise.play(a, b, c, out)


Write = Callable[[Call], Program]


class Play:
    """Plays another program, written by `write` with the first arrays: calls as `like`, of arrays
    that lie alike. OUT, where it is there, is apart from A and B."""

    def __init__(self, write: Write, like: Call) -> None:
        self._write, self._like = write, like._replace(a=None, b=None, c=None, out=None)
        self._program: Program | None = None

    def __call__(self, a: Any, b: Any, c: Any, out: Any) -> Any:
        program = self._program
        if program is None:
            program = self._write(self._like._replace(a=a, b=b, c=c, out=out))
            self._program = program
        if program.launch is None or out is None or not (c is None or c is out):
            return program.play(a, b, c, out)
        program.launch([a, b, c, out, *program.room])  # what is before it would do nothing
        return out


def _refuse(_slots: list[Any]) -> None:
    raise Unfit


REFUSING = Program([_refuse])  # what a writer gives that has no program for a call


def over_ranks(multiply: Callable[..., Any], call: Call, **keywords: Any) -> tuple[Program, Call]:
    """The program of one call over ranks, which all make."""

    def play(slots: list[Any]) -> None:
        a, b, c, out = slots
        arrays = (a, b) if c is None else (a, b, c)
        slots[OUT] = multiply(*arrays, out=out, **keywords)

    return Program([play], kept=False, task=None), call  # ranks say what is short
