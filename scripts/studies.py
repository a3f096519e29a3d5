"""Result files with several studies, for measure-gpus and measure-host."""

import json
from pathlib import Path

from hybrid_gemm.reporting.environment import environment


def write(out: str, rows: list[dict]) -> None:
    """Rows and environment; other studies that the file has stay."""
    path, studies = Path(out), {row["study"] for row in rows}
    old = json.loads(path.read_text())["rows"] if path.is_file() else []
    kept = [row for row in old if row["study"] not in studies]
    data = {"rows": kept + rows, "environment": environment()}
    path.write_text(json.dumps(data, indent=1) + "\n")
