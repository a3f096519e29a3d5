"""What `hybrid-gemm tune` does: times kernels and links, and keeps the figures."""

from __future__ import annotations

import platform
from pathlib import Path

from .. import devices
from ..errors import UnavailableError
from ..host.resources import cores
from ..kernel_choice import nearest_measured, tables, time_model
from ..planning import link_rates
from ..problem import Problem
from ..reporting import console, environment
from . import kernels as kernel_study
from . import libraries, links

MOST_COPYING = 64  # threads, on hosts with more cores
SHAPES = [
    *((n, n, n) for n in (128, 256, 512, 768, 1000, 1024, 1536, 2048, 3072, 4096, 6144, 8192)),
    (16384, 16384, 16384), (4097, 4099, 4101), (16, 8192, 8192), (1, 8192, 8192), (8192, 1, 8192),
    (8192, 64, 8192), (64, 8192, 8192), (64, 64, 2**20), (128, 128, 2**18), (512, 512, 2**18),
    (8192, 8192, 64), (8192, 8192, 256), (256, 8192, 8192), (8192, 256, 8192),
    *(
        (m, n, k)
        for wide, k in ((8192, 8192), (3000, 5000))
        for thin in (2, 3, 4, 5, 6, 7, 8)
        for m, n in ((thin, wide), (wide, thin))
    ),
]  # fmt: skip


def kernels(
    *, device: str, dtypes, layouts, shapes, samples: int, quick: bool, output: str | None,
    progress, note,
) -> dict:  # fmt: skip
    """Times the variants worth it at each shape, and keeps the table for this GPU model.

    With `quick`, only what the tables there are say is fastest, of ours and with the library.
    The table goes to the user's cache, or to `output`, and keeps what it has of other shapes,
    dtypes and layouts. Raises `UnavailableError` where there is no GPU, for elsewhere there is
    nothing to choose between, and `UsageError` if that file is no table.
    """
    _check(device, "tuning is for GPUs")
    (gpu,) = devices.open_devices("cuda", 1, gpus=[0])
    path = Path(output) if output else tables.user_table(gpu.model)
    older = tables.read_rows(path)

    def worth_timing(problem: Problem, layout: str):
        machine = gpu.machine(problem.dtype)
        if not quick:
            return time_model.worth_timing(machine, problem)
        leading = [
            nearest_measured.choose(machine, problem, layout, own=own)[0] for own in (False, True)
        ]
        libraries = [v for v in time_model.candidates(machine, problem) if v.kernel.library]
        return list(dict.fromkeys([*libraries, *leading]))

    data = kernel_study.run(
        worth_timing, shapes or [*SHAPES, *kernel_study.SERIES["published"]], device="cuda",
        dtypes=dtypes, layouts=layouts, samples=samples, progress=progress, note=note,
    )  # fmt: skip
    new = tables.compact(data["rows"])
    measured = set(map(tables.case, new))
    kept = {
        "device": data["device"],
        "rows": [r for r in older if tables.case(r) not in measured] + new,
        "environment": environment.environment(),
    }
    console.write(str(path), tables.as_text(kept))
    nearest_measured.forget()
    return {**data, "table": str(path)}


def _check(device: str, what: str) -> None:
    kind, why = devices.choose(device)
    if kind != "cuda":
        raise UnavailableError(f"{what}, and the device is {kind}" + (f" ({why})" if why else ""))


def host_links(*, device: str, gpus, progress, note) -> dict:
    """Measures this host's links and keeps the figures; `UnavailableError` without a GPU."""
    _check(device, "links are those of GPUs")
    from ..devices.cuda.device import uuids
    from ..devices.cuda.pinned_memory import empty_pinned

    opened = devices.open_devices("cuda", 1, gpus=gpus)
    note(f"timing copies between this host and {len(opened)} GPUs")
    threads = [x for x in link_rates.counts(cores()) if x <= MOST_COPYING]
    total = (
        6 * len(link_rates.counts(len(opened))) - 1 + len(opened) * (len(opened) - 1) + len(threads)
    )
    data = {
        "host": platform.node(), "gpus": [d.describe() for d in opened], "cores": cores(),
        **links.measure(opened, empty_pinned, threads, progress(total, "timing")),
    }  # fmt: skip
    path = link_rates.path(uuids())
    console.write(str(path), console.as_json(data) + "\n")
    link_rates.forget()
    return {**data, "table": str(path)}


def bench_peers(shapes, *, device: str, progress, note, **options) -> dict:
    """As `libraries.run`; measures the host's links first, unless that was done."""
    kind, _why = devices.choose(device)
    if kind == "cuda":
        from ..devices.cuda.device import uuids

        if link_rates.known(uuids()) is None:
            host_links(device=device, gpus=None, progress=progress, note=note)
    return libraries.run(shapes, device=device, progress=progress, note=note, **options)


def print_links(data: dict) -> None:
    def gbps(link, memory, **wanted):
        wanted |= {"link": link, "memory": memory}
        found = [r["gbps"] for r in data["rows"] if wanted.items() <= r.items()]
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
    ends = sorted({r["from"] for r in data["rows"] if r["link"] == "peer"})
    if ends:
        console.table(
            ["from GPU", *(f"to {j}" for j in ends)],
            [[i, *(gbps("peer", "device", **{"from": i, "to": j}) for j in ends)] for i in ends],
            title="\nGB/s, one pair of GPUs at a time",
        )
    copied = [[r["at_once"], f"{r['gbps']:.1f}"] for r in data["rows"] if r["link"] == "memcpy"]
    console.table(
        ["threads", "GB/s"], copied, title="\nCopies on the host, into page-locked memory"
    )
    console.console.print(f"kept in {data['table']}")


def print_kernels(data: dict) -> None:
    """The fastest kernel of each shape, and of our own, beside cuBLAS."""
    cases = {}
    for row in data["rows"]:
        if row["time_ms"]:
            key = row["m"], row["n"], row["k"], row["layout"], row["dtype"]
            cases.setdefault(key, []).append(row)
    rows = []
    for (m, n, k, layout, dtype), timed in cases.items():
        best = min(timed, key=lambda r: r["time_ms"])
        own = [r for r in timed if r["kernel"] != "cublas"]
        ours = [""] * 3
        if own:
            fastest = min(own, key=lambda r: r["time_ms"])
            ratio = fastest["ratio_to_cublas"]
            ours = [
                f"{fastest['time_ms']:.4g}",
                f"{ratio:.3f}" if ratio else "",
                " ".join(f"{x}={v}" for x, v in fastest["params"].items()),
            ]
        rows.append([f"{m} x {n} x {k}", layout, dtype, best["kernel"], *ours])
    console.table(
        ["m x n x k", "<layout", "<dtype", "<fastest", "our best ms", "of cuBLAS",
         "<its parameters"],
        rows, title=data["device"]["name"],
    )  # fmt: skip
    console.console.print(f"kept in {data['table']}")
