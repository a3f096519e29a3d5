"""What `refit-models time` does: times kernels and libraries at shapes, on GPU 0."""

import dataclasses
import gc
import gzip
import json
import random
import time

from hybrid_gemm import catalog
from hybrid_gemm.bench import drawing, heldout, tune
from hybrid_gemm.bench.drawing import Drawn
from hybrid_gemm.kernel_choice import fitted, model_files
from hybrid_gemm.reporting import console, environment

from . import MOST_DRAWN, TIMES, drawn

# What products of these need compiled is what those of drawn shapes do.
SHAPES = [
    (512, 512, 200), (512, 512, 512), (513, 511, 515), (1536, 1536, 1536), (3001, 3003, 3005),
    (64, 64, 2**16), (1, 512, 512), (512, 1, 512), (1, 1, 2**16), (2**16, 1, 4),
]  # fmt: skip
LIBRARY_SEED = 700  # below 1000, as all that models are fitted to
MOST_BYTES = 1 << 30  # of A, B and C: what variants pack of them lies beside them
MOST_LARGE_BYTES = 8 << 30  # the same of large products
OF_LINES = ["gemv", "gemv_narrow", "vector"]  # kernels that are worth compiling at once for these
NEARLY = 1.3  # times the fastest predicted time, below which a variant is timed at drawn shapes,
NEARLY_NEW = 4.0  # of classes of which there were few before
NEARLY_LARGE = 1.1  # of large products, of which each takes long
SAMPLE_MS, TURNS = 0.4, 3  # by so many samples, so long: more shapes tell more than longer samples


def time_again(
    kernels: list[str], modes: list[str], seconds: float, library: float, seed: int | None,
    classes: tuple[str, ...], file: str,
) -> None:  # fmt: skip
    """What `time` does."""
    (gpu,) = tune.open_gpus([0])
    benches = {mode: heldout.Bench(gpu, mode) for mode in modes}
    results = json.loads(gzip.decompress(TIMES.read_bytes()))["modes"]
    data = {"kernels": kernels, "seed": seed, "environment": environment.environment(),
            "machine": dataclasses.asdict(gpu.machine("float32")),
            "modes": {x: {"variants": [], "rows": [], "library": []} for x in modes}}  # fmt: skip
    began = time.monotonic()
    for mode, rows in time_library(benches, results, began + library).items():
        data["modes"][mode]["library"] = rows
    compile_all(gpu, benches, OF_LINES if classes == (drawing.LINE,) else kernels)
    if seed is None:
        found = time_kernels(benches, results, kernels, began + seconds)
    else:
        found, launches = time_drawn(benches, seed, classes, began + seconds)
        for mode, rows in launches.items():
            data["modes"][mode]["library"] += rows
    for mode, rows in found.items():
        names = list(dict.fromkeys(str(v) for _each, times in rows for v in times))
        data["modes"][mode] |= {"variants": names, "rows": [
            [*each.shape, each.layout, each.kind,
             [round(us[x], 3) if x in us else None for x in names]]
            for each, times in rows
            for us in [{str(v): us for v, us in times.items()}]
        ]}  # fmt: skip
        alone = len(data["modes"][mode]["library"])
        print(f"{mode}: {len(rows)} shapes, {len(names)} variants; the library alone at {alone}")
    console.write(file, json.dumps(data, separators=(",", ":")) + "\n")


def candidates(bench: heldout.Bench, kernels: list[str], shape: tuple) -> list:
    """The variants of the kernels in a bench's mode, and the library."""
    return [
        v
        for v in bench.candidates(bench.problem(shape))
        if v.name in kernels or kernels == ["all"] or v.kernel.library
    ]


def nearly_fastest(bench: heldout.Bench, each: Drawn) -> list:
    """The variants that a model of the mode predicts to be nearly the fastest at a shape, or does
    not know; and the library."""
    dtype, mode = fitted.OPERANDS[bench.mode], bench.mode
    machine = bench.device.machine(dtype.replace("float16", "float32"))
    known = model_files.model(machine, mode)
    times = known.times_us(each.shape, each.layout, machine) if known else {}
    of_model = {x.variant for x in known.fitted} if known else set()
    of_kind = {drawing.LONG: NEARLY_NEW, drawing.TINY: NEARLY_NEW, drawing.LARGE: NEARLY_LARGE}
    nearly = of_kind.get(each.kind, NEARLY)
    limit = nearly * min((us for v, us in times.items() if not v.kernel.library), default=0)
    return [
        v
        for v in bench.candidates(bench.problem(each.shape))
        if v.kernel.library or v not in of_model or times.get(v, 0) <= limit
    ]


