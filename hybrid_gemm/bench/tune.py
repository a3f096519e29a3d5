"""What `hybrid-gemm tune` does: times kernels and links, and keeps the figures for later runs."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from .. import devices
from ..catalog import Variant
from ..devices.cuda.device import CudaDevice
from ..errors import UnavailableError
from ..host.resources import cores
from ..kernel_choice import on_gpu, tables, time_model
from ..planning import link_rates
from ..problem import Problem
from ..reporting import console, environment
from . import links
from .kernels import ForEach, KernelStudy
from .study import Note, Progress, Row, Shape, parameters, run, sizes, table_of

MOST_COPYING = 64  # threads whose copies are timed, on hosts with more cores


def kernels(
    shapes: Sequence[Shape], *, dtypes: Sequence[str], layouts: Sequence[str],
    samples: int, quick: bool, output: str | None, progress: Progress | None, note: Note,
) -> dict[str, Any]:  # fmt: skip
    """Times the variants worth it at each shape on GPU 0, and keeps the table for its model.

    With `quick`, times only the kernels that are predicted as fastest, ours and libraries'. The
    table goes to the user's cache, or to the file `output`.
    Returns the study's result and the file's path as "table". Raises `UsageError` if that file is
    no table.
    """
    gpu = open_gpus([0])[0]
    path = table_file(gpu.model, output)
    study = KernelStudy(
        worth_timing(gpu, quick), shapes, device="cuda",
        dtypes=dtypes, layouts=layouts, samples=samples,
    )  # fmt: skip
    data = run(study, progress=progress, note=note)
    keep(path, data)
    return {**data, "table": str(path)}


def worth_timing(gpu: CudaDevice, quick: bool) -> ForEach:
    """The variants to time at a problem and layout on this GPU, as a function of these."""

    def variants(problem: Problem, layout: str) -> list[Variant]:
        machine = gpu.machine(problem.dtype)
        if not quick:
            return time_model.worth_timing(machine, problem)
        leading = [on_gpu.strict(machine, problem, layout, own=own)[0] for own in (False, True)]
        libraries = [v for v in time_model.candidates(machine, problem) if v.kernel.library]
        return list(dict.fromkeys([*libraries, *leading]))

    return variants


def table_file(model: str, output: str | None = None) -> Path:
    """Where the table of measured times for a GPU model is: the user's, or the file `output`.

    Raises `UsageError` if the file is there and is no table.
    """
    path = Path(output) if output else tables.user_table(model)
    tables.read_rows(path)
    return path


def keep(path: Path, data: Mapping[str, Any]) -> None:
    """Writes a study's times into a table, whose rows of other shapes, dtypes and layouts stay."""
    new = tables.compact(data["rows"])
    measured = set(map(tables.case, new))
    older = [r for r in tables.read_rows(path) if tables.case(r) not in measured]
    kept = {
        "device": data["device"], "rows": older + new, "environment": environment.environment(),
    }  # fmt: skip
    console.write(str(path), tables.as_text(kept))
    on_gpu.forget()


def need_gpu(device: str, what: str) -> None:
    """Raises `UnavailableError`, which begins with `what`, if `device` ("auto", ...) is no GPU."""
    kind, why = devices.choose(device)
    if not devices.are_gpus(kind):
        raise UnavailableError(f"{what}, and the device is {kind}" + (f" ({why})" if why else ""))


def open_gpus(ordinals: Sequence[int] | None) -> list[CudaDevice]:
    """These GPUs of the host, or all of them."""
    opened = devices.open_devices("cuda", 1, gpus=ordinals)
    return cast(list[CudaDevice], opened)  # what devices of that kind are


