"""What `hybrid-gemm run` is asked for: each option once, with its help and type, of which the flags
are made."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from ..errors import UsageError
from ..options import PANEL_SIDE
from .option_types import Factor, File, Named, known
from .shared import SEED


def _flag(help: str, default: Any = None, *names: str, **how: Any) -> Any:
    """An option's help, default and flags, if they are not its name, and what click takes of it."""
    return field(default=default, metadata={"names": names, "help": help, **how})


@dataclass(frozen=True)
class InputRequest:
    """The input as the command line asks for it. `seed`, sizes, `dtype` and `fill` are of
    generated input. Raises `UsageError` where an operand is to be transposed in two ways."""

    files: tuple[str, ...] = ()
    m: int | None = _flag("Rows of C, for generated input.", None, "-m", metavar="M")
    n: int | None = _flag("Columns of C, for generated input.", None, "-n")
    k: int | None = _flag("Columns of op(A), for generated input.", None, "-k", metavar="K")
    size: int | None = _flag(
        "All of m, n and k at once. A side that is not given is 2048; with --check, m is 200, n "
        "184 and k 168."
    )
    c_file: str | None = _flag("C.npy, to be scaled by beta.", None, "-c", type=File())
    dtype: str | None = _flag(
        "Dtype of generated input: float32 (the default), float64, complex64, complex128, "
        "float16, bfloat16, int32 or int64.",
        type=Named(known("arrays.generator", "GENERATED_DTYPES")),
    )
    fill: str = _flag(
        "What generated input holds: normal or uniform random numbers, or small integers.",
        "normal", type=Named(known("arrays.generator", "FILLS")),
    )  # fmt: skip
    seed: int = field(default=0, metadata=SEED)
    alpha: complex = _flag(
        "The factor of op(A) @ op(B); of complex matrices also such as 1-2j.", 1.0, type=Factor()
    )
    beta: complex = _flag("The factor of C; with 0, C is not read.", 0.0, type=Factor())
    trans_a: bool | str = _flag("Multiply by A's transpose.", False)
    trans_b: bool | str = _flag("Multiply by B's transpose.", False)
    conj_trans_a: bool = _flag("Multiply by A's conjugate transpose.", False)
    conj_trans_b: bool = _flag("Multiply by B's conjugate transpose.", False)

    def __post_init__(self) -> None:
        for x, conjugate in (("a", self.conj_trans_a), ("b", self.conj_trans_b)):
            if conjugate and getattr(self, f"trans_{x}"):
                raise UsageError(f"--trans-{x} and --conj-trans-{x} were given; give one of them")
            if conjugate:
                object.__setattr__(self, f"trans_{x}", "c")

    @property
    def names(self) -> list[str]:
        """The files that are read."""
        return [*self.files, *([] if self.c_file is None else [self.c_file])]


@dataclass(frozen=True)
class Wanted:
    """What is wanted of a run: its outputs, its checks, its repetitions."""

    output: str | None = _flag(
        "Write C as a .npy file, whole or not at all.", None, "-o", "--output", type=File()
    )
    resident: bool = _flag("Put A, B and C on the device before the clock starts.", False)
    repeat: int = _flag(
        "Multiply N times; the median run is shown, beside the fastest and the slowest.", 1
    )
    verify: str = _flag(
        "How C is compared with a float64 reference: auto (large products by random sums), full "
        "(every element) or off.",
        "auto", type=Named(known("verify", "MODES")),
    )  # fmt: skip
    check: bool = _flag(
        "Run the kernels on the emulator and watch every access, barrier and order of threads.",
        False,
    )
    show: bool = _flag("Print A, B and C, if they are small.", False, "--print")
    dry_run: bool = _flag("Print the plan and stop.", False)
    trace: str | None = _flag("Write what every worker did when, for Perfetto.", type=File())
    sha256: bool = _flag(
        "Put the SHA-256 of the files of A, B and C into the result, as sha256sum prints them.",
        False,
    )
    resume: bool = _flag(
        "Keep finished panels of C however the run ends, and go on with those of an earlier run.",
        False,
    )
    panel: int | None = _flag(f"With --resume: rows and columns of a panel; default {PANEL_SIDE}.")

    def __post_init__(self) -> None:
        from ..arrays import npy_files

        if self.repeat < 1:
            raise UsageError(f"--repeat {self.repeat}: it takes at least 1")
        if self.trace and self.dry_run:
            raise UsageError(
                "--trace shows what a run did, and --dry-run runs nothing; leave out one"
            )
        if self.show and self.dry_run:
            raise UsageError("--print shows A, B and C, and --dry-run makes none; leave out one")
        if self.panel is not None and not self.resume:
            raise UsageError("--panel is for --resume; give both, or neither")
        if self.output:
            npy_files.check_suffix(self.output)
        if self.resume:
            self._check_resume()

    def facts(self) -> dict[str, Any]:
        """What ranks have to agree on: all but what rank 0 alone writes."""
        return {name: x for name, x in asdict(self).items() if name != "trace"}

    def _check_resume(self) -> None:
        if not self.output:
            raise UsageError("--resume keeps parts of a file; give -o C.npy")
        if self.panel is not None and self.panel < 1:
            raise UsageError(f"--panel {self.panel}: it takes at least 1 row and column")
        others = {
            "--repeat": self.repeat > 1, "--trace": self.trace, "--resident": self.resident,
            "--dry-run": self.dry_run,
        }  # fmt: skip
        for name in (name for name, given in others.items() if given):
            raise UsageError(f"--resume multiplies panel by panel, without {name}; leave one out")