def compile_all(gpu, benches: dict, kernels: list[str]) -> None:
    """Compiles what the kernels need in all modes."""
    gpu.compile_all({
        kernel: None
        for bench in benches.values()
        for shape in SHAPES
        for variant in candidates(bench, kernels, shape)
        if not variant.kernel.library
        for layout in catalog.LAYOUTS
        for kernel in bench._kernels(variant, shape, layout)
    })  # fmt: skip


def time_library(benches: dict, results: dict, until: float) -> dict[str, list]:
    """The library's times and launches by mode, as rows, until a time is reached."""
    modes = [mode for mode, bench in benches.items() if bench.library]
    todo = {
        mode: iter([*map(drawn, results[mode]["rows"]),
                    *drawing.draw(LIBRARY_SEED + i, 10_000, drawing.FITTED)])
        for i, mode in enumerate(modes)
    }  # fmt: skip
    found: dict[str, list] = {mode: [] for mode in modes}
    while modes and time.monotonic() < until:
        for mode in list(modes):
            each, bench = next(todo[mode], None), benches[mode]
            if each is None:
                modes.remove(mode)
                continue
            launched = bench.launched(each)
            with bench.operands(each) as arrays:
                us = bench.times_us([bench.library], *arrays)[bench.library]
            if launched:
                row = [*each.shape, each.layout, each.kind, dataclasses.astuple(launched)]
                found[mode].append([*row, round(us, 3)])
    return found


def time_kernels(benches: dict, results: dict, kernels: list[str], until: float) -> dict[str, list]:
    """Shapes with the times of variants, by mode, until a time is reached."""
    orders = {}
    for mode, bench in benches.items():
        names = {str(v) for v in candidates(bench, kernels, (512, 512, 512))}
        listed = results[mode]["variants"]
        columns = [listed.index(x) for x in names if x in listed]
        rows = [
            row for row in results[mode]["rows"]
            if not all(v.kernel.library for v in candidates(bench, kernels, drawn(row).shape))
        ]  # fmt: skip
        random.Random(1).shuffle(rows)
        orders[mode] = sorted(rows, key=lambda row: sum(row[5][i] is None for i in columns))
    found: dict[str, list] = {mode: [] for mode in benches}
    spent = dict.fromkeys(benches, 0.0)
    while time.monotonic() < until and any(orders.values()):
        mode = min((x for x in benches if orders[x]), key=spent.__getitem__)
        each, bench = drawn(orders[mode].pop()), benches[mode]
        began = time.monotonic()
        with bench.operands(each) as arrays:
            found[mode].append((each, bench.times_us(
                candidates(bench, kernels, each.shape), *arrays
            )))  # fmt: skip
        spent[mode] += time.monotonic() - began
    return found


def time_drawn(
    benches: dict, seed: int, classes: tuple[str, ...], until: float
) -> tuple[dict[str, list], dict[str, list]]:
    """As `time_kernels`, at shapes drawn from a seed; and rows as of `time_library`."""
    found: dict[str, list] = {mode: [] for mode in benches}
    launches: dict[str, list] = {mode: [] for mode in benches}
    for each in drawing.draw(seed, MOST_DRAWN, classes):
        m, n, k = each.shape
        most = MOST_LARGE_BYTES if each.kind == drawing.LARGE else MOST_BYTES
        if 4 * (m * k + k * n + m * n) > most:
            continue
        for mode, bench in benches.items():
            gc.collect()  # graphs, and after a lack of memory what was traced back
            bench.device.free_unused()
            bench.device.cp.get_default_memory_pool().free_all_blocks()
            launched = bench.launched(each)
            try:
                with bench.operands(each) as arrays:
                    times = bench.times_us(
                        nearly_fastest(bench, each), *arrays, sample_ms=SAMPLE_MS, turns=TURNS
                    )
            except MemoryError:
                continue
            if not times or bench.library not in (None, *times):
                continue
            found[mode].append((each, times))
            if launched:
                row = [*each.shape, each.layout, each.kind, dataclasses.astuple(launched)]
                launches[mode].append([*row, round(times[bench.library], 3)])
        if time.monotonic() > until:
            break
    return found, launches
