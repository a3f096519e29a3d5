"""The tables of README."""

from . import grid, paragraphs, result

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
        f"Both: medians in ms, float32, into a given C; {versions()} "
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
