"""What the benchmarks have in common: each is a `Study`, and one function runs and shows any.

study = AccuracyStudy([(256, 256, 1024)], device="cpu")
data = run(study)
show(study, data)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import numpy as np

from .. import devices
from ..arrays import generator
from ..arrays.strides import Array
from ..catalog import ITEM_SIZE, Variant
from ..devices import decisions
from ..devices.base import Device, Stream
from ..devices.kernel_device import KernelDevice
from ..errors import HybridGemmError, OutOfMemoryError, in_words
from ..host.resources import cores, memory_available
from ..kernel_choice import compute_modes, on_gpu
from ..problem import Problem, is_float
from ..reporting import console, markdown
from ..verify import verify

Shape = tuple[int, int, int]  # m, n, k
Row = dict[str, Any]  # one line of a table; what was not measured is None
Advance = Callable[[int], None]  # so many steps of a study are done
Progress = Callable[[int, str], Advance]  # begins a bar of so many steps with a label
Note = Callable[[str], None]  # says something to the user that is no result
PASSED, FAILED = "passed", "FAILED"  # what a row's "verdict" is once C was checked


@dataclass(frozen=True)
class Table:
    """A table for people. A heading with a leading `<` is that of text, others of numbers."""

    headings: Sequence[str]
    rows: Sequence[Sequence[object]]
    title: str = ""


class Study(Protocol):
    """A benchmark whose choices are made: what it measures, and how that is shown.

    Making one checks the choices (`UsageError`) and opens its device (`UnavailableError`); its
    arrays are made while `rows` runs. Each row has the keys `columns`, in that order, and may
    have more; its "verdict" is "passed", "FAILED", or None where nothing was multiplied, and
    then its "note" says why.
    """

    columns: ClassVar[tuple[str, ...]]

    @property
    def device_note(self) -> str:
        """Which device is used and why; empty where the user named it."""

    @property
    def steps(self) -> int:
        """How often `rows` calls `advance(1)`."""

    def rows(self, advance: Advance) -> Iterator[Row]:
        """Measures, and yields each row when it is done."""

    def about(self) -> dict[str, Any]:
        """What a result file says beside the rows, the device for one. Asked after `rows`."""

    @staticmethod
    def table(data: Mapping[str, Any]) -> Table:
        """A result (of this study, or read from a file) as a table for people."""


@dataclass
class OnDevice:
    """What studies on one device have in common."""

    opened: Device = field(init=False)
    stream: Stream = field(init=False)
    device_note: str = field(init=False)

    def open(self, device: str) -> None:
        """Opens the device of this kind. Raises `UsageError` and `UnavailableError`."""
        self.opened, self.device_note = open_device(device)
        self.stream = self.opened.stream()

    def about(self) -> dict[str, Any]:
        """The device."""
        return {"device": {"kind": self.opened.kind, "name": self.opened.describe()}}


def run(
    study: Study, *, progress: Progress | None = None, note: Note = lambda text: None
) -> dict[str, Any]:
    """A study's result as plain data: what `about` says, and "rows"."""
    if study.device_note:
        note(study.device_note)
    advance = progress(study.steps, "measuring") if progress else lambda _: None
    rows = list(study.rows(advance))
    return {**study.about(), "rows": rows}


def show(study: Study | type[Study], data: Mapping[str, Any]) -> None:
    """Prints a study's result as a table on stdout."""
    table = study.table(data)
    console.table(table.headings, table.rows, title=table.title)


def as_csv(study: Study | type[Study], data: Mapping[str, Any]) -> str:
    """A study's rows as CSV, with its columns as the header; parameters as "BM=128 BN=64"."""
    rows = [x | ({"params": parameters(x)} if "params" in x else {}) for x in data["rows"]]
    return markdown.csv_of(study.columns, rows)


def as_markdown(study: Study | type[Study], data: Mapping[str, Any]) -> str:
    """A study's table as Markdown, with its title as a line above."""
    table = study.table(data)
    return f"{table.title}\n\n{markdown.table(table.headings, table.rows)}\n"


