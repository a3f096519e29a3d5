"""Result files with several studies, for measure-gpus and measure-host."""

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
