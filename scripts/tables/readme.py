"""The tables of README."""

from . import calls, grid, kernel_rows, paragraphs, result

WAYS = {"ours": "hybrid-gemm", "cublasxt": "cuBLASXt, best settings"}
MEMORIES = {"pageable": "pageable", "pinned": "page-locked"}
COUNTS = (1, 2, 4)  # GPUs


def libraries() -> str:
    """Whole products on several GPUs, at the largest size of each number; the picture has one."""
    table = []
    for count in COUNTS[1:]:
        rows = result(f"peers{count}")["rows"]
        side = max(row["m"] for row in rows)
        for memory, name in MEMORIES.items():
            found = [r for r in rows if (r["m"], r["memory"], r["c"]) == (side, memory, "given")]
            ms = {r["way"]: r["time_ms"] for r in found}
            table.append([count, side, name, *(f"{ms[way]:.0f}" for way in WAYS)])
    return paragraphs(
        grid(["H200s", "m = n = k", "<arrays", *WAYS.values()], table),
        f"Both: from host arrays into a given C, float32, medians in ms; {versions()} "
        "([more](docs/gpus.md#beside-other-libraries)).",
    )


def versions() -> str:
    """Of this package, by number of GPUs, and of those beside it."""
    found = {count: result(f"peers{count}")["environment"] for count in COUNTS}
    gpus: dict[str, list[str]] = {}
    for count, environment in found.items():
        gpus.setdefault(environment["hybrid_gemm"], []).append(str(count))
    own = ", ".join(
        version + (f" on {' and '.join(x)}" if len(gpus) > 1 else "") for version, x in gpus.items()
    )
    number, packages = found[1]["cuda"]["cublas"], found[1]["packages"]
    return (
        f"hybrid-gemm {own}, cuBLAS {number // 10000}.{number // 100 % 100}, "
        f"CuPy {packages['cupy-cuda13x']}, PyTorch {packages['torch']}"
    )


def one_gpu() -> str:
    """What is gained on one GPU: float32 on tensor cores, and a last layer of odd sides."""
    square = {"m": 8192, "n": 8192, "k": 8192, "layout": "nn", "dtype": "float32"}
    fp32x3 = [r for r in kernel_rows("fp32x3") if square.items() <= r.items()]
    ours, theirs = (
        max(r["gflops"] for r in fp32x3 if (r["kernel"] == "cublas") == of_cublas) / 1e3
        for of_cublas in (False, True)
    )
    return (
        f'`compute="fp32x3"`, on most data as accurate as float32, makes {ours:.0f} TFLOP/s on '
        f"an H200, where cuBLAS's float32 makes {theirs:.0f} ([choosing](docs/choosing.md)). "
        f"{calls.last_layer()}"
    )