def host_links(
    *, device: str, gpus: Sequence[int] | None, progress: Progress, note: Note
) -> dict[str, Any]:
    """Measures the links between this host and its GPUs, and keeps the figures.

    `gpus` are ordinals, by default all. Returns them as plain data, with the file's path as
    "table". Raises `UnavailableError` without a GPU.
    """
    need_gpu(device, "links are those of GPUs")
    from ..devices.cuda.device import uuids
    from ..devices.cuda.pinned_memory import empty_pinned

    opened = open_gpus(gpus)
    note(f"timing copies between this host and {len(opened)} GPUs")
    threads = [x for x in link_rates.counts(cores()) if x <= MOST_COPYING]
    data = {
        "host": platform.node(), "gpus": [d.describe() for d in opened], "cores": cores(),
        **links.measure(opened, empty_pinned, threads, progress),
    }  # fmt: skip
    path = link_rates.path(uuids())
    console.write(str(path), console.as_json(data) + "\n")
    link_rates.forget()
    return {**data, "table": str(path)}


def know_links(*, device: str, progress: Progress, note: Note) -> None:
    """Measures the links of a host with GPUs, unless that was done before."""
    if devices.choose(device)[0] == "cuda":
        from ..devices.cuda.device import uuids

        if link_rates.known(uuids()) is None:
            host_links(device=device, gpus=None, progress=progress, note=note)


def print_links(data: Mapping[str, Any]) -> None:
    """What `host_links` measured, as tables on stdout."""

    def gbps(link: str, memory: str, **wanted: int) -> str:
        sought = {"link": link, "memory": memory, **wanted}
        found = [r["gbps"] for r in data["rows"] if sought.items() <= r.items()]
        return f"{found[0]:.1f}" if found else ""

    kinds = [
        ("h2d", "pinned"), ("d2h", "pinned"), ("both", "pinned"), ("h2d", "pageable"),
        ("d2h", "pageable"), ("ring", "device"),
    ]  # fmt: skip
    counts = link_rates.counts(len(data["gpus"]))
    console.table(
        ["GPUs together", "pinned to device", "to host", "both ways", "pageable to device",
         "to host", "each to the next"],
        [[n, *(gbps(link, memory, at_once=n) for link, memory in kinds)] for n in counts],
        title=f"GB/s in all, {data['gpus'][0].split(' ', 1)[1]}",
    )  # fmt: skip
    console.line("")
    console.table(
        ["GPUs together", "to device", "to host", "both ways"],
        [[n, *(gbps(link, "staged", at_once=n) for link in ("h2d", "d2h", "both"))]
         for n in counts],
        title="GB/s in all, ordinary arrays through page-locked slots",
    )  # fmt: skip
    ends = sorted({r["from"] for r in data["rows"] if r["link"] == "peer"})
    if ends:
        console.line("")
        console.table(
            ["from GPU", *(f"to {j}" for j in ends)],
            [[i, *(gbps("peer", "device", **{"from": i, "to": j}) for j in ends)] for i in ends],
            title="GB/s, one pair of GPUs at a time",
        )
    console.line("")
    copied = [[r["at_once"], f"{r['gbps']:.1f}"] for r in data["rows"] if r["link"] == "memcpy"]
    console.table(["threads", "GB/s"], copied, title="Copies on the host, into page-locked memory")
    console.line(f"kept in {data['table']}")


def print_kernels(data: Mapping[str, Any]) -> None:
    """What `kernels` measured: the fastest kernel of each shape, and ours beside cuBLAS."""
    measured = [row for row in data["rows"] if row["time_ms"]]
    cases: dict[tuple, list[Row]] = {}
    for row in measured:
        cases.setdefault(tables.case(row), []).append(row)
    rows = []
    for timed in cases.values():
        fastest, *others = sorted(timed, key=lambda r: r["time_ms"])
        no_time = fastest | {"time_ms": None, "ratio_to_cublas": None, "params": {}}
        ours = (r for r in (fastest, *others) if r["kernel"] != "cublas")
        rows.append(next(ours, no_time) | {"fastest": fastest["kernel"]})
    table = table_of(
        rows, data["device"]["name"], sizes(measured), ("<layout", "layout"), ("<dtype", "dtype"),
        ("<fastest", "fastest"), ("our best ms", "time_ms", ".4g"),
        ("of cuBLAS", "ratio_to_cublas", ".3f"), ("<its parameters", parameters),
    )  # fmt: skip
    console.table(table.headings, table.rows, title=table.title)
    console.line(f"kept in {data['table']}")
