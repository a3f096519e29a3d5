"""Result files of the scripts that measure: with several studies, or rows of GPU 0."""

import json
from pathlib import Path

from hybrid_gemm.reporting.environment import environment


def write(out: str, rows: list[dict], **known: object) -> None:
    """Rows, environment, and what else is `known`; other studies that the file has stay."""
    path, studies = Path(out), {row["study"] for row in rows}
    old = json.loads(path.read_text()) if path.is_file() else {"rows": []}
    kept = [row for row in old["rows"] if row["study"] not in studies]
    data = {**old, "rows": kept + rows, **known, "environment": environment()}
    path.write_text(json.dumps(data, indent=1) + "\n")


def write_of_gpu(out: str, rows: list[dict], **packages: str) -> None:
    """Rows measured on GPU 0 with its name, how many GPUs there are, and the environment, with the
    versions of other `packages`."""
    import cupy

    runtime = cupy.cuda.runtime
    name = runtime.getDeviceProperties(0)["name"].decode()
    data = {
        "device": {"name": name, "count": runtime.getDeviceCount()},
        "environment": {**environment(), **packages}, "rows": rows,
    }  # fmt: skip
    Path(out).write_text(json.dumps(data, indent=1) + "\n")
