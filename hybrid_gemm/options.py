"""Every choice that a caller has of how products are made: name, type, default, check, help, units.

`gemm`, `Runner`, `RankRunner`, `plan` and the flags of `hybrid-gemm run` are all derived from
`Options`, so that a choice means the same wherever it is given.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ParamSpec, TypedDict, TypeVar

from .errors import OptionTypeError, UsageError, nearest, shown
from .option_checks import (
    MOST_WORKERS,
    at_least,
    bytes_of,
    check_gpus,
    check_grid,
    check_levels,
    check_memory,
    check_name,
    check_params,
    check_seconds,
    check_yes_or_no,
    one_of,
    parse_grid,
    parse_integer,
    parse_integers,
    parse_number,
)

SPLITS = ("rows", "cols", "auto")
DEVICES = ("auto", "cuda", "cpu", "emulator")
REDUCTIONS = ("ordered", "nccl", "critical")
ALGORITHMS = ("ordinary", "strassen", "3m")
TRANSPORTS = ("auto", "ipc", "nccl", "mpi")
COMPUTES = ("fp32", "fp32x3", "tf32", "fp64x", "auto")
TUNES = ("models", "first-calls")
# Headings of the command's help.
SPLIT_GROUP, DEVICE_GROUP, RANK_GROUP = "Split and sums", "Device and kernel", "MPI ranks"
PANEL_SIDE = 8192  # rows and columns, at most, of what `run --resume` finishes at once
OPTIONS_HEADING = "Options:"  # of the last part of a docstring
AUTOMATIC_KERNELS = ("auto", "own")


class OptionsAlone(TypedDict, total=False):
    """The types in which callers give options of one process, for signatures and type checkers."""

    split: str
    threads: int | None
    device: str
    gpus: int | Sequence[int] | None
    emulate_devices: int | None
    kernel: str
    params: Mapping[str, int] | Sequence[tuple[str, int]] | None
    reduce: str
    algorithm: str
    levels: int
    compute: str
    tune: str
    grid: Sequence[int] | None
    max_device_memory: int | str | None
    checked: bool


class OptionsOverRanks(OptionsAlone, total=False):
    """Those of products over ranks."""

    transport: str
    rounds: int | None
    rank_timeout: float


@dataclass(frozen=True)
class Choice:
    """What is known of one option beside its type and default.

    `check(name, value)` returns the value in the form that is kept, or raises; `parse(text)`
    turns the command line's text into what `check` takes. One `of_calls` has a meaning for
    repeated calls from Python alone, and no flag. `across_ranks` marks an option that
    has a meaning only for a product over MPI ranks; `group` is its heading in the command's help.
    `in_python` is the help where the command's speaks of its own syntax.
    """

    help: str
    check: Callable[[str, Any], Any]
    parse: Callable[[str], Any] = str
    metavar: str = "NAME"
    names: tuple[str, ...] = ()
    across_ranks: bool = False
    of_calls: bool = False
    group: str = SPLIT_GROUP
    in_python: str = ""


def _choice(default: Any, help: str, check: Callable[[str, Any], Any], **more: Any) -> Any:
    return dataclasses.field(default=default, metadata={"choice": Choice(help, check, **more)})


def _named(default: str, help: str, noun: str, names: Iterable[str], **more: Any) -> Any:
    names = tuple(names)
    return _choice(default, help, one_of(noun, names), names=names, **more)


def _count(help: str, noun: str, most: int | None = None, **more: Any) -> Any:
    return _choice(None, help, at_least(1, noun, most), parse=parse_integer, metavar="N", **more)


@dataclass(frozen=True)
class Options:
    """How a product is made: everything but the matrices, alpha, beta and transposes.

    Values are checked when an `Options` is made: `OptionTypeError` (a TypeError) for a wrong
    type, `UsageError` (a ValueError) for a wrong value or combination.

    >>> Options(threads=4, split="cols").threads
    4
    """

    split: str = _named(
        "auto", "How A is cut: by rows, by cols (along K), or as the planner finds best (auto).",
        "split", SPLITS,
    )  # fmt: skip
    threads: int | None = _count(
        "Worker threads. Without it there is one for each device, and as many GPUs work as are "
        "worth starting.", "threads", MOST_WORKERS,
    )  # fmt: skip
    device: str = _named(
        "auto", "Where to multiply: cuda, cpu or emulator. auto takes cuda if a GPU is here, and "
        "cpu otherwise.", "device", DEVICES, group=DEVICE_GROUP,
    )  # fmt: skip
    gpus: tuple[int, ...] | None = _choice(
        None, "GPUs by number, such as 0,1. Without it, all may be taken.", check_gpus,
        parse=parse_integers, metavar="0,1", group=DEVICE_GROUP,
        in_python="GPUs by number, such as (0, 1), or one number. Without it, all may be taken.",
    )  # fmt: skip
    emulate_devices: int | None = _count(
        "Use one GPU (or the emulator) as N devices, each with memory of its own. On the CPU, "
        "N worker threads.",
        "devices",
        MOST_WORKERS,
        group=DEVICE_GROUP,
    )
    kernel: str = _choice(
        "auto",
        "A kernel that `hybrid-gemm kernels` lists. auto takes the fastest known for the shape, "
        "cuBLAS included; own takes the fastest of this project's. On the CPU both take "
        "NumPy's BLAS.",
        check_name, group=DEVICE_GROUP,
    )  # fmt: skip
    params: tuple[tuple[str, int], ...] = _choice(
        (), "A parameter of the kernel, such as BM=128; give it as often as needed.", check_params,
        metavar="NAME=NUMBER", group=DEVICE_GROUP,
        in_python="Parameters of the kernel that is named, such as {'BM': 128}.",
    )  # fmt: skip
    reduce: str = _named(
        "ordered",
        "How partial sums of C are added: in worker order (ordered), by NCCL between GPUs (nccl), "
        "or one worker at a time into C in host memory (critical).",
        "reduction", REDUCTIONS,
    )  # fmt: skip
    algorithm: str = _named(
        "ordinary", "The product as BLAS makes it (ordinary); by 7 products of quarters instead of "
        "8 a level, less accurately (strassen); or, of complex matrices, by three real products "
        "instead of four (3m).",
        "algorithm", ALGORITHMS, group=DEVICE_GROUP,
    )  # fmt: skip
    levels: int = _choice(1, "Levels of Strassen's algorithm, at most 6.", check_levels,
                          parse=parse_integer, metavar="N", group=DEVICE_GROUP)  # fmt: skip
    compute: str = _named(
        "fp32", "How float32 is multiplied: in float32 throughout (fp32); as two parts each, by "
        "three products on tensor cores (fp32x3); rounded to 11 bits (tf32); or by fp32x3 where "
        "tensor cores are fast enough for it, else in float32 (auto). fp64x multiplies float64 "
        "by residues of int8 on tensor cores, where that is faster.",
        "compute", COMPUTES, group=DEVICE_GROUP,
    )  # fmt: skip
    tune: str = _named(
        "models", "What chooses the kernel for auto and own: models of times (models), or, for "
        "arrays on one GPU, trials too (first-calls): the first six calls of a product take, in "
        "turn, the three kernels that the models expect to be fastest, and the fastest is kept. "
        "Bits may differ between those calls.", "tune", TUNES, of_calls=True,
        group=DEVICE_GROUP,
    )  # fmt: skip
    grid: tuple[int, int, int] | None = _choice(
        None, "Into how many parts workers (or ranks) cut m, n and k.", check_grid,
        parse=parse_grid, metavar="PM,PN,PK",
        in_python="(pm, pn, pk): into how many parts workers (or ranks) cut m, n and k.",
    )  # fmt: skip
    max_device_memory: int | None = _choice(
        None, "How much of each GPU's memory a product may take, such as 8GiB. What does not fit "
        "is multiplied in turns.", check_memory, parse=bytes_of, metavar="SIZE", group=DEVICE_GROUP,
        in_python="Bytes of each GPU's memory that a product may take, or text such as '8GiB'. "
        "What does not fit is multiplied in turns.",
    )  # fmt: skip
    checked: bool = _choice(
        False, "Check each product, sum and copy by checksums while C is made, and make again "
        "what is wrong.", check_yes_or_no, group=DEVICE_GROUP,
    )  # fmt: skip
    transport: str = _named(
        "auto", "How partial sums of C travel between ranks: ipc, nccl or mpi; auto takes the "
        "first that works.", "transport", TRANSPORTS, across_ranks=True, group=RANK_GROUP,
    )  # fmt: skip
    rounds: int | None = _count(
        "In how many rounds ranks multiply and sum. Without it, the plan decides.",
        "rounds",
        MOST_WORKERS,
        across_ranks=True,
        group=RANK_GROUP,
    )
    rank_timeout: float = _choice(
        60.0, "Seconds without a sign of a rank, or without progress, after which the job is "
        "ended; 0 is never.", check_seconds, parse=parse_number, metavar="SECONDS",
        across_ranks=True, group=RANK_GROUP,
    )  # fmt: skip

    def __post_init__(self) -> None:
        for name, choice in CHOICES.items():
            object.__setattr__(self, name, choice.check(name, getattr(self, name)))
        if self.params and self.kernel in AUTOMATIC_KERNELS:
            raise UsageError(
                "params (--param) are those of one kernel: name it too, by kernel (--kernel)"
            )
        if self.levels != DEFAULTS["levels"] and self.algorithm != "strassen":
            raise UsageError(
                f"{self.levels} levels need the algorithm strassen; the algorithm is "
                f"{self.algorithm}"
            )
        if self.grid is not None and self.split != "auto":
            raise UsageError(f"a grid was given beside the split {self.split}; give one of them")
        if self.reduce == "critical" and (self.split != "cols" or self.grid):
            raise UsageError(
                f"the critical reduction needs the split cols; the split is {self.split}"
            )

        if self.tune == "first-calls" and (self.kernel not in AUTOMATIC_KERNELS or self.checked):
            raise UsageError(
                "first calls choose the kernel of products that are not checked; "
                + ("checked was given too" if self.checked else f"kernel {self.kernel} was named")
                + ": leave out one of the two"
            )
        if self.checked:
            self._check_checked()

    def _check_checked(self) -> None:
        if self.algorithm != "ordinary":
            name = {"strassen": "Strassen's algorithm", "3m": "3m"}[self.algorithm]
            raise UsageError(
                f"checked products are ordinary ones: what {name} adds to them is not checked; "
                "leave out one of the two"
            )
        if self.reduce != "ordered":
            raise UsageError(
                f"checked sums are made in worker order, and the reduction is {self.reduce}; "
                "the ordered one works"
            )

    @classmethod
    def of(cls, given: Mapping[str, Any], caller: str = "Options") -> Options:
        """The options that these keywords of `caller` make; a misspelt one is a TypeError with
        the nearest name."""
        refuse_unknown(caller, given, CHOICES)
        return cls(**given)

    def alone(self) -> Options:
        """These options for one process. Raises `OptionTypeError` where one is for MPI ranks only,
        `UsageError` for a grid of too many workers."""
        for name, choice in CHOICES.items():
            if choice.across_ranks and getattr(self, name) != DEFAULTS[name]:
                raise OptionTypeError(
                    f"{name} is for products over ranks: give gemm or matmul comm too"
                )
        if self.grid and math.prod(self.grid) > MOST_WORKERS:
            grid, parts = " x ".join(map(shown, self.grid)), shown(math.prod(self.grid))
            raise UsageError(
                f"the grid {grid} has {parts} parts, one a worker; it takes at most {MOST_WORKERS}"
            )
        return self

    def across_ranks(self) -> Options:
        """These options for MPI ranks; `UsageError` where one is for one process only."""
        if self.reduce != "ordered":
            raise UsageError(
                f"the {self.reduce} reduction is for one process; ranks sum in order, and "
                "transport says how their partials travel"
            )
        return self

    @property
    def names_no_workers(self) -> bool:
        """Whether the planner is free to take as many of the devices as are worth starting."""
        named = self.threads, self.gpus, self.emulate_devices, self.grid
        return not any(named) and (self.split, self.reduce) == ("auto", "ordered")


CHOICES: dict[str, Choice] = {
    field.name: field.metadata["choice"] for field in dataclasses.fields(Options)
}
FLAGS = [name for name, choice in CHOICES.items() if not choice.of_calls]  # of the command
DEFAULTS: dict[str, Any] = {field.name: field.default for field in dataclasses.fields(Options)}

# In which callers give them, or are kept.
TYPES: dict[str, str] = {field.name: str(field.type) for field in dataclasses.fields(Options)} | {
    name: found.__forward_arg__ for name, found in OptionsOverRanks.__annotations__.items()
}

P = ParamSpec("P")
R = TypeVar("R")


def refuse_unknown(caller: str, given: Iterable[str], known: Iterable[str]) -> None:
    """TypeError for the first keyword that is not known, with the nearest that is; for an option of
    the object whose method `caller` is, with where it goes."""
    known, owner = list(known), caller.rpartition(".")[0]
    for name in given:
        if name not in known:
            hint = nearest(name, known)
            if owner and name in CHOICES:
                hint = f"; it is an option of {owner}({name}=...)"
            raise TypeError(f"{caller}() got an unexpected keyword argument {name!r}{hint}")


def named_keywords(
    function: Callable[P, R],
    refused: Callable[[tuple[Any, ...], Mapping[str, Any], TypeError], object] = lambda *call: None,
) -> Callable[P, R]:
    """A decorator: a misspelt keyword is a TypeError with the nearest name, and one for a matrix
    that is given by its place says so. `refused` is told of each call whose arguments do not fit,
    by place and by keyword, before the error is raised."""
    parameters = inspect.signature(function).parameters.values()
    known = [x.name for x in parameters if x.kind in (x.KEYWORD_ONLY, x.POSITIONAL_OR_KEYWORD)]
    placed = [x.name for x in parameters if x.kind is x.POSITIONAL_ONLY and x.name != "self"]

    @functools.wraps(function)
    def call(*args: P.args, **keywords: P.kwargs) -> R:
        try:
            return function(*args, **keywords)
        except TypeError as error:
            if error.__traceback__ and error.__traceback__.tb_next:
                raise  # by the function itself, whose arguments fit
            clear = explained(keywords) or error
            refused(args, keywords, clear)
            raise clear from None

    def explained(keywords: Mapping[str, Any]) -> TypeError | None:
        name = function.__qualname__
        if wrong := [x for x in placed if x in keywords]:
            return TypeError(
                f"{name}() takes {wrong[0]} by its place: {function.__name__}({', '.join(placed)})"
            )
        try:
            refuse_unknown(name, keywords, known)
        except TypeError as error:
            return error
        return None

    return call


@functools.cache
def _described(field: dataclasses.Field[Any]) -> str:
    """Name, type, default and meaning of an option, as a docstring has them."""
    choice: Choice = field.metadata["choice"]
    text = textwrap.fill(choice.in_python or choice.help, 96, initial_indent=" " * 8,
                         subsequent_indent=" " * 8, break_on_hyphens=False)  # fmt: skip
    return f"    {field.name}: {TYPES[field.name]} = {field.default!r}\n{text}"


def with_options(*, alone: bool = False) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """A decorator for `f(..., **options)`: its signature names each option, for `help` and for
    editors, and its docstring says what each means; of a function that names them itself, the
    docstring alone. With `alone` it is for one process, and takes none of those for ranks."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        fields = [
            field for field in dataclasses.fields(Options)
            if not (alone and CHOICES[field.name].across_ranks)
        ]  # fmt: skip
        signature = inspect.signature(function)
        own = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
        if len(own) < len(signature.parameters):
            options = [
                inspect.Parameter(
                    field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default,
                    annotation=TYPES[field.name],
                )
                for field in fields
            ]  # fmt: skip
            function.__signature__ = signature.replace(parameters=[*own, *options])  # type: ignore[attr-defined]
        if function.__doc__:  # which python -OO leaves out
            parts = (
                inspect.cleandoc(function.__doc__),
                "",
                OPTIONS_HEADING,
                *map(_described, fields),
            )
            function.__doc__ = "\n".join(parts)
        return function

    return decorate