# How rows may be ordered; what was not measured is last.
SORTS: dict[str, Callable[[Row], Any]] = {
    "time": lambda row: row["time_ms"] or math.inf,
    "gflops": lambda row: -(row["gflops"] or 0),
    "kernel": lambda row: row["kernel"],
    "size": lambda row: row["m"] * row["n"] * row["k"],
}
SAMPLE_MS = 2.0  # a sample on a GPU lasts at least so long
OUTLIER = 1.5  # times the median of a row's samples


def outliers(data: Mapping[str, Any]) -> str:
    """A sentence about samples far above their row's median, which something else on the machine
    made; empty where there are none."""
    far = total = 0
    worst, where = 0.0, ""
    for row in data["rows"]:
        samples = row.get("samples_ms") or []
        total += len(samples)
        for sample in samples:
            ratio = sample / row["time_ms"]
            far += ratio > OUTLIER
            if ratio > max(worst, OUTLIER):
                worst, where = ratio, f"{row.get('kernel') or row.get('way')} at {row['m']}"
    if not far:
        return ""
    return (
        f"{far} of {total} samples took more than {OUTLIER} times their row's median (up to "
        f"{worst:.3g} times, {where}): something else was running; medians are shown"
    )


def failed(data: Mapping[str, Any]) -> list[Row]:
    """The rows of a result whose product is wrong."""
    return [row for row in data["rows"] if row["verdict"] == FAILED]


def need_times(data: Mapping[str, Any]) -> None:
    """Raises `HybridGemmError` for a result that has rows, and a time in none of them."""
    if data["rows"] and all(row["verdict"] is None for row in data["rows"]):
        raise HybridGemmError(f"nothing could be timed: {data['rows'][0]['note']}")


# --- cells of tables ------------------------------------------------------------------------


def cell(value: float | str | None, form: str) -> str:
    """A number in a format such as ".2f", or a text; empty for None."""
    return "" if value is None else f"{value:{form}}"


# A column of a table: its heading, a row's key, or what makes the cell of a row, and how numbers
# are written.
Column = tuple[str, str | Callable[[Row], object]] | tuple[str, str, str]


def table_of(rows: Sequence[Row], title: str, *columns: Column) -> Table:
    """A line a row. What a row lacks is an empty cell."""

    def cell_of(row: Row, what: Any, form: str = "") -> object:
        return cell(row.get(what), form) if isinstance(what, str) else what(row)

    cells = [[cell_of(row, *column[1:]) for column in columns] for row in rows]
    return Table([column[0] for column in columns], cells, title)


def sizes(rows: Sequence[Row]) -> Column:
    """The column of the sizes of rows; short where all are cubes."""
    if all(row["m"] == row["n"] == row["k"] for row in rows):
        return "m = n = k", "m"
    return "m x n x k", "{m} x {n} x {k}".format_map


def parameters(row: Row) -> str:
    """A row's kernel parameters: "BM=128 BN=64"."""
    return " ".join(f"{name}={value}" for name, value in row["params"].items())


# --- products on a device -------------------------------------------------------------------


def open_device(asked: str) -> tuple[Device, str]:
    """The device of this kind (of several GPUs the first), and a sentence that says which it is
    where `asked` left that open ("auto"). Raises `UsageError` and `UnavailableError`."""
    kind, why = devices.choose(asked)
    return devices.open_first(kind), f"device: {kind} ({why})" if why else ""


def check_memory(shapes: Iterable[Shape], bytes_each: int, *, on_gpu: bool = False) -> None:
    """Raises `OutOfMemoryError` where a product does not fit in the host's memory: A, B and C with
    so many bytes an element, or, for a GPU, the larger of A and B, which are made one by one."""
    have = memory_available()
    for m, n, k in shapes:
        need = bytes_each * (max(m * k, k * n) if on_gpu else m * k + k * n + m * n)
        if need > have:
            raise OutOfMemoryError(
                f"{m} x {n} x {k} needs {in_words(need)} of host memory and {in_words(have)} is "
                "available; give smaller --shapes"
            )


def tensor_core_kernel(
    arithmetic: compute_modes.Arithmetic, device: Device, problem: Problem, layout: str
) -> Variant:
    """Our kernel for a problem that goes to tensor cores, for C of the problem's dtype."""
    size = ITEM_SIZE[problem.out_dtype]
    machine = device.machine(problem.dtype)
    if machine and (found := on_gpu.own_on_tensor_cores(machine, problem, layout)):
        return compute_modes.with_out(found.variant, size)
    return arithmetic.variant_for(problem, device.processors, size)


def upload(device: Device, host: np.ndarray, stream: Stream) -> Array:
    """A host matrix copied into new memory of the device, row-major; waits for the copy."""
    rows, cols = host.shape
    there = device.empty(rows, cols, host.dtype.name)
    device.copy(there, host, stream)
    stream.synchronize()
    return there


def drawn_on_host(
    m: int, n: int, k: int, dtype: str, seed: int, fill: str = "normal"
) -> tuple[np.ndarray, np.ndarray]:
    """A (m x k) and B (k x n) from a seed."""
    a, b = (
        generator.generate(*shape, dtype, seed=seed, operand=x, fill=fill, threads=cores())
        for x, shape in (("A", (m, k)), ("B", (k, n)))
    )
    return a, b


Draw = Callable[..., Array]  # operand, rows, cols, fill, dtype -> a new matrix


def drawing_on(device: Device, stream: Stream, seed: int) -> Draw:
    """What draws matrices from a seed and puts them on a device."""

    def draw(
        operand: str, rows: int, cols: int, fill: str = "normal", dtype: str = "float32"
    ) -> Array:
        host = generator.generate(
            rows, cols, dtype, seed=seed, operand=operand, fill=fill, threads=cores()
        )
        return upload(device, host, stream)

    return draw


def unwrite(c: Array) -> None:
    """Fills C with NaN (integers: -2^30), so that an element that is not written shows."""
    c[...] = np.nan if is_float(c.dtype) else -(2**30)


def multiply_once(
    device: Device, variant: Variant, problem: Problem, operands: tuple[Array, Array, Array],
    stream: Stream,
) -> str:  # fmt: skip
    """c = a @ b for `operands` (a, b, c) on the device; returns in words which arithmetic ran.

    Waits for the product. Raises `HybridGemmError` where the kernel does not run.
    """
    a, b, c = operands
    unwrite(c)
    before = _ways_taken(device, problem)
    device.gemm(variant, a, b, c, alpha=1, beta=0, stream=stream)
    stream.synchronize()
    taken = _ways_taken(device, problem) - before
    return compute_modes.ran(variant, problem, taken.tolist())


def elapsed_ms(device: Device, stream: Stream, work: Callable[[], None]) -> float:
    """Milliseconds that the device takes for what `work` starts on a stream; waits for it."""
    device.start_clock()
    start = stream.record()
    work()
    stop = stream.record()
    stream.synchronize()
    return device.time_ms(stop) - device.time_ms(start)


def filling(sampler: Callable[[int], Callable[[], float]], device: Device) -> Callable[[], float]:
    """What takes a sample of so many calls that it lasts `SAMPLE_MS`, or of one where the device is
    no GPU. `sampler(count)` is what takes one of so many, in milliseconds a call."""
    once = sampler(1)
    if not device.on_gpu:
        return once
    once()
    return sampler(max(1, min(1000, int(SAMPLE_MS / max(once(), 1e-3)))))


def _ways_taken(device: Device, problem: Problem) -> np.ndarray:
    """How products whose arithmetic depends on the data came out so far."""
    if not isinstance(device, KernelDevice):
        return np.zeros(len(compute_modes.ways(problem)), int)
    return decisions.taken(device, problem)


def judged(
    problem: Problem, a: Array, b: Array, c: Array, before: Array | None = None,
    growth: float = 1.0,
) -> Row:  # fmt: skip
    """The verdict on C for op(A) `a`, op(B) `b` and C `before`, as columns of a row.

    "worst_error_of_bound" is the largest error as a fraction of what rounding may cause. `growth`
    is that of `verify`. Rows and vectors are drawn afresh.
    """
    found = verify(problem, a, b, before, c, growth=growth)
    assert found is not None  # only mode "off" gives no verdict
    return {"verdict": PASSED if found.passed else FAILED, "worst_error_of_bound": found.worst}
